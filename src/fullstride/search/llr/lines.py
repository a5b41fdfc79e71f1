"""What does a user see of a search? Lines on the progress of each stage, and tables of results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fullstride.report.console_tables import table
from fullstride.report.format import three_digits
from fullstride.report.training_progress import duration
from fullstride.search.llr.search_folder import (
    DeviceTimes,
    Finalist,
    Regression,
    SearchPlan,
    SearchResults,
    Winner,
)
from fullstride.search.llr.study import RESULTS
from fullstride.search.study_folder import Event

Shown = Sequence[str | Table]


def shown(event: Event, folder: Path) -> Shown:
    """The lines and tables that the command prints for an event of a search in `folder`."""
    if event.line:
        return [event.line]
    if event.stage == "results":
        return closing_lines(event.result, folder)
    return SHOWN[event.stage](event.result) if event.stage in SHOWN else []


def times_lines(times: DeviceTimes) -> Shown:
    profile = times.profile
    fit = profile.inference
    if not times.measured:
        return [f"times    estimates for {profile.device}, by the profile {profile.name}"]
    return [
        f"times    a profile of {profile.device}, fitted to {fit.networks} networks; of each "
        f"quarter of them the others' estimates are {fit.error:.0f} % off"
    ]


def plan_lines(plan: SearchPlan) -> Shown:
    """The cost of each stage, with the total."""
    lines = [f"space    {plan.structures:.3g} structures"]
    for name, ms in plan.master_ms.items():
        fastest = f"the fastest structure {three_digits(plan.fastest_ms[name])} ms"
        lines.append(f"{name:8} the MasterNet takes {three_digits(ms)} ms, {fastest}")
    rows = [[each.stage, str(each.trainings), duration(each.seconds)] for each in plan.trainings]
    at_once = f" on {plan.devices} devices" if plan.devices > 1 else ""
    return [
        *lines,
        table(["stage", "trainings", "time"], rows),
        f"time     about {duration(plan.total_s)} of training{at_once}",
    ]


def regression_lines(regression: Regression) -> Shown:
    """The pseudo-gradients with their standard errors."""
    rows = [
        [
            each.place,
            each.term,
            f"{each.value:+.2f}",
            "-" if each.standard_error is None else f"{each.standard_error:.2f}",
        ]
        for each in regression.slopes
    ]
    noise = "unknown" if regression.noise is None else f"{regression.noise:.2f} points"
    failed = f"; without a score: {len(regression.failures)}" if regression.failures else ""
    return [
        table(["place", "term", "points", "standard error"], rows),
        f"MasterNet {regression.reference:.2f} %, noise of a training {noise}{failed}",
    ]


def finalist_lines(finalists: Sequence[Finalist]) -> Shown:
    """The structures with predictions, times and the ends of ranges where they stand."""
    rows = [
        [
            each.variant.name,
            each.network,
            f"{each.predicted:.2f} ({each.low:.2f} to {each.high:.2f})",
            " ".join(map(three_digits, (each.ms, each.ms_low, each.ms_high))),
            "measured" if each.measured else each.bound,
        ]
        for each in finalists
    ]
    lines: list[str | Table] = [
        table(["", "network", "predicted % (95 %)", "ms, low, high", "time by"], rows)
    ]
    first: dict[str, Finalist] = {}
    for each in finalists:
        first.setdefault(each.variant.name, each)
    lines += [
        f"{name:8} at the end of a range: {', '.join(each.at_bounds)}"
        for name, each in first.items()
        if each.at_bounds
    ]
    return lines


def winner_lines(winners: Sequence[Winner]) -> Shown:
    rows = [
        [
            each.trial,
            each.finalist.network,
            f"{each.finalist.predicted:.2f}",
            each.failure if each.score is None else f"{each.score:.2f}",
        ]
        for each in winners
    ]
    return [table(["trial", "network", "predicted %", "minival %"], rows)]


def closing_lines(results: SearchResults, folder: Path) -> Shown:
    best = results.best.finalist
    how = "measured" if best.measured else "estimated"
    lines = [
        f"network  {best.network} at {best.resolution} pixels",
        f"time     {three_digits(best.ms)} ms an image, {how}",
        f"minival  {results.minival:.2f} %, the best of several",
    ]
    if results.test:
        name, value = next(iter(results.test.items()))
        lines.append(f"test     {name} {value:.2f} % of {results.test_images:,} images, read once")
    lines.append(f"bundle   {folder / results.bundle}; everything is in {folder / RESULTS}")
    return lines


SHOWN: dict[str, Callable[[Any], Shown]] = {
    "times": times_lines,
    "plan": plan_lines,
    "regression": regression_lines,
    "refitted": regression_lines,
    "selection": finalist_lines,
    "measured": finalist_lines,
    "winners": winner_lines,
}
