"""benchmarks/plan.py: the plan of a fit with a simulated hub, and what is kept of it."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from fullstride.data.dataset import open_data

plan = import_module("plan")


def test_the_pictures_are_a_folder_of_five_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "PICTURES", 20)
    plan.write_pictures(tmp_path)
    data = open_data(str(tmp_path))
    assert len(data.classes) == plan.CLASSES
    assert len(data.train) + len(data.val) + len(data.test) == plan.CLASSES * 20


@pytest.mark.parametrize("name", ["timm/mobilenetv3_small_050.lamb_in1k", "genet_light"])
def test_a_released_network_has_its_preprocessing_and_random_weights(name):
    bundle = plan.random_weights(name)
    assert (len(bundle.classes), bundle.preprocessing.channels) == (1000, 3)
    assert bundle.source == "random weights"


def test_what_is_kept_of_a_plan_are_its_times_and_its_candidates(tmp_path, monkeypatch):
    rows = [("fast", 1.0, ""), ("slow", None, ""), ("other", 2.0, "left out")]
    times = [dict(candidate=name, ms=ms, left_out=why) for name, ms, why in rows]
    for stage, result in (("times", times), ("plan", {"candidates": ["fast"]})):
        (tmp_path / f"{stage}.json").write_text(json.dumps({"result": result}))
    monkeypatch.setattr(plan, "__file__", write_program(tmp_path / "done.py", "sum(range(10**6))"))
    row = plan.measure(tmp_path, tmp_path, ["--once"])
    assert (row["candidates"], row["measured"], row["trained"]) == (3, ["fast"], ["fast"])
    assert row["once"]
    assert 0 < row["cpu_seconds"] < 60
    assert row["peak_memory_gb"] > 0.001
    monkeypatch.setattr(
        plan, "__file__", write_program(tmp_path / "fails.py", "raise SystemExit(3)")
    )
    with pytest.raises(SystemExit, match=r"failed \(3\)"):
        plan.measure(tmp_path, tmp_path, [])


def write_program(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)
