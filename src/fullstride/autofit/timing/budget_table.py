"""What does the budget buy? The candidates that stay in it, in a table and a picture."""

import math
from dataclasses import dataclass, replace
from typing import get_args

from matplotlib.figure import Figure
from rich.table import Table

from fullstride.autofit.listing.candidates import Candidate
from fullstride.autofit.timing.budget_rule import (
    CandidateTime,
    fastest_of,
    limit_ms,
    time_in_words,
    within_budget,
)
from fullstride.console import printable
from fullstride.deploy.exported import Precision
from fullstride.measure.budget import Budget
from fullstride.report import budget_plot
from fullstride.report.budget_plot import BANDS, TimedCandidate
from fullstride.report.console_tables import table
from fullstride.report.format import three_digits

MOST_ROWS = 40  # of the table and the picture; of more candidates those near the budget


@dataclass(frozen=True, kw_only=True)
class WhatFits:
    """Candidates, their times, and the budget with which these are compared."""

    candidates: tuple[Candidate, ...]
    times: tuple[CandidateTime, ...]
    budget: Budget
    maybe: bool = False  # of estimates the middle must fit, not the upper end


def budget_note(fits: WhatFits) -> str:
    """How many candidates fit, and how many would with half the time and with twice of it.

    Where all fit, the line says that the budget does not bind.
    """
    timed = fastest_of(fits.times)

    def count(ms: float) -> int:
        limit = replace(fits.budget, ms_per_image=ms)
        return len({each.candidate for each in within_budget(fits.times, limit, maybe=fits.maybe)})

    ms = fits.budget.ms_per_image
    if count(ms) == len(timed):
        slowest = max(timed.values(), key=lambda each: each.ms or 0.0)
        return (
            f"all {len(timed)} candidates run within {ms:g} ms an image, the slowest is "
            f"{slowest.candidate} with {time_in_words(slowest)}: the budget does not bind"
        )
    return (
        f"{count(ms)} of {len(timed)} candidates run within {ms:g} ms an image; {count(ms / 2)} "
        f"within half of it, {count(2 * ms)} within twice"
    )


def timed_candidates(fits: WhatFits) -> list[TimedCandidate]:
    """Those with a time, the fastest first; of many the `MOST_ROWS` that are near the budget."""
    rows: list[TimedCandidate] = []
    fastest, others = fastest_of(fits.times), dict[str, list[float]]()
    for each in fits.times:
        if each.ms is not None and each is not fastest[each.candidate]:
            others.setdefault(each.candidate, []).append(each.ms)
    for candidate in fits.candidates:
        best = fastest.get(candidate.name)
        if best is None or best.ms is None:
            continue
        rows.append(
            TimedCandidate(
                name=printable(candidate.name),
                form=" ".join(filter(None, (best.format, best.precision))),
                ms=best.ms,
                low=best.low or best.ms,
                high=best.high or best.ms,
                limit_ms=limit_ms(best, maybe=fits.maybe) or best.ms,
                other_ms=tuple(others.get(candidate.name, ())),
                top1=candidate.top1,
            )
        )
    near = sorted(rows, key=lambda row: abs(math.log(row.limit_ms / fits.budget.ms_per_image)))
    return sorted(near[:MOST_ROWS], key=lambda row: row.ms)


def budget_table(fits: WhatFits) -> Table:
    """A line for each of `timed_candidates`: its fastest time, and that of each precision."""
    rows, times = timed_candidates(fits), fits.times
    precisions = [each for each in get_args(Precision) if any(t.precision == each for t in times)]
    published = any(row.top1 for row in rows)
    columns = ["candidate", *(["published top-1 %"] if published else [])]
    columns += ["ms/image", "fastest as", "from", "to", *precisions, "within"]
    lines = []
    for row in rows:
        own = [each for each in times if printable(each.candidate) == row.name]
        by_precision = (
            min((t.ms for t in own if t.precision == each and t.ms is not None), default=None)
            for each in precisions
        )
        top1 = [f"{row.top1:.1f}" if row.top1 else ""] if published else []
        cells = [row.name, *top1, three_digits(row.ms), row.form]
        cells += [three_digits(row.low), three_digits(row.high)]
        cells += ["" if ms is None else three_digits(ms) for ms in by_precision]
        band = row.band(fits.budget)
        lines.append([*cells, BANDS[band] if band < len(BANDS) - 1 else ""])
    return table(columns, lines)


def budget_figure(fits: WhatFits) -> Figure:
    """The picture of `budget_table`, see `report.budget_plot`; `budget_note` describes it."""
    return budget_plot.budget_figure(timed_candidates(fits), fits.budget)
