"""`fit`: from images and a budget to a file that ships, its events, and its errors."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from described_files import undescribed
from PIL import Image

from fullstride import cli
from fullstride.autofit.fit import FIT, fit
from fullstride.autofit.settings import FitSettings
from fullstride.data.dataset import open_data
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import predict
from fullstride.report.console_tables import table
from fullstride.study.driver import Event, run_study
from fullstride.study.settings import StudyOptions
from fullstride.train.recipes.choice import RecipeChoice

HOW = StudyOptions(device="cpu", workers=0)
DRY = StudyOptions(device="cpu", workers=0, dry_run=True)
SHORT = RecipeChoice(changes={"epochs": 1.0, "batch_size": 32})
SETTINGS = FitSettings(
    budget_ms=1000,
    weights="none",
    candidates=("genet_tiny", "resnet_rs_tiny"),
    resolutions=(16,),
    formats=("onnx",),
    precisions=("fp32",),
)


def read_and_note(read, notes, name):
    notes.append(name)
    return read(name)


@pytest.fixture(scope="module")
def digits():
    """128 training images of the digits, and 64 of each other split."""
    data = open_data("digits")
    return replace(
        data,
        train=data.train.subset(range(128)),
        val=data.val.subset(range(64)),
        test=data.test.subset(range(64)),
    )


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    """The folder of a fit, its events, and the stage in which each test image was read."""
    folder, events, notes, stages = tmp_path_factory.mktemp("fit") / "mine", [], [], []
    recorded = partial(read_and_note, digits.test.read, notes)
    data = replace(digits, test=replace(digits.test, read=recorded))
    for event in run_study(FIT, data, folder, SETTINGS, SHORT, HOW):
        stages += [event.stage] * len(notes)
        notes.clear()
        events.append(event)
    return folder, events, stages


@pytest.mark.slow
def test_a_fit_ships_a_file_that_predicts_and_says_how_good_it_is(whole, digits):
    folder, events, _ = whole
    assert not undescribed("A fit", folder)
    results = events[-1].result
    model = open_file(folder / results.shipment.model)
    pictures = [digits.test.picture(index) for index in range(64)]
    rows = [*predict(model, pictures)]
    right = sum(
        row.guesses[0].label == digits.classes[target]
        for row, target in zip(rows, digits.test.targets, strict=True)
    )
    assert results.shipment.test["top1"] == pytest.approx(100 * right / 64)
    told = json.loads((folder / "fit.json").read_text())
    assert told["shipment"]["test"]["top1"] == pytest.approx(100 * right / 64)
    assert (folder / "report.html").stat().st_size > 10_000
    stages = dict.fromkeys(event.stage for event in events)
    assert [*stages] == [
        *("data", "candidates", "times", "budget", "plan", "training", "shipping", "results")
    ]


@pytest.mark.slow
def test_the_test_images_are_read_for_duplicates_and_then_not_before_the_choice(whole):
    _, _, stages = whole
    assert stages.count("data") == stages.count("shipping") == 64
    assert set(stages) == {"data", "shipping", "results"}  # the last one shows mistakes


@pytest.mark.slow
def test_the_same_fit_again_runs_nothing_and_ends_in_the_same_results(whole, digits):
    folder, events, _ = whole
    before = {path: path.stat().st_mtime_ns for path in folder.glob("trials/*/*")}
    again = [*run_study(FIT, digits, folder, SETTINGS, SHORT, HOW)]
    assert [event for event in again if event.line] == []
    assert again[-1].result == events[-1].result
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("trials/*/*")}


@pytest.mark.slow
def test_what_is_left_of_the_training_of_losers_is_deleted_once_a_file_ships(
    whole, digits, tmp_path
):
    """As if the outcome had one finalist: the other candidate's checkpoints go, the runs stay."""
    folder = shutil.copytree(whole[0], tmp_path / "mine")
    training = json.loads((folder / "training.json").read_text())
    winner, loser = training["result"]["finalists"]
    training["result"]["finalists"] = [winner]
    (folder / "training.json").write_text(json.dumps(training))

    def lines() -> list[str]:
        events = run_study(FIT, digits, folder, SETTINGS, SHORT, HOW)
        return [event.line for event in events if event.stage == "results" and event.line]

    (line,) = lines()
    assert re.fullmatch(r"deleted [1-9]\d* MiB: .*", line)
    left = {each.name for each in (folder / "trials" / loser).iterdir()}
    assert left & {"checkpoint.pt", "best"} == set()
    assert {"log.jsonl", "scores.json", "bundle"} <= left
    assert (folder / "trials" / winner / "checkpoint.pt").exists()
    assert lines() == []


@pytest.mark.slow
def test_every_result_of_a_stage_is_shown_as_lines_and_tables(whole):
    folder, events, _ = whole
    parts = {event.stage: [*event.parts] for event in events if not event.line}
    for stage in ("data", "candidates", "plan", "results"):
        assert parts[stage]
        assert all(isinstance(line, str) and "\n" not in line for line in parts[stage])
    assert isinstance(parts["budget"][0], type(table([], [])))
    assert "genet_tiny-16" in str([*parts["budget"][0].columns[0].cells])
    assert str(folder / "model.onnx") in parts["results"][-1]
    assert Event("times", "one of two").parts == ["one of two"]


def test_a_dry_run_ends_with_the_plan_before_anything_is_trained(digits, tmp_path):
    settings = replace(SETTINGS, target="rtx4090", formats=(), precisions=())
    folder = tmp_path / "fit"
    *_, last = run_study(FIT, digits, folder, settings, SHORT, DRY)
    assert last.stage == "plan"
    assert set(last.result.candidates) == {"genet_tiny-16", "resnet_rs_tiny-16"}
    assert last.result.epochs == 1
    assert not (folder / "trials").exists()


@pytest.mark.slow
def test_a_fit_of_40000_classes_is_planned_without_a_matrix_of_them(digits, tmp_path):
    many = digits.with_targets(tuple(map(str, range(40_000))), lambda target: 4_000 * target)
    settings = replace(SETTINGS, target="rtx4090", formats=(), precisions=())
    settings = replace(settings, candidates=("genet_tiny",))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    *_, last = run_study(FIT, many, tmp_path / "fit", settings, SHORT, DRY)
    assert last.result.candidates == ("genet_tiny-16",)
    used_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert used_kib < 40_000**2 / 2**10  # a byte for each pair of classes


def test_an_interrupted_fit_says_that_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fullstride.study.driver.run_study", interrupted)
    assert cli.run(["fit", "digits", "--budget-ms", "5", "--out", str(tmp_path / "fit")]) == 130
    assert "the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "recipe", "hint"),
    [
        ({"budget_ms": 1e-6, "target": "rtx4090"}, {}, "genet_tiny-16|resnet_rs_tiny-16"),
        ({"target": "rtx9999"}, {}, "rtx9999"),
        ({"candidates": ("genet_tinny",)}, {}, "genet_tiny"),
        ({"weights": "nowhere"}, {}, "nowhere"),
        ({"formats": ("onxx",)}, {}, "onnx"),
        ({"precisions": ("bf16",)}, {}, "bf16"),
        ({"budget_ms": None}, {}, "--budget-ms"),
        ({}, {"resolution": 32}, "--resolutions"),
        ({}, {"teacher": "runs/nowhere"}, "runs/nowhere"),
        ({}, {"unlabelled": "labels"}, "no pseudo-labels at labels: write them by .* data label"),
        ({}, {"unlabelled": "."}, r"no pseudo-labels at \.: write them by .* data label"),
        ({"task": "segment", "resolutions": (64,)}, {"teacher": "t"}, "teacher t requires one"),
        ({"task": "segment", "resolutions": (50,)}, {}, "so set --resolutions, such as 64"),
    ],
)
def test_what_cannot_be_fitted_is_one_line(digits, tmp_path, changes, recipe, hint):
    settings = replace(SETTINGS, **changes)
    if settings.target != "here":
        settings = replace(settings, formats=(), precisions=())
    with pytest.raises(ValueError, match=hint) as error:
        [*run_study(FIT, digits, tmp_path / "fit", settings, RecipeChoice(changes=recipe))]
    assert "\n" not in str(error.value)
    assert not (tmp_path / "fit" / "times").exists()


@pytest.mark.slow
def test_a_folder_that_may_not_be_written_to_is_one_line(tmp_path):
    tmp_path.chmod(0o555)
    words = [sys.executable, "-m", "fullstride", "fit", "digits", "--budget-ms", "5"]
    if os.geteuid() == 0:  # who may write everywhere, unless the capability is dropped
        if not shutil.which("setpriv"):
            pytest.skip("root may write everywhere")
        words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *words]
    ended = subprocess.run([*words, "--out", tmp_path / "mine"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert str(tmp_path) in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_one_class_and_no_val_are_refused_before_anything_is_written(digits, tmp_path):
    one = digits.with_targets(("digit",), lambda target: 0)
    without = replace(digits, val=digits.val.subset([]))
    for data, hint in ((one, "two or more"), (without, "val")):
        with pytest.raises(ValueError, match=hint):
            [*run_study(FIT, data, tmp_path / "fit", SETTINGS, SHORT)]
    assert not (tmp_path / "fit").exists()


def test_python_and_the_command_line_take_the_same_arguments(tmp_path, capsys):
    words = ["fit", "digits", "--budget-ms", "12", "--target", "rtx4090", "--weights", "none"]
    words += ["--candidates", "genet_tiny", "resnet_rs_tiny", "--resolutions", "16", "--epochs"]
    words += ["1", "--dry-run", "--device", "cpu", "--workers", "0"]
    assert cli.run([*words, "--out", str(tmp_path / "a")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("2 candidates") for line in lines)
    events = [
        *fit(
            "digits",
            tmp_path / "b",
            budget_ms=12,
            target="rtx4090",
            weights="none",
            candidates=("genet_tiny", "resnet_rs_tiny"),
            resolutions=(16,),
            epochs=1,
            dry_run=True,
            device="cpu",
            workers=0,
        )
    ]
    assert set(events[-1].result.candidates) == {"genet_tiny-16", "resnet_rs_tiny-16"}
    assert events[-1].result.epochs == 1
    assert json.loads((tmp_path / "b" / "fit_config.json").read_text())["changes"] == {"epochs": 1}
    with pytest.raises(ValueError, match="no argument 'budget_m': did you mean budget_ms"):
        fit("digits", tmp_path / "c", budget_m=5)
    with pytest.raises(ValueError, match="no argument 'epoch': did you mean epochs"):
        fit("digits", tmp_path / "c", budget_ms=5, epoch=1)
    assert cli.run([*words, "--budget-ms", "13", "--out", str(tmp_path / "a")]) == 0
    assert "budget_ms is 12.0 there and 13.0 now" in capsys.readouterr().out


def test_an_output_that_would_become_a_class_of_the_images_is_refused(tmp_path, capsys):
    flat, split = tmp_path / "flat", tmp_path / "split"
    for folder in (flat, split / "train", split / "val"):
        for number, name in enumerate(("cat", "dog")):
            (folder / name).mkdir(parents=True)
            for i in range(4):
                color = (number, i, len(str(folder)))
                Image.new("RGB", (8, 8), color).save(folder / name / f"{i}.png")
    fit_words, train_words = ["--budget-ms", "5"], ["--model", "genet_tiny"]
    for command, words in (("fit", fit_words), ("train", train_words)):
        for data, out in ((flat, "runs/mine"), (flat, "cat/runs"), (split, "train/runs")):
            assert cli.run([command, str(data), *words, "--out", str(data / out)]) == 2
            *_, error = capsys.readouterr().err.splitlines()
            assert re.search("taken for images, as each folder in .* is a class: give", error)
            assert not (data / out).exists()
    open_data(str(split)).check_apart(split / "runs")
    open_data(str(flat)).check_apart(tmp_path / "runs")


def test_a_fit_prints_each_note_on_the_data_once(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3), ("test", 3)):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / split / name / f"{i}.png")
    shutil.copy(tmp_path / "photos/test/cat/0.png", tmp_path / "photos/train/cat/copy.png")
    words = ["fit", str(tmp_path / "photos"), "--budget-ms", "12", "--target", "rtx4090"]
    words += ["--weights", "none", "--candidates", "genet_tiny", "--resolutions", "16"]
    words += ["--epochs", "1", "--dry-run", "--device", "cpu", "--workers", "0"]
    for _ in range(2):  # the second call reads the report of the first one
        assert cli.run([*words, "--out", str(tmp_path / "plan")]) == 0
        captured = capsys.readouterr()
        note = "1 training image is a copy of an image of the test and left out: 'train/cat/copy"
        assert (captured.out + captured.err).count(note) == 1
