"""Epochs that share a score where they are short, and epochs whose score is not finite."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from fullstride.data.loader import Batches
from fullstride.tasks import find_task
from fullstride.train import loop, run, run_folder
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS, RECIPES, finetune, scratch
from fullstride.train.recipes.recipe import Recipe

METRIC = find_task().metric
SHORT = replace(DIGITS, epochs=7, warmup_epochs=0, resolution=8, batch_size=32, dropout=0.2)


def trained(folder, data, **changes):
    return list(run.train(folder, "genet_tiny", data, replace(SHORT, **changes)))


def scored(rows):
    return [row["epoch"] for row in rows if "val/top1" in row]


def weights(folder):
    return load_file(folder / run_folder.BUNDLE / "weights.safetensors")


def equal(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("images", [10, 60, 190, 1000, 5000, 60_000, 1_200_000])
@pytest.mark.parametrize("recipe_for", [finetune, scratch])
def test_scores_are_at_least_forty_where_epochs_share_them_and_fifty_steps_apart_at_most(
    images, recipe_for
):
    recipe = recipe_for(images)
    steps = max(1, images // recipe.batch_size)
    every = recipe.scored_every(recipe.epochs, steps)
    assert every >= 1
    if every > 1:
        assert recipe.epochs / every >= 40
        assert every * steps <= 50
    for changes in (dict(early_stop_patience=5), dict(soup=3)):
        assert replace(recipe, **changes).scored_every(recipe.epochs, steps) == 1
    assert replace(recipe, score_every_epochs=7).scored_every(recipe.epochs, steps) == 7


def test_a_minute_of_two_step_epochs_is_not_spent_on_scores_and_other_recipes_score_every_epoch():
    assert scratch(44).scored_every(429, 2) == 10
    for recipe in RECIPES.values():
        assert recipe.scored_every(recipe.epochs, 100) == 1


@pytest.fixture(scope="module")
def each(few_digits, tmp_path_factory):
    """A run that scores every epoch."""
    folder = tmp_path_factory.mktemp("each") / "run"
    return folder, trained(folder, few_digits)


def test_fewer_scores_leave_the_weights_and_the_rows_that_have_one_as_they_are(
    each, few_digits, tmp_path
):
    folder, rows = each
    assert scored(rows) == [1, 2, 3, 4, 5, 6, 7]
    shared = trained(tmp_path / "run", few_digits, score_every_epochs=3)
    assert scored(shared) == [3, 6, 7]
    times = {"images_per_s", "data_share"}
    for row, full in zip(shared, rows, strict=True):
        assert {key: row[key] for key in row if key not in times} == {
            key: full[key] for key in full if key in row and key not in times
        }
    assert equal(weights(tmp_path / "run"), weights(folder))
    assert run_folder.read_log(tmp_path / "run", METRIC) == shared


@pytest.mark.parametrize("way", ["closed", "killed", "within an epoch"])
def test_a_run_that_stops_between_two_scores_goes_on_to_the_same_weights(
    way, each, few_digits, tmp_path, monkeypatch
):
    folder, stopped = tmp_path / "run", replace(SHORT, score_every_epochs=3)
    every = 1 if way == "within an epoch" else 0
    rows = run.train(
        folder, "genet_tiny", few_digits, stopped, RunOptions(checkpoint_every_steps=every)
    )
    for _ in range(5):
        next(rows)
    if way != "closed":  # as a process that is killed, which writes nothing
        monkeypatch.setattr(run_folder, "save_epoch", lambda *args: None)
    rows.close()
    monkeypatch.undo()
    checkpoint = run_folder.load_checkpoint(folder)
    assert checkpoint is not None
    expected = {"closed": (5, 0), "killed": (3, 0), "within an epoch": (4, 1)}
    assert (checkpoint["epochs"], checkpoint["index"]) == expected[way]
    again = list(run.train(folder, "genet_tiny", few_digits, stopped))
    assert scored(again) == [3, 6, 7]
    assert equal(weights(folder), weights(each[0]))


def test_a_patience_that_ends_before_a_second_score_is_refused():
    with pytest.raises(ValueError, match=r"early_stop_patience 3 .*score_every_epochs 4"):
        replace(SHORT, early_stop_patience=3, score_every_epochs=4)
    Recipe(epochs=9, batch_size=8, lr=0.1, early_stop_patience=4, score_every_epochs=4)


def test_patience_counts_epochs_up_to_the_last_score():
    recipe = replace(SHORT, early_stop_patience=4, score_every_epochs=2)
    rows = [{"epoch": n} | ({"val/top1": 50.0 - n} if n % 2 == 0 else {}) for n in range(1, 8)]
    stops = [run_folder.should_stop_early(rows[:count], recipe, METRIC) for count in range(8)]
    assert stops == [False] * 6 + [True, True]


def spoiled(monkeypatch, epochs, in_place):
    """Training whose averages have statistics that are no numbers after some epochs."""
    train_epochs = loop.train_epochs

    def spoil(*args, **how):
        for epoch in train_epochs(*args, **how):
            if isinstance(epoch, loop.Epoch) and epoch.number + 1 in epochs:
                average = epoch.average if in_place else copy.deepcopy(epoch.average)
                for name, value in average.state_dict().items():
                    if name.endswith("running_var"):
                        value.fill_(torch.nan)
                epoch = replace(epoch, average=average)
            yield epoch

    monkeypatch.setattr(loop, "train_epochs", spoil)


def test_an_epoch_whose_scores_are_not_finite_has_none_and_training_goes_on(
    each, few_digits, tmp_path, monkeypatch
):
    spoiled(monkeypatch, {1, 3}, in_place=False)
    rows = trained(tmp_path / "run", few_digits)
    assert scored(rows) == [2, 4, 5, 6, 7]
    assert [row["epoch"] for row in rows if "not finite" in row.get("unscored", "")] == [1, 3]
    assert equal(weights(tmp_path / "run"), weights(each[0]))
    assert run_folder.read_log(tmp_path / "run", METRIC) == rows


def test_final_scores_that_are_not_finite_are_an_error_that_says_what_to_try(
    few_digits, tmp_path, monkeypatch
):
    spoiled(monkeypatch, {2}, in_place=True)
    with pytest.raises(FloatingPointError, match=r"not finite.*recipe\.lr"):
        trained(tmp_path / "run", few_digits, epochs=2)
    trained(tmp_path / "precise", few_digits, epochs=2, precise_bn=True)
    assert all(value.isfinite().all() for value in weights(tmp_path / "precise").values())


def test_the_end_of_a_run_scores_each_network_once(few_digits, tmp_path, monkeypatch):
    passes, epoch = [], Batches.epoch

    def counted(self, number, start=0):
        passes.append(len(self.images))
        yield from epoch(self, number, start)

    rows = run.train(tmp_path / "run", "genet_tiny", few_digits, replace(SHORT, precise_bn=True))
    for _ in range(7):
        next(rows)
    monkeypatch.setattr(Batches, "epoch", counted)
    assert not list(rows)
    # of the network with precise statistics, and of the one that is chosen with its temperature;
    # the test has as many images
    assert passes.count(len(few_digits.val)) == 2 + 1
    assert passes.count(len(few_digits.train)) == 1
