"""Which points a scaling study has, what they cost, and which of them are trained."""

import math
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fullstride.latency.devices import load_profile
from fullstride.latency.estimator import estimate
from fullstride.measure.max_batch import predict
from fullstride.nets import zoo
from fullstride.nets.bundle import build
from fullstride.nets.families import resnet_rs
from fullstride.search.scale import plan as costs_module
from fullstride.search.scale.finished import Size
from fullstride.search.scale.plan import (
    BACKWARD,
    LAYERS,
    PointCost,
    ScaleJob,
    ScalePoint,
    band,
    centre,
    cross,
    grid,
    make_plan,
    plan_lines,
    point_costs,
    rand_magnitude,
    slow_resolution,
)
from fullstride.search.settings import ScaleSettings
from fullstride.train.recipes.choice import RecipeChoice

PAPER = ScaleSettings()
SMALL = dict(models=("genet_tiny",), widths=(0.5, 1.0), depths=(1.0, 2.0), resolutions=(16, 24))
DIGITS = RecipeChoice("digits", {"epochs": 2, "batch_size": 16})


def drain(steps):
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


@dataclass(frozen=True, kw_only=True, eq=False)
class JobOfBatch(ScaleJob):
    batch: int = 16  # in place of the recipe's


def costs_of(settings, *, classes=10, channels=1, batch=16) -> tuple[PointCost, ...]:
    data: Any = SimpleNamespace(classes=range(classes), channels=channels)
    job = JobOfBatch(folder=Path("unused"), data=data, settings=settings, batch=batch)
    return drain(point_costs(job.points, job))


def estimated(**changes) -> ScaleSettings:
    return ScaleSettings(**{**SMALL, "target": "rtx3090", **changes})


def job_of(data, settings):
    return ScaleJob(folder=Path("unused"), data=data, settings=settings, recipe=DIGITS)


def plan_of(data, settings=None):
    settings = settings or estimated()
    return make_plan(job_of(data, settings), costs_of(settings))


# ---- the grid


def test_the_papers_grid_has_175_points_and_a_cross_of_15():
    points = grid(PAPER)
    assert len(points) == len({point.name for point in points}) == 175
    middle = centre(points)
    assert middle == Size(1.0, 101.0, 224)
    by_hand = {
        size
        for size in (point.size for point in points)
        if sum(a != b for a, b in zip(size, middle, strict=True)) <= 1
    }
    assert {point.size for point in cross(points)} == by_hand
    assert len(by_hand) == 5 + 7 + 5 - 2


@pytest.mark.parametrize("layers", LAYERS)
def test_layers_of_a_resnet_rs_are_its_convolutions_up_to_the_papers_rounding(layers):
    spec = resnet_rs.of_layers(layers)
    convolutions = 2 + 3 * sum(stage.depth for stage in spec.stages)
    assert abs(convolutions - layers) <= 4
    assert [stage.width for stage in spec.stages] == [256, 512, 1024, 2048]


def test_the_networks_of_300_and_400_layers_have_the_papers_stages():
    depths = {n: [stage.depth for stage in resnet_rs.of_layers(n).stages] for n in (300, 400)}
    assert depths == {300: [4, 36, 54, 4], 400: [6, 48, 72, 6]}


def test_a_point_is_the_scaled_network_at_its_resolution():
    (point,) = grid(
        ScaleSettings(models=("genet_tiny",), widths=(2,), depths=(3,), resolutions=(24,))
    )
    expected = zoo.spec("genet_tiny").scaled(width=2, depth=3)
    assert point.spec(7, 1) == replace(expected, classes=7, in_channels=1, resolution=24)
    (point,) = grid(ScaleSettings(widths=(0.5,), depths=(101,), resolutions=(160,)))
    assert point.spec(1000, 3) == replace(
        zoo.spec("resnet_rs_101").scaled(width=0.5), resolution=160
    )


def test_other_families_have_multiples_of_their_own_resolution():
    points = grid(ScaleSettings(models=("genet_tiny",)))
    assert sorted({point.resolution for point in points}) == [16, 24, 32, 48, 64]
    assert sorted({point.depth for point in points}) == [0.5, 1, 2, 4]


def test_several_models_are_points_and_slow_resolutions_grow_half_as_fast():
    names = tuple(f"timm/efficientnet_b{number}" for number in (0, 1, 4))
    plain = grid(ScaleSettings(models=names))
    slow = grid(ScaleSettings(models=names, slow_resolution=True))
    assert [point.resolution for point in slow][:1] == [224]
    for own, reduced in zip(plain, slow, strict=True):
        half = 224 * math.sqrt(own.resolution / 224)
        assert abs(reduced.resolution - half) <= 4
    assert cross(slow) == slow
    assert slow_resolution(600) == 368


@pytest.mark.parametrize(("side", "expected"), [(224, 10), (232, 15), (320, 15), (328, 20)])
def test_magnitudes_of_efficientnet_rs_follow_the_resolution(side, expected):
    assert rand_magnitude(side) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(models=("timm/efficientnet_b0",), widths=(0.5,)), "cannot be scaled"),
        (dict(models=("resnet_rs_50",), depths=(77.0,)), "layers 26 50 101"),
        (dict(models=("genet_tiny",), slow_resolution=True), "EfficientNets"),
        (dict(models=("genet_tinny",)), "genet_tiny"),
        (
            dict(models=("tresnet_m", "timm/tresnet_m")),
            "several points have the name tresnet_m-224",
        ),
        (dict(models=("resnet_rs_50", "resnet_rs_101"), depths=(50.0, 101.0)), "leave one out"),
    ],
)
def test_a_grid_that_cannot_be_built_is_an_error_of_one_line(changes, message):
    with pytest.raises(ValueError, match=message):
        grid(ScaleSettings(**changes))


@pytest.mark.parametrize(
    "changes", [dict(widths=(0.0,)), dict(models=()), dict(widths=(1.0, 1.0)), dict(budget_ms=-1.0)]
)
def test_settings_that_fit_nothing_are_refused(changes):
    with pytest.raises(ValueError, match="--"):
        ScaleSettings(**changes)


# ---- what follows the cross


def test_the_band_is_the_points_nearest_to_the_predicted_front():
    sizes = [Size(w, d, r) for w, d, r in product((1, 2), (1, 2, 4), (8, 16))]
    ms = {size: size.width**2 * size.depth * size.resolution**2 for size in sizes}
    errors = {size: 50 / (size.depth * size.width**0.1 * size.resolution**0.5) for size in sizes}
    finished, rest = sizes[:3], sizes[3:]
    points = [ScalePoint(model="m", **size._asdict()) for size in rest]
    chosen = [point.size for point in band(points, finished, errors, ms, 4)]
    distances = {
        size: errors[size] - min(errors[other] for other in sizes if ms[other] <= ms[size])
        for size in rest
    }
    assert sum(distances[size] for size in chosen) == pytest.approx(
        sum(sorted(distances.values())[:4])
    )
    on_front = [size for size in rest if distances[size] == 0]
    (first, last) = (point.size for point in band(points, finished, errors, ms, 2))
    assert {first, last} <= set(on_front)
    assert len(on_front) <= 2 or ms[last] == max(ms[size] for size in on_front)


# ---- costs


def test_estimated_costs_are_those_of_the_built_networks():
    settings = estimated(widths=(0.5,), depths=(2.0,), resolutions=(24,))
    (cost,) = costs_of(settings)
    net = build(grid(settings)[0].spec(10, 1))
    profile = load_profile("rtx3090")
    assert cost.ms == pytest.approx(estimate(net, profile, 1, 24, in_channels=1).ms_per_image)
    training = estimate(net, profile, 64, 24, training=True, in_channels=1)
    assert cost.training_ms == pytest.approx(training.ms_per_image)
    (without,) = costs_of(replace(settings, target="v100-fp16"))
    inference = estimate(net, load_profile("v100-fp16"), 64, 24, in_channels=1)
    assert without.training_ms == pytest.approx(BACKWARD * inference.ms_per_image)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet_rs_50", "genet_normal"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_the_memory_of_a_step_is_that_of_its_saved_tensors(name, precision):
    where = "cpu" if precision == "float32" else "cuda"
    settings = ScaleSettings(
        models=(name,), widths=(0.5,), depths=(50.0 if "rs" in name else 1.0,), resolutions=(64,),
        target="here" if where == "cpu" else "rtx3090",
    )  # fmt: skip
    (cost,) = costs_of(settings, classes=1000, channels=3, batch=2)
    with torch.device("meta"):
        net = build(grid(settings)[0].spec(1000, 3))
    exact = predict(net, 2**40, 64, precision, 3, device=where)
    assert cost.image_bytes == pytest.approx(exact.bytes_per_image, rel=0.08)
    assert cost.fixed_bytes == pytest.approx(exact.fixed_bytes, rel=0.08)


def test_networks_too_slow_to_measure_are_scaled_by_their_macs(monkeypatch):
    measured = []

    def times(spec, batch, step_images, device):
        measured.append(spec)
        return 10.0, 100.0

    monkeypatch.setattr(costs_module, "network_times", times)
    monkeypatch.setattr(costs_module, "MOST_CALL_S", 0.9)
    costs = costs_of(ScaleSettings(**{**SMALL, "resolutions": (16, 64)}), batch=8)
    smallest = min(costs, key=lambda cost: cost.macs)
    assert len(measured) == sum(cost.by == "measured" for cost in costs) < len(costs)
    last = max((cost for cost in costs if cost.by == "measured"), key=lambda cost: cost.macs)
    assert smallest.by == "measured"
    for cost in costs:
        if cost.by != "measured":
            assert cost.ms == pytest.approx(10.0 * cost.macs / last.macs)
            assert 0.8 * cost.macs / last.macs > 0.9


# ---- the plan


def test_three_anchors_are_trained_with_two_seeds_and_the_total_is_the_sum(few_digits):
    plan = plan_of(few_digits)
    seeds = {}
    for each in plan.trainings:
        seeds.setdefault(each.point, []).append(each.seed)
    assert sorted(map(len, seeds.values())) == [1, 2, 2, 2]
    cost = {each.name: each for each in plan.costs}
    by_hand = sum(
        2 * (len(few_digits.train) * cost[t.point].training_ms
             + len(few_digits.val) * cost[t.point].ms) / 1e3
        for t in plan.trainings
    )  # fmt: skip
    assert plan.total_s - plan.band_s == pytest.approx(by_hand)
    networks, *lines = plan_lines(plan)
    assert networks.row_count == 4
    assert "7 trainings" in lines[-1]
    assert len(plan_of(few_digits, estimated(full_grid=True)).trainings) == 8 + 3


def test_points_above_the_budget_or_the_memory_are_left_out(few_digits):
    costs = sorted(costs_of(estimated()), key=lambda cost: cost.ms)
    limit = (costs[3].ms + costs[4].ms) / 2
    plan = plan_of(few_digits, estimated(budget_ms=limit))
    assert {each.name for each in plan.costs} == {each.name for each in costs[:4]}
    by_memory = sorted(costs, key=lambda cost: cost.fixed_bytes + 8 * cost.image_bytes)
    enough = by_memory[2].fixed_bytes + 8 * by_memory[2].image_bytes
    plan = plan_of(few_digits, estimated(memory_gib=enough / 2**30))
    assert {each.name for each in plan.costs} == {each.name for each in by_memory[:3]}
    as_rate = plan_of(few_digits, estimated(images_per_s=1e3 / limit))
    assert as_rate.costs == plan_of(few_digits, estimated(budget_ms=limit)).costs
    with pytest.raises(ValueError, match="no point is left"):
        plan_of(few_digits, estimated(budget_ms=1e-9))


@pytest.mark.parametrize("full_grid", [False, True])
def test_where_the_middle_of_a_grid_is_left_out_the_point_nearest_to_it_has_the_cross(
    few_digits, full_grid
):
    """The largest two points of each axis are above the budget, except for three single steps."""
    kept = [(1, 1, 32), (2, 1, 32), (1, 2, 32), (1, 1, 64)]
    settings = ScaleSettings(
        models=("genet_tiny",), widths=(1, 2), depths=(1, 2), resolutions=(32, 64),
        target="rtx3090", budget_ms=1.0, full_grid=full_grid,
    )  # fmt: skip
    costs = [
        replace(each, ms=0.5 if each.point.size in kept else 2.0) for each in costs_of(settings)
    ]
    plan = make_plan(job_of(few_digits, settings), tuple(costs))
    points = {each.name: each.point for each in plan.costs}
    assert {point.size for point in points.values()} == set(kept)
    assert centre([*points.values()]) in kept
    trained = {points[each.point].size for each in plan.trainings}
    assert trained >= {centre([*points.values()])}
    assert trained == set(kept) or not full_grid


def test_with_few_hours_the_most_expensive_points_are_left_out(few_digits):
    whole = plan_of(few_digits)
    first_s = whole.total_s - whole.band_s
    plan = plan_of(few_digits, estimated(hours=0.7 * first_s / 3600))
    assert plan.total_s <= 0.7 * first_s
    slowest = max(whole.trainings, key=lambda each: each.seconds).point
    assert plan.left_out[slowest].kind == "time"
    assert "no time" in plan.left_out[slowest].reason
    assert slowest in {each.name for each in plan.beyond}
    with pytest.raises(ValueError, match="too little"):
        plan_of(few_digits, estimated(hours=1e-9))


def test_regimes_are_recipes_or_epochs_of_the_recipe(few_digits):
    job = job_of(few_digits, estimated(regimes=("3", "scaling_350")))
    three, long = job.regimes
    narrow, wide = (ScalePoint(model="genet_tiny", width=w, depth=1, resolution=side)
                    for w, side in ((0.5, 128), (2.0, 320)))  # fmt: skip
    assert job.recipe_of(narrow, three).epochs == 3
    one, other = (job.recipe_of(point, long) for point in (narrow, wide))
    # Table 12 and appendix E of arXiv:2103.07579
    assert (one.dropout, one.rand_magnitude, one.drop_path) == (0.1, 10, 0.0)
    assert (other.dropout, other.rand_magnitude, other.drop_path) == (0.75, 15, 0.2)
    slow = replace(job, settings=replace(job.settings, slow_resolution=True))
    assert slow.recipe_of(narrow, long).rand_magnitude == 10
    assert slow.recipe_of(replace(wide, resolution=448), long).rand_magnitude == 20


@pytest.mark.parametrize(
    ("regimes", "message"),
    [
        (("sub/short.json",), "--recipe sub/short.json and numbers of epochs"),
        (("/short.json",), "give names of recipes"),
        (("²",), "no recipe named '²'"),
        (("scaling_10",), "--recipe digits is for numbers of epochs: leave it out"),
    ],
)
def test_a_regime_that_is_a_path_or_leaves_no_use_to_the_recipe_is_refused(
    few_digits, regimes, message
):
    with pytest.raises(ValueError, match=message):
        job_of(few_digits, estimated(regimes=regimes)).check()
