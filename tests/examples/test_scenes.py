"""fullstride.examples: scenes are functions of the seed, and their annotations are exact."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fullstride.data.dataset import open_data
from fullstride.data.readers.splits import SplitRule
from fullstride.data.targets import open_labels

pytest.importorskip("sklearn")
pytest.importorskip("skimage")
from fullstride.examples import scenes, split_scene, write_scenes
from fullstride.examples.__main__ import main

COUNTS = {"train": 8, "val": 8, "test": 8}


def some(split: str, side: int, count: int, kind: str = "digits") -> list[scenes.Scene]:
    return [split_scene(number, side, 0, split, kind) for number in range(count)]


def sprites_of(monkeypatch, number: int, side: int, kind: str) -> tuple:
    """A scene with the digits and the background that it was composed of."""
    calls = []

    def compose(background, sprites, real=scenes.compose):
        calls.append((background.copy(), [*sprites]))
        return real(background, sprites)

    monkeypatch.setattr(scenes, "compose", compose)
    each = split_scene(number, side, 0, "train", kind)
    monkeypatch.undo()
    background, sprites = calls[-1]
    return each, background, sprites


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_a_scene_is_a_function_of_seed_split_and_number(kind):
    one, again = (split_scene(3, 48, 7, "val", kind) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    others = [(4, 48, 7, "val"), (3, 48, 8, "val"), (3, 48, 7, "train")]
    assert not any(np.array_equal(one.image, split_scene(*each, kind).image) for each in others)


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_boxes_are_those_of_the_visible_pixels_and_every_digit_has_some(kind):
    for each in some("train", 64, 40, kind):
        assert each.image.shape == (64, 64, 3)
        assert len(each.boxes) == len(each.labels) == each.mask.max() <= scenes.LOOK.most
        for number, (left, top, right, bottom) in enumerate(each.boxes, 1):
            inside = each.mask[top:bottom, left:right] == number
            assert inside.sum() == (each.mask == number).sum() > 0
            assert inside[0].any()
            assert inside[-1].any()
            assert inside[:, 0].any()
            assert inside[:, -1].any()


def test_a_mask_is_what_is_nearest_at_each_pixel(monkeypatch):
    """Against a z-buffer, pixel by pixel; of equal depths the later digit."""
    for number in range(12):
        for kind in scenes.KINDS:
            each, _, sprites = sprites_of(monkeypatch, number, 64, kind)
            nearest, mask = np.full((64, 64), np.inf), np.zeros((64, 64), int)
            for index, sprite in enumerate(sprites, 1):
                rows, columns = sprite.place
                for row, column in np.argwhere(sprite.alpha > 0.5):
                    place = rows.start + row, columns.start + column
                    if sprite.depth <= nearest[place]:
                        nearest[place], mask[place] = sprite.depth, index
            assert np.array_equal(mask, each.mask)


def test_pixels_outside_of_the_digits_are_the_background(monkeypatch):
    for kind in scenes.KINDS:
        each, background, sprites = sprites_of(monkeypatch, 3, 96, kind)
        assert sprites
        touched = np.zeros((96, 96), bool)
        for sprite in sprites:
            touched[sprite.place] |= sprite.alpha > 0
        assert np.array_equal(each.image[~touched], background.astype(np.uint8)[~touched])
        assert (each.image != background.astype(np.uint8)).any(2)[each.mask > 0].mean() > 0.99


def test_a_digit_has_the_depth_of_the_floor_where_it_stands(monkeypatch):
    count = 0
    for number in range(30):
        each, _, sprites = sprites_of(monkeypatch, number, 96, "floor")
        assert each.depth is not None
        floor = [row[mask == 0] for row, mask in zip(each.depth, each.mask, strict=True)]
        for index, sprite in enumerate(sprites, 1):
            assert len({*each.depth[each.mask == index]}) == 1
            foot = sprite.place[0].stop - 1
            assert sprite.alpha[-1].max() > 0.5
            assert {*floor[foot]} <= {sprite.depth}
            assert {*each.depth[each.mask == index]} == {sprite.depth}
            count += 1
    assert count > 20


def test_the_floor_is_the_plane_of_a_pinhole_camera():
    """Its inverse depth is linear in the row; the row of the horizon is at infinity."""
    side, horizon = 960, 317.25
    depths = scenes.floor_depths(horizon, side) / 1000
    rows = np.flatnonzero(depths)
    slope, start = np.polyfit(rows + 0.5, 1 / depths[rows], 1)
    assert -start / slope == pytest.approx(horizon, abs=0.05)
    assert 1 / slope == pytest.approx(scenes.FOCAL * side * scenes.CAMERA_HEIGHT, rel=1e-4)
    assert rows[-1] == side - 1
    assert depths[rows[0]] <= scenes.MAX_DEPTH < depths[rows[0]] * 1.02
    assert not scenes.floor_depths(5.0, 24)[:5].any()


def test_the_depth_of_a_row_says_little_by_itself():
    """Horizons differ, so that the median depth of each row of the training is often wrong."""
    train, test = (
        np.stack([each.depth for each in some(split, 32, 120, "floor")])
        for split in ("train", "test")
    )
    rows = np.zeros(32)
    for row in range(32):
        values = train[:, row][train[:, row] > 0]
        rows[row] = np.median(values) if len(values) else np.median(train[train > 0])
    valid = test > 0
    expected = np.broadcast_to(rows[:, None], test.shape)[valid]
    ratio = np.maximum(test[valid] / expected, expected / test[valid])
    assert 0.3 < (ratio < 1.25).mean() < 0.5
    assert 0.35 < valid.mean() < 0.6


def test_no_digit_and_no_photograph_of_the_test_is_in_the_training():
    assert [len(scenes.load_digits(split).labels) for split in scenes.SPLITS] == [1037, 260, 500]
    digits = open_data("digits")
    assert scenes.load_digits("test").labels.tolist() == list(digits.test.targets)
    train, test = scenes.load_photographs("train"), scenes.load_photographs("test")
    assert len(train) > len(test) > 3
    assert not any(np.array_equal(a, b) for a in train for b in test)


def test_every_number_and_every_digit_is_about_equally_frequent():
    labels = [each.labels for each in some("train", 32, 500)]
    counts = np.bincount([len(each) for each in labels], minlength=5)
    assert counts.min() > 60  # of 100 each; a digit without a place is left out
    by_digit = np.bincount(np.concatenate(labels), minlength=10)
    assert by_digit.min() > 0.6 * by_digit.mean()


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_a_scene_takes_less_than_40_ms(kind):
    split_scene(0, 96, 0, "train", kind)  # loads the digits and the photographs
    start = time.process_time()
    some("train", 96, 20, kind)
    assert (time.process_time() - start) / 20 < 0.04


@pytest.mark.parametrize("one_class", [False, True])
def test_the_table_and_the_annotations_say_what_is_in_the_pictures(tmp_path, one_class):
    write_scenes(tmp_path, COUNTS, 32, 5, one_class=one_class)
    data = open_labels(str(tmp_path))
    assert data.classes == (("digit",) if one_class else tuple("0123456789"))
    for split, images in (("train", data.train), ("val", data.val), ("test", data.test)):
        content = json.loads((tmp_path / "annotations" / f"instances_{split}.json").read_text())
        for number in range(8):
            each = split_scene(number, 32, 5, split)
            labels = each.labels * (not one_class)
            assert np.array_equal(np.asarray(images.picture(number)), each.image)
            assert images.targets[number] == tuple(sorted({*labels.tolist()}))
            entries = [a for a in content["annotations"] if a["image_id"] == number]
            boxes = np.array([entry["bbox"] for entry in entries]).reshape(-1, 4)
            assert np.array_equal(boxes[:, :2] + boxes[:, 2:], each.boxes[:, 2:])
            assert [entry["category_id"] - 1 for entry in entries] == labels.tolist()
            for index, entry in enumerate(entries, 1):
                lengths = entry["segmentation"]["counts"]
                values = np.arange(len(lengths)) % 2
                mask = np.repeat(values, lengths).reshape(32, 32).T
                assert np.array_equal(mask == 1, each.mask == index)
                assert mask.sum() == entry["area"]
        ids = [entry["id"] for entry in content["annotations"]]
        assert sorted({*ids}) == ids == [*range(1, len(ids) + 1)]  # pycocotools ignores 0
    by_table = open_labels(str(tmp_path / "train/labels.csv"), SplitRule(val=0, test=0))
    names = {
        name: {by_table.classes[i] for i in target}
        for name, target in zip(by_table.train.names, by_table.train.targets, strict=True)
    }
    pairs = zip(data.train.names, data.train.targets, strict=True)
    assert names == {Path(name).name: {data.classes[i] for i in target} for name, target in pairs}


def test_masks_are_indices_of_classes_and_depths_are_millimetres(tmp_path):
    write_scenes(tmp_path, COUNTS, 48, 5, "floor")
    classes = (tmp_path / "masks/classes.txt").read_text().split()
    assert classes == ["background", *"0123456789"]
    for split in scenes.SPLITS:
        for number in range(8):
            each, name = split_scene(number, 48, 5, split, "floor"), f"{split}/{number:05}.png"
            mask = np.asarray(Image.open(tmp_path / "masks" / name))
            labels = np.array([-1, *each.labels])
            assert np.array_equal(mask.astype(int) - 1, labels[each.mask])
            with Image.open(tmp_path / "depth" / name) as depth:
                assert depth.mode == "I;16"
                assert np.array_equal(np.asarray(depth), each.depth)


def test_only_scenes_are_replaced(tmp_path):
    folder = tmp_path / "scenes"
    write_scenes(folder, {"train": 3, "val": 1, "test": 1}, 24, kind="floor")
    (folder / "notes.txt").write_text("mine")
    for _ in range(2):
        write_scenes(tmp_path / "one split", {"test": 1}, 24)
    write_scenes(folder, {"train": 2, "val": 1, "test": 1}, 24)
    assert len([*(folder / "train").glob("*.png")]) == 2
    assert not [*folder.glob("depth/*/*")]
    assert (folder / "notes.txt").read_text() == "mine"
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "photo.png").touch()
    with pytest.raises(ValueError, match=r"photo\.png"):
        write_scenes(tmp_path / "others", COUNTS, 24)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (dict(counts={"trian": 1}), "trian"),
        (dict(counts={"train": 0}), "train"),
        (dict(side=8), "8 pixels"),
        (dict(kind="wall"), "wall"),
    ],
)
def test_wrong_words_are_one_line(tmp_path, wrong, word):
    with pytest.raises(ValueError, match=word) as caught:
        write_scenes(tmp_path / "s", **wrong)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "s").exists()


def test_without_the_photographs_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage.data", None)
    scenes.load_photographs.cache_clear()
    with pytest.raises(ValueError, match=r"fullstride\[examples\]"):
        split_scene(0, 32, 0, "train")


def test_the_command_writes_all_splits(tmp_path, monkeypatch, capsys):
    words = [str(tmp_path / "s"), "--count", "10", "--side", "32", "--kind", "floor", "--one-class"]
    monkeypatch.setattr(sys, "argv", ["x", *words])
    main()
    for folder in (".", "masks", "depth"):
        counts = [len([*(tmp_path / "s" / folder / s).glob("*.png")]) for s in scenes.SPLITS]
        assert counts == [10, 2, 5]
    with Image.open(tmp_path / "s/train/00000.png") as image:
        assert image.size == (32, 32)
    for wrong, what in (
        (["--side", "5"], "use 24 to"),
        (["--count", "0"], "at least 1"),
        (["--seed", "-1"], "seed -1: use 0 or more"),
        (["--frames", "3", "--as-videos"], "--frames, --as-videos without --kind motion: add it"),
        (["--kind", "motion", "--one-class"], "--one-class with --kind motion: leave it out"),
    ):
        monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "s"), *wrong])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        message = capsys.readouterr().err
        assert what in message
        assert len(message.splitlines()) == 1


def test_each_split_of_a_small_count_has_a_scene(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "s"), "--count", "2", "--side", "32"])
    main()
    counts = [len([*(tmp_path / "s" / split).glob("*.png")]) for split in scenes.SPLITS]
    assert counts == [2, 1, 1]
