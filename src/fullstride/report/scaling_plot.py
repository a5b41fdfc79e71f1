"""How does the error fall with time? One panel for each length of training, with front and law."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from fullstride.report.plots import COLOURS, INK, STYLE, Point, label, plain_ticks, scale_latency

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
