"""The networks are the published ones: logits against timm, parameters and arithmetic against the
papers' code."""

from dataclasses import replace
from functools import cache

import pytest
import timm
import torch
from networks import TIMM, randomise
from torch.utils.flop_counter import FlopCounterMode

from fullstride.nets.checkpoints import from_timm
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network

# Deeper networks of the same blocks.
SLOW = {
    "tresnet_l",
    "tresnet_xl",
    "genet_large",
    "resnet101",
    "resnet152",
    *(f"resnet_rs_{depth}" for depth in (101, 152, 200, 270, 350, 420)),
}
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in TIMM]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_timm_with_the_same_weights(name):
    generator = torch.Generator().manual_seed(0)
    theirs = randomise(timm.create_model(TIMM[name]), generator).double()
    ours = Network(replace(SPECS[name], init=lambda net: None)).double().eval()
    ours.load_state_dict(from_timm(theirs.state_dict(), name))
    odd = (
        68 if name.startswith("tresnet") else 65
    )  # timm's TResNet takes multiples of 4; 68 makes odd maps
    for height, width in ((64, 64), (odd, 96)):
        images = torch.randn(1, 3, height, width, generator=generator, dtype=torch.float64)
        with torch.inference_mode():
            expected, got = theirs(images), ours(images)
        assert 0.1 < expected.std() < 100
        assert (got - expected).abs().max() <= 1e-9 * expected.abs().max()


# Counted on the authors' code and on timm.
PARAMETERS = {
    "tresnet_m": 31_389_032,
    "tresnet_l": 55_989_256,
    "tresnet_xl": 78_436_244,
    "tresnet_v2_l": 46_174_824,
    "resnet_rs_50": 35_691_912,
    "resnet_rs_101": 63_618_696,
    "resnet_rs_152": 86_621_576,
    "resnet_rs_200": 93_209_992,
    "resnet_rs_270": 129_861_448,
    "resnet_rs_350": 163_956_168,
    "resnet_rs_420": 191_891_656,
    "genet_light": 8_173_761,
    "genet_normal": 21_142_920,
    "genet_large": 31_078_280,
}
ROUNDED_PARAMETERS = {"masternet_1": "16.20", "profilingnet_132": "490.3"}  # millions

# Multiply-adds in units of 1e9, as printed.
MACS = [
    ("tresnet_m", 224, "5.737"),
    ("tresnet_m", 448, "22.938"),
    ("tresnet_l", 224, "10.878"),
    ("tresnet_l", 368, "29.551"),
    ("tresnet_l", 448, "43.498"),
    ("tresnet_xl", 224, "15.167"),
    ("tresnet_xl", 448, "60.652"),
    ("tresnet_v2_l", 224, "8.814"),
    ("resnet_rs_50", 160, "2.279"),
    ("resnet_rs_101", 160, "4.182"),
    ("resnet_rs_101", 192, "6.012"),
    ("resnet_rs_152", 192, "8.747"),
    ("resnet_rs_152", 224, "11.895"),
    ("resnet_rs_152", 256, "15.528"),
    ("resnet_rs_200", 256, "20.093"),
    ("resnet_rs_270", 256, "26.950"),
    ("resnet_rs_350", 256, "34.377"),
    ("resnet_rs_350", 320, "53.684"),
    ("resnet_rs_420", 320, "63.942"),
    ("genet_light", 192, "0.5472"),
    ("genet_light", 224, "0.744"),
    ("genet_normal", 192, "2.2081"),
    ("genet_normal", 224, "3.005"),
    ("genet_large", 224, "3.490"),
    ("genet_large", 256, "4.5570"),
    ("masternet_1", 224, "3.31"),
    ("profilingnet_132", 224, "24.36"),
]


def digits(text):
    return len(text.partition(".")[2])


@cache
def on_meta(name):
    with torch.device("meta"):
        return Network(SPECS[name]).eval()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_count(name):
    assert sum(p.numel() for p in on_meta(name).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ROUNDED_PARAMETERS)
def test_parameters_round_to_the_published_count(name):
    printed = ROUNDED_PARAMETERS[name]
    assert (
        f"{sum(p.numel() for p in on_meta(name).parameters()) / 1e6:.{digits(printed)}f}" == printed
    )


DEEP = {f"resnet_rs_{depth}" for depth in (200, 270, 350, 420)}


@pytest.mark.parametrize(
    ("name", "resolution", "printed"),
    [pytest.param(*row, marks=pytest.mark.slow if row[0] in DEEP else ()) for row in MACS],
)
def test_arithmetic_is_the_published_count_to_the_last_digit(name, resolution, printed):
    counter = FlopCounterMode(display=False)
    with counter, torch.inference_mode():
        on_meta(name)(torch.empty(1, 3, resolution, resolution, device="meta"))
    assert f"{counter.get_total_flops() / 2 / 1e9:.{digits(printed)}f}" == printed
