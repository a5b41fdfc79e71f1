"""Boxes of a view and of its picture, their drawing, and files that find the same boxes."""

import numpy as np
import pytest
import torch
from PIL import Image

from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import find_task
from fullstride.tasks.detect import coco_ap, task
from fullstride.tasks.detect.guess import Box
from fullstride.tasks.task import json_values
from fullstride.train.recipe import Recipe

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


def test_boxes_are_drawn_where_they_are() -> None:
    picture = Image.new("RGB", (100, 80))
    guesses = (Box("dog", 0.9, (20.0, 30, 60, 70)), Box("cat", 0.1, (70.0, 50, 90, 70)))
    drawn = DETECT.draw(picture, guesses, ("cat", "dog"))
    assert drawn is not None
    pixels = np.asarray(drawn).any(-1)
    assert pixels[70, 20:61].all()
    assert pixels[30:71, 60].all()
    assert not pixels[40:60, 30:50].any()
    assert not pixels[:, 70:].any()
    assert not np.asarray(picture).any()


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


def test_a_score_of_the_extra_is_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(epochs=1, batch=2, lr=0.1, score="ap")
    if coco_ap.has_coco():
        assert DETECT.with_options(recipe).find_metric("ap").name == "ap"
    monkeypatch.setattr(task, "has_coco", lambda: False)
    with pytest.raises(ValueError, match=r"fullstride\[detection\]"):
        DETECT.with_options(recipe)
