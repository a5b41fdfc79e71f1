"""What does each point cost? Its time here or on a profile's device, its training, its memory."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fullstride.latency.devices import load_profile
from fullstride.latency.network_times import estimates
from fullstride.latency.spec_operators import operators_of
from fullstride.measure.cost.operators import Operators
from fullstride.measure.memory.max_batch import FLOAT_BYTES, WORKSPACE_BYTES
from fullstride.measure.timing import timed_each
from fullstride.measure.workload import Precision, Step, Work
from fullstride.nets.bundle import build
from fullstride.search.scale.grid import ScalePoint
from fullstride.search.scale.settings import HERE, ScaleSettings
from fullstride.storage import lacks_memory

# Bytes that a training step saves for each element that an operator writes: 1.23 to 1.32 and 2.39
# to 2.53 in ResNet-RS and GENet of widths 0.25 to 2 (`max_batch.predict`, tests/test_scale_costs).
SAVED_BYTES = {"bfloat16": 1.32, "float32": 2.53}
# Bytes for each weight: it, its momentum and, in 16 bits, its cast.
WEIGHT_BYTES = {"bfloat16": 2.5 * FLOAT_BYTES, "float32": 2 * FLOAT_BYTES}
BACKWARD = 3.0  # time of a training step / that of inference, where a profile has no training
TRAINING_BATCH = 64  # of an estimate, at which a GPU is full
# Here, a call is measured if it is expected to take at most this; larger networks are scaled. The
# grid of ResNet-RS-50 is timed in two minutes of a CPU core so, with 3 s in seven.
MOST_CALL_S = 1.0
CALLS = 5  # that are measured, after the first one
STEP_IMAGES = {"cpu": 8, "cuda": 64}  # at most, of a training step that is measured


@dataclass(frozen=True, kw_only=True)
class PointCost:
    """What a point needs, for one image."""

    point: ScalePoint
    macs: float  # multiply-adds
    weights: float
    ms: float  # of inference, in calls of the settings' batch
    training_ms: float  # of training
    by: str  # measured; estimated; or by MACs, from a smaller network that was measured
    image_bytes: float  # that a training step saves
    fixed_bytes: float  # weights with their momentum, and workspace

    @property
    def name(self) -> str:
        return self.point.name


def point_costs(
    points: Sequence[ScalePoint],
    settings: ScaleSettings,
    *,
    classes: int,
    channels: int,
    batch: int,
    device: str,
) -> Generator[str, None, tuple[PointCost, ...]]:
    """The cost of each point, in their order; yields lines for people.

    By the profile `settings.device`, or by inference and training steps of the network on `device`
    here, with random weights. Training steps have `batch` images, or fewer on a CPU.
    """
    specs = [point.spec(classes, channels) for point in points]
    operators = [operators_of(spec) for spec in specs]
    on_gpu = settings.device != HERE or device.startswith("cuda")
    precision = "bfloat16" if on_gpu else "float32"
    if settings.device == HERE:
        times = yield from measured_times(specs, operators, settings.batch, batch, device)
    else:
        times = estimated_times(operators, settings)
    return tuple(
        PointCost(
            point=point,
            macs=own.total_macs,
            weights=own.total_weights,
            ms=ms,
            training_ms=training_ms,
            by=by,
            image_bytes=SAVED_BYTES[precision] * float((own.written * own.count).sum()),
            fixed_bytes=WEIGHT_BYTES[precision] * own.total_weights + on_gpu * WORKSPACE_BYTES,
        )
        for point, own, (ms, training_ms, by) in zip(points, operators, times, strict=True)
    )


Times = list[tuple[float, float, str]]  # ms of inference, ms of training, and their origin


def estimated_times(operators: Sequence[Operators], settings: ScaleSettings) -> Times:
    """By the profile, which may have no training steps."""
    profile = load_profile(settings.device)
    count = len(operators)
    calls = estimates(operators, profile, [settings.batch] * count)
    full, times_as_long = [TRAINING_BATCH] * count, 1.0 if profile.training else BACKWARD
    steps = estimates(operators, profile, full, training=profile.training is not None)
    return [
        (call.ms_per_image, times_as_long * step.ms_per_image, "estimated")
        for call, step in zip(calls, steps, strict=True)
    ]


def measured_times(
    specs: Sequence[Any],
    operators: Sequence[Operators],
    batch: int,
    training_batch: int,
    device: str,
) -> Generator[str, None, Times]:
    """Of networks on this machine; the smallest first, as the times of others follow from them."""
    where = torch.device(device)
    step_images = min(training_batch, STEP_IMAGES[where.type])
    macs = [own.total_macs for own in operators]
    times: dict[int, tuple[float, float, str]] = {}
    last: tuple[float, float, float] | None = None  # MACs and ms per image of both
    shown = time.perf_counter()
    for index in np.argsort(macs, kind="stable").tolist():
        if time.perf_counter() - shown > 10:
            shown = time.perf_counter()
            yield f"measuring the times of networks: {len(times)} of {len(specs)}"
        ratio = macs[index] / last[0] if last else 0.0
        expected_s = ratio * max(last[1] * batch, last[2] * step_images) / 1e3 if last else 0.0
        if expected_s <= MOST_CALL_S:
            try:
                own = network_times(specs[index], batch, step_images, where)
            except (MemoryError, RuntimeError) as error:
                if not lacks_memory(error) or last is None:
                    raise
            else:
                last = macs[index], *own
                times[index] = *own, "measured"
                continue
        assert last is not None
        times[index] = ratio * last[1], ratio * last[2], "by MACs"
    return [times[index] for index in range(len(specs))]


def network_times(
    spec: Any, batch: int, step_images: int, device: torch.device
) -> tuple[float, float]:
    """Median ms per image of inference and of training, of the network with random weights."""
    size: dict[str, Any] = dict(
        resolution=spec.resolution, device=device, in_channels=spec.in_channels
    )
    net, results = build(spec), []
    works: tuple[tuple[Work, int], ...] = ("inference", batch), ("training", step_images)
    for work, images in works:
        precision: Precision = "float32" if device.type == "cpu" else "bfloat16"
        step = Step(net, work, images, precision=precision, **size)
        step()  # the first call chooses kernels
        seconds, _ = timed_each(step, CALLS, device)
        results.append(1e3 * float(np.median(seconds)) / images)
    return results[0], results[1]
