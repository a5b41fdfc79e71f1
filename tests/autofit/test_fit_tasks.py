"""`fit` for boxes, masks, depths, several labels, products and clips."""

import html
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from detections import write_rectangles
from forks import Fork
from networks import first_block

from fullstride import cli
from fullstride.autofit.budget import FitJob
from fullstride.autofit.candidates import Pictures, list_candidates
from fullstride.autofit.fit import FIT, fit
from fullstride.autofit.halving import RungScore, rank, tie
from fullstride.autofit.plan import TrainingTime
from fullstride.autofit.settings import FitSettings
from fullstride.data.dataset import open_data
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import predict
from fullstride.examples.files import write_motion, write_scenes
from fullstride.nets.families import SPECS
from fullstride.study.driver import run_study
from fullstride.study.scores import PairedScores, paired_p
from fullstride.study.settings import StudyOptions
from fullstride.tasks import TASKS, find_task
from fullstride.train.loop import Trainer
from fullstride.train.recipes.choice import RecipeChoice

DRY = StudyOptions(device="cpu", workers=0, dry_run=True)
HOW = StudyOptions(device="cpu", workers=0)
COUNTS = {"train": 24, "val": 12, "test": 12}
EXAMPLES = {
    "detect": "digits",
    "segment": "digits",
    "multilabel": "digits",
    "depth": "floor",
    "video": "motion",
    "retrieval": "",
}
NETWORKS = dict.fromkeys(EXAMPLES, "genet_tiny") | {"video": "resnet3d_rs_tiny"}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Folders of example data by kind."""
    root = tmp_path_factory.mktemp("examples")
    write_scenes(root / "digits", COUNTS, 64)
    write_scenes(root / "floor", COUNTS, 64, kind="floor")
    write_motion(root / "motion", COUNTS, 32)
    return root


def settings_of(name: str, **changes) -> FitSettings:
    side = 64 if find_task(name).has_places else 32
    return FitSettings(
        task=name,
        budget_ms=1000,
        weights="none",
        candidates=(NETWORKS[name],),
        resolutions=(side,),
        **changes,
    )


def small_head(name: str) -> dict[str, int]:
    """Options by which the graphs of files have few nodes, which exports take their time for."""
    task = find_task(name)
    one_conv = {"head_convs": 1} if hasattr(task, "head_convs") else {}
    return {"head_width": 32, **one_conv} if task.has_places else {}


def data_of(name: str, examples):
    task = find_task(name)
    if name == "retrieval":
        data = task.open_data("digits")
        few = [data.train.targets.index(label) for label in sorted({*data.train.targets})]
        more = [each + 1 for each in few]
        return replace(data, train=data.train.subset([*few, *more, *range(40)]))
    return task.open_data(str(examples / EXAMPLES[name]))


def test_every_task_of_the_package_is_fitted_here():
    assert {*EXAMPLES} | {"classify"} == {*TASKS}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_plan_for_a_device_that_is_not_here_counts_the_head_of_the_task(
    name, examples, tmp_path, monkeypatch
):
    """Of a classifier of the same network at the same side, the head takes more time.

    Training is timed for boxes and clips alone: slow tests fit every task as a whole.
    """
    if name not in ("detect", "video"):
        time = TrainingTime(candidate="", epochs=1, steps=3, step_s=0.1)
        name_of = "fullstride.autofit.plan.measure_training"
        monkeypatch.setattr(name_of, lambda job, each: replace(time, candidate=each.name))
    settings = settings_of(name, target="rtx4090")
    recipe = RecipeChoice(changes={"epochs": 1.0})
    events = [*run_study(FIT, data_of(name, examples), tmp_path, settings, recipe, DRY)]
    (*_, plan) = (event.result for event in events if not event.line)
    task = find_task(name)
    times = json.loads((tmp_path / "times.json").read_text())["result"]
    ms = {each["candidate"]: each["ms"] for each in times}
    assert {*plan.candidates} <= {*ms}
    assert len(ms) == len(task.variants)
    if task.has_places:
        widths = [ms[f"genet_tiny-64-hw{width}"] for width in (64, 128, 256)]
        assert widths == sorted(widths)
        assert widths[0] < widths[2]


def test_forms_that_are_not_exported_are_not_timed(tmp_path, monkeypatch):
    """Boxes in int8 by LiteRT: such a network might fit into the budget, and nothing ship."""
    monkeypatch.setattr(  # LiteRT may be missing
        "fullstride.autofit.budget.runnable", lambda *names: tuple(product(*names))
    )

    def labels(form: str, *precisions: str) -> tuple[tuple[str, str], ...]:
        settings = FitSettings(task="detect", budget_ms=1, formats=(form,), precisions=precisions)
        job = FitJob(folder=tmp_path, data=open_data("digits"), settings=settings)
        job.__dict__["task"] = replace(find_task("detect"), detector="faster_rcnn")
        return job.labels

    assert labels("onnx", "fp32", "int8") == (("onnx", "fp32"), ("onnx", "int8"))
    assert labels("litert", "fp32", "int8") == (("litert", "fp32"),)
    with pytest.raises(ValueError, match="litert files of the task detect are in fp32: use anot"):
        labels("litert", "int8")


def test_an_option_that_the_user_sets_is_not_varied(tmp_path):
    recipe = RecipeChoice(changes={"task_options": {"head_width": 32}})
    settings = FitSettings(task="segment", budget_ms=1)
    job = FitJob(folder=tmp_path, data=open_data("digits"), settings=settings, recipe=recipe)
    job.__dict__["task"] = replace(find_task("segment"), head_width=32)
    assert job.variants == ({},)
    job.__dict__["recipe"] = RecipeChoice()
    assert [each["head_width"] for each in job.variants] == [64, 128, 256]


def result(steps):
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_clips_have_networks_of_clips_with_random_weights():
    pictures = Pictures(classes=4, channels=3, side=64, takes_clips=True, variants=({"frames": 8},))
    candidates = result(list_candidates(pictures))
    assert {each.model for each in candidates} == {"resnet3d_rs_tiny"}
    assert {each.task_options["frames"] for each in candidates} == {8}
    assert all(each.name.endswith("-f8") and not each.weights for each in candidates)


@pytest.mark.parametrize("name", ["detect", "segment"])
def test_the_sides_of_views_follow_the_boxes_or_the_pictures(name, examples):
    data = data_of(name, examples)
    sides = find_task(name).view_sides(data.train, 64)
    assert sides == ({"detect": (64, 96), "segment": (64,)}[name])
    assert all(side % 32 == 0 for side in find_task(name).view_sides(data.train, 1000))
    assert find_task("classify").view_sides(data.train, 64) == ()


def test_networks_are_compared_by_the_same_resamples():
    """One is better by a point or two in all resamples, the other in half of them."""
    scores = {
        "better": [50.0 + number for number in range(20)],
        "same": [49.0 + number + 2 * (number % 2) for number in range(20)],
        "worse": [48.0 + number for number in range(20)],
    }
    best, same, worse = (
        RungScore(
            candidate=name,
            rung=1,
            epochs=1,
            scores={"ap50": 60 - 0.1 * place},
            resampled=tuple(values),
            seconds=1.0,
        )
        for place, (name, values) in enumerate(scores.items())
    )
    assert paired_p(best, same) == pytest.approx(1.0)
    assert paired_p(best, worse) == paired_p(worse, best) == 0
    assert paired_p(PairedScores({}), PairedScores({})) is None
    ms = {"better": 3.0, "same": 2.0, "worse": 1.0}
    metric = find_task("detect").metric
    assert rank([best, same, worse], ms, metric) == ["better", "same", "worse"]
    assert tie(best, same, metric) == 1
    assert tie(best, worse, metric) is None


def test_the_data_say_what_they_are_for_and_an_unclear_case_is_one_line(examples, tmp_path, capsys):
    write_rectangles(tmp_path / "boxes", COUNTS, 64)
    words = ["--budget-ms", "1000", "--weights", "none", "--candidates", "genet_tiny", "--dry-run"]
    words += ["--resolutions", "64", "--target", "rtx4090", "--epochs", "1", "--device", "cpu"]
    out = tmp_path / "fit"
    assert cli.run(["fit", str(tmp_path / "boxes"), "--out", str(out), *words]) == 0
    assert "detect" in capsys.readouterr().err
    assert json.loads((out / "fit_config.json").read_text())["settings"]["task"] == "detect"
    unclear = str(examples / "digits")
    assert cli.run(["fit", unclear, "--out", str(tmp_path / "other"), *words]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.strip().splitlines()
    assert "--task detect" in line
    assert "--task segment" in line
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_fit_of_every_task_ends_in_a_file_that_predicts(name, examples, tmp_path, monkeypatch):
    if not find_task(name).has_places:  # their heads take maps of several strides
        monkeypatch.setitem(SPECS, NETWORKS[name], first_block(NETWORKS[name]))
    data = data_of(name, examples)
    recipe = RecipeChoice(
        changes={"batch_size": 8, "epochs": 1.0, "task_options": small_head(name)}
    )
    precisions = ("fp32", "int8") if name == "detect" else ("fp32",)
    settings = settings_of(name, formats=("onnx",), precisions=precisions)
    *_, last = run_study(FIT, data, tmp_path, settings, recipe, HOW)
    shipment = last.result.shipment
    assert {each.precision for each in shipment.files if not each.failure} == {*precisions}
    model = open_file(tmp_path / shipment.model)
    assert model.task == name
    metric = find_task(name).metric
    told = json.loads((tmp_path / "fit.json").read_text())
    assert told["task"] == name
    assert 0 <= told["shipment"]["test"][metric.name] <= 100
    page = html.unescape((tmp_path / "report.html").read_text())
    assert metric.label in page
    others = find_task(name).metrics(metric)[1:]
    scores = [each for each in others if each.name in told["shipment"]["test"]]
    values = (
        each.text(told["shipment"]["test"][each.name], 1 if each.unit else 4) for each in scores
    )
    assert all(value in page for value in values)
    has_worst = name not in ("video", "retrieval")
    assert ("The images with the worst scores" in page) is has_worst
    assert ("The most confident mistakes" in page) is bool(told["shipment"]["mistakes"])
    if not model.preprocessing.frames:
        (prediction,) = predict(model, data.test.picture(0))
        assert not prediction.unreadable


def fit_labels(say: Callable[[str], object], examples: Path, folder: Path) -> None:
    """A fit of two candidates, whose times are estimates, which are the same in each run."""
    step = Trainer.step

    def said(*args):
        if (folder / "plan.json").exists():  # steps before are those that are measured
            say("step")
        return step(*args)

    Trainer.step = said
    SPECS.update({name: first_block(name) for name in ("genet_tiny", "resnet_rs_tiny")})
    settings = settings_of("multilabel", target="rtx4090", formats=("onnx",))
    settings = replace(settings, candidates=("genet_tiny", "resnet_rs_tiny"))
    recipe = RecipeChoice(changes={"epochs": 3.0, "batch_size": 8})
    data = data_of("multilabel", examples)
    for _ in run_study(FIT, data, folder, settings, recipe, HOW):
        pass


def results_of(folder: Path) -> dict[str, Any]:
    """The weights of bundles, the scores of rungs without their seconds, and what ships."""
    bits = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.glob("trials/*/bundle/*.safetensors")
    }
    scores = {str(path): json.loads(path.read_text()) for path in folder.glob("rungs/*/*.json")}
    told = json.loads((folder / "fit.json").read_text())["shipment"]
    files = [(each["path"], each["val"]) for each in told["files"]]
    rest = {Path(path).name: {**each, "seconds": 0} for path, each in scores.items()}
    return {"bits": bits, "scores": rest, "ships": (told["best"], files, told["test"])}


@pytest.mark.slow
def test_a_fit_that_is_killed_at_any_moment_ends_in_the_same_bits(examples, tmp_path):
    rng, steps = random.Random(0), 0
    whole = Fork(fit_labels, examples, tmp_path / "whole")
    total = whole.wait()
    assert whole.end() == 0
    kills = 2, total // 3
    for number in kills:
        killed = Fork(fit_labels, examples, tmp_path / "killed")
        steps += killed.wait(number)
        time.sleep(rng.uniform(0, 0.1))
        steps += killed.kill()
        assert killed.end() != 0
    last = Fork(fit_labels, examples, tmp_path / "killed")
    steps += last.wait()
    assert last.end() == 0
    assert results_of(tmp_path / "killed") == results_of(tmp_path / "whole")
    # what is repeated are the steps since the last checkpoint, which each epoch has
    per_epoch = COUNTS["train"] // 8
    assert total <= steps <= total + len(kills) * per_epoch


@pytest.mark.slow
def test_from_python_the_task_is_that_of_the_data(tmp_path):
    write_rectangles(tmp_path / "boxes", COUNTS, 64)
    events = fit(
        tmp_path / "boxes",
        tmp_path / "fit",
        budget_ms=1000,
        weights="none",
        candidates=("genet_tiny",),
        resolutions=(64,),
        target="rtx4090",
        device="cpu",
        dry_run=True,
    )
    assert [*events][-1].stage == "plan"
