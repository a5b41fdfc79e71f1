"""Boxes of a view and of its picture, their drawing, and files that find the same boxes."""

import copy
import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import box_processes
import numpy as np
import pytest
import torch
from detections import write_rectangles
from PIL import Image
from torchruns import main_in_two

from fullstride import cli, tasks
from fullstride.data.dataset import Images
from fullstride.data.readers.listing import Objects
from fullstride.deploy import export as export_of_deploy
from fullstride.deploy.comparison import compare, score_model
from fullstride.deploy.export import export, make_reference
from fullstride.deploy.export_runs import images_for_ranges, images_to_compare
from fullstride.deploy.exported import ExportedModel, Metadata
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import predict, with_min_score
from fullstride.deploy.settings import ExportOptions
from fullstride.io.console import print_note
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.report.page import data_title
from fullstride.tasks import find_task
from fullstride.tasks.detect import average_precision, task
from fullstride.tasks.detect.task import Box
from fullstride.tasks.task import json_values
from fullstride.train import run
from fullstride.train.batches import check_task
from fullstride.train.optimizer import lr_at
from fullstride.train.prepare import initial_network
from fullstride.train.recipes.choice import RecipeChoice, RunOptions, case_of
from fullstride.train.recipes.named import RECIPES
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import score_bundle

DETECT = find_task("detect")


def rows(*found: list[float]) -> torch.Tensor:
    """(1, 100, 6)"""
    result = torch.zeros(1, 100, 6)
    result[..., 5] = -1
    result[0, : len(found)] = torch.tensor(found).reshape(-1, 6)
    return result


def test_detections_become_boxes_of_the_picture() -> None:
    """A picture of 200 x 100 pixels in a view of 64, whose lower half is padding."""
    found = rows([8, 8, 40, 48, 0.75, 1], [0, 0, 4, 4, 0.5, 0])
    (guesses,) = DETECT.decode(found, ("cat", "dog"), 5)
    assert [(guess.label, guess.probability) for guess in guesses] == [("dog", 0.75), ("cat", 0.5)]
    pre = Preprocessing(resolution=64, fit="pad")
    placed = DETECT.place(guesses, (200, 100), pre)
    assert placed[0].box == pytest.approx((25, 25, 125, 100))
    assert json_values(placed[0]).keys() == {"label", "probability", "box"}
    assert len(DETECT.decode(found, ("cat", "dog"), 1)[0]) == 1


def test_one_box_of_a_place_is_predicted_whatever_its_class() -> None:
    """Boxes with an IoU of 0.9 and of 0.6 with the best, and one below the score."""
    found = rows([0, 0, 10, 10, 0.9, 1], [0, 0, 10, 9, 0.8, 0], [0, 0, 10, 6, 0.7, 0])
    (guesses,) = DETECT.decode(found, ("cat", "dog"), 5)
    assert [guess.probability for guess in guesses] == pytest.approx([0.9, 0.7])
    (guesses,) = replace(DETECT, min_score=0.75).decode(found, ("cat", "dog"), 5)
    assert [guess.probability for guess in guesses] == pytest.approx([0.9])
    assert DETECT.decode(rows([0, 0, 9, 9, 0.29, 0]), ("cat", "dog"), 5) == [()]


def test_boxes_are_drawn_where_they_are() -> None:
    picture = Image.new("RGB", (100, 80))
    drawn = DETECT.draw(picture, (Box("dog", 0.9, (20.0, 30, 60, 70)),), ("cat", "dog"))
    assert drawn is not None
    pixels = np.asarray(drawn).any(-1)
    assert pixels[70, 20:61].all()
    assert pixels[30:71, 60].all()
    assert not pixels[40:60, 30:50].any()
    assert not np.asarray(picture).any()


def test_names_of_boxes_do_not_cover_each_other() -> None:
    """Boxes at one corner, whose names would all begin there; a full picture takes no more."""
    places: list[tuple[float, float, float, float]] = []
    for _ in range(14):
        place = task.place_of_name((0.0, 0, 95, 40), (40, 10), (100, 80), places)
        if place is not None:
            places.append(place)
    assert len(places) == 12  # six lines of 12 pixels, in two columns
    assert min(map(min, places)) >= 0
    assert all(right < 100 and bottom < 80 for _, _, right, bottom in places)
    for (a, b, c, d), (e, f, g, h) in combinations(places, 2):
        assert c < e or g < a or d < f or h < b


def test_files_are_compared_by_pairs_of_boxes() -> None:
    a, b, c = [8, 8, 40, 48, 0.75, 1], [0, 0, 4, 4, 0.75, 0], [0, 0, 4, 4, 0.2, 1]
    swapped = rows(b, a)
    assert DETECT.difference(rows(a, b), swapped) == 0
    assert DETECT.agree(rows(a, b), swapped).tolist() == [True]
    moved = rows([8, 8.5, 40, 48, 0.75, 1], b)
    assert DETECT.difference(rows(a, b), moved) == pytest.approx(0.5e-3)
    assert DETECT.difference(rows(a), rows(a, c)) == pytest.approx(0.2)
    assert DETECT.agree(rows(a), rows(a, c)).tolist() == [True]
    assert DETECT.agree(rows(a), rows(a, b)).tolist() == [False]
    assert DETECT.difference(rows(), rows()) == 0
    for column in range(6):
        nan = rows(a, b)
        nan[0, 1, column] = torch.nan
        assert math.isnan(DETECT.difference(nan, rows(a, b)))
        assert math.isnan(DETECT.difference(rows(a, b), nan))


def test_a_score_of_the_extra_is_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(epochs=1, batch_size=2, lr=0.1, score="ap")
    if average_precision.has_coco():
        assert DETECT.with_options(recipe).find_metric("ap").name == "ap"
    monkeypatch.setattr(average_precision, "has_coco", lambda: False)
    with pytest.raises(ValueError, match=r"fullstride\[detection\]"):
        DETECT.with_options(recipe)


RECIPE = Recipe(
    epochs=6,
    batch_size=8,
    lr=0.03,
    weight_decay=1e-4,
    warmup_epochs=1,
    ema_decay=0.9,
    clip_norm=10.0,
    resolution=64,
    task_options={"head_width": 16, "head_convs": 1},
    score_every_epochs=6,
)


@pytest.fixture(scope="module")
def rectangles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rectangles")
    write_rectangles(folder / "data", {"train": 80, "val": 8, "test": 20}, 64)
    return DETECT.open_data(str(folder / "data"))


@pytest.fixture(scope="module")
def trained(rectangles, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    rows = list(
        run.train(folder, "resnet_rs_tiny", rectangles, RECIPE, RunOptions(task=DETECT.name))
    )
    return folder, rows


def test_a_val_without_an_object_to_find_is_refused_before_training(rectangles, tmp_path):
    images = rectangles.val
    hard = tuple(each._replace(difficult=(True,) * len(each.boxes)) for each in images.targets)
    data = replace(rectangles, val=replace(images, targets=hard))
    with pytest.raises(ValueError, match=f"none of {len(images)} .* has an object that is not"):
        next(run.train(tmp_path / "r", "resnet_rs_tiny", data, RECIPE, RunOptions(task="detect")))
    assert not (tmp_path / "r").exists()


def test_views_have_the_pixels_that_boxes_need(tmp_path, capsys):
    """Rectangles of a quarter to half of a picture, for which 32 pixels of genet_tiny are few."""
    write_rectangles(tmp_path / "data", {"train": 12, "val": 4, "test": 4}, 160)
    data = DETECT.open_data(str(tmp_path / "data"))
    boxes = [box for target in data.train.targets for box in target.boxes]
    sides = [((c - a) * (d - b)) ** 0.5 for a, b, c, d in boxes]
    side = DETECT.resolution_for(data.train, 32)
    assert 32 < side < 160
    assert side % 32 == 0
    # the smallest tenth left out, boxes have 32 pixels in these views, and fewer in smaller ones
    assert np.quantile(sides, 0.1) * side / 160 >= 32 > np.quantile(sides, 0.1) * (side - 32) / 160
    assert DETECT.resolution_for(data.train, 224) == 224
    assert find_task("segment").resolution_for(data.train, 32) == 32
    recipe = replace(RECIPE, resolution=None)
    _, pre = initial_network("genet_tiny", DETECT, data, recipe)
    assert pre.resolution == side
    assert f"views have {side} x {side} pixels in place of 32 x 32" in capsys.readouterr().err
    _, pre = initial_network("genet_tiny", DETECT, data, replace(recipe, resolution=32))
    assert pre.resolution == 32


def test_views_are_no_larger_than_pictures_of_small_boxes_or_than_640_pixels():
    def images(side: int, box: float) -> Images:
        target = Objects(((0.0, 0.0, box, box),), (0,), (False,))
        return Images(("a",), (target,), lambda name: Image.new("L", (side, side // 2)))

    assert DETECT.resolution_for(images(160, 4), 32) == 160
    assert DETECT.resolution_for(images(3000, 40), 224) == 640
    assert DETECT.resolution_for(images(3000, 1500), 32) == 64
    empty = replace(images(160, 4), targets=(Objects((), (), ()),))
    assert DETECT.resolution_for(empty, 32) == 32


@pytest.mark.parametrize(("side", "is_said"), [(32, True), (64, False)])
def test_a_batch_that_teaches_no_object_is_said_once(capsys, side, is_said):
    """Boxes of all sizes: in views of 32 pixels none has a positive location."""
    print_note.cache_clear()
    net = zoo.create("genet_tiny", classes=2, resolution=side)
    head = DETECT.head(net).train()
    shapes = zip(net.channels, net.strides, strict=True)
    maps = [torch.zeros(1, channels, side // stride, side // stride) for channels, stride in shapes]

    def loss(share: float) -> float:
        box = torch.tensor([[1.0, 1.0, 1 + share * (side - 1), 1 + share * (side - 1)]])
        objects = {"boxes": box, "labels": torch.tensor([0]), "difficult": torch.tensor([False])}
        return DETECT.loss(head(maps), [objects]).item()

    losses = [loss(share) for share in (0.3, 0.6, 1.0)]
    assert (max(losses) < 0.1) == is_said
    assert (min(losses) > 0.5) == (not is_said)
    error = capsys.readouterr().err
    assert error.count("a batch teaches no object") == is_said
    assert error.count("--resolution") == is_said
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    DETECT.loss(head(maps), [nothing | {"difficult": torch.zeros(0, dtype=torch.bool)}])
    assert "teaches" not in capsys.readouterr().err


def test_training_finds_objects(trained):
    """A single box for all images has an AP50 of 9.1, the first recall point of eleven, or less."""
    folder, log = trained
    scores = json.loads((folder / "scores.json").read_text())["splits"]["test"]
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]
    assert scores["scores"]["ap50"] > 15
    assert [each["name"] for each in scores["by_class"]] == ["red", "blue"]


def test_the_score_of_predictions_is_the_best_of_the_validation_split(trained, rectangles):
    """By counting the predictions of the bundle with other scores, on the same images."""
    bundle = tasks.load(trained[0])
    chosen = bundle.task_state["min_score"]
    f1 = {}
    for score in (chosen, *np.linspace(0.02, 0.9, 23)):
        other = replace(bundle, task_state={**bundle.task_state, "min_score": float(score)})
        f1[score] = score_bundle(other, rectangles.val, "cpu").scores["f1"]
    assert f1[chosen] == max(f1.values()) > 0
    saved = bundle.scores["val"]
    assert saved["f1"] == pytest.approx(f1[chosen])
    assert f"from a score of {chosen:.3g} on" in tasks.task_of(bundle).fit_note(saved)


def test_predict_writes_all_boxes_of_a_picture_from_a_score_on(trained, rectangles, capsys):
    """From a score of 0 on there are more than the three that are printed of classes."""
    picture = Path(rectangles.where) / "test" / "1.png"

    def boxes(*flags: object) -> list[float]:
        code = cli.run(["predict", str(trained[0]), str(picture), "--json", *map(str, flags)])
        printed = capsys.readouterr()
        assert not code, printed.err
        return [guess["probability"] for guess in json.loads(printed.out)["guesses"]]

    every = boxes("--min-score", 0)
    assert len(every) > 3
    assert boxes("--min-score", 0, "--top", 2) == every[:2]
    assert boxes("--min-score", every[3]) == every[: sum(each >= every[3] for each in every)]
    (row,) = predict(with_min_score(tasks.load(trained[0]), 0.0), picture)
    assert [guess.probability for guess in row.guesses] == every
    chosen = tasks.load(trained[0]).task_state["min_score"]
    assert boxes() == [each for each in every if each >= chosen]


def test_a_score_of_boxes_is_of_detectors_and_from_0_to_1(trained):
    bundle = tasks.load(trained[0])
    for score in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="use a number from 0 to 1"):
            with_min_score(bundle, score)
    metadata = Metadata(
        name="a", classes=("b",), preprocessing=Preprocessing(), scores={}, task="detect"
    )
    file = with_min_score(ExportedModel(Path("a.onnx"), metadata, lambda x: x, ""), 0.5)
    assert file.task_state == {"min_score": 0.5}
    with pytest.raises(ValueError, match=r"--min-score 0\.5 is for the boxes of detectors"):
        with_min_score(replace(bundle, task="classify", task_state={}), 0.5)


def test_the_page_of_a_detector_says_what_is_on_it(trained, rectangles, tmp_path, capsys):
    """Its intervals are not those of a share of the images, and it has no pictures."""
    assert cli.run(["report", str(trained[0]), "--out", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    assert "by resampling the images (bootstrap), at 95 %" in html
    assert "Wilson" not in html
    assert "Predicted images" not in html
    assert "fullstride on data" in html
    for place in ("coco.json", "coco/annotations/instances_train.json", "coco/labels.csv"):
        where = f"/images/coco/{place.removeprefix('coco/')}"
        assert data_title(replace(rectangles, where=where)) == "coco"


def test_a_run_resumes_bit_for_bit_and_its_bundle_has_the_head(trained, rectangles, tmp_path):
    folder, _ = trained
    started = run.train(
        tmp_path / "run",
        "resnet_rs_tiny",
        rectangles,
        RECIPE,
        RunOptions(task=DETECT.name, checkpoint_every_steps=3),
    )
    next(started)
    started.close()
    list(
        run.train(
            tmp_path / "run", "resnet_rs_tiny", rectangles, RECIPE, RunOptions(task=DETECT.name)
        )
    )
    whole, resumed = (tasks.load(each) for each in (folder, tmp_path / "run"))
    state = resumed.net.state_dict()
    assert all(torch.equal(v, state[name]) for name, v in whole.net.state_dict().items())
    assert whole.task_state.keys() == {"head_width", "head_convs", "candidates", "min_score"}
    assert resumed.task_state == whole.task_state
    scores = score_bundle(whole, rectangles.test, "cpu").scores
    saved = json.loads((folder / "scores.json").read_text())["splits"]["test"]["scores"]
    assert scores["ap50"] == pytest.approx(saved["ap50"])


@pytest.mark.slow
def test_two_processes_have_the_losses_the_scores_and_the_weights_of_one(tmp_path):
    box_processes.main(str(tmp_path / "one"))
    main_in_two(box_processes.main, tmp_path / "two")
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    assert two[0] == pytest.approx(one[0], rel=1e-6)
    assert two[1] == pytest.approx(one[1], rel=1e-5)
    assert two[1]["images"] == 5
    assert two[2] == pytest.approx(one[2], rel=1e-6)


def test_a_loss_of_boxes_within_its_interval_is_none():
    """Of ten images with an object: one is missed by PyTorch, two or nine others by the file."""
    targets = [{"boxes": torch.tensor([[8.0, 8, 40, 48]]), "labels": torch.tensor([0])}] * 10
    targets = [{**each, "difficult": torch.tensor([False])} for each in targets]
    targets = [{**each, "scale": torch.tensor(1.0)} for each in targets]

    def missing(*missed: int) -> np.ndarray:
        box = [8, 8, 40, 48, 0.75, 0]
        return torch.cat([rows() if i in missed else rows(box) for i in range(10)]).numpy()

    of_one = replace(DETECT, labels=1)
    few, many = (
        compare(missing(*each), missing(0), targets, of_one) for each in ([1, 2], range(1, 10))
    )
    assert few.accuracy == many.accuracy > few.file_accuracy > many.file_accuracy
    assert few.drop == 0 < few.accuracy - few.file_accuracy < few.error
    assert many.drop == many.accuracy - many.file_accuracy > many.error


def with_hard_layer(bundle: Bundle) -> Bundle:
    """The same function, with one channel that is 3,000 times as large as others."""
    net = copy.deepcopy(bundle.net)
    norm, after = net.stem.conv1.norm, net.stem.conv2.conv
    with torch.no_grad():
        channel = norm.bias.argmax()
        norm.weight[channel] *= 3000
        norm.bias[channel] *= 3000
        after.weight[:, channel] /= 3000
    return replace(bundle, net=net)


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_the_layer_that_int8_would_ruin_stays_in_float(trained, rectangles, tmp_path, monkeypatch):
    bundle = with_hard_layer(tasks.load(trained[0]))
    images = images_to_compare(replace(rectangles, val=rectangles.test), bundle)
    how = dict(
        calibration=images_for_ranges(rectangles, 32),
        reference=make_reference(bundle, images, "pixels"),
    )
    options, path = ExportOptions(precision="int8", input_kind="pixels"), tmp_path / "net.onnx"
    refused = pytest.raises(ValueError, match=r"not written: it loses [\d.]+ points of AP50")
    with monkeypatch.context() as patch, refused:
        patch.setattr(export_of_deploy, "MAX_FLOAT_SHARE", 0.0)
        export(bundle, path, images, options, **how)
    assert not path.exists()
    result = export(bundle, path, images, options, **how)
    assert result.metadata.float_layers == ("stem.conv2.conv",)
    scores = score_model(open_file(path), rectangles.test).evaluation.scores
    expected = score_bundle(bundle, rectangles.test, "cpu").scores
    assert result.comparison.file_accuracy == pytest.approx(scores["ap50"])
    assert result.comparison.accuracy == pytest.approx(expected["ap50"])
    assert scores["ap50"] > expected["ap50"] - 5


@pytest.mark.parametrize("name", ["tresnet_fcos", "dense"])
def test_a_named_recipe_trains_a_step(name, rectangles, tmp_path):
    recipe = replace(RECIPES[name], steps=1, resolution=64, batch_size=8)
    recipe = recipe.with_task_options({"head_width": 16, "head_convs": 1})
    few = replace(rectangles, test=rectangles.test.subset(range(1, 3)))
    (row,) = run.train(
        tmp_path / "run", "resnet_rs_tiny", few, recipe, RunOptions(task=DETECT.name)
    )
    assert 0 < row["loss"] < 20


def test_the_recipe_of_the_paper_and_the_default_are_those_of_detectors(rectangles):
    recipe = RECIPES["tresnet_fcos"]
    rates = [10 * round(1e4 * lr_at(epoch, recipe)) for epoch in (20, 50, 65)]
    assert rates == [1000, 100, 10]
    assert DETECT.with_options(recipe).box_augmentation == "ssd"
    case = case_of(rectangles, task=DETECT)
    assert RecipeChoice().resolve(case).name == "dense"
    with pytest.raises(ValueError, match="box_augmentation"):
        check_task(tasks.find_task("classify"), recipe)
