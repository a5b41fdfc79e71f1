"""Batch statistics: running ones have no weight for the initial values, those that are measured at
the end are of the images, and taken only where better."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fullstride.data.dataset import DataSet, open_data
from fullstride.data.loader import Batches, LoaderOptions
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.tasks.classify import Classify
from fullstride.train import final_weights, run, run_folder
from fullstride.train.averages import RunningStatistics
from fullstride.train.batches import BatchOptions, training_batches
from fullstride.train.loop import train_epochs
from fullstride.train.optimizer import frozen_names
from fullstride.train.prepare import PreparedRun, prepare
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import FinalNetwork, score_images

SHORT = replace(
    DIGITS, epochs=2, warmup_epochs=0, resolution=16, batch_size=16, lr=0.01, dropout=0.5
)


def statistics(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items() if "running" in name}


def precise_of(start: PreparedRun, net, **how):
    data, task = start.data, start.task
    return final_weights.with_precise_statistics(net, task, data.train, start.scoring, **how)


def prepared(folder, data, **changes) -> PreparedRun:
    return prepare(folder, "genet_tiny", data, replace(SHORT, **changes))


def test_precise_statistics_are_those_of_all_training_images_at_once(few_digits, tmp_path):
    start = prepared(tmp_path / "run", few_digits)
    net = start.net
    before = statistics(net)
    precise = precise_of(start, net)
    assert all(torch.equal(value, before[name]) for name, value in statistics(net).items())
    assert not any(module.training for module in precise.modules())
    (batch,) = Batches(
        few_digits.train, start.task.test_view(start.pre), LoaderOptions(batch=64)
    ).epoch(0)
    plain = prepared(tmp_path / "plain", few_digits).net.eval()
    for module in plain.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.train().momentum = 1.0
    with torch.no_grad():
        plain(batch.x)
    for name, value in statistics(plain).items():
        assert torch.allclose(precise.state_dict()[name], value, rtol=1e-3, atol=1e-4), name
        assert not torch.allclose(before[name], value)


def test_precise_statistics_are_taken_only_where_the_val_is_better(few_digits, tmp_path):
    """Of networks whose statistics are those of the images, and those of nothing."""
    start = prepared(tmp_path / "run", few_digits)
    good = precise_of(start, start.net)
    loss = start.score(good, few_digits.val).scores["loss"]
    for scale, is_better in ((1.0, False), (1e-3, True)):
        net = precise_of(start, start.net)
        for name, value in net.state_dict().items():
            if name.endswith("running_var"):
                value *= scale
        final = FinalNetwork(net, start.val_scores(net))
        chosen = final_weights.better_statistics(start, final)
        assert (chosen.net is not net) == is_better
        assert start.val_scores(chosen.net) == chosen.scores
        assert start.score(chosen.net, few_digits.val).scores["loss"] == pytest.approx(loss)


def test_statistics_of_frozen_stages_stay(few_digits, tmp_path):
    first = tmp_path / "first"
    list(run.train(first, "genet_tiny", few_digits, SHORT))
    recipe = replace(SHORT, freeze_stages=2)
    start = prepare(
        tmp_path / "run", "genet_tiny", few_digits, recipe, RunOptions(weights=str(first))
    )
    before = statistics(start.net)
    frozen = frozen_names(start.net, recipe)
    after = statistics(precise_of(start, start.net, frozen=frozen))
    names = [name for name in before if torch.equal(before[name], after[name])]
    assert names
    assert all(name.startswith(("stem.", "stages.0.", "stages.1.")) for name in names)
    assert not any(name.startswith(("stages.2.", "stages.3.")) for name in names)
    tail = frozen_names(start.net, replace(SHORT, frozen=("stages.2", "head")))
    after = statistics(precise_of(start, start.net, frozen=tail))
    for name, value in after.items():
        is_frozen = name.startswith(("stages.2.", "head."))
        assert torch.equal(value, before[name]) == is_frozen, name


def test_a_run_ends_with_precise_statistics_where_they_are_better(few_digits, tmp_path, capfd):
    bundles = {}
    for precise_bn in (False, True):
        folder = tmp_path / str(precise_bn)
        list(run.train(folder, "genet_tiny", few_digits, replace(SHORT, precise_bn=precise_bn)))
        bundles[precise_bn] = Bundle.load(folder / run_folder.BUNDLE)
    scores = {key: bundle.scores["val"] for key, bundle in bundles.items()}
    assert scores[True]["loss"] < scores[False]["loss"]
    assert "batch statistics" in capfd.readouterr().err
    weights = [dict(bundle.net.named_parameters()) for bundle in bundles.values()]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


MOMENTUM = 0.3  # 1 / (step + 1) is above it in the steps 0, 1 and 2
BATCHES = [3 * torch.randn(4, 3, 32, 32, generator=torch.manual_seed(i)) + i for i in range(6)]


def network(form: str) -> nn.Module:
    torch.manual_seed(0)
    net = zoo.create("timm/resnet10t" if form == "timm" else "genet_tiny", classes=2, in_channels=3)
    for norm in norms(net):  # as from other data: far from what the network meets here
        norm.running_mean.fill_(1000.0)
        norm.running_var.fill_(1e6)
    return net.train()


def norms(net: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]


def running(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in net.state_dict().items() if "running_" in name}


@pytest.mark.parametrize("form", ["plain", "timm"])
def test_statistics_are_the_mean_of_the_first_batches_and_then_a_moving_average(form):
    net, obvious = network(form), network("timm" if form == "timm" else "plain")
    statistics = RunningStatistics(net, MOMENTUM)
    for step, x in enumerate(BATCHES):
        statistics.before(step)
        net(x)
        statistics.after(step)
        for norm in norms(obvious):  # PyTorch's own rule, with the weight of this step
            norm.momentum = max(MOMENTUM, 1 / (step + 1))
        obvious(x)
    for name, value in running(net).items():
        torch.testing.assert_close(value, running(obvious)[name], rtol=1e-4, atol=1e-4)
    assert all(value.abs().max() < 900 for value in running(net).values())


def test_statistics_of_frozen_norms_and_of_recipes_without_the_field_stay_as_they_are():
    plain, unchanged, frozen = network("plain"), network("plain"), network("plain").eval()
    for net, momentum in ((unchanged, None), (frozen, MOMENTUM)):
        statistics = RunningStatistics(net, momentum)
        statistics.before(0)
        net(BATCHES[0])
        statistics.after(0)
    plain(BATCHES[0])
    assert all(map(torch.equal, running(plain).values(), running(unchanged).values()))
    assert all((value >= 1000).all() for value in running(frozen).values())


def test_with_several_passes_a_step_the_initial_values_have_no_weight_either():
    net = network("plain")
    first = norms(net)[0]
    statistics = RunningStatistics(net, MOMENTUM)
    for step in range(3):
        statistics.before(step, passes=2)
        net(BATCHES[2])
        net(BATCHES[2])
        statistics.after(step)
    once = network("plain")
    for norm in norms(once):
        norm.momentum = 1.0
    once(BATCHES[2])
    torch.testing.assert_close(first.running_mean, norms(once)[0].running_mean)
    torch.testing.assert_close(first.running_var, norms(once)[0].running_var)


def few_digits(images: int) -> DataSet:
    data = open_data("digits")
    return replace(data, train=data.train.subset(range(images)))


RECIPE = Recipe(
    epochs=6,
    batch_size=128,
    lr=0.05,
    warmup_epochs=1,
    ema_decay=0.998,
    bn_momentum=0.1,
    resolution=32,
)


def trained(recipe: Recipe, data: DataSet):
    torch.manual_seed(0)
    net = zoo.create("genet_tiny", classes=10, in_channels=1)
    pre = zoo.family_preprocessing(net.spec)
    return net, pre, training_batches(data, Classify(), BatchOptions(pre), recipe)


def test_a_training_that_was_stopped_while_the_statistics_are_young_goes_on_to_the_same_bits():
    data, recipe = few_digits(40), replace(RECIPE, batch_size=8, epochs=1)
    net, _, batches = trained(recipe, data)
    states = [
        copy.deepcopy(checkpoint.state)
        for checkpoint in train_epochs(net, Classify(), batches, recipe, checkpoint_every_steps=2)
    ]
    resumed, _, batches = trained(recipe, data)
    *_, last = train_epochs(resumed, Classify(), batches, recipe, states[0])
    for name in ("net", "average"):
        for key, value in states[-1][name].items():
            assert torch.equal(last.state[name][key], value), key


def test_a_fresh_network_at_one_step_an_epoch_does_not_keep_the_initial_statistics():
    """Of 190 images, at six epochs of one step, as the recipe for fine-tuning had it."""
    data, losses = few_digits(190), {}
    for momentum in (None, 0.1):
        recipe = replace(RECIPE, bn_momentum=momentum)
        net, pre, batches = trained(recipe, data)
        *_, last = train_epochs(net, Classify(), batches, recipe)
        losses[momentum] = score_images(
            last.average, Classify(), data.val, BatchOptions(pre, "cpu")
        )[0]
    assert losses[0.1]["loss"] < losses[None]["loss"] / 5
