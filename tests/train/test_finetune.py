"""Fine-tuning: a new classifier that begins at the loss of guessing, the recipe for images and a
length, statistics that stay, and how a run ends."""

import copy
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from toy_bundles import bundle_of

from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.report.training_progress import plan_lines
from fullstride.tasks import find_task, task_of
from fullstride.tasks.classify import Classify
from fullstride.train import final_weights, run_folder
from fullstride.train.averages import BATCH_NORM
from fullstride.train.batches import BatchOptions, training_batches
from fullstride.train.final_weights import is_clearly_better
from fullstride.train.loop import train_epochs
from fullstride.train.prepare import initial_network, note_head
from fullstride.train.recipes.choice import RecipeChoice, RunOptions
from fullstride.train.recipes.named import (
    FEW_IMAGES,
    FEW_STEPS,
    FINETUNE_BATCH,
    FROZEN_IMAGES,
    Case,
    finetune,
)
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.run import train
from fullstride.train.scoring import FinalNetwork

SHORT = Recipe(epochs=2, batch_size=16, lr=0.01, resolution=16, hflip_prob=0.0, linear_probe=True)
FROZEN = replace(SHORT, frozen_statistics=True, probe_share=0.25, optimizer="adamw", lr=1e-4)


@pytest.fixture(scope="module")
def start(few_digits, tmp_path_factory):
    """The bundle of a network that knows the digits a little, to begin with."""
    folder = tmp_path_factory.mktemp("weights") / "run"
    recipe = replace(SHORT, linear_probe=False, epochs=8, lr=0.05)
    list(train(folder, "genet_tiny", few_digits, recipe))
    return folder / run_folder.BUNDLE


def trained(folder, data, start, recipe):
    list(train(folder, "genet_tiny", data, recipe, RunOptions(weights=str(start))))
    return Bundle.load(folder / run_folder.BUNDLE)


@pytest.mark.parametrize("images", [20, 60, 250, 1000, 10_000, 10**6])
@pytest.mark.parametrize("epochs", [0.5, 3.0, None])
@pytest.mark.parametrize("probe", [True, False])
def test_training_of_few_images_or_steps_keeps_the_statistics(images, epochs, probe):
    recipe = finetune(images, epochs, probe=probe)
    steps = recipe.epochs * max(1, images // recipe.batch_size)
    few_steps = recipe.epochs * images < FEW_STEPS * FINETUNE_BATCH
    few_images = images < (FROZEN_IMAGES if probe else FEW_IMAGES)
    assert recipe.frozen_statistics == (few_images or few_steps)
    assert recipe.lr == pytest.approx(
        (4e-4 if recipe.frozen_statistics else 1e-3) * max(1, recipe.batch_size / 32) ** 0.5,
        rel=0.05,
    )
    assert recipe.linear_probe == probe
    assert recipe.crop == 1.0
    assert 1 / (1 - recipe.ema_decay) <= max(1, steps / 10) + 1  # what the average spans, in steps
    if epochs:
        assert recipe.epochs == pytest.approx(epochs, abs=0.1)


@pytest.mark.parametrize(
    ("images", "epochs", "share"),
    [
        (60, 3, 0.5),
        (60, None, 0.25),
        (250, 10, 0.5),
        (1000, 10, 0.5),
        (1000, 20, 0),
        (10_000, 2, 0),
    ],
)
def test_the_longer_training_was_the_nearer_to_its_end_is_the_mean_with_the_probe(
    images, epochs, share
):
    assert finetune(images, epochs).probe_share == share
    assert finetune(images, epochs, probe=False).probe_share == 0


def test_training_that_starts_from_a_probe_is_shorter():
    assert finetune(250).epochs == 33
    assert finetune(250, probe=False).epochs == 82


def test_the_batch_grows_with_the_views_and_not_with_the_images_alone():
    batches = [
        [finetune(10**power, epochs).batch_size for power in range(2, 7)] for epochs in (1, 20)
    ]
    assert all(each == sorted(each) for each in batches)
    assert all(short <= long for short, long in zip(*batches, strict=True))
    assert batches[0][2] == FINETUNE_BATCH  # 10,000 views


@pytest.mark.parametrize("length", [{"epochs": 5.0}, {"images": 10_000}, {"steps": 320}])
def test_a_length_in_any_unit_gives_the_recipe_for_it(length):
    case = Case(images=2000, has_weights=True)
    recipe = RecipeChoice("finetune", length).resolve(case).recipe
    expected = finetune(2000, 5.0)
    assert (recipe.batch_size, recipe.lr) == (expected.batch_size, expected.lr)
    assert (recipe.optimizer, recipe.scale) == (expected.optimizer, expected.scale)
    assert recipe.ema_decay == pytest.approx(expected.ema_decay, rel=1e-3)
    assert vars(recipe).items() >= length.items()


def test_frozen_statistics_are_those_of_the_weights_and_gains_train(start, few_digits):
    net = Bundle.load(start).net
    before = copy.deepcopy(net.state_dict())
    pre = Bundle.load(start).preprocessing
    recipe = replace(
        FROZEN, optimizer="sgd", linear_probe=False, weight_decay=0.0, momentum=0.0, steps=1
    )
    batches = training_batches(few_digits, Classify(), BatchOptions(pre), recipe)
    x, y, _ = next(batches.epoch(0))
    own = copy.deepcopy(net).eval()  # no dropout here, so evaluation is only that of the norms
    F.cross_entropy(own(x), y, label_smoothing=0.1).backward()
    *_, last = train_epochs(net, Classify(), batches, replace(recipe, ema_decay=0.0))
    gradients = {name: parameter.grad for name, parameter in own.named_parameters()}
    for name, value in last.average.state_dict().items():
        if name in gradients:
            expected = before[name] - last.lr * gradients[name]
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(value, before[name])  # buffers


def test_training_begins_with_the_probe_where_statistics_are_frozen(start, few_digits, tmp_path):
    for name, recipe in (("frozen", FROZEN), ("batches", SHORT)):
        still = replace(recipe, lr=1e-12, weight_decay=0.0, precise_bn=False)
        rows = list(
            train(tmp_path / name, "genet_tiny", few_digits, still, RunOptions(weights=str(start)))
        )
        probe = Bundle.load(tmp_path / name / run_folder.PROBE)
        is_probe = rows[-1]["val/top1"] == probe.scores["val"]["top1"]
        assert is_probe == (name == "frozen")


@pytest.mark.parametrize("has_val", [True, False])
def test_a_frozen_run_ends_between_the_probe_and_its_end(
    has_val, start, few_digits, tmp_path, capfd
):
    data = few_digits if has_val else replace(few_digits, val=few_digits.val.subset([]))
    bundle = trained(tmp_path / "run", data, start, FROZEN)
    said = capfd.readouterr().err
    assert "the network between the linear probe and the end of training: " in said
    assert ("validation top-1" in said) == has_val
    probe = Bundle.load(tmp_path / "run" / run_folder.PROBE).net.state_dict()
    checkpoint = run_folder.load_checkpoint(tmp_path / "run")
    for name, value in bundle.net.state_dict().items():
        if value.is_floating_point():
            mean = torch.lerp(checkpoint["average"][name].double(), probe[name].double(), 0.25)
            torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)
    norms = [module for module in bundle.net.modules() if isinstance(module, BATCH_NORM)]
    assert norms


def test_an_end_that_is_clearly_better_is_not_mixed(start, few_digits, tmp_path, monkeypatch):
    monkeypatch.setattr(final_weights, "is_clearly_better", lambda *scores: True)
    bundle = trained(tmp_path / "run", few_digits, start, FROZEN)
    probe = Bundle.load(tmp_path / "run" / run_folder.PROBE)
    average = run_folder.load_checkpoint(tmp_path / "run")["average"]
    ends = (probe.net.state_dict(), average)
    name = "stages.0.0.branch.conv1.conv.weight"
    assert any(torch.equal(bundle.net.state_dict()[name], end[name]) for end in ends)


def scores(top1):
    return {"top1": top1, "loss": 0.5}


def run_of(images, mean):
    """A run with so many validation images, of which the mean of probe and end has a share."""
    return SimpleNamespace(
        data=SimpleNamespace(val=range(images)),
        recipe=FROZEN,
        metric=Classify.metric,
        spec=None,
        context=SimpleNamespace(is_rank_zero=False),
        val_scores=lambda net: scores(mean),
    )


def test_better_by_a_standard_error_is_clearly_better():
    metric = Classify.metric
    assert not is_clearly_better(scores(82.0), scores(80.0), metric, 100)  # the error is 3.8 points
    assert is_clearly_better(scores(82.0), scores(78.0), metric, 100)
    assert is_clearly_better(scores(82.0), scores(81.0), metric, 10_000)
    assert is_clearly_better(scores(82.0), {}, metric, 100)
    assert not is_clearly_better({}, {}, metric, 100)
    assert not is_clearly_better(scores(82.0), scores(71.0), metric, 100, errors=3)
    assert is_clearly_better(scores(82.0), scores(70.0), metric, 100, errors=3)
    for best in (100.0, 96.0):  # one of 25 images
        assert not is_clearly_better(scores(best), scores(best - 4), metric, 25, errors=3)


@pytest.mark.parametrize(
    ("probe", "end", "chosen"),
    [
        *((80, 82, "mean"), (80, 90, "end"), (83, 80, "mean"), (84, 88, "probe"), (84, 90, "end")),
        # a quarter of the mean is the probe: 82.5 lies between, or 83.25, or 86
        *((81, 83, "mean"), (81, 84, "probe"), (80, 88, "end")),
    ],
)
def test_to_be_chosen_the_end_must_be_better_than_the_mean_by_more_than_the_probe(
    probe, end, chosen, monkeypatch
):
    """The mean has 80 % of 100 images; a standard error is 3 to 4 points."""
    net = nn.Linear(1, 1)
    net.spec = None
    final, first = (FinalNetwork(copy.deepcopy(net), scores(top1)) for top1 in (end, probe))
    monkeypatch.setattr(final_weights, "has_probe", lambda run: True)
    monkeypatch.setattr(final_weights, "probe_network", lambda run: first)
    best = final_weights.with_probe(run_of(100, 80.0), final)
    assert chosen == ("end" if best is final else "probe" if best is first else "mean")


def test_no_right_image_of_a_small_split_leaves_the_mean(monkeypatch):
    net = nn.Linear(1, 1)
    net.spec = None
    final, first = (FinalNetwork(copy.deepcopy(net), scores(0.0)) for _ in range(2))
    monkeypatch.setattr(final_weights, "has_probe", lambda run: True)
    monkeypatch.setattr(final_weights, "probe_network", lambda run: first)
    best = final_weights.with_probe(run_of(3, 0.0), final)
    assert best is not final
    assert best is not first


def test_a_run_without_a_val_or_a_share_begins_with_the_probe_and_ends_with_the_last_epoch(
    start, few_digits, tmp_path
):
    data = replace(few_digits, val=few_digits.val.subset([]))
    bundle = trained(tmp_path / "run", data, start, replace(FROZEN, probe_share=0.0))
    average = run_folder.load_checkpoint(tmp_path / "run")["average"]
    assert all(torch.equal(value, average[name]) for name, value in bundle.net.state_dict().items())
    assert (tmp_path / "run" / run_folder.PROBE).is_dir()


def test_a_frozen_run_that_is_stopped_ends_in_the_same_bits(start, few_digits, tmp_path):
    whole = trained(tmp_path / "whole", few_digits, start, FROZEN)
    rows = train(
        tmp_path / "part", "genet_tiny", few_digits, FROZEN, RunOptions(weights=str(start))
    )
    next(rows)
    rows.close()
    part = trained(tmp_path / "part", few_digits, start, FROZEN)
    for name, value in whole.net.state_dict().items():
        assert torch.equal(value, part.net.state_dict()[name])


def test_frozen_statistics_need_weights(few_digits, tmp_path):
    with pytest.raises(ValueError, match="recipe.frozen_statistics.*--weights"):
        list(train(tmp_path / "run", "genet_tiny", few_digits, replace(FROZEN, linear_probe=False)))


def test_the_plan_says_where_a_given_length_is_short(start, few_digits, tmp_path):
    plans, options = [], RunOptions(weights=str(start))
    named = run_folder.resolve(
        RecipeChoice("finetune", {"epochs": 1.0, "resolution": 16}),
        tmp_path / "run",
        few_digits,
        options,
    )
    rows = train(tmp_path / "run", "genet_tiny", few_digits, named, options, announce=plans.append)
    next(iter(rows))
    (line,) = (each for each in plan_lines(plans[0]) if each.startswith("length"))
    usual = finetune(len(few_digits.train))
    steps = round(usual.epochs * (len(few_digits.train) // usual.batch_size))
    assert f"finetune takes {steps:,} " in line


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


def first_losses(name, data, classes=2, images=4):
    """The first loss of training from random weights, and from those for other classes."""
    data, task = replace(data, classes=tuple("abcdefgh"[:classes]), channels=3), find_task()
    spec = zoo.spec(name)
    side = spec.resolution
    if name.startswith("timm/"):
        with torch.device("meta"):
            side = side if zoo.create(name).refusal(64, 64) else 64
    recipe = replace(RECIPE, resolution=side)
    other = zoo.create(name, classes=5, in_channels=3, resolution=side)
    start = Bundle(
        net=other,
        name="other",
        classes=tuple("vwxyz"),
        preprocessing=zoo.family_preprocessing(other.spec),
    )
    x = torch.randn(images, 3, side, side, generator=torch.Generator().manual_seed(0))
    y = torch.arange(images) % classes
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
@pytest.mark.parametrize("family", timm.list_modules()[::3])
def test_a_network_of_every_third_family_of_timm_begins_at_the_loss_of_guessing(family, few_digits):
    name = small_network(family)
    if name is None:
        pytest.skip("all networks of the family are large")
    losses = first_losses(f"timm/{name}", few_digits, images=2)
    assert losses == pytest.approx([math.log(2)] * 2, rel=0.2)


@pytest.mark.parametrize(
    ("name", "options", "layer"),
    [
        ("segment", {}, "output"),
        ("detect", {}, "classes"),
        ("detect", {"detector": "faster_rcnn"}, "roi.box_predictor.cls_score"),
    ],
)
def test_a_head_for_classes_in_another_order_predicts_the_same_and_one_for_others_begins_anew(
    name, options, layer, few_digits, capsys
):
    bundle, order = bundle_of(name, **options), (2, 0, 1)
    task = task_of(bundle)
    options = {"head_width": 32, **({"head_convs": 1} if name == "detect" else {}), **options}
    recipe = replace(SHORT, seed=1, resolution=64, task_options=options)
    classes = tuple(bundle.classes[index] for index in order)
    data = replace(few_digits, classes=classes, channels=3)
    net, _ = initial_network("resnet_rs_tiny", task, data, recipe, bundle)
    pixels = torch.rand(2, 3, 64, 64)
    with torch.inference_mode():
        found = task.decode(task.activate(net.eval()(pixels)), classes, 5)
        expected = task.decode(task.activate(bundle.net(pixels)), bundle.classes, 5)
    assert [*map(str, found)] == [*map(str, expected)]
    old = bundle.net.task_head.get_submodule(layer).weight
    others = replace(data, classes=("x", "y", "z"))
    net, _ = initial_network("resnet_rs_tiny", task, others, recipe, bundle)
    assert not torch.isclose(net.task_head.get_submodule(layer).weight, old).any()
    inner = "pyramid.levels.inner_blocks.0.0.weight"
    parameters = (each.task_head.get_parameter(inner) for each in (net, bundle.net))
    assert torch.equal(*parameters)
    assert not capsys.readouterr().err
    wider = replace(recipe, task_options={**options, "head_width": 40})
    initial_network("resnet_rs_tiny", task, data, wider, replace(bundle, name=layer))
    expected = f"give --task.head_width 32 for the weights of {layer}\n"
    assert capsys.readouterr().err.endswith(expected)


def test_switches_of_a_head_are_not_among_the_options_for_its_weights(capsys):
    state = {"embedding_size": 4, "normalise_embedding": False}
    start = replace(bundle_of("segment"), name="run", task="retrieval", task_state=state)
    note_head(start, find_task("retrieval"))
    expected = "give --task.embedding_size 4 for the weights of run\n"
    assert capsys.readouterr().err.endswith(expected)
