"""Are the parts of the modern recipes those of timm and torchvision?"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.data.auto_augment import rand_augment_transform
from timm.loss import BinaryCrossEntropy
from timm.optim import muon
from torch import nn

from fullstride.data.transforms.crop import Augmentation
from fullstride.tasks.classify import Classify
from fullstride.train import run
from fullstride.train.batches import mix
from fullstride.train.optimizer import build_optimizer, parameter_groups
from fullstride.train.recipes.named import RECIPES
from fullstride.train.recipes.papers import average_decay_per_step

RSB = ("rsb_a1", "rsb_a2", "rsb_a3")


def small_net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(4)
    net = nn.Sequential(*layers)
    net(torch.zeros(2, 3, 8, 8))
    return net


def pairs_after_steps(
    nets: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], steps: int = 4
) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """The parameters of two networks after steps with equal images."""
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    for _ in range(steps):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    return zip(*(net.parameters() for net in nets), strict=True)


@pytest.mark.parametrize("name", RSB)
def test_lamb_updates_the_weights_as_timms_train_script_does(name):
    recipe = RECIPES[name]
    ours, theirs = small_net().double(), small_net().double()
    optimizers = (
        build_optimizer(ours, recipe),
        timm.optim.create_optimizer_v2(
            theirs, opt="lamb", lr=recipe.lr, weight_decay=recipe.weight_decay
        ),
    )
    for one, other in pairs_after_steps((ours, theirs), optimizers):
        torch.testing.assert_close(one, other)  # the norm is summed in another order
    assert not torch.equal(ours[0].weight, small_net().double()[0].weight)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_updates_weights_of_layers_as_timms_does(monkeypatch, nesterov):
    recipe = replace(RECIPES["scratch"], optimizer="muon", lr=0.02, nesterov=nesterov)
    exact = functools.partial(muon.zeropower_via_newtonschulz, dtype=torch.float64)
    monkeypatch.setattr(muon, "zeropower_via_newtonschulz", exact)
    nets = [nn.Sequential(*(small_net()[place] for place in (0, 2, 3))).double() for _ in range(2)]
    for net in nets:
        net[0].bias = net[2].bias = None
    optimizers = (
        build_optimizer(nets[0], recipe),
        muon.Muon(
            parameter_groups(nets[1], recipe), lr=0.02, momentum=recipe.momentum, nesterov=nesterov
        ),
    )
    for one, other in pairs_after_steps(nets, optimizers):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_muon_updates_all_other_parameters_as_adamw_does():
    recipe = replace(RECIPES["scratch"], optimizer="muon", lr=0.02)
    nets = [small_net().double() for _ in range(2)]
    groups = parameter_groups(nets[1], recipe)
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))
    begin = small_net().double()
    pairs = pairs_after_steps(nets, (build_optimizer(nets[0], recipe), adamw), steps=1)
    for first, (one, other) in zip(begin.parameters(), pairs, strict=True):
        assert not torch.equal(one, first)
        assert torch.equal(one, other) == (one.ndim == 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rsb_a1", "rand-m7-mstd0.5-inc1"),
        ("rsb_a2", "rand-m7-mstd0.5-inc1"),
        ("rsb_a3", "rand-m6-mstd0.5-inc1"),
        ("tresnet_timm", "rand-m9-mstd0.5-inc1"),
    ],
)
def test_rand_augment_is_what_timms_name_of_it_means(name, text):
    values = {field.name: getattr(RECIPES[name], field.name) for field in fields(Augmentation)}
    ours = Augmentation(**values)
    theirs = rand_augment_transform(text)
    (first, *_) = theirs.ops
    assert (ours.auto_augment, ours.trivial_augment, ours.cutout) == (False, False, 0)
    assert (ours.rand_form, ours.rand_increasing) == ("timm", "Increasing" in str(theirs))
    assert ours.rand_layers == theirs.num_layers
    assert (ours.rand_magnitude, ours.rand_std) == (first.magnitude, first.magnitude_std)
    assert ours.rand_probability == first.prob


@pytest.mark.parametrize("name", RSB)
def test_the_loss_of_mixed_images_is_timms(name):
    recipe = RECIPES[name]
    draws = np.random.default_rng(3)
    x, labels = torch.zeros(6, 3, 8, 8), torch.arange(6)
    for _ in range(6):
        _, targets = mix(x, labels, 6, mixup=recipe.mixup, cutmix=recipe.cutmix, rng=draws)
        logits = torch.from_numpy(draws.normal(size=(6, 6)))
        smooth = recipe.label_smoothing
        theirs = BinaryCrossEntropy(smoothing=smooth, target_threshold=0.2)
        expected = theirs(logits, targets * (1 - smooth) + smooth / 6)
        ours = Classify().with_options(recipe).loss(logits, targets)
        assert ours.item() == pytest.approx(expected.item())


def test_an_average_that_changes_every_step_forgets_as_fast_as_torchvisions():
    recipe, images = RECIPES["torchvision_600"], 1_281_167
    # references/classification/train.py: 8 processes of 128 images, an update in 32 steps
    per_update = 1 - (1 - 0.99998) * 8 * 128 * 32 / 600
    steps = images // recipe.batch_size
    updates = per_update ** (steps / 32)
    assert recipe.ema_decay**steps == pytest.approx(updates, rel=1e-6)
    assert average_decay_per_step(0.9, 1, 1, 1) == pytest.approx(0.9)


def test_the_procedures_differ_in_what_the_papers_table_says():
    a1, a2, a3 = (RECIPES[name] for name in RSB)
    assert replace(a1, epochs=300, weight_decay=0.02, label_smoothing=0, mixup=0.1) == a2
    assert (a1.epochs, a1.weight_decay, a1.label_smoothing, a1.mixup) == (600, 0.01, 0.1, 0.2)
    assert (a3.epochs, a3.lr, a3.drop_path, a3.repeated_augmentation) == (100, 8e-3, 0, 1)
    assert (a2.lr, a2.batch_size, a2.drop_path, a2.repeated_augmentation) == (5e-3, 2048, 0.05, 3)
    assert {recipe.warmup_epochs for recipe in (a1, a2, a3)} == {5}
    assert {recipe.schedule for recipe in (a1, a2, a3)} == {"cosine"}


@pytest.mark.parametrize("name", ["rsb_a1", "torchvision_600"])
def test_a_run_that_stops_goes_on_to_the_same_weights(name, few_digits, tmp_path):
    recipe = replace(RECIPES[name], epochs=2, batch_size=32, resolution=32, precision="fp32")
    whole = list(run.train(tmp_path / "whole", "genet_tiny", few_digits, recipe))
    stopped = run.train(tmp_path / "stopped", "genet_tiny", few_digits, recipe)
    next(stopped)
    stopped.close()
    resumed = list(run.train(tmp_path / "stopped", "genet_tiny", few_digits, recipe))
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole]
    both = [
        load_file(tmp_path / one / "bundle" / "weights.safetensors") for one in ("whole", "stopped")
    ]
    assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])
