"""What does a budget buy? The times of candidates, with the budget, half of it and twice of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure

from fullstride.measure.budget import Budget
from fullstride.report.format import ms as ms_text
from fullstride.report.plots import COLOURS, INK, MARKERS, STYLE, scale_latency

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
