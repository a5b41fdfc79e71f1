"""Plans the trainings of a scaling study: the points that fit, their seeds, and the total time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fullstride.measure.environment import choose_device
from fullstride.measure.max_batch import budget_bytes
from fullstride.report.console_tables import table
from fullstride.report.training_progress import duration
from fullstride.search.scale.grid import PointCost, ScalePoint, cross, grid, rand_magnitude
from fullstride.search.settings import ScaleSettings
from fullstride.study.driver import Parts, StudyJob
from fullstride.train.batches import recipe_in_epochs
from fullstride.train.recipes.choice import RecipeChoice, case_of
from fullstride.train.recipes.recipe import Recipe

LEAST_PASS = 8  # images of a pass on a GPU, where the passes of a step share a batch


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    point: str  # its name
    regime: str
    seed: int
    seconds: float  # expected


@dataclass(frozen=True, kw_only=True)
class ScalePlan:
    costs: tuple[PointCost, ...]  # of the points that fit
    beyond: tuple[PointCost, ...]  # that only the hours leave out
    left_out: dict[str, str]  # name -> why
    trainings: tuple[PlannedTraining, ...]  # those that begin
    band: int  # points of each regime that may follow
    band_s: float  # seconds of these, at most
    seconds_left: float  # for the band
    memory_known: bool

    @property
    def total_s(self) -> float:
        return sum_s(self.trainings) + self.band_s


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaleJob(StudyJob):
    """The arguments of a scaling study and its means."""

    settings: ScaleSettings

    @cached_property
    def points(self) -> list[ScalePoint]:
        return grid(self.settings)

    @cached_property
    def regimes(self) -> dict[str, RecipeChoice]:
        """The lengths of training by their names, which are those of folders too."""
        regimes, recipe = dict[str, RecipeChoice](), self.recipe
        for name in self.settings.regimes:
            if name.replace(".", "", 1).isdigit():  # epochs of the recipe
                changes = {**recipe.changes, "epochs": float(name)}
                regimes[f"{name}_epochs"] = RecipeChoice(recipe.source, changes)
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
        """For training; None: unknown, as on a device that is not here."""
        if self.settings.memory_gib is not None:
            return self.settings.memory_gib * 2**30
        if not self.settings.is_here:
            return None
        return budget_bytes(None, choose_device(self.options.device))

    def check(self) -> None:
        """Raise ValueError, in one line, for what no point can train on or by."""
        if "resolution" in self.recipe.changes:
            raise ValueError("recipe.resolution is that of each point: choose by --resolutions")
        super().check()
        for regime in self.regimes:
            self.recipe_of(self.points[0], regime)

    def recipe_of(self, point: ScalePoint, regime: str) -> Recipe:
        """The recipe of a point, whose regularisation may follow its width and resolution."""
        choice = self.regimes[regime]
        changes = {**choice.changes, "resolution": point.resolution}
        case = case_of(self.data, width=point.width)
        recipe = RecipeChoice(choice.source, changes).resolve(case).recipe
        is_slow = self.settings.slow_resolution and "rand_magnitude" not in changes
        if is_slow and recipe.rand_layers:
            recipe = replace(recipe, rand_magnitude=rand_magnitude(point.resolution))
        return recipe

    def training(self, cost: PointCost, regime: str, seed: int = 0) -> PlannedTraining:
        """A training with its expected seconds, of training and validation images."""
        recipe = recipe_in_epochs(self.data, self.recipe_of(cost.point, regime))
        epoch_ms = len(self.data.train) * cost.training_ms + len(self.data.val) * cost.ms
        seconds = math.ceil(recipe.epochs) * epoch_ms / 1e3  # the last epoch may be partial
        return PlannedTraining(point=cost.name, regime=regime, seed=seed, seconds=seconds)


def make_plan(job: ScaleJob, costs: Sequence[PointCost]) -> ScalePlan:
    """Leave out what does not fit; of the rest the cross or all, three anchors with more seeds.

    With hours, the most expensive points are left out until the trainings of the others fit; what
    is left of the hours is for the band. Raises ValueError if nothing fits.
    """
    left_out, settings = misfits(job, costs), job.settings
    every = fitting = [cost for cost in costs if cost.name not in left_out]
    if not fitting:
        name, reason = min(left_out.items(), key=lambda item: len(item[1]))
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
        left_out[slowest] = f"there is no time for it within {settings.hours:g} hours"
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


def misfits(job: ScaleJob, costs: Sequence[PointCost]) -> dict[str, str]:
    """The names of points above the budget or the memory, with the reason."""
    left_out, memory_bytes, budget_ms = dict[str, str](), job.memory_bytes, job.settings.limit_ms
    images = min(job.batch, LEAST_PASS if job.on_gpu else len(job.data.train))
    for cost in costs:
        needed = cost.fixed_bytes + images * cost.image_bytes
        if budget_ms is not None and cost.ms > budget_ms:
            left_out[cost.name] = f"{cost.ms:.3g} ms are above the budget"
        elif memory_bytes is not None and needed > memory_bytes:
            left_out[cost.name] = f"training needs {needed / 2**30:.1f} GiB"
    return left_out


def first_trainings(job: ScaleJob, costs: Sequence[PointCost]) -> list[PlannedTraining]:
    """The trainings that do not depend on the results of others."""
    middle = cross([cost.point for cost in costs])
    order = [cost for cost in costs if cost.point in middle]
    order.sort(key=lambda cost: cost.training_ms)
    # The anchors are those of the cross, so that the whole grid repeats no others.
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
    """The plan for people, with its total."""
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
    for name, reason in plan.left_out.items():
        kind = "too slow" if "ms" in reason else "memory" if "GiB" in reason else "time"
        reasons.setdefault(kind, []).append(name)
    for kind, names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"left out ({kind}): {', '.join(names[:3])}{more}"
    if not plan.memory_known:
        yield "memory is not known: give --memory-gib to leave out what does not fit"
    if plan.band:
        yield f"then up to {plan.band} points near the expected front in each regime"
    more = f", with those that follow up to {duration(plan.total_s)}" if plan.band else ""
    first_s = plan.total_s - plan.band_s
    yield f"time     about {duration(first_s)} for {len(plan.trainings)} trainings{more}"
