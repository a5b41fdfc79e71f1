"""Any score of a task is one that epochs and runs are chosen by; validate and report show all."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from bundles import small_bundle
from test_gather import DATA, finished_run

from fullstride import cli
from fullstride.deploy import choose_form
from fullstride.nets.bundle import Bundle
from fullstride.report.gather import gather
from fullstride.report.page import class_values, render
from fullstride.tasks import common_metric
from fullstride.tasks.task import ConfusionMatrix
from fullstride.train import run, run_folder
from fullstride.train.recipes.named import DIGITS

SHORT = replace(DIGITS, epochs=3, warmup_epochs=0, batch_size=16, resolution=16, lr=0.01)
BY_TOP1 = {"top1": 90.0, "macro_f1": 50.0, "images": 20}
BY_F1 = {"top1": 80.0, "macro_f1": 70.0, "images": 20}


@pytest.mark.parametrize(("score", "best"), [("loss", min), ("balanced_accuracy", max)])
def test_the_best_epoch_is_that_of_the_recipe_s_score(score, best, few_digits, tmp_path):
    recipe = replace(SHORT, score=score)
    rows = list(run.train(tmp_path / "run", "genet_tiny", few_digits, recipe))
    saved = Bundle.load(tmp_path / "run" / run_folder.BEST).scores["val"]
    assert saved[score] == best(row[f"val/{score}"] for row in rows)


def test_a_score_that_the_task_lacks_ends_the_run_before_it_begins(few_digits, tmp_path):
    with pytest.raises(ValueError, match="recipe.score 'mae': .* top1"):
        next(run.train(tmp_path / "run", "genet_tiny", few_digits, replace(SHORT, score="mae")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("score", "best"), [("macro_f1", "b"), ("top1", "a"), ("", "a")])
def test_the_exported_network_is_the_best_by_the_score_of_the_runs(score, best):
    recipe = {"score": score}
    bundles = {
        "a": small_bundle(scores={"test": BY_TOP1}, recipe=recipe),
        "b": small_bundle(scores={"test": BY_F1}, recipe=recipe),
    }
    assert choose_form.most_accurate(bundles, None)[0] == best
    mixed = [bundles["a"], replace(bundles["b"], recipe={"score": "ece"})]
    assert common_metric(mixed).name == ("top1" if score != "ece" else "ece")


def test_validate_prints_and_writes_the_scores_of_classes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bundle = finished_run(tmp_path / "run", 32, 10.0)
    assert cli.run(["validate", "run", "--per-class", "--out", "scores.json"]) == 0
    text = capsys.readouterr().out
    predicted = predictions(bundle)
    truth = np.array(DATA.test.targets)
    top1 = 100 * (predicted == truth).mean()
    assert f"top-1 {top1:.2f} %" in text
    assert all(name in text for name in ("balanced accuracy", "macro-F1", "ECE", "precision"))
    content = json.loads((tmp_path / "scores.json").read_text())
    split = content["splits"]["test"]
    assert split["scores"]["top1"] == pytest.approx(top1)
    assert [row["images"] for row in split["by_class"]] == np.bincount(truth).tolist()
    matrix = ConfusionMatrix(10, *(tuple(split["confusion"][name]) for name in COLUMNS))
    label, other, images = matrix.most_confused(1)[0]
    assert f"{label} as {other} ({images})" in text
    assert images == ((truth == label) & (predicted == other)).sum()
    assert cli.run(["validate", "run", "--out", "run/run.json"]) == 2  # another file


COLUMNS = ("labels", "predictions", "images")


def predictions(bundle):
    """The classes that the network predicts for the test images, one at a time."""
    from test_gather import pictures, tensor

    with torch.inference_mode():
        return np.array([int(bundle.net(tensor(each, bundle)).argmax()) for each in pictures()])


def test_the_page_has_the_classes_and_a_heat_map_of_the_best_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bundle = finished_run(tmp_path / "run", 32, 10.0)
    content = gather(["run"])
    expected = np.zeros((10, 10), int)
    np.add.at(expected, (DATA.test.targets, predictions(bundle)), 1)
    np.testing.assert_array_equal(content["confusion"].dense(), expected)
    page = render(**content)
    assert 'aria-label="Confusion matrix' in page
    assert page.count('<tr><th scope="row">') >= 10
    assert "Confusion matrix" not in render(**{**content, "confusion": None})


def test_of_many_classes_the_page_has_the_worst_without_a_heat_map():
    some = tuple(range(200))
    matrix = ConfusionMatrix(300, some, (0, *some[1:]), (1,) * 200)
    names = tuple(f"n{number}" for number in range(300))
    values = class_values(matrix, names)
    rows = values["class_rows"]
    assert (len(rows), values["confusion_plot"]) == (50, "")
    assert all(row.images for row in rows)
