"""Several budgets of one fit share its trainings, and each gets a file."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from generators import drain
from networks import first_block

from fullstride.autofit import plan as fit_plan
from fullstride.autofit.budget import CandidateTime, CandidateTimes, FitJob
from fullstride.autofit.candidates import Candidate
from fullstride.autofit.finalists import FileRecord, FileTimes, ShippedFile, in_doubt
from fullstride.autofit.fit import FIT
from fullstride.autofit.halving import Outcome, Teaching, survivors_of_budgets, with_student
from fullstride.autofit.plan import (
    Means,
    TrainingTime,
    TrialCost,
    find_front,
    for_budgets,
    in_turn,
    plan_of,
)
from fullstride.autofit.settings import FitSettings
from fullstride.autofit.ship import Shipment, pick
from fullstride.data.dataset import open_data
from fullstride.deploy.formats import open_file
from fullstride.measure.budget import Budget
from fullstride.measure.protocols import CallTime
from fullstride.nets.families import SPECS
from fullstride.study.driver import run_study
from fullstride.study.settings import StudyOptions
from fullstride.tasks import find_task
from fullstride.train.recipes.choice import RecipeChoice


def cost(name: str) -> TrialCost:
    time = TrainingTime(candidate=name, epochs=18, steps=10, step_s=0.1)
    candidate = Candidate(model=name, resolution=16, family=name[0])
    return TrialCost(candidate=candidate, time=time, is_float=True, ship_s=1.0)


COSTS = [cost(f"{family}{number}") for family in "ab" for number in range(10)]


@pytest.mark.parametrize("budgets", [2, 3])
def test_more_candidates_go_on_for_several_budgets_and_trainings_are_shared(budgets):
    one, several = (plan_of(COSTS, 18, Means(budgets=count)) for count in (1, budgets))
    assert [each.epochs for each in one.rungs] == [each.epochs for each in several.rungs]
    counts = [each.candidates for each in several.rungs]
    assert counts == sorted(counts, reverse=True)
    pairs = list(zip(one.rungs, several.rungs, strict=True))
    assert all(first.candidates <= second.candidates for first, second in pairs)
    assert all(2 <= second.keep <= first.keep for first, second in pairs)
    assert one.train_s < several.train_s <= 1.6 * one.train_s


def test_one_budget_has_the_rungs_that_it_had():
    rungs = plan_of(COSTS, 18).rungs
    assert for_budgets(rungs, 1) == rungs


def test_the_most_promising_of_each_budget_come_in_turn():
    a, b, c = (each.candidate for each in COSTS[:3])
    assert in_turn([[a, b, c], [b, c], [c]]) == [a, b, c]
    assert in_turn([[c, a], [b]]) == [c, b, a]


@pytest.mark.parametrize("busy", ["", "the machine is busy"])
def test_each_budget_keeps_two_families_or_room_for_what_a_busy_machine_measured(busy):
    """The first of each budget is within it by less than a fifth."""
    ms = {"a-64": 0.93, "a-128": 2.16, "a-256": 6.49, "b-64": 0.82, "b-128": 2.21, "b-256": 6.52}
    ranked, budgets = ["a-256", "a-128", "b-256", "a-64", "b-128", "b-64"], (7.755, 2.504, 1.085)
    times = CandidateTimes(
        candidates=tuple(
            Candidate(model=name[0], resolution=int(name[2:]), family=name[0]) for name in ms
        ),
        times=tuple(
            CandidateTime(candidate=name, format="onnx", precision="fp32", ms=each)
            for name, each in ms.items()
        ),
        budget=Budget(ms_per_image=7.755),
        busy=busy,
    )

    def kept(*budgets: float) -> tuple[str, ...]:
        each = [Budget(ms_per_image=budget) for budget in budgets]
        return survivors_of_budgets(ranked, 2, times, each)

    assert kept(7.755) == (("a-256", "a-128") if busy else ("a-256", "b-256"))
    assert kept(2.504) == (("a-128", "a-64") if busy else ("a-128", "b-128"))
    assert kept(1.085) == ("a-64", "b-64")
    assert {*kept(*budgets)} == {name for budget in budgets for name in kept(budget)}


def test_a_better_student_leaves_the_finalists_of_smaller_budgets_their_places():
    candidates = tuple(each.candidate for each in COSTS[:5])
    names = tuple(each.name for each in candidates)
    times = CandidateTimes(
        candidates=candidates, times=(), budget=FitSettings(budget_ms=(9, 4, 2)).budgets()[0]
    )
    student = replace(candidates[0], teacher="trials/large/bundle")
    teaching = Teaching(teacher="large", student=student, is_better=True)
    outcome, _ = with_student(teaching, Outcome(scores=(), finalists=names), times)
    assert outcome.finalists == (student.name, *names)


def test_budgets_are_sorted_and_may_be_a_number_a_list_or_a_rate():
    assert [each.ms_per_image for each in FitSettings(budget_ms=(2, 10, 5)).budgets()] == [10, 5, 2]
    assert FitSettings(budget_ms=[2, 2]).budgets() == FitSettings(budget_ms=2).budgets()
    named = FitSettings(budget_ms=2, candidates="genet_tiny", resolutions=[32], formats="onnx")
    assert (named.candidates, named.resolutions, named.formats) == (
        ("genet_tiny",),
        (32,),
        ("onnx",),
    )
    assert FitSettings(images_per_s=500).budgets() == FitSettings(budget_ms=2).budgets()
    assert FitSettings(hours=1).budgets() == ()
    with pytest.raises(ValueError, match="no budget"):
        FitSettings().budgets()
    with pytest.raises(ValueError, match="give one"):
        FitSettings(images_per_s=500, budget_ms=(1, 2))


def test_files_near_any_of_the_budgets_are_measured_again():
    """One is above the smaller budget by noise, one above the larger, one above neither.

    The last one is measured again too if it was within the smaller budget before training.
    """
    ms = {"small": 2.1, "middle": 5.0, "large": 10.2}
    times = FileTimes(
        times={name: CallTime(ms=each, low=0.9 * each, high=2 * each) for name, each in ms.items()},
        measurements=1,
        environment={},
    )
    records = [
        FileRecord(
            file=ShippedFile(
                candidate=name,
                path=name,
                format="onnx",
                precision="fp32",
                ms=None,
                val={},
                within=False,
            ),
            correct="",
            seconds=0.0,
        )
        for name in ms
    ]
    budgets = FitSettings(budget_ms=(2, 10)).budgets()
    assert in_doubt(times, records, (), budgets) == ["small", "large"]
    assert in_doubt(times, records, (), budgets[:1]) == ["large"]
    before = CandidateTime(candidate="middle", format="onnx", precision="fp32", ms=1.9)
    assert in_doubt(times, records, [before], budgets) == [*ms]


HOW = StudyOptions(device="cpu", workers=0)
SETTINGS = FitSettings(
    target="rtx4090",
    maybe=True,
    weights="none",
    candidates=("genet_tiny", "resnet_rs_tiny"),
    resolutions=(16, 32),
)


def training_in(monkeypatch, seconds_per_ms: float):
    """A machine that trains each network in so many seconds for each ms of its estimate."""

    def measured(job, candidate):
        seconds = seconds_per_ms * fit_plan.rough_ms(job, [candidate])[candidate.name]
        one = dict(epochs=1, steps=1, measure_s=9.0)
        return TrainingTime(candidate=candidate.name, step_s=seconds, **one)

    monkeypatch.setattr(fit_plan, "measure_training", measured)


def test_without_a_budget_the_whole_front_is_what_the_hours_can_train(tmp_path, monkeypatch):
    """A quarter of 10 hours trains a network of 9 ms, at 1000 s for each ms."""

    def rough_ms(job, candidates):
        return {each.name: each.resolution / 64 for each in candidates}

    monkeypatch.setattr(fit_plan, "rough_ms", rough_ms)
    training_in(monkeypatch, 1000.0)
    candidates = [Candidate(model="genet_tiny", resolution=64 * number) for number in range(1, 16)]
    settings = FitSettings(target="rtx4090", hours=10)
    job = FitJob(folder=tmp_path, data=open_data("digits"), settings=settings)
    _, limits = drain(find_front(job, candidates))
    assert limits == pytest.approx([9 ** (share / 4) for share in (4, 3, 2, 1)], rel=0.1)
    assert limits[0] >= 9.0  # rounded up
    stored = [fit_plan.stored_time(tmp_path, each) for each in candidates]
    measured = [each for each in stored if each]
    assert measured
    assert not any(each.measure_s for each in measured), "its seconds are those of the front"
    shutil.rmtree(tmp_path / "training_times")
    training_in(monkeypatch, 1e9)
    with pytest.raises(ValueError, match="too little"):
        drain(find_front(job, candidates))


def test_a_fit_by_hours_alone_plans_for_the_budgets_of_the_front(tmp_path, monkeypatch):
    training_in(monkeypatch, 100.0)
    models = ("genet_tiny", "resnet_rs_50", "resnet_rs_152")
    settings = replace(SETTINGS, hours=1.0, candidates=models)
    dry = replace(HOW, dry_run=True)
    events = [*run_study(FIT, open_data("digits"), tmp_path / "fit", settings, options=dry)]
    results = {each.stage: each.result for each in events if not each.line}
    assert len(results["front"]) > 1
    assert results["budget"].budget.ms_per_image == results["front"][0]
    assert results["plan"].candidates
    longer = replace(settings, hours=2.0)
    again = run_study(FIT, open_data("digits"), tmp_path / "fit", longer, options=dry)
    assert any("hours is 1.0 there" in each.line for each in again)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A fit of two budgets: all candidates are within the larger, and half within the smaller."""
    data = open_data("digits")
    images = {split: getattr(data, split).subset(range(96)) for split in ("train", "val", "test")}
    data, folder = replace(data, **images), tmp_path_factory.mktemp("fit") / "mine"
    recipe = RecipeChoice(changes={"epochs": 1.0, "batch_size": 32})
    dry = replace(HOW, dry_run=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in SETTINGS.candidates:
            patch.setitem(SPECS, name, first_block(name))
        [*run_study(FIT, data, folder, replace(SETTINGS, budget_ms=9), recipe, dry)]
        times = json.loads((folder / "times.json").read_text())["result"]
        ms = sorted(each["ms"] for each in times)
        settings = replace(SETTINGS, budget_ms=(9, (ms[1] + ms[2]) / 2))
        *_, last = run_study(FIT, data, folder, settings, recipe, HOW)
        yield folder, settings, last.result


@pytest.mark.slow
def test_each_budget_gets_the_best_file_within_it(whole):
    folder, settings, results = whole
    large, small = settings.budgets()
    shipment = results.shipment
    assert shipment.model == "model-9ms.onnx"
    (ships,) = shipment.smaller
    file = shipment.files[ships.best]
    assert file.ms <= small.ms_per_image < large.ms_per_image
    inside = [each for each in shipment.files if each.ms and each.ms <= small.ms_per_image]
    assert file.val["top1"] >= max(each.val["top1"] for each in inside) - 0.25
    for name in (shipment.model, ships.model):
        assert open_file(folder / name).task == "classify"
    assert ships.test["images"] == 96
    told = json.loads((folder / "fit.json").read_text())["shipment"]["smaller"]
    assert [each["model"] for each in told] == [ships.model]
    assert f"within {small.ms_per_image:g} ms" in (folder / "report.html").read_text()


def test_where_the_exported_files_are_gone_a_line_says_so(tmp_path):
    shipment = cast(Shipment, SimpleNamespace(files=()))
    with pytest.raises(ValueError, match="has no exported file any more: run the fit again"):
        pick(tmp_path, shipment, find_task().metric, 5.0)


@pytest.mark.slow
def test_a_file_within_another_time_is_copied_without_training(whole):
    folder, settings, results = whole
    metric, files = find_task().metric, results.shipment.files
    fastest, slowest = (end(each.ms for each in files if each.ms) for end in (min, max))
    name, line = pick(folder, results.shipment, metric, 2 * slowest, maybe=True)
    best = results.shipment.file
    assert (folder / name).read_bytes() == (folder / best.path).read_bytes()
    assert best.candidate in line
    with pytest.raises(ValueError, match="no file of"):
        pick(folder, results.shipment, metric, 0.5 * fastest, maybe=True)
