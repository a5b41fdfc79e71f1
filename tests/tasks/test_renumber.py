"""Data whose classes are in another order are scored all the same, by the names of the classes."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from rectangles import write_rectangles
from toy_bundles import bundle_of

from fullstride.data.readers.masks import IGNORED, MaskFile
from fullstride.tasks import find_task
from fullstride.train.scoring import matching_data


def test_boxes_get_the_labels_of_the_network(tmp_path):
    folder = str(write_rectangles(tmp_path / "boxes", {"train": 5, "val": 3}))
    names = find_task("detect").open_data(folder).classes
    bundle = replace(bundle_of("detect"), classes=names[::-1])
    own, other = (
        matching_data("bundle", each, folder) for each in (replace(bundle, classes=names), bundle)
    )
    assert other.classes == names[::-1]
    labels = [target.labels for target in own.train.targets]
    assert sum(labels, ())
    flipped = [tuple(1 - label for label in each) for each in labels]
    assert [target.labels for target in other.train.targets] == flipped
    with pytest.raises(ValueError, match="2 classes.*3"):
        matching_data("bundle", replace(bundle, classes=(*names, "more")), folder)
    with pytest.raises(ValueError, match="--class-names"):
        matching_data("bundle", replace(bundle, classes=("a", "b")), folder)


def test_a_mask_keeps_the_pixels_that_are_ignored(tmp_path):
    Image.fromarray(np.array([[0, 1, 2, 3]], np.uint8)).save(tmp_path / "mask.png")
    mask = MaskFile(root=tmp_path, name="mask.png", classes=bytes([0, 1, IGNORED, 2]))
    moved = find_task("segment").renumber(mask, (2, 0, 1))
    assert mask.read().tolist() == [[0, 1, IGNORED, 2]]
    assert moved.read().tolist() == [[2, 0, IGNORED, 1]]


def test_the_labels_of_an_image_stay_sorted():
    assert find_task("multilabel").renumber((0, 2), (5, 4, 3)) == (3, 5)
