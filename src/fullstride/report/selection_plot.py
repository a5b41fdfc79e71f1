"""Which networks are worth their time? Accuracy against time, with the front and the budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fullstride.latency.select import Choice, Option
from fullstride.measure.budget import Budget
from fullstride.report.plots import COLOURS, INK, MARKERS, STYLE, scale_latency
from fullstride.tasks.task import Metric

FORM_MARKERS = (*MARKERS, "X", "p", "<", ">")  # a machine runs seven forms without a GPU


@dataclass(frozen=True, kw_only=True)
class FilePoint:
    """An exported file in the plot of a fit."""

    network: str
    form: str  # format and precision
    ms: float  # per image
    minival: float  # score
    measured: bool  # False: the time is an estimate
    ships: bool
    test: float | None = None  # score of the file that ships
    test_interval: tuple[float, float] | None = None


def files_figure(
    points: Sequence[FilePoint], metric: Metric, budget: Budget, percentile: float
) -> Figure:
    """Plot the minival score of files against their time, and the test score of the one that ships.

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
        axes.set_ylabel(f"{metric.label} on the minival{unit}", parse_math=False)
        axes.axvline(budget.ms_per_image, color=INK, lw=1.2, dashes=(4, 3), alpha=0.7)
        for point in points:
            colour = COLOURS[networks.index(point.network) % len(COLOURS)]
            marker = FORM_MARKERS[shapes.index(point.form) % len(FORM_MARKERS)]
            fill = colour if point.measured else "none"
            axes.plot(point.ms, point.minival, marker, mec=colour, mfc=fill, ms=8)
            if point.ships:
                axes.plot(point.ms, point.minival, "o", mec=INK, mfc="none", ms=15, mew=1.6)
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
