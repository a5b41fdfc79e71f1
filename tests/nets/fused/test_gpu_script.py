"""`make gpu` records what fails, goes on with what is missing, and runs without a GPU."""

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_parts import page
from gpu_parts.settings import Settings

ROOT = Path(__file__).parents[3]
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
        "best": "fused compiled",
        "images_per_s": {"fused compiled": 3210.4},
        "ratios": {"timm eager": 1.5, "timm compiled": 1.25},
        "date": "2026-01-02T03:04:05",
        "commit": "abc",
        "summary": "a | b",
    }
    where = {"device": "NVIDIA H100", "torch": "2.14", "cuda": "13.0", "driver": "580"}
    data = {"environment": where, "planned": ["x", "y"], "results": {"tresnet_m, training": race}}
    (tmp_path / "speed.json").write_text(page.to_json(data))
    text = page.page(tmp_path, gpu.PARTS)
    (row,) = (row for row in rows(text, "Training steps") if row[0] == "tresnet_m")
    # TResNet's Table 1, arXiv:2003.13630
    assert row[2:] == ["fused compiled", "3,210", "1.50 (1.4)", "1.25 (1.2)", "730 (TResNet 1)"]
    (state,) = (line for line in text.splitlines() if line.startswith("| speed | 9 | NVIDIA H100"))
    assert state.split("|")[-4:-1] == [" 2026-01-02 ", " abc ", " 1 of 2 "]
    assert {row[2] for row in rows(text, "The gate")} == {page.NOT_YET}
    assert rows(text, "Every result") == [["speed", "tresnet_m, training", "a / b"]]


def test_the_page_in_the_repository_is_that_of_the_files_beside_it():
    assert page.PAGE.read_text() == page.page(page.FOLDER, gpu.PARTS)


def test_files_of_others_are_not_replaced(tmp_path, capsys):
    (tmp_path / "speed.json").write_text("[]")
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--out", str(tmp_path)])
    assert "speed.json exists and is not results on a GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_runs_through_without_a_gpu(tmp_path):
    pytest.importorskip(
        "triton", reason="the kernels are written in Triton, which is not installed here"
    )
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--device", "cpu"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no GPU is here")
    for part in gpu.PARTS:
        data = json.loads((tmp_path / f"{part}.json").read_text())
        assert data["planned"] == [*data["results"]]
        assert page.problems(data) == ([], [])
    assert (tmp_path / "gpu.md").read_text() == page.page(tmp_path, gpu.PARTS)
