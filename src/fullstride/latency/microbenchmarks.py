"""Which networks tell most of a device? Small ones, each ruled by few classes of operators, in families."""

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
    Style,
)
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec, Stage

WHOLE = "whole networks"  # a family that is never fitted: it shows how wrong a profile is for what people use
WHOLE_NAMES = ("resnet18", "resnet50", "genet_light", "tresnet_m", "resnet_rs_50") + tuple(
    f"timm/{name}"
    for name in (
        "mobilenetv2_100",
        "efficientnet_b0",
        "regnety_008",
        "densenet121",
        "convnext_tiny",
    )
)


@dataclass(frozen=True, kw_only=True)
class Design:
    """A network that is there to be timed: (N, 3, H, W), H and W from 32 -> (N, classes)."""

    name: str
    family: str  # left out of the fit together
    build: Callable[[], nn.Module]


class Norm(nn.LayerNorm):
    """Layer norm over channels: (N, C, H, W) -> the same."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Joined(nn.Module):
    """What a layer makes, behind its input: (N, C, H, W) -> (N, 2C, H, W)."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.layer(x)), 1)


def plain(width: int, patch: int, *layers: nn.Module, out: int = 0) -> nn.Sequential:
    """Layers of (N, width, H / patch, W / patch), which put out `out` channels, `width` where not given."""
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out or width, 16)
    return nn.Sequential(nn.Conv2d(3, width, patch, patch), *layers, *ends)


def convolutions(
    width: int, patch: int, depth: int, kernel: int = 3, groups: int = 1, norm: Any = nn.BatchNorm2d
):
    how: dict[str, Any] = dict(padding=kernel // 2, groups=groups, bias=False)
    layers = [
        (nn.Conv2d(width, width, kernel, **how), norm(width), nn.ReLU()) for _ in range(depth)
    ]
    return plain(width, patch, *(part for layer in layers for part in layer))


def repeated(width: int, patch: int, depth: int, *makers: Callable[[], nn.Module]) -> nn.Sequential:
    return plain(width, patch, *(make() for _ in range(depth) for make in makers))


def unit(c_in: int, c_out: int, kernel: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, kernel, 1, kernel // 2, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()
    )


def joined(width: int, patch: int, depth: int, kernel: int) -> nn.Sequential:
    """Every layer puts out as much as it reads, behind its input, as in DenseNet."""
    layers = (Joined(unit(width << i, width << i, kernel)) for i in range(depth))
    return plain(width, patch, *layers, nn.AvgPool2d(2), unit(width << depth, 128, 1), out=128)


def pooled(width: int, patch: int, pool: type[nn.Module]) -> nn.Sequential:
    """Convolutions between pools of unchanged size, and a pool beside its input, as in Inception."""
    pools = (pool(3, 1, 1) for _ in range(2))
    layers = (layer for each in pools for layer in (each, unit(width, width)))
    return plain(width, patch, *layers, Joined(pool(3, 1, 1)), unit(2 * width, 128, 1), out=128)


def headed(width: int, patch: int, inner: int) -> nn.Sequential:
    """Convolutions, and behind them layers of vectors, as in VGG."""
    vectors = (
        nn.Flatten(),
        nn.Linear(4 * width, inner),
        nn.ReLU(),
        nn.Linear(inner, inner),
        nn.ReLU(),
    )
    ends = nn.AdaptiveAvgPool2d(2), *vectors, nn.Linear(inner, 16)
    return nn.Sequential(
        nn.Conv2d(3, width, patch, patch), unit(width, width), unit(width, width), *ends
    )


def blocks(
    block: type[Block], stem: Any, style: Style, *sizes: tuple[int, int, int], **stage: Any
) -> Network:
    """Our own blocks behind a stem; `sizes`: depth, width and stride of the stages."""
    stages = tuple(Stage(block=block, depth=d, width=w, stride=s, **stage) for d, w, s in sizes)
    return Network(
        NetSpec(source="designed", stem=stem, stem_width=sizes[0][1], stages=stages, style=style)
    )


def designs() -> list[Design]:
    """Some forty networks in families, every number of a profile needed in two or more; and WHOLE ones."""
    found: list[Design] = []

    def add(
        family: str, name: str, build: Callable[..., nn.Module], *sizes: Any, **how: Any
    ) -> None:
        found.append(
            Design(name=f"{family} {name}", family=family, build=partial(build, *sizes, **how))
        )

    for width, patch in ((32, 4), (64, 4), (128, 8), (256, 16), (512, 32)):
        add("3x3", f"{width}", convolutions, width, patch, 4)
    for width, patch in ((64, 4), (256, 8), (512, 16), (1024, 32)):
        add("1x1", f"{width}", convolutions, width, patch, 6, 1)
    for width, patch, kernel in ((64, 4, 3), (256, 8, 3), (512, 16, 3), (128, 8, 5)):
        add("depthwise", f"{kernel} {width}", convolutions, width, patch, 4, kernel, width)
    for width, patch, groups in ((128, 8, 16), (128, 8, 4), (256, 16, 16), (512, 32, 8)):
        add("grouped", f"{width} by {groups}", convolutions, width, patch, 4, 3, groups)
    shapes = ((1, 64, 1), (1, 128, 2), (1, 256, 2)), ((2, 128, 2), (2, 256, 2))
    gate, plainly, wide_inside = SE(at="out", ratio=1 / 4), Style(), dict(ratio=3, group_width=1)
    for sizes in shapes:
        wide = sizes[-1][1]
        add("basic", f"{wide} {len(sizes)}", blocks, Basic, PoolStem, plainly, *sizes)
        add(
            "bottleneck",
            f"{wide} {len(sizes)}",
            blocks,
            Bottleneck,
            DeepConvStem,
            plainly,
            *sizes,
            ratio=1 / 4,
        )
        add(
            "inverted",
            f"{wide} {len(sizes)}",
            blocks,
            Bottleneck,
            DeepConvStem,
            plainly,
            *sizes,
            **wide_inside,
        )
        add(
            "gated",
            f"basic {wide} {len(sizes)}",
            blocks,
            Basic,
            DeepConvStem,
            plainly,
            *sizes,
            se=gate,
        )
        add(
            "blurred",
            f"{wide} {len(sizes)}",
            blocks,
            Basic,
            SpaceToDepthStem,
            Style(blur=True, slope=0.01),
            *sizes,
        )
    add(
        "bottleneck",
        "grouped",
        blocks,
        Bottleneck,
        DeepConvStem,
        plainly,
        *shapes[0],
        group_width=16,
    )
    inner = replace(gate, at="inner")
    add(
        "gated",
        "inverted",
        blocks,
        Bottleneck,
        DeepConvStem,
        plainly,
        *shapes[0],
        **wide_inside,
        se=inner,
    )
    add(
        "blurred",
        "gated",
        blocks,
        Bottleneck,
        SpaceToDepthStem,
        Style(blur=True),
        *shapes[1],
        ratio=1 / 4,
        se=gate,
    )
    for width, patch, pool in ((64, 4, nn.MaxPool2d), (256, 8, nn.AvgPool2d)):
        add("pools", f"{width}", pooled, width, patch, pool)
    for width, patch, depth, kernel in ((32, 4, 3, 1), (64, 8, 2, 3)):
        add("joining", f"{kernel} {width}", joined, width, patch, depth, kernel)
    for width, patch, inner in ((128, 8, 1024), (512, 16, 2048)):
        add("vectors", f"{inner}", headed, width, patch, inner)
    normed = partial(nn.GroupNorm, 8)
    add("group norms", "64", convolutions, 64, 4, 4, 1, norm=normed)
    add("group norms", "256", convolutions, 256, 16, 4, 3, norm=normed)
    add(
        "other norms",
        "layer 96",
        repeated,
        96,
        4,
        3,
        partial(Norm, 96),
        partial(nn.Conv2d, 96, 96, 1),
        nn.GELU,
    )
    add("other norms", "batch 128", repeated, 128, 8, 4, partial(nn.BatchNorm2d, 128), nn.SiLU)
    add("elements", "64", repeated, 64, 4, 6, nn.SiLU, nn.Hardswish)
    add("elements", "256", repeated, 256, 16, 12, nn.ReLU, partial(nn.Conv2d, 256, 256, 1), nn.SiLU)
    for width, depth in ((16, 24), (32, 48)):
        add("deep and small", f"{width} {depth}", convolutions, width, 16, depth)
    whole = [
        Design(name=name, family=WHOLE, build=partial(zoo.create, name)) for name in WHOLE_NAMES
    ]
    return found + whole
