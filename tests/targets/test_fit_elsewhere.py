"""`fit --target COMMAND` measures there what it would measure here."""

import json
import os
import sys
from dataclasses import replace

import pytest
from networks import first_block

from fullstride import cli
from fullstride.deploy import choose_form, elsewhere
from fullstride.deploy.formats import FORMATS, litert
from fullstride.measure.protocols import ONLINE
from fullstride.nets.families import SPECS
from fullstride.targets.target import MACHINE_FILE, Target, connect

pytestmark = pytest.mark.slow


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setitem(SPECS, "genet_tiny", first_block("genet_tiny"))
    target = f"taskset -c {max(os.sched_getaffinity(0))} {sys.executable}"
    words = ["fit", "digits", "--budget-ms", "5", "--epochs", "1", "--weights", "none"]
    words += ["--candidates", "genet_tiny", "--resolutions", "16", "--formats", "onnx"]
    yield [*words, "--target", target, "--device", "cpu", "--out", str(tmp_path / "fit")]
    connect(target).close()
    connect.cache_clear()


def test_a_fit_ships_a_file_that_was_measured_elsewhere(command, tmp_path, monkeypatch, capsys):
    measured = []
    measure = Target.measure

    def counting(self, files, protocol):
        measured.append([file.name for file in files])
        return measure(self, files, protocol)

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


@pytest.mark.parametrize("format", ["ncnn", "litert", "executorch"])
def test_runtimes_of_phones_are_measured_elsewhere(format, command, tmp_path, monkeypatch, capsys):
    if (format, "fp32") not in choose_form.available("fp32"):
        pytest.skip(FORMATS[format].missing() or litert.converter_missing())
    monkeypatch.setattr(choose_form, "CANDIDATES", ("onnx", format))
    quick = replace(ONLINE, rounds=2, round_s=0.005, warmup_s=0.0)
    monkeypatch.setattr(elsewhere, "MEDIANS", quick)
    monkeypatch.setattr("fullstride.targets.target.user_cache", lambda: tmp_path / "cache")
    table = tmp_path / "networks.csv"
    table.write_text("model,img_size,top1\ngenet_tiny,32,70\n")
    target = command[command.index("--target") + 1]
    words = ["choose", "--from", str(table), "--budget-ms", "1000", "--target", target]
    assert cli.run(words) == 0
    assert f"{format} fp32 " in capsys.readouterr().err
    assert cli.run([*command, "--formats", format]) == 0, capsys.readouterr().err
    times = json.loads((tmp_path / "fit" / "ship" / "times.json").read_text())
    assert times["environment"]["torch"] == ""
    assert len(times["times"]) == 1 + ("int8" in FORMATS[format].precisions)
