"""benchmarks/dense.py: short trainings beat what does not look at the picture, in one table."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fullstride.examples import Look, write_scenes
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import find_task

pytest.importorskip("sklearn")
pytest.importorskip("skimage")
dense = import_module("dense")

SIDE = 64
# White digits, large, on dark photographs: easy enough for a training of seconds.
EASY = Look(most=2, sides=(0.5, 0.7), is_plain=True)
COUNTS = {"train": 60, "val": 2, "test": 30}
RECIPE = replace(
    dense.RECIPE, steps=150, batch_size=8, lr=0.1, resolution=SIDE, warmup_epochs=0.5, ema_decay=0.9
)


def short(name: str, **changes) -> dense.Study:
    kind = "floor" if name == "depth" else "digits"
    recipe = replace(RECIPE, **changes)

    def write(folder: Path, seed: int) -> None:
        write_scenes(folder, COUNTS, SIDE, seed, kind, look=EASY, one_class=True)

    return replace(dense.STUDIES[name], write=write, recipe=recipe, models=("genet_tiny",))


def maps_of(folder: Path, kind: str, split: str) -> np.ndarray:
    files = sorted((folder / "data" / kind / split).glob("*.png"))
    return np.stack([np.asarray(Image.open(file)) for file in files]).astype(float)


def train(study: dense.Study, folder: Path) -> dict[str, dict]:
    return {row["kind"]: row for row in dense.study_rows(study, folder, False)}


@pytest.mark.slow
def test_a_short_training_finds_digits(tmp_path):
    study = short("detection", lr=0.02, steps=150)
    rows = {row["name"]: row for row in dense.study_rows(study, tmp_path, False)}
    nothing, mean, ours = (row["scores"]["ap50"] for row in rows.values())
    assert nothing == 0
    assert ours > 2 * mean + 10


@pytest.mark.slow
def test_a_short_training_segments_digits(tmp_path):
    rows = train(short("segmentation"), tmp_path)
    background, ours = (rows[kind]["scores"] for kind in ("baseline", "ours"))
    masks = maps_of(tmp_path, "masks", "test")
    assert background["digit_iou"] == 0
    assert background["pixel_accuracy"] == pytest.approx(100 * (masks == 0).mean(), abs=1e-4)
    assert ours["digit_iou"] > 10


@pytest.mark.slow
def test_a_short_training_knows_more_of_depths_than_their_median(tmp_path):
    study = short("depth", steps=300)
    rows = {row["name"]: row["scores"] for row in dense.study_rows(study, tmp_path, False)}
    *_, ours = rows.values()
    assert ours["delta1"] > rows["median"]["delta1"] + 5


def test_the_priors_are_those_of_the_maps(tmp_path):
    """Computed again from the PNGs, a row at a time."""
    study = short("depth")
    study.write(tmp_path / "data", 0)
    task = find_task("depth")
    data = task.open_data(str(tmp_path / "data"))
    pre = replace(Preprocessing(), resolution=SIDE, fit="pad")
    rows = dense.baselines(task.for_data(data), data, pre)
    training, test = (maps_of(tmp_path, "depth", split) for split in ("train", "test"))
    valid = test > 0
    constant = np.median(training[training > 0])
    by_row = np.full(SIDE, constant)
    for row in range(SIDE):
        if (training[:, row] > 0).any():
            by_row[row] = np.median(training[:, row][training[:, row] > 0])
    for name, prior in (("median", constant), ("median of the row", by_row[None, :, None])):
        expected = np.broadcast_to(prior, test.shape)[valid]
        ratio = np.maximum(expected / test[valid], test[valid] / expected)
        assert rows[name]["delta1"] == pytest.approx(100 * (ratio < 1.25).mean(), abs=0.1)


def test_peers_are_trained_and_scored_as_ours(tmp_path):
    study = short("detection", steps=2, batch_size=4)
    study.write(tmp_path / "data", 0)
    task = find_task("detect")
    data = task.open_data(str(tmp_path / "data"))
    task, pre = task.for_data(data), replace(Preprocessing(), resolution=SIDE, fit="pad")
    for build in dense.peers(task, 1, 32, SIDE).values():
        torch.manual_seed(0)
        before = build().state_dict()
        net = dense.train_peer(build, data, task, pre, study.recipe)
        moved = [not torch.equal(before[name], value) for name, value in net.state_dict().items()]
        assert sum(moved) > len(moved) / 2
        row = dense.row("peer", "peer", net, task, data, pre, 1.0)
        assert 0 <= row["scores"]["ap50"] <= 100


def test_the_stereo_pair_is_split_in_halves_with_metric_depths(tmp_path):
    dense.write_stereo(tmp_path, 0)
    files = {split: sorted((tmp_path / "images" / split).iterdir()) for split in ("train", "test")}
    lefts = {split: [int(file.stem) for file in each] for split, each in files.items()}
    assert max(lefts["train"]) + dense.WINDOW <= min(lefts["test"])
    depths = np.asarray(Image.open(tmp_path / "depth/train/000.png"))
    valid = depths[depths > 0] / 1000
    assert 2.0 < valid.min() < valid.max() < 5.2
    assert (depths > 0).mean() > 0.8


def test_the_page_has_a_row_for_each_network_and_the_goal():
    content = {
        "study": "depth",
        "recipe": {
            "steps": 5,
            "batch_size": 2,
            "resolution": 96,
            "task_options": {"head_width": 32},
        },
        "environment": {"date": "2026-11-23", "device": "x", "threads": 1, "torch": "2"},
        "rows": [
            {"name": "median of the row", "kind": "baseline", "scores": {"delta1": 40.0}},
            {
                "name": "ours",
                "kind": "ours",
                "scores": {"delta1": 61.23},
                "train_s": 9.6,
                "test_ms_per_image": 3.0,
                "parameters": 2_000_000,
            },
        ],
    }
    page = dense.page(content)
    assert "at least 52.0" in page
    assert "| median of the row | 40 | - | - | - | - | - |" in page
    assert "| ours | 61.2 | - | - | 10 | 3.0 | 2.00 |" in page
    content["rows"] += [
        {**row, "scores": {"delta1": row["scores"]["delta1"] + 2}} for row in content["rows"]
    ]
    page = dense.page(content)
    assert "at least 53.0" in page
    assert "| median of the row | 41 ± 1.4 | - | - | - | - | - |" in page
    assert "| ours | 62.2 ± 1.4 | - | - | 10 | 3.0 | 2.00 |" in page
