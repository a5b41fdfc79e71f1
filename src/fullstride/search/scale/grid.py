"""The networks that a scaling study compares, of a grid of width, depth and resolution."""

import math
import re
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from fullstride.io.writing import lacks_memory
from fullstride.latency.devices import load_profile
from fullstride.latency.network_times import estimates
from fullstride.latency.spec_operators import operators_of
from fullstride.measure.max_batch import FLOAT_BYTES, WORKSPACE_BYTES
from fullstride.measure.operators import Operators
from fullstride.measure.protocols import timed_each
from fullstride.measure.workload import Step, StepOptions, Work
from fullstride.nets import zoo
from fullstride.nets.bundle import build
from fullstride.nets.families import resnet_rs
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import TimmSpec
from fullstride.search.scale.finished import Size
from fullstride.search.settings import ScaleSettings

# The grid of the scaling study of arXiv:2103.07579.
WIDTHS = (0.25, 0.5, 1.0, 1.5, 2.0)
LAYERS = (26, 50, 101, 200, 300, 350, 400)
SIDES = (128, 160, 224, 320, 448)
DEPTHS = (0.5, 1.0, 2.0, 4.0)  # multipliers, for other families; ours
BASE_SIDE = 224  # of EfficientNet-B0


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """A network at a resolution."""

    model: str  # of the zoo, timm/NAME, or a JSON file of a spec
    width: float  # multiplier
    depth: float  # multiplier, or layers of a ResNet-RS
    resolution: int  # pixels a side

    @property
    def size(self) -> Size:
        return Size(self.width, self.depth, self.resolution)

    @property
    def name(self) -> str:
        """The name of the point, and of its folders."""
        stem, depth = self.model.removeprefix("timm/").removesuffix(".json"), self.depth
        if is_resnet_rs(self.model):
            stem, depth = f"resnet_rs_{depth:g}", 1.0
        scaled = f"-w{self.width:g}" * (self.width != 1) + f"-d{depth:g}" * (depth != 1)
        return f"{stem.rpartition('/')[2]}{scaled}-{self.resolution}"

    def spec(self, classes: int, channels: int) -> NetSpec | TimmSpec:
        """The network for images of so many channels and classes."""
        if is_resnet_rs(self.model):
            spec = resnet_rs.of_layers(int(self.depth)).scaled(width=self.width)
        else:
            spec = zoo.spec(self.model)
            if isinstance(spec, NetSpec):
                spec = spec.scaled(width=self.width, depth=self.depth)
        return replace(spec, classes=classes, in_channels=channels, resolution=self.resolution)


def is_resnet_rs(model: str) -> bool:
    """Whether depths are layers."""
    return re.fullmatch(r"resnet_rs_\d+", model) is not None


def grid(settings: ScaleSettings) -> list[ScalePoint]:
    """All points. Several models are points themselves, each at its own resolutions and width 1.

    Raises ValueError for names of no network, for a width or depth of timm's networks, and for
    layers that no ResNet-RS has.
    """
    points = []
    single = len(settings.models) == 1
    for model in settings.models:
        spec = zoo.spec(model)
        own, is_rs = isinstance(spec, NetSpec), is_resnet_rs(model)
        if not own and (settings.widths or settings.depths):
            raise ValueError(
                f"{model} cannot be scaled in width and depth: leave --widths and --depths out"
            )
        if settings.slow_resolution and own:
            raise ValueError(f"--slow-resolution is for timm's EfficientNets, not {model}")
        many = single and own
        widths = settings.widths or (WIDTHS if many else (1.0,))
        layers = float(model.rpartition("_")[2]) if is_rs else 1.0
        depths = settings.depths or ((LAYERS if is_rs else DEPTHS) if many else (layers,))
        sides = settings.resolutions or own_sides(spec, settings, many=many)
        for width, depth, side in product(widths, depths, sides):
            if is_rs and depth not in resnet_rs.SCALED_LAYERS:
                possible = " ".join(map(str, sorted(resnet_rs.SCALED_LAYERS)))
                raise ValueError(f"--depths {depth:g}: a ResNet-RS has layers {possible}")
            points.append(ScalePoint(model=model, width=width, depth=float(depth), resolution=side))
    return points


def own_sides(spec: Any, settings: ScaleSettings, *, many: bool) -> tuple[int, ...]:
    """The resolutions where none are set."""
    if settings.slow_resolution:
        return (slow_resolution(spec.resolution),)
    if not many:
        return (spec.resolution,)
    if is_resnet_rs(settings.models[0]):
        return SIDES
    step = 32 if spec.resolution >= 96 else 8
    sides = (step * round(spec.resolution * side / BASE_SIDE / step) for side in SIDES)
    return tuple(sorted({max(step, side) for side in sides}))


def slow_resolution(resolution: int) -> int:
    """The resolution of an EfficientNet that grows slowly: 224 stay, 600 become 368 pixels a side.

    In the logarithm from 224 it grows by half of what the compound coefficient's `resolution` does,
    rounded to 8 pixels. EfficientNet-RS (arXiv:2103.07579) keeps widths and depths, and says that
    resolution should grow slowly; its resolutions are only in a picture, so the half is ours.
    """
    return 8 * round((BASE_SIDE * resolution) ** 0.5 / 8)


def rand_magnitude(resolution: int) -> int:
    """RandAugment's magnitude of EfficientNet-RS by pixels a side (arXiv:2103.07579)."""
    return 10 if resolution <= 224 else 15 if resolution <= 320 else 20


def centre(points: Sequence[ScalePoint]) -> Size:
    """The value of each axis that is nearest to the middle of the logarithms; of two the larger."""

    def middle(values: Sequence[float]) -> float:
        mean = math.sqrt(min(values) * max(values))
        return min(values, key=lambda value: (round(abs(math.log(value / mean)), 9), -value))

    widths, depths, sides = zip(*(point.size for point in points), strict=True)
    return Size(middle(widths), middle(depths), int(middle(sides)))


def cross(points: Sequence[ScalePoint]) -> list[ScalePoint]:
    """The points that differ from the centre in at most one axis; few points are all taken."""
    if len({point.model for point in points}) > 1:
        return [*points]
    middle = np.array(centre(points))
    return [point for point in points if (np.array(point.size) != middle).sum() <= 1]


def band(
    candidates: Sequence[ScalePoint],
    finished: Sequence[Size],
    errors: dict[Size, float],
    ms: dict[Size, float],
    count: int,
) -> list[ScalePoint]:
    """The candidates nearest to the front of predicted `errors`, at most `count`.

    Those on the front first, spread over its times if they are more.
    """
    sizes = [*finished, *(point.size for point in candidates)]

    def distance(point: ScalePoint) -> float:
        quicker = (errors[size] for size in sizes if ms[size] <= ms[point.size])
        return errors[point.size] - min(quicker)

    order = sorted(candidates, key=lambda point: (distance(point), ms[point.size]))
    front = [point for point in order if distance(point) == 0]
    if len(front) > count:
        places = np.unique(np.linspace(0, len(front) - 1, count).round().astype(int))
        return [front[place] for place in places]
    return order[:count]


# The cost of a point: its time here or on a profile's device, its training, its memory.

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
    """The costs of a point for one image."""

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

    By the profile `settings.target`, or by inference and training steps of the network on `device`
    here, with random weights. Training steps have `batch` images, or fewer on a CPU.
    """
    specs = [point.spec(classes, channels) for point in points]
    operators = [operators_of(spec) for spec in specs]
    on_gpu = not settings.is_here or device.startswith("cuda")
    precision = "bfloat16" if on_gpu else "float32"
    if settings.is_here:
        times = yield from measured_times(specs, operators, settings.call_batch, batch, device)
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
    """Times by the profile of the target, which may have no training steps."""
    profile = load_profile(settings.target)
    count = len(operators)
    calls = estimates(operators, profile, [settings.call_batch] * count)
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
    """Times on this machine, the smallest network first, as those of large ones follow from it."""
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
    net, results = build(spec), []
    options = StepOptions(precision="float32" if device.type == "cpu" else "bfloat16")
    works: dict[Work, int] = {"inference": batch, "training": step_images}
    for work, images in works.items():
        step = Step(net, work, images, spec.resolution, device, spec.in_channels, options)
        step()  # the first call chooses kernels
        seconds, _ = timed_each(step, CALLS, device)
        results.append(1e3 * float(np.median(seconds)) / images)
    return results[0], results[1]
