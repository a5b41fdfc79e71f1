"""Learning: the schedule, the average, the loop, and going on after a stop."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fullstride.data.augment import Augmentation
from fullstride.data.images import Images, open_data
from fullstride.data.loader import Batches, TrainView
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify
from fullstride.train import run
from fullstride.train.loop import evaluate, fit
from fullstride.train.optimize import Average, build_optimizer, lr_at
from fullstride.train.recipes import DIGITS, FINETUNE, RECIPES, Recipe

GRAY = Preprocessing(resolution=32, mean=(0.0,), std=(1.0,), crop=1.0)
SHORT = replace(DIGITS, epochs=3, warmup_epochs=1, resolution=16, batch=16)


def few(images: Images, count: int) -> Images:
    return replace(images, names=images.names[:count], labels=images.labels[:count])


@pytest.fixture(scope="module")
def digits():
    """A hundred digits, enough to see that a loop works."""
    data = open_data("digits")
    return replace(data, train=few(data.train, 64), minival=few(data.minival, 20), test=few(data.test, 20))


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
    assert all(names[id(p)].endswith(".weight") and ".norm." not in names[id(p)] for p in decayed["params"])
    assert all(names[id(p)].endswith(".bias") or ".norm." in names[id(p)] for p in free["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(names)


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


def test_label_smoothing_equals_cross_entropy_with_softened_targets():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4, 0])
    soft = torch.full((6, 5), 0.1 / 5, dtype=torch.float64)
    soft[torch.arange(6), labels] += 0.9
    by_hand = -(soft * logits.log_softmax(1)).sum(1).mean()
    assert Classify(0.1).loss(logits, labels).item() == pytest.approx(by_hand.item(), rel=1e-12)


def test_top1_counts_right_answers_in_percent():
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 1.0], [1.0, 0.0]])
    assert Classify().score(logits, torch.tensor([0, 1, 1, 0]))["top1"] == 75.0


@pytest.mark.parametrize("name", ["tresnet_tiny", "resnet_rs_tiny", "genet_tiny"])
def test_a_network_can_memorise_sixteen_digits(name, digits):
    images = few(digits.train, 16)
    recipe = replace(SHORT, epochs=80, warmup_epochs=8, lr=0.05, label_smoothing=0.0, weight_decay=0.0)
    torch.manual_seed(0)
    net = zoo.create(name, in_channels=1)
    whole = Augmentation(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0)
    batches = Batches(images, TrainView(GRAY, whole), batch=16, shuffle=True)
    epochs = list(fit(net, Classify(), batches, recipe))
    assert epochs[-1].loss < 0.1 < epochs[0].loss
    assert evaluate(net, Classify(), batches)["top1"] == 100


def test_a_loss_that_is_not_finite_stops_training_and_says_what_to_try(digits):
    net = zoo.create("genet_tiny", in_channels=1)
    batches = Batches(digits.train, TrainView(GRAY), batch=16, shuffle=True)
    recipe = replace(SHORT, lr=1e30, warmup_epochs=0)
    with pytest.raises(FloatingPointError, match=r"in epoch 1 .* lower recipe.lr"):
        list(fit(net, Classify(), batches, recipe))


def rows_of(folder, digits, recipe=SHORT, **how):
    return list(run.train(folder, "genet_tiny", digits, recipe, **how))


def numbers(rows):
    """A log without the times, which differ from run to run."""
    return [{k: v for k, v in row.items() if k not in ("images_per_s", "data_share")} for row in rows]


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "whole"
    return folder, rows_of(folder, digits)


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights_bit_for_bit(stop_after, finished, digits, tmp_path):
    whole, rows = finished
    folder = tmp_path / "stopped"
    started = run.train(folder, "genet_tiny", digits, SHORT)
    for _ in range(stop_after):
        next(started)
    started.close()  # as Ctrl-C between two epochs, or after the last one and before the bundle
    assert not (folder / run.BUNDLE).exists()
    assert numbers(rows_of(folder, digits)) == numbers(rows)
    assert run.load_checkpoint(folder)["epoch"] == SHORT.epochs - 1
    ours, theirs = Bundle.load(folder / run.BUNDLE), Bundle.load(whole / run.BUNDLE)
    for name, value in ours.net.state_dict().items():
        assert torch.equal(value, theirs.net.state_dict()[name])
    assert ours.scores == theirs.scores


def test_a_row_that_was_written_after_the_last_checkpoint_is_written_again(finished, digits, tmp_path):
    folder = tmp_path / "torn"
    started = run.train(folder, "genet_tiny", digits, SHORT)
    next(started)
    started.close()
    log = folder / run.LOG
    log.write_text(log.read_text() + '{"epoch": 2, "los')
    assert numbers(rows_of(folder, digits)) == numbers(finished[1])
    assert numbers(json.loads(line) for line in log.read_text().splitlines()) == numbers(finished[1])


def test_a_finished_run_is_not_trained_again(finished, digits):
    folder, rows = finished
    before = (folder / run.CHECKPOINT).stat().st_mtime_ns
    assert rows_of(folder, digits) == rows
    assert (folder / run.CHECKPOINT).stat().st_mtime_ns == before


def test_workers_do_not_change_what_is_learned(finished, digits, tmp_path):
    assert numbers(rows_of(tmp_path / "workers", digits, workers=2)) == numbers(finished[1])


def test_a_folder_with_another_run_is_refused_with_the_difference(finished, digits):
    folder, _ = finished
    with pytest.raises(ValueError, match=f"another run: recipe.lr is {SHORT.lr} there and 0.7 now"):
        rows_of(folder, digits, replace(SHORT, lr=0.7))


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(digits, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is no run"):
        rows_of(tmp_path, digits)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_checkpoint_that_is_cut_short_is_named(finished, digits, tmp_path):
    folder = tmp_path / "cut"
    started = run.train(folder, "genet_tiny", digits, SHORT)
    next(started)
    started.close()
    path = folder / run.CHECKPOINT
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"checkpoint.pt cannot be read .*: remove it to begin again"):
        rows_of(folder, digits)


def test_training_can_begin_from_another_runs_weights_with_other_classes(finished, digits, tmp_path):
    folder, _ = finished
    five = replace(digits, classes=digits.classes[:5], train=below(digits.train, 5), minival=below(digits.minival, 5))
    five = replace(five, test=below(digits.test, 5))
    net, _ = run.beginning("genet_tiny", five, SHORT, str(folder))
    before = Bundle.load(folder / run.BUNDLE).net
    assert torch.equal(net.stem.conv.conv.weight, before.stem.conv.conv.weight)
    assert net.head.fc.out_features == 5
    with pytest.raises(ValueError, match="does not begin resnet_rs_tiny"):
        run.beginning("resnet_rs_tiny", five, SHORT, str(folder))


def below(images: Images, classes: int) -> Images:
    kept = [(name, label) for name, label in zip(images.names, images.labels, strict=True) if label < classes]
    return replace(images, names=tuple(name for name, _ in kept), labels=tuple(label for _, label in kept))


def test_a_network_of_timm_is_trained_and_kept_like_ours(digits, tmp_path):
    list(run.train(tmp_path / "timm", "timm/resnet10t", digits, replace(SHORT, epochs=1, warmup_epochs=0)))
    bundle = Bundle.load(tmp_path / "timm" / run.BUNDLE)
    assert bundle.net.spec.name == "resnet10t"
    assert bundle.scores["test"]["images"] == 20


@pytest.mark.parametrize("name", RECIPES)
def test_every_named_recipe_trains_an_epoch(name, digits, tmp_path):
    recipe = replace(RECIPES[name], epochs=1, warmup_epochs=0, batch=32, resolution=16)
    (row,) = rows_of(tmp_path / "run", digits, recipe)
    assert math.isfinite(row["loss"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(epochs=0), "recipe.epochs 0: use 1 or more"),
        (dict(lr=-1), "recipe.lr -1: use a number above 0"),
        (dict(momentum=1.0), "recipe.momentum 1.0: use a number from 0"),
        (dict(warmup_epochs=30), r"recipe.warmup_epochs 30 leaves nothing of 20 epochs: .*set recipe.warmup_epochs=2"),
        (dict(weight_decay=-1.0), "recipe.weight_decay -1.0"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(FINETUNE, **change)


def test_fit_leaves_the_network_it_was_given_trained(digits):
    net = zoo.create("genet_tiny", in_channels=1)
    before = copy.deepcopy(net.state_dict())
    batches = Batches(digits.train, TrainView(GRAY), batch=16, shuffle=True)
    for _ in fit(net, Classify(), batches, Recipe(epochs=1, batch=16, lr=0.1, warmup_epochs=0)):
        pass
    assert not torch.equal(net.head.fc.weight, before["head.fc.weight"])
