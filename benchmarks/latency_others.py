"""How wrong are estimates for kinds of networks that were not fitted, and do they say so?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from latency_tables import Case

from fullstride.latency.fitting import error
from fullstride.latency.network_times import estimates
from fullstride.latency.profiles import Profile


@dataclass(frozen=True, kw_only=True)
class Others:
    """Networks of kinds that are never fitted, by the numbers of all fitted ones."""

    table: str
    networks: int
    error: float  # percent
    inside: float  # percent of times in the interval of the fit
    named: float  # percent of networks that are said to be unlike the fitted ones
    inside_wider: float  # percent of times in the intervals that estimates give
    fitted_named: float  # percent of fitted networks that are said to be so


def evaluate_others(
    title: str, profile: Profile, others: Sequence[Case], cases: Sequence[Case]
) -> Others:
    # Full batches, which `full_batches` would name where launches take most of the time.
    profile = replace(profile, inference=replace(profile.inference, full_batches=False))
    operators, batches = [c.operators for c in others], [c.batch for c in others]
    rows = estimates(operators, profile, batches)
    fitted = estimates([c.operators for c in cases], profile, [c.batch for c in cases])
    image = np.array([1e3 * case.seconds / case.batch for case in others])
    estimated = np.array([row.ms_per_image for row in rows])
    ratio, fit = image / estimated, profile.inference
    low, high = (np.array([getattr(row, key) for row in rows]) for key in ("low", "high"))

    def percent(values: Sequence[bool] | np.ndarray) -> float:
        return float(np.mean(values) * 100)

    return Others(
        table=title,
        networks=len(others),
        error=error(estimated, image),
        inside=percent((fit.low <= ratio) & (ratio <= fit.high)),
        named=percent([bool(row.unfitted) for row in rows]),
        inside_wider=percent((low <= image) & (image <= high)),
        fitted_named=percent([bool(row.unfitted) for row in fitted]),
    )


def others_section(others: Sequence[Others]) -> list[str]:
    """Lines of the page."""
    lines = [
        "",
        "## Networks of kinds that were not fitted: transformers, mixers, hybrids",
        "",
        "Named: estimates say that the network is unlike the fitted ones, and give a wider",
        "interval (`latency/estimator.py`).",
        "",
        "| measured on | networks | error | inside the fitted interval | named | inside the given "
        "interval | fitted networks named |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {o.table} | {o.networks} | {o.error:.0f} | {o.inside:.0f} % | {o.named:.0f} % | "
        f"{o.inside_wider:.0f} % | {o.fitted_named:.1f} % |"
        for o in others
    ]
    return lines
