"""Which block is fast at which width and resolution? Stacks of one kind, timed side by side.

GENet, arXiv:2006.14090, section 3.2, names the kinds: XX two k x k convolutions, BL a bottleneck, DW an inverted
bottleneck with a depthwise convolution. Stacks are blocks alone: no stem, no head, the same width and map throughout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fullstride.measure.bench import bench
from fullstride.measure.cost.flops import cost
from fullstride.measure.protocols import THROUGHPUT, Protocol
from fullstride.measure.workload import Layout, Precision
from fullstride.nets.blocks import Basic, Bottleneck, Style
from fullstride.nets.spec import Stage

if TYPE_CHECKING:
    from fullstride.latency.profiles import Profile

KINDS = {
    "XX": Stage(block=Basic, depth=1, width=1),
    "BL": Stage(block=Bottleneck, depth=1, width=1),
    "DW": Stage(block=Bottleneck, depth=1, width=1, group_width=1),
}
# The ratios that the paper's search chooses from, section 4.
RATIOS = {"XX": (1.0,), "BL": (0.25, 0.5), "DW": (3.0, 6.0, 9.0)}


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Blocks of one kind in a row: (N, width, resolution, resolution) -> the same."""

    kind: str  # of KINDS
    ratio: float  # channels between a block's convolutions / width
    width: int  # channels in and out of every block
    resolution: int  # of the map, pixels a side
    depth: int = 4  # blocks
    kernel: int = 3

    @property
    def name(self) -> str:
        return f"{self.kind} {self.ratio:g}"

    def stage(self) -> Stage:
        """Raises ValueError for a kind that is none, and for channels that are not whole."""
        if self.kind not in KINDS:
            raise ValueError(
                f"no kind of block named {self.kind!r}: choose from {', '.join(KINDS)}"
            )
        if not 0 < self.ratio < float("inf"):
            raise ValueError(
                f"ratio {self.ratio:g} of a {self.kind} block: use a number above 0, as 0.25 or 3"
            )
        inner = self.width * self.ratio
        if abs(inner - round(inner)) > 1e-6:
            raise ValueError(
                f"width {self.width} x ratio {self.ratio:g} is {inner:g} channels inside a {self.kind} block: "
                "use a width and a ratio whose product is whole"
            )
        size = dict(depth=self.depth, width=self.width, ratio=self.ratio, kernel=self.kernel)
        return replace(KINDS[self.kind], **size)

    def build(self) -> nn.Sequential:
        stage, width = self.stage(), self.width
        size = dict(inner=stage.inner, kernel=stage.kernel, stride=1, groups=stage.groups)
        return nn.Sequential(
            *(stage.block(width, width, **size, se=None, style=Style()) for _ in range(stage.depth))
        )


@dataclass(frozen=True, kw_only=True)
class BlockTime(Stack):
    """A stack with what one image through it takes and costs."""

    ms_per_image: float
    ms_low: float  # measured: 10 and 90 % of the rounds; estimated: the model's 90 % interval
    ms_high: float
    params: int
    macs: int  # multiply-adds; FLOPs are twice this


Interval = tuple[float, float, float]  # ms per image: the number, and between what it lies
# Networks by name, channels and pixels a side of their input -> the time of each.
Timer = Callable[[Mapping[str, nn.Module], int, int], Mapping[str, Interval]]


def stacks(
    kinds: Sequence[str],
    widths: Sequence[int],
    resolutions: Sequence[int],
    ratios: Sequence[float] = (),
    *,
    depth: int = 4,
    kernel: int = 3,
) -> list[Stack]:
    """Every kind at every ratio (its own in `RATIOS` where none are given), width and resolution, checked.

    Those of one width and resolution stand together.
    """
    size = dict(depth=depth, kernel=kernel)
    found = [
        Stack(kind=kind, ratio=ratio, width=width, resolution=side, **size)
        for side, width, kind in product(resolutions, widths, kinds)
        for ratio in ratios or RATIOS.get(kind, (1.0,))
    ]
    if not found:
        raise ValueError("no blocks to time: give at least one kind, width and resolution")
    for stack in found:
        stack.stage()
    return list(dict.fromkeys(found))


def study(asked: Sequence[Stack], time: Timer) -> Iterator[BlockTime]:
    """The time of each stack; those of one width and resolution have their turn together, as `time` takes them."""
    together: dict[tuple[int, int], list[Stack]] = {}
    for stack in asked:
        together.setdefault((stack.width, stack.resolution), []).append(stack)
    for (width, side), part in together.items():
        nets = {stack.name: stack.build() for stack in part}
        times = time(nets, width, side)
        for stack in part:
            price = cost(nets[stack.name], side, width)
            ms, low, high = times[stack.name]
            known: dict[str, Any] = dict(
                ms_per_image=ms, ms_low=low, ms_high=high, params=price.params, macs=price.macs
            )
            yield BlockTime(**asdict(stack), **known)


def measured(
    device: torch.device | str,
    protocol: Protocol = THROUGHPUT,
    *,
    precision: Precision,
    layout: Layout = "nchw",
) -> Timer:
    """Times by `bench`, the stacks in turn inside every round: the median round, and 10 and 90 % of them."""

    def time(nets: Mapping[str, nn.Module], channels: int, side: int) -> dict[str, Interval]:
        here = replace(protocol, resolution=side)
        rows = bench(nets, here, device, channels, precision=precision, layout=layout)
        spans = {row.name: 1e3 / np.percentile(row.samples, (50, 90, 10)) for row in rows}
        return {
            name: (float(ms), float(low), float(high)) for name, (ms, low, high) in spans.items()
        }

    return time


def estimated(profile: "Profile", batch: int) -> Timer:
    """Times by the latency model, with its 90 % interval."""
    from fullstride.latency.profiles import estimate

    def time(nets: Mapping[str, nn.Module], channels: int, side: int) -> dict[str, Interval]:
        found = {
            name: estimate(net, profile, batch, side, in_channels=channels)
            for name, net in nets.items()
        }
        return {name: (one.ms_per_image, one.low, one.high) for name, one in found.items()}

    return time
