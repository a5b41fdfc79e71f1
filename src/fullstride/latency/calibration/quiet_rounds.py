"""How long does a call take where other processes use the cores as well? By its quiet rounds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from fullstride.measure.timing import spread, timed_calls

QUIET = 0.95  # of the wall time of a quiet round the thread that calls has a core
QUIET_ROUNDS = 3  # that a wall time needs


@dataclass(frozen=True, kw_only=True)
class Round:
    """Some calls of one network, in seconds of a call."""

    wall_s: float
    cpu_s: float  # of the thread that calls
    quiet: bool  # whether that thread had a core all the time; on a GPU it need not

    @property
    def seconds(self) -> float:
        return self.wall_s if self.quiet else self.cpu_s


def timed_round(step: Callable[[], object], calls: int, device: torch.device) -> Round:
    """The thread that calls computes too, and waits for the others: it lacks a core if any does."""
    start = time.thread_time()
    (wall_s,), _ = timed_calls(step, calls, device)
    cpu_s = time.thread_time() - start
    quiet = device.type != "cpu" or cpu_s >= QUIET * wall_s
    return Round(wall_s=wall_s / calls, cpu_s=cpu_s / calls, quiet=quiet)


def time_of(rounds: Sequence[Round]) -> dict[str, Any]:
    """The time that a network would take on a quiet machine, as fields of `Timing`."""
    quiet = [each.wall_s for each in rounds if each.quiet]
    by_wall = len(quiet) >= min(QUIET_ROUNDS, len(rounds))
    seconds = quiet if by_wall else [each.cpu_s for each in rounds]
    clock = "wall" if by_wall else "cpu"
    both = {key: median(getattr(each, key) for each in rounds) for key in ("wall_s", "cpu_s")}
    share = len(quiet) / len(rounds)
    return dict(seconds=median(seconds), spread=spread(seconds), quiet=share, clock=clock, **both)
