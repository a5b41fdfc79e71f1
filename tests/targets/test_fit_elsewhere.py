"""`fit --target COMMAND` measures there what it would measure here."""

import json
import os
import sys

import pytest

from fullstride import cli
from fullstride.targets.target import MACHINE_FILE, Target, connect

pytestmark = pytest.mark.slow


@pytest.fixture
def command(tmp_path):
    target = f"taskset -c {max(os.sched_getaffinity(0))} {sys.executable}"
    words = ["fit", "digits", "--budget-ms", "5", "--epochs", "1", "--weights", "none"]
    words += ["--candidates", "genet_tiny", "--resolutions", "16", "--formats", "onnx"]
    yield [*words, "--target", target, "--device", "cpu", "--out", str(tmp_path / "fit")]
    connect(target).close()
    connect.cache_clear()


def test_a_fit_ships_a_file_that_was_measured_elsewhere(command, tmp_path, monkeypatch, capsys):
    measured = []
    measure = Target.measure

    def counting(self, files, **how):
        measured.append([file.name for file in files])
        return measure(self, files, **how)

    monkeypatch.setattr(Target, "measure", counting)
    assert cli.run([*command, "--dry-run"]) == 0
    assert len(measured) >= 2  # the first form alone, then all
    assert {"onnx fp32", "onnx int8"} == {name for names in measured for name in names}
    before = len(measured)
    assert cli.run(command) == 0
    assert all("ship/" in name for names in measured[before:] for name in names)
    times = json.loads((tmp_path / "fit" / "ship" / "times.json").read_text())
    assert times["environment"]["torch"] == ""  # it took no part in the times
    assert len(times["times"]) == 2


def test_another_machine_than_before_is_refused(command, tmp_path, capsys):
    assert cli.run([*command, "--dry-run"]) == 0
    path = tmp_path / "fit" / MACHINE_FILE
    machine = json.loads(path.read_text())
    path.write_text(json.dumps({**machine, "processor": "Cortex-A76"}))
    (tmp_path / "fit" / "times.json").unlink()
    capsys.readouterr()
    assert cli.run([*command, "--dry-run"]) == 2
    line = capsys.readouterr().err
    assert "Cortex-A76" in line
    assert "another --out" in line
