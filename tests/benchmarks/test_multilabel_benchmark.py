"""benchmarks/multilabel.py: networks are compared with the base rate, in one table."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

metrics = pytest.importorskip("sklearn.metrics")
multilabel = import_module("multilabel")

COUNTS = {"train": 12, "val": 4, "test": 8}


def test_the_base_rate_is_the_average_precision_of_equal_scores(tmp_path):
    data = multilabel.scenes(
        tmp_path, multilabel.Plan({**COUNTS, "test": 40}, multilabel.RECIPE), 0
    )
    has_nk = np.zeros((40, 10))
    for row, target in zip(has_nk, data.test.targets, strict=True):
        row[list(target)] = 1
    assert has_nk.any(0).all()
    precisions = [metrics.average_precision_score(has_n, np.full(40, 0.5)) for has_n in has_nk.T]
    assert multilabel.base_rate(data) == pytest.approx(100 * np.mean(precisions))


def test_each_row_is_trained_and_is_in_the_table(tmp_path):
    recipe = replace(multilabel.RECIPE, epochs=1, batch_size=2, warmup_epochs=0)
    plan = multilabel.Plan({**COUNTS, "train": 30}, recipe)
    *_, content = multilabel.study(plan, 1, tmp_path)
    table = multilabel.page(content)
    for name, scores in content["rows"].items():
        assert f"| {name} | {scores[0]['map']:.1f} |" in table
    assert len(content["rows"]) == len(multilabel.ROWS) + 1
    assert f"| {multilabel.BASE} | {content['base_rate'][0]:.1f} |" in table


def test_a_cell_has_the_mean_and_the_deviation_of_the_seeds():
    scores = [dict.fromkeys(multilabel.SCORES, value) for value in (20.0, 23.0, 29.0)]
    content = {"base_rate": [9.0, 10.0, 11.0], "rows": {"asymmetric loss": scores}}
    table = multilabel.page(content)
    assert f"| {multilabel.BASE} | 10.0 ± 1.0 |" in table
    assert "| asymmetric loss | 24.0 ± 4.6 | 24.0 ± 4.6 |" in table


@pytest.mark.slow
def test_a_short_training_is_better_than_the_base_rate(tmp_path):
    plan = multilabel.Plan({"train": 1200, "val": 60, "test": 200}, multilabel.RECIPE)
    data = multilabel.scenes(tmp_path / "scenes", plan, 0)
    scores = multilabel.multilabel_scores(data, plan.recipe, tmp_path / "run")
    assert scores["map"] > 1.5 * multilabel.base_rate(data)
