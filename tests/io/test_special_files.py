"""What is no file in place of each input of each command: exit 2, one line, no waiting."""

import json
import os
import shutil
import signal
from pathlib import Path
from types import FrameType

import pytest
import torch
from PIL import Image

from fullstride import cli
from fullstride.io.writing import allow_open_files
from fullstride.latency.devices import MEASURED
from fullstride.nets import zoo

SETTINGS = "--model genet_tiny --device cpu --epochs 1 --batch-size 16 --resolution 8"
SETTINGS += " --recipe.warmup-epochs 0"
PICTURE = "data/a/1.png"
# input -> the commands that read it
READERS = {
    "run/bundle/bundle.json": ["validate run", f"predict run {PICTURE}", "report run --out p.html"],
    "run/bundle/weights.safetensors": ["validate run", "study rank run", "export run --out n.onnx"],
    "run/run.json": ["validate run", "report run --out p.html", f"train data --out run {SETTINGS}"],
    "run/log.jsonl": ["report run --out p.html", f"train data --out run {SETTINGS}"],
    "run/checkpoint.pt": [f"train data --out run {SETTINGS}"],
    "run": ["validate run", f"predict run {PICTURE}", f"train data --out run {SETTINGS}"],
    "net.onnx": [f"predict net.onnx {PICTURE}", "bench net.onnx"],
    "openvino/model.xml": [f"predict openvino {PICTURE}"],
    "openvino/model.bin": [f"predict openvino {PICTURE}"],
    "net.pt2": [f"predict net.pt2 {PICTURE} --trust"],
    "shards/index.json": [f"train shards --out new {SETTINGS}", "data pack shards again"],
    "shards/train-000000.tar": [f"train shards --out new {SETTINGS}"],
    "table.csv": [f"train table.csv --out new {SETTINGS}", "data pack table.csv again"],
    "data": [f"train data --out new {SETTINGS}", "data pack data again"],
    "accuracies.csv": ["choose --target rtx3090 --budget-ms 5 --from accuracies.csv"],
    "weights.pth": [
        "measure cost weights.pth",
        "validate weights.pth --data data",
        "bench weights.pth",
    ],
    "profile.json": ["measure estimate resnet18 --target profile.json"],
    "recipe.json": ["train data --out new --model genet_tiny --recipe recipe.json"],
    "bench.json": [
        "report run --out p.html --bench bench.json",
        "study figures --bench bench.json",
    ],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("inputs")
    for name in "ab":
        for number in range(12):
            path = root / "data" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (20 * number, ord(name), 0)).save(path)
    rows = [f"data/{name}/{number}.png,{name}" for name in "ab" for number in range(12)]
    (root / "table.csv").write_text("\n".join(["path,label", *rows]))
    (root / "openvino").mkdir()
    for name in ("net.onnx", "net.pt2", "openvino/model.xml", "openvino/model.bin"):
        (root / name).touch()  # what is beside the special file is not reached
    torch.save(zoo.create("genet_tiny").state_dict(), root / "weights.pth")
    shutil.copy(str(MEASURED / "rtx3090.json"), root / "profile.json")
    assert cli.run(["data", "pack", str(root / "data"), str(root / "shards")]) == 0
    words = [*SETTINGS.split(), "--out", str(root / "run")]
    assert cli.run(["train", str(root / "data"), *words]) == 0
    recipe = json.loads((root / "run" / "run.json").read_text())["recipe"]
    (root / "recipe.json").write_text(json.dumps(recipe))
    return root


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def give_up(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("it waits")


@pytest.mark.parametrize(
    "make",
    [fifo, pytest.param(endless, marks=pytest.mark.slow), loop],
    ids=["fifo", "zero", "loop"],
)
@pytest.mark.parametrize("name", READERS)
def test_a_special_file_in_place_of_an_input_is_one_line(
    make, name, inputs, tmp_path, monkeypatch, capsys
):
    shutil.copytree(inputs, tmp_path / "inputs")
    monkeypatch.chdir(tmp_path / "inputs")
    path = Path(name)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)
    if name == "run/checkpoint.pt":
        shutil.rmtree("run/bundle")
    before = signal.signal(signal.SIGALRM, give_up)
    try:
        for command in READERS[name]:
            signal.alarm(60)
            code = cli.run(command.split())
            error = capsys.readouterr().err
            assert code == 2, (command, error)
            assert len(error.splitlines()) == 1, (command, error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not Path("new").exists(), "a refused command leaves nothing"


def test_fewer_open_files_than_workers_need_are_refused_before_they_start(monkeypatch):
    import resource

    limits = [(8, 16)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    with pytest.raises(OSError, match="Too many open files"):
        allow_open_files(100)
    assert cli.failure(OSError(24, "Too many open files"))[1] == 1
    limits.append((8, 4096))
    allow_open_files(100)
    assert 100 < limits[-1][0] <= 4096
    assert limits[-1][1] == 4096
