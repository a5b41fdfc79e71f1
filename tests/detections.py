"""Random objects, detections and pictures for the tests of the task detect."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fullstride.tasks.detect.average_precision import Scene


def random_boxes(rng: np.random.Generator, count: int, side: float, least: float = 4) -> np.ndarray:
    """(count, 4), of any aspect ratio, inside a square of `side`; some share an edge."""
    low = rng.uniform(0, side - least, (count, 2))
    high = np.minimum(low + least + rng.exponential(side / 5, (count, 2)), side)
    return np.concatenate((low, high), 1).round(rng.integers(0, 3))


def random_targets(seed: int, images: int, classes: int, side: float) -> list[dict[str, Tensor]]:
    """Of images of which the first has no object."""
    rng, targets = np.random.default_rng(seed), []
    for image in range(images):
        count = int(rng.integers(1, 8)) if image else 0
        targets.append(
            {
                "boxes": torch.from_numpy(random_boxes(rng, count, side)).float(),
                "labels": torch.from_numpy(rng.integers(0, classes, count)),
                "difficult": torch.from_numpy(rng.random(count) < 0.15),
                "scale": torch.tensor(1.0),
            }
        )
    return targets


def random_scenes(seed: int, images: int = 40, classes: int = 3) -> list[Scene]:
    """Objects, and detections near them and elsewhere; some scores are equal."""
    rng, scenes = np.random.default_rng(seed), []
    for _ in range(images):
        boxes = random_boxes(rng, int(rng.integers(0, 7)), 300)
        labels = rng.integers(0, classes, len(boxes))
        near = [boxes + rng.normal(0, spread, boxes.shape) for spread in (2, 6, 15)]
        others = random_boxes(rng, 4, 300)
        found = np.concatenate((*near, others))
        guesses = np.concatenate((np.tile(labels, 3), rng.integers(0, classes, 4)))
        scores = rng.uniform(0.05, 1, len(found)).round(2)
        rows = np.column_stack((found, scores, guesses))
        rows = rows[np.argsort(-rows[:, 4], kind="stable")]
        scenes.append(Scene(rows, boxes, labels, rng.random(len(boxes)) < 0.1))
    return scenes


COLOURS = {"red": (220, 40, 40), "blue": (40, 60, 220)}


def write_rectangles(folder: Path, counts: dict[str, int], side: int) -> None:
    """Pictures of 1 to 3 rectangles on noise, whose colours are their classes, in COCO's format.

    The first of each split has none.
    """
    rng = np.random.default_rng(0)
    (folder / "annotations").mkdir(parents=True)
    for split, count in counts.items():
        (folder / split).mkdir()
        images, annotations = [], []
        for number in range(count):
            pixels = rng.integers(90, 160, (side, side, 3), np.uint8)
            for _ in range(rng.integers(1, 4) if number else 0):
                w, h = rng.integers(side // 4, side // 2, 2).tolist()
                x, y = (int(rng.integers(0, side - length)) for length in (w, h))
                label = int(rng.integers(2))
                pixels[y : y + h, x : x + w] = list(COLOURS.values())[label]
                box = dict(image_id=number, category_id=label, bbox=[x, y, w, h], area=w * h)
                annotations.append(dict(box, id=len(annotations) + 1, iscrowd=0))
            Image.fromarray(pixels).save(folder / split / f"{number}.png")
            images.append(dict(id=number, file_name=f"{number}.png", width=side, height=side))
        categories = [dict(id=k, name=name) for k, name in enumerate(COLOURS)]
        file = folder / "annotations" / f"instances_{split}.json"
        parts = dict(images=images, annotations=annotations, categories=categories)
        file.write_text(json.dumps(parts))
