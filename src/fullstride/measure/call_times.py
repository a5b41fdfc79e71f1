"""How long does an image take by a measurement, and by several that other programs disturb?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fullstride.measure.protocols import ONLINE, Measurement
from fullstride.measure.timing import BUSY, spread_of_rounds

ATTEMPTS = 3  # measurements at most while the machine is busy
MEDIANS = replace(ONLINE, rounds=8, warmup_s=0.1, round_s=0.05)  # enough calls for a median


@dataclass(frozen=True, kw_only=True)
class CallTime:
    """The time of a call / its images, in ms."""

    ms: float  # a percentile of all calls
    low: float  # that of nine in ten rounds is between these
    high: float


def call_time(row: Measurement, percentile: float = 50) -> CallTime:
    """The time by a measurement of the online protocol."""
    rounds = np.array_split(np.array(row.samples), row.protocol.rounds)
    low, high = np.percentile([np.percentile(each, percentile) for each in rounds], (5, 95))
    ms, images = np.percentile(row.samples, percentile), row.protocol.batch
    return CallTime(ms=float(ms / images), low=float(low / images), high=float(high / images))


def quiet_times(
    measure: Callable[[], Sequence[Measurement]], percentile: float = 50
) -> dict[str, CallTime]:
    """The times of what `measure` measures in turn, by name.

    Where the rounds of the fastest spread by more than `BUSY`, all are measured again, up to
    `ATTEMPTS` times. Each keeps its shortest time, as what disturbs a measurement makes it longer.
    """
    times: dict[str, CallTime] = {}
    for _ in range(ATTEMPTS):
        rows = measure()
        for row in rows:
            time = call_time(row, percentile)
            times[row.name] = min(times.get(row.name, time), time, key=lambda each: each.ms)
        if spread_of_rounds(max(rows, key=lambda row: row.images_per_s)) <= BUSY:
            break
    return times
