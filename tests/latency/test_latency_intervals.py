"""How uncertain an estimate is: derivatives, spreads of numbers, and what they enclose."""

from dataclasses import replace

import numpy as np
import pytest
from latency_spreads import ASSUMED, FULL_BATCH, fit_spreads, inside

from fullstride.latency.devices import find_operators, load_profile, profile_names
from fullstride.latency.fitting import PRIORS, Parameters, fit
from fullstride.latency.network_times import estimates
from fullstride.latency.roofline import (
    NORMAL_95,
    REST,
    Machine,
    bounds,
    prepare,
    sensitivities,
    times,
)

NAMES = ("resnet18", "resnet50", "mobilenetv2_100", "regnety_002", "convnext_tiny", "densenet121")
NETS = [find_operators(f"timm/{name}", 224) for name in NAMES]
EAGER = Machine(runtime="eager", peak_tflops=100, bandwidth_gb_s=1000)
ALL = tuple(PRIORS)
TRUE = {name: median for name, (median, _) in PRIORS.items()}


def work_of(runtime: str, batches=(1, 32, 512)):
    machine = replace(EAGER, runtime=runtime)
    cases = [(net, batch) for net in NETS for batch in batches]
    return prepare([net for net, _ in cases], [batch for _, batch in cases], machine)


@pytest.mark.parametrize("runtime", ["eager", "compiled", "tensorrt"])
def test_sensitivities_are_the_slopes_that_small_steps_show(runtime):
    work, step = work_of(runtime), 1e-4
    for place, name in enumerate(ALL):
        longer, shorter = (
            np.log(times(work, {**TRUE, name: TRUE[name] * np.exp(sign * step)}).total_s)
            for sign in (1, -1)
        )
        slope = (longer - shorter) / (2 * step)
        np.testing.assert_allclose(sensitivities(work, TRUE, ALL)[:, place], slope, atol=1e-6)


@pytest.mark.parametrize("runtime", ["eager", "compiled", "tensorrt"])
def test_a_device_whose_every_number_is_slower_by_a_share_is_slower_by_that_share(runtime):
    slopes = dict(zip(ALL, sensitivities(work_of(runtime), TRUE, ALL).T, strict=True))
    slower = [slope if name.endswith("_us") else -slope for name, slope in slopes.items()]
    whole = sum(slower) + slopes["group_channels"]  # which is no rate
    np.testing.assert_allclose(whole, 1, atol=1e-8)


def test_a_number_that_is_missing_gives_its_slope_to_the_wider_one():
    work = work_of("eager")
    few = {name: TRUE[name] for name in TRUE if name not in ("norm", "statistics", "gather")}
    one = sensitivities(work, few, ["elementwise"])[:, 0]
    same = {**few, **dict.fromkeys(("norm", "statistics", "gather"), few["elementwise"])}
    parts = sensitivities(work, same, ["elementwise", "norm", "statistics", "gather"])
    np.testing.assert_allclose(one, parts.sum(axis=1))


def test_bounds_of_one_uncertain_number_are_the_times_at_its_ends():
    work = work_of("eager")
    low, high = bounds(work, TRUE, {"host_us": 0.6})
    middle = times(work, TRUE).total_s
    for factor, sign in ((low, -1), (high, 1)):
        end = TRUE["host_us"] * np.exp(sign * NORMAL_95 * 0.6)
        np.testing.assert_allclose(middle * factor, times(work, {**TRUE, "host_us": end}).total_s)
    single = work.batch == 1
    assert (high[single] > 2).all()
    assert (high[work.batch == 512] < 1.01).all()


def test_bounds_of_what_no_number_explains_are_those_of_a_normal_distribution():
    low, high = bounds(work_of("eager"), TRUE, {REST: 0.1})
    np.testing.assert_allclose(high, np.exp(0.1 * NORMAL_95))
    np.testing.assert_allclose(low, 1 / high)


def planted(random: np.random.Generator, deviations: dict[str, float], families: int):
    """Times of families, each with numbers of its own; and the family of each."""
    nets, batches = [], []
    for _ in range(families):
        for place in random.choice(len(NETS), 4, replace=False):
            nets.append(NETS[place])
            batches.append(int(random.choice([64, 128, 256])))
    work = prepare(nets, batches, EAGER)
    family = np.repeat(np.arange(families), 4)
    seconds = np.empty(len(nets))
    for each in range(families):
        own = family == each
        numbers = {
            name: value * np.exp(random.normal(0, deviations.get(name, 0)))
            for name, value in TRUE.items()
        }
        seconds[own] = times(work.select(own), numbers).total_s
    return work, seconds, family


def test_spreads_are_large_for_the_number_that_differs_between_families():
    parameters = Parameters(FULL_BATCH, assumed=ASSUMED)
    work, seconds, family = planted(np.random.default_rng(0), {"depthwise": 0.6}, 60)
    off = np.log(seconds / times(work, TRUE).total_s)
    spreads = fit_spreads(sensitivities(work, TRUE, FULL_BATCH), off, family, parameters)
    assert 0.35 < spreads["depthwise"] < 0.75
    assert spreads["dense"] < 0.1
    assert spreads[REST] < 0.06
    assert {name: spreads[name] for name in ASSUMED} == {
        name: deviation for name, (_, deviation) in ASSUMED.items()
    }


def test_intervals_enclose_nine_of_ten_times_of_families_left_out():
    parameters = Parameters(FULL_BATCH, assumed=ASSUMED)
    differ = {"depthwise": 0.5, "dense": 0.2, "elementwise": 0.2, "convolution": 0.3}
    work, seconds, family = planted(np.random.default_rng(1), differ, 60)
    off = np.log(seconds / times(work, TRUE).total_s)
    assert 0.85 <= inside(work, TRUE, off, family, parameters).mean() <= 0.97


def test_assumed_numbers_are_not_fitted():
    priors = {**PRIORS, "elementwise": (0.8, 3.0)}
    parameters = Parameters(FULL_BATCH, priors, ASSUMED, max_share=1.0)
    work = work_of("eager", (256,))
    seconds = times(work, {**TRUE, "elementwise": 3.0}).total_s
    numbers = fit(work, seconds, parameters)
    assert {name: numbers[name] for name in ASSUMED} == {
        name: m for name, (m, _) in ASSUMED.items()
    }
    assert numbers["elementwise"] <= 1
    uncapped = fit(work, seconds, replace(parameters, max_share=9.0))
    assert uncapped["elementwise"] > 1.05


def test_no_profile_by_data_sheet_has_a_share_above_its_peak():
    for name in profile_names():
        numbers = load_profile(name).inference.numbers
        assert all(value <= 1 for key, value in numbers.items() if key in FULL_BATCH[:3]), name


def test_small_batches_have_wide_intervals_and_profiles_of_one_gpu_agree_on_them():
    net = find_operators("timm/resnet50", 224)
    rows = [estimates([net], load_profile(name), [1])[0] for name in ("rtx3090", "rtx3090-nchw")]
    for row in rows:
        assert row.high / row.low > 4
        assert row.unfitted == ("batches this small",)
    assert rows[0].low < rows[1].ms_per_image < rows[0].high
    (full,) = estimates([net], load_profile("rtx3090"), [256])
    assert full.high / full.low < 2
    assert not full.unfitted


def test_the_interval_follows_the_mix_of_operators():
    profile = load_profile("rtx4090-nchw")
    dense, depthwise = (find_operators(f"timm/{n}", 224) for n in ("vgg16", "convmixer_768_32"))
    rows = estimates([dense, depthwise], profile, [256, 256])
    widths = [row.high / row.low for row in rows]
    assert widths[1] > 1.3 * widths[0]


def test_a_profile_without_spreads_has_one_interval_for_all():
    profile = load_profile("rtx4090")
    fit_ = replace(profile.inference, spreads={}, low=0.8, high=1.3)
    rows = estimates(NETS, replace(profile, inference=fit_), [256] * len(NETS))
    for row in rows:
        assert row.low == pytest.approx(0.8 * row.ms_per_image)
        assert row.high == pytest.approx(1.3 * row.ms_per_image)
