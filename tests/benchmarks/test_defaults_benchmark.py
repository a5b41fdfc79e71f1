"""benchmarks/defaults.py: a grid in every cell, resuming, and a table that says what is missing."""

import json
from collections import Counter
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from fullstride.train.recipes.named import FINETUNE

defaults = import_module("defaults")

SHORT = replace(FINETUNE, epochs=1, batch_size=10, warmup_epochs=0)
CELL = defaults.Cell(
    mode="scratch",
    images=20,
    data="digits",
    model="genet_tiny",
    side=32,
    batches=(10,),
    rates=(0.05, 0.1),
    epochs=(1,),
    seeds=2,
    test=30,
)
NAMES = ["batch 10, rate 0.05, 1 epochs", "batch 10, rate 0.1, 1 epochs", "old default", "default"]


@pytest.fixture
def short_defaults(monkeypatch):
    monkeypatch.setattr(defaults, "scratch", lambda images: SHORT)
    monkeypatch.setattr(defaults, "FINETUNE", replace(SHORT, lr=0.01))
    monkeypatch.setattr(defaults, "MARGIN", 100.0)


def test_each_of_ten_cells_compares_both_defaults_with_a_grid_of_twelve():
    with_grid = [cell for cell in defaults.CELLS if cell.epochs]
    modes = Counter((cell.mode, cell.images) for cell in with_grid)
    assert set(modes) == {
        (mode, images)
        for mode in ("scratch", "finetune")
        for images in (60, 250, 1000, 10_000, 60_000)
    }
    for cell in with_grid:
        settings = cell.settings()
        assert len(settings) == 14
        points = {(r.batch_size, r.lr, r.epochs) for name, r in settings.items() if "batch" in name}
        assert len(points) == 12
        assert settings["old default"].lr == 0.02
        assert {(r.resolution, r.crop) for r in settings.values()} == {(cell.side, 1.0)}


def test_every_training_is_written_and_none_is_repeated(tmp_path, short_defaults, monkeypatch):
    out = tmp_path / "defaults.json"
    first, *rest = defaults.measure(out, [CELL], tmp_path)
    assert first.startswith("scratch_20, batch 10, rate 0.05, 1 epochs, seed 0: ")
    assert len(rest) == 7
    stored = json.loads(out.read_text())["cells"]["scratch_20"]["settings"]
    assert list(stored) == NAMES
    assert all(set(row["scores"]) == {"0", "1"} for row in stored.values())
    assert list(defaults.measure(out, [CELL], tmp_path)) == []

    values = [row["scores"][seed]["top1"] for row in stored.values() for seed in "01"]
    means = dict(zip(NAMES, np.reshape(values, (4, 2)).mean(1), strict=True))
    row = defaults.table_row(json.loads(out.read_text()), CELL)
    assert float(row[5]) == pytest.approx(means["default"], abs=0.006)
    best = max(means[name] for name in NAMES[:2])
    gap, error = row[8].split(" ± ")
    assert float(gap) == pytest.approx(means["default"] - best, abs=0.006)
    assert float(error) >= 0
    assert "2 of 12 measured" in row[7]

    monkeypatch.setattr(defaults, "scratch", lambda images: replace(SHORT, lr=0.2))
    again = list(defaults.measure(out, [CELL], tmp_path))
    assert [line.partition(":")[0] for line in again] == [
        "scratch_20, default, seed 0",
        "scratch_20, default, seed 1",
    ]


def test_settings_far_below_the_best_by_the_first_seed_are_left_out_of_the_others():
    settings = CELL.settings()
    rows = {
        name: {"recipe": defaults.changed(recipe), "scores": {"0": {"top1": top1}}}
        for (name, recipe), top1 in zip(settings.items(), (60.0, 70.0, 10.0, 10.0), strict=True)
    }
    head = {"data": CELL.data, "model": CELL.model}
    result = {"environment": {}, "cells": {CELL.name: {**head, "settings": rows}}}
    assert defaults.promising(result, CELL, settings) == set(NAMES[1:])


def test_the_table_names_the_cells_that_are_not_measured(tmp_path, capsys):
    out = tmp_path / "defaults.json"
    defaults.main(["--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert sum("not measured" in line for line in lines) == len(defaults.CELLS)
    assert out.with_suffix(".md").read_text().splitlines() == lines


def test_data_that_are_missing_are_named_with_their_package(tmp_path):
    cell = replace(CELL, data="fashion")
    with pytest.raises(ValueError, match="dataset-fashion-mnist") as error:
        next(defaults.measure(tmp_path / "defaults.json", [cell], tmp_path))
    assert "\n" not in str(error.value)


def test_the_images_of_a_seed_have_equal_numbers_of_each_class_as_far_as_they_go():
    labels = np.repeat([0, 1, 2], [50, 50, 4])
    chosen = defaults.balanced(labels, 24, seed=1)
    assert Counter(labels[chosen].tolist()) == {0: 10, 1: 10, 2: 4}
    assert not np.array_equal(chosen, defaults.balanced(labels, 24, seed=2))
