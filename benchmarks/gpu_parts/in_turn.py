"""Times calls in turn, each in a process of its own.

All are made at once, as compiling a network takes one core a minute, and none has the compiled code
or the memory of another. Without a GPU they are threads of this process.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as first_of
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch

from fullstride.measure.bench import Series
from fullstride.measure.protocols import Protocol, spread, timed_calls, timed_each, wait, warm_up
from fullstride.measure.workload import compiling, exact_float32
from fullstride.papers.suite import reason

# Makes a call, and facts of it. It is sent to another process, so it is no local function.
Maker = Callable[[], tuple[Callable[[], object], dict[str, Any]]]
BYTES = 12 * 2**30  # of GPU memory while a call is made


class Timed(NamedTuple):
    images_per_s: list[float]  # of each round
    samples: list[float]  # as in `Measurement`
    facts: dict[str, Any]

    @property
    def rate(self) -> float:
        return float(np.median(self.images_per_s))

    @property
    def spread(self) -> float:
        return spread(self.samples)


@dataclass
class Entrant:
    """One of the calls, seen from here."""

    make: Maker
    protocol: Protocol
    device: torch.device

    @property
    def alone(self) -> bool:
        """Whether it is in a process of its own."""
        return self.device.type == "cuda"

    def start(self) -> None:
        self.connection, theirs = Pipe()
        words = theirs, self.make, self.protocol, self.device
        if not self.alone:
            self.thread = Thread(target=serve, args=words, daemon=True)
            self.thread.start()
            return
        self.process = get_context("spawn").Process(target=serve_alone, args=words, daemon=True)
        self.process.start()
        theirs.close()  # the process has its own, whose end is seen here

    def made(self) -> dict[str, Any] | str:
        """The facts of the call, or why there is none."""
        try:
            return self.connection.recv()
        except EOFError:
            return "its process ended"

    def ask(self, word: str) -> Any:
        self.connection.send(word)
        return self.connection.recv()

    def stop(self) -> None:
        if self.alone:
            self.process.kill()
        self.connection.close()
        if not self.alone:
            self.thread.join()  # else it may be in PyTorch when this process ends, which aborts it


def time_in_turn(
    makers: Mapping[str, Maker], protocol: Protocol, device: torch.device, make_s: float
) -> tuple[dict[str, Timed], dict[str, str]]:
    """Time all calls in turn in every round; also why others failed, or were not made in time."""
    entrants = {name: Entrant(make, protocol, device) for name, make in makers.items()}
    started = list[Entrant]()
    with exact_float32(), compiling(True):
        try:
            facts, failed = make_all(entrants, started, time.monotonic() + make_s)
            rounds = dict[str, Any]()
            for word in ("warm up", *["time"] * protocol.rounds):
                for name in [name for name in facts if name not in failed]:
                    try:
                        rounds[name] = entrants[name].ask(word)
                    except (EOFError, OSError):
                        failed[name] = "its process ended"
            rows = {n: Timed(*rounds[n], fact) for n, fact in facts.items() if n not in failed}
            return rows, failed
        finally:
            for entrant in started:
                entrant.stop()


def make_all(
    entrants: Mapping[str, Entrant], started: list[Entrant], deadline: float
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Start all, as many at once as fit; the facts of each call, and why others failed."""
    facts, failed = dict[str, dict[str, Any]](), dict[str, str]()
    began, waiting, running = time.monotonic(), [*entrants], list[str]()
    while waiting or running:
        while waiting and len(running) < at_once(entrants[waiting[0]].device):
            entrants[waiting[0]].start()
            started.append(entrants[waiting[0]])
            running.append(waiting.pop(0))
        connections = [entrants[name].connection for name in running]
        ready = first_of(connections, max(0.0, deadline - time.monotonic()))
        if not ready:
            failed |= dict.fromkeys(running + waiting, "was not ready in time")
            for name in running:  # the others are timed without it
                entrants[name].stop()
            break
        for name in [name for name in running if entrants[name].connection in ready]:
            running.remove(name)
            made = entrants[name].made()
            if isinstance(made, str):
                failed[name] = made
            else:
                facts[name] = made
            print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)
    return {name: facts[name] for name in entrants if name in facts}, failed


def at_once(device: torch.device) -> int:
    """How many calls are made at the same time."""
    if device.type != "cuda":
        return 1
    room = torch.cuda.mem_get_info(device)[1] // BYTES
    return max(1, min(room, (os.cpu_count() or 2) // 2))


def serve(connection: Connection, make: Maker, protocol: Protocol, device: torch.device) -> None:
    """Make the call, say so, and do what each word asks for."""
    try:
        call, facts = make()
    except Exception as error:
        connection.send(reason(error))
        return
    series = Series(call, protocol.batch)
    answer: object = facts
    while True:
        if device.type == "cuda":  # the others need it
            torch.cuda.empty_cache()
        connection.send(answer)
        try:
            word = connection.recv()
        except EOFError:  # nothing more is asked for
            return
        if word == "warm up":
            series.calls = warm_up(call, protocol, device)
        elif word == "time":
            time_round(series, protocol, device)
        answer = series.images_per_s, series.samples


def serve_alone(*words: Any) -> None:
    with exact_float32(), compiling(True):
        serve(*words)


def time_round(series: Series, protocol: Protocol, device: torch.device) -> None:
    if device.type == "cuda":
        series.step()  # not timed: it allocates again
        wait(device)
    measure = timed_each if protocol.waits else timed_calls
    series.add(*measure(series.step, series.calls, device), protocol.waits)
