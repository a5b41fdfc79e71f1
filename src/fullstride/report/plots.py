"""Draws accuracy against latency, learning curves and confusions, as SVG or PNG.

Text in an SVG stays text in the page's colour, so that it can be searched, read aloud and seen on a
dark page.
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox, Transform

from fullstride.io.console import count_of
from fullstride.io.writing import GENERATOR, PLOT, atomic_write
from fullstride.report.console_tables import wilson
from fullstride.tasks.task import Calibration, ConfusionMatrix, Metric

INK = "#1d2129"
# Distinct for colour-blind readers, on white and on black; after Okabe and Ito, jfly.uni-koeln.de
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56a4d9")
MARKERS = ("o", "s", "D", "^", "v", "P")
DASHES = ("solid", "dashed", "dashdot", "dotted")
WIDE_RANGE = 4.0  # slowest / fastest, from which the latency axis is logarithmic
MOST_DECADES = 4  # on a logarithmic axis with three labels per decade
STRIP = 0.2  # share of the height, below the accuracies, for untrained networks
DIRECTIONS = ((1, 0), (-1, 0), (0.7, 1), (0.7, -1), (-0.7, 1), (-0.7, -1), (0, 1.2), (0, -1.2))
# Offsets of names from their markers, in points, the nearest first.
LABEL_OFFSETS = [(x * far, y * far) for far in (10, 17, 27, 40) for x, y in DIRECTIONS]
STYLE: Any = {
    "font.size": 10,
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
}

EpochRow = Mapping[str, Any]  # epoch, loss, lr, images_per_s, val/..., see `train.run`


@dataclass(frozen=True)
class Point:
    """One network in the plot."""

    name: str
    ms_per_image: float
    score: float | None  # None: not trained
    interval: tuple[float, float] | None = None  # of the score
    span: tuple[float, float] | None = None  # interval of the time


def score_latency(points: Sequence[Point], metric: Metric, data: str = "") -> Markup:
    """Plot score against latency as an SVG; hollow rings are networks without a score."""
    description = [
        f"{p.name}: {p.ms_per_image:.3g} ms, "
        + ("not trained here" if p.score is None else metric.text(p.score, 1))
        for p in points
    ]
    return svg(
        score_latency_figure(points, metric, data),
        f"{metric.label} against latency. " + "; ".join(description),
    )


def learning_curves(curves: Mapping[str, Sequence[EpochRow]], metric: Metric) -> Markup:
    """Plot training loss and validation score by epoch as an SVG."""
    description = [
        f"{name} ends at {metric.text(rows[-1][f'val/{metric.name}'], 1)}"
        for name, rows in curves.items()
        if rows and f"val/{metric.name}" in rows[-1]
    ]
    return svg(
        learning_curves_figure(curves, metric),
        f"Loss and validation {metric.label} by epoch. " + "; ".join(description),
    )


@contextmanager
def drawing(
    width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any
) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure of `width` x `height` inches in our style, and its axes (array if several)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure((width, height), layout="constrained")
        yield figure, figure.subplots(rows, columns, **grid)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A marker of a scatter plot, with intervals of its coordinates as bars."""

    at: tuple[float, float]
    colour: str
    shape: str = "o"
    filled: bool = True
    size: float = 7  # points
    alpha: float = 1.0
    across: Sequence[float] | None = None  # interval of the time
    up: Sequence[float] | None = None  # interval of the score

    def draw(self, axes: Axes, **place: Any) -> None:
        x, y = self.at
        bar: Any = dict(color=self.colour, alpha=0.4 * self.alpha, zorder=1)
        if self.across:
            axes.plot(self.across, (y, y), lw=2.5, **bar)
        if self.up:
            axes.plot((x, x), self.up, lw=1.5, **bar)
        fill = self.colour if self.filled else "none"
        look: Any = dict(mec=self.colour, mfc=fill, ms=self.size, alpha=self.alpha)
        axes.plot(x, y, self.shape, zorder=3 if self.filled else 2, **look, **place)


def draw_budget(axes: Axes, ms: float, label: str | None = None, width: float = 1.2) -> Any:
    """Draw a dashed line at the budget, and return it for a legend."""
    return axes.axvline(ms, color=INK, lw=width, dashes=(4, 3), alpha=0.7, label=label)


def draw_legend(owner: Axes | Figure, *entries: Any, **how: Any) -> None:
    """Draw a legend without parsing names as formulas."""
    legend = owner.legend(*entries, frameon=False, **{"fontsize": 9, **how})
    for text in legend.get_texts():
        text.set_parse_math(False)


def name_bars(figure: Figure, what: str) -> None:
    """Say above the plots what the bars of markers are."""
    bar = Line2D([], [], color=INK, alpha=0.4, lw=2.5, label=what)
    draw_legend(figure, handles=[bar], loc="outside upper left")


def score_latency_figure(points: Sequence[Point], metric: Metric, data: str = "") -> Figure:
    if not points:
        raise ValueError("no network to plot: give at least one with a measured time")
    with drawing(9.2, 4.6) as (figure, axes):
        trained = [p for p in points if p.score is not None]
        scale_latency(axes, [p.ms_per_image for p in points])
        scale_accuracy(axes, trained, strip=len(trained) < len(points))
        axes.set_xlabel("latency of one image, median (ms)")
        axes.set_ylabel(metric.axis_label(f" on {data}" if data else ""), parse_math=False)
        colours = dict(zip(trained, cycle(COLOURS), strict=False))
        for (point, colour), shape in zip(colours.items(), cycle(MARKERS), strict=False):
            Mark(at=place(point), colour=colour, shape=shape, size=9, up=point.interval).draw(axes)
        for point in points:
            if point.score is None:
                mark = Mark(at=place(point), colour=INK, filled=False, size=8)
                mark.draw(axes, transform=axes.get_xaxis_transform())
        if any(point.interval for point in points):
            name_bars(figure, "95 % interval")
        label(figure, axes, points, colours)
    return figure


def place(point: Point) -> tuple[float, float]:
    """The coordinates of a marker: ms and score, or a share of the height if untrained."""
    return point.ms_per_image, STRIP * 0.3 if point.score is None else point.score


def scale_latency(axes: Axes, ms: Sequence[float]) -> None:
    low, high = min(ms), max(ms)
    if high >= WIDE_RANGE * low:
        axes.set_xscale("log")
        axes.set_xlim(low / 2.2, high * 2.2)
        plain_ticks(axes.xaxis)
    else:
        axes.set_xlim(0, high * 1.3)


def plain_ticks(axis: Axis, locator: Locator | None = None) -> None:
    """Label a logarithmic axis with plain numbers: by default 1, 2 and 5 of every decade.

    An axis of more than `MOST_DECADES` decades only has room for powers of ten.
    """
    low, high = axis.get_view_interval()
    is_wide = 0 < low * 10**MOST_DECADES < high
    axis.set_major_locator(locator or LogLocator(subs=(1,) if is_wide else (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def scale_accuracy(axes: Axes, trained: Sequence[Point], strip: bool) -> None:
    """Let the axis span the intervals, not 0 to 100, with room below for the `strip`."""
    ends = [
        end for p in trained for end in (p.interval or (p.score, p.score)) if end is not None
    ] or [0.0, 100.0]
    room = max(max(ends) - min(ends), 1.0) * 0.12
    low, high = min(ends) - room, max(ends) + room
    below = (high - low) * STRIP / (1 - STRIP) if strip else 0.0
    axes.set_ylim(low - below, high)
    most = high if max(ends) > 100 else min(high, 100.5)
    ticks = MaxNLocator(6, steps=(1, 2, 5, 10)).tick_values(low, high)
    axes.set_yticks([tick for tick in ticks if trained and low < tick < most])
    if strip:
        axes.axhline(low, color=INK, lw=0.8, alpha=0.5, dashes=(4, 3))
        look: Any = dict(transform=axes.transAxes, fontsize=9, va="top", alpha=0.75)
        axes.text(0.01, STRIP - 0.015, "not trained here", **look)


def label(
    figure: Figure, axes: Axes, points: Sequence[Point], colours: Mapping[Point, str]
) -> None:
    """Place each name near its marker, inside the axes, where it covers the least.

    Markers and other names count before intervals, and before markers that are nearer to the name
    than its own marker is. The nearest of equal places is chosen.
    """
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        # The font may lack characters of a name.
        warnings.filterwarnings("ignore", message="Glyph")
        canvas.draw()
        renderer, frame = canvas.get_renderer(), axes.get_window_extent()
        radius = 6 * figure.dpi / 72
        occupied = [text.get_window_extent(renderer) for text in axes.texts]
        bars, markers = [], {point: grid(axes, point).transform(place(point)) for point in points}
        for point, (x, y) in markers.items():
            ms, score = place(point)
            occupied.append(Bbox.from_extents(x - radius, y - radius, x + radius, y + radius))
            up = [(ms, end) for end in point.interval or ()]
            across = [(end, score) for end in point.span or ()]
            bars += [Bbox(axes.transData.transform(ends)) for ends in (up, across) if ends]

        centres = np.array(list(markers.values()))

        def cost(text: Annotation, own: int, offset: tuple[float, float]) -> tuple[bool, int, int]:
            move(text, offset)
            box = text.get_window_extent(renderer)
            is_outside = box.x0 < frame.x0 or box.x1 > frame.x1
            is_outside |= box.y0 < frame.y0 or box.y1 > frame.y1
            gaps = np.hypot(*(centres - np.clip(centres, box.min, box.max)).T)
            nearer = int((gaps < gaps[own]).sum())
            return (
                is_outside,
                sum(map(box.overlaps, occupied)),
                sum(map(box.overlaps, bars)) + nearer,
            )

        numbers = {point: number for number, point in enumerate(markers)}
        for point in sorted(points, key=lambda point: -point.ms_per_image):
            if point.name:
                text = annotation(axes, point, colours.get(point, INK))
                move(text, min(LABEL_OFFSETS, key=partial(cost, text, numbers[point])))
                occupied.append(text.get_window_extent(renderer))


def grid(axes: Axes, point: Point) -> Transform:
    """The transform of the coordinates of a marker, see `place`."""
    return axes.get_xaxis_transform() if point.score is None else axes.transData


def annotation(axes: Axes, point: Point, colour: str) -> Annotation:
    """Write the name of a point, which `move` puts in its place."""
    look: Any = dict(xycoords=grid(axes, point), textcoords="offset points", color=colour)
    text = axes.annotate(point.name, place(point), (0, 0), va="center", parse_math=False, **look)
    text.set_in_layout(False)
    return text


def move(text: Annotation, offset: tuple[float, float]) -> None:
    """Move a name so far from its marker, in points."""
    x, _ = offset
    text.set_position(offset)
    text.set_horizontalalignment("center" if x == 0 else "left" if x > 0 else "right")


def learning_curves_figure(curves: Mapping[str, Sequence[EpochRow]], metric: Metric) -> Figure:
    with drawing(9.2, 3.4, 1, 2) as (figure, (loss, score)):
        for axes, key, name in (
            (loss, "loss", "training loss"),
            (score, f"val/{metric.name}", f"validation {metric.axis_label()}"),
        ):
            lines = [
                axes.plot(
                    [row["epoch"] for row in rows if key in row],  # none without a validation split
                    [row[key] for row in rows if key in row],
                    color=COLOURS[number % len(COLOURS)],
                    ls=DASHES[number % len(DASHES)],
                    lw=1.8,
                    marker="o" if len(rows) == 1 else "",
                )[0]
                for number, rows in enumerate(curves.values())
            ]
            axes.set_xlabel("epoch")
            axes.set_ylabel(name)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        # The space keeps names that begin with an underscore, which matplotlib would hide.
        draw_legend(score, lines, [f" {name}" for name in curves], fontsize=9.5)
    return figure


def save_png(figure: Figure, path: Path, dpi: int = 150) -> None:
    with atomic_write(path, PLOT) as beside:
        beside.write_bytes(png(figure, dpi))


def png(figure: Figure, dpi: int = 150) -> bytes:
    out = io.BytesIO()
    mark = {"Software": GENERATOR}  # `PLOT` recognises the file by it
    save(figure, out, format="png", dpi=dpi, facecolor="white", metadata=mark)
    return out.getvalue()


def svg(figure: Figure, description: str) -> Markup:
    """The figure as an SVG element for an HTML page, with `description` for screen readers."""
    out = io.StringIO()
    # Matplotlib's address would be the page's only link, and the date the only change between runs.
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # The salt makes ids equal in every run and different between figures of a page.
    with matplotlib.rc_context({"svg.hashsalt": description}):
        save(figure, out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"font: ([^;\"]*px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    # Ids of groups are the same in every figure, but must be unique in a page.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)
    return Markup(text)


def save(figure: Figure, out: io.BytesIO | io.StringIO, **how: Any) -> None:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # This machine's fonts may lack characters that the reader's browser has.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(out, **how)


def reliability(calibration: Calibration) -> Markup:
    """A reliability diagram as an SVG: right predictions by their probability, and counts."""
    images = sum(calibration.images)
    description = (
        f"Reliability diagram of {count_of(images, 'image')}: the expected calibration error is "
        f"{calibration.error:.1f} %"
    )
    return svg(reliability_figure(calibration), description)


def reliability_figure(calibration: Calibration) -> Figure:
    width = 100 / len(calibration.images)
    with drawing(9.2, 3.4, 1, 2) as (figure, (shares, counts)):
        shares.plot((0, 100), (0, 100), color=INK, lw=1.2, dashes=(4, 3), alpha=0.7)
        columns = calibration.images, calibration.correct, calibration.probability
        for number, (images, correct, probability) in enumerate(zip(*columns, strict=True)):
            if not images:
                continue
            share = 100 * correct / images
            at = (100 * probability / images, share)
            Mark(at=at, colour=COLOURS[0], up=wilson(share, images)).draw(shares, clip_on=False)
            counts.bar((number + 0.5) * width, images, 0.9 * width, color=COLOURS[0])
            where = ((number + 0.5) * width, images)
            look: Any = dict(ha="center", va="bottom", fontsize=8)
            counts.annotate(f"{images}", where, (0, 1), textcoords="offset points", **look)
        counts.margins(y=0.12)
        for axes in (shares, counts):
            axes.set_xlim(0, 100)
            axes.set_xlabel("probability of the predicted class (%)")
        shares.set_ylim(0, 100)
        shares.set_ylabel("right predictions (%)")
        counts.set_ylabel("images")
        name_bars(figure, "95 % interval")
    return figure


# The confusion matrix as a heat map.


BLUE = COLOURS[0]
MAX_CLASSES = 50  # in a readable heat map
MAX_NUMBERS = 20  # classes with numbers in the cells
MAX_NAME = 24  # characters


def heat_map(matrix: ConfusionMatrix, classes: tuple[str, ...]) -> Markup:
    """A heat map as an SVG; rows are the classes of images, columns the predicted classes."""
    worst = [
        f"{classes[label]} as {classes[other]} {images} times"
        for label, other, images in matrix.most_confused(3)
    ]
    description = f"Confusion matrix; most often confused: {', '.join(worst) or 'none'}"
    return svg(heat_map_figure(matrix, classes), description)


def heat_map_figure(matrix: ConfusionMatrix, classes: tuple[str, ...]) -> Figure:
    images_kk, number = matrix.dense(), len(classes)
    share_kk = images_kk / images_kk.sum(1, keepdims=True).clip(1)
    names = [name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…" for name in classes]
    side = max(2.7, min(9.2, 1.6 + 0.36 * number))
    with drawing(side + 0.6, side) as (figure, axes):
        axes.pcolormesh(
            share_kk**0.5,  # makes rare confusions visible
            cmap=LinearSegmentedColormap.from_list("share", [to_rgba(BLUE, 0), to_rgba(BLUE, 1)]),
            vmin=0,
            vmax=1,
            edgecolors=to_rgba("gray", 0.2),
            linewidth=0.4,
        )
        axes.invert_yaxis()
        axes.set_aspect("equal")
        axes.grid(visible=False)
        ticks = [index + 0.5 for index in range(number)]
        small = 9 if number <= MAX_NUMBERS else 6
        axes.set_xticks(ticks, names, rotation=90, fontsize=small, parse_math=False)
        axes.set_yticks(ticks, names, fontsize=small, parse_math=False)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("class of the image")
        if number <= MAX_NUMBERS:
            for label, other, images in zip(
                matrix.labels, matrix.predictions, matrix.images, strict=True
            ):
                colour = "white" if share_kk[label, other] > 0.4 else INK
                where = (other + 0.5, label + 0.5)
                axes.text(*where, f"{images}", ha="center", va="center", fontsize=8, color=colour)
    return figure
