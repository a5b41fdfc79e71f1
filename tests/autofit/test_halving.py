"""Plans of successive halving, who goes on, and that a stop changes nothing."""

import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from itertools import product
from math import comb
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from forks import Fork
from generators import drain
from slow_machine import Machine

from fullstride.autofit import plan as fit_plan
from fullstride.autofit.budget import CandidateTime, CandidateTimes, FitJob
from fullstride.autofit.candidates import Candidate
from fullstride.autofit.halving import (
    TIE_POINTS,
    Outcome,
    RungScore,
    Teaching,
    delete_losers,
    in_time,
    rank,
    run_halving,
    survivors,
    teach,
    tie,
    with_student,
)
from fullstride.autofit.plan import (
    FEW,
    FEWEST_TRAININGS,
    FILE_S,
    MOST_COST,
    FitPlan,
    Means,
    Rung,
    TrainingTime,
    TrialCost,
    candidate_recipe,
    epochs_of,
    make_plan,
    measure_training,
    plan_lines,
    plan_of,
    plan_within,
    stored_time,
)
from fullstride.autofit.settings import FitSettings
from fullstride.data.dataset import SplitRule
from fullstride.io.records import from_json, to_json
from fullstride.nets.bundle import Bundle
from fullstride.study.scores import PRIOR, PairedScores, expected, mcnemar
from fullstride.study.trials import Failure
from fullstride.tasks.classify import Classify
from fullstride.train import timing
from fullstride.train.loop import Trainer
from fullstride.train.recipes.choice import RecipeChoice, RunOptions
from fullstride.train.recipes.named import DIGITS
from fullstride.train.scoring import score_bundle

TOP1 = Classify.metric


# ---- the paired test


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (5, 0), (0, 6), (7, 2), (12, 12)])
def test_the_paired_test_counts_all_outcomes_of_the_images_that_differ(wins, losses):
    one = "1" * wins + "0" * losses + "1100"
    other = "0" * wins + "1" * losses + "1100"
    differing = wins + losses
    as_far = [k for k in range(differing + 1) if abs(2 * k - differing) >= abs(wins - losses)]
    expected = sum(comb(differing, k) for k in as_far) / 2**differing
    assert mcnemar(one, other) == pytest.approx(expected)
    assert mcnemar(other, one) == pytest.approx(expected)


# ---- who goes on


def score_of(name: str, correct: str, loss: float = 1.0, **scores: float) -> RungScore:
    top1 = 100 * correct.count("1") / len(correct)
    return RungScore(
        candidate=name,
        rung=1,
        epochs=1,
        scores=dict(top1=top1, loss=loss, **scores),
        correct=correct,
        seconds=1.0,
    )


def images(correct: int, wrong_from: int = 0, total: int = 1000) -> str:
    """Whether each image is correct: `total - correct` consecutive ones are not."""
    wrong = {(wrong_from + index) % total for index in range(total - correct)}
    return "".join("0" if index in wrong else "1" for index in range(total))


def test_a_difference_decides_and_of_equal_scores_the_faster_one_is_first():
    near, far = score_of("near", images(899, 500)), score_of("far", images(850, 200))
    best = score_of("best", images(900))
    assert rank([far, near, best], dict.fromkeys(("near", "far", "best"), 1.0), TOP1) == [
        "best",
        "near",
        "far",
    ]
    equal = [score_of(name, "1" * 50) for name in ("slow", "fast")]
    assert rank(equal, dict(slow=2.0, fast=1.0), TOP1) == ["fast", "slow"]


def test_files_are_tied_by_the_test_on_the_same_images_and_the_difference():
    near, far = score_of("near", images(899, 500)), score_of("far", images(850, 200))
    best = score_of("best", images(900))
    assert tie(best, near, TOP1) == mcnemar(near.correct, best.correct) > 0.05
    assert tie(best, far, TOP1) is None


def test_few_images_count_for_less_than_time_and_many_for_more():
    for copies, names in ((1, ["slow", "fast"]), (100, ["fast", "slow"])):
        fast, slow = images(45, 0, 50) * copies, images(44, 20, 50) * copies
        scores = [score_of("fast", fast), score_of("slow", slow)]
        assert rank(scores, dict(fast=1.0, slow=2.0), TOP1) == names


@pytest.mark.parametrize("ratio", [0.5, 1.0, 4.0])
def test_what_is_expected_of_two_networks_is_the_mean_weighted_by_precision(ratio):
    """Of their difference, which has a normal prior and the noise of a paired difference."""
    one, other = images(430, 0, 500), images(420, 100, 500)
    differences = np.array([int(a) - int(b) for a, b in zip(one, other, strict=True)])
    noise = 100**2 * differences.var() / 500 + 2 * (50 / 500) ** 2
    errors, doublings = 100 - 85, -np.log2(ratio)  # of the mean score; of one over the other
    variance = (PRIOR * errors) ** 2 * (doublings**2 + 2)
    by_time, by_images = PRIOR * errors * doublings, 100 * differences.mean()
    mean = (by_time / variance + by_images / noise) / (1 / variance + 1 / noise)
    scores = [PairedScores({"top1": value}, flags) for value, flags in ((86, one), (84, other))]
    first, second = expected(scores, [1.0, ratio], TOP1)
    assert first - second == pytest.approx(mean, rel=1e-6)


def test_two_cross_validated_images_of_a_probe_count_as_one_validation_image():
    flags = dict(one=images(43, 0, 50), other=images(41, 9, 50), third=images(47, 30, 50))
    probes, whole = [], []
    for name, ours in flags.items():
        score = score_of(name, ours)
        probes.append(replace(score, cross_validated=2 * ours[::-1]))
        whole.append(score_of(name, ours + ours[::-1]))
    values = [each.value(TOP1) for each in probes]
    assert values == pytest.approx([each.scores["top1"] for each in whole])
    ms = [1.0, 2.0, 3.0]
    assert expected(probes, ms, TOP1) == pytest.approx(expected(whole, ms, TOP1), rel=1e-9)
    # the best of the validation images is the worst of the cross-validated ones
    scores = [score_of("first", images(44, 0, 50)), score_of("second", images(43, 0, 50))]
    scores = [
        replace(score, cross_validated=images(right, 0, 1000))
        for score, right in zip(scores, (800, 900), strict=True)
    ]
    assert rank(scores, dict(first=1.0, second=1.0), TOP1) == ["second", "first"]


def test_where_the_noise_is_not_known_or_no_error_is_left_the_score_is_expected():
    for scores in (
        [PairedScores({"top1": 100.0}, "11"), PairedScores({"top1": 100.0}, "11")],
        [PairedScores({"top1": 80.0}), PairedScores({"top1": 70.0}, "11")],
    ):
        assert expected(scores, [1.0, 9.0], TOP1) == [each.scores["top1"] for each in scores]


def test_a_small_difference_that_the_test_tells_apart_is_no_tie():
    """Nine images more are correct, and none less."""
    total = 10_000
    best, other = images(9000, 0, total), images(8991, 0, total)
    scores = [score_of("best", best), score_of("other", other)]
    assert scores[0].scores["top1"] - scores[1].scores["top1"] < TIE_POINTS
    assert mcnemar(best, other) < 0.05
    assert tie(*scores, TOP1) is None


def test_a_few_images_are_no_reason_to_take_a_network_that_is_much_worse():
    scores = [score_of("best", images(45, 0, 50)), score_of("fast", images(42, 20, 50))]
    assert mcnemar(scores[0].correct, scores[1].correct) > 0.05
    assert tie(*scores, TOP1) is None
    assert rank(scores, dict(best=2.0, fast=1.0), TOP1) == ["best", "fast"]


def test_by_other_metrics_the_score_alone_decides():
    metric = Classify().find_metric("balanced_accuracy")
    same = images(900)
    scores = [
        score_of(name, same, balanced_accuracy=value)
        for name, value in dict(a=50.0, b=75.0, c=75.0).items()
    ]
    assert rank(scores, dict(a=9.0, b=2.0, c=1.0), metric) == ["c", "b", "a"]
    assert tie(scores[0], scores[1], metric) is None
    assert tie(scores[1], scores[2], metric) == 1


def test_a_ranking_does_not_depend_on_the_order_of_the_candidates():
    rng = random.Random(0)
    scores = [
        score_of(f"c{number}", images(890 + rng.randrange(10), rng.randrange(1000)))
        for number in range(8)
    ]
    ms = {each.candidate: rng.random() for each in scores}
    first = rank(scores, ms, TOP1)
    for _ in range(5):
        rng.shuffle(scores)
        assert rank(scores, ms, TOP1) == first


def test_two_families_and_a_network_for_floats_go_on():
    families = dict(a="x", b="x", c="x", d="y")
    every = {*families}
    assert survivors("abcd", 2, families, every, every) == ["a", "d"]
    assert survivors("abcd", 3, families, every, every) == ["a", "b", "d"]
    assert survivors("dabc", 2, families, every, every) == ["d", "a"]
    assert survivors("abc", 2, families, every, every) == ["a", "b"]
    assert survivors("abcd", 1, families, every, every) == ["a"]
    assert survivors("abcd", 2, families, {"c"}, every) == ["a", "d"]
    assert survivors("abcd", 3, families, {"c"}, every) == ["a", "c", "d"]
    assert survivors("abce", 2, dict(families, e="x"), {"e"}, every) == ["a", "e"]
    assert survivors("abde", 2, dict(families, e="z"), {"e"}, every) == ["a", "e"]
    assert survivors("abcd", 2, families, set(), every) == ["a", "d"]


def test_if_the_first_is_near_the_budget_the_best_with_more_room_goes_on():
    families = dict(a="x", b="x", c="x", d="y")
    every = {*families}
    assert survivors("abcd", 2, families, every, {"b", "c", "d"}) == ["a", "b"]
    assert survivors("abcd", 3, families, every, {"c", "d"}) == ["a", "c", "d"]
    assert survivors("abcd", 2, families, every, set()) == ["a", "d"]


# ---- plans


def cost(name: str, family: str = "x", *, step_s: float = 0.1, epochs: int = 30, **values):
    taken = TrainingTime(candidate=name, epochs=epochs, steps=10, step_s=step_s, **values)
    candidate = Candidate(model=name, resolution=32, family=family)
    taken = replace(taken, candidate=candidate.name)
    return TrialCost(candidate=candidate, time=taken, is_float=True, ship_s=1.0)


def check_rungs(plan: FitPlan):
    ends = [rung.epochs for rung in plan.rungs]
    assert ends == sorted({*ends})
    assert ends[-1] == plan.epochs
    assert plan.rungs[0].candidates == len(plan.candidates)
    for before, after in zip(plan.rungs, plan.rungs[1:], strict=False):
        assert after.candidates == before.keep <= before.candidates


@pytest.mark.parametrize(("count", "epochs", "families"), [(7, 57, 1), (16, 18, 2), (20, 443, 3)])
def test_halving_costs_a_third_whoever_goes_on(count, epochs, families):
    for spread in (1, 4):
        steps = [0.1 * spread ** (number / count) for number in range(count)]
        costs = [
            cost(f"c{number}", str(number % families), step_s=step, epochs=epochs)
            for number, step in enumerate(steps)
        ]
        plan = plan_of(costs, epochs)
        check_rungs(plan)
        assert plan.train_s <= MOST_COST * plan.all_s
        assert plan.rungs[-1].candidates >= min(2, families)


def test_few_candidates_and_few_epochs_make_valid_plans():
    for count, epochs, families in product((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 9), (1, 2)):
        costs = [cost(f"c{each}", str(each % families), epochs=epochs) for each in range(count)]
        plan = plan_of(costs, epochs)
        check_rungs(plan)
        assert len(plan.rungs) == 1 or count > FEW
        assert plan.train_s <= plan.all_s * (1 + 1e-9)
        assert plan.rungs[-1].candidates >= min(families, count)


def test_hours_bound_the_plan_first_by_epochs_then_by_candidates():
    costs = [cost(f"c{number}", "xy"[number % 2]) for number in range(9)]
    whole = plan_within(costs, float("inf"))
    assert (len(whole.candidates), whole.epochs, dict(whole.left_out)) == (9, 30, {})
    sizes = []
    for share in (1.0, 0.8, 0.5, 0.3, 0.1):
        plan = plan_within(costs, share * whole.total_s, 1.0)
        check_rungs(plan)
        assert plan.total_s <= share * whole.total_s
        assert {*plan.candidates} | {*plan.left_out} == {*whole.candidates}
        assert plan.candidates == whole.candidates[: len(plan.candidates)]
        sizes.append((len(plan.candidates), plan.epochs))
    assert sizes[0] == (9, 30)
    assert sizes[1][0] == 9
    assert sizes[1][1] < 30
    assert [size[0] for size in sizes] == sorted((size[0] for size in sizes), reverse=True)
    assert sizes[-1][0] < 9


@pytest.mark.parametrize("can_probe", [False, True])
def test_too_little_time_says_how_much_would_do(can_probe):
    costs, how = [cost("slow", step_s=2.0), cost("fast", start_s=50.0)], Means(can_probe=can_probe)
    with pytest.raises(ValueError, match=r"needs --minutes \d+$") as error:
        plan_within(costs, 1.0, 1 / 3600, how)
    assert str(error.value).startswith("0.01667 min is too little: "), "as given, not rounded"
    minutes = int(str(error.value).split()[-1])
    assert plan_within(costs, 60 * minutes, minutes / 60, how).total_s <= 60 * minutes


def test_a_long_plan_without_a_limit_says_which_flags_would_bound_it():
    short, long = (plan_within([cost("one", step_s=s)], float("inf")) for s in (0.01, 100.0))
    assert [line for line in fit_plan.plan_lines(long) if "--minutes" in line and "--hours" in line]
    for plan in (short, replace(long, left_s=long.total_s)):
        assert not any("--minutes" in line for line in fit_plan.plan_lines(plan))


def test_behind_a_linear_probe_one_epoch_is_enough():
    costs = [cost("one", step_s=2.0)]
    least_s = plan_of(costs, 1, Means(can_probe=True)).total_s
    plan = plan_within(costs, least_s, 1.0, Means(can_probe=True))
    assert [rung.epochs for rung in plan.rungs] == [0, 1]
    with pytest.raises(ValueError, match="too little"):
        plan_within(costs, least_s, 1.0)


def test_where_none_has_time_for_a_third_of_its_epochs_the_one_that_trains_longest_is_taken():
    costs = [cost("wide", step_s=2.0), cost("narrow", step_s=1.0), cost("narrowest", step_s=0.8)]

    def chosen(epochs: int, how: Means = fit_plan.ALONE) -> str:
        """The candidate that trains in the time that `wide` takes for so many epochs."""
        return plan_within(costs, plan_of(costs[:1], epochs).total_s, 1.0, how).candidates[0]

    assert chosen(10) == "wide-32", "a third of its 30 epochs"
    assert chosen(7) == "narrow-32", "a third too, and more promising than the narrowest"
    assert chosen(3) == "narrowest-32", "wide would have 3 epochs"
    assert chosen(4, Means(can_probe=True)) == "wide-32", "the probe is a network already"


def test_a_plan_of_one_candidate_speaks_of_no_halving():
    assert next(plan_lines(plan_of([cost("one")], 25))) == "plan     1 trained for 25 epochs"


# ---- training

CHOICE = RecipeChoice("scratch", {"epochs": 4, "batch_size": 16, "precise_bn": True})
CANDIDATES = (
    Candidate(model="genet_tiny", resolution=16, family="genet", width=0.25),
    Candidate(model="genet_tiny", resolution=16, family="genet", width=0.5),
    Candidate(model="resnet_rs_tiny", resolution=16, family="resnet_rs", width=0.25),
)
MS = {each.name: 1.0 + number for number, each in enumerate(CANDIDATES)}
PLAN = FitPlan(
    candidates=tuple(MS),
    left_out={},
    epochs=4,
    rungs=(
        Rung(number=1, epochs=1, candidates=3, keep=2),
        Rung(number=2, epochs=2, candidates=2, keep=2),
        Rung(number=3, epochs=4, candidates=2, keep=2),
    ),
    times={name: TrainingTime(candidate=name, steps=3, step_s=1 / 3) for name in MS},
    train_s=10.0,
    ship_s=1.0,
)


@pytest.fixture(scope="module")
def data(few_digits):
    train, test = few_digits.train.subset(range(48)), few_digits.test.subset([])
    return replace(few_digits, train=train, test=test, own_splits=())


def job_of(folder: Path, data, **values) -> FitJob:
    values = {"recipe": CHOICE} | values
    return FitJob(folder=folder, data=data, settings=FitSettings(budget_ms=5), **values)


def times_of(candidates, ms) -> CandidateTimes:
    """In the order of the candidates; more than 5 ms are beyond the budget."""
    times = tuple(
        CandidateTime(candidate=each.name, format="onnx", precision="fp32", ms=ms[each.name])
        for each in candidates
    )
    budget = FitSettings(budget_ms=5).budgets()[0]
    return CandidateTimes(candidates=tuple(candidates), times=times, budget=budget)


FOUND = times_of(CANDIDATES, MS)


def fit(folder: Path, data, **values) -> Outcome:
    return drain(run_halving(job_of(folder, data, **values), PLAN, FOUND))[1]


def bits(folder: Path) -> dict[str, bytes]:
    """Weights of bundles, and what the networks achieve."""
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*.safetensors")
        if "best" not in path.parts
    }
    for path in (folder / "rungs").rglob("*.json"):
        files[str(path.relative_to(folder))] = to_json(
            replace(from_json(RungScore, path.read_text(), str(path)), seconds=0.0)
        ).encode()
    return files


def without_seconds(outcome: Outcome) -> Outcome:
    return replace(outcome, scores=tuple(replace(each, seconds=0.0) for each in outcome.scores))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """A fit without a stop: its folder, and its outcome."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("fit") / "whole"
    return folder, fit(folder, data)


def test_rungs_continue_one_training_and_the_finalists_have_bundles(whole, data):
    folder, outcome = whole
    assert [(each.rung, each.epochs) for each in outcome.scores] == 3 * [(1, 1)] + [
        *(2 * [(2, 2)]),
        *(2 * [(3, 4)]),
    ]
    last = [each.candidate for each in outcome.scores if each.rung == 3]
    assert {*outcome.finalists} == {*last}
    assert {each.partition("_")[0] for each in last} == {"genet", "resnet"}
    for score in outcome.scores[-2:]:
        bundle = Bundle.load(folder / "trials" / score.candidate / "bundle")
        scores = score_bundle(bundle, data.val, "cpu").scores
        assert score.scores["top1"] == scores["top1"]
        assert score.correct.count("1") == round(scores["top1"] / 100 * len(data.val))
    for name in outcome.finalists:
        log = (folder / "trials" / name / "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in log] == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def probed(whole, data, tmp_path_factory):
    """Candidates with released weights, the plan that probes them, and a fit without a stop."""
    released = [str(whole[0] / "trials" / name / "bundle") for name in whole[1].finalists]
    widths = {each.name: each for each in CANDIDATES}
    candidates = [
        replace(widths[name], weights=path)
        for name, path in zip(whole[1].finalists, released, strict=True)
    ]
    rungs = (
        Rung(number=1, epochs=0, candidates=2, keep=1),
        Rung(number=2, epochs=2, candidates=1, keep=1),
    )
    names = tuple(each.name for each in candidates)
    times = {name: TrainingTime(candidate=name, steps=3, step_s=1.0) for name in names}
    plan = replace(PLAN, rungs=rungs, epochs=2, candidates=names, times=times)
    choice = RecipeChoice("scratch", {"epochs": 2, "batch_size": 16, "lr": 1e-9})
    folder = tmp_path_factory.mktemp("probed") / "whole"
    arguments = plan, times_of(candidates, dict(zip(names, (1.0, 2.0), strict=True)))
    outcome = drain(run_halving(job_of(folder, data, recipe=choice), *arguments))[1]
    return folder, arguments, choice, outcome


def test_a_linear_probe_chooses_who_trains_and_ships_where_training_is_no_better(probed):
    folder, (_, times), _, outcome = probed
    assert [(each.rung, each.epochs) for each in outcome.scores] == [(1, 0), (1, 0), (2, 2)]
    (last,) = outcome.finalists
    # of equal ones the slower one is expected to be better
    probes = [(each.value(TOP1), times.ms[each.candidate], each) for each in outcome.scores[:2]]
    *_, first = max(probes, key=lambda probe: probe[:2])
    assert first.candidate == last
    assert [len(each.cross_validated) for each in outcome.scores] == [48, 48, 0]
    # with that rate the classifier of the training stays random
    assert outcome.scores[2].scores["top1"] == first.scores["top1"]
    probe, bundle = (
        Bundle.load(folder / "trials" / last / part).net.state_dict()
        for part in ("probe", "bundle")
    )
    assert all(torch.equal(value, bundle[name]) for name, value in probe.items())


@pytest.mark.parametrize(
    ("change", "score"),
    [
        (dict(own_splits=("val",)), "top1"),
        (dict(rule=SplitRule(group="parent")), "top1"),
        (dict(rule=SplitRule(left_out=("near copy of a test image",))), "top1"),
        ({}, "balanced_accuracy"),
    ],
)
def test_probes_with_other_validation_images_or_another_metric_are_not_cross_validated(
    probed, data, tmp_path, change, score
):
    """Networks would be chosen that are good on images like the training images alone."""
    _, (plan, times), choice, _ = probed
    choice = replace(choice, changes={**choice.changes, "score": score})
    job = job_of(tmp_path / "fit", replace(data, **change), recipe=choice)
    outcome = drain(run_halving(job, replace(plan, rungs=plan.rungs[:1]), times))[1]
    assert [each.cross_validated for each in outcome.scores] == ["", ""]


def test_a_fit_that_was_stopped_in_its_probes_makes_none_again(probed, data, tmp_path):
    folder, arguments, choice, outcome = probed
    begun = tmp_path / "fit"
    job = job_of(begun, data, recipe=choice)
    steps = run_halving(job, *arguments)
    assert "linear probe" in next(steps)
    assert arguments[0].candidates[0] in next(steps)
    steps.close()
    (first,) = begun.glob("trials/*/probe/*.safetensors")
    time_ns = first.stat().st_mtime_ns
    again = drain(run_halving(job, *arguments))[1]
    assert first.stat().st_mtime_ns == time_ns
    assert without_seconds(again) == without_seconds(outcome)
    assert bits(begun) == bits(folder)


def test_a_plan_with_released_weights_begins_with_probes_and_costs_no_more(data):
    for count in range(1, 15):
        costs = [cost(f"c{number}", step_s=0.1 + number / 90) for number in range(count)]
        plan = plan_of(costs, 12, Means(can_probe=True))
        assert plan.rungs[0].epochs == 0
        assert plan.rungs[0].candidates == count
        assert plan.rungs[-1].epochs == 12
        assert plan.recipe(CHOICE).changes == {**CHOICE.changes, "linear_probe": True}
        if count <= FEW:
            assert plan.rungs[0].keep == max(1, count - 1)
        elif count > 6:  # of fewer the slowest alone may cost more
            assert plan.train_s <= MOST_COST * plan.all_s
    assert plan_of(costs, 12).recipe(CHOICE) == CHOICE


@pytest.mark.parametrize("stops", [(3, 14, 20), pytest.param((8, 9), marks=pytest.mark.slow)])
def test_a_fit_that_was_stopped_ends_in_the_same_bits_and_repeats_no_step(
    whole, data, tmp_path, monkeypatch, stops
):
    """Interrupted in the given steps of the optimizer, counted over all calls."""
    steps, step = [], Trainer.step

    def counted(learner, x, targets, number, indices=None):
        steps.append((sum(p.numel() for p in learner.net.parameters()), number))
        if len(steps) in stops:
            raise KeyboardInterrupt
        return step(learner, x, targets, number, indices)

    monkeypatch.setattr(Trainer, "step", counted)
    for _ in stops:
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "fit", data)
    outcome = fit(tmp_path / "fit", data)
    assert without_seconds(outcome) == without_seconds(whole[1])
    assert bits(tmp_path / "fit") == bits(whole[0])
    # after a stop the steps of an epoch that has no checkpoint are repeated, and no others
    per_epoch = 3
    assert len({*steps}) == per_epoch * (1 + 4 + 4)
    assert len(steps) <= per_epoch * (1 + 4 + 4) + len(stops) * per_epoch
    before = len(steps)
    assert fit(tmp_path / "fit", data) == outcome
    assert len(steps) == before


def say_steps(say: Callable[[str], object], folder: Path, data) -> None:
    """A fit that says when each of its steps begins."""
    step = Trainer.step

    def said(*args):
        say("step")
        return step(*args)

    Trainer.step = said
    fit(folder, data)


@pytest.mark.slow
def test_a_fit_that_is_killed_at_any_moment_ends_in_the_same_bits(whole, data, tmp_path):
    rng, kills = random.Random(0), 0
    for steps in (4, 2, 11, 7):
        process = Fork(say_steps, tmp_path / "fit", data)
        kills += process.wait(steps) == steps
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
    assert kills >= 2
    assert without_seconds(fit(tmp_path / "fit", data)) == without_seconds(whole[1])
    assert bits(tmp_path / "fit") == bits(whole[0])


@pytest.mark.slow
def test_several_devices_choose_as_one_does(whole, data, tmp_path, monkeypatch):
    """Each trial in a process of its own, which begins as a fork, as imports take seconds."""
    monkeypatch.setattr("multiprocessing.get_context", lambda method: forks.CONTEXT)
    outcome = fit(tmp_path / "fit", data, devices=("cpu", "cpu"))
    assert without_seconds(outcome) == without_seconds(whole[1])
    assert bits(tmp_path / "fit") == bits(whole[0])


def test_a_candidate_that_fails_is_said_and_others_go_on(data, tmp_path, monkeypatch):
    step = Trainer.step

    def diverges(learner, x, *args):
        loss = step(learner, x, *args)
        return loss * float("nan") if "ResNet-RS" in learner.net.spec.source else loss

    monkeypatch.setattr(Trainer, "step", diverges)
    plan = replace(PLAN, rungs=(Rung(number=1, epochs=4, candidates=2, keep=2),))
    plan = replace(plan, candidates=PLAN.candidates[::2])
    job = job_of(tmp_path, data)
    lines, outcome = drain(run_halving(job, plan, FOUND))
    assert outcome.finalists == PLAN.candidates[:1]
    assert [*outcome.failures] == [PLAN.candidates[2]]
    assert "nan" in outcome.failures[PLAN.candidates[2]]
    assert sum("has failed" in line for line in lines) == 1
    again = drain(run_halving(job, plan, FOUND))[1]
    assert again == outcome
    only = replace(plan, candidates=PLAN.candidates[2:])
    with pytest.raises(ValueError, match="no candidate could be trained"):
        drain(run_halving(job, only, FOUND))
    path = tmp_path / "rungs" / "1" / f"{PLAN.candidates[2]}.json"
    assert not path.exists()  # the next call tries again


def test_checkpoints_of_losers_are_deleted_and_the_outcome_stays(whole, data, tmp_path):
    folder, outcome = whole
    loser = next(iter({*PLAN.candidates} - {*outcome.finalists}))
    copy = shutil.copytree(folder, tmp_path / "copy")
    size = (copy / "trials" / loser / "checkpoint.pt").stat().st_size
    (copy / "trials" / loser / "soup" / "1").mkdir(parents=True)
    (copy / "trials" / loser / "soup" / "1" / "weights").write_bytes(bytes(1000))
    assert delete_losers(copy, outcome) >= size + 1000
    assert not (copy / "trials" / loser / "checkpoint.pt").exists()
    assert not (copy / "trials" / loser / "soup").exists()
    assert (copy / "trials" / outcome.finalists[0] / "checkpoint.pt").exists()
    assert delete_losers(copy, outcome) == 0  # nothing is left to delete
    assert fit(copy, data) == outcome


# ---- measuring


@pytest.mark.parametrize("measure_s", [0.05, 0.0])  # the first step alone takes longer than 0
def test_a_plan_measures_each_candidate_once(measure_s, data, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "MEASURE_S", measure_s)
    monkeypatch.setattr(timing, "WARM_UP_S", measure_s and timing.WARM_UP_S)
    both = CANDIDATES[1:]
    job, found = job_of(tmp_path, data), replace(times_of(both, MS), busy="a load of 9")
    lines, plan = drain(make_plan(job, found))
    assert plan.busy == "a load of 9"
    assert {*plan.candidates} == {each.name for each in both}
    assert plan.epochs == 4
    assert sum("measuring" in line for line in lines) == 2
    assert plan.train_s > 0
    again, same = drain(make_plan(job, found))
    assert same == plan
    assert not any("measuring" in line for line in again)
    assert [path.name for path in tmp_path.iterdir()] == ["training_times"]
    assert from_json(FitPlan, to_json(plan), "plan") == plan


def test_a_candidate_that_cannot_train_is_left_out_with_its_reason(data, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "MEASURE_S", 0.05)
    bad = Candidate(model="no_such_network", resolution=16)
    ms = {CANDIDATES[0].name: 1.0, bad.name: 2.0}
    job = job_of(tmp_path, data)
    plan = drain(make_plan(job, times_of((CANDIDATES[0], bad), ms)))[1]
    assert plan.candidates == (CANDIDATES[0].name,)
    assert "no_such_network" in plan.left_out[bad.name]
    with pytest.raises(ValueError, match="no_such_network"):
        drain(make_plan(job, times_of((bad,), ms)))
    assert stored_time(tmp_path, bad) is None  # the next call tries again


def test_the_training_of_less_promising_candidates_is_estimated_by_their_times(
    data, tmp_path, monkeypatch
):
    sides = (64, 56, 48, 40, 32)
    many = [Candidate(model="genet_tiny", resolution=side) for side in sides]
    ms = {each.name: each.resolution / 16 for each in many}
    steps = TrainingTime(candidate="", epochs=9, steps=4, step_s=1.0, val_s=0.5, measure_s=20.0)

    def measured(job, candidate):
        return replace(steps, candidate=candidate.name, step_s=candidate.resolution / 48)

    monkeypatch.setattr(fit_plan, "measure_training", measured)
    lines, plan = drain(make_plan(job_of(tmp_path, data), times_of(many, ms)))
    assert sum("measuring" in line for line in lines) == FEWEST_TRAININGS
    assert "of 3 others is estimated" in " ".join(lines)
    assert plan.candidates == tuple(each.name for each in many)  # the slowest first
    scored_s = (0.5, 0.5, *(0.5 * side / 56 for side in sides[2:]))
    for each, score_s in zip(many, scored_s, strict=True):
        assert plan.times[each.name].epoch_s == pytest.approx(4 * each.resolution / 48 + score_s)


@pytest.mark.parametrize(
    ("recipe", "probes"),
    [
        (RecipeChoice(), True),
        (RecipeChoice("", {"linear_probe": True}), True),
        (RecipeChoice("", {"linear_probe": False}), False),
        (RecipeChoice("scratch"), False),
        (RecipeChoice("scratch", {"linear_probe": True}), True),
        (RecipeChoice(DIGITS), False),
        (RecipeChoice("finetune"), True),
    ],
)
def test_a_plan_begins_with_probes_unless_the_users_recipe_has_none(
    recipe, probes, data, tmp_path, monkeypatch
):
    times = TrainingTime(candidate="", epochs=9, steps=4, step_s=1.0)
    monkeypatch.setattr(
        fit_plan, "measure_training", lambda job, each: replace(times, candidate=each.name)
    )
    released = [replace(each, weights="released") for each in CANDIDATES]
    job = job_of(tmp_path, data, recipe=recipe)
    plan = drain(make_plan(job, times_of(released, {each.name: 1.0 for each in released})))[1]
    assert (plan.rungs[0].epochs == 0) is probes
    assert plan.recipe(job.recipe).changes.get("linear_probe", False) is probes


@pytest.mark.parametrize(("hours", "timed"), [(None, 1), (20.0, FEWEST_TRAININGS)])
def test_without_hours_a_single_slow_training_is_timed(hours, timed, data, tmp_path, monkeypatch):
    times = TrainingTime(candidate="", epochs=9, steps=4, step_s=1.0, measure_s=1e4)

    def measured(job, each):
        result, path = replace(times, candidate=each.name), fit_plan._path(job.folder, each)
        path.parent.mkdir(exist_ok=True)
        fit_plan.TRAINING_TIME.save(path, result)
        return result

    monkeypatch.setattr(fit_plan, "measure_training", measured)
    settings = FitSettings(budget_ms=5, hours=hours)
    stage = make_plan(replace(job_of(tmp_path, data), settings=settings), FOUND)
    lines, plan = drain(stage)
    assert sum("measuring" in line for line in lines) == timed
    assert len(plan.times) > timed


@pytest.mark.parametrize("step_s", [0.1, 1e4])
def test_hours_too_few_for_the_fastest_candidates_are_refused_before_others_are_timed(
    step_s, data, tmp_path, monkeypatch
):
    """`step_s`: of the fastest without weights; with weights, no candidate has the time."""
    weights = [replace(each, resolution=24, weights="released") for each in CANDIDATES]
    many = (*CANDIDATES, *weights)
    ms = {each.name: 4.0 - number / 2 for number, each in enumerate(many)}
    fastest, timed = {CANDIDATES[2].name, weights[2].name}, []

    def measured(job, candidate):
        timed.append(candidate.name)
        each_s = step_s if candidate.name == CANDIDATES[2].name else 1e4
        return TrainingTime(candidate=timed[-1], epochs=100, steps=50, step_s=each_s, measure_s=1.0)

    monkeypatch.setattr(fit_plan, "measure_training", measured)
    settings = FitSettings(budget_ms=5, minutes=30)
    stage = make_plan(replace(job_of(tmp_path, data), settings=settings), times_of(many, ms))
    if step_s < 1:
        plan = drain(stage)[1]
        assert plan.candidates == (CANDIDATES[2].name,)
        assert fastest < {*timed}
        return
    with pytest.raises(ValueError, match=r"30 min is too little: .* needs --minutes \d+$"):
        drain(stage)
    assert {*timed} == fastest


@pytest.mark.parametrize(("formats", "files"), [(("onnx",), 1), (("onnx", "openvino"), 2)])
def test_the_time_to_ship_is_for_the_formats_and_precisions_that_are_left(
    formats, files, data, tmp_path, monkeypatch
):
    times = TrainingTime(candidate=CANDIDATES[0].name, epochs=9, steps=4, step_s=1.0)
    monkeypatch.setattr(fit_plan, "measure_training", lambda job, candidate: times)
    settings = FitSettings(budget_ms=5, formats=formats, precisions=("fp32",))
    job = replace(job_of(tmp_path, data), settings=settings)
    plan = drain(make_plan(job, times_of(CANDIDATES[:1], MS)))[1]
    assert plan.ship_s == pytest.approx(
        files * (FILE_S + len(data.val) * MS[CANDIDATES[0].name] / 1e3)
    )


@pytest.mark.slow
def test_a_measured_epoch_takes_what_training_takes(data, tmp_path):
    for name in forks.TRAINING:
        import_module(name)  # which is part of a process's first training
    measured = measure_training(job_of(tmp_path, data), CANDIDATES[0])
    plan = replace(
        PLAN,
        candidates=PLAN.candidates[:1],
        rungs=(Rung(number=1, epochs=4, candidates=1, keep=1),),
    )
    begin = time.perf_counter()
    drain(run_halving(job_of(tmp_path, data), plan, FOUND))
    taken = time.perf_counter() - begin
    assert asdict(measured)["failure"] == ""
    assert taken / 3 < measured.seconds(4) < 3 * taken


def test_failures_have_the_form_of_a_file():
    assert from_json(Failure, to_json(Failure(failure="why")), "x") == Failure(failure="why")


@pytest.mark.parametrize("length", [{"steps": 300}, {"images": 4800}])
def test_a_shorter_plan_replaces_the_users_steps_and_images(length, data):
    choice = RecipeChoice("scratch", {"batch_size": 16, **length})
    arguments = CANDIDATES[0], data, choice, RunOptions()
    whole, planned = (candidate_recipe(*arguments, epochs=most) for most in (None, 10))
    assert (epochs_of(whole, data), epochs_of(planned, data)) == (100, 10)
    assert epochs_of(candidate_recipe(*arguments, epochs=200), data) == 100


# ---- the teacher


def teach_with(folder: Path, data, outcome: Outcome, left_s: float, plan: FitPlan = PLAN):
    teacher = Candidate(model="resnet_rs_tiny", resolution=16, family="resnet_rs")
    found = times_of((*CANDIDATES, teacher), MS | {teacher.name: 10.0})
    return teacher, drain(teach(job_of(folder, data), plan, outcome, found, left_s))[1]


def score_file(folder: Path, number: int, name: str, like: RungScore, correct: str):
    """The stored score of a trial that has ended."""
    top1 = 100 * correct.count("1") / len(correct)
    score = replace(
        like, candidate=name, rung=number, correct=correct, scores={**like.scores, "top1": top1}
    )
    path = folder / "rungs" / str(number) / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(to_json(score))


def test_a_teacher_trains_the_best_finalist_once_more(whole, data, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "MEASURE_S", 0.05)
    folder = shutil.copytree(whole[0], tmp_path / "fit")
    outcome = whole[1]
    best = outcome.finalists[0]
    number = len(PLAN.rungs) + 1
    # a finalist that is always wrong, so that the teacher is better
    last = outcome.scores.index(next(s for s in outcome.scores[::-1] if s.candidate == best))
    bad = replace(outcome.scores[last], scores={"top1": 0.0, "loss": 99.0}, correct="0" * 20)
    outcome = replace(outcome, scores=(*outcome.scores[:last], bad, *outcome.scores[last + 1 :]))
    assert (
        teach_with(folder, data, outcome, 0.01)[1].reason == "there is no time to train a teacher"
    )
    teacher, teaching = teach_with(folder, data, outcome, 1e6)
    assert teaching.teacher == teacher.name
    assert teaching.student is not None
    assert teaching.is_better
    assert [each.rung for each in teaching.scores] == [number, number + 1]
    saved = json.loads((folder / "trials" / teaching.student.name / "run.json").read_text())
    assert Path(saved["recipe"]["teacher"]) == folder / "trials" / teacher.name / "bundle"
    after, found = with_student(teaching, outcome, FOUND)
    assert after.finalists[:2] == (teaching.student.name, best)
    assert teaching.student in found.candidates
    assert [each.ms for each in found.times if each.candidate == teaching.student.name] == [
        MS[best]
    ]
    assert from_json(Teaching, to_json(teaching), "teaching") == teaching
    # trials that have ended are read; a student that is not told apart does not stay
    score_file(folder, number + 1, teaching.student.name, bad, "1" + 19 * "0")
    like = replace(bad, scores={"top1": 5.0, "loss": 100.0}, correct="01" + 18 * "0")
    outcome = replace(outcome, scores=(*outcome.scores[:last], like, *outcome.scores[last + 1 :]))
    teaching = teach_with(folder, data, outcome, 1e6)[1]
    assert not teaching.is_better
    assert with_student(teaching, outcome, FOUND)[0].finalists == outcome.finalists


def test_without_a_candidate_beyond_the_budget_there_is_no_teacher(whole, data, tmp_path):
    steps = teach(job_of(tmp_path, data), PLAN, whole[1], FOUND, 1e6)
    assert drain(steps) == ([], Teaching(reason="no candidate is beyond the budget"))


def test_after_probes_a_network_without_weights_is_no_teacher(whole, data, tmp_path):
    plan = replace(PLAN, rungs=(replace(PLAN.rungs[0], epochs=0), *PLAN.rungs[1:]))
    _, teaching = teach_with(tmp_path, data, whole[1], 1e6, plan)
    assert teaching == Teaching(reason="no candidate beyond the budget has released weights")


@pytest.mark.parametrize(
    ("task", "changes", "why"),
    [
        ("multilabel", {}, "requires one class for each image, which the task multilabel does not"),
        ("classify", {"loss": "bce"}, "recipe.teacher one distribution over all"),
        ("classify", {"unlabelled": "labels"}, "which would teach labelled images too"),
    ],
)
def test_no_teacher_trains_for_a_student_whom_the_task_or_the_recipe_excludes(
    whole, data, tmp_path, task, changes, why
):
    recipe = RecipeChoice("scratch", CHOICE.changes | changes)
    settings = FitSettings(budget_ms=5, task=task)
    if task == "multilabel":
        data = data.with_targets(data.classes, lambda label: (label,))
    job = replace(job_of(tmp_path, data, recipe=recipe), settings=settings)
    teacher = Candidate(model="resnet_rs_tiny", resolution=16, family="resnet_rs")
    found = times_of((*CANDIDATES, teacher), MS | {teacher.name: 10.0})
    lines, teaching = drain(teach(job, PLAN, whole[1], found, 1e6))
    assert why in teaching.reason
    assert teaching == Teaching(reason=teaching.reason)
    assert lines == [*tmp_path.iterdir()] == []


def test_survivors_depend_on_the_load_when_the_fit_was_planned(data, tmp_path, monkeypatch):
    """A fit that goes on does not look at the load of that moment."""
    seen = []

    def note(ranked, keep, times, budgets):
        seen.append(times.busy)
        return tuple(ranked[:keep])

    monkeypatch.setattr("fullstride.autofit.halving.survivors_of_budgets", note)

    def scored(job, plan, rung, candidates, left_s):
        yield rung.end
        return [score_of(each.name, images(900)) for each in candidates], {}

    monkeypatch.setattr("fullstride.autofit.halving.run_rung", scored)
    plan = replace(PLAN, busy="a load of 9 on 2 cores")
    drain(run_halving(job_of(tmp_path, data), plan, replace(FOUND, busy="")))
    assert {*seen} == {plan.busy}


def plan_for(seconds):
    """The plan of 36, 24 and 48 steps of 1 s, and 6 s for files, within `seconds`."""
    times = {name: TrainingTime(candidate=name, steps=12, step_s=1.0) for name in MS}
    return replace(PLAN, times=times, train_s=108.0, ship_s=6.0, left_s=seconds)


def scores_of(plan, factor):
    """The scores of the first two rungs, whose trainings took `factor` times the planned time."""
    return [
        RungScore(candidate=name, rung=number, epochs=number, scores={}, seconds=12.0 * factor)
        for number, names in ((1, (*MS,)), (2, (*MS,)[:2]))
        for name in names
    ]


@pytest.mark.parametrize(
    ("factor", "limit_s", "names", "left_s"),
    [
        (1.0, None, 2, None),
        (1.0, 114.0, 2, 114 - 60 - 6),
        (0.5, 114.0, 2, 114 - 30 - 6),
        (1.05, 114.0, 2, 114 - 63 - 6),
        (1.3, 114.0, 1, 114 - 78 - 3),
        (3.0, 114.0, 1, 0),
    ],
)
def test_trainings_that_are_slower_than_planned_leave_out_the_last_of_the_ranking(
    data, tmp_path, factor, limit_s, names, left_s
):
    job, plan = job_of(tmp_path, data), plan_for(limit_s)
    two = (*MS,)[:2]
    kept, seconds = in_time(job, plan, 2, two, scores_of(plan, factor))
    assert kept == two[:names]
    assert seconds == pytest.approx(left_s)
    several = replace(job, settings=FitSettings(budget_ms=(5, 2)))
    assert in_time(several, plan, 2, two, scores_of(plan, factor))[0] == two


def test_a_fit_keeps_its_time_on_a_machine_whose_speed_halves_and_goes_on_alike(
    data, tmp_path, monkeypatch
):
    choice = RecipeChoice("scratch", {"epochs": 4, "batch_size": 4})
    job, plan = job_of(tmp_path / "fit", data, recipe=choice), plan_for(114.0)
    with monkeypatch.context() as patch:
        machine = Machine(patch, lambda step: 1.0 if step < 36 else 2.0)
        lines, outcome = drain(run_halving(job, plan, FOUND))
    assert 0.8 * 114 <= machine.now + 2 * 3 <= 1.2 * 114
    assert sum("left out" in line for line in lines) == 1
    assert len(outcome.finalists) == 1
    assert drain(run_halving(job, plan, FOUND))[1] == outcome
    bundle = Bundle.load(job.folder / "trials" / outcome.finalists[0] / "bundle")
    assert "of 4 epochs by a time limit" in bundle.source
    steady = job_of(tmp_path / "steady", data, recipe=choice)
    with monkeypatch.context() as patch:
        machine = Machine(patch, lambda step: 1.0)
        lines, outcome = drain(run_halving(steady, plan_for(130.0), FOUND))
    assert machine.now == 108
    assert not any("left out" in line for line in lines)
