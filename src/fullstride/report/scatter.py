"""Which networks are worth their time? Accuracy against time, with the front and the budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from fullstride.latency.select import Choice, Option
from fullstride.measure.budget import Budget
from fullstride.report.console_tables import ms as ms_text
from fullstride.report.plots import (
    COLOURS,
    INK,
    MARKERS,
    STYLE,
    Point,
    label,
    plain_ticks,
    scale_latency,
)
from fullstride.tasks.task import Metric

FORM_MARKERS = (*MARKERS, "X", "p", "<", ">")  # a machine runs seven forms without a GPU


@dataclass(frozen=True, kw_only=True)
class FilePoint:
    """An exported file in the plot of a fit."""

    network: str
    form: str  # format and precision
    ms: float  # per image
    val: float  # score
    measured: bool  # False: the time is an estimate
    ships: bool
    test: float | None = None  # score of the file that ships
    test_interval: tuple[float, float] | None = None


def files_figure(
    points: Sequence[FilePoint], metric: Metric, budget: Budget, percentile: float
) -> Figure:
    """Plot validation scores of files against their time, and the test score of the one that ships.

    A colour is a network and a marker a format and precision; hollow markers are estimates.
    """
    networks = list(dict.fromkeys(point.network for point in points))
    shapes = list(dict.fromkeys(point.form for point in points))
    with matplotlib.rc_context(STYLE):
        figure = Figure((9.2, 4.8), layout="constrained")
        axes = figure.subplots()
        scale_latency(axes, [budget.ms_per_image, *(point.ms for point in points)])
        kind = "estimate" if any(not each.measured for each in points) else f"p{percentile:g}"
        axes.set_xlabel(f"time of a call / its images, {kind}, batch {budget.batch} (ms)")
        unit = f" ({metric.unit})" if metric.unit else ""
        axes.set_ylabel(f"{metric.label} on the validation split{unit}", parse_math=False)
        axes.axvline(budget.ms_per_image, color=INK, lw=1.2, dashes=(4, 3), alpha=0.7)
        for point in points:
            colour = COLOURS[networks.index(point.network) % len(COLOURS)]
            marker = FORM_MARKERS[shapes.index(point.form) % len(FORM_MARKERS)]
            fill = colour if point.measured else "none"
            axes.plot(point.ms, point.val, marker, mec=colour, mfc=fill, ms=8)
            if point.ships:
                axes.plot(point.ms, point.val, "o", mec=INK, mfc="none", ms=15, mew=1.6)
            if point.test is not None:
                low, high = point.test_interval or (point.test, point.test)
                axes.plot([point.ms] * 2, [low, high], color=INK, lw=1.4, alpha=0.5)
                axes.plot(point.ms, point.test, "_", color=INK, ms=14, mew=2)
        keys: list[Any] = [
            axes.plot([], [], "s", color=COLOURS[number % len(COLOURS)], label=f" {name}")[0]
            for number, name in enumerate(networks)
        ]
        keys += [
            axes.plot([], [], marker, color=INK, mfc="none", ls="none", label=form)[0]
            for form, marker in zip(shapes, cycle(FORM_MARKERS), strict=False)
        ]
        style: Any = dict(mec=INK, mfc="none", ms=11, mew=1.6)
        keys += axes.plot([], [], "o", **style, label="ships")
        if any(point.test is not None for point in points):
            keys += axes.plot([], [], "_", color=INK, mew=2, ms=11, label="ships, on the test")
        budget_line: Any = dict(color=INK, lw=1.2, dashes=(4, 3))
        keys += axes.plot([], [], **budget_line, label=f"budget {budget.ms_per_image:g} ms")
        legend = figure.legend(
            handles=keys, loc="outside right upper", frameon=False, fontsize=8.5, labelspacing=0.7
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def choice_figure(options: Sequence[Option], choice: Choice, title: str) -> Figure:
    """Plot published times as filled and estimated ones as hollow markers, with their intervals.

    Only networks on the front are labelled, above it, where no marker can be. `title` names the
    device and the batch size.
    """
    accuracies = [option.network.top1 for option in options]
    span = max(max(accuracies) - min(accuracies), 1.0)  # of the axis below its room for names
    with matplotlib.rc_context(STYLE):
        figure = Figure((9.2, 5.6), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, fontsize=10, parse_math=False)
        scale_latency(axes, [choice.budget.ms_per_image, *(option.ms for option in options)])
        axes.set_ylim(min(accuracies) - 0.06 * span, max(accuracies) + 0.5 * span)
        axes.set_xlabel("time of a call / its images (ms)")
        axes.set_ylabel("published top-1 on ImageNet (%)")
        axes.axvline(
            choice.budget.ms_per_image,
            color=COLOURS[1],
            lw=1.2,
            dashes=(4, 3),
            label=f"budget {choice.budget.ms_per_image:g} ms",
        )
        line = [(option.ms, option.network.top1) for option in choice.front]
        axes.step(*zip(*line, strict=True), where="post", color=COLOURS[0], lw=1.5, label="front")
        for option in options:
            place, own = (option.ms, option.network.top1), option in choice.front
            colour = COLOURS[0] if own else INK
            full = colour if option.by == "published" else "white"
            axes.plot(
                *place,
                "o",
                mec=colour,
                mfc=full,
                ms=7,
                alpha=1 if own else 0.4,
                zorder=3 if own else 2,
            )
            if own:
                name = f"{option.network.name} {option.network.resolution}"
                how: Any = dict(
                    rotation=-55, rotation_mode="anchor", ha="right", fontsize=8.5, color=colour
                )
                axes.annotate(
                    name, place, (-5, 6), textcoords="offset points", parse_math=False, **how
                )
            if own and option.by == "estimated":
                axes.plot(
                    (option.estimate.low, option.estimate.high),
                    [place[1]] * 2,
                    color=colour,
                    lw=4,
                    alpha=0.2,
                )
        axes.plot(
            choice.best.ms,
            choice.best.network.top1,
            "o",
            mec=COLOURS[1],
            mfc="none",
            ms=13,
            mew=2,
            label="best",
        )
        for by, colour in (("published", INK), ("estimated", "white")):
            if any(option.by == by for option in options):
                axes.plot([], [], "o", mec=INK, mfc=colour, ms=7, label=f"{by} time")
        axes.legend(loc="lower right", frameon=False, fontsize=9)
    return figure


# What does a budget buy? The times of candidates, with the budget, half of it and twice of it.


BANDS = ("half of the budget", "the budget", "twice the budget", "more")
BAND_COLOURS = (COLOURS[2], COLOURS[0], COLOURS[1], INK)
ROW_HEIGHT = 0.24  # inches


@dataclass(frozen=True, kw_only=True)
class TimedCandidate:
    """A candidate in its fastest format and precision, in ms per image."""

    name: str
    form: str  # format and precision; the precision alone where it is an estimate
    ms: float
    low: float
    high: float
    limit_ms: float  # that the budget is compared with
    other_ms: tuple[float, ...] = ()  # in other formats and precisions
    top1: float | None = None  # published, of its initial weights

    def band(self, budget: Budget) -> int:
        """The index in `BANDS`: which share of the budget it needs."""
        shares = (0.5, 1, 2)
        return sum(self.limit_ms > share * budget.ms_per_image for share in shares)


def budget_figure(rows: Sequence[TimedCandidate], budget: Budget) -> Figure:
    """A row for each candidate, in their order from the top.

    Filled markers are the fastest files, with the interval of their time; small ones are other
    formats and precisions. Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("no candidate to plot: give at least one with a time")
    with matplotlib.rc_context(STYLE):
        figure = Figure((9.2, 1.4 + ROW_HEIGHT * len(rows)), layout="constrained")
        axes = figure.subplots()
        limit = budget.ms_per_image
        every_ms = [limit / 2, 2 * limit, *(ms for row in rows for ms in (row.ms, *row.other_ms))]
        scale_latency(axes, every_ms)
        axes.set_xlabel(f"time of a call / its images, batch {budget.batch} (ms)")
        for share, width in ((0.5, 0.8), (1, 1.6), (2, 0.8)):
            axes.axvline(share * limit, color=INK, lw=width, dashes=(4, 3), alpha=0.7)
        for place, row in enumerate(rows):
            band = row.band(budget)
            colour, marker = BAND_COLOURS[band], MARKERS[band]
            axes.plot(row.other_ms, [place] * len(row.other_ms), "|", color=colour, alpha=0.6)
            axes.plot((row.low, row.high), [place] * 2, color=colour, lw=4, alpha=0.3)
            axes.plot(row.ms, place, marker, color=colour, ms=7)
            axes.annotate(
                f"{ms_text(row.ms)}, {row.form}",
                (1, place),
                (4, 0),
                xycoords=axes.get_yaxis_transform(),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=colour,
                parse_math=False,
            )
        labels = [row.name + (f"  {row.top1:.1f} %" if row.top1 else "") for row in rows]
        axes.set_yticks(range(len(rows)), labels, parse_math=False, fontsize=9)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        for band in sorted({row.band(budget) for row in rows}):
            count = sum(row.band(budget) == band for row in rows)
            colour, marker = BAND_COLOURS[band], MARKERS[band]
            axes.plot([], [], marker, color=colour, ms=7, label=f"{BANDS[band]}: {count}")
        figure.legend(
            loc="outside upper center",
            ncols=len(BANDS),
            frameon=False,
            fontsize=9,
            title=f"candidates by the time they need; the budget is {ms_text(limit)}",
            title_fontsize=9,
        )
    return figure


# How does the error fall with time? One panel for each length of training, with front and law.


MOST_LABELS = 12  # of points on the front, the most accurate ones


@dataclass(frozen=True)
class ScalingPoint:
    """A trained network."""

    name: str
    ms: float  # per image
    error: float  # per cent
    low: float  # interval of the error
    high: float
    on_front: bool


@dataclass(frozen=True)
class ScalingPanel:
    """The trainings of one length."""

    title: str
    points: Sequence[ScalingPoint]
    law: Callable[[np.ndarray], np.ndarray] | None = None  # errors of ms per image


def scaling_figure(panels: Sequence[ScalingPanel], budget_ms: float | None = None) -> Figure:
    """Plot errors, on a logarithmic axis, against times. Filled points are on the front."""
    with matplotlib.rc_context(STYLE):
        figure = Figure((9.2, 4.4 * len(panels)), layout="constrained")
        rows: Any = figure.subplots(len(panels), 1, squeeze=False)
        for (axes,), panel in zip(rows, panels, strict=True):
            axes.set_title(panel.title, fontsize=10, parse_math=False)
            times = [point.ms for point in panel.points]
            scale_latency(axes, times)
            scale_errors(axes, panel.points)
            for point in panel.points:
                colour = COLOURS[0] if point.on_front else INK
                alpha = 1.0 if point.on_front else 0.45
                ends = point.low, point.high
                axes.plot([point.ms] * 2, ends, color=colour, lw=1.2, alpha=0.4 * alpha)
                fill = colour if point.on_front else "none"
                axes.plot(point.ms, point.error, "o", mec=colour, mfc=fill, ms=6, alpha=alpha)
            if panel.law is not None:
                grid = np.geomspace(min(times), 2 * max(times), 100)
                axes.plot(grid, panel.law(grid), color=COLOURS[1], lw=1.4, zorder=1)
            if budget_ms is not None:
                axes.axvline(budget_ms, color=INK, lw=1.2, dashes=(4, 3), alpha=0.7)
            axes.set_xlabel("time of an image (ms)")
            axes.set_ylabel("error (%)")
            front = [point for point in panel.points if point.on_front][-MOST_LABELS:]
            label(figure, axes, [Point(each.name, each.ms, each.error) for each in front], {})
    return figure


def scale_errors(axes: Axes, points: Sequence[ScalingPoint]) -> None:
    """Let the axis span the errors and, as far as they are above a half of it, their intervals."""
    least = min(point.error for point in points)
    low = max(min(point.low for point in points), least / 2, 0.01)
    high = max(low * 1.1, *(point.high for point in points))
    axes.set_yscale("log")
    axes.set_ylim(low / 1.05, high * 1.05)
    if high > 10 * low:
        plain_ticks(axes.yaxis)
        return
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
