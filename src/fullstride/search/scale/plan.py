"""Plans the trainings of a scaling study: the points that fit, their seeds, and the total time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fullstride.data.dataset import DataSet
from fullstride.report.training_progress import duration
from fullstride.search.scale.grid import PointCost, ScalePoint, cross, rand_magnitude
from fullstride.search.settings import ScaleSettings
from fullstride.train.batches import recipe_in_epochs
from fullstride.train.recipes.choice import RecipeChoice, case_of
from fullstride.train.recipes.recipe import Recipe

LEAST_PASS = 8  # images of a pass on a GPU, where the passes of a step share a batch


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A length of training."""

    name: str  # also of its folder
    choice: RecipeChoice


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """One training of the plan."""

    point: str  # its name
    regime: str
    epochs: int
    seed: int
    seconds: float  # expected


@dataclass(frozen=True, kw_only=True)
class ScalePlan:
    """What will be trained."""

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
        return sum(each.seconds for each in self.trainings) + self.band_s


def regimes_of(settings: ScaleSettings, recipe: RecipeChoice) -> tuple[Regime, ...]:
    """The lengths of training; numbers are epochs of `recipe`."""
    if not settings.regimes:
        return (Regime(name="recipe", choice=recipe),)
    regimes = []
    for name in settings.regimes:
        if name.replace(".", "", 1).isdigit():
            choice = RecipeChoice(recipe.source, {**recipe.changes, "epochs": float(name)})
            regimes.append(Regime(name=f"{name}_epochs", choice=choice))
        else:
            regimes.append(Regime(name=name, choice=RecipeChoice(name, recipe.changes)))
    return tuple(regimes)


def recipe_of(point: ScalePoint, regime: Regime, data: DataSet, settings: ScaleSettings) -> Recipe:
    """The recipe of a point, whose regularisation may follow its width and resolution."""
    changes: dict[str, Any] = {**regime.choice.changes, "resolution": point.resolution}
    choice = RecipeChoice(regime.choice.source, changes)
    recipe = choice.resolve(case_of(data, width=point.width)).recipe
    if settings.slow_resolution and recipe.rand_layers and "rand_magnitude" not in changes:
        recipe = replace(recipe, rand_magnitude=rand_magnitude(point.resolution))
    return recipe


def epochs_of(recipe: Recipe, data: DataSet) -> int:
    """Epochs of the recipe on `data`; the last one may be partial."""
    return math.ceil(recipe_in_epochs(data, recipe).epochs)


def make_plan(
    costs: Sequence[PointCost],
    regimes: Sequence[Regime],
    data: DataSet,
    settings: ScaleSettings,
    *,
    memory_bytes: float | None,
    on_gpu: bool,
) -> ScalePlan:
    """Leave out what does not fit; of the rest the cross or all, three anchors with more seeds.

    With hours, the most expensive points are left out until the trainings of the others fit; what
    is left of the hours is for the band. Raises ValueError if nothing fits.
    """
    left_out: dict[str, str] = {}
    batch = recipe_of(costs[0].point, regimes[0], data, settings).batch_size
    images = min(batch, LEAST_PASS) if on_gpu else min(batch, len(data.train))
    for cost in costs:
        needed = cost.fixed_bytes + images * cost.image_bytes
        if settings.budget_ms is not None and cost.ms > settings.budget_ms:
            left_out[cost.name] = f"{cost.ms:.3g} ms are above the budget"
        elif memory_bytes is not None and needed > memory_bytes:
            left_out[cost.name] = f"training needs {needed / 2**30:.1f} GiB"
    fitting = [cost for cost in costs if cost.name not in left_out]
    if not fitting:
        name, reason = min(left_out.items(), key=lambda item: len(item[1]))
        raise ValueError(f"no point is left: {name}: {reason}; give more, or smaller networks")
    every = fitting
    limit = math.inf if settings.hours is None else 3600 * settings.hours
    trainings = trainings_of(fitting, regimes, data, settings)
    while sum(each.seconds for each in trainings) > limit:
        slowest = max(trainings, key=lambda each: each.seconds).point
        if len({each.point for each in trainings}) == 1:
            raise ValueError(
                f"--hours {settings.hours:g} is too little: {slowest} alone needs "
                f"{sum(each.seconds for each in trainings) / 3600:.2g} hours"
            )
        left_out[slowest] = f"there is no time for it within {settings.hours:g} hours"
        fitting = [cost for cost in fitting if cost.name != slowest]
        trainings = trainings_of(fitting, regimes, data, settings)
    begun = {each.point for each in trainings}
    rest = [cost for cost in fitting if cost.name not in begun]
    left_s = limit - sum(each.seconds for each in trainings)
    count = min(settings.band, len(rest))
    band_s = 0.0
    for regime in regimes:
        each_s = (training(cost, regime, 0, data, settings).seconds for cost in rest)
        band_s += sum(sorted(each_s, reverse=True)[:count])
    return ScalePlan(
        costs=tuple(fitting),
        beyond=tuple(cost for cost in every if cost not in fitting),
        left_out=left_out,
        trainings=tuple(trainings),
        band=count,
        band_s=min(band_s, left_s),
        seconds_left=min(left_s, 1e12),
        memory_known=memory_bytes is not None,
    )


def trainings_of(
    costs: Sequence[PointCost], regimes: Sequence[Regime], data: DataSet, settings: ScaleSettings
) -> list[PlannedTraining]:
    """Those that do not depend on the results of others."""
    middle = cross([cost.point for cost in costs])
    order = sorted((cost for cost in costs if cost.point in middle), key=training_ms)
    # The anchors are those of the cross, so that the whole grid repeats no others.
    repeated = {order[0].name, order[len(order) // 2].name, order[-1].name}
    chosen = costs if settings.full_grid else order
    return [
        training(cost, regime, seed, data, settings)
        for regime in regimes
        for cost in chosen
        for seed in range(settings.seeds if cost.name in repeated else 1)
    ]


def training_ms(cost: PointCost) -> float:
    return cost.training_ms


def training(
    cost: PointCost, regime: Regime, seed: int, data: DataSet, settings: ScaleSettings
) -> PlannedTraining:
    """A training with its expected seconds, of the training images and the validation split."""
    epochs = epochs_of(recipe_of(cost.point, regime, data, settings), data)
    epoch_ms = len(data.train) * cost.training_ms + len(data.val) * cost.ms
    return PlannedTraining(
        point=cost.name,
        regime=regime.name,
        epochs=epochs,
        seed=seed,
        seconds=epochs * epoch_ms / 1e3,
    )


def plan_lines(plan: ScalePlan) -> Iterator[str]:
    """The plan for people, with its total."""
    cost = {each.name: each for each in plan.costs}
    width = max(len(name) for name in cost)
    hours: dict[str, float] = {}
    for each in plan.trainings:
        hours[each.point] = hours.get(each.point, 0.0) + each.seconds / 3600
    yield f"{'network':{width}}  GMACs  M weights  ms/image  training ms/image  hours"
    for name in sorted(hours, key=lambda name: cost[name].ms):
        own = cost[name]
        yield (
            f"{name:{width}} {own.macs / 1e9:6.3g} {own.weights / 1e6:10.3g} {own.ms:9.3g} "
            f"{own.training_ms:18.3g} {hours[name]:6.2g}  {own.by}"
        )
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
