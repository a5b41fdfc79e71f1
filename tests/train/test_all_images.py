"""A last training on all images: no validation split and no test, in the plan, the log, the bundle
and the page, and killed and resumed as any other."""

import json

import pytest
import torch

from fullstride import cli, tasks
from fullstride.data.dataset import open_data
from fullstride.data.readers.splits import SplitRule
from fullstride.deploy.export_runs import comparison_images
from fullstride.report.plots import learning_curves
from fullstride.report.training_progress import epoch_line
from fullstride.tasks import find_task
from fullstride.train import run, run_folder
from fullstride.train.recipes.recipe import Recipe

RECIPE = Recipe(epochs=2, batch_size=512, lr=0.1, warmup_epochs=0, resolution=16, precision="fp32")


@pytest.fixture(scope="module")
def last(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "last"
    data = open_data("digits", SplitRule(val=0, test=0))
    return folder, [*run.train(folder, "genet_tiny", data, RECIPE)]


def test_all_images_are_trained_on_and_nothing_is_scored(last):
    folder, rows = last
    config = json.loads((folder / run_folder.RUN_CONFIG).read_text())
    assert (config["val"], config["test"]) == (0, 0)
    assert not (folder / run_folder.BEST).exists()
    bundle = run_folder.bundle.read_metadata(folder / run_folder.BUNDLE)
    assert bundle.scores == {}
    assert not any("val" in key for row in rows for key in row)
    metric = find_task().metric
    assert run_folder.read_log(folder, metric) == rows
    assert "val" not in epoch_line(rows[0], metric)
    assert learning_curves({"last": rows, "other": []}, metric).startswith("<svg")


def test_a_run_on_all_images_resumes_to_the_same_weights(last, tmp_path, monkeypatch):
    folder, rows = last
    data = open_data("digits", SplitRule(val=0, test=0))
    stopped = run.train(tmp_path / "run", "genet_tiny", data, RECIPE)
    next(stopped)
    stopped.close()
    again = [*run.train(tmp_path / "run", "genet_tiny", data, RECIPE)]
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]
    states = [run_folder.load_checkpoint(each) for each in (folder, tmp_path / "run")]
    for name, value in states[0]["average"].items():  # type: ignore[index]
        assert torch.equal(value, states[1]["average"][name])  # type: ignore[index]
    with pytest.raises(ValueError, match=r"validation is 0\.0 there and None now"):
        next(run.train(folder, "genet_tiny", open_data("digits", SplitRule(test=0)), RECIPE))


def test_early_stopping_without_a_val_is_refused_before_a_folder_is_made(tmp_path, capsys):
    words = ["train", "digits", "--model", "genet_tiny", "--out", str(tmp_path / "run")]
    words += ["--val", "0", "--recipe.early-stop-patience", "3", "--device", "cpu"]
    assert cli.run(words) == 2
    assert "early_stop_patience 3 needs a validation split" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_commands_say_that_there_is_no_score(last, tmp_path, capsys):
    folder, _ = last
    assert cli.run(["validate", str(folder), "--device", "cpu"]) == 2
    assert "trained on all images" in capsys.readouterr().err
    assert cli.run(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 2
    assert "has no score: give images" in capsys.readouterr().err
    words = ["train", "digits", "--model", "genet_tiny", "--out", str(tmp_path / "run")]
    words += ["--val", "0", "--test", "0", "--epochs", "1", "--batch-size", "900"]
    assert cli.run([*words, "--resolution", "16", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out
    assert "1,797 train, 0 validation, 0 test" in lines
    assert "no validation split: no epoch is chosen" in lines
    assert "no score, as all images were trained on" in lines


def test_a_file_of_such_a_run_is_compared_on_training_images(last):
    folder, _ = last
    images = comparison_images(str(folder), tasks.load(str(folder)))
    assert len(images.pictures) > 100
