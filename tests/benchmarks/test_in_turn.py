"""Calls that are timed in turn, each in a process of its own where there is a GPU."""

import os
import time
from dataclasses import dataclass, replace

import pytest
import torch
from forks import CONTEXT
from gpu_parts import in_turn

from fullstride.measure.protocols import THROUGHPUT

SHORT = replace(THROUGHPUT, batch=4, rounds=3, round_s=0.02, warmup_s=0.01)
CPU = torch.device("cpu")


@dataclass
class Sleeper:
    """Makes a call of some seconds, or does not."""

    call_s: float
    make_s: float = 0.0
    error: str = ""

    def __call__(self):
        time.sleep(self.make_s)
        if self.error == "exit":
            os._exit(3)
        if self.error:
            raise ValueError(self.error)
        return lambda: time.sleep(self.call_s), {"seconds": self.call_s}


def test_calls_are_timed_in_turn_and_those_that_cannot_be_made_have_a_reason():
    makers = {"fast": Sleeper(0.002), "none": Sleeper(1, error="no form"), "slow": Sleeper(0.01)}
    rows, failed = in_turn.time_in_turn(makers, SHORT, CPU, make_s=60)
    assert failed == {"none": "no form"}
    assert [*rows] == ["fast", "slow"]
    assert rows["slow"].facts == {"seconds": 0.01}
    assert all(len(row.images_per_s) == 3 for row in rows.values())
    assert 1.5 < rows["fast"].rate / rows["slow"].rate < 8
    assert 100 < rows["slow"].rate < 400  # of 4 images each hundredth of a second


@pytest.mark.slow
def test_a_process_that_ends_or_is_late_leaves_the_others_to_be_timed(monkeypatch):
    monkeypatch.setattr(in_turn, "get_context", lambda _: CONTEXT)
    first = CONTEXT.Process(target=int)
    first.start()  # the server of all forks as well, which imports the package
    first.join()
    monkeypatch.setattr(in_turn.Entrant, "alone", True)
    monkeypatch.setattr(in_turn, "at_once", lambda device: 3)
    makers = {
        "ends": Sleeper(1, error="exit"),
        "late": Sleeper(1, make_s=600),
        "one": Sleeper(0.002),
        "two": Sleeper(0.002),
    }
    rows, failed = in_turn.time_in_turn(makers, SHORT, CPU, make_s=6)
    assert failed == {"ends": "its process ended", "late": "was not ready in time"}
    assert [*rows] == ["one", "two"]


def test_as_many_calls_are_made_at_once_as_memory_and_cores_allow(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 50 * 2**30))
    assert in_turn.at_once(CPU) == 1
    assert in_turn.at_once(torch.device("cuda")) == 4
