"""Builds small networks that reveal the numbers of a device, and times them."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.latency.devices import load_profile, profile_names
from fullstride.latency.profiles import Profile
from fullstride.latency.roofline import Machine, Runtime
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import spread, timed_calls
from fullstride.measure.workload import Precision, exact_float32
from fullstride.nets import zoo
from fullstride.nets.blocks import (
    SE,
    Basic,
    Block,
    Bottleneck,
    DeepConvStem,
    PoolStem,
    SpaceToDepthStem,
    Stem,
    Style,
)
from fullstride.nets.efficiency import short_precision
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec, Stage

# A family that is never fitted, to show how wrong a profile is for real networks.
WHOLE = "whole networks"
OUTPUTS = 16  # of microbenchmarks without a spec
WHOLE_NAMES = (
    *("resnet18", "resnet50", "genet_light", "tresnet_m", "resnet_rs_50"),
    *("timm/mobilenetv2_100", "timm/efficientnet_b0", "timm/regnety_008"),
    *("timm/densenet121", "timm/convnext_tiny"),
)


@dataclass(frozen=True, kw_only=True)
class Microbenchmark:
    """A network to time: (N, 3, H, W), H and W from 32 -> (N, classes)."""

    name: str
    family: str  # its networks are left out of a fit together
    build: Callable[[], nn.Module]


class ConcatInput(nn.Module):
    """Concatenates a layer's input and output: (N, C, H, W) -> (N, 2C, H, W)."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.layer(x)), 1)


def sequence(width: int, patch: int, *layers: nn.Module, out: int = 0) -> nn.Sequential:
    """Layers from (N, width, H / patch, W / patch) to `out` channels, by default `width`."""
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out or width, OUTPUTS)
    return nn.Sequential(nn.Conv2d(3, width, patch, patch), *layers, *ends)


def repeated(width: int, patch: int, depth: int, *makers: Callable[[], nn.Module]) -> nn.Sequential:
    return sequence(width, patch, *(make() for _ in range(depth) for make in makers))


def convolutions(
    width: int, patch: int, depth: int, kernel: int = 3, groups: int = 1, norm: Any = nn.BatchNorm2d
) -> nn.Sequential:
    padding = kernel // 2
    conv = partial(nn.Conv2d, width, width, kernel, padding=padding, groups=groups, bias=False)
    return repeated(width, patch, depth, conv, partial(norm, width), nn.ReLU)


def conv_norm_act(c_in: int, c_out: int, kernel: int = 3) -> nn.Sequential:
    conv = nn.Conv2d(c_in, c_out, kernel, 1, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out), nn.ReLU())


def dense_block(width: int, patch: int, depth: int, kernel: int) -> nn.Sequential:
    """Layers that double the channels by concatenation with their input, as in DenseNet."""
    layers = (ConcatInput(conv_norm_act(width << i, width << i, kernel)) for i in range(depth))
    last = nn.AvgPool2d(2), conv_norm_act(width << depth, 128, 1)
    return sequence(width, patch, *layers, *last, out=128)


def pooled(width: int, patch: int, pool: type[nn.Module]) -> nn.Sequential:
    """Convolutions and pools of unchanged size, and a pool beside its input, as in Inception."""
    layers = [layer for _ in range(2) for layer in (pool(3, 1, 1), conv_norm_act(width, width))]
    last = ConcatInput(pool(3, 1, 1)), conv_norm_act(2 * width, 128, 1)
    return sequence(width, patch, *layers, *last, out=128)


def linear_layers(width: int, patch: int, inner: int) -> nn.Sequential:
    """Convolutions, then large linear layers, as in VGG."""
    convs = conv_norm_act(width, width), conv_norm_act(width, width)
    pool = nn.AdaptiveAvgPool2d(2), nn.Flatten()
    linears = nn.Linear(4 * width, inner), nn.ReLU(), nn.Linear(inner, inner), nn.ReLU()
    first = nn.Conv2d(3, width, patch, patch)
    return nn.Sequential(first, *convs, *pool, *linears, nn.Linear(inner, OUTPUTS))


def residual(
    block: type[Block], stem: type[Stem], style: Style, *sizes: tuple[int, int, int], **stage: Any
) -> Network:
    """Blocks of `nets` behind a stem; `sizes`: depth, width and stride of the stages."""
    stages = tuple(Stage(block=block, depth=d, width=w, stride=s, **stage) for d, w, s in sizes)
    source = "a microbenchmark"
    return Network(
        NetSpec(source=source, stem=stem, stem_width=sizes[0][1], stages=stages, style=style)
    )


def all_microbenchmarks() -> list[Microbenchmark]:
    """Some forty networks, with two or more families for each number of a profile, and WHOLE."""
    from timm.layers.norm import LayerNorm2d

    networks: list[Microbenchmark] = []

    def add(
        family: str, name: str, build: Callable[..., nn.Module], *sizes: Any, **options: Any
    ) -> None:
        build = partial(build, *sizes, **options)
        networks.append(Microbenchmark(name=f"{family} {name}", family=family, build=build))

    for width, patch in ((32, 4), (64, 4), (128, 8), (256, 16), (512, 32)):
        add("3x3", f"{width}", convolutions, width, patch, 4)
    for width, patch in ((64, 4), (256, 8), (512, 16), (1024, 32)):
        add("1x1", f"{width}", convolutions, width, patch, 6, 1)
    for width, patch, kernel in ((64, 4, 3), (256, 8, 3), (512, 16, 3), (128, 8, 5)):
        add("depthwise", f"{kernel} {width}", convolutions, width, patch, 4, kernel, width)
    for width, patch, groups in ((128, 8, 16), (128, 8, 4), (256, 16, 16), (512, 32, 8)):
        add("grouped", f"{width} by {groups}", convolutions, width, patch, 4, 3, groups)
    shapes = ((1, 64, 1), (1, 128, 2), (1, 256, 2)), ((2, 128, 2), (2, 256, 2))
    se, plain, inverted = SE(at="out", ratio=1 / 4), Style(), {"ratio": 3, "group_width": 1}
    blurred = Style(blur=True, slope=0.01)
    for sizes in shapes:
        name, quarter = f"{sizes[-1][1]} {len(sizes)}", {"ratio": 1 / 4}
        add("basic", name, residual, Basic, PoolStem, plain, *sizes)
        add("bottleneck", name, residual, Bottleneck, DeepConvStem, plain, *sizes, **quarter)
        add("inverted", name, residual, Bottleneck, DeepConvStem, plain, *sizes, **inverted)
        add("gated", f"basic {name}", residual, Basic, DeepConvStem, plain, *sizes, se=se)
        add("blurred", name, residual, Basic, SpaceToDepthStem, blurred, *sizes)
    bottleneck = residual, Bottleneck, DeepConvStem, plain, *shapes[0]
    add("bottleneck", "grouped", *bottleneck, group_width=16)
    add("gated", "inverted", *bottleneck, **inverted, se=replace(se, at="inner"))
    blurred_se = residual, Bottleneck, SpaceToDepthStem, Style(blur=True), *shapes[1]
    add("blurred", "gated", *blurred_se, ratio=1 / 4, se=se)
    for width, patch, pool in ((64, 4, nn.MaxPool2d), (256, 8, nn.AvgPool2d)):
        add("pools", f"{width}", pooled, width, patch, pool)
    for width, patch, depth, kernel in ((32, 4, 3, 1), (64, 8, 2, 3)):
        add("joining", f"{kernel} {width}", dense_block, width, patch, depth, kernel)
    for width, patch, inner in ((128, 8, 1024), (512, 16, 2048)):
        add("vectors", f"{inner}", linear_layers, width, patch, inner)
    group_norm = partial(nn.GroupNorm, 8)
    add("group norms", "64", convolutions, 64, 4, 4, 1, norm=group_norm)
    add("group norms", "256", convolutions, 256, 16, 4, 3, norm=group_norm)
    layer_norm = partial(LayerNorm2d, 96), partial(nn.Conv2d, 96, 96, 1), nn.GELU
    add("other norms", "layer 96", repeated, 96, 4, 3, *layer_norm)
    add("other norms", "batch 128", repeated, 128, 8, 4, partial(nn.BatchNorm2d, 128), nn.SiLU)
    add("elements", "64", repeated, 64, 4, 6, nn.SiLU, nn.Hardswish)
    add("elements", "256", repeated, 256, 16, 12, nn.ReLU, partial(nn.Conv2d, 256, 256, 1), nn.SiLU)
    for width, depth in ((16, 24), (32, 48)):
        add("deep and small", f"{width} {depth}", convolutions, width, 16, depth)
    for name in WHOLE_NAMES:
        build = partial(zoo.create, name)
        networks.append(Microbenchmark(name=name, family=WHOLE, build=build))
    return networks


# ---- times by quiet rounds, since other processes may use the cores

QUIET = 0.95  # fraction of a quiet round's wall time in which the calling thread has a core
QUIET_ROUNDS = 3  # for a wall time


@dataclass(frozen=True, kw_only=True)
class Round:
    """Some calls of one network, in seconds per call."""

    wall_s: float
    cpu_s: float  # CPU time of the calling thread
    quiet: bool  # whether that thread had a core all the time; on a GPU it need not

    @property
    def seconds(self) -> float:
        return self.wall_s if self.quiet else self.cpu_s


def timed_round(step: Callable[[], object], calls: int, device: torch.device) -> Round:
    """Time a round. The calling thread waits for all threads, so it lacks a core if any does."""
    start = time.thread_time()
    (wall_s,), _ = timed_calls(step, calls, device)
    cpu_s = time.thread_time() - start
    quiet = device.type != "cpu" or cpu_s >= QUIET * wall_s
    return Round(wall_s=wall_s / calls, cpu_s=cpu_s / calls, quiet=quiet)


def time_of(rounds: Sequence[Round]) -> dict[str, Any]:
    """The fields of `Timing` with the time that a network would take on a quiet machine."""
    quiet = [each.wall_s for each in rounds if each.quiet]
    by_wall = len(quiet) >= min(QUIET_ROUNDS, len(rounds))
    seconds = quiet if by_wall else [each.cpu_s for each in rounds]
    both = {key: median(getattr(each, key) for each in rounds) for key in ("wall_s", "cpu_s")}
    return both | {
        "seconds": median(seconds),
        "spread": spread(seconds),
        "quiet": len(quiet) / len(rounds),
        "clock": "wall" if by_wall else "cpu",
    }


# ---- peaks of the device at hand

# GPUs with these words have a data sheet of their own.
VARIANT = re.compile(r"\b(PCIE|NVL|TI|SUPER|LAPTOP|SXM2|D|40GB)\b", re.IGNORECASE)
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def machine(device: torch.device, precision: Precision, runtime: Runtime) -> tuple[Machine, str]:
    """The device's peaks and their source: its data sheet in a profile, else a measurement."""
    profile = None
    if BYTES[precision] == 2 and device.type == "cuda":
        profile = by_sheet(Environment.here(device).device)
    if profile:
        tflops, gb_s = profile.machine.peak_tflops, profile.machine.bandwidth_gb_s
        source = profile.sheet
    else:
        tflops, gb_s = peaks(device, precision)
        kind = short_precision(precision)
        source = f"measured: a large product or convolution in {kind}, and a copy"
    return Machine(
        runtime=runtime,
        peak_tflops=float(f"{tflops:.4g}"),
        bandwidth_gb_s=float(f"{gb_s:.4g}"),
        bytes_per_element=BYTES[precision],
        vector_tflops=profile.machine.vector_tflops if profile else None,
    ), source


def by_sheet(name: str) -> Profile | None:
    """A 16-bit profile of the GPU that torch calls `name`; None if there is none."""
    if VARIANT.search(name):
        return None
    for profile in map(load_profile, profile_names()):
        model = re.match(r"NVIDIA ((RTX )?\w+)", profile.device)
        is_16_bit = profile.machine.bytes_per_element == 2
        if model and is_16_bit and re.search(rf"\b{model[1]}\b", name):
            return profile
    return None


def peaks(device: torch.device, precision: Precision) -> tuple[float, float]:
    """Measure TFLOPS of a large matrix product or convolution, and GB/s, both ways, of a copy.

    The fastest call counts, since a peak is a bound. On the CPU, maps that fit in its caches are
    copied as well.
    """
    gpu = device.type == "cuda"
    side, images, sizes = (8192, 64, (2**28,)) if gpu else (2048, 1, (2**20, 2**24))
    kind: Any = {"device": device, "dtype": getattr(torch, precision)}
    a, b = torch.randn(side, side, **kind), torch.randn(side, side, **kind)
    maps, kernel = torch.randn(images, 256, 64, 64, **kind), torch.randn(256, 256, 3, 3, **kind)
    macs = images * 256 * 256 * 9 * 62 * 62  # without padding
    buffers = {n: torch.zeros(2, n, **kind) for n in sizes}

    def seconds(call: Callable[[], object]) -> float:
        call()
        return min(timed_round(call, 3, device).seconds for _ in range(5))

    with exact_float32(), torch.inference_mode():
        product, convolution = seconds(lambda: a @ b), seconds(lambda: F.conv2d(maps, kernel))
        rates = [
            2 * n * pair.element_size() / seconds(lambda pair=pair: pair[1].copy_(pair[0]))
            for n, pair in buffers.items()
        ]
    return 2e-12 * max(side**3 / product, macs / convolution), 1e-9 * max(rates)
