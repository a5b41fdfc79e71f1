"""How long does a call take? Wall time and CPU time of calls, with warm-up and synchronisation."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from fullstride.measure.protocols import Measurement, Protocol


BUSY = 0.2  # spread of rounds above which a measurement is repeated once, and reported


def warm_up(step: Callable[[], object], protocol: "Protocol", device: torch.device) -> int:
    """Run for `warmup_s`, so that clocks settle; returns the number of calls that fill a round."""
    calls, deadline = 1, time.perf_counter() + protocol.warmup_s
    while True:
        (seconds,), _ = timed_calls(step, calls, device)
        calls = max(1, round(calls * protocol.round_s / max(seconds, 1e-6)))
        if time.perf_counter() >= deadline:
            return calls


def timed_calls(
    step: Callable[[], object], calls: int, device: torch.device
) -> tuple[list[float], float]:
    """Seconds of all calls together, and CPU seconds."""
    cpu_start, start = time.process_time(), time.perf_counter()
    for _ in range(calls):
        step()
    wait(device)
    return [time.perf_counter() - start], time.process_time() - cpu_start


def timed_each(
    step: Callable[[], object], calls: int, device: torch.device
) -> tuple[list[float], float]:
    """Seconds of every call, and CPU seconds of all."""
    step()  # not counted: the caches hold the data of another network
    wait(device)
    seconds, cpu_start = [], time.process_time()
    for _ in range(calls):
        start = time.perf_counter()
        step()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return seconds, time.process_time() - cpu_start


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def cpu_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        yield
    finally:
        torch.set_num_threads(before)


def spread(samples: Sequence[float]) -> float:
    """(p90 - p10) / median; above 0.05 the machine was busy."""
    p10, p50, p90 = np.percentile(samples, (10, 50, 90))
    return float((p90 - p10) / p50)


def spread_of_rounds(row: "Measurement") -> float:
    """`spread` of the rounds' medians: a call that waits for another program does not change it."""
    samples = np.array(row.samples)
    if len(samples) % row.protocol.rounds:
        return row.spread
    return spread(np.median(samples.reshape(row.protocol.rounds, -1), 1).tolist())
