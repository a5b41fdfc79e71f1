"""Rates by layer equal timm's; frozen layers stay as they are, and runs with them go on exactly."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from timm.optim import param_groups_layer_decay

from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify
from fullstride.train import run, run_folder
from fullstride.train.batches import training_batches
from fullstride.train.compute import SINGLE_PROCESS
from fullstride.train.loop import Learner, train_epochs
from fullstride.train.optimizer import build_optimizer, lr_at, lr_scales
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS

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


def learner_of(net, recipe, per_epoch=4) -> Learner:
    return Learner(net.train(), Classify(), recipe.in_epochs(per_epoch), per_epoch, None,
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
    ("name", "efficiency", "stages"),
    [
        ("genet_tiny", "plain", 2),
        ("tresnet_tiny", "fused", 1),
        ("resnet_rs_tiny", "fused", -1),
        ("timm/resnet10t", "plain", 3),
        ("timm/resnet10t", "plain", -1),
    ],
)
def test_frozen_stages_keep_their_weights_and_statistics_and_the_others_learn(
    name, efficiency, stages, few_digits
):
    net = network(name)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    recipe = replace(SHORT, efficiency=efficiency, freeze_stages=stages, weight_decay=0.1)
    batches = training_batches(few_digits, Classify(), GRAY, recipe)
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
    ("name", "efficiency", "paths"),
    [
        ("genet_tiny", "plain", ("stem", "stages.3", "head")),
        ("resnet_rs_tiny", "fused", ("stages.1", "stages.2.0.branch.conv2", "head.fc.bias")),
        ("timm/resnet10t", "plain", ("net.layer2",)),
    ],
)
def test_layers_that_are_frozen_by_path_stay_and_all_others_learn(
    name, efficiency, paths, few_digits
):
    net = network(name)
    randomise(net)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    recipe = replace(SHORT, epochs=1, efficiency=efficiency, frozen=paths, weight_decay=0.1)
    batches = training_batches(few_digits, Classify(), GRAY, recipe)
    (epoch,) = train_epochs(net, Classify(), batches, recipe)
    for state in (net.state_dict(), epoch.average.state_dict()):
        for key, value in state.items():
            is_frozen = any(f"{key}.".startswith(f"{path}.") for path in paths)
            assert torch.equal(value, before[key]) == is_frozen, key


@pytest.mark.fused
def test_gradients_pass_frozen_layers_of_fused_modules_as_they_pass_plain_ones():
    """Behind a stage that learns, and around it: its last norm is frozen, or its first."""
    paths = ("stages.1", "stages.2.0.branch.conv3", "stages.3.0.branch.conv1", "head")
    nets = {each: network("resnet_rs_tiny") for each in ("plain", "fused")}
    x = torch.rand(8, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    for efficiency, net in nets.items():
        randomise(net)
        recipe = replace(SHORT, frozen=paths, efficiency=efficiency, momentum=0.0)
        learner_of(net, recipe).step(x, torch.arange(8), 8)
    plain, fused = (net.state_dict() for net in nets.values())
    for key, value in plain.items():
        assert torch.allclose(value, fused[key], atol=2e-5), key


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
    batches = training_batches(few_digits, Classify(), GRAY, recipe)
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
    batches = training_batches(few_digits, Classify(), GRAY, recipe)
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
