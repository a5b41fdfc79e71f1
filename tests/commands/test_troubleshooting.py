"""The lines of docs/troubleshooting.md are those that the package prints: each is provoked."""

import re
import shlex
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fullstride
from fullstride import cli
from fullstride.data.readers import videos
from fullstride.io import locks
from fullstride.nets.weights import hub
from fullstride.train import loop
from fullstride.train.recipes.choice import RunOptions

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
MESSAGES = re.findall(r"^\| `(.*?)` \| .+ \| .+ \|$", PAGE.read_text(), re.MULTILINE)
TRAIN = "train photos --model genet_tiny --out new --device cpu"
FIT = "fit photos --out fits --weights none --device cpu --budget-ms"


@pytest.fixture(scope="module")
def folder(few_digits, tmp_path_factory):
    """Images, tables, files and a run that commands stumble over."""
    root = tmp_path_factory.mktemp("world")
    for name, count in (("photos/cat", 9), ("photos/dog", 9), ("one/cat", 3), ("flat", 2)):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.full((8, 8, 3), 20 * i + len(name), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    for name in ("cat", "dog"):
        shutil.copytree(root / "flat", root / "few" / name)
        (root / "broken" / name).mkdir(parents=True)
        for i in range(4):
            (root / "broken" / name / f"{i}.jpg").write_text(f"{name} {i}")
    (root / "few" / "cat" / "0.png").unlink()
    (root / "few" / "dog" / "1.png").unlink()
    (root / "empty").mkdir()
    (root / "table.csv").write_text("path,label\nphotos/cat/0.png,cat\nphotos/dog/99.png,dog\n")
    (root / "kinds.csv").write_text("path,kind\nphotos/cat/0.png,cat\n")
    (root / "parquet").mkdir()
    (root / "parquet" / "train.parquet").touch()
    (root / "half.pth").write_bytes(b"PK\3\4 half")
    (root / "text.pth").write_text("{")
    (root / "cut.onnx").write_bytes(b"\x08\x0a cut")
    (root / "mine.onnx").write_text("mine")
    (root / "notes").mkdir()
    (root / "notes" / "a.txt").touch()
    options = dict(options=RunOptions(), steps=2, resolution=16)
    fullstride.train_network(few_digits, "genet_tiny", root / "run", **options)
    (root / "begun").mkdir()
    shutil.copy(root / "run" / "run.json", root / "begun")
    return root


Change = Callable[[pytest.MonkeyPatch], object]


def lacks(package: str) -> Change:
    return lambda patch: patch.setitem(sys.modules, package, None)


def fails(error: Exception) -> Change:
    """A training that ends with an error before its first step."""

    def fail(*_: Any) -> None:
        raise error

    return lambda patch: patch.setattr(loop, "build_optimizer", fail)


def zoo_fails(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(cli.COMMANDS, "zoo", lambda: __import__("a_library"))


def offline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hub, "is_offline", lambda: True)
    patch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)


def decodes_a_video(patch: pytest.MonkeyPatch) -> None:
    lacks("av")(patch)
    patch.setitem(cli.COMMANDS, "zoo", videos.check_decoder)


def held(patch: pytest.MonkeyPatch) -> None:
    locks._acquire(Path("held") / locks.RUN_LOCK)


LONG = "train digits --model genet_tiny --device cpu --resolution 16"
# The beginning of a message on the page -> the command that ends with it, and what is changed
# before.
TRIGGERS: dict[str, str | tuple[str, Change]] = {
    "… is not installed": ("export run --out new.xml --format openvino", lacks("openvino")),
    "… could not be imported": ("zoo", zoo_fails),
    "decoder 'opencv'": (f"{TRAIN} --recipe.decoder opencv", lacks("cv2")),
    "files of predictions": ("predict run photos --out new", lacks("pyarrow")),
    "video files": ("zoo", decodes_a_video),
    "… needs the package datasets": (TRAIN.replace("photos", "parquet"), lacks("datasets")),
    "--tensorboard": (f"{TRAIN} --tensorboard", lacks("tensorboard")),
    "no command": "trian",
    "…Unrecognized": "train photos --modle genet_tiny --out new",
    "… and … are the same": f"{TRAIN} --batch-size 8 --recipe.batch-size 16",
    "… is not here": f"{TRAIN} --device cuda:99",
    "… works in": (TRAIN.replace("new", "held"), held),
    "too many open files": (TRAIN, fails(OSError(24, "Too many open files"))),
    "no folder": TRAIN.replace("photos", "photo"),
    "… has images but": TRAIN.replace("photos", "flat"),
    "… has no class folders": TRAIN.replace("photos", "empty"),
    "… has one class": TRAIN.replace("photos", "one"),
    "too few images": TRAIN.replace("photos", "few"),
    "… of the … files": TRAIN.replace("photos", "table.csv"),
    "… has no column": TRAIN.replace("photos", "kinds.csv"),
    "none of the … images": TRAIN.replace("photos", "broken"),
    "val …": f"{TRAIN} --val 100",
    "group …": f"{TRAIN} --group patient",
    "… has no boxes": f"{TRAIN} --task detect",
    "no network named": "measure cost tresnet_s",
    "timm has no network": "measure cost timm/resnet51",
    "huggingface.co/… cannot": (TRAIN.replace("genet_tiny", "tresnet_m --weights hub"), offline),
    "no released weights": f"{TRAIN} --weights hub",
    "… is a damaged": f"{TRAIN} --weights half.pth",
    "… is not a file of weights": f"{TRAIN} --weights text.pth",
    "… does not begin": f"{TRAIN.replace('genet_tiny', 'tresnet_tiny')} --weights run",
    "recipe.… fits": f"{TRAIN} --recipe.linear-probe",
    "no recipe named": f"{TRAIN} --recipe finetun",
    "… has another run": f"{LONG} --out run --lr 0.5",
    "… exists and is not": f"{LONG} --out notes",
    "the loss …": f"{LONG} --out nan --lr 1e9 --recipe.steps 3 --recipe.warmup-epochs 0",
    "out of memory": (TRAIN, fails(MemoryError())),
    "a process that decodes": (TRAIN, fails(RuntimeError("DataLoader worker (pid 7) is killed"))),
    "the time is too short": f"{TRAIN} --minutes 0.0001",
    "recipe.batch_size": f"{TRAIN} --batch-size 8 --recipe.grad-accum-steps 3",
    "No space left": (TRAIN, fails(OSError(28, "No space left on device", "new/run.json"))),
    "… is a run that": "validate begun",
    "no budget": "fit photos --out new",
    "nothing fits": f"{FIT} 1e-6 --candidates genet_tiny --resolutions 16 --target rtx4090",
    "no weights at": f"{FIT} 1 --weights nowhere",
    "… has no validation": f"{FIT} 1 --val 0",
    "… exists: use": "export run --out mine.onnx",
    "--out … does not": "export run --out new.xyz",
    "… in …: use": "export run --out new.onnx --precision bf16",
    "no images…": "predict run",
    "none of the images": "predict run broken",
    "… cannot be read": "predict cut.onnx photos",
    "no bundle.json": "validate notes",
    "… and …: …": "validate run --data photos",
    "target …": "measure target ssh://-x",
    "no connection": "measure target false",
    "no profile": "measure estimate genet_tiny --target rtx5090",
    "Ray is": (f"{FIT} 1 --executor ray", lacks("ray")),
    "there is no srun": f"{FIT} 1 --executor slurm",
    "--slurm-options": f"{FIT} 1 --slurm-options partition=gpu",
}


@pytest.mark.parametrize("beginning", TRIGGERS)
def test_a_line_of_the_page_is_what_the_command_prints(beginning, folder, monkeypatch, capsys):
    (message,) = [each for each in MESSAGES if each.startswith(beginning)]
    trigger = TRIGGERS[beginning]
    words, change = trigger if isinstance(trigger, tuple) else (trigger, None)
    if beginning == "there is no srun" and not find_spec("submitit"):
        pytest.skip("submitit is not installed")
    monkeypatch.chdir(folder)
    if change:
        change(monkeypatch)
    assert cli.run(shlex.split(words)) in (1, 2)
    line = capsys.readouterr().err.splitlines()[-1].removeprefix("fullstride: ")
    pattern = ".*".join(map(re.escape, message.split("…")))
    assert re.fullmatch(pattern, line)


def test_every_line_of_the_page_is_provoked():
    provoked = [each for beginning in TRIGGERS for each in MESSAGES if each.startswith(beginning)]
    assert sorted(provoked) == sorted(MESSAGES)
    assert len(MESSAGES) >= 40
