"""Predictions with places: of bundles and of exported files, and as pictures."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from toy_dense import Dense, dense_bundle

from fullstride.cli import main
from fullstride.data.dataset import Images
from fullstride.deploy.comparison import ComparisonImages, score_model
from fullstride.deploy.export import check_arguments, export
from fullstride.deploy.exported import has_shape
from fullstride.deploy.formats import open_file
from fullstride.deploy.formats.executorch import EXECUTORCH
from fullstride.deploy.predict import predict
from fullstride.deploy.settings import ExportOptions
from fullstride.train.scoring import score_bundle


@pytest.fixture
def bundle(monkeypatch):
    return dense_bundle(monkeypatch)


@pytest.fixture
def pictures():
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (3, 9, 12, 3), dtype=np.uint8)
    return [Image.fromarray(pixels).resize((96, 72), 0) for pixels in small]


@pytest.mark.parametrize(
    ("format", "kind"),
    [("onnx", "normalised"), ("openvino", "pixels"), ("pt2", "pictures")],
)
def test_a_file_of_maps_predicts_the_same_places(format, kind, bundle, pictures, tmp_path):
    path = tmp_path / ("net" + {"onnx": ".onnx", "openvino": "", "pt2": ".pt2"}[format])
    images = ComparisonImages(pictures)
    result = export(bundle, path, images, ExportOptions(format=format, input_kind=kind))
    assert result.comparison.same_class == len(pictures)
    model = open_file(path, trust=True)
    assert model.metadata.output_shape == (2, 0, 0)
    ours, theirs = [*predict(bundle, pictures)], [*predict(model, pictures)]
    for one, other in zip(ours, theirs, strict=True):
        assert one.guesses == other.guesses
        assert one.guesses[0].map.shape == (72, 96)


def test_a_file_for_any_size_returns_maps_of_the_size_of_its_images(bundle, pictures, tmp_path):
    path = tmp_path / "net.onnx"
    export(bundle, path, ComparisonImages(pictures), ExportOptions(any_size=True))
    model = open_file(path)
    images = np.zeros((3, 3, 96, 128), np.float32)
    assert model.run(images).shape == (3, 2, 96, 128)


def test_only_the_sides_of_maps_may_be_those_of_the_image():
    assert has_shape(np.zeros((2, 5, 7, 9)), (2, 5, 0, 0))
    assert not has_shape(np.zeros((2, 5, 7)), (2, 5, 0, 0))
    assert not has_shape(np.zeros((2, 4, 7, 9)), (2, 5, 0, 0))


@pytest.mark.parametrize("kind", ["pixels", "pictures"])
def test_targets_of_files_move_with_the_pixels(kind, bundle, pictures, tmp_path):
    names = [tmp_path / f"{number}.png" for number in range(3)]
    for name, picture in zip(names, pictures, strict=True):
        picture.save(name)
    images = Images(tuple(map(str, names)), (0, 1, 0), Image.open)
    path = tmp_path / "net.onnx"
    export(bundle, path, ComparisonImages(pictures), ExportOptions(input_kind=kind))
    expected = score_bundle(bundle, images, "cpu").scores
    scores = score_model(open_file(path), images).evaluation.scores
    assert scores["images"] == 3
    assert scores["error"] == pytest.approx(expected["error"], rel=1e-3)


@pytest.mark.parametrize("task", ["segment", "detect"])
def test_maps_and_boxes_are_refused_in_int8_where_they_would_lose_much(task, bundle, pictures):
    images, options = ComparisonImages(pictures), ExportOptions(precision="int8")
    with pytest.raises(ValueError, match=f"executorch files of the task {task} are in fp32"):
        check_arguments(replace(bundle, task=task), images, EXECUTORCH, options)


@pytest.fixture
def command(bundle, pictures, tmp_path, monkeypatch):
    """Runs `predict` of the bundle on two pictures of one name; returns its exit code."""
    for folder, picture in zip(("a", "b"), pictures, strict=False):
        (tmp_path / folder).mkdir()
        picture.save(tmp_path / folder / "x.png")
    monkeypatch.setattr("fullstride.deploy.predict.open_model", lambda *_, **__: bundle)

    def run(*more: str) -> int:
        words = ["predict", "run", str(tmp_path / "a"), str(tmp_path / "b"), *more]
        monkeypatch.setattr(sys, "argv", ["fullstride", *words])
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return run


def test_predict_writes_drawings_and_maps_of_the_size_of_the_pictures(command, tmp_path, capsys):
    draw, maps = tmp_path / "drawn", tmp_path / "maps"
    assert command("--json", "--draw", str(draw), "--maps", str(maps)) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for row, name in zip(rows, ("x.png", "x-2.png"), strict=True):
        (guess,) = row["guesses"]
        assert guess.keys() == {"x", "y"}
        source = np.array(Image.open(row["path"]))
        drawn, values = (np.array(Image.open(folder / name)) for folder in (draw, maps))
        assert values.shape == drawn.shape[:2] == source.shape[:2]
        assert values.dtype == np.uint16
        changed = np.argwhere((drawn != source).any(-1))
        assert changed.tolist() in ([], [[int(guess["y"]), int(guess["x"])]])
    assert command("--draw", str(draw)) == 0  # its own files are replaced


def test_predict_replaces_no_picture_of_others(command, pictures, tmp_path, capsys):
    (tmp_path / "drawn").mkdir()
    pictures[0].save(tmp_path / "drawn" / "x.png")
    before = (tmp_path / "drawn" / "x.png").read_bytes()
    (tmp_path / "b" / "x.png").rename(tmp_path / "a" / "first.jpg")
    assert command("--draw", str(tmp_path / "drawn")) == 2
    printed = capsys.readouterr()
    assert "not a picture of predictions" in printed.err
    assert not printed.out
    assert (tmp_path / "drawn" / "x.png").read_bytes() == before
    assert not (tmp_path / "drawn" / "first.png").exists()


def test_predict_draws_neither_beside_the_pictures_nor_into_one_folder_twice(
    command, tmp_path, capsys
):
    (tmp_path / "a" / "x.png").rename(tmp_path / "a" / "x.jpg")
    assert command("--draw", str(tmp_path / "a")) == 2
    assert "x.jpg: give another folder" in capsys.readouterr().err
    assert [*(tmp_path / "a").iterdir()] == [tmp_path / "a" / "x.jpg"]
    both = str(tmp_path / "both")
    assert command("--draw", both, "--maps", both) == 2
    assert "give each its own folder" in capsys.readouterr().err


def test_a_table_of_predictions_with_places_is_refused(command, tmp_path, capsys):
    assert command("--out", str(tmp_path / "table")) == 2
    assert "--json" in capsys.readouterr().err
    assert not (tmp_path / "table").exists()


def test_a_task_without_maps_refuses_them(command, tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(Dense, "maps")
    assert command("--maps", str(tmp_path / "maps")) == 2
    assert "the task dense" in capsys.readouterr().err
