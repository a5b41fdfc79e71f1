"""Which candidates are within the budget, and by which of their times?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fullstride.autofit.listing.candidates import Candidate
from fullstride.deploy.exported import Precision
from fullstride.measure.budget import Budget
from fullstride.report.format import three_digits

# Of a measured time, by how much another program may have made it longer: phases of tens of seconds
# with 1.65 times the time were seen on a virtual machine. What is beyond a budget by less is
# measured again.
NOISE = 1.5


@dataclass(frozen=True, kw_only=True)
class CandidateTime:
    """Of one candidate in one format and precision, ms per image at the batch of the budget."""

    candidate: str  # its name
    format: str  # "" where the time is an estimate for a device that is not here
    precision: Precision
    ms: float | None  # None: it could not be exported or does not run
    low: float | None = None  # enclose nine of ten such networks, or the rounds of a measurement
    high: float | None = None
    measured: bool = True
    failure: str = ""  # why there is no time, in one line
    left_out: str = ""  # why the candidate is not tried, see `shortlist`
    measurements: int = 1  # of which this is the shortest


def limit_ms(time: CandidateTime, *, maybe: bool = False) -> float | None:
    """What a budget is compared with: a measured time, the upper end of an estimate, or its middle.

    None where there is no time.
    """
    return time.ms if time.measured or maybe or time.ms is None else time.high


def within_budget(
    times: Iterable[CandidateTime], budget: Budget, *, maybe: bool = False
) -> tuple[CandidateTime, ...]:
    """Those of `times` that fit, the fastest first. `maybe`: of estimates the middle must fit."""
    limits = [(limit_ms(each, maybe=maybe), each) for each in times]
    inside = [(ms, each) for ms, each in limits if ms is not None and ms <= budget.ms_per_image]
    return tuple(each for _, each in sorted(inside, key=lambda pair: pair[0]))


def fastest_of(times: Iterable[CandidateTime]) -> dict[str, CandidateTime]:
    """The fastest format and precision of each candidate that has a time, by its name."""
    best: dict[str, CandidateTime] = {}
    for each in times:
        if each.ms is not None:
            other = best.get(each.candidate)
            if other is None or other.ms is None or each.ms < other.ms:
                best[each.candidate] = each
    return best


def fastest_ms(times: Iterable[CandidateTime]) -> dict[str, float]:
    """The time of `fastest_of` each candidate."""
    return {name: each.ms for name, each in fastest_of(times).items() if each.ms is not None}


def affordable(
    candidates: Sequence[Candidate],
    times: Sequence[CandidateTime],
    budget: Budget,
    *,
    maybe: bool = False,
) -> tuple[Candidate, ...]:
    """The candidates that are tried and fit in at least one format and precision.

    Raises ValueError, in one line, with the fastest one and its time, where none fits.
    """
    within = within_budget(times, budget, maybe=maybe)
    if names := {each.candidate for each in within if not each.left_out}:
        return tuple(each for each in candidates if each.name in names)
    limits = {
        name: (ms, each)
        for name, each in fastest_of(times).items()
        if (ms := limit_ms(each, maybe=maybe)) is not None
    }
    if not limits:
        raise ValueError(f"none of {len(candidates)} candidates has a time: choose others")
    name = min(limits, key=lambda name: limits[name][0])
    needed_ms, fastest = limits[name]
    side = next(each.resolution for each in candidates if each.name == name)
    raise ValueError(
        f"nothing fits {budget}: the fastest is {name} at {side} x {side} pixels with "
        f"{time_in_words(fastest)}; use --budget-ms {rounded_up(needed_ms)} or more, a smaller "
        "resolution or other candidates"
    )


def time_in_words(time: CandidateTime) -> str:
    assert time.ms is not None
    ms, where = three_digits(time.ms), " ".join(filter(None, (time.format, time.precision)))
    if time.measured:
        return f"{ms} ms an image ({where})"
    assert time.low is not None
    assert time.high is not None
    interval = f"{three_digits(time.low)} to {three_digits(time.high)}"
    return f"{ms} ms an image ({where}, estimated, {interval})"


def rounded_up(ms: float) -> str:
    """Two digits, at least `ms`: 0.1234 -> 0.13."""
    for digits in (f"{ms:.2g}", f"{ms * 1.1:.2g}"):
        if float(digits) >= ms:
            return f"{float(digits):g}"
    return f"{ms:g}"
