"""A new classifier begins at the loss of guessing, ln K, in every family of timm and in ours."""

import math
import warnings
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F

from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.tasks import find_task
from fullstride.train.prepare import initial_network
from fullstride.train.recipes.recipe import Recipe

RECIPE = Recipe(epochs=1, batch_size=2, lr=0.1)
# Small networks whose classifiers timm draws from +-1 / sqrt(K), others that are fine there, some
# with two classifiers and one that is a convolution.
SOME = [
    "efficientnet_lite0",
    "mobilenetv3_small_050",
    "tinynet_e",
    "resnet10t",
    "convnext_atto",
    "levit_128s",
    "dla46x_c",
    "test_byobnet",
]


def first_losses(name, data, classes=2):
    """The first loss of training from random weights, and from those for other classes."""
    data, task = replace(data, classes=tuple("abcdefgh"[:classes]), channels=3), find_task()
    spec = zoo.spec(name)
    side = spec.resolution
    if name.startswith("timm/") and zoo.create(name).refusal(64, 64) == "":
        side = 64
    recipe = replace(RECIPE, resolution=side)
    other = zoo.create(name, classes=5, in_channels=3, resolution=side)
    start = Bundle(
        net=other,
        name="other",
        classes=tuple("vwxyz"),
        preprocessing=zoo.family_preprocessing(other.spec),
    )
    x = torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(0))
    y = torch.arange(4) % classes
    losses = []
    for begin in (None, start):
        net, _ = initial_network(name, task, data, recipe, begin)
        losses.append(F.cross_entropy(net.train()(x), y).item())
    return losses


@pytest.mark.parametrize("name", SOME)
def test_a_network_of_timm_begins_at_the_loss_of_guessing(name, few_digits):
    losses = first_losses(f"timm/{name}", few_digits)
    assert losses == pytest.approx([math.log(2)] * 2, rel=0.2)


@pytest.mark.parametrize("name", ["genet_tiny", "tresnet_tiny", "resnet_rs_tiny", "resnet18"])
def test_ours_begin_at_the_loss_of_guessing_from_weights_for_other_classes(name, few_digits):
    _, loss = first_losses(name, few_digits, classes=7)
    assert loss == pytest.approx(math.log(7), rel=0.2)


def test_the_classifier_of_timm_alone_begins_far_from_it():
    torch.manual_seed(0)
    net = timm.create_model("tf_efficientnet_lite0", num_classes=2).train()
    x = torch.randn(4, 3, 64, 64)
    assert F.cross_entropy(net(x), torch.arange(4) % 2).item() > 1.2 * math.log(2)


LARGE = 2e8  # parameters of a network that a test has no memory for, as each of deepseek_vit's


def small_network(family):
    """A small network of a family of timm, of the few whose names say that they are.

    None where it is large.
    """

    def parameters(name):
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            return sum(each.numel() for each in timm.create_model(name).parameters())

    words = ("test_", "tiny", "nano", "atto", "small", "xs", "s0", "050")
    names = timm.list_models(module=family)
    order = sorted(names, key=lambda name: (not any(word in name for word in words), len(name)))
    smallest = min(order[:4], key=parameters)
    return smallest if parameters(smallest) < LARGE else None


@pytest.mark.slow
@pytest.mark.parametrize("family", timm.list_modules())
def test_a_network_of_each_family_of_timm_begins_at_the_loss_of_guessing(family, few_digits):
    name = small_network(family)
    if name is None:
        pytest.skip("all networks of the family are large")
    losses = first_losses(f"timm/{name}", few_digits)
    assert losses == pytest.approx([math.log(2)] * 2, rel=0.2)
