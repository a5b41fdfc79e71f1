"""The search on tables of trained networks, one of them published: its regret, without training."""

import os
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
search_table = import_module("search_table")

TABLE = Path(
    os.environ.get("NASBENCH_MACRO", ROOT.parent / "shared" / "tables" / "nasbench_macro.csv")
)
published = pytest.mark.skipif(
    not TABLE.is_file(), reason="NASBENCH_MACRO: the path of nasbench_macro.csv"
)
MOST_REGRET = 0.15  # points


def mean_regrets(table, method, repetitions: int) -> np.ndarray:
    """At each budget, after 40 trainings."""
    budgets = [float(np.quantile(table.macs, q)) for q in search_table.QUANTILES]
    regrets = partial(search_table.regrets, method, table)
    return np.array([regrets(budget, [40], repetitions).mean() for budget in budgets])


def test_on_planted_tables_the_search_beats_random_ones_among_the_largest():
    tables = [search_table.planted_table(seed) for seed in range(3)]
    baseline = search_table.METHODS["random among the largest that fit"]
    ours = np.mean([mean_regrets(table, search_table.search, 4) for table in tables], axis=0)
    random = np.mean([mean_regrets(table, baseline, 40) for table in tables], axis=0)
    assert (ours <= MOST_REGRET).all(), ours
    assert (ours < random).all(), (ours, random)


@published
@pytest.mark.slow
def test_on_the_published_table_40_trainings_end_within_0_15_points_of_the_best():
    table = search_table.read_table(TABLE)
    ours = mean_regrets(table, search_table.search, 100)
    random = mean_regrets(table, search_table.METHODS["random among the largest that fit"], 100)
    assert (ours <= MOST_REGRET).all(), ours
    assert (ours < random).all(), (ours, random)


@published
def test_a_few_repetitions_on_the_published_table_agree():
    ours = mean_regrets(search_table.read_table(TABLE), search_table.search, 4)
    assert ours.mean() < 0.25, ours


def test_the_best_network_has_no_regret_and_the_worst_has_the_whole_range():
    table = search_table.planted_table()
    mean = table.top1.mean(axis=1)

    def always(index, table, budget, trainings, rng):
        row = np.stack(np.unravel_index([index] * trainings, (3,) * 8), axis=1)
        return row, table.train(row, rng)

    budget = float(table.macs.max())
    best, worst = (
        search_table.regrets(partial(always, index), table, budget, [40], 2)
        for index in (mean.argmax(), mean.argmin())
    )
    assert not best.any()
    assert worst == pytest.approx(np.ptp(mean))


def test_what_does_not_fit_is_never_named():
    table = search_table.planted_table()
    budget = float(np.quantile(table.macs, 0.25))
    for name in search_table.BASELINES:
        structures, _ = search_table.METHODS[name](table, budget, 40, np.random.default_rng(0))
        assert (table.costs(structures) <= budget).all()
        assert len(np.unique(structures, axis=0)) == 40


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("code,top1_seed0,top1_seed1,top1_seed2,params,macs\n00000000,1,2,3,4,5\n")
    with pytest.raises(ValueError, match="has 1 codes"):
        search_table.read_table(path)
    path.write_text("code,macs\n00000000,5\n")
    with pytest.raises(ValueError, match="top1_seed0"):
        search_table.read_table(path)
