"""benchmarks/task_scenes.py: scenes are functions of the seed, and their annotations are exact."""

import json
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fullstride.data.dataset import open_data
from fullstride.data.label_data import open_labels

pytest.importorskip("sklearn")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
scenes = import_module("task_scenes")


def some(split: str, side: int, count: int) -> list:
    return [scenes.split_scene(number, side, 0, split) for number in range(count)]


def test_a_scene_is_a_function_of_seed_split_and_number():
    one, again = (scenes.split_scene(3, 48, 7, "val") for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    others = [(4, 48, 7, "val"), (3, 48, 8, "val"), (3, 48, 7, "train")]
    assert not any(np.array_equal(one.image, scenes.split_scene(*each).image) for each in others)


def test_boxes_are_those_of_the_visible_pixels_and_every_digit_has_some():
    for each in some("train", 64, 40):
        assert each.image.shape == (64, 64, 3)
        assert len(each.boxes) == len(each.labels) == each.mask.max() <= scenes.LOOK.most
        for number, (left, top, right, bottom) in enumerate(each.boxes, 1):
            inside = each.mask[top:bottom, left:right] == number
            assert inside.sum() == (each.mask == number).sum() > 0
            assert inside[0].any()
            assert inside[-1].any()
            assert inside[:, 0].any()
            assert inside[:, -1].any()


def test_pixels_outside_of_the_digits_are_the_photograph():
    """A scene without digits is a background; digits change only pixels near their masks."""
    each = next(s for s in some("test", 96, 30) if len(s.labels) == 2)
    index = next(i for i, s in enumerate(some("test", 96, 30)) if len(s.labels) == 2)
    rng = np.random.default_rng([0, 2, index])
    background = scenes._background(rng, scenes.load_textures("test"), 96)
    differs = (each.image != background).any(2)
    assert differs[each.mask > 0].mean() > 0.99
    assert differs[each.mask == 0].mean() < 0.5


def test_no_digit_and_no_photograph_of_the_test_is_in_the_training():
    assert [len(scenes.load_digits(split).labels) for split in scenes.SPLITS] == [1037, 260, 500]
    digits = open_data("digits")
    assert scenes.load_digits("test").labels.tolist() == list(digits.test.targets)
    train, test = scenes.load_textures("train"), scenes.load_textures("test")
    assert not any(np.array_equal(a, b) for a in train for b in test)


def test_every_number_and_every_digit_is_about_equally_frequent():
    labels = [each.labels for each in some("train", 32, 500)]
    counts = np.bincount([len(each) for each in labels], minlength=5)
    assert counts.min() > 60  # of 100 each; a digit without a place is left out
    by_digit = np.bincount(np.concatenate(labels), minlength=10)
    assert by_digit.min() > 0.6 * by_digit.mean()


def test_a_scene_takes_less_than_40_ms():
    scenes.split_scene(0, 96, 0, "train")  # loads the digits and the photographs
    start = time.process_time()
    some("train", 96, 20)
    assert (time.process_time() - start) / 20 < 0.04


def test_the_table_and_the_annotations_say_what_is_in_the_pictures(tmp_path):
    for split in scenes.SPLITS:
        scenes.write_scenes(tmp_path, 8, 32, 5, split)
    data = open_labels(str(tmp_path))
    assert data.classes == tuple("0123456789")
    for split, images in (("train", data.train), ("val", data.minival), ("test", data.test)):
        content = json.loads((tmp_path / "annotations" / f"instances_{split}.json").read_text())
        for number in range(8):
            each = scenes.split_scene(number, 32, 5, split)
            assert np.array_equal(np.asarray(images.picture(number)), each.image)
            assert images.targets[number] == tuple(sorted({*each.labels.tolist()}))
            entries = [a for a in content["annotations"] if a["image_id"] == number]
            boxes = np.array([entry["bbox"] for entry in entries]).reshape(-1, 4)
            assert np.array_equal(boxes[:, :2] + boxes[:, 2:], each.boxes[:, 2:])
            for index, entry in enumerate(entries, 1):
                lengths = entry["segmentation"]["counts"]
                values = np.arange(len(lengths)) % 2
                mask = np.repeat(values, lengths).reshape(32, 32).T
                assert np.array_equal(mask == 1, each.mask == index)
                assert mask.sum() == entry["area"]
    by_table = open_labels(str(tmp_path / "train/labels.csv"), minival=0, test=0)
    by_name = {Path(name).name: target for name, target in zip(*_pairs(data.train), strict=True)}
    names = {
        name: {by_table.classes[i] for i in t}
        for name, t in zip(*_pairs(by_table.train), strict=True)
    }
    assert names == {name: {str(i) for i in target} for name, target in by_name.items()}


def _pairs(images) -> tuple:
    return images.names, images.targets


def test_the_command_writes_all_splits(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "s"), "--count", "10", "--side", "32"])
    scenes.main()
    counts = [len(list((tmp_path / "s" / split).glob("*.png"))) for split in scenes.SPLITS]
    assert counts == [10, 2, 5]
    with Image.open(tmp_path / "s/train/00000.png") as image:
        assert image.size == (32, 32)
