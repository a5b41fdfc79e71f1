"""The folder of a fit: its settings, and the result of each stage that has ended."""

import json
from dataclasses import replace

import pytest

from fullstride.autofit.budget import FitJob
from fullstride.autofit.candidates import Candidate
from fullstride.autofit.fit import FIT, fit
from fullstride.autofit.settings import FitSettings
from fullstride.data.dataset import open_data
from fullstride.io.locks import LockedError
from fullstride.io.records import to_json
from fullstride.study.driver import (
    BY_CASE,
    create_or_resume,
    read_seconds,
    run_stage,
    saved_stage,
)
from fullstride.train.recipes.choice import RecipeChoice

SETTINGS = FitSettings(budget_ms=5, call_batch=2, candidates=("genet_tiny",), resolutions=(32, 48))
CANDIDATES = tuple(Candidate(model="genet_tiny", resolution=side, top1=70.5) for side in (32, 48))


@pytest.fixture(scope="module")
def digits():
    return open_data("digits")


def create(folder, data, settings=SETTINGS, recipe=BY_CASE):
    return create_or_resume(FIT, FitJob(folder=folder, data=data, settings=settings, recipe=recipe))


def listing(calls):
    calls.append("called")
    yield "two candidates"
    return CANDIDATES


def result_of(generator):
    lines = []
    try:
        while True:
            lines.append(next(generator))
    except StopIteration as stop:
        return lines, stop.value


def test_a_stage_that_has_ended_is_read_and_not_run_again(tmp_path):
    calls = []
    for expected in (["two candidates"], []):
        stage = run_stage(tmp_path, "candidates", tuple[Candidate, ...], listing(calls))
        assert result_of(stage) == (expected, CANDIDATES)
    assert calls == ["called"]
    assert saved_stage(tmp_path, "candidates", tuple[Candidate, ...]) == CANDIDATES
    assert saved_stage(tmp_path, "plan", tuple[Candidate, ...]) is None


def test_a_stage_that_was_stopped_has_no_result_but_its_seconds(tmp_path):
    stage = run_stage(tmp_path, "candidates", tuple[Candidate, ...], listing([]))
    next(stage)
    stage.close()
    assert saved_stage(tmp_path, "candidates", tuple[Candidate, ...]) is None
    first = read_seconds(tmp_path)["candidates"]
    result_of(run_stage(tmp_path, "candidates", tuple[Candidate, ...], listing([])))
    assert read_seconds(tmp_path)["candidates"] > first > 0


def test_a_fit_that_trains_goes_on_with_the_same_data_and_settings_only(tmp_path, digits):
    folder = tmp_path / "fit"
    assert create(folder, digits) == ""
    config = (folder / "fit_config.json").read_bytes()
    (folder / "trials").mkdir()
    assert create(folder, replace(digits, where="moved")) == ""
    assert (folder / "fit_config.json").read_bytes() == config
    with pytest.raises(ValueError, match=r"another fit: call_batch is 2 there and 4 now"):
        create(folder, digits, replace(SETTINGS, call_batch=4))
    with pytest.raises(ValueError, match="images or labels"):
        create(folder, replace(digits, fingerprint="0"))


RESULTS = {f"{name}.json" for name in ("data", "candidates", "front", "times", "plan")}
MEASURED = {"times/a.json", "training_times/a.json"}


@pytest.mark.parametrize(
    ("changes", "deleted"),
    [
        (dict(hours=2.0), {"front.json", "times.json", "plan.json"}),
        (dict(budget_ms=6.0), {"front.json", "times.json", "plan.json"}),
        (dict(call_batch=4), RESULTS - {"data.json"} | MEASURED),
        (dict(budget_ms=6.0, candidates=("tresnet_m",)), RESULTS - {"data.json"} | MEASURED),
        (dict(fingerprint="0"), RESULTS | MEASURED),
    ],
)
def test_before_training_other_arguments_delete_what_they_change(
    tmp_path, digits, changes, deleted
):
    folder = tmp_path / "fit"
    create(folder, digits)
    for name in RESULTS | MEASURED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    other = "fingerprint" in changes
    data = replace(digits, **changes) if other else digits
    settings = SETTINGS if other else replace(SETTINGS, **changes)
    note = create(folder, data, settings)
    config = json.loads((folder / "fit_config.json").read_text())
    stored = json.loads(to_json(settings))
    assert (config["settings"], config["fingerprint"]) == (stored, data.fingerprint)
    assert all(("images" if other else name) in note for name in changes)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*.json")}
    assert there == (RESULTS | MEASURED) - deleted | {"fit_config.json"}
    assert create(folder, data, settings) == ""


@pytest.mark.parametrize(
    ("recipe", "deleted"),
    [
        (RecipeChoice("", {"background": "black"}), {"data.json", "plan.json"}),
        (RecipeChoice("scratch"), RESULTS | MEASURED),  # which may have its own background
        (RecipeChoice("", {"epochs": 2.0}), RESULTS - {"data.json"} | MEASURED),
    ],
)
def test_before_training_another_background_makes_another_report_of_the_data(
    tmp_path, digits, recipe, deleted
):
    create(tmp_path / "fit", digits)
    for name in RESULTS | MEASURED:
        (tmp_path / "fit" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "fit" / name).write_text("{}")
    create(tmp_path / "fit", digits, recipe=recipe)
    there = {each for each in RESULTS | MEASURED if (tmp_path / "fit" / each).exists()}
    assert there == (RESULTS | MEASURED) - deleted


def test_stages_that_run_again_have_not_spent_the_hours(tmp_path, digits):
    folder = tmp_path / "fit"
    create(folder, digits)
    for name in ("data", "candidates", "times"):
        result_of(run_stage(folder, name, tuple[Candidate, ...], listing([])))
    spent = read_seconds(folder)
    create(folder, digits, replace(SETTINGS, hours=2.0))  # deletes the times
    assert read_seconds(folder) == {name: spent[name] for name in ("data", "candidates")}
    create(folder, replace(digits, fingerprint="0"), replace(SETTINGS, hours=2.0))
    assert read_seconds(folder) == {}


def test_one_process_works_in_a_folder_and_a_second_one_is_told_in_a_line(tmp_path, digits):
    folder = tmp_path / "fit"
    settings = dict(budget_ms=5, candidates=("genet_tiny",), weights="none", dry_run=True)
    first = fit(digits, folder, **settings)
    next(first)
    with pytest.raises(LockedError, match=f"process .* works in {folder}: wait"):
        next(fit(digits, folder, **settings))
    first.close()
    assert next(fit(digits, folder, **settings)).stage == "data"


@pytest.mark.parametrize("what", ["letter.txt", "fit_config.json"])
def test_nothing_is_written_to_a_folder_of_something_else(tmp_path, digits, what):
    (tmp_path / what).write_text("Dear")
    with pytest.raises(ValueError, match=what):
        next(fit(digits, tmp_path, budget_ms=5))
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [(what, "Dear")]


@pytest.mark.parametrize("text", ["[]", "{", '{"stage": "candidates", "result": 3}'])
def test_a_stage_that_cannot_be_read_is_one_line_that_says_to_delete_it(tmp_path, text):
    (tmp_path / "candidates.json").write_text(text)
    with pytest.raises(ValueError, match=r"candidates\.json.*; delete it") as error:
        saved_stage(tmp_path, "candidates", tuple[Candidate, ...])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({}, "--budget-ms"),
        ({"budget_ms": 0}, "above 0"),
        ({"budget_ms": 1, "images_per_s": 5}, "give one"),
        ({"budget_ms": 1, "hours": 0}, "hours"),
        ({"budget_ms": 1, "resolutions": (4,)}, "resolutions"),
        ({"budget_ms": 1, "call_batch": 0}, "batch"),
        ({"budget_ms": 1, "licence": "free"}, "--licence 'free': use permissive or any"),
        ({"budget_ms": 1, "percentile": 75}, "--percentile 75: use 50 or 90 or 95 or 99"),
        ({"budget_ms": 1, "precisions": ("fp32", "fp23")}, "--precisions 'fp23': use fp32"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings, hint):
    with pytest.raises(ValueError, match=hint) as error:
        FitSettings(**settings).budgets()
    assert "\n" not in str(error.value)


def test_a_budget_as_a_rate_is_the_same_budget():
    assert FitSettings(images_per_s=2000, call_batch=64).budgets()[0].ms_per_image == 0.5
    assert json.loads(json.dumps(FitSettings(budget_ms=0.5).budgets()[0].to_dict()))["batch"] == 1
