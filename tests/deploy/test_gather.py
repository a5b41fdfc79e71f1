"""What is on a page of `fullstride report`: runs, bundles, files and measured networks; and every
score of a task chooses epochs and runs."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from bundles import small_bundle

from fullstride import cli
from fullstride.data.dataset import open_data
from fullstride.deploy import choose_form
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export
from fullstride.deploy.settings import ExportOptions
from fullstride.measure.budget import Budget
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import ONLINE, Measurement, save_measurements
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.report.gather import gather
from fullstride.report.page import class_values, render, worst_classes
from fullstride.tasks import common_metric
from fullstride.tasks.task import ConfusionMatrix
from fullstride.train import run, run_folder
from fullstride.train.recipes.named import DIGITS
from fullstride.train.run_folder import BUNDLE, LOG, RunConfig, create_or_resume

DATA = open_data("digits")
ROW = {"epoch": 1, "epochs": 1, "loss": 2.0, "lr": 0.1, "images_per_s": 9.0}
ROW |= {"data_wait_fraction": 0.0}


def network(side: int, name: str, score: float) -> Bundle:
    torch.manual_seed(side)
    net = zoo.create("genet_tiny", classes=10, in_channels=1, resolution=side)
    pre = Preprocessing(resolution=side, mean=(0.3,), std=(0.3,), crop=1.0)
    scores = {"test": {"top1": score, "loss": 1.0, "images": len(DATA.test)}}
    how = dict(classes=DATA.classes, preprocessing=pre, scores=scores)
    return Bundle(net.eval(), name=name, source="trained on digits", **how)


def finished_run(folder, side: int, score: float, fingerprint: str = DATA.fingerprint) -> Bundle:
    """A folder as `fullstride train` leaves it, of a network with random weights."""
    bundle = network(side, folder.name, score)
    config = RunConfig(
        model="genet_tiny",
        weights="",
        data="digits",
        val=None,
        fingerprint=fingerprint,
        classes=DATA.classes,
        spec=json.loads(bundle.net.spec.to_json()),
        preprocessing=asdict(bundle.preprocessing),
        recipe=asdict(DIGITS),
        efficiency="plain",
        score_every_epochs=1,
        precision="fp32",
        channels_last=True,
        grad_accum_steps=1,
    )
    folder.mkdir()
    create_or_resume(folder, config)
    (folder / LOG).write_text(json.dumps(ROW | {"val/top1": 9.0, "skipped": {}}) + "\n")
    bundle.save(folder / BUNDLE)
    return bundle


def measured(name: str, side: int, ms: float, samples: tuple[float, ...] = (1.0,) * 20):
    return Measurement(
        name=name,
        protocol=replace(ONLINE, resolution=side),
        images_per_s=1e3 / ms,
        spread=0.0,
        ms_p50=ms,
        ms_p90=ms,
        ms_p99=ms,
        samples=samples,
        precision="float32",
        layout="nchw",
        compiled=False,
        environment=Environment.here(),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_of_different_resolutions_stand_on_one_page_by_any_spelling_of_their_paths(folder):
    for name, side, score in (("a", 32, 90.0), ("b", 48, 95.0), ("c", 32, 80.0)):
        finished_run(folder / name, side, score)
    rows = [measured("a/", 32, 1.0), measured(str(folder / "b"), 48, 2.0), measured("c", 32, 3.0)]
    save_measurements([*rows, measured("genet_tiny", 32, 4.0)], folder / "bench.json")
    content = gather(["./a", "b/"], folder / "bench.json")
    by_name = {entry.name: entry for entry in content.entries}
    assert [(e.resolution, e.ms_p50, e.score) for e in by_name.values()] == [
        (32, 1.0, 90.0),
        (48, 2.0, 95.0),
        (32, 4.0, None),  # a name with fresh weights; c is a run, which was not named
    ]
    assert len(by_name["a"].log) == 1
    assert content.calibration
    assert sum(content.calibration.images) == len(DATA.test)
    explained = [each.explained for each in content.predictions if each.truth != each.predicted]
    assert {np.shape(each) for each in explained} == {(48, 48, 3)}
    assert str(folder / "c") in content.notes[-1]
    assert "b</strong> has a top-1 of 95.0 %" in render(content)


@pytest.mark.parametrize(
    ("ms", "best"),
    [({"a": 2.0, "b": 1.0}, "b"), ({"a": 1.0, "b": 2.0}, "a"), ({"b": 1.0}, "a"), ({}, "a")],
)
def test_of_equal_scores_the_page_names_the_faster_network(folder, ms, best):
    for name in "ab":
        finished_run(folder / name, 32, 90.0)
    save_measurements([measured(name, 32, time) for name, time in ms.items()], folder / "b.json")
    content = gather(["a", "b"], folder / "b.json")
    assert f"predictions of {best} on test images" in content.notes[1]
    assert f"<strong>{best}</strong> has a top-1 of 90.0 %" in render(content)


@pytest.mark.slow
def test_exported_files_and_bundles_are_scored_on_the_images_of_the_run(folder):
    bundle = finished_run(folder / "run", 32, 10.0)
    images = ComparisonImages([picture for _, picture in zip(range(8), pictures(), strict=False)])
    export(bundle, folder / "net.onnx", images)
    export(bundle, folder / "vino", images, ExportOptions(format="openvino", input_kind="pixels"))
    rows = [measured("net.onnx", 32, 1.0), replace(measured("vino/", 32, 2.0), runtime="OpenVINO")]
    save_measurements(rows, folder / "bench.json")
    content = gather(["run", "net.onnx", "vino/", "run/bundle/"], folder / "bench.json")
    run, onnx, vino, copy = content.entries
    # The run's score was set to 10 above; the others are scored here.
    right = sum(
        int(bundle.net(tensor(picture, bundle)).argmax()) == target
        for picture, target in zip(pictures(), DATA.test.targets, strict=True)
    )
    assert run.score == 10.0
    assert {onnx.score, vino.score, copy.score} == {100 * (right / len(DATA.test))}
    assert {each.scores["images"] for each in (onnx, vino, copy)} == {len(DATA.test)}
    assert (onnx.name, vino.name, onnx.ms_p50, vino.ms_p50) == ("net.onnx", "vino", 1.0, 2.0)
    assert "ONNX Runtime" in onnx.note
    assert copy.params == run.params
    assert render(content).count("not counted") == 4
    alone = gather(["net.onnx"], data="digits").entries
    assert [entry.score for entry in alone] == [onnx.score]
    with pytest.raises(ValueError, match="net.onnx .* --data"):
        gather(["net.onnx"])


def pictures():
    return (picture for _, picture in DATA.test.readable())


def tensor(picture, bundle: Bundle) -> torch.Tensor:
    from fullstride.deploy.predict import inputs

    (batch,) = inputs("normalised", bundle.preprocessing, [picture])
    return torch.from_numpy(batch)


def test_models_of_other_images_or_classes_are_refused_in_one_line(folder):
    finished_run(folder / "a", 32, 90.0)
    finished_run(folder / "other", 32, 90.0, fingerprint="0" * 64)
    cats = replace(network(32, "cats", 1.0), classes=tuple("abcdefghij"))
    cats.save(folder / "cats")
    (folder / "begun").mkdir()
    (folder / "begun" / "run.json").write_bytes((folder / "a" / "run.json").read_bytes())
    for word, reason in (
        ("other", "trained on"),
        ("cats", "other classes"),
        ("begun", "not a finished run"),
    ):
        with pytest.raises(ValueError, match=f"{word} .*{reason}") as caught:
            gather(["a", word])
        assert "\n" not in str(caught.value)
    save_measurements([measured("a", 48, 1.0)], folder / "b.json")
    with pytest.raises(ValueError, match="a is for 32 pixels a side and was timed at 48"):
        gather(["a"], folder / "b.json")


def test_a_run_of_a_study_which_left_the_test_alone_is_scored_for_the_page(folder):
    bundle = finished_run(folder / "a", 32, 90.0)
    replace(bundle, scores={"val": bundle.scores["test"]}).save(folder / "a" / BUNDLE)
    (entry,) = gather(["a"]).entries
    right = predictions(bundle) == np.array(DATA.test.targets)
    assert entry.scores["top1"] == pytest.approx(100 * right.mean())


def test_a_page_says_which_times_were_measured_on_a_busy_machine(folder):
    finished_run(folder / "a", 32, 90.0)
    noisy = tuple(float(1 + number % 2) for number in range(20) for _ in range(3))
    rows = [measured("a", 32, 1.0, noisy), measured("genet_tiny", 32, 1.0)]
    save_measurements(rows, folder / "b.json")
    (line,) = [note for note in gather(["a"], folder / "b.json").notes if "busy" in note]
    assert line.startswith("a: rounds of online spread by 67%")


def test_times_of_an_earlier_measurement_take_the_place_of_new_ones(folder, monkeypatch):
    bundles = {name: finished_run(folder / name[0], 32, 90.0) for name in ("a/", "b")}
    save_measurements([measured("./a", 32, 9.0), measured("b", 32, 7.0)], folder / "times.json")
    times = choose_form.earlier_times(folder / "times.json", bundles)
    assert times == {"a/": 9.0, "b": 7.0}
    monkeypatch.delattr(choose_form, "bench")
    for budget in (None, Budget(ms_per_image=8)):
        assert choose_form.most_accurate(bundles, budget, times=times)[0] == "b"
    save_measurements([measured("a", 48, 9.0), measured("b", 32, 7.0)], folder / "times.json")
    with pytest.raises(ValueError, match=r"no time of a/ .* 32"):
        choose_form.earlier_times(folder / "times.json", bundles)
    with pytest.raises(ValueError, match=r"no time of b .* batch 8"):
        choose_form.earlier_times(folder / "times.json", {"b": bundles["b"]}, batch=8)


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
    np.testing.assert_array_equal(content.confusion.dense(), expected)
    page = render(content)
    assert 'aria-label="Confusion matrix' in page
    assert page.count('<tr><th scope="row">') >= 10
    assert "Confusion matrix" not in render(replace(content, confusion=None))


def test_of_many_classes_the_page_has_the_worst_without_a_heat_map():
    some = tuple(range(200))
    matrix = ConfusionMatrix(300, some, (0, *some[1:]), (1,) * 200)
    names = tuple(f"n{number}" for number in range(300))
    values = class_values(matrix, names, worst_classes(matrix.by_class(names)))
    header, *rows = values["class_table"]
    assert (len(rows), values["confusion_plot"]) == (50, "")
    images = header.index("images")
    assert all(row[images] == "1" for row in rows)
