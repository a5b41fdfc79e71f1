"""The grid of networks of a scaling study, their costs, and the plan of its trainings."""

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fullstride.data.readers.listing import quote_names
from fullstride.io.console import count_of
from fullstride.io.writing import lacks_memory, looks_like_path
from fullstride.latency.devices import load_profile
from fullstride.latency.estimator import operators_of
from fullstride.latency.network_times import estimates
from fullstride.measure.environment import choose_device
from fullstride.measure.max_batch import FLOAT_BYTES, WORKSPACE_BYTES, budget_bytes
from fullstride.measure.operators import Operators
from fullstride.measure.protocols import timed_each
from fullstride.measure.workload import Step, StepOptions
from fullstride.nets import zoo
from fullstride.nets.bundle import build
from fullstride.nets.families import resnet_rs
from fullstride.nets.spec import NetSpec, TimmSpec
from fullstride.report.console_tables import table
from fullstride.report.training_progress import duration
from fullstride.search.scale.finished import Size
from fullstride.search.settings import ScaleSettings
from fullstride.study.driver import Parts, StudyJob
from fullstride.study.trials import Work
from fullstride.train.batches import recipe_in_epochs
from fullstride.train.recipes.choice import RecipeChoice, case_of
from fullstride.train.recipes.recipe import Recipe

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

    Raises ValueError for unknown networks, for a width or depth of timm's networks, for layers that
    no ResNet-RS has, and for points with equal names.
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
    name, count = Counter(point.name for point in points).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"--models {' '.join(settings.models)}: several points have the name {name}; leave "
            "one out, or give its file another name"
        )
    return points


def own_sides(spec: Any, settings: ScaleSettings, *, many: bool) -> tuple[int, ...]:
    """The default resolutions."""
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
    """A slowly growing resolution for an EfficientNet: 224 stays, 600 becomes 368 pixels a side.

    The logarithm grows from 224 half as fast as with compound scaling, rounded to 8 pixels.
    EfficientNet-RS (arXiv:2103.07579) keeps widths and depths, and says that resolution should grow
    slowly; its resolutions are only in a picture, so the half is ours.
    """
    return 8 * round((BASE_SIDE * resolution) ** 0.5 / 8)


def rand_magnitude(resolution: int) -> int:
    """RandAugment's magnitude of EfficientNet-RS by pixels a side (arXiv:2103.07579)."""
    return 10 if resolution <= 224 else 15 if resolution <= 320 else 20


def centre(points: Sequence[ScalePoint]) -> Size:
    """The size of the point nearest to the middle of all axes' logarithms.

    The middle is the value of each axis nearest to the axis's mean; the larger one wins a tie.
    """

    def middle(values: Sequence[float]) -> float:
        mean = math.sqrt(min(values) * max(values))
        return min(values, key=lambda value: (round(abs(math.log(value / mean)), 9), -value))

    sizes = [point.size for point in points]
    middles = [middle(values) for values in zip(*sizes, strict=True)]

    def distance(size: Size) -> float:
        logs = (math.log(value / mid) for value, mid in zip(size, middles, strict=True))
        return round(math.hypot(*logs), 9)

    return min(sizes, key=lambda size: (distance(size), *(-value for value in size)))


def cross(points: Sequence[ScalePoint]) -> list[ScalePoint]:
    """The points that differ from the centre in at most one axis; all points of several models."""
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

    Candidates on the front come first, spread over its times if there are more than `count`.
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


# The cost of a point: its time here or on a profile's device, its training time and its memory.

# Bytes that a training step saves for each element that an operator writes: 1.23 to 1.32 and 2.39
# to 2.53 in ResNet-RS and GENet of widths 0.25 to 2 (`max_batch.predict`).
SAVED_BYTES = {"bfloat16": 1.32, "float32": 2.53}
# Bytes for each weight: the value, the momentum and, in 16 bits, the cast.
WEIGHT_BYTES = {"bfloat16": 2.5 * FLOAT_BYTES, "float32": 2 * FLOAT_BYTES}
BACKWARD = 3.0  # training time / inference time, if a profile has no training
TRAINING_BATCH = 64  # of an estimate; it fills a GPU
# A call is measured here if it is expected to take at most this; the times of larger networks are
# scaled. The grid of ResNet-RS-50 takes two minutes of a CPU core, and seven with 3 s.
MOST_CALL_S = 1.0
CALLS = 5  # measured calls, after the first one
STEP_IMAGES = {"cpu": 8, "cuda": 64}  # most images of a measured training step


@dataclass(frozen=True, kw_only=True)
class PointCost:
    """The costs of a point for one image."""

    point: ScalePoint
    macs: float  # multiply-adds
    weights: float
    ms: float  # of inference, in calls with the settings' batch
    training_ms: float
    by: str  # measured; estimated; or by MACs, from a smaller measured network
    image_bytes: float  # saved by a training step
    fixed_bytes: float  # weights, momentum and workspace

    @property
    def name(self) -> str:
        return self.point.name


def point_costs(points: Sequence[ScalePoint], job: "ScaleJob") -> Work[tuple[PointCost, ...]]:
    """The cost of each point, in order; yields lines for people.

    Times are by the profile of the settings' target, or by inference and training steps on the
    first device here, with random weights. Training steps have `job.batch` images, or fewer on a
    CPU.
    """
    specs = [point.spec(len(job.data.classes), job.data.channels) for point in points]
    operators = [operators_of(spec) for spec in specs]
    precision = "bfloat16" if job.on_gpu else "float32"
    if job.settings.is_here:
        times = yield from measured_times(specs, operators, job)
    else:
        times = estimated_times(operators, job.settings)
    return tuple(
        PointCost(
            point=point,
            macs=own.total_macs,
            weights=own.total_weights,
            ms=ms,
            training_ms=training_ms,
            by=by,
            image_bytes=SAVED_BYTES[precision] * float((own.written * own.count).sum()),
            fixed_bytes=WEIGHT_BYTES[precision] * own.total_weights + job.on_gpu * WORKSPACE_BYTES,
        )
        for point, own, (ms, training_ms, by) in zip(points, operators, times, strict=True)
    )


Times = list[tuple[float, float, str]]  # ms of inference, ms of training, `PointCost.by`


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
    specs: Sequence[Any], operators: Sequence[Operators], job: "ScaleJob"
) -> Work[Times]:
    """Measure times on this machine from the smallest network up, and scale the rest by MACs."""
    batch, where = job.settings.call_batch, torch.device(job.devices[0])
    step_images = min(job.batch, STEP_IMAGES[where.type])
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
    """Median ms per image of inference and of training, with random weights."""
    net, results = build(spec), []
    works: dict[Any, int] = {"inference": batch, "training": step_images}
    options = StepOptions(precision="float32" if device.type == "cpu" else "bfloat16")
    for work, images in works.items():
        step = Step(net, work, images, spec.resolution, device, spec.in_channels, options)
        step()  # the first call chooses kernels
        seconds, _ = timed_each(step, CALLS, device)
        results.append(1e3 * float(np.median(seconds)) / images)
    return results[0], results[1]


# The plan: the points that fit, their seeds, and the total time.

LEAST_PASS = 8  # images of a pass on a GPU, where several passes make up a step's batch


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    point: str  # name of the point
    regime: str
    seed: int
    seconds: float  # expected


class LeftOut(NamedTuple):
    """Why a point is not trained."""

    kind: Literal["too slow", "memory", "time"]
    reason: str


@dataclass(frozen=True, kw_only=True)
class ScalePlan:
    costs: tuple[PointCost, ...]  # of the points that fit
    beyond: tuple[PointCost, ...]  # of the points that only the hours leave out
    left_out: dict[str, LeftOut]  # by name
    trainings: tuple[PlannedTraining, ...]  # the first trainings
    band: int  # points of each regime that may follow
    band_s: float  # most seconds of the band
    seconds_left: float  # for the band
    memory_known: bool

    @property
    def total_s(self) -> float:
        return sum_s(self.trainings) + self.band_s


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaleJob(StudyJob):
    """The job of a scaling study."""

    settings: ScaleSettings

    @cached_property
    def points(self) -> list[ScalePoint]:
        return grid(self.settings)

    @cached_property
    def regimes(self) -> dict[str, RecipeChoice]:
        """The lengths of training by name, which is also the name of a folder."""
        regimes, recipe = dict[str, RecipeChoice](), self.recipe
        for name in self.settings.regimes:
            if name.replace(".", "", 1).isdecimal():  # epochs of the recipe
                changes = {**recipe.changes, "epochs": float(name)}
                regimes[f"{name}_epochs"] = RecipeChoice(recipe.source, changes)
            elif looks_like_path(name):
                raise ValueError(
                    f"--regimes {name}: give names of recipes, or --recipe {name} and numbers of "
                    "epochs"
                )
            else:
                regimes[name] = RecipeChoice(name, recipe.changes)
        return regimes or {"recipe": recipe}

    @property
    def on_gpu(self) -> bool:
        return not self.settings.is_here or self.devices[0].startswith("cuda")

    @property
    def batch(self) -> int:
        """Images of a training step."""
        return self.recipe_of(self.points[0], next(iter(self.regimes))).batch_size

    @property
    def memory_bytes(self) -> float | None:
        """The memory for training; None: unknown, as on a device that is not here."""
        if self.settings.memory_gib is not None:
            return self.settings.memory_gib * 2**30
        if not self.settings.is_here:
            return None
        return budget_bytes(None, choose_device(self.options.device))

    def check(self) -> None:
        """Raise ValueError, in one line, for arguments with which no point can train."""
        if "resolution" in self.recipe.changes:
            raise ValueError("recipe.resolution is set by each point: choose by --resolutions")
        if "seed" in self.recipe.changes:
            raise ValueError("recipe.seed is set by each training: give their number by --seeds")
        super().check()
        for regime in self.regimes:
            self.recipe_of(self.points[0], regime)
        if self.recipe.source and [*self.regimes] == [*self.settings.regimes]:
            raise ValueError(
                f"--recipe {self.recipe.source} is for numbers of epochs: leave it out with "
                f"--regimes {' '.join(self.regimes)}"
            )

    def recipe_of(self, point: ScalePoint, regime: str) -> Recipe:
        """The recipe of a point; regularisation may depend on its width and resolution."""
        choice = self.regimes[regime]
        changes = {**choice.changes, "resolution": point.resolution}
        case = case_of(self.data, width=point.width)
        recipe = RecipeChoice(choice.source, changes).resolve(case).recipe
        is_slow = self.settings.slow_resolution and "rand_magnitude" not in changes
        if is_slow and recipe.rand_layers:
            recipe = replace(recipe, rand_magnitude=rand_magnitude(point.resolution))
        return recipe

    def training(self, cost: PointCost, regime: str, seed: int = 0) -> PlannedTraining:
        """A planned training; the expected time includes validation."""
        recipe = recipe_in_epochs(self.data, self.recipe_of(cost.point, regime))
        epoch_ms = len(self.data.train) * cost.training_ms + len(self.data.val) * cost.ms
        seconds = math.ceil(recipe.epochs) * epoch_ms / 1e3  # the last epoch may be partial
        return PlannedTraining(point=cost.name, regime=regime, seed=seed, seconds=seconds)


def make_plan(job: ScaleJob, costs: Sequence[PointCost]) -> ScalePlan:
    """Plan the trainings of all points that fit, or of their cross; three have more seeds.

    With hours, the most expensive points are left out until the other trainings fit; the rest of
    the hours is for the band. Raises ValueError if nothing fits.
    """
    left_out, settings = misfits(job, costs), job.settings
    every = fitting = [cost for cost in costs if cost.name not in left_out]
    if not fitting:
        name, (_, reason) = min(left_out.items(), key=lambda item: len(item[1].reason))
        raise ValueError(f"no point is left: {name}: {reason}; give more, or smaller networks")
    limit_s = math.inf if settings.hours is None else 3600 * settings.hours
    trainings = first_trainings(job, fitting)
    while sum_s(trainings) > limit_s:
        slowest = max(trainings, key=lambda each: each.seconds).point
        if len({each.point for each in trainings}) == 1:
            raise ValueError(
                f"--hours {settings.hours:g} is too little: {slowest} alone needs "
                f"{sum_s(trainings) / 3600:.2g} hours"
            )
        reason = f"there is no time for it within {settings.hours:g} hours"
        left_out[slowest] = LeftOut("time", reason)
        fitting = [cost for cost in fitting if cost.name != slowest]
        trainings = first_trainings(job, fitting)
    begun = {each.point for each in trainings}
    rest = [cost for cost in fitting if cost.name not in begun]
    left_s, count, band_s = limit_s - sum_s(trainings), min(settings.band, len(rest)), 0.0
    for regime in job.regimes:
        each_s = (job.training(cost, regime).seconds for cost in rest)
        band_s += sum(sorted(each_s, reverse=True)[:count])
    return ScalePlan(
        costs=tuple(fitting),
        beyond=tuple(cost for cost in every if cost not in fitting),
        left_out=left_out,
        trainings=tuple(trainings),
        band=count,
        band_s=min(band_s, left_s),
        seconds_left=min(left_s, 1e12),
        memory_known=job.memory_bytes is not None,
    )


def misfits(job: ScaleJob, costs: Sequence[PointCost]) -> dict[str, LeftOut]:
    """The points above the budget or the memory, by name."""
    left_out = dict[str, LeftOut]()
    memory_bytes, budget_ms = job.memory_bytes, job.settings.limit_ms
    images = min(job.batch, LEAST_PASS if job.on_gpu else len(job.data.train))
    for cost in costs:
        needed = cost.fixed_bytes + images * cost.image_bytes
        if budget_ms is not None and cost.ms > budget_ms:
            reason = f"{cost.ms:.3g} ms are above the budget"
            left_out[cost.name] = LeftOut("too slow", reason)
        elif memory_bytes is not None and needed > memory_bytes:
            reason = f"training needs {needed / 2**30:.1f} GiB"
            left_out[cost.name] = LeftOut("memory", reason)
    return left_out


def first_trainings(job: ScaleJob, costs: Sequence[PointCost]) -> list[PlannedTraining]:
    """The trainings that do not depend on other results."""
    middle = cross([cost.point for cost in costs])
    order = [cost for cost in costs if cost.point in middle]
    order.sort(key=lambda cost: cost.training_ms)
    # The whole grid repeats the same three points as the cross.
    repeated = {order[0].name, order[len(order) // 2].name, order[-1].name}
    return [
        job.training(cost, regime, seed)
        for regime in job.regimes
        for cost in (costs if job.settings.full_grid else order)
        for seed in range(job.settings.seeds if cost.name in repeated else 1)
    ]


def sum_s(trainings: Sequence[PlannedTraining]) -> float:
    return sum(each.seconds for each in trainings)


def plan_lines(plan: ScalePlan) -> Parts:
    """The plan for people, with the total time."""
    hours: dict[str, float] = {}
    for each in plan.trainings:
        hours[each.point] = hours.get(each.point, 0.0) + each.seconds / 3600
    chosen = sorted((cost for cost in plan.costs if cost.name in hours), key=lambda cost: cost.ms)
    columns = ["network", "GMACs", "M weights", "ms/image", "training ms/image", "hours", "time by"]
    rows = []
    for cost in chosen:
        sizes = cost.macs / 1e9, cost.weights / 1e6, cost.ms, cost.training_ms, hours[cost.name]
        rows.append([cost.name, *(f"{value:.3g}" for value in sizes), cost.by])
    yield table(columns, rows)
    reasons: dict[str, list[str]] = {}
    for name, (kind, _) in plan.left_out.items():
        reasons.setdefault(kind, []).append(name)
    for kind, names in reasons.items():
        yield f"left out ({kind}): {quote_names(names)}"
    if not plan.memory_known:
        yield "memory is not known: give --memory-gib to leave out what does not fit"
    if plan.band:
        yield f"then up to {plan.band} points near the expected front in each regime"
    more = f", with those that follow up to {duration(plan.total_s)}" if plan.band else ""
    first_s = plan.total_s - plan.band_s
    yield (
        f"time     about {duration(first_s)} for {count_of(len(plan.trainings), 'training')}{more}"
    )
