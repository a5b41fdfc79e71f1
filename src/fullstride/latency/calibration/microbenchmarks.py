"""Which networks reveal the numbers of a device? Small ones, each with few kinds of operators."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

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
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec, Stage

# A family that is never fitted: it shows how wrong a profile is for networks that people use.
WHOLE = "whole networks"
WHOLE_NAMES = (
    *("resnet18", "resnet50", "genet_light", "tresnet_m", "resnet_rs_50"),
    *("timm/mobilenetv2_100", "timm/efficientnet_b0", "timm/regnety_008"),
    *("timm/densenet121", "timm/convnext_tiny"),
)


@dataclass(frozen=True, kw_only=True)
class Microbenchmark:
    """A network to be timed: (N, 3, H, W), H and W from 32 -> (N, classes)."""

    name: str
    family: str  # left out of the fit together
    build: Callable[[], nn.Module]


class ChannelNorm(nn.LayerNorm):
    """Layer norm over channels: (N, C, H, W) -> the same."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConcatInput(nn.Module):
    """The input and the output of a layer, concatenated: (N, C, H, W) -> (N, 2C, H, W)."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.layer(x)), 1)


def sequence(width: int, patch: int, *layers: nn.Module, out: int = 0) -> nn.Sequential:
    """Layers of (N, width, H / patch, W / patch) to `out` channels, by default `width`."""
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out or width, 16)
    return nn.Sequential(nn.Conv2d(3, width, patch, patch), *layers, *ends)


def repeated(width: int, patch: int, depth: int, *makers: Callable[[], nn.Module]) -> nn.Sequential:
    return sequence(width, patch, *(make() for _ in range(depth) for make in makers))


def convolutions(
    width: int, patch: int, depth: int, kernel: int = 3, groups: int = 1, norm: Any = nn.BatchNorm2d
) -> nn.Sequential:
    options: dict[str, Any] = dict(padding=kernel // 2, groups=groups, bias=False)
    conv = partial(nn.Conv2d, width, width, kernel, **options)
    return repeated(width, patch, depth, conv, partial(norm, width), nn.ReLU)


def conv_norm_act(c_in: int, c_out: int, kernel: int = 3) -> nn.Sequential:
    conv = nn.Conv2d(c_in, c_out, kernel, 1, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out), nn.ReLU())


def dense_block(width: int, patch: int, depth: int, kernel: int) -> nn.Sequential:
    """Every layer doubles the channels by concatenation with its input, as in DenseNet."""
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
    return nn.Sequential(first, *convs, *pool, *linears, nn.Linear(inner, 16))


def residual(
    block: type[Block], stem: type[Stem], style: Style, *sizes: tuple[int, int, int], **stage: Any
) -> Network:
    """The blocks of `nets` behind a stem; `sizes`: depth, width and stride of the stages."""
    stages = tuple(Stage(block=block, depth=d, width=w, stride=s, **stage) for d, w, s in sizes)
    source = "a microbenchmark"
    return Network(
        NetSpec(source=source, stem=stem, stem_width=sizes[0][1], stages=stages, style=style)
    )


def all_microbenchmarks() -> list[Microbenchmark]:
    """Some forty networks; two or more families depend on each number of a profile. And WHOLE."""
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
    se, plain, inverted = SE(at="out", ratio=1 / 4), Style(), dict(ratio=3, group_width=1)
    blurred = Style(blur=True, slope=0.01)
    for sizes in shapes:
        name, quarter = f"{sizes[-1][1]} {len(sizes)}", dict(ratio=1 / 4)
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
    layer_norm = partial(ChannelNorm, 96), partial(nn.Conv2d, 96, 96, 1), nn.GELU
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
