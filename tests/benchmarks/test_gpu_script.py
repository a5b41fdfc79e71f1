"""`make gpu` records what fails, goes on with what is missing, and runs without a GPU."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_parts import answers, digits, gradients, page, settings, training
from gpu_parts.settings import Settings
from networks import first_block

from fullstride import cli
from fullstride.latency.devices import estimate_by_name, load_profile
from fullstride.nets.families import SPECS
from fullstride.nets.preprocessing import Preprocessing

ROOT = Path(__file__).parents[2]
gpu = import_module("gpu")


def run(out: Path, works: dict[str, Any], monkeypatch, seconds: float = 60.0) -> dict[str, Any]:
    """The results of the part `training` with these works, after a call that had so much time."""
    monkeypatch.setitem(gpu.PARTS, "training", (lambda _: iter(works.items()), 1))
    gpu.run_part("training", Settings(device=torch.device("cpu"), out=out, seconds=seconds), "abc")
    return json.loads((out / "training.json").read_text())


def test_a_second_call_goes_on_with_what_is_missing_and_then_with_what_failed(
    tmp_path, monkeypatch
):
    calls = []

    def work(name: str, error: str = "") -> Any:
        def result() -> dict[str, Any]:
            calls.append(name)
            time.sleep(0.3)
            if error:
                raise ValueError(error)
            return {"ok": True, "summary": "fine"}

        return result

    works = {
        "first": work("first", "no such thing"),
        "second": work("second"),
        "third": work("third"),
    }
    before = run(tmp_path, works, monkeypatch, seconds=0.5)
    assert [*before["results"]] == ["first", "second"]
    assert before["planned"] == ["first", "second", "third"]
    assert before["results"]["first"]["error"] == "no such thing"
    assert before["results"]["second"]["commit"] == "abc"
    after = run(tmp_path, works | {"first": work("first")}, monkeypatch)
    assert calls == ["first", "second", "third", "first"]
    assert {one["summary"] for one in after["results"].values()} == {"fine"}


def test_results_of_another_device_are_measured_again(tmp_path, monkeypatch):
    works = {"one": lambda: {"summary": "fine"}}
    data = run(tmp_path, works, monkeypatch)
    data["environment"]["device"], data["results"]["one"]["summary"] = "another", "old"
    (tmp_path / "training.json").write_text(page.to_json(data))
    assert run(tmp_path, works, monkeypatch)["results"]["one"]["summary"] == "fine"


def test_a_part_that_hangs_is_ended(tmp_path):
    began = time.monotonic()
    words = ["--device", "cpu", "--out", str(tmp_path)]
    assert "ended after its" in gpu.start_part("training", words, 0.5)
    assert time.monotonic() - began < 5


def test_an_interrupted_call_leaves_no_process(tmp_path, monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            started.append(self)
            if len(started) == 1:
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(gpu.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.start_part("training", ["--device", "cpu", "--out", str(tmp_path)], 60)
    assert started[0].poll() == -signal.SIGKILL


def on_gpu(out: Path) -> Settings:
    return Settings(device=torch.device("cuda"), out=out, seconds=600)


def test_on_a_gpu_the_parts_have_every_work_that_the_gate_and_the_page_read(tmp_path):
    """Works begin nothing before they are called."""
    names = {
        part: [name for name, _ in works(on_gpu(tmp_path))]
        for part, (works, _) in gpu.PARTS.items()
    }
    assert "tresnet_l, training padded" in names["speed"]
    assert {f"{name}, training" for name in training.NETWORKS} <= {*names["speed"]}
    assert {f"tresnet_m, {form}" for form in training.BATCH_FORMS} == {*names["batches"]}
    assert {f"{name}, batch {n}" for name in answers.PAIRS for n in answers.BATCHES} == {
        *names["shipping"]
    }
    assert names["profile"] == ["measure calibrate"]
    assert (ROOT / gradients.GRAPHS).is_file()
    assert {*training.BATCH_FORMS} <= {*training.training_forms("tresnet_m", "tresnet_m")}


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ({"plain": 100, "plain padded": 102.0}, r"\+2.0%, so it has to go"),
        ({"plain": 90, "plain compiled": 100, "plain compiled padded": 104.0}, r"\+4.0%, .* stays"),
        ({"plain": 100}, page.NOT_YET),
    ],
)
def test_padding_stays_by_its_threshold_of_the_fastest_forms(rates, verdict):
    said = page.padding({"tresnet_l, training padded": {"images_per_s": rates}})
    assert re.fullmatch(verdict, said)
    assert set(rates) <= {*training.padding_forms("tresnet_l")}


def test_pictures_of_the_contests_are_within_the_range_of_pixels():
    """Beyond it an int8 file clips, and its logits would differ by more than is allowed."""
    pre = Preprocessing(resolution=224)
    x = answers.pictures(SimpleNamespace(preprocessing=pre), 11)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (pre.mean, pre.std))
    pixels = 255 * (x * std + mean)
    assert x.shape == (11, 3, 224, 224)
    assert -1e-3 < pixels.min() < 64
    assert 192 < pixels.max() < 255.001


def test_the_estimate_of_a_gpu_is_that_of_its_data_sheet(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    estimate = answers.estimated(on_gpu(tmp_path), "timm/gernet_l", 64)
    (row,) = estimate_by_name(["timm/gernet_l"], load_profile("h100"), 64, 224)
    assert estimate == [row.estimate.low, row.estimate.ms_per_image, row.estimate.high]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Unknown")
    assert answers.estimated(on_gpu(tmp_path), "timm/gernet_l", 64) == []


def test_a_profile_is_that_of_the_command_in_the_time_of_the_part(tmp_path, monkeypatch):
    """The command itself has tests on a CPU."""
    calls = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 0, "a\n  12 times fitted; 9 % off\n", "")

    monkeypatch.setattr(settings.subprocess, "run", run)
    assert answers.calibrate(on_gpu(tmp_path))["summary"] == "12 times fitted; 9 % off"
    cli.parse(calls[0][3:])  # its words are flags of the command
    assert calls[0][calls[0].index("--minutes") + 1] == "8.00"


def test_without_tensorrt_its_folder_is_not_measured_as_onnx():
    with pytest.raises(ValueError, match="tensorrt|TensorRT"):
        answers.as_file(None, "tensorrt", "fp16", torch.zeros(1))


def test_each_part_gets_its_share_of_the_minutes_that_are_left(monkeypatch):
    seconds = []
    monkeypatch.setattr(gpu, "start_part", lambda part, words, limit: seconds.append(limit))
    shares = [share for _, share in gpu.PARTS.values()]
    assert not any(gpu.run_parts([*gpu.PARTS], [], minutes=30))
    left = [1800 * share / sum(shares[number:]) for number, share in enumerate(shares)]
    assert seconds == pytest.approx(left, abs=1), "parts that take no time leave theirs to others"


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table below a title of a page."""
    section = text.partition(f"## {title}")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def test_the_page_has_measured_and_published_figures_beside_each_other(tmp_path):
    race = {
        "best": "plain compiled",
        "images_per_s": {"timm eager": 2140.0, "plain compiled": 3210.4},
        "spreads": {"timm eager": 0.01, "plain compiled": 0.024},
        "peak_memory_mib": {"timm eager": 9000.2, "plain compiled": 4000.0},
        "date": "2026-01-02T03:04:05",
        "commit": "abc",
        "summary": "a | b",
    }
    where = {"device": "NVIDIA H100", "torch": "2.14", "cuda": "13.0", "driver": "580"}
    data = {"environment": where, "planned": ["x", "y"], "results": {"tresnet_m, training": race}}
    (tmp_path / "speed.json").write_text(page.to_json(data))
    text = page.page(tmp_path, gpu.PARTS)
    first, second, third, *_ = rows(text, "Training steps")
    assert first == ["tresnet_m", "224", "timm eager", "2,140", "1.0%", "9,000", "1.00", "", ""]
    assert second[2:6] == ["plain compiled", "3,210", "2.4%", "4,000"]
    # TResNet's Table 1, arXiv:2003.13630
    assert second[6:] == ["1.50 (1.4)", "", "730 (TResNet 1)"]
    assert third[2:8] == [page.NOT_YET, "", "", "", "(1.65)", "(1.3)"]
    (state,) = (line for line in text.splitlines() if line.startswith("| speed | 9 | NVIDIA H100"))
    assert state.split("|")[-4:-1] == [" 2026-01-02 ", " abc ", " 1 of 2 "]
    assert f"3% faster: {page.NOT_YET}" in text
    assert rows(text, "Every result") == [["speed", "tresnet_m, training", "a / b"]]


def test_the_page_in_the_repository_is_that_of_the_files_beside_it():
    assert page.PAGE.read_text() == page.page(page.FOLDER, gpu.PARTS)


def test_files_of_others_are_not_replaced(tmp_path, capsys):
    (tmp_path / "speed.json").write_text("[]")
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--out", str(tmp_path)])
    assert "speed.json exists and is not results on a GPU" in capsys.readouterr().err


def run_here(*words: str) -> tuple[int, list[str]]:
    """As `settings.run_command`, in this process, which has imported all that the command needs."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(out):
        code = cli.run([*words])
    return code, out.getvalue().splitlines()


@pytest.fixture
def parts_here(monkeypatch) -> Iterator[None]:
    """Parts run here, but for one that has a process; so does the command of a fit."""
    start, before = gpu.start_part, signal.getsignal(signal.SIGTERM)

    def start_here(part: str, words: Sequence[str], seconds: float) -> str | None:
        if part == "profile":
            return start(part, words, seconds)
        return gpu.main(["--only", part, "--minutes", str(seconds / 60), *words])

    monkeypatch.setattr(gpu, "start_part", start_here)
    monkeypatch.setattr(digits, "run_command", run_here)
    for name in ("genet_tiny", "tresnet_tiny"):
        monkeypatch.setitem(SPECS, name, first_block(name))
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("parts_here")
def test_the_script_runs_through_without_a_gpu(tmp_path, capfd):
    gpu.main(["--device", "cpu", "--minutes", "300", "--out", str(tmp_path)])
    out = capfd.readouterr().out
    assert out.startswith("no GPU is here")
    assert "exit code" not in out
    for part in gpu.PARTS:
        data = json.loads((tmp_path / f"{part}.json").read_text())
        assert data["planned"] == [*data["results"]]
        assert page.problems(data) == ([], [])
    assert (tmp_path / "gpu.md").read_text() == page.page(tmp_path, gpu.PARTS)
