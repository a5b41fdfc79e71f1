"""Optimizers, schedules, mixing and the average against something independent; layers with rates of
their own, and frozen ones."""

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify
from fullstride.train import batches, run, run_folder
from fullstride.train.averages import Average
from fullstride.train.batches import BatchOptions, training_batches
from fullstride.train.compute import SINGLE_PROCESS
from fullstride.train.loop import Trainer, build_trainer, train_epochs
from fullstride.train.optimizer import build_optimizer, lr_at, lr_scales, momentum_at
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS, FINETUNE, RECIPES

GRAY = Preprocessing(resolution=16, mean=(0.0,), std=(1.0,), crop=1.0)
SHORT = replace(DIGITS, epochs=3, warmup_epochs=1, resolution=16, batch_size=16, lr=0.05)


def network(name: str = "genet_tiny"):
    torch.manual_seed(0)
    return zoo.create(name, in_channels=1, classes=10, resolution=32)


@pytest.mark.parametrize("name", ["resnet10t", "tf_efficientnet_lite0", "convnext_atto"])
def test_rates_by_layer_equal_timms_for_its_networks(name):
    net = zoo.create(f"timm/{name}", in_channels=3, classes=10)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    timms = {
        names[id(parameter)]: group["lr_scale"]
        for group in param_groups_layer_decay(net.net, layer_decay=0.8)
        for parameter in group["params"]
    }
    assert lr_scales(net, replace(SHORT, layer_decay=0.8)) == pytest.approx(timms, rel=1e-12)


@pytest.mark.parametrize("name", ["genet_tiny", "tresnet_tiny", "resnet_rs_tiny"])
def test_rates_fall_by_a_factor_from_block_to_block_down_to_the_stem(name):
    net = network(name)
    scales = lr_scales(net, replace(SHORT, layer_decay=0.5, head_lr_scale=4.0))
    blocks = [f"stages.{i}.{j}." for i, stage in enumerate(net.stages) for j in range(len(stage))]
    rates = [
        {scale for path, scale in scales.items() if path.startswith(part)}
        for part in ("stem.", *blocks)
    ]
    assert all(len(each) == 1 for each in rates)
    values = [each.pop() for each in rates]
    assert all(after == 2 * before for before, after in pairwise(values))
    assert values[-1] == 0.5
    assert {scales["head.fc.weight"], scales["head.fc.bias"]} == {4.0}


def learner_of(net, recipe, per_epoch=4) -> Trainer:
    return build_trainer(net.train(), Classify(), recipe.in_epochs(per_epoch), per_epoch, None,
                   SINGLE_PROCESS)  # fmt: skip


def test_a_step_takes_each_parameter_by_the_rate_of_its_layer():
    """SGD without momentum and decay: the step is the rate times the gradient."""
    recipe = replace(SHORT, momentum=0.0, weight_decay=0.0, schedule="steps", warmup_epochs=0)
    recipe = replace(
        recipe, layer_decay=0.5, nesterov=False, label_smoothing=0.0, channels_last=False
    )
    net, same = network(), network()
    before = {name: value.clone() for name, value in net.named_parameters()}
    x = torch.rand(8, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8)
    learner_of(net, recipe).step(x, labels, 0)
    same.train()
    torch.nn.functional.cross_entropy(same(x), labels).backward()
    scales = lr_scales(net, recipe)
    for (name, after), theirs in zip(net.named_parameters(), same.parameters(), strict=True):
        step = recipe.lr * scales[name] * theirs.grad
        assert torch.allclose(after, before[name] - step, atol=1e-5), name


def test_the_groups_of_a_recipe_without_layer_options_are_the_two_of_before():
    net = network()
    groups = build_optimizer(net, SHORT).param_groups
    assert [group["weight_decay"] for group in groups] == [SHORT.weight_decay, 0.0]
    assert not any("lr_scale" in group for group in groups)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    assert sum(len(group["params"]) for group in groups) == len(names)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("genet_tiny", 2),
        ("tresnet_tiny", 1),
        ("resnet_rs_tiny", -1),
        ("timm/resnet10t", 3),
        ("timm/resnet10t", -1),
    ],
)
def test_frozen_stages_keep_their_weights_and_statistics_and_the_others_learn(
    name, stages, few_digits
):
    net = network(name)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    recipe = replace(SHORT, freeze_stages=stages, weight_decay=0.1)
    batches = training_batches(few_digits, Classify(), BatchOptions(GRAY), recipe)
    *_, epoch = train_epochs(net, Classify(), batches, recipe)
    numbers = net.layer_numbers(coarse=True)
    last = max(numbers.values())
    most = last - 1 if stages == -1 else stages
    frozen = {key.rpartition(".")[0] for key, number in numbers.items() if number <= most}
    assert frozen
    for state in (net.state_dict(), epoch.average.state_dict()):
        changed = {key for key, value in state.items() if not torch.equal(value, before[key])}
        assert not {key for key in changed if key.rpartition(".")[0] in frozen}
        assert {key for key, number in numbers.items() if number > most} <= changed
    held = len(epoch.state["optimizer"]["state"])
    assert held == sum(number > most for number in numbers.values())


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("genet_tiny", ("stem", "stages.3", "head")),
        ("resnet_rs_tiny", ("stages.1", "stages.2.0.branch.conv2", "head.fc.bias")),
        ("timm/resnet10t", ("net.layer2",)),
    ],
)
def test_layers_that_are_frozen_by_path_stay_and_all_others_learn(name, paths, few_digits):
    net = network(name)
    randomise(net)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    recipe = replace(SHORT, epochs=1, frozen=paths, weight_decay=0.1)
    batches = training_batches(few_digits, Classify(), BatchOptions(GRAY), recipe)
    (epoch,) = train_epochs(net, Classify(), batches, recipe)
    for state in (net.state_dict(), epoch.average.state_dict()):
        for key, value in state.items():
            is_frozen = any(f"{key}.".startswith(f"{path}.") for path in paths)
            assert torch.equal(value, before[key]) == is_frozen, key


def randomise(net) -> None:
    """Every tensor, so that no gain is zero and no statistic is initial."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in net.state_dict().values():
            if value.is_floating_point():
                value.add_(0.1 * torch.rand(value.shape, generator=generator))


def test_frozen_stages_save_no_tensors_for_the_backward_pass():
    x, labels, sizes = torch.rand(4, 1, 32, 32), torch.arange(4), []
    for stages in (0, 2, -1):
        learner, saved = learner_of(network(), replace(SHORT, freeze_stages=stages)), {}

        def pack(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            learner.step(x, labels, 0)
        sizes.append(sum(saved.values()))
    assert sizes[0] > 2 * sizes[1] > 4 * sizes[2]


def test_the_classifier_alone_trains_in_the_first_epochs_and_then_everything(few_digits):
    recipe = replace(SHORT, epochs=2, freeze_epochs=1, ema_decay=0.0)
    batches = training_batches(few_digits, Classify(), BatchOptions(GRAY), recipe)
    net = network()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    epochs = train_epochs(net, Classify(), batches, recipe)
    next(epochs)
    changed = {
        key for key, value in net.state_dict().items() if not torch.equal(value, before[key])
    }
    assert changed == {"head.fc.weight", "head.fc.bias"}
    probed = network()
    probe = train_epochs(probed, Classify(), batches, replace(recipe, freeze_stages=-1))
    next(probe)
    assert torch.equal(net.head.fc.weight, probed.head.fc.weight)
    next(epochs)
    after = net.state_dict()
    assert all(not torch.equal(after[key], before[key]) for key, _ in net.named_parameters())
    means = [key for key in after if key.endswith("running_mean")]
    assert all(not torch.equal(after[key], before[key]) for key in means)


LAYERS = (
    dict(freeze_epochs=1.5, layer_decay=0.7, head_lr_scale=2.0),
    dict(freeze_epochs=1.5, freeze_stages=2, optimizer="adamw"),
)


@pytest.mark.parametrize(
    ("fields", "saves"),
    [
        (LAYERS[0], 3),
        pytest.param(LAYERS[0], 2, marks=pytest.mark.slow),
        pytest.param(LAYERS[1], 5, marks=pytest.mark.slow),
    ],
)
def test_a_run_with_frozen_layers_goes_on_to_the_same_weights_bit_for_bit(
    fields, saves, few_digits, tmp_path, monkeypatch
):
    """It is stopped before, at and after the middle of the second epoch, where freezing ends."""
    weights = tmp_path / "start"
    list(run.train(weights, "genet_tiny", few_digits, replace(SHORT, bn_momentum=0.1)))
    recipe = replace(SHORT, lr=1e-3, **fields)
    how = RunOptions(weights=str(weights), checkpoint_every_steps=2)
    whole = list(run.train(tmp_path / "whole", "genet_tiny", few_digits, recipe, how))
    save, count = run_folder.save_checkpoint, []

    def stop(folder, state):
        save(folder, state)
        count.append(1)
        if len(count) == saves:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        list(run.train(tmp_path / "stopped", "genet_tiny", few_digits, recipe, how))
    monkeypatch.setattr(run_folder, "save_checkpoint", save)
    again = list(run.train(tmp_path / "stopped", "genet_tiny", few_digits, recipe, how))
    assert [row["loss"] for row in again] == [row["loss"] for row in whole]
    ours, theirs = (zoo.load(tmp_path / name).net.state_dict() for name in ("stopped", "whole"))
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_the_rate_of_the_log_is_that_of_the_schedule(few_digits):
    recipe = replace(SHORT, epochs=1, layer_decay=0.5)
    batches = training_batches(few_digits, Classify(), BatchOptions(GRAY), recipe)
    (epoch,) = train_epochs(network(), Classify(), batches, recipe)
    assert epoch.lr == lr_at(1 - 0.5 / len(batches), recipe.in_epochs(len(batches)))


def test_impossible_layers_are_refused_in_one_line(few_digits, tmp_path):
    with pytest.raises(ValueError, match=r"freeze_stages 9: the network has \d"):
        learner_of(network(), replace(SHORT, freeze_stages=9))
    with pytest.raises(ValueError, match="layer_decay"):
        replace(SHORT, layer_decay=0.0)
    for paths, epochs, match in (
        (("stem", "stages.5"), 0, "'stages.5'.*stem.conv, stages.0, .*head.fc"),
        (("stage",), 0, "'stage'"),
        (("stem", "stages", "head"), 0, "nothing to train"),
        (("head",), 1, "freeze_epochs"),
    ):
        with pytest.raises(ValueError, match=match) as error:
            learner_of(network(), replace(SHORT, frozen=paths, freeze_epochs=epochs))
        assert "\n" not in str(error.value)
    for recipe in (replace(SHORT, freeze_stages=-1), replace(SHORT, frozen=("stem",))):
        with pytest.raises(ValueError, match="--weights"):
            next(run.train(tmp_path / "run", "genet_tiny", few_digits, recipe))


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


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adamw", "lamb", "muon"])
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
