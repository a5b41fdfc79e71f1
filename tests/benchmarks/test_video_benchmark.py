"""benchmarks/video.py: a row for each network and seed, and goals that each row reaches or not."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("skimage")
pytest.importorskip("av")
FOLDER = Path(__file__).parents[2] / "benchmarks"
video = import_module("video")


@pytest.mark.slow
def test_both_networks_are_trained_and_the_twin_has_fewer_parameters(tmp_path):
    video.write_motion(tmp_path / "clips", {"train": 16, "val": 4, "test": 8}, 32, as_videos=True)
    recipe = replace(video.RECIPE, steps=2, batch_size=8)
    ours, twin = (video.train_one(name, 0, tmp_path, recipe) for name in video.GOALS)
    assert ours["parameters"] > twin["parameters"]
    assert all(0 <= row["top1"] <= 100 and row["cpu_s"] > 0 for row in (ours, twin))


def test_the_stored_table_reaches_its_goals_and_is_the_page():
    content = json.loads((FOLDER / "video_motion.json").read_text())
    rows = content["rows"]
    assert len(rows) == 2 * len(video.SEEDS)
    assert min(row["top1"] for row in rows if row["name"] == video.MODEL) >= 90
    assert max(row["top1"] for row in rows if row["name"] == video.TWIN) <= 55
    assert all(map(video.reached, rows))
    assert (FOLDER / "video_motion.md").read_text() == video.page(content)
    assert not video.reached({"name": video.MODEL, "top1": 89.9})
    assert not video.reached({"name": video.TWIN, "top1": 55.1})
