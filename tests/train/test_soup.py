"""Averages of epochs: equal to the obvious mean, kept only if the validation split says so, and
resumed."""

import copy
import json
from dataclasses import replace
from itertools import count

import pytest
import torch

from fullstride.io.console import print_note
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.tasks import find_task
from fullstride.train import averages, run, run_folder
from fullstride.train.averages import with_precise_statistics
from fullstride.train.prepare import PreparedRun
from fullstride.train.recipes.named import DIGITS

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


def trained(folder, digits, recipe=NOISY):
    return list(run.train(folder, "genet_tiny", digits, recipe))


@pytest.fixture(scope="module")
def whole(few_digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("soup") / "run"
    return folder, trained(folder, few_digits)


def ingredients(folder):
    """The saved bundles by their epoch."""
    bundles = [Bundle.load(slot) for slot in sorted((folder / averages.SOUP).iterdir())]
    return {int(bundle.scores["val"][averages.EPOCH]): bundle for bundle in bundles}


def same(first, second):
    return all(torch.equal(value, second[key]) for key, value in first.items())


def test_the_mean_of_weights_and_statistics_is_the_obvious_one():
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        net = zoo.create("genet_tiny", in_channels=1, classes=4)
        net.train()(torch.rand(4, 1, 32, 32))
        states.append(net.state_dict())
    mean = averages.averaged(states)
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
        mean = averages.averaged([saved[epoch].net.state_dict() for epoch in order])
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
    mean = averages.averaged([each.net.state_dict() for each in ingredients(folder).values()])
    net = copy.deepcopy(bundle.net)
    net.load_state_dict(mean)
    how = few_digits.train, bundle.preprocessing, "cpu"
    expected = with_precise_statistics(net, find_task(), *how).state_dict()
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
        trained(tmp_path / "run", few_digits)
    monkeypatch.setattr(run_folder, "save_epoch", save)
    trained(tmp_path / "run", few_digits)
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
    with pytest.raises(ValueError, match=r"recipe\.soup 3 needs a validation split"):
        trained(tmp_path / "run", none)


def test_what_others_wrote_in_the_place_of_an_epoch_is_refused_before_training(
    few_digits, tmp_path
):
    started = run.train(tmp_path / "run", "genet_tiny", few_digits, NOISY)
    next(started)
    started.close()
    slot = tmp_path / "run" / averages.SOUP / "3"
    slot.mkdir(parents=True)
    (slot / "letter.txt").write_text("words")
    with pytest.raises(ValueError, match=r"letter\.txt"):
        trained(tmp_path / "run", few_digits)
    assert (slot / "letter.txt").read_text() == "words"
