"""How long does each candidate take, as the file that would ship?"""

import json
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast, get_args

from fullstride.autofit.listing.candidates import Candidate
from fullstride.autofit.timing.budget_rule import NOISE, CandidateTime, limit_ms, within_budget
from fullstride.autofit.timing.shortlist import MOST_TRIED, shortlist
from fullstride.autofit.timing.time_estimates import (
    anchors,
    corrected,
    estimate_candidates,
)
from fullstride.autofit.timing.untrained_times import Conditions, time_one
from fullstride.deploy.exported import InputKind, Precision
from fullstride.deploy.select import runnable
from fullstride.deploy.untrained import UntrainedFiles
from fullstride.latency.network_times import Estimate
from fullstride.latency.profiles import Profile
from fullstride.latency.rough_profiles import profile_here
from fullstride.measure.budget import Budget
from fullstride.measure.timing import BUSY
from fullstride.outputs import json_output
from fullstride.report.format import three_digits
from fullstride.strict_json import from_json, read_json
from fullstride.writing import atomic_write, scratch_folder

PROMISING = "those of the highest published top-1 or the nearest to the budget, of several families"
OUTPUT = json_output("the times of a candidate", "candidate", "format", "precision", "measured")


def time_candidates(
    candidates: Sequence[Candidate],
    budget: Budget,
    *,
    classes: int,
    folder: Path,
    channels: int = 3,
    profile: Profile | None = None,
    maybe: bool = False,
    formats: Sequence[str] = (),
    precisions: Sequence[str] = (),
    percentile: float = 50,
    threads: int | None = None,
    input_kind: InputKind = "normalised",
) -> Generator[str, None, tuple[CandidateTime, ...]]:
    """The times of candidates at the batch size of `budget`; yields lines about the progress.

    Without `profile` they are measured here: each candidate is exported untrained, timed by the
    online protocol, its files in turn, and removed. A first format is timed alone, and the others
    only where it takes at most `untrained_times.QUICK_RATIO` times the budget. The times of each
    are stored in `folder`/times at once, and read from there by a later call.

    With `profile`, of a device that is not here, they are estimates.

    Of more than `MOST_TRIED` candidates those of a `shortlist` are tried, as measuring, and
    measuring the training, takes long: here by rough estimates, elsewhere of those that fit. The
    others have a `left_out`.

    Args:
        candidates: With distinct names.
        budget: Its batch size is that of the times.
        classes: Of the data, as `channels`.
        folder: That of the fit.
        profile: Of a device that is not here.
        maybe: Of estimates the middle must fit, not the upper end.
        formats: Of the files. By default all that run here and are no programs.
        precisions: Of the files. By default all that may be the fastest.
        percentile: Of the times of a call that stands for them.
        threads: CPU threads; None: PyTorch's number.
        input_kind: Inputs of the files, see `deploy.exported.Metadata`.

    Raises ValueError, in one line, for formats and precisions that do not run here, and where there
    is no time at all.
    """
    if profile is not None:
        times = estimated(candidates, profile, budget.batch, classes, channels, precisions)
        if failures := sum(not has_time(each) for each in times):
            yield f"without a time for {profile.name}: {failures} of {len(times)} candidates"
        times = yield from most_promising(candidates, times, budget, maybe)
    else:
        conditions = Conditions(
            budget=budget,
            classes=classes,
            channels=channels,
            labels=runnable(formats, precisions),
            percentile=percentile,
            threads=threads,
            input_kind=input_kind,
        )
        times = yield from measured(candidates, conditions, folder / "times")
    if not any(map(has_time, times)):
        reason = next((f": {each.failure}" for each in times if each.failure), "")
        raise ValueError(f"none of {len(candidates)} candidates has a time{reason}")
    return times


def has_time(each: CandidateTime) -> bool:
    return each.ms is not None


def estimated(
    candidates: Sequence[Candidate],
    profile: Profile,
    batch: int,
    classes: int,
    channels: int,
    precisions: Sequence[str] = (),
) -> tuple[CandidateTime, ...]:
    """Times on the device of `profile`, in its precision."""
    precision = cast(Precision, profile.precision.split()[0])
    if precision not in get_args(Precision) or (precisions and precision not in precisions):
        raise ValueError(
            f"{profile.name} has times in {profile.precision}: leave the precisions out, or choose "
            "another profile"
        )
    rows = estimate_candidates(candidates, profile, batch, classes, channels)

    def row(name: str, result: Estimate | str) -> CandidateTime:
        time = CandidateTime(
            candidate=name, format="", precision=precision, ms=None, measured=False
        )
        if isinstance(result, str):
            return replace(time, failure=result)
        return replace(time, ms=result.ms_per_image, low=result.low, high=result.high)

    return tuple(row(each.name, rows[each.name]) for each in candidates)


def most_promising(
    candidates: Sequence[Candidate],
    times: Sequence[CandidateTime],
    budget: Budget,
    maybe: bool,
) -> Generator[str, None, tuple[CandidateTime, ...]]:
    """The estimates, of which those have a `left_out` that fit and are not on the shortlist."""
    ms = {
        each.candidate: cast(float, limit_ms(each, maybe=maybe))
        for each in within_budget(times, budget, maybe=maybe)
    }
    inside = [each for each in candidates if each.name in ms]
    names = {each.name for each in shortlist(inside, ms, budget)}
    if len(names) < len(inside):
        yield f"{len(names)} of the {len(inside)} candidates that fit are tried: {PROMISING}"
    reason = f"within the budget, but {len(names)} others are more promising"
    return tuple(
        replace(each, left_out=reason) if each.candidate in ms.keys() - names else each
        for each in times
    )


def measured(
    candidates: Sequence[Candidate], conditions: Conditions, folder: Path
) -> Generator[str, None, tuple[CandidateTime, ...]]:
    """Measured here; of many candidates those of the shortlist by estimated times."""
    times: dict[str, tuple[CandidateTime, ...]] = {}
    chosen = candidates
    if len(candidates) > MOST_TRIED:
        results = estimate_candidates(
            candidates,
            profile_here(),
            conditions.budget.batch,
            conditions.classes,
            conditions.channels,
        )
        ms = {
            name: each.ms_per_image for name, each in results.items() if isinstance(each, Estimate)
        }
        times |= yield from measured_in_turn(anchors(candidates, ms), conditions, folder)
        quick = {name: rows[0].ms for name, rows in times.items() if rows[0].ms is not None}
        ms = corrected(ms, quick)
        chosen = shortlist(candidates, ms, conditions.budget)
        names = times.keys() | {each.name for each in chosen}
        yield f"{len(names)} of {len(candidates)} candidates are measured: {PROMISING}"
        for each in candidates:
            if each.name not in names:
                times[each.name] = (unmeasured(each, conditions, len(names)),)
    rest = [each for each in chosen if each.name not in times]
    times |= yield from measured_in_turn(rest, conditions, folder)
    near = [each for each in chosen if is_near(times[each.name], conditions.budget)]
    if near:
        yield f"{len(near)} near the budget are measured again, as noise may have slowed them"
        times |= yield from measured_in_turn(near, conditions, folder, again=True)
    return tuple(row for each in candidates for row in times.get(each.name, ()))


def is_near(rows: Sequence[CandidateTime], budget: Budget) -> bool:
    """Whether a candidate is beyond the budget by no more than noise may be."""
    fastest = min((row.ms for row in rows if row.ms is not None), default=0.0)
    return budget.ms_per_image < fastest <= NOISE * budget.ms_per_image


def unmeasured(candidate: Candidate, conditions: Conditions, others: int) -> CandidateTime:
    """The row of a candidate that is not on the shortlist."""
    format, precision = conditions.quick
    return CandidateTime(
        candidate=candidate.name,
        format=format,
        precision=precision,
        ms=None,
        measured=False,
        left_out=f"not measured: by estimates {others} others are more promising",
    )


def measured_in_turn(
    candidates: Sequence[Candidate], conditions: Conditions, folder: Path, *, again: bool = False
) -> Generator[str, None, dict[str, tuple[CandidateTime, ...]]]:
    """The times of each by its name, stored or measured; the shorter ones of two if `again`.

    Candidates of the same network at other resolutions follow each other, to share a graph.
    """
    times: dict[str, tuple[CandidateTime, ...]] = {}
    same: dict[tuple, tuple[CandidateTime, ...]] = {}  # inputs of the same network and size
    earlier: tuple[tuple, UntrainedFiles | None] = ((), None)
    order = sorted(candidates, key=lambda each: (*network(each), each.resolution))
    with scratch_folder(folder / "files") as scratch:  # removes those of a killed process too
        for number, candidate in enumerate(order, start=1):
            place = *network(candidate), candidate.resolution
            path, title = folder / f"{candidate.name}.json", f"{number} of {len(order)}"
            stored = read_times(path) if path.exists() else ()
            if stored and conditions.has_all(stored) and not (again and stored[0].measurements < 2):
                times[candidate.name] = same[place] = stored
                yield f"{candidate.name}: {title}, as measured before"
                continue
            start = time.perf_counter()
            if earlier[0] != network(candidate):
                earlier = network(candidate), None
            if place in same and conditions.input_kind != "pictures":  # another resize policy
                rows = tuple(replace(row, candidate=candidate.name) for row in same[place])
            else:
                rows, files = time_one(candidate, conditions, scratch, earlier[1])
                earlier = earlier[0], files or earlier[1]
            if again:
                rows = shorter(rows, stored)
            with atomic_write(path, OUTPUT) as temporary:
                temporary.write_text(json.dumps([asdict(row) for row in rows], indent=1))
            times[candidate.name] = same[place] = rows
            seconds = time.perf_counter() - start
            yield f"{candidate.name}: {title}, {summary(rows)}, after {seconds:.1f} s"
    return times


def shorter(
    rows: Sequence[CandidateTime], earlier: Sequence[CandidateTime]
) -> tuple[CandidateTime, ...]:
    """Of each form the shortest time."""
    best: dict[tuple[str, str], CandidateTime] = {}
    for row in (*rows, *earlier):
        form = row.format, row.precision
        best[form] = min(best.get(form, row), row, key=lambda each: each.ms or math.inf)
    return tuple(replace(row, measurements=2) for row in best.values())


def network(candidate: Candidate) -> tuple[str, float, float, int]:
    return candidate.model, candidate.width, candidate.depth, candidate.channels or 0


def read_times(path: Path) -> tuple[CandidateTime, ...]:
    """What `time_candidates` stored. Raises ValueError, in one line, for anything else."""
    return from_json(tuple[CandidateTime, ...], read_json(path), str(path))


def summary(rows: Sequence[CandidateTime]) -> str:
    """The times, the fastest first, the first failure, and whether the machine was busy."""
    in_order = sorted((row for row in rows if row.ms), key=lambda row: row.ms or 0.0)
    parts = [f"{row.format} {row.precision} {three_digits(row.ms or 0.0)} ms" for row in in_order]
    parts += [row.failure for row in rows if row.failure][:1]
    for row in in_order[:1]:
        if row.low and row.high and row.high > (1 + BUSY) * row.low:
            rounds = f"{three_digits(row.low)} to {three_digits(row.high)} ms"
            parts.append(f"rounds of the first from {rounds}, the machine is busy")
    return ", ".join(parts)
