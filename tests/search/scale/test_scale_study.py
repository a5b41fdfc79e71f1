"""A whole scaling study on few digits: its folder is its record, and it goes on where it was."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from described_files import undescribed
from forks import Fork

from fullstride.cli import run
from fullstride.io.records import to_json
from fullstride.latency.devices import load_profile
from fullstride.nets import zoo
from fullstride.search.block_tuning import TRAINING
from fullstride.search.scale.finished import Source, read_trainings, table_7
from fullstride.search.scale.plan import ScaleJob
from fullstride.search.scale.study import SCALE, analyse_trainings, find_trainings, render, scale
from fullstride.search.settings import ScaleSettings
from fullstride.study.driver import create_or_resume, run_study
from fullstride.study.settings import StudyOptions
from fullstride.study.trials import Failure, Trial
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.train.recipes.named import RECIPES

RECIPE = RecipeChoice("digits", {"epochs": 1, "batch_size": 16})
SMALL = dict(
    models=("genet_tiny",), widths=(0.5, 1.0), depths=(1.0,), resolutions=(8, 12, 16, 24),
    target="rtx3090", seeds=2, band=1,
)  # fmt: skip
HOW = dict(device="cpu", workers=0)


def run_scale(data, folder, recipe=RECIPE, dry_run=False, **changes):
    settings = ScaleSettings(**{**SMALL, **changes})
    return list(
        run_study(SCALE, data, folder, settings, recipe, StudyOptions(dry_run=dry_run, **HOW))
    )


@pytest.fixture(scope="module")
def folder(few_digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scale")
    run_scale(few_digits, folder)
    return folder


def results_in(folder):
    return sorted((folder / "trials").glob("*/*/result.json"))


def test_a_study_trains_the_cross_three_anchors_twice_and_a_point_near_the_front(folder):
    assert not undescribed("A study of scaling", folder)
    names = [path.parent.name for path in results_in(folder)]
    points = {name.rpartition("-seed")[0] for name in names}
    # the cross of 2 x 1 x 4 has 5 points, of which 3 are anchors; one of the other three follows
    assert len(points) == 6
    assert len(names) == 5 + 3 + 1


def test_its_json_has_every_training_with_the_error_of_its_images(folder):
    content = json.loads((folder / "scale.json").read_text())
    by_path = {path.parent.name: json.loads(path.read_text()) for path in results_in(folder)}
    assert len(content["trainings"]) == len(by_path)
    for each in content["trainings"]:
        score = by_path[f"{each['name']}-seed{each['seed']}"]
        assert each["error"] == pytest.approx(100 - score["score"])
    (regime,) = content["regimes"]
    assert regime["seed_deviation"] is not None
    assert {each["name"] for each in regime["front"]} <= {each["name"] for each in regime["points"]}
    assert len(read_trainings(folder / "trainings.csv")) == len(by_path)
    page = (folder / "report.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_the_same_call_trains_nothing_again_and_a_larger_grid_adds_trainings(few_digits, folder):
    before = {path: path.stat().st_mtime_ns for path in results_in(folder)}
    run_scale(few_digits, folder)
    assert {path: path.stat().st_mtime_ns for path in results_in(folder)} == before
    (lost, *_) = before
    content = lost.read_bytes()
    lost.unlink()
    run_scale(few_digits, folder, full_grid=True)
    after = {path: path.stat().st_mtime_ns for path in results_in(folder)}
    assert len(after) == 8 + 3
    assert all(after[path] == time for path, time in before.items() if path != lost)
    names = ("score", "loss", "correct", "epochs")
    again = json.loads(lost.read_text())
    assert [again[name] for name in names] == [json.loads(content)[name] for name in names]


def scaled(say: object, data, folder: Path) -> None:
    run_scale(data, folder)


@pytest.mark.slow
def test_a_killed_study_goes_on_and_trains_nothing_twice(few_digits, tmp_path):
    study, folder = tmp_path / "killed", tmp_path / "whole"
    finished: dict[Path, int] = {}
    for count in (0, 2, 6):  # as the first training begins, in the cross, and near its end
        fork = Fork(scaled, few_digits, study)
        while fork.process.is_alive() and not (
            len(results_in(study)) >= count and any(study.glob("trials/*/*/run/log.jsonl"))
        ):
            time.sleep(0.02)
        fork.kill()
        assert fork.end() == -9
        now = {path: path.stat().st_mtime_ns for path in results_in(study)}
        assert finished.items() <= now.items(), "a finished training has run twice"
        finished = now
    run_scale(few_digits, study)
    run_scale(few_digits, folder)
    assert all(path.stat().st_mtime_ns == at for path, at in finished.items())
    names = ("score", "loss", "correct", "epochs")
    for path, expected in zip(results_in(study), results_in(folder), strict=True):
        assert path.parent.name == expected.parent.name
        scores = [json.loads(each.read_text()) for each in (path, expected)]
        assert [scores[0][name] for name in names] == [scores[1][name] for name in names]


def test_other_data_settings_or_recipe_are_refused(few_digits, folder):
    with pytest.raises(ValueError, match="call_batch is 1 there and 2 now"):
        run_scale(few_digits, folder, call_batch=2)
    with pytest.raises(ValueError, match="epochs"):
        run_scale(few_digits, folder, RecipeChoice("digits", {"epochs": 2, "batch_size": 16}))
    with pytest.raises(ValueError, match="--resolutions"):
        run_scale(few_digits, folder, RecipeChoice("digits", {"resolution": 8}))
    with pytest.raises(ValueError, match="--seeds"):
        run_scale(few_digits, folder, RecipeChoice("digits", {"seed": 7}))


@pytest.mark.parametrize("name", ["models", "target", "recipe"])
def test_an_edited_file_is_another_argument(few_digits, tmp_path, name):
    folder, path = tmp_path / "s", tmp_path / f"{name}.json"
    texts = dict(
        models=zoo.spec("genet_tiny").to_json(),
        target=json.dumps(load_profile("rtx3090").to_dict()),
        recipe=to_json(RECIPES["digits"]),
    )
    path.write_text(texts[name])
    choice = RecipeChoice(str(path) if name == "recipe" else "digits", RECIPE.changes)
    settings = ScaleSettings(**SMALL)
    if name != "recipe":
        settings = replace(settings, **{name: (str(path),) if name == "models" else str(path)})
    job = ScaleJob(folder=folder, data=few_digits, settings=settings, recipe=choice)
    folder.mkdir()
    assert create_or_resume(SCALE, job) == create_or_resume(SCALE, job) == ""
    (folder / "costs.json").write_text("{}")
    path.write_text(texts[name] + " ")
    assert f"the file of {name} has another content: nothing" in create_or_resume(SCALE, job)
    assert not (folder / "costs.json").exists()
    (folder / "trials").mkdir()
    path.write_text(texts[name])
    with pytest.raises(ValueError, match=f"another scale: the file of {name} has another content"):
        create_or_resume(SCALE, job)


def test_the_folder_is_analysed_from_its_trainings_alone(folder, capsys):
    trainings = find_trainings(str(folder)).trainings
    (folder / "scale.json").unlink()
    assert run(["study", "analyse", str(folder), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert len(content["trainings"]) == len(trainings) >= 8


def test_a_dry_run_ends_with_the_plan(few_digits, tmp_path):
    *_, last = run_scale(few_digits, tmp_path / "s", dry_run=True)
    assert last.stage == "plan"
    assert last.result.total_s > 0
    assert not (tmp_path / "s" / "trials").exists()


def test_a_study_whose_trainings_all_failed_says_why(few_digits, tmp_path, capsys):
    folder = tmp_path / "s"
    *_, plan = run_scale(few_digits, folder, dry_run=True)
    for each in plan.result.trainings:
        trial = folder / "trials" / each.regime / f"{each.point}-seed{each.seed}"
        TRAINING.write(
            Trial(folder=trial, result=trial / "result.json"), Failure(failure="a loss of NaN")
        )
    with pytest.raises(ValueError, match="8 trainings failed; the first, recipe/.*: a loss of NaN"):
        run_scale(few_digits, folder, band=0)
    assert run(["study", "analyse", str(folder)]) == 2
    assert "a loss of NaN; delete its trials/recipe/" in capsys.readouterr().err


def test_networks_of_timm_are_compared_by_their_times_alone(few_digits, tmp_path):
    models = ("timm/mobilenetv3_small_050", "timm/mobilenetv3_small_075")
    axes = dict(widths=(), depths=(), resolutions=(32,), seeds=1)
    *_, last = run_scale(few_digits, tmp_path / "s", models=models, **axes)
    (regime,) = last.result.regimes
    assert len(regime.points) == 2
    assert regime.gains == ()


def test_times_here_are_measured_and_other_trainings_are_not(few_digits, tmp_path):
    axes = dict(widths=(0.5,), resolutions=(8,), target="here")
    *_, last = scale(
        few_digits, tmp_path / "s", recipe="digits", dry_run=True, **HOW, **{**SMALL, **axes}
    )
    (cost,) = last.result.costs
    assert cost.by == "measured"
    assert cost.ms > 0
    assert cost.training_ms > 0


def test_table_7_is_a_source_of_the_command(capsys, tmp_path):
    assert run(["study", "analyse", "efficientnet", "--budget-ms", "250"]) == 0
    out = capsys.readouterr().out
    assert "EfficientNet-B7 at 600" in out
    assert "15.28" in out  # of its cheaper half, for the largest
    assert run(["study", "analyse", "nothing-here"]) == 2


def test_names_are_escaped_in_the_page():
    training = replace(table_7("resnet_rs")[0], name="<script>")
    page = render(analyse_trainings(Source("<b>", [training], "here")))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
