"""Measurements of milliseconds in place of seconds: tests need their calls, not steady clocks."""

from dataclasses import replace

import pytest
import torch

from fullstride.measure import protocols
from fullstride.targets.target import Target, Times

WARMUP_S, ROUND_S = 0.02, 0.004
SECONDS = {
    "autofit.finalists.PAUSE_S": 0.0,
    "search.llr.times.PAUSE_S": 0.0,
    "train.autotune.SECONDS": 0.1,
    "train.timing.MEASURE_S": 0.1,
    "train.timing.WARM_UP_S": 0.1,
}


def shorten(patch: pytest.MonkeyPatch) -> None:
    """For this process, until the patch is undone."""
    warm_up = protocols.warm_up

    def shortened(protocol: protocols.Protocol) -> protocols.Protocol:
        warmup_s, round_s = min(protocol.warmup_s, WARMUP_S), min(protocol.round_s, ROUND_S)
        return replace(protocol, warmup_s=warmup_s, round_s=round_s)

    def short(step, protocol: protocols.Protocol, device: torch.device) -> int:
        return warm_up(step, shortened(protocol), device)

    measure = Target.measure

    def shortly(self: Target, files, protocol: protocols.Protocol, threads=None) -> Times:
        return measure(self, files, shortened(protocol), threads)

    patch.setattr(Target, "measure", shortly)
    for module in ("measure.bench", "latency.calibrate", "train.autotune"):
        patch.setattr(f"fullstride.{module}.warm_up", short)
    for name, seconds in SECONDS.items():
        patch.setattr(f"fullstride.{name}", seconds)
