"""How does the error fall with time? One panel for each length of training, with front and law."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fullstride.report.plots import COLOURS, INK, STYLE, plain_ticks

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
    """Plot errors against times, both logarithmic. Filled points are on the front."""
    with matplotlib.rc_context(STYLE):
        figure = Figure((9.2, 4.4 * len(panels)), layout="constrained")
        rows: Any = figure.subplots(len(panels), 1, squeeze=False)
        for (axes,), panel in zip(rows, panels, strict=True):
            axes.set_title(panel.title, fontsize=10, parse_math=False)
            axes.set_xscale("log")
            axes.set_yscale("log")
            for axis in (axes.xaxis, axes.yaxis):
                plain_ticks(axis)
            for point in panel.points:
                colour = COLOURS[0] if point.on_front else INK
                alpha = 1.0 if point.on_front else 0.45
                ends = [max(point.low, 0.02), point.high]
                axes.plot([point.ms] * 2, ends, color=colour, lw=1.2, alpha=0.4 * alpha)
                fill = colour if point.on_front else "none"
                axes.plot(point.ms, point.error, "o", mec=colour, mfc=fill, ms=6, alpha=alpha)
            front = [point for point in panel.points if point.on_front]
            for point in front[-MOST_LABELS:]:
                place: Any = dict(textcoords="offset points", fontsize=8, va="bottom")
                text = axes.annotate(point.name, (point.ms, point.error), (6, 3), **place)
                text.set_parse_math(False)
            times = [point.ms for point in panel.points]
            if panel.law is not None:
                grid = np.geomspace(min(times), 2 * max(times), 100)
                axes.plot(grid, panel.law(grid), color=COLOURS[1], lw=1.4, zorder=1)
            if budget_ms is not None:
                axes.axvline(budget_ms, color=INK, lw=1.2, dashes=(4, 3), alpha=0.7)
            axes.set_xlabel("time of an image (ms)")
            axes.set_ylabel("error (%)")
    return figure
