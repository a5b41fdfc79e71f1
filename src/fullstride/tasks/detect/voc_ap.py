"""How good are detections by the rules of Pascal VOC? AP50 with 11 recall points.

Source: the development kit of VOC2007 (host.robots.ox.ac.uk/pascal/VOC). Boxes have no pixel added
to their sides here: they are x1, y1, x2, y2 of edges, not of the first and last pixel.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_IOU = 0.5
POINTS = 11  # recalls 0, 0.1 to 1
RESAMPLES = 200


class Scene(NamedTuple):
    """The detections and the objects of one image, in pixels of the picture."""

    detections: np.ndarray  # (D, 6): box, score, class; by falling score
    boxes: np.ndarray  # (M, 4)
    labels: np.ndarray  # (M,)
    difficult: np.ndarray  # (M,): also crowds


class Hits(NamedTuple):
    """The detections of all images, but for those of difficult objects, by falling score."""

    image: np.ndarray  # index of the image
    label: np.ndarray
    score: np.ndarray
    is_hit: np.ndarray


def match(scene: Scene) -> np.ndarray:
    """(D,): 1 for a detection of an object, 0 for a false one, -1 for one that does not count.

    A detection belongs to the object of its class with the highest IoU, if that is 0.5 or more. The
    first detection of an object is right, and later ones are false; those of difficult objects do
    not count.
    """
    detections, boxes, labels, difficult = scene
    result = np.zeros(len(detections), int)
    if not (len(detections) and len(boxes)):
        return result
    iou_dm = pairwise_iou(detections[:, :4], boxes)
    iou_dm[detections[:, 5, None] != labels] = -1
    object_d, is_match = iou_dm.argmax(1), iou_dm.max(1) >= MIN_IOU
    places = np.flatnonzero(is_match)
    _, first = np.unique(object_d[places], return_index=True)
    result[places[first]] = 1
    result[is_match & difficult[object_d]] = -1
    return result


def pairwise_iou(boxes_a4: np.ndarray, boxes_b4: np.ndarray) -> np.ndarray:
    """(A, B)"""
    low = np.maximum(boxes_a4[:, None, :2], boxes_b4[:, :2])
    high = np.minimum(boxes_a4[:, None, 2:], boxes_b4[:, 2:])
    inter_ab = (high - low).clip(0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (boxes_a4, boxes_b4)]
    union_ab = areas[0][:, None] + areas[1] - inter_ab
    return np.divide(inter_ab, union_ab, out=np.zeros_like(inter_ab), where=union_ab > 0)


def hits(scenes: Sequence[Scene]) -> Hits:
    """What `match` says of all images; of equal scores the first image is first."""
    results = [match(scene) for scene in scenes]
    flags = np.concatenate([np.zeros(0, int), *results])
    image = np.repeat(np.arange(len(scenes)), [len(each) for each in results])
    rows = np.concatenate([np.zeros((0, 6)), *(scene.detections for scene in scenes)])
    order = np.argsort(-rows[:, 4], kind="stable")
    order = order[flags[order] >= 0]
    return Hits(image[order], rows[order, 5].astype(int), rows[order, 4], flags[order] == 1)


def object_counts(scenes: Sequence[Scene], classes: int) -> np.ndarray:
    """(N, K): the objects of each class in each image, but for difficult ones."""
    counts = [np.bincount(s.labels[~s.difficult], minlength=classes) for s in scenes]
    return np.array(counts, int).reshape(len(scenes), classes)


def average_precisions(scenes: Sequence[Scene], classes: int) -> np.ndarray:
    """(K,): AP50 of each class, from 0 to 1; NaN of one without objects."""
    all_hits, counts_k = hits(scenes), object_counts(scenes, classes).sum(0)
    weights_n = np.ones((len(scenes), 1), int)
    return np.array(
        [_eleven_points(all_hits, weights_n, k, counts_k[k : k + 1])[0] for k in range(classes)]
    )


def bootstrap_interval(scenes: Sequence[Scene], classes: int) -> tuple[float, float] | None:
    """The 95 % interval of the mean AP50: its percentiles over resamples of the images.

    Images are drawn with replacement, with the same seed in every call. A resample without objects
    of a class leaves the class out. None where resamples say nothing, as with one image.
    """
    number = len(scenes)
    if number < 2:
        return None
    rng = np.random.default_rng(0)
    drawn_nb = rng.multinomial(number, np.full(number, 1 / number), RESAMPLES).T
    all_hits, counts_kb = hits(scenes), object_counts(scenes, classes).T @ drawn_nb
    rows = [_eleven_points(all_hits, drawn_nb, k, counts_kb[k]) for k in range(classes)]
    present_kb = counts_kb > 0
    some_b = present_kb.any(0)
    if some_b.mean() < 0.5:
        return None
    means = np.nansum(np.array(rows), 0)[some_b] / present_kb.sum(0)[some_b]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def _eleven_points(
    all_hits: Hits, weights_nb: np.ndarray, label: int, objects_b: np.ndarray
) -> np.ndarray:
    """(B,): the AP50 of a class by resample, with images drawn so many times; NaN of 0 objects."""
    own = all_hits.label == label
    weights_db = weights_nb[all_hits.image[own]]
    total_db = weights_db.cumsum(0)
    right_db = (weights_db * all_hits.is_hit[own, None]).cumsum(0)
    precision_db = right_db / np.maximum(total_db, 1)
    # the highest precision there or at any higher recall; in integers, as 3 / 10 is below 0.1 * 3
    best_db = np.maximum.accumulate(precision_db[::-1])[::-1]
    columns = np.arange(len(objects_b))
    sums_b = np.zeros(len(objects_b))
    for point in range(POINTS):
        reached_db = right_db * (POINTS - 1) >= point * objects_b
        if len(reached_db):
            first_b = reached_db.argmax(0)
            sums_b += np.where(reached_db.any(0), best_db[first_b, columns], 0)
    return np.where(objects_b > 0, sums_b / POINTS, np.nan)
