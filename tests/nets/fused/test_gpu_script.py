"""The script for a GPU session records what fails, and runs without a GPU."""

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
gpu = import_module("gpu")


def test_a_part_that_fails_or_exceeds_its_time_is_recorded_and_stops_no_other(
    tmp_path, monkeypatch
):
    def failing() -> dict[str, Any]:
        raise ValueError("no such thing")

    def slow() -> dict[str, Any]:
        time.sleep(0.3)
        return {"ok": True, "summary": "fine"}

    works = [("first", failing), ("second", slow), ("third", slow)]
    monkeypatch.setitem(gpu.PARTS, "training", (lambda _: iter(works), 1))
    settings = gpu.Settings(device=torch.device("cpu"), tiny=True, out=tmp_path, seconds=0.2)
    gpu.run_part("training", settings, commit="abc")
    record = json.loads((tmp_path / "training.json").read_text())
    assert [result.get("error", result.get("summary")) for result in record["results"]] == [
        "no such thing",
        "fine",
        "not started: the time of the part is over",
    ]
    assert record["environment"]["commit"] == "abc"


def test_a_part_that_hangs_is_ended(tmp_path):
    began = time.monotonic()
    words = ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    assert "ended after its" in gpu.start_part("training", words, 0.5)
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_the_script_runs_through_without_a_gpu(tmp_path):
    pytest.importorskip(
        "triton", reason="the kernels are written in Triton, which is not installed here"
    )
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["ends"].values()) == {None}
    assert not [line for line in summary["lines"] if ": error: " in line or line[:3] == "BAD"]
    parts = {line[5:].partition(":")[0] for line in summary["lines"]}
    assert parts == set(gpu.PARTS)
    assert len(done.stdout.splitlines()) < 100
    assert len(list(tmp_path.iterdir())) <= 9
