"""Epochs that share a score where they are short, epochs whose score is not finite, and averages of
the best epochs, kept only if the validation split says so."""

import copy
import json
from dataclasses import replace
from itertools import count

import pytest
import torch
from safetensors.torch import load_file

from fullstride.data.loader import Batches
from fullstride.io.console import print_note
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.tasks import find_task
from fullstride.train import final_weights, loop, run, run_folder
from fullstride.train.batches import BatchOptions
from fullstride.train.final_weights import with_precise_statistics
from fullstride.train.prepare import PreparedRun
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
    times = {"images_per_s", "data_wait_fraction"}
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
    run_epochs = loop.run_epochs

    def spoil(*args, **how):
        for epoch in run_epochs(*args, **how):
            if isinstance(epoch, loop.Epoch) and epoch.number + 1 in epochs:
                average = epoch.average if in_place else copy.deepcopy(epoch.average)
                for name, value in average.state_dict().items():
                    if name.endswith("running_var"):
                        value.fill_(torch.nan)
                epoch = replace(epoch, average=average)
            yield epoch

    monkeypatch.setattr(loop, "run_epochs", spoil)


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


# a high rate without an average over steps: epochs differ, and their mean is better
NOISY = replace(
    DIGITS,
    epochs=5,
    warmup_epochs=1,
    resolution=16,
    batch_size=16,
    ema_decay=0.0,
    schedule="steps",
    milestones=(),
    lr=0.1,
    soup=3,
)


TOP1 = find_task().metric


def soup_trained(folder, digits, recipe=NOISY):
    return list(run.train(folder, "genet_tiny", digits, recipe))


@pytest.fixture(scope="module")
def whole(few_digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("soup") / "run"
    return folder, soup_trained(folder, few_digits)


def ingredients(folder):
    """The saved bundles by their epoch."""
    bundles = [Bundle.load(slot) for slot in sorted((folder / run_folder.SOUP).iterdir())]
    return {int(bundle.scores["val"][final_weights.EPOCH]): bundle for bundle in bundles}


def same(first, second):
    return all(torch.equal(value, second[key]) for key, value in first.items())


def test_the_mean_of_weights_and_statistics_is_the_obvious_one():
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        net = zoo.create("genet_tiny", in_channels=1, classes=4)
        net.train()(torch.rand(4, 1, 32, 32))
        states.append(net.state_dict())
    mean = final_weights.averaged(states)
    assert mean.keys() == states[0].keys()
    for name, value in mean.items():
        if value.is_floating_point():
            obvious = torch.stack([state[name].double() for state in states]).mean(0)
            assert torch.equal(value, obvious.to(value.dtype)), name
        else:
            assert torch.equal(value, states[0][name])


def test_the_best_epochs_are_saved_and_no_others(whole):
    folder, rows = whole
    best = run_folder.best_rows(rows, TOP1, 3)
    assert set(ingredients(folder)) == {row["epoch"] for row in best}
    for epoch, bundle in ingredients(folder).items():
        row = rows[epoch - 1]
        assert bundle.scores["val"]["top1"] == row["val/top1"]


def test_a_bundle_is_the_average_only_if_its_val_score_is_better(whole):
    """Greedy from the best epoch on, by hand from the saved epochs."""
    folder, rows = whole
    final = Bundle.load(folder / run_folder.BUNDLE)
    checkpoint = run_folder.load_checkpoint(folder)
    assert checkpoint is not None
    scores, last = final.scores["val"], rows[-1]
    if ", the average of epochs" in final.source:
        epochs = [int(word) for word in final.source.partition("epochs ")[2].split(", ")]
        assert len(epochs) > 1
        saved = ingredients(folder)
        by_quality = [row["epoch"] for row in run_folder.best_rows(rows, TOP1, 3)]
        order = [epoch for epoch in by_quality if epoch in epochs]
        mean = final_weights.averaged([saved[epoch].net.state_dict() for epoch in order])
        assert same(mean, final.net.state_dict())
        assert (scores["top1"], -scores["loss"]) > (last["val/top1"], -last["val/loss"])
    else:
        assert same(final.net.state_dict(), checkpoint["average"])


@pytest.mark.parametrize("better", [True, False])
def test_the_val_decides(better, few_digits, tmp_path, monkeypatch, capsys, whole):
    """The score of every network but the saved epochs is set: averages are better, or worse."""
    score = PreparedRun.score

    def biased(self, net, images, task=None):
        result = score(self, net, images, task)
        if images is not self.data.val:
            return result
        state = net.state_dict()
        means = not any(same(state, each.net.state_dict()) for each in saved.values())
        top1 = 100.0 if means == better else 0.0
        return result._replace(scores={**result.scores, "top1": top1})

    folder = tmp_path / "run"
    rows = run.train(folder, "genet_tiny", few_digits, NOISY)
    for _ in range(NOISY.epochs):
        next(rows)
    saved = ingredients(folder)
    last = run_folder.load_checkpoint(folder)["average"]
    monkeypatch.setattr(PreparedRun, "score", biased)
    print_note.cache_clear()  # another run may have printed the same
    assert not list(rows)
    bundle = Bundle.load(folder / run_folder.BUNDLE)
    errors = capsys.readouterr().err
    assert ("the average of epochs" in bundle.source) == better
    assert ("no average of epochs" in errors) == (not better)
    assert same(bundle.net.state_dict(), last) == (not better)


def test_with_precise_statistics_those_of_the_average_are_measured(
    few_digits, tmp_path, monkeypatch
):
    """Each network that is scored is better than those before, so that the average has all."""
    folder, numbers = tmp_path / "run", count(200)
    recipe = replace(NOISY, epochs=3, soup=2, precise_bn=True)
    rows = run.train(folder, "genet_tiny", few_digits, recipe)
    for _ in range(3):
        next(rows)
    monkeypatch.setattr(PreparedRun, "val_scores", lambda *_: {"top1": float(next(numbers))})
    assert not list(rows)
    bundle = Bundle.load(folder / run_folder.BUNDLE)
    assert ", the average of epochs" in bundle.source
    mean = final_weights.averaged([each.net.state_dict() for each in ingredients(folder).values()])
    net = copy.deepcopy(bundle.net)
    net.load_state_dict(mean)
    how = BatchOptions(bundle.preprocessing, "cpu")
    expected = with_precise_statistics(net, find_task(), few_digits.train, how).state_dict()
    for name, value in bundle.net.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-6), name
    statistics = [name for name in mean if name.endswith("running_mean")]
    assert not any(torch.allclose(mean[name], expected[name]) for name in statistics)


@pytest.mark.parametrize("saves", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_before_the_log_has_an_epoch_ends_with_the_same_soup(
    saves, whole, few_digits, tmp_path, monkeypatch
):
    save, stops = run_folder.save_epoch, []

    def stop(folder, rows, state):
        stops.append(1)
        if len(stops) == saves:
            raise KeyboardInterrupt
        save(folder, rows, state)

    monkeypatch.setattr(run_folder, "save_epoch", stop)
    with pytest.raises(KeyboardInterrupt):
        soup_trained(tmp_path / "run", few_digits)
    monkeypatch.setattr(run_folder, "save_epoch", save)
    soup_trained(tmp_path / "run", few_digits)
    ours, theirs = ingredients(tmp_path / "run"), ingredients(whole[0])
    assert ours.keys() == theirs.keys()
    assert all(same(ours[key].net.state_dict(), theirs[key].net.state_dict()) for key in ours)
    bundles = [
        json.loads((folder / run_folder.BUNDLE / "bundle.json").read_text())
        for folder in (tmp_path / "run", whole[0])
    ]
    assert bundles[0]["source"] == bundles[1]["source"]
    assert bundles[0]["scores"] == bundles[1]["scores"]


def test_a_soup_of_one_epoch_or_without_a_val_is_refused(few_digits, tmp_path):
    with pytest.raises(ValueError, match=r"recipe\.soup 1"):
        replace(NOISY, soup=1)
    none = replace(few_digits, val=few_digits.val.subset([]))
    with pytest.raises(ValueError, match=r"recipe\.soup 3 needs validation images"):
        soup_trained(tmp_path / "run", none)


def test_what_others_wrote_in_the_place_of_an_epoch_is_refused_before_training(
    few_digits, tmp_path
):
    started = run.train(tmp_path / "run", "genet_tiny", few_digits, NOISY)
    next(started)
    started.close()
    slot = tmp_path / "run" / run_folder.SOUP / "3"
    slot.mkdir(parents=True)
    (slot / "letter.txt").write_text("words")
    with pytest.raises(ValueError, match=r"letter\.txt"):
        soup_trained(tmp_path / "run", few_digits)
    assert (slot / "letter.txt").read_text() == "words"
