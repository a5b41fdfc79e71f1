"""Training within a time: how many epochs fit, and what is refused."""

import time

import pytest

from fullstride.measure.budget import deadline_s, time_limit_s
from fullstride.train import timing
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.run import train
from fullstride.train.timing import RunTimes, recipe_within

LONG = RecipeChoice(Recipe(epochs=100, batch_size=16, lr=0.01, resolution=16, hflip_prob=0.0))
TIMES = RunTimes(
    steps=4, score_every=1, step_s=0.5, image_s=0.01, val_s=0.2, save_s=0.1, start_s=1.0
)


@pytest.fixture
def steady(monkeypatch):
    """Measurements that are always the same: 2.3 s an epoch, and 1.9 s once."""
    monkeypatch.setattr(timing, "time_run", lambda run, build_s: run.close() or TIMES)


def within(folder, data, seconds, choice=LONG):
    deadline = time.perf_counter() + seconds
    named = recipe_within(choice, deadline, folder, "genet_tiny", data)
    return named.recipe


def test_as_many_epochs_as_fit_and_no_more_than_the_recipe_has(steady, few_digits, tmp_path):
    recipe = within(tmp_path / "run", few_digits, 60)
    assert 0.8 * 60 < recipe.epochs * 2.3 + 1.9 <= 60
    assert within(tmp_path / "run", few_digits, 3600).epochs == 100


def test_a_run_that_goes_on_keeps_its_length(steady, few_digits, tmp_path):
    recipe = within(tmp_path / "run", few_digits, 10)
    rows = train(tmp_path / "run", "genet_tiny", few_digits, recipe)
    next(rows)
    rows.close()
    assert within(tmp_path / "run", few_digits, 3600, RecipeChoice(recipe)) == recipe


def test_a_length_beside_the_time_and_too_little_time_are_one_line(steady, few_digits, tmp_path):
    with pytest.raises(ValueError, match=r"^epochs 3 and a time"):
        within(tmp_path / "run", few_digits, 60, RecipeChoice(LONG.source, {"epochs": 3.0}))
    with pytest.raises(ValueError, match=r"too short.*needs 0\.\d minutes more$"):
        within(tmp_path / "run", few_digits, 1)


def test_hours_and_minutes_add_up():
    assert time_limit_s(1, 30) == 5400
    assert time_limit_s(None, None) is None
    assert deadline_s(None, None) is None
    with pytest.raises(ValueError, match="--minutes 0"):
        time_limit_s(None, 0)
