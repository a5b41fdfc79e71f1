"""Draws accuracy, error, candidates and measurements against time, with front and budget."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fullstride.io.console import printable
from fullstride.latency.select import Choice, Option
from fullstride.measure.budget import Budget
from fullstride.measure.protocols import Measurement
from fullstride.report import plots
from fullstride.report.console_tables import ms as ms_text
from fullstride.report.plots import COLOURS, INK, MARKERS, Mark
from fullstride.tasks.task import Metric

LEGEND_ROW, LONG_NAME = 0.22, 32  # inches; characters, beyond which names stand in one column
ROOM = 0.045  # distance between two names / the front's length
FORM_MARKERS = (*MARKERS, "X", "p", "<", ">")  # a machine without a GPU runs seven forms


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
    """Plot the files' validation scores against their times, and the shipped file's test score.

    A colour is a network, a marker is a format and precision; hollow markers are estimates.
    """
    networks = list(dict.fromkeys(point.network for point in points))
    shapes = list(dict.fromkeys(point.form for point in points))
    columns = 1 if max(map(len, (*networks, *shapes))) > LONG_NAME else 2
    rows = math.ceil((len(networks) + len(shapes) + 3) / columns)
    height = 3.9 + LEGEND_ROW * rows
    with plots.drawing(5.6, height) as (figure, axes):  # legible on a phone, as a whole
        plots.scale_latency(axes, [budget.ms_per_image, *(point.ms for point in points)])
        kind = "estimate" if any(not each.measured for each in points) else f"p{percentile:g}"
        axes.set_xlabel(f"time of a call / its images, {kind}, batch {budget.batch} (ms)")
        axes.set_ylabel(metric.axis_label(" on the validation split"), parse_math=False)
        ring: Any = dict(mec=INK, mfc="none", mew=1.6)
        for point in points:
            shape = FORM_MARKERS[shapes.index(point.form) % len(FORM_MARKERS)]
            look: Any = dict(shape=shape, filled=point.measured, size=8)
            colour = COLOURS[networks.index(point.network) % len(COLOURS)]
            Mark(at=(point.ms, point.val), colour=colour, **look).draw(axes)
            if point.ships:
                axes.plot(point.ms, point.val, "o", ms=15, **ring)
            if point.test is not None:
                at = point.ms, point.test
                Mark(at=at, colour=INK, shape="_", size=14, up=point.test_interval).draw(axes)
        keys: list[Any] = [
            axes.plot([], [], "s", color=COLOURS[number % len(COLOURS)], label=f" {name}")[0]
            for number, name in enumerate(networks)
        ]
        keys += [
            axes.plot([], [], marker, color=INK, mfc="none", ls="none", label=form)[0]
            for form, marker in zip(shapes, cycle(FORM_MARKERS), strict=False)
        ]
        keys += axes.plot([], [], "o", ms=11, **ring, label="ships")
        if any(point.test is not None for point in points):
            bars = any(point.test_interval for point in points)
            name = "ships, on the test" + (", 95 % interval" if bars else "")
            keys += axes.plot([], [], "_", color=INK, mew=2, ms=11, label=name)
        limit = budget.ms_per_image
        keys.append(plots.draw_budget(axes, limit, f"budget {limit:g} ms"))
        how: Any = dict(loc="outside lower left", labelspacing=0.7, ncols=columns)
        plots.draw_legend(figure, handles=keys, **how)
    return figure


def choice_figure(options: Sequence[Option], choice: Choice, title: str) -> Figure:
    """Plot estimated times as hollow markers with intervals, and other times as filled markers.

    Networks on the front have names above it, where no marker can be, as far as there is room.
    `title` names the device and the batch size.
    """
    accuracies = [option.network.top1 for option in options]
    span = max(max(accuracies) - min(accuracies), 1.0)  # of the axis, without the room for names
    limit = choice.budget.ms_per_image
    with plots.drawing(9.2, 5.6) as (figure, axes):
        axes.set_title(title, fontsize=10, parse_math=False)
        plots.scale_latency(axes, [limit, *(option.ms for option in options)])
        axes.set_ylim(min(accuracies) - 0.06 * span, max(accuracies) + 0.5 * span)
        axes.set_xlabel("time of a call / its images (ms)")
        axes.set_ylabel("published top-1 on ImageNet (%)")
        plots.draw_budget(axes, limit, f"budget {limit:g} ms")
        line = [(option.ms, option.network.top1) for option in choice.front]
        axes.step(*zip(*line, strict=True), where="post", color=COLOURS[0], lw=1.5, label="front")
        named = with_room(choice.front, choice.best)
        for option in options:
            draw_option(axes, option, option in choice.front, option in named)
        ring: Any = dict(mec=COLOURS[1], mfc="none", ms=13, mew=2, label="best")
        axes.plot(choice.best.ms, choice.best.network.top1, "o", **ring)
        for by, colour in (("published", INK), ("measured", INK), ("estimated", "none")):
            if any(option.by == by for option in options):
                axes.plot([], [], "o", mec=INK, mfc=colour, ms=7, label=f"{by} time")
        if any(option.by == "estimated" for option in choice.front):
            axes.plot([], [], color=COLOURS[0], alpha=0.5, lw=4, label="90 % interval")
        plots.draw_legend(axes, loc="lower right")
    return figure


def with_room(front: Sequence[Option], best: Option) -> list[Option]:
    """The best, and others on the front whose names do not touch, the most accurate first."""
    span, named = np.log(front[-1].ms / front[0].ms), [best]
    for option in reversed(front):
        if all(abs(np.log(option.ms / each.ms)) >= ROOM * span for each in named):
            named.append(option)
    return named


def draw_option(axes: Axes, option: Option, on_front: bool, has_name: bool) -> None:
    """Draw a network at its time; on the front with the interval of an estimate."""
    at, colour = (option.ms, option.network.top1), COLOURS[0] if on_front else INK
    is_estimate = option.by == "estimated"
    ends = (option.estimate.low, option.estimate.high) if on_front and is_estimate else None
    alpha = 1 if on_front else 0.4
    Mark(at=at, colour=colour, filled=not is_estimate, alpha=alpha, across=ends).draw(axes)
    if has_name:
        look: Any = dict(rotation=-55, rotation_mode="anchor", ha="right", fontsize=8.5)
        look |= dict(color=colour, parse_math=False)
        architecture = option.network.name.removeprefix("timm/").partition(".")[0]
        name = f"{architecture} {option.network.resolution}"
        axes.annotate(name, at, (-5, 6), textcoords="offset points", **look)


# Times of candidates, with lines at the budget, half the budget and twice the budget.


BANDS = ("half of the budget", "the budget", "twice the budget", "more")
BAND_COLOURS = (COLOURS[2], COLOURS[0], COLOURS[1], INK)
ROW_HEIGHT = 0.24  # inches


@dataclass(frozen=True, kw_only=True)
class TimedCandidate:
    """A candidate in its fastest format and precision, in ms per image."""

    name: str
    form: str  # format and precision; only the precision for an estimate
    ms: float
    low: float
    high: float
    limit_ms: float  # compared with the budget
    other_ms: tuple[float, ...] = ()  # in other formats and precisions
    top1: float | None = None  # published, of its initial weights

    def band(self, budget: Budget) -> int:
        """The index in `BANDS` by the share of the budget."""
        shares = (0.5, 1, 2)
        return sum(self.limit_ms > share * budget.ms_per_image for share in shares)


def budget_figure(rows: Sequence[TimedCandidate], budget: Budget) -> Figure:
    """Plot a row for each candidate, in order from the top.

    Filled markers are the fastest files, with intervals of their times; small markers are other
    formats and precisions. Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("no candidate to plot: give at least one with a time")
    with plots.drawing(9.2, 1.4 + ROW_HEIGHT * len(rows)) as (figure, axes):
        limit = budget.ms_per_image
        every_ms = [limit / 2, 2 * limit, *(ms for row in rows for ms in (row.ms, *row.other_ms))]
        plots.scale_latency(axes, every_ms)
        axes.set_xlabel(f"time of a call / its images, batch {budget.batch} (ms)")
        for share, width in ((0.5, 0.8), (1, 1.6), (2, 0.8)):
            plots.draw_budget(axes, share * limit, width=width)
        beside: Any = dict(xycoords=axes.get_yaxis_transform(), textcoords="offset points")
        beside |= dict(va="center", fontsize=8.5, parse_math=False)
        for place, row in enumerate(rows):
            colour, shape = BAND_COLOURS[row.band(budget)], MARKERS[row.band(budget)]
            axes.plot(row.other_ms, [place] * len(row.other_ms), "|", color=colour, alpha=0.6)
            span = row.low, row.high
            Mark(at=(row.ms, place), colour=colour, shape=shape, across=span).draw(axes)
            text = f"{ms_text(row.ms)}, {row.form}"
            axes.annotate(text, (1, place), (4, 0), color=colour, **beside)
        labels = [row.name + (f"  {row.top1:.1f} %" if row.top1 else "") for row in rows]
        axes.set_yticks(range(len(rows)), labels, parse_math=False, fontsize=9)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        for band, count in sorted(Counter(row.band(budget) for row in rows).items()):
            look: Any = dict(color=BAND_COLOURS[band], ms=7, label=f"{BANDS[band]}: {count}")
            axes.plot([], [], MARKERS[band], **look)
        bars = "90 % of rounds" if all(" " in row.form for row in rows) else "90 % interval"
        axes.plot([], [], color=INK, alpha=0.4, lw=2.5, label=bars)
        title = f"candidates by the time they need; the budget is {ms_text(limit)}"
        how: Any = dict(ncols=len(BANDS) + 1, title=title, title_fontsize=9)
        plots.draw_legend(figure, loc="outside upper center", **how)
    return figure


def measured_figure(rows: Sequence[Measurement]) -> Figure:
    """Plot a row for each measurement, in order from the top: the median, and 80 % of the samples.

    A colour and a marker are a protocol, work and batch. Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("no time to plot: measure at least one network")
    kinds = dict.fromkeys(map(kind_of, rows))
    looks = dict(zip(kinds, zip(cycle(COLOURS), cycle(MARKERS), strict=True), strict=False))
    with plots.drawing(9.2, 1.4 + ROW_HEIGHT * len(rows)) as (figure, axes):
        every_ms = [1e3 / row.images_per_s for row in rows]
        ends = [np.percentile(row.ms_per_image_samples, (10, 90)).tolist() for row in rows]
        plots.scale_latency(axes, [*every_ms, *chain(*ends)])
        axes.set_xlabel("time of a call / its images (ms)")
        for place, (row, ms, span) in enumerate(zip(rows, every_ms, ends, strict=True)):
            colour, shape = looks[kind_of(row)]
            Mark(at=(ms, place), colour=colour, shape=shape, across=span).draw(axes)
        names = [name_of(row) for row in rows]
        axes.set_yticks(range(len(rows)), names, parse_math=False, fontsize=9)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        for kind, (colour, shape) in looks.items():
            axes.plot([], [], shape, color=colour, ms=7, label=kind)
        axes.plot([], [], color=INK, alpha=0.4, lw=2.5, label="80 % of calls or rounds")
        plots.draw_legend(figure, loc="outside upper center", ncols=2)
    return figure


def kind_of(row: Measurement) -> str:
    return f"{row.protocol.name}, {row.protocol.work}, batch {row.protocol.batch}"


def name_of(row: Measurement) -> str:
    return printable(Path(row.name).name)


# Error against time: one panel per length of training, with front and law.


MOST_LABELS = 12  # for the most accurate points on the front


@dataclass(frozen=True)
class ScalingPanel:
    """Trainings of one length; the score of a point is its error in per cent."""

    title: str
    points: Sequence[plots.Point]
    front: Sequence[plots.Point]
    law: Callable[[np.ndarray], np.ndarray] | None = None  # ms per image -> error


def scaling_figure(panels: Sequence[ScalingPanel], budget_ms: float | None = None) -> Figure:
    """Plot errors, on a logarithmic axis, against times. Filled points are on the front."""
    with plots.drawing(9.2, 4.4 * len(panels), len(panels), squeeze=False) as (figure, rows):
        plots.name_bars(figure, "95 % interval")
        for (axes,), panel in zip(rows, panels, strict=True):
            axes.set_title(panel.title, fontsize=10, parse_math=False)
            times = [point.ms_per_image for point in panel.points]
            plots.scale_latency(axes, times)
            scale_errors(axes, panel.points)
            for point in panel.points:
                look: Any = dict(colour=INK, alpha=0.45, filled=False)
                if point in panel.front:
                    look = dict(colour=COLOURS[0])
                Mark(at=plots.place(point), up=point.interval, size=6, **look).draw(axes)
            if panel.law is not None:
                grid = np.geomspace(min(times), 2 * max(times), 100)
                axes.plot(grid, panel.law(grid), color=COLOURS[1], lw=1.4, zorder=1)
            if budget_ms is not None:
                plots.draw_budget(axes, budget_ms)
            axes.set_xlabel("time of an image (ms)")
            axes.set_ylabel("error (%)")
            plots.label(figure, axes, panel.front[-MOST_LABELS:], {})
    return figure


def scale_errors(axes: Axes, points: Sequence[plots.Point]) -> None:
    """Let the axis span the errors and their intervals, from half the least error on."""
    errors = [plots.place(point)[1] for point in points]
    ends = [*errors, *chain(*(point.interval or () for point in points))]
    low = max(min(ends), min(errors) / 2, 0.01)
    high = max(low * 1.1, *ends)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.05, high * 1.05)
    within_a_decade = MaxNLocator(6, steps=(1, 2, 5, 10)) if high <= 10 * low else None
    plots.plain_ticks(axes.yaxis, within_a_decade)
