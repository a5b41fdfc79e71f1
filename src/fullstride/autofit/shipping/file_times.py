"""How fast are the files of the finalists? They are measured in turn, or estimated."""

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from fullstride.autofit.shipping.finalist_files import (
    SHIP,
    FileRecord,
    ShippedFile,
    remote_precision,
)
from fullstride.autofit.timing.budget_rule import NOISE, CandidateTime, within_budget
from fullstride.deploy import select
from fullstride.deploy.formats import open_file
from fullstride.latency.profiles import Profile
from fullstride.measure.budget import Budget
from fullstride.measure.call_times import call_time
from fullstride.measure.environment import Environment, choose_device
from fullstride.measure.protocols import ONLINE
from fullstride.outputs import json_output
from fullstride.strict_json import from_json, read_json, to_json
from fullstride.writing import atomic_write

MEASUREMENTS = 5  # of a file at most
PAUSE_S = 2.0  # before one that is repeated: right after a training a file takes up to 1.2x as long
TIMES = "times.json"  # in the folder of the files
TIMES_OUTPUT = json_output("the times of exported files", "times", "measurements")


@dataclass(frozen=True, kw_only=True)
class FileTimes:
    """The times of all files, measured in turn."""

    times: Mapping[str, tuple[float, float, float]]  # path -> `CallTime`: ms, low, high
    measurements: int  # how often those in doubt were measured
    environment: Mapping[str, Any]


def measured(
    folder: Path,
    records: Sequence[FileRecord],
    times: Sequence[CandidateTime],
    budget: Budget,
    percentile: float,
    threads: int | None,
) -> Generator[str, None, tuple[list[FileRecord], Mapping[str, Any]]]:
    """The records with the times of their files, and where these were measured.

    Files of which noise may decide that they are not within the budget, see `in_doubt`, are
    measured again, up to `MEASUREMENTS` times, and each keeps its shortest time. `times` are those
    of the candidates, untrained.
    """
    path, paths = folder / SHIP / TIMES, [each.file.path for each in records]
    stored = from_json(FileTimes, read_json(path), str(path)) if path.exists() else None
    if stored is not None and set(stored.times) != set(paths):
        stored = None
    again = paths if stored is None else in_doubt(stored, records, times, budget)
    while again and (stored is None or stored.measurements < MEASUREMENTS):
        if stored is not None:
            yield "once more, as the budget may have been missed by noise:"
            time.sleep(PAUSE_S)
        yield f"measuring {len(again)} files in turn, batch {budget.batch}"
        stored = combine(stored, measure_files(folder, again, budget, percentile, threads))
        with atomic_write(path, TIMES_OUTPUT) as beside:
            beside.write_text(to_json(stored))
        again = in_doubt(stored, records, times, budget)
    assert stored is not None
    timed = []
    for each in records:
        ms, low, high = stored.times[each.file.path]
        within = ms <= budget.ms_per_image
        timed.append(
            replace(each, file=replace(each.file, ms=ms, low=low, high=high, within=within))
        )
    return timed, stored.environment


def in_doubt(
    measured: FileTimes,
    records: Sequence[FileRecord],
    times: Sequence[CandidateTime],
    budget: Budget,
) -> list[str]:
    """The paths of files beyond the budget that may be within it.

    Their quiet rounds are, or their candidates were before the training and they are near it.
    """
    limit = budget.ms_per_image
    within = {
        (each.candidate, each.format, each.precision) for each in within_budget(times, budget)
    }

    def may_fit(file: ShippedFile) -> bool:
        ms, low, _ = measured.times[file.path]
        was = (file.candidate, file.format, file.precision) in within
        return ms > limit and (low <= limit or (was and ms <= NOISE * limit))

    return [each.file.path for each in records if may_fit(each.file)]


def measure_files(
    folder: Path,
    paths: Sequence[str],
    budget: Budget,
    percentile: float,
    threads: int | None,
) -> FileTimes:
    """Files of the folder in turn, by the online protocol at the batch of the budget."""
    models = {path: open_file(folder / path, threads=threads, trust=True) for path in paths}
    rows = select.measure_files(models, replace(ONLINE, batch=budget.batch), threads)
    return FileTimes(
        times={row.name: astuple(call_time(row, percentile)) for row in rows},
        measurements=1,
        environment=asdict(Environment.here(choose_device("auto"))),
    )


def combine(earlier: FileTimes | None, later: FileTimes) -> FileTimes:
    """Of each file the shorter time: what disturbs a measurement makes it longer."""
    if earlier is None:
        return later
    shorter = {name: min(ms, earlier.times[name]) for name, ms in later.times.items()}
    return replace(
        later,
        times={**earlier.times, **shorter},
        measurements=earlier.measurements + later.measurements,
    )


def estimated(
    records: Sequence[FileRecord], times: Sequence[CandidateTime], budget: Budget, maybe: bool
) -> list[FileRecord]:
    """The records with the estimates of their candidates, where there is one of the precision."""
    estimates = {
        (each.candidate, remote_precision(each.precision)): each
        for each in times
        if each.ms is not None
    }

    def timed(file: ShippedFile) -> ShippedFile:
        estimate = estimates.get((file.candidate, file.precision))
        if estimate is None or estimate.ms is None:
            return replace(file, measured=False)
        ms, low, high = estimate.ms, estimate.low or estimate.ms, estimate.high or estimate.ms
        within = (ms if maybe else high) <= budget.ms_per_image
        return replace(file, ms=ms, low=low, high=high, within=within, measured=False)

    return [replace(each, file=timed(each.file)) for each in records]


def device_of(profile: Profile) -> Mapping[str, Any]:
    """The conditions that estimates are for."""
    return dict(
        device=profile.device,
        runtime=profile.machine.runtime,
        precision=profile.precision,
        profile=profile.name,
    )
