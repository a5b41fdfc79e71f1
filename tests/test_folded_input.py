"""Bytes that are folded as they arrive make the same network as pictures that its stem folds."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fullstride.data.transforms.crop import to_input
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.layers import SpaceToDepth
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify
from fullstride.train import autotune, data_bench, run, run_folder
from fullstride.train.batches import HALF, arrival, why_whole
from fullstride.train.distributed import ALONE
from fullstride.train.loop import Learner
from fullstride.train.recipes import DIGITS

GRAY = Preprocessing(resolution=16, mean=(0.0,), std=(1.0,), crop=1.0)
COLOUR = Preprocessing(resolution=16)
LEAN = replace(
    DIGITS, epochs=2, warmup_epochs=0, lr=0.05, resolution=16, batch=16, efficiency="lean"
)


def pixels(images: int, h: int, w: int, channels: int) -> torch.Tensor:
    return torch.randint(
        256, (images, h, w, channels), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) for name, value in ours.items()
    )


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ((0.0,), (1.0,)),
        ((0.5,), (0.25,)),
        ((1 / 3,), (0.0301,)),
        (COLOUR.mean, COLOUR.std),
        ((0.0, 0.5, 1.0), (1.0, 0.5, 2.0)),
        ((0.1, 0.7, -0.3), (1 / 3, 1e-3, 7.0)),
    ],
)
def test_folded_bytes_are_the_pictures_that_the_stem_folds_bit_for_bit(mean, std, precision):
    bytes_nhwc = pixels(2, 64, 32, len(mean))
    assert len(bytes_nhwc.unique()) == 256
    pre = replace(GRAY, mean=mean, std=std)
    net = zoo.create("tresnet_tiny", in_channels=len(mean))
    folded = arrival(net, pre, replace(LEAN, precision=precision), "cpu")(bytes_nhwc)
    expected = SpaceToDepth()(to_input(bytes_nhwc, pre)).to(HALF.get(precision, torch.float32))
    assert folded.dtype == expected.dtype
    assert torch.equal(folded, expected)
    assert folded.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("pre", "changes"),
    [
        (GRAY, {}),
        (COLOUR, {}),
        (COLOUR, {"channels_last": True}),
        (COLOUR, {"precision": "bf16"}),
        (COLOUR, {"triplet": 1.0, "per_class": 2}),
    ],
)
def test_the_loss_and_all_gradients_of_the_network_are_the_same(pre, changes):
    recipe, bytes_nhwc = replace(LEAN, **changes), pixels(8, 24, 16, pre.channels)
    labels = torch.arange(8) // 2
    found = []
    for makes_input in (partial(to_input, pre=pre), None):
        torch.manual_seed(0)
        net = zoo.create("tresnet_tiny", in_channels=pre.channels)
        x = (makes_input or arrival(net, pre, recipe, "cpu"))(bytes_nhwc)
        learner = Learner(net.train(), Classify(), recipe, 1, None, ALONE)
        loss = learner.loss(x.contiguous(memory_format=learner.layout), labels, None)
        loss.backward()
        gradients = {
            name: value.grad for name, value in net.named_parameters() if value.grad is not None
        }
        found.append({"loss": loss.detach(), **gradients})
        assert x.shape == (
            (8, 16 * pre.channels, 6, 4) if makes_input is None else (8, pre.channels, 24, 16)
        )
    assert len(found[0]) > 50
    assert same(*found)


@pytest.mark.parametrize("mean", [(0.5,), (0.5, 0.4, 0.3)])
def test_a_network_answers_alike_to_pictures_and_to_what_is_folded_of_them(mean):
    pre = replace(GRAY, mean=mean, std=(0.2,) * len(mean))
    net, bytes_nhwc = (
        zoo.create("tresnet_tiny", in_channels=len(mean)).eval(),
        pixels(3, 16, 20, len(mean)),
    )
    whole, folded = to_input(bytes_nhwc, pre), arrival(net, pre, LEAN, "cpu")(bytes_nhwc)
    assert torch.equal(net(folded.contiguous()), net(whole.contiguous()))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"mixup": 0.2},
        {"mixup": 0.2, "precision": "bf16"},
        {
            "channels_last": True,
            "accumulate": 2,
            "drop_path": 0.2,
            "resolution": 24,
            "grow_from": 16,
        },
    ],
    ids=str,
)
def test_a_run_whose_images_arrive_folded_ends_in_the_same_weights(
    few_digits, tmp_path, monkeypatch, changes
):
    recipe = replace(LEAN, **changes)
    shapes = {}

    def learned(name):
        def watch(batches):
            shapes[name] = next(batches.epoch(0)).x.shape
            return batches

        list(run.train(tmp_path / name, "tresnet_tiny", few_digits, recipe, watch=watch))
        return Bundle.load(tmp_path / name / run_folder.BUNDLE).net.state_dict()

    folded = learned("folded")
    monkeypatch.setattr(run, "arrival", lambda net, pre, *_: partial(to_input, pre=pre))
    assert same(folded, learned("whole"))
    assert shapes == {"folded": (16, 16, 4, 4), "whole": (16, 1, 16, 16)}


@pytest.mark.parametrize(
    ("name", "resolution", "changes", "reason"),
    [
        ("tresnet_tiny", 16, {}, ""),
        (
            "tresnet_tiny",
            16,
            {"efficiency": "compiled", "mixup": 1.0, "accumulate": 4, "grow_from": 8},
            "",
        ),
        ("genet_tiny", 16, {}, "the network has no space-to-depth stem"),
        (
            "timm/test_resnet",
            16,
            {"efficiency": "compiled"},
            "the network has no space-to-depth stem",
        ),
        (
            "tresnet_tiny",
            16,
            {"efficiency": "plain"},
            "recipe.efficiency plain leaves PyTorch's modules as they are",
        ),
        ("tresnet_tiny", 16, {"cutmix": 1.0}, "recipe.cutmix cuts boxes out of pictures"),
        ("tresnet_tiny", 16, {"teacher": "a"}, "recipe.teacher looks at the same pictures"),
        ("tresnet_tiny", 18, {}, "18 pixels a side do not divide by 4"),
        ("tresnet_tiny", 30, {"grow_from": 16}, "30 pixels a side do not divide by 4"),
    ],
)
def test_images_arrive_whole_where_something_must_see_them_so(
    few_digits, name, resolution, changes, reason
):
    net, pre = zoo.create(name, in_channels=1), replace(GRAY, resolution=resolution)
    recipe = replace(LEAN, **changes)
    assert why_whole(net, pre, recipe) == reason
    x = next(run.training_batches(few_digits, pre, recipe, "cpu", 0, ALONE, net).epoch(5)).x
    assert x.shape == ((16, 1, resolution, resolution) if reason else (16, 16, 4, 4))
    whole = next(run.training_batches(few_digits, pre, recipe, "cpu", 0, ALONE).epoch(5)).x
    assert torch.equal(x, whole if reason else SpaceToDepth()(whole))


def test_steps_are_timed_on_what_training_takes(few_digits, monkeypatch):
    net, shapes = zoo.create("tresnet_tiny", in_channels=1), []
    monkeypatch.setattr(
        autotune, "timed_steps", lambda learner, x, *_: shapes.append(tuple(x.shape)) or [1.0]
    )
    monkeypatch.setattr(data_bench, "timed_steps", autotune.timed_steps)
    for way in ("plain", "lean"):
        autotune.rate(replace(LEAN, efficiency=way), net, GRAY, torch.device("cpu"), 16)
        data_bench.balance("tresnet_tiny", few_digits, replace(LEAN, efficiency=way), seconds=0.01)
    assert shapes == [(16, 1, 16, 16)] * 2 + [(16, 16, 4, 4)] * 2
