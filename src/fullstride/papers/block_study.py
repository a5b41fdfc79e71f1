"""Times stacks of one kind of block over width and resolution, in the same rounds.

GENet, arXiv:2006.14090, section 3.2, names the kinds: XX has two k x k convolutions, BL is a
bottleneck, DW an inverted bottleneck with a depthwise convolution. Stacks have no stem and no head,
and the same width and resolution throughout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, groupby, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from fullstride.io.console import count_of
from fullstride.io.records import Positive, PositiveInt, refuse_flags, write_json
from fullstride.io.writing import PLOT, check_output, json_output
from fullstride.latency.devices import load_profile
from fullstride.latency.estimator import estimate
from fullstride.latency.profiles import Profile
from fullstride.measure.bench import BenchOptions, bench
from fullstride.measure.environment import Environment, choose_device
from fullstride.measure.protocols import THROUGHPUT, Protocol
from fullstride.measure.tracer import cost
from fullstride.measure.workload import Layout, Precision, find_precision
from fullstride.nets.blocks import Basic, Bottleneck, Style
from fullstride.nets.efficiency import short_precision
from fullstride.nets.spec import Stage
from fullstride.report.plots import COLOURS, DASHES, MARKERS, draw_legend, drawing, plain_ticks

KINDS = {
    "XX": Stage(block=Basic, depth=1, width=1),
    "BL": Stage(block=Bottleneck, depth=1, width=1),
    "DW": Stage(block=Bottleneck, depth=1, width=1, group_width=1),
}
# The ratios that the paper's search chooses from, section 4.
RATIOS = {"XX": (1.0,), "BL": (0.25, 0.5), "DW": (3.0, 6.0, 9.0)}

TIMES, PLOT_NAME = "blocks.json", "blocks.png"  # in the folder of a study
OUTPUT = json_output("a study of blocks", "how", "rows")
INTERVALS = {"measured": "10 to 90 % of rounds", "estimated": "90 % interval"}
LINE = "{:4} {:>6} {:>6} {:>6} {:>10} {:>10} {:>10}  {:21} {:>9}"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Blocks of one kind in sequence: (N, width, resolution, resolution) -> the same shape."""

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
        """Raises ValueError for an unknown kind and for a fractional number of channels."""
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
                f"width {self.width} x ratio {self.ratio:g} is {inner:g} channels inside a "
                f"{self.kind} block: use a width and a ratio whose product is whole"
            )
        depth, width, ratio, kernel = self.depth, self.width, self.ratio, self.kernel
        return replace(KINDS[self.kind], depth=depth, width=width, ratio=ratio, kernel=kernel)

    def build(self) -> nn.Sequential:
        stage, width = self.stage(), self.width
        size = dict(inner=stage.inner, kernel=stage.kernel, stride=1, groups=stage.groups)
        return nn.Sequential(
            *(stage.block(width, width, **size, se=None, style=Style()) for _ in range(stage.depth))
        )


@dataclass(frozen=True, kw_only=True)
class BlockTime(Stack):
    ms_per_image: Positive
    ms_low: Positive  # measured: 10 and 90 % of the rounds; estimated: the model's 90 % interval
    ms_high: Positive
    params: PositiveInt
    macs: PositiveInt  # multiply-adds; FLOPs are twice this

    def line(self) -> str:
        """A line below `Method.heading`."""
        size = f"{self.params / 1e6:.3f}", f"{self.macs / 1e6:.1f}"
        interval = f"{self.ms_low:.4g} to {self.ms_high:.4g}"
        speed = f"{self.macs / self.ms_per_image / 1e6:,.1f}"
        shape = self.kind, f"{self.ratio:g}", self.width, self.resolution
        return LINE.format(*shape, *size, f"{self.ms_per_image:.4g}", interval, speed)


Interval = tuple[float, float, float]  # ms per image: the value, its lower and its upper bound
# (networks by name, input channels, pixels a side) -> the time of each network.
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
    """Every valid combination of kind, ratio (default: `RATIOS`), width and resolution.

    Stacks of one width and resolution follow each other.
    """
    combinations = [
        Stack(kind=kind, ratio=ratio, width=width, resolution=side, depth=depth, kernel=kernel)
        for side, width, kind in product(resolutions, widths, kinds)
        for ratio in ratios or RATIOS.get(kind, (1.0,))
    ]
    if not combinations:
        raise ValueError("no blocks to time: give at least one kind, width and resolution")
    for stack in combinations:
        stack.stage()
    return list(dict.fromkeys(combinations))


def study(stacks: Sequence[Stack], time: Timer) -> Iterator[BlockTime]:
    """Time each stack by `time`, which receives the stacks of one width and resolution together."""
    for (width, side), group in groupby(stacks, lambda stack: (stack.width, stack.resolution)):
        by_name = {stack.name: stack for stack in group}
        nets = {name: stack.build() for name, stack in by_name.items()}
        times = time(nets, width, side)
        for name, stack in by_name.items():
            costs, (ms, low, high) = cost(nets[name], side, width), times[name]
            yield BlockTime(
                **asdict(stack),
                ms_per_image=ms,
                ms_low=low,
                ms_high=high,
                params=costs.params,
                macs=costs.macs,
            )


def measured(
    device: torch.device | str,
    protocol: Protocol = THROUGHPUT,
    *,
    precision: Precision,
    layout: Layout = "nchw",
) -> Timer:
    """Time by `bench`, with stacks alternating in every round: median, 10 and 90 % quantiles."""

    def time(nets: Mapping[str, nn.Module], channels: int, side: int) -> dict[str, Interval]:
        sized = replace(protocol, resolution=side)
        options = BenchOptions(in_channels=channels, precision=precision, layout=layout)
        rows = bench(nets, sized, device, options)
        spans = {row.name: 1e3 / np.percentile(row.samples, (50, 90, 10)) for row in rows}
        return {name: tuple(span.tolist()) for name, span in spans.items()}

    return time


def estimated(profile: Profile, batch: int) -> Timer:
    """Estimate by the latency model, with its 90 % interval."""

    def time(nets: Mapping[str, nn.Module], channels: int, side: int) -> dict[str, Interval]:
        results = {
            name: estimate(net, profile, batch, side, in_channels=channels)
            for name, net in nets.items()
        }
        return {name: (one.ms_per_image, one.low, one.high) for name, one in results.items()}

    return time


@dataclass(frozen=True, kw_only=True)
class Method:
    """How stacks get their times."""

    how: Literal["measured", "estimated"]
    time: Timer
    description: str
    settings: Mapping[str, Any]  # for the file

    @property
    def heading(self) -> str:
        sizes = "kind", "ratio", "width", "map", "params M", "MACs M"
        return LINE.format(*sizes, "ms/image", INTERVALS[self.how], "GMACs/s")

    def save(self, path: Path, rows: Sequence[BlockTime]) -> None:
        write_json(path, OUTPUT, {"how": self.how, **self.settings, "rows": rows})


def check_outputs(out: Path) -> None:
    """Raise ValueError, before anything is timed, if a study cannot be written into `out`."""
    check_output(out / TIMES, OUTPUT)
    check_output(out / PLOT_NAME, PLOT)


def find_method(
    device: str = "auto",
    target: str = "",
    call_batch: int | None = None,
    rounds: int | None = None,
    precision: str | None = None,
    layout: Layout | None = None,
) -> Method:
    """Measure on `device`, or estimate by the profile `target` if there is one.

    Defaults depend on the device. A profile has its own rounds, precision and layout, so that
    giving them with it raises ValueError.
    """
    if target:
        options: dict[str, object] = {"device": device != "auto", "rounds": rounds is not None}
        options |= {"precision": precision, "layout": layout}
        refuse_flags(options, f"with --target {target}: leave it out, the profile has its own")
        profile, images = load_profile(target), 64 if call_batch is None else call_batch
        return Method(
            how="estimated",
            time=estimated(profile, images),
            description=f"estimated for {profile.device} by the profile {profile.name}, "
            f"{profile.precision}, batch {images}",
            settings={"batch": images, "profile": profile.to_dict()},
        )
    place = choose_device(device)
    gpu = place.type == "cuda"
    kind, order = find_precision(precision or ("fp16" if gpu else "fp32")), layout or "nchw"
    images = (64 if gpu else 1) if call_batch is None else call_batch
    rounds = THROUGHPUT.rounds if rounds is None else rounds
    protocol = replace(THROUGHPUT, batch=images, rounds=rounds)
    here = Environment.here(place)
    settings = {"protocol": protocol, "precision": kind, "layout": order}
    return Method(
        how="measured",
        time=measured(place, protocol, precision=kind, layout=order),
        description=f"measured on {here.device}, {count_of(here.threads, 'thread')}, "
        f"torch {here.torch}, {short_precision(kind)}, {order}, batch {images}",
        settings={**settings, "environment": here},
    )


# Time and throughput over width, for each resolution.


def block_figure(rows: Sequence[BlockTime], title: str) -> Figure:
    """Plot the time per image against width for each kind and ratio (arXiv:2006.14090, Figure 3).

    The lower row shows multiply-adds per second: a low line means an idle device. `title` says
    whether the times were measured or estimated, and on which device.
    """
    sides = sorted({row.resolution for row in rows}, reverse=True)
    if not sides:
        raise ValueError("no times to draw: give at least one")
    kinds = list(dict.fromkeys(row.kind for row in rows))
    ratios = {kind: sorted({row.ratio for row in rows if row.kind == kind}) for kind in kinds}
    inches = max(5.2, 1.2 + 2.5 * len(sides))
    shared: Any = {"sharex": True, "sharey": "row", "squeeze": False}
    with drawing(inches, 5.6, 2, len(sides), **shared) as (figure, grid):
        figure.suptitle(title, fontsize=10, parse_math=False)
        for side, (time, speed) in zip(sides, grid.T, strict=True):
            for kind, colour, marker in zip(kinds, cycle(COLOURS), cycle(MARKERS), strict=False):
                own = [row for row in rows if (row.kind, row.resolution) == (kind, side)]
                for ratio, dash in zip(ratios[kind], cycle(DASHES), strict=False):
                    line = sorted((r for r in own if r.ratio == ratio), key=lambda row: row.width)
                    look: Any = {"color": colour, "ls": dash, "marker": marker, "ms": 4, "lw": 1.5}
                    widths, ms = [r.width for r in line], [r.ms_per_image for r in line]
                    time.plot(widths, ms, label=f"{kind} ratio {ratio:g}", **look)
                    lows, highs = [row.ms_low for row in line], [row.ms_high for row in line]
                    time.fill_between(widths, lows, highs, color=colour, alpha=0.15, lw=0)
                    speed.plot(widths, [row.macs / row.ms_per_image / 1e6 for row in line], **look)
            time.set_title(f"{side} x {side}", fontsize=10)
            speed.set_xlabel("width (channels)")
        for axes in grid.flat:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            plain_ticks(axes.xaxis)
            plain_ticks(axes.yaxis)
            axes.set_xticks(sorted({row.width for row in rows}))
        grid[0, 0].set_ylabel("ms per image")
        grid[1, 0].set_ylabel("G multiply-adds / s")
        entries = grid[0, 0].get_legend_handles_labels()
        place: Any = {"loc": "outside lower center", "ncols": int(inches / 1.7)}
        draw_legend(figure, *entries, handlelength=3.5, **place)
    return figure
