"""Times of the candidates of `fit`: measured as files, estimated elsewhere, against a budget."""

import io
import math
import time
from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise, product, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from generators import drain
from rich.console import Console

from fullstride.autofit import times as candidate_times
from fullstride.autofit.budget import (
    MOST_ROWS,
    CandidateTime,
    CandidateTimes,
    FitJob,
    budget_note,
    budget_table,
    fastest_of,
    timed_candidates,
    within_budget,
)
from fullstride.autofit.candidates import (
    MOST_OF_FAMILY,
    MOST_TRIED,
    Candidate,
    Pictures,
    in_order,
    list_candidates,
    shortlist,
)
from fullstride.autofit.fit import candidates_line, compare_with_budget
from fullstride.autofit.settings import FitSettings
from fullstride.autofit.times import (
    CANDIDATE_TIMES,
    FEWEST_TIMED,
    FEWEST_TRIED,
    corrected,
    estimate_candidates,
    measured_in_turn,
    most_tried,
    time_candidates,
)
from fullstride.data.dataset import open_data
from fullstride.deploy.choose_form import (
    TRACED_BATCH,
    UntrainedFiles,
    data_formats,
    latencies,
    runnable,
    untrained_files,
)
from fullstride.deploy.formats import FORMATS
from fullstride.deploy.formats.base import missing_package
from fullstride.io.console import count_of
from fullstride.latency.devices import CPU, load_profile
from fullstride.latency.estimator import estimate
from fullstride.measure.budget import Budget
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.weights import hub
from fullstride.report import plots, scatter

MS = Budget(ms_per_image=1.0)
DIGITS = open_data("digits")


ONE = dict(formats=("onnx",), precisions=("fp32",))


def fixed(ms, candidate="a-32", format="onnx", precision="fp32", **fields):
    return CandidateTime(candidate=candidate, format=format, precision=precision, ms=ms, **fields)


def candidates(*sides, model="genet_tiny"):
    return [Candidate(model=model, resolution=side, family="genet") for side in sides]


def job_of(folder, budget=MS, channels=1, **settings):
    settings = FitSettings(budget_ms=budget.ms_per_image, call_batch=budget.batch, **settings)
    return FitJob(folder=folder, data=replace(DIGITS, channels=channels), settings=settings)


def times_of(candidates, *arguments, **settings):
    """The stage that times the candidates."""
    return time_candidates(job_of(*arguments, **settings), candidates)


@pytest.fixture
def fake_times(monkeypatch):
    """Lets each candidate take `ms(candidate)` without measuring, and counts the measurements."""
    names = []

    def install(ms):
        def time_one(candidate, job, scratch, earlier, labels, others):
            names.append(candidate.name)
            return (fixed(ms(candidate), candidate.name),), earlier

        monkeypatch.setattr(candidate_times, "time_one", time_one)
        return names

    return install


def test_a_stopped_measurement_goes_on_after_the_stored_candidates(tmp_path, fake_times):
    names = fake_times(lambda candidate: candidate.resolution / 64)
    stage = times_of(candidates(32, 64, 128), tmp_path, **ONE)
    next(stage)
    next(stage)
    stage.close()
    assert names == ["genet_tiny-32", "genet_tiny-64"]
    _, times = drain(times_of(candidates(32, 64, 128), tmp_path, **ONE))
    assert names == ["genet_tiny-32", "genet_tiny-64", "genet_tiny-128"]
    assert [each.ms for each in times] == [0.5, 1.0, 2.0]
    left = tmp_path / "times" / ".files.scratch.999999999.new"  # by a process that was killed
    left.mkdir()
    _, again = drain(times_of(candidates(32, 64, 128), tmp_path, **ONE))
    assert again == times
    assert not left.exists()


def test_what_noise_may_have_put_beyond_the_budget_is_measured_once_more(tmp_path, fake_times):
    slow = iter((1.2, 1.4, 1.6, 0.9, 1.5))  # 32, 48 and 64, then the first two again
    names = fake_times(lambda candidate: next(slow))
    three = candidates(32, 48, 64)
    for _ in range(2):
        _, times = drain(times_of(three, tmp_path, **ONE))
        assert names == [each.name for each in (*three, *three[:2])]
        assert [each.ms for each in times] == [0.9, 1.4, 1.6]
        assert [each.measurements for each in times] == [2, 2, 1]


def test_a_larger_budget_measures_again_only_where_it_asks_for_other_formats(tmp_path, fake_times):
    names = fake_times(lambda candidate: candidate.resolution / 64)
    both, how = candidates(32, 640), dict(precisions=("fp32", "int8"), formats=("onnx",))
    for ms, expected in ((0.1, both), (0.05, []), (1.0, both[:1])):
        names.clear()
        drain(times_of(both, tmp_path, Budget(ms_per_image=ms), **how))
        assert names == [each.name for each in expected]


def test_a_resize_policy_before_the_network_does_not_change_its_time(tmp_path, fake_times):
    names = fake_times(lambda candidate: 1.0 + len(names))
    both = [*candidates(32), *(replace(each, fit="squish") for each in candidates(32))]
    _, times = drain(times_of(both, tmp_path))
    assert len(names) == 1
    assert [each.candidate for each in times] == [each.name for each in both]
    assert len({each.ms for each in times}) == 1


def test_files_are_timed_and_removed_and_one_that_cannot_be_built_fails_in_one_line(tmp_path):
    both = [Candidate(model="genet_tinny", resolution=32), *candidates(32)]
    how = ONE
    _, (failure, time) = drain(times_of(both, tmp_path, **how))
    assert (time.candidate, time.format, time.precision) == ("genet_tiny-32", "onnx", "fp32")
    assert 0 < time.low <= time.high
    assert failure.ms is None
    assert "genet_tiny" in failure.failure
    assert "\n" not in failure.failure
    stored = {each.stem: CANDIDATE_TIMES.load(each) for each in (tmp_path / "times").iterdir()}
    assert stored == {"genet_tiny-32": (time,), "genet_tinny-32": (failure,)}
    with pytest.raises(ValueError, match="genet_tinny"):
        drain(times_of(both[:1], tmp_path, **how))


@pytest.mark.parametrize(
    ("first_ms", "later_ms", "in_all"),
    [(3.9, 3.9, True), (4.1, 4.1, False), (5.9, 3.9, True), (6.1, 3.9, False)],
)
def test_only_candidates_near_the_budget_are_timed_in_all_formats_and_noise_is_timed_again(
    tmp_path, monkeypatch, first_ms, later_ms, in_all
):
    monkeypatch.setattr(UntrainedFiles, "open", lambda *_, **__: None)
    ms = chain([first_ms], repeat(later_ms))

    def timed(candidate, models, *_):
        own_ms = next(ms)
        return {label: fixed(own_ms, candidate.name, *label) for label in models}

    monkeypatch.setattr(candidate_times, "timed", timed)
    _, times = drain(times_of(candidates(32), tmp_path))
    assert len(times) == (len(runnable()) if in_all else 1)


def test_programs_and_precisions_that_gain_nothing_are_timed_only_by_name():
    default = runnable()
    assert {name for name, _ in default} == set(data_formats())
    assert not {"aoti", "pt2"} & {name for name, _ in default}
    assert ("openvino", "fp16") not in default
    assert runnable(("openvino",), ("fp16",)) == (("openvino", "fp16"),)
    assert runnable(("pt2",), ("fp32",)) == (("pt2", "fp32"),)
    for formats, precisions in ((("onxx",), ()), ((), ("fp8",)), (("onnx",), ("bf16",))):
        with pytest.raises(ValueError, match="use|choose"):
            runnable(formats, precisions)


def test_without_a_runtime_the_line_says_what_to_install(monkeypatch):
    for name, each in FORMATS.items():
        absent = replace(each, missing=lambda: str(missing_package("onnxruntime", extra="")))
        monkeypatch.setitem(FORMATS, name, absent)
    with pytest.raises(ValueError, match="pip install onnxruntime"):
        runnable()


def test_of_many_candidates_a_shortlist_is_measured_and_the_others_have_a_reason(
    tmp_path, fake_times
):
    """The fake machine is 3 times as fast as the model for small networks, 5 times for large."""
    many = [
        Candidate(model=model, resolution=side, family=model.split("_")[0])
        for model, side in product(("genet_tiny", "resnet_rs_tiny"), range(32, 384, 16))
    ]
    names = fake_times(lambda candidate: (candidate.resolution / 128) ** 2)
    lines, times = drain(times_of(many, tmp_path, **ONE))
    counts = Counter(names)
    tried = {each.candidate for each in times if not each.left_out}
    assert len(tried) <= MOST_TRIED
    assert tried <= {*names}
    assert len({*names} - tried) <= 3  # they correct the estimates
    near = {name for name in counts if name.endswith("-144")}  # 1.27 ms, which noise may be
    assert {name for name in counts if counts[name] > 1} == near
    sides = {each.resolution for each in many if each.name in tried}
    assert {96, 112, 128, 144, 160} <= sides
    assert {name.split("_")[0] for name in tried} == {"genet", "resnet"}
    assert {each.candidate for each in times if each.ms is not None} == set(names)
    left_out = {each.candidate for each in times if each.left_out}
    assert left_out == {each.name for each in many} - tried
    assert f"{len(tried)} of {len(many)}" in " ".join(lines)
    again, same = drain(times_of(many, tmp_path, **ONE))
    assert Counter(names) == counts
    assert same == times


def test_networks_that_correct_the_estimates_are_timed_in_one_form_and_one_in_all(
    tmp_path, monkeypatch
):
    """Other forms take a third of the time, so slower candidates are tried than by the first."""
    many = [
        Candidate(model="genet_tiny", resolution=side, family="g") for side in range(32, 384, 8)
    ]
    counts = []

    def time_one(candidate, job, scratch, earlier, labels, others):
        counts.append((candidate.resolution, len(labels)))
        ms = (candidate.resolution / 128) ** 2
        first = fixed(ms, candidate.name)
        other = replace(first, format="openvino", ms=ms / 3)
        return (first, other)[: len(labels)], earlier

    monkeypatch.setattr(candidate_times, "time_one", time_one)
    _, times = drain(times_of(many, tmp_path))
    sides, forms = zip(*counts, strict=True)
    assert sides[0] == sorted(sides[:3])[1]
    assert forms[0] > 1
    assert forms[1:3] == (1, 1)
    assert min(forms[3:MOST_TRIED]) > 1
    tried = {each.candidate: each.ms for each in times if not each.left_out and each.ms}
    assert len([ms for ms in tried.values() if 0.5 < ms <= 1]) >= 7  # of 160 to 216 pixels


def slow_candidates(fake_times) -> list[Candidate]:
    """Many candidates, whose measurements take a tenth of a second each."""

    def slow(candidate):
        time.sleep(0.1)
        return (candidate.resolution / 128) ** 2

    fake_times(slow)
    return [
        Candidate(model="genet_tiny", resolution=side, family="g") for side in range(32, 384, 8)
    ]


def test_with_little_time_few_candidates_are_tried_at_each_share_of_the_budget(
    tmp_path, fake_times
):
    many = slow_candidates(fake_times)
    _, times = drain(times_of(many, tmp_path, minutes=1 / 4, **ONE))
    tried = {each.candidate: each.ms for each in times if not each.left_out}
    assert len(tried) == FEWEST_TRIED  # a fifth of 15 s, of 0.5 s each
    assert min(tried.values()) == min(each.ms for each in times if each.ms)
    assert any(0.5 < ms <= 1 for ms in tried.values())
    assert any(1 < ms <= 2 for ms in tried.values())
    assert most_tried(100.0, 1.0) == MOST_TRIED
    assert MOST_TRIED > most_tried(None, 1.0) > most_tried(None, 100.0) == FEWEST_TRIED
    _, again = drain(times_of(many, tmp_path, minutes=1 / 4, **ONE))  # those that are stored
    assert {each.candidate for each in again if not each.left_out} == {*tried}


def test_three_of_the_shortlist_are_measured_even_if_the_time_is_over(tmp_path, fake_times):
    many = slow_candidates(fake_times)
    lines, times = drain(times_of(many, tmp_path, minutes=1e-3, **ONE))
    assert sum(not each.left_out for each in times) == FEWEST_TIMED
    assert f"{FEWEST_TRIED - FEWEST_TIMED} of them not tried" in " ".join(lines)


@pytest.mark.parametrize(("least_ms", "forms"), [(0.1, 1), (2.0, 2)])
def test_with_little_time_the_fastest_candidate_that_fits_is_timed_in_its_first_form_alone(
    least_ms, forms, tmp_path, monkeypatch
):
    counts = dict[str, int]()

    def time_one(candidate, job, scratch, earlier, labels, others):
        counts[candidate.name] = len(labels)
        time.sleep(0.02)  # so that few are tried, also on a fast machine
        ms = least_ms * (candidate.resolution / 32) ** 2
        return (fixed(ms, candidate.name),), earlier

    monkeypatch.setattr(candidate_times, "time_one", time_one)
    many = candidates(*range(32, 384, 8))
    drain(times_of(many, tmp_path, minutes=1e-3, formats=("onnx",), precisions=("fp32", "int8")))
    assert counts[many[0].name] == forms


def test_no_candidate_is_begun_that_would_end_late(tmp_path, monkeypatch):
    clock = iter(range(0, 10**6, 4))  # of calls
    monkeypatch.setattr(candidate_times.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(candidate_times, "time_one", lambda c, *_: ((fixed(0.1, c.name),), None))
    stage = measured_in_turn(
        candidates(32, 40, 48, 56, 64), job_of(tmp_path), {}, {}, until=25.0, fewest=1
    )
    lines, times = drain(stage)
    assert len(times) == len(lines) == 3  # the fourth would begin at 32


def test_the_fastest_candidate_is_measured_first_and_then_the_most_promising_of_each_budget():
    top1 = {"fast": 60.0, "good": 80.0, "best": 85.0, "slow": 90.0, "slower": 95.0}
    listed = [Candidate(model=name, resolution=224, top1=top1[name], family=name) for name in top1]
    ms = dict(zip((each.name for each in listed), (0.1, 0.4, 1.0, 3.0, 2.0), strict=True))
    budgets = [Budget(ms_per_image=1.0), Budget(ms_per_image=0.5)]
    names = [each.model for each in in_order([*reversed(listed)], ms, budgets)]
    assert names == ["fast", "best", "good", "slower", "slow"]


def test_estimates_are_corrected_by_measured_times_and_interpolated_between_them():
    ms = dict(a=1.0, b=2.0, c=4.0, d=16.0, e=32.0)
    times = corrected(ms, dict(a=3.0, d=16.0))
    assert times["a"] == pytest.approx(3)
    assert times["d"] == pytest.approx(16)
    assert times["c"] == pytest.approx(4 * math.sqrt(3))  # half way, by the logarithm
    assert times["e"] == pytest.approx(32)
    assert corrected(ms, {}) == ms


def test_of_unknown_accuracy_the_nearest_to_the_budget_and_the_fastest_are_tried():
    many = [Candidate(model="genet_tiny", resolution=side, family="g") for side in range(32, 200)]
    many += [Candidate(model="other", resolution=side, family="o") for side in (32, 64)]
    ms = {each.name: each.resolution / 100 for each in many}
    ms["other-32"], ms["other-64"] = 20.0, 30.0
    chosen = shortlist(many, ms, MS, 8)
    assert len(chosen) == 8
    assert {"genet_tiny-32", "genet_tiny-100", "other-32"} <= {each.name for each in chosen}
    assert [*chosen] == [each for each in many if each in chosen]


@pytest.mark.parametrize(("side", "chosen"), [(224, "large-224"), (112, "small-224")])
def test_a_published_accuracy_is_expected_less_at_a_lower_resolution(side, chosen):
    """81.5 % at 224 pixels is less than 80 % at 112: two points for each halving."""
    rows = (("large", side, 81.5), ("small", 224, 80.0), ("fastest", 64, 60.0))
    many = [
        Candidate(model=model, resolution=side, top1=top1, top1_resolution=224, family=model)
        for model, side, top1 in rows
    ]
    ms = {each.name: 0.9 for each in many} | {"fastest-64": 0.1}
    assert [each.name for each in shortlist(many, ms, MS, 2)] == [chosen, "fastest-64"]


@pytest.fixture(scope="module")
def released():
    """All candidates with released weights of the package's table, for photographs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "is_reachable", lambda: True)
        return drain(list_candidates(Pictures(classes=10, channels=3, side=300)))[1]


@pytest.mark.parametrize(
    ("profile", "ms_per_image"), [("rtx4090-compiled", 0.15), ("cpu", 8.0), ("cpu", 20.0)]
)
def test_of_released_networks_the_best_known_are_tried_and_no_family_displaces_others(
    released, profile, ms_per_image
):
    """Within the budget is the most accurate network that the table and the estimates know."""
    device = CPU if profile == "cpu" else load_profile(profile)
    budget = Budget(ms_per_image=ms_per_image)
    calls = Budget(ms_per_image=ms_per_image, batch=1 if profile == "cpu" else 64)
    rows = estimate_candidates(released, device, job_of(Path("unused"), calls, channels=3))
    ms = {name: row.ms_per_image for name, row in rows.items()}
    chosen = shortlist(released, ms, budget)
    families = Counter(each.family for each in chosen)
    assert len(chosen) == MOST_TRIED
    assert max(families.values()) <= MOST_OF_FAMILY * MOST_TRIED
    assert "hgnet" in families
    assert "convnext" in families or ms_per_image == 8.0  # the smallest one takes longer
    inside = [each for each in released if ms[each.name] <= ms_per_image]
    usual = [each for each in inside if each.resolution >= each.top1_resolution]
    best = max(usual, key=lambda each: each.top1)
    tried = [each for each in chosen if ms[each.name] <= ms_per_image]
    assert max(each.top1 for each in tried) >= best.top1
    shares = [ms[each.name] / ms_per_image for each in chosen]
    assert sum(share > 1 for share in shares) >= 5
    assert sum(share <= 0.5 for share in shares) >= 4


def test_of_hundreds_that_fit_elsewhere_some_dozens_reach_the_plan(released, tmp_path):
    budget = Budget(ms_per_image=1.0, batch=64)
    how = dict(budget=budget, channels=3, target="rtx4090-compiled")
    lines, times = drain(times_of(released, tmp_path, **how))
    inside = {each.candidate for each in within_budget(times, budget)}
    chosen = fits(released, times, budget).affordable
    assert len(inside) > 300
    assert len(chosen) == MOST_TRIED
    assert {each.candidate for each in times if each.left_out} == inside - {c.name for c in chosen}
    assert f"{MOST_TRIED} of the {len(inside)}" in " ".join(lines)
    few = [each for each in released if each.name in inside][:MOST_TRIED]
    assert not any(each.left_out for each in drain(times_of(few, tmp_path, **how))[1])


def test_times_elsewhere_are_the_estimates_of_the_network_of_the_data(tmp_path):
    profile, batch = load_profile("rtx4090"), 8
    each = Candidate(model="genet_tiny", resolution=64, width=2.0)
    unknown = Candidate(model="genet_tinny", resolution=64)
    budget = Budget(ms_per_image=1.0, batch=batch)
    _, (time, failure) = drain(times_of([each, unknown], tmp_path, budget, target="rtx4090"))
    net = zoo.create("genet_tiny", classes=10, in_channels=1, width=2.0)
    expected = estimate(net, profile, batch, 64, in_channels=1)
    assert time.ms == pytest.approx(expected.ms_per_image)
    assert (time.low, time.high) == pytest.approx((expected.low, expected.high))
    assert (time.format, time.precision, time.measured) == ("", "fp16", False)
    assert failure.failure
    with pytest.raises(ValueError, match="rtx4090"):
        drain(times_of([each], tmp_path, budget, target="rtx4090", precisions=("int8",)))


def test_a_measured_time_fits_itself_and_an_estimate_by_its_upper_end_or_its_middle():
    measured = fixed(0.9, low=0.8, high=1.2)
    estimated = replace(measured, candidate="b-32", measured=False)
    late, failure = fixed(1.1, "c-32"), fixed(None, "d-32")
    times = [failure, late, estimated, measured]
    assert within_budget(times, MS) == (measured,)
    assert set(within_budget(times, MS, maybe=True)) == {measured, estimated}


def test_lines_count_one_thing_in_the_singular():
    (one,), two = candidates(32), candidates(32, 64)
    assert candidates_line([one]) == ["1 candidate: 1 network of genet at 32 pixels"]
    assert candidates_line(two) == ["2 candidates: 1 network of genet at 32, 64 pixels"]
    assert budget_note(fits([one], [fixed(0.5, one.name)])).startswith("the candidate runs within")
    counts = count_of(1, "class"), count_of(2, "class"), count_of(1200, "step"), count_of(0, "pass")
    assert counts == ("1 class", "2 classes", "1,200 steps", "0 passes")


def test_the_fastest_format_of_each_candidate_stands_for_it():
    fast = fixed(0.5, precision="int8")
    assert fastest_of([fixed(0.9), fast, fixed(None, "b-32")]) == {"a-32": fast}


def test_where_nothing_fits_the_fastest_and_its_budget_are_named():
    both = candidates(32, 64)
    times = [fixed(1.234, "genet_tiny-32"), fixed(2.0, "genet_tiny-64")]
    with pytest.raises(ValueError, match=r"32 x 32.*1\.23 ms.*--budget-ms 1\.4") as error:
        assert fits(both, times).affordable
    assert "\n" not in str(error.value)
    assert fits(both, times, Budget(ms_per_image=1.4)).affordable == (both[0],)


@pytest.mark.parametrize(
    ("load", "high", "words"),
    [
        (11.2, 1.2, "the machine is busy (a load of 11.2 on 2 cores), so run it again when it is"),
        (
            1.9,
            1.6,
            "the machine is busy (the same call took 1.10 to 1.60 ms), so run it again when",
        ),
        (1.9, 1.2, ""),
    ],
)
def test_on_a_busy_machine_nothing_fits_until_it_is_measured_again(
    tmp_path, monkeypatch, load, high, words
):
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    job = FitJob(folder=tmp_path, data=DIGITS, settings=FitSettings(budget_ms=1.0))
    files = [tmp_path / "times.json", tmp_path / "times" / "a.json", tmp_path / "data.json"]
    for path in files:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    times = (fixed(1.234, "genet_tiny-32", low=1.1, high=high),)
    done = {"candidates": tuple(candidates(32)), "times": times}
    with pytest.raises(ValueError, match=r"^nothing fits .* use --budget-ms 1\.4 or more") as error:
        drain(compare_with_budget(job, done))
    assert words in str(error.value)
    assert ("busy" in str(error.value)) == bool(words)
    assert [path.exists() for path in files] == [not words, not words, True]
    target = replace(job, settings=FitSettings(budget_ms=0.01, target="rtx4090"))
    with pytest.raises(ValueError, match=r"^nothing fits [^;]*; use --budget-ms"):
        drain(compare_with_budget(target, done))


def test_of_several_budgets_the_smallest_is_named_if_nothing_fits(tmp_path):
    """A user who heard of the larger one would raise it, and then hear of the smaller one."""
    job = FitJob(folder=tmp_path, data=DIGITS, settings=FitSettings(budget_ms=(1, 3, 100)))
    done = {"candidates": tuple(candidates(32)), "times": (fixed(5.28, "genet_tiny-32"),)}
    with pytest.raises(ValueError, match=r"^nothing fits 1 ms .* use --budget-ms 5\.3 or more"):
        drain(compare_with_budget(job, done))


def fits(candidates, times, budget=MS, *, maybe=False):
    return CandidateTimes(
        candidates=tuple(candidates), times=tuple(times), budget=budget, maybe=maybe
    )


def figure_of(of):
    return scatter.budget_figure(timed_candidates(of), of.budget)


def test_half_and_twice_the_budget_are_counted_and_a_loose_budget_does_not_bind():
    both = candidates(32, 64)
    times = [fixed(0.4, "genet_tiny-32"), fixed(1.5, "genet_tiny-64")]
    note = budget_note(fits(both, times))
    assert note.startswith("1 of 2")
    assert "1 within half" in note
    assert "2 within twice" in note
    assert "does not bind" in budget_note(fits(both, times, Budget(ms_per_image=1.5)))


def text_of(table):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_what_the_budget_buys_is_a_table_and_a_picture():
    """One candidate within half the budget, by int8; one within it, one in twice, one above."""
    many = [replace(each, top1=70.25) for each in candidates(32, 64, 96, 128, 160)]
    times = [
        fixed(0.4 + number**2, each.name, low=0.39 + number**2, high=0.42 + number**2)
        for number, each in enumerate(many[:3])
    ]
    times += [fixed(0.3, "genet_tiny-32", precision="int8"), fixed(0.9, "genet_tiny-128")]
    times += [fixed(None, "genet_tiny-160", failure="it cannot be exported")]
    lines = text_of(budget_table(fits(many, times))).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [f"genet_tiny-{n}" for n in (32, 128, 64, 96)]
    assert "0.300 " in lines[1]
    assert "half of the budget" in lines[1]
    assert "twice" in lines[3]
    assert "budget" not in lines[4]
    picture = plots.svg(figure_of(fits(many, times)), "times")
    for words in (
        "half of the budget: 1",
        ">the budget: 1",
        "twice the budget: 1",
        "more: 1",
        "90 % ",
    ):
        assert words in picture
    assert "genet_tiny-160" not in picture
    with pytest.raises(ValueError, match="time"):
        figure_of(fits(many, times[-1:]))


@pytest.mark.parametrize("budget_ms", [1e3, 1e6, 1e9, 1e15])
def test_the_picture_of_a_loose_budget_has_an_axis_that_can_be_read(budget_ms):
    times = [fixed(0.08, "genet_tiny-32"), fixed(0.1, "genet_tiny-64")]
    budget = Budget(ms_per_image=budget_ms)
    figure = figure_of(fits(candidates(32, 64), times, budget))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    boxes = [
        label.get_window_extent()
        for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        if low <= tick <= high
    ]
    assert len(boxes) >= 3
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_of_hundreds_of_candidates_those_near_the_budget_have_a_line():
    many = candidates(*range(32, 332))
    times = [fixed(each.resolution / 200, each.name) for each in many]
    rows = timed_candidates(fits(many, times))
    assert len(rows) == MOST_ROWS
    assert "genet_tiny-200" in [row.name for row in rows]
    assert [row.ms for row in rows] == sorted(row.ms for row in rows)


def test_an_estimate_counts_by_its_upper_end_in_the_picture_unless_its_middle_may():
    time = fixed(0.9, "genet_tiny-32", format="", low=0.8, high=1.2, measured=False)
    both = [fits(candidates(32), [time], maybe=maybe) for maybe in (False, True)]
    (safe,), (bold,) = map(timed_candidates, both)
    assert (safe.band(MS), bold.band(MS)) == (2, 1)
    assert [budget_note(each).split()[0] for each in both] == ["0", "the"]


def files_at(model, *sides):
    """The files of a network at each resolution, with the graphs of the one before."""
    net = zoo.create(model, classes=10, in_channels=1)
    pre = replace(zoo.family_preprocessing(net.spec), resolution=sides[0])
    files = [untrained_files(net, model, pre, 10, "normalised")]
    yield files[0]
    for side in sides[1:]:
        files.append(files[-1].at(model, replace(pre, resolution=side)))
        yield files[-1]


@pytest.mark.parametrize(
    ("model", "traces"),
    [("genet_tiny", 1), pytest.param("tresnet_tiny", 2, marks=pytest.mark.slow)],
)
def test_a_file_with_the_graph_of_another_resolution_computes_what_pytorch_does(
    model, traces, tmp_path, monkeypatch
):
    from fullstride.deploy.formats import onnx

    calls, trace = [], onnx.trace
    monkeypatch.setattr(onnx, "trace", lambda *args: calls.append(1) or trace(*args))
    for files in files_at(model, 32, 64):
        opened = files.open("onnx", "fp32", tmp_path, 1)
        with torch.no_grad():
            expected = files.job.net(torch.from_numpy(files.job.example)).numpy()
        np.testing.assert_allclose(
            opened.run(files.job.example), expected, atol=1e-4 * np.abs(expected).max()
        )
    assert len(calls) == traces


class AddsBias(torch.nn.Module):
    """A graph in which the number of images is the size of a constant."""

    def forward(self, x):
        return x.flatten(1)[:, :10] + torch.arange(10.0).expand(x.shape[0], 10)


class PoolsChannelsLast(torch.nn.Module):
    """A graph whose average pool is traced with a copy of all means, as behind a layer norm."""

    def forward(self, x):
        x = x.expand(-1, 10, -1, -1).contiguous(memory_format=torch.channels_last)
        return torch.nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)


@pytest.mark.parametrize(
    ("net", "traced_batch"),
    [(None, TRACED_BATCH), (PoolsChannelsLast(), TRACED_BATCH), (AddsBias(), None)],
)
def test_a_graph_is_traced_for_any_number_of_images_only_where_it_depends_on_it(
    net, traced_batch, tmp_path
):
    (files,) = files_at("tresnet_tiny", 32)
    if net is not None:
        files.job = replace(files.job, net=net)
    opened = files.open("onnx", "fp32", tmp_path, 1, batch=1)
    assert files.job.traced_batch == traced_batch
    images = np.concatenate([files.job.example, 2 * files.job.example])
    with torch.no_grad():
        expected = files.job.net(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(opened.run(images), expected, atol=1e-4 * np.abs(expected).max())


def test_a_format_that_fails_where_another_ran_is_not_traced_again(tmp_path, monkeypatch):
    (files,) = files_at("genet_tiny", 32)
    files.open("onnx", "fp32", tmp_path, 1)
    graphs, written = files.job.graphs, []

    def fail(self, *form):
        written.append(form)
        raise ValueError("the format cannot hold it")

    monkeypatch.setattr(UntrainedFiles, "written", fail)
    with pytest.raises(ValueError, match="cannot hold"):
        files.open("openvino", "fp32", tmp_path, 1)
    assert len(written) == 1
    assert files.job.graphs is graphs


@pytest.mark.slow
def test_a_stored_median_is_that_of_a_fresh_measurement_of_the_same_file(tmp_path):
    how = ONE
    _, (time,) = drain(times_of(candidates(64), tmp_path, **how))
    (files,) = files_at("genet_tiny", 64)
    path = files.open("onnx", "fp32", tmp_path, 1).path
    pre = files.job.metadata.preprocessing
    bundle = Bundle(net=zoo.create("genet_tiny"), name="a", classes=(), preprocessing=pre)
    fresh = [latencies({"a": path}, bundle)["a"] for _ in range(3)]
    assert min(fresh) / 3 < time.ms < 3 * max(fresh)  # a busy machine doubles either of them
