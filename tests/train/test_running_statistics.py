"""Batch norm's running statistics: no weight for the initial values, in every form of a network."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fullstride.data.dataset import DataSet, open_data
from fullstride.nets import fused_form, zoo
from fullstride.tasks.classify import Classify
from fullstride.train.batches import training_batches
from fullstride.train.loop import RunningStatistics, train_epochs
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import score_images

MOMENTUM = 0.3  # 1 / (step + 1) is above it in the steps 0, 1 and 2
BATCHES = [3 * torch.randn(4, 3, 32, 32, generator=torch.manual_seed(i)) + i for i in range(6)]


def network(form: str) -> nn.Module:
    torch.manual_seed(0)
    net = zoo.create("timm/resnet10t" if form == "timm" else "genet_tiny", classes=2, in_channels=3)
    if form == "fused":
        fused_form.fused(net, "genet_tiny", int8=False)
    for norm in norms(net):  # as from other data: far from what the network meets here
        norm.running_mean.fill_(1000.0)
        norm.running_var.fill_(1e6)
    return net.train()


def norms(net: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]


def running(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in net.state_dict().items() if "running_" in name}


@pytest.mark.parametrize("form", ["plain", pytest.param("fused", marks=pytest.mark.fused), "timm"])
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
    statistics = RunningStatistics(net, MOMENTUM, passes=2)
    for step in range(3):
        statistics.before(step)
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
    return net, pre, training_batches(data, Classify(), pre, recipe)


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
        losses[momentum] = score_images(last.average, Classify(), data.val, pre, "cpu")[0]
    assert losses[0.1]["loss"] < losses[None]["loss"] / 5
