"""Random objects and detections for the tests of the task detect."""

import numpy as np
import torch
from torch import Tensor

from fullstride.tasks.detect.voc_ap import Scene


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
