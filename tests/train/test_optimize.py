"""Optimizers, schedules, mixing and the average, each against something independent."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fullstride.nets import zoo
from fullstride.train import batches
from fullstride.train.optimizer import (
    Average,
    build_optimizer,
    lr_at,
    momentum_at,
)
from fullstride.train.recipes.named import FINETUNE, RECIPES


def test_the_learning_rate_rises_in_a_line_and_falls_by_half_a_cosine():
    recipe = replace(FINETUNE, epochs=20, warmup_epochs=4, lr=0.8)
    assert lr_at(1, recipe) == pytest.approx(0.2)
    assert lr_at(4, recipe) == pytest.approx(0.8)
    assert lr_at(20, recipe) == pytest.approx(0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.8)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    for epoch in range(4, 20):
        assert lr_at(epoch, recipe) == pytest.approx(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()


def test_batch_norms_and_biases_do_not_decay_and_everything_else_does():
    net = zoo.create("tresnet_tiny")
    decayed, free = build_optimizer(net, FINETUNE).param_groups
    names = {id(p): name for name, p in net.named_parameters()}
    assert decayed["weight_decay"] == FINETUNE.weight_decay
    assert free["weight_decay"] == 0
    assert all(
        names[id(p)].endswith(".weight") and ".norm." not in names[id(p)] for p in decayed["params"]
    )
    assert all(names[id(p)].endswith(".bias") or ".norm." in names[id(p)] for p in free["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(names)


def test_other_recipes_decay_more():
    net = zoo.create("tresnet_tiny")
    biases = sum(name.endswith(".bias") for name, _ in net.named_parameters())
    norms = sum(2 for layer in net.modules() if isinstance(layer, nn.BatchNorm2d))
    free = {
        decay_on: len(
            build_optimizer(net, replace(FINETUNE, decay_on=decay_on)).param_groups[1]["params"]
        )
        for decay_on in ("weights", "all_but_norms", "all")
    }
    assert free == {"weights": biases + norms // 2, "all_but_norms": norms, "all": 0}


def test_one_cycle_equals_pytorchs_at_the_same_share_of_each_phase():
    recipe = replace(RECIPES["tresnet"], lr=0.7)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.7, momentum=0.95)
    total = 100
    reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.7, total_steps=total)
    rise = 0.3 * total - 1
    for step in range(total):
        share = (
            0.3 * step / rise if step <= rise else 0.3 + 0.7 * (step - rise) / (total - 1 - rise)
        )
        (group,) = optimizer.param_groups
        assert lr_at(share * recipe.epochs, recipe) == pytest.approx(group["lr"], rel=1e-6)
        assert momentum_at(share * recipe.epochs, recipe) == pytest.approx(
            group["momentum"], rel=1e-6
        )
        optimizer.step()
        if step < total - 1:
            reference.step()


def test_steps_and_exponential_equal_pytorchs_at_every_epoch():
    steps = replace(FINETUNE, epochs=90, schedule="steps", warmup_epochs=0, lr=1.6)
    exponential = replace(FINETUNE, schedule="exponential", factor_epochs=1, warmup_epochs=0)
    for recipe, kind, how in (
        (steps, torch.optim.lr_scheduler.MultiStepLR, dict(milestones=[30, 60, 80], gamma=0.1)),
        (exponential, torch.optim.lr_scheduler.ExponentialLR, dict(gamma=0.97)),
    ):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.lr)
        reference = kind(optimizer, **how)
        for epoch in range(recipe.epochs):
            assert lr_at(epoch + 0.5, recipe) == pytest.approx(reference.get_last_lr()[0], rel=1e-6)
            optimizer.step()
            reference.step()


def one_step(recipe, gradient):
    """A layer's weights before and after a step with that gradient everywhere."""
    net = nn.Linear(3, 2, bias=False)
    before = net.weight.detach().clone()
    net.weight.grad = torch.full_like(net.weight, gradient)
    optimizer = build_optimizer(net, recipe)
    optimizer.step()
    return before, net.weight.detach(), optimizer.state[net.weight]


def test_decoupled_weight_decay_does_not_pass_through_gradient_and_momentum():
    recipe = replace(FINETUNE, lr=0.1, weight_decay=0.3, decoupled_weight_decay=True)
    before, after, state = one_step(recipe, 0.0)
    assert torch.allclose(after, before * (1 - 0.1 * 0.3))
    assert not state["momentum_buffer"].any()
    before, _, state = one_step(replace(recipe, decoupled_weight_decay=False), 0.0)
    assert torch.allclose(state["momentum_buffer"], 0.3 * before)


def test_rmsprop_has_the_form_of_tensorflow():
    recipe = replace(FINETUNE, optimizer="rmsprop", lr=0.1, momentum=0.9, weight_decay=0.01)
    before, after, state = one_step(recipe, 0.5)
    gradient = 0.5 + 0.01 * before
    average = 0.9 * 1 + 0.1 * gradient**2  # it starts at one
    velocity = 0.1 * gradient / (average + 1e-3).sqrt()  # epsilon inside the root
    assert torch.allclose(state["momentum_buffer"], velocity, rtol=1e-5)
    assert torch.allclose(after, before - velocity, rtol=1e-5)


def batch_mixed(seed, **alphas):
    # No two values are equal, so that a pixel shows which image it is from.
    x, labels = torch.randperm(2160).view(6, 3, 10, 12) / 2160, torch.tensor([0, 2, 1, 2, 0, 1])
    draws = np.random.default_rng(seed)
    images, targets = batches.mix(x, labels, 3, **alphas, rng=draws)
    share = targets[1, 2]  # of image 1, whose predecessor has class 0
    previous = nn.functional.one_hot(labels.roll(1), 3)
    expected = share * nn.functional.one_hot(labels, 3) + (1 - share) * previous
    assert torch.allclose(targets, expected, atol=1e-6)
    return x, images, share.item()


def test_mixup_blends_each_image_with_the_previous_one_as_its_target_says():
    for seed in range(5):
        x, images, share = batch_mixed(seed, mixup=0.4, cutmix=0.0)
        assert share == pytest.approx(np.random.default_rng(seed).beta(0.4, 0.4), abs=1e-6)
        assert torch.allclose(images, share * x + (1 - share) * x.roll(1, 0), atol=1e-6)


def test_cutmix_pastes_one_box_of_the_previous_image_whose_area_is_in_the_target():
    for seed in range(20):
        x, images, share = batch_mixed(seed, mixup=0.0, cutmix=1.0)
        pasted = images == x.roll(1, 0)
        assert torch.equal(images, torch.where(pasted, x.roll(1, 0), x))
        rows, columns = pasted[0, 0].any(1).sum(), pasted[0, 0].any(0).sum()
        assert pasted.sum() == rows * columns * 6 * 3  # the same rectangle in each
        assert share == pytest.approx(1 - rows.item() * columns.item() / 120, abs=1e-6)


def test_the_box_has_the_area_that_was_drawn_and_is_clipped_at_the_border():
    assert batches.box_of(0.75, 0.5, 0.5, 10, 12) == (3, 3, 9, 7)
    assert batches.box_of(0.75, 0.0, 0.99, 10, 12) == (8, 0, 12, 2)


def test_with_both_each_batch_gets_one_of_the_two():
    blended = []
    for seed in range(40):
        x, images, _ = batch_mixed(seed, mixup=0.4, cutmix=1.0)
        blended.append(not bool(((images == x) | (images == x.roll(1, 0))).all()))
    assert 8 < sum(blended) < 32


def test_the_average_equals_pytorchs_at_a_constant_decay_and_covers_batch_norm_statistics():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    ours = Average(net, 0.5)
    theirs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    theirs.update_parameters(net)  # PyTorch's first update copies
    for step in range(8, 14):  # from here on (1 + step) / (10 + step) is at least one half
        net(torch.randn(5, 3, dtype=torch.float64))
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p))
        ours.update(step)
        theirs.update_parameters(net)
    for a, b in zip(ours.net.parameters(), theirs.module.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)
    assert not torch.equal(ours.net[1].running_mean, net[1].running_mean)
    assert ours.net[1].num_batches_tracked == net[1].num_batches_tracked


def test_the_average_of_a_short_run_forgets_its_first_weights():
    net = nn.Linear(1, 1)
    average = Average(net, 0.9999)
    with torch.no_grad():
        net.weight.fill_(100.0)
    for step in range(30):
        average.update(step)
    assert average.net.weight.item() == pytest.approx(100.0, rel=1e-3)


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adamw", "lamb"])
def test_an_optimizer_goes_on_from_its_saved_state_bit_for_bit(name):
    recipe = replace(FINETUNE, optimizer=name)
    x = torch.randn(8, 4, dtype=torch.float64)

    def steps(net: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    optimizer = build_optimizer(net, recipe)
    steps(net, optimizer, 3)
    resumed = nn.Linear(4, 3).double()
    resumed.load_state_dict(net.state_dict())
    other = build_optimizer(resumed, recipe)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(net, optimizer, 2)
    steps(resumed, other, 2)
    assert all(map(torch.equal, net.parameters(), resumed.parameters()))
