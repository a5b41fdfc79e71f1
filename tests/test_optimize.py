"""What moves the weights, each piece against an independent one: optimizers, schedules, mixing, the average."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.transforms import v2

from fullstride.nets import zoo
from fullstride.train import mix
from fullstride.train.optimizer import (
    Average,
    build_optimizer,
    lr_at,
    momentum_at,
)
from fullstride.train.recipes import FINETUNE


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
    recipe = replace(FINETUNE, schedule="one_cycle", warmup_epochs=0, lr=0.7, momentum=0.95)
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
    exponential = replace(
        FINETUNE, schedule="exponential", factor=0.97, factor_epochs=1, warmup_epochs=0
    )
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


def test_mixup_and_cutmix_equal_torchvisions_with_the_same_share():
    x, labels = torch.rand(4, 3, 10, 12), torch.tensor([0, 2, 1, 2])
    images, targets = mix.mixed_up(x, labels, 3, share=0.3)
    expected = v2.MixUp(num_classes=3)
    assert torch.allclose(
        images, expected.transform(x, dict(lam=0.3, labels=labels, batch_size=4)), rtol=1e-6
    )
    assert targets.sum(1).tolist() == pytest.approx([1.0] * 4)
    assert targets[1].tolist() == pytest.approx(
        [0.7, 0.0, 0.3]
    )  # 0.3 of itself, the rest of the one before
    cut, soft = mix.cut_and_mixed(x, labels, 3, share=0.75, at=(0.5, 0.5))
    box = (3, 3, 9, 7)  # half of each side: 6 x 5, cut down to whole pixels around (6, 5)
    reference = v2.CutMix(num_classes=3)
    assert torch.equal(
        cut, reference.transform(x, dict(box=box, lam_adjusted=0.8, labels=labels, batch_size=4))
    )
    assert soft[1].tolist() == pytest.approx([0.2, 0.0, 0.8])


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
