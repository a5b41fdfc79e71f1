"""The scores of detections: VOC's AP50 and, with an extra, COCO's.

Letters: N images, D detections, M objects. All scores are in percent; docs/tasks/detection.md
defines them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from torch import Tensor

from fullstride.io.console import count_of
from fullstride.tasks.task import ClassScore, Score, best_f1_threshold, bootstrap

# AP50 by the rules of Pascal VOC, with 11 recall points.
#
# Source: the development kit of VOC2007 (host.robots.ox.ac.uk/pascal/VOC). Boxes have no pixel
# added to their sides here: they are x1, y1, x2, y2 of edges, not of the first and last pixel.

MIN_IOU = 0.5
POINTS = 11  # recalls 0, 0.1 to 1


class Scene(NamedTuple):
    """The detections and the objects of one image, in pixels of the picture."""

    detections: np.ndarray  # (D, 6): box, score, class; by falling score
    boxes: np.ndarray  # (M, 4)
    labels: np.ndarray  # (M,)
    difficult: np.ndarray  # (M,): also crowds


def scene_of(rows_d6: np.ndarray, target: Mapping[str, Tensor]) -> Scene:
    """Convert an image's outputs and target from pixels of the view to pixels of the picture.

    Rows of class -1 are no detections.
    """
    scale = target["scale"].item()
    detections = rows_d6[rows_d6[:, 5] >= 0].astype(np.float64)
    detections[:, :4] /= scale
    boxes, labels, difficult = (
        target[name].cpu().numpy() for name in ("boxes", "labels", "difficult")
    )
    return Scene(detections, boxes.astype(np.float64).reshape(-1, 4) / scale, labels, difficult)


class Hits(NamedTuple):
    """The detections of all images by falling score, without detections of difficult objects."""

    image: np.ndarray  # index of the image
    label: np.ndarray
    score: np.ndarray
    is_hit: np.ndarray


def match(scene: Scene) -> np.ndarray:
    """(D,): 1 for a right detection, 0 for a false one, -1 for one that does not count.

    A detection belongs to the object of its class with the highest IoU, if that is 0.5 or more. The
    first detection of an object is right, and later ones are false; detections of difficult objects
    do not count.
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
    """The results of `match` for all images; equal scores are in the order of images."""
    results = [match(scene) for scene in scenes]
    flags = np.concatenate([np.zeros(0, int), *results])
    image = np.repeat(np.arange(len(scenes)), [len(each) for each in results])
    rows = np.concatenate([np.zeros((0, 6)), *(scene.detections for scene in scenes)])
    order = np.argsort(-rows[:, 4], kind="stable")
    order = order[flags[order] >= 0]
    return Hits(image[order], rows[order, 5].astype(int), rows[order, 4], flags[order] == 1)


def object_counts(scenes: Sequence[Scene], classes: int) -> np.ndarray:
    """(N, K): the objects of each class in each image, without difficult ones."""
    counts = [np.bincount(s.labels[~s.difficult], minlength=classes) for s in scenes]
    return np.array(counts, int).reshape(len(scenes), classes)


def average_precisions(scenes: Sequence[Scene], classes: int) -> np.ndarray:
    """(K,): AP50 of each class, from 0 to 1; NaN for a class without objects."""
    all_hits, counts_k = hits(scenes), object_counts(scenes, classes).sum(0)
    weights_n = np.ones((len(scenes), 1), int)
    return np.array(
        [_eleven_points(all_hits, weights_n, k, counts_k[k : k + 1])[0] for k in range(classes)]
    )


def _eleven_points(
    all_hits: Hits, weights_nb: np.ndarray, label: int, objects_b: np.ndarray
) -> np.ndarray:
    """(B,): the AP50 of a class in each resample; NaN without objects."""
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


# AP, AP50, AP75, AP by size, and AR100 by the rules of COCO, computed by hotcoco.
#
# hotcoco is an extra, and bit-identical with pycocotools. Sizes are areas of boxes; COCO's own
# files have areas of masks.

SIZES = ("", "_small", "_medium", "_large")  # areas to 32 x 32 and to 96 x 96 pixels, and above
MOST = 2  # index of 100 detections of an image in the tables, after 1 and 10


def has_coco() -> bool:
    """Whether the extra is installed."""
    return find_spec("hotcoco") is not None


def coco_scores(scenes: Sequence[Scene], classes: int) -> dict[str, float]:
    """Scores in percent, without sizes that no object has; difficult objects are crowds.

    At least one object is not difficult.
    """
    from hotcoco import COCO, COCOeval  # an optional extra

    truth = COCO(as_coco(scenes, classes))
    rows = coco_results(scenes)
    if not len(rows):
        return {"ap": 0.0, "coco_ap50": 0.0, "coco_ap75": 0.0, "ar100": 0.0}
    evaluation = COCOeval(truth, truth.load_res(rows), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    # by IoU from 0.5 to 0.95, recall, class and size; its own summary is printed
    tables = evaluation.eval
    assert tables is not None
    precision = np.asarray(tables["precision"])[..., MOST]
    values = {f"ap{size}": precision[..., place] for place, size in enumerate(SIZES)}
    values |= {"coco_ap50": precision[0, ..., 0], "coco_ap75": precision[5, ..., 0]}
    values["ar100"] = np.asarray(tables["recall"])[:, :, 0, MOST]
    present = {name: value[value >= 0] for name, value in values.items()}
    return {name: 100 * float(value.mean()) for name, value in present.items() if len(value)}


def as_coco(scenes: Sequence[Scene], classes: int) -> dict[str, Any]:
    """The objects as the content of COCO's JSON; images are numbered from 1."""
    annotations: list[dict[str, Any]] = [
        dict(image_id=image, category_id=int(label), bbox=box, iscrowd=int(difficult))
        for image, scene in enumerate(scenes, 1)
        for box, label, difficult in zip(
            with_sizes(scene.boxes).tolist(), scene.labels, scene.difficult, strict=True
        )
    ]
    for number, each in enumerate(annotations, 1):
        _, _, width, height = each["bbox"]
        each |= {"id": number, "area": width * height}
    return dict(
        images=[dict(id=image) for image in range(1, len(scenes) + 1)],
        annotations=annotations,
        categories=[dict(id=k, name=str(k)) for k in range(classes)],
    )


def coco_results(scenes: Sequence[Scene]) -> np.ndarray:
    """(detections, 7): image, x, y, width, height, score, class."""
    parts = []
    for image, scene in enumerate(scenes, 1):
        boxes, rest = with_sizes(scene.detections[:, :4]), scene.detections[:, 4:]
        parts.append(np.column_stack((np.full(len(boxes), image), boxes, rest)))
    return np.concatenate(parts).astype(np.float64)


def with_sizes(boxes: np.ndarray) -> np.ndarray:
    """x1, y1, x2, y2 -> x, y, width, height."""
    return np.concatenate((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), 1)


# The detections that people see: above a score, and one for each place.

DEFAULT_SCORE = 0.3  # least score of visible detections, unless validation images chose one
MIN_OBJECTS = 10  # least objects to choose the score by
SAME_PLACE = 0.7  # IoU above which two boxes show the same object, whatever the classes


def visible_detections(detections_d6: np.ndarray, min_score: float) -> np.ndarray:
    """The detections with at least `min_score`, suppressed across classes.

    Rows are sorted by falling score. A detection is left out if its IoU with a better remaining one
    is above `SAME_PLACE`, whatever the classes: the head suppresses boxes within a class only, so
    that one object may have boxes of several classes.
    """
    rows = detections_d6[(detections_d6[:, 5] >= 0) & (detections_d6[:, 4] >= min_score)]
    overlaps = pairwise_iou(rows[:, :4], rows[:, :4]) > SAME_PLACE
    survivors: list[int] = []
    for index in range(len(rows)):
        if not overlaps[index, survivors].any():
            survivors.append(index)
    return rows[survivors]


def visible_hits(scenes: Sequence[Scene], min_score: float) -> Hits:
    """The `hits` of the visible detections."""
    visible = (visible_detections(scene.detections, min_score) for scene in scenes)
    pairs = zip(scenes, visible, strict=True)
    return hits([scene._replace(detections=rows) for scene, rows in pairs])


def best_min_score(scenes: Sequence[Scene], classes: int) -> float:
    """The `min_score` of visible detections with the best F1 over the objects of all classes.

    `DEFAULT_SCORE` for fewer than `MIN_OBJECTS` objects, and if no object is detected.
    """
    objects = int(object_counts(scenes, classes).sum())
    all_hits = visible_hits(scenes, 0.0)
    if objects < MIN_OBJECTS or not all_hits.is_hit.any():
        return DEFAULT_SCORE
    return best_f1_threshold(all_hits.score, all_hits.is_hit, objects)


@dataclass(frozen=True)
class ObjectScore(ClassScore):
    """The scores of one class; `images` counts objects, and `predicted` detections.

    Precision, recall and F1 count visible detections.
    """

    headers: ClassVar[Mapping[str, str]] = {
        **ClassScore.headers,
        "images": "objects",
        "predicted": "detections",
        "ap50": "AP50",
    }

    ap50: float | None  # None: no image has such an object


class DetectionScore(Score):
    """Scores of detections. The detections and objects of all images are held.

    Boxes are compared in pixels of the pictures, by which COCO calls objects small or large. F1 and
    the scores by class, except for AP50, count the detections visible at `min_score`.
    """

    def __init__(self, classes: int, min_score: float = DEFAULT_SCORE) -> None:
        self.classes, self.min_score = classes, min_score
        self.scenes: list[Scene] = []

    def update(self, detections_nd6: Tensor, targets: Sequence[Mapping[str, Tensor]]) -> None:
        images = detections_nd6.detach().float().cpu().numpy()
        if not np.isfinite(images).all():
            raise FloatingPointError("the network's outputs are not finite")
        self.scenes += [*map(scene_of, images, targets)]

    def merge(self, other: Self) -> None:
        self.scenes += other.scenes

    def compute(self) -> dict[str, float]:
        """`ap50`, `f1`, `absent_classes`, and `coco_scores` where the extra is installed."""
        precision_k = average_precisions(self.scenes, self.classes)
        present_k = ~np.isnan(precision_k)
        if not present_k.any():
            raise ValueError(
                f"none of {count_of(len(self.scenes), 'image')} to score on has an object that is "
                "not difficult: give others"
            )
        return {
            "ap50": 100 * float(precision_k[present_k].mean()),
            **(coco_scores(self.scenes, self.classes) if has_coco() else {}),
            "f1": self.f1(),
            "absent_classes": float((~present_k).sum()),
        }

    def resampled(self) -> np.ndarray:
        """A resample leaves out classes without objects, and is NaN without any object."""
        all_hits, counts_nk = hits(self.scenes), object_counts(self.scenes, self.classes)

        def weighted(drawn_nb: np.ndarray) -> np.ndarray:
            counts_kb = counts_nk.T @ drawn_nb
            rows = [_eleven_points(all_hits, drawn_nb, k, each) for k, each in enumerate(counts_kb)]
            sum_b, present_b = 100 * np.nansum(rows, 0), (counts_kb > 0).sum(0)
            return np.where(present_b > 0, sum_b / np.maximum(present_b, 1), np.nan)

        return bootstrap(len(self.scenes), weighted)

    def f1(self) -> float:
        """F1 of the visible detections, over the objects of all classes, in percent."""
        all_hits = visible_hits(self.scenes, self.min_score)
        objects = int(object_counts(self.scenes, self.classes).sum())
        return 200 * int(all_hits.is_hit.sum()) / (len(all_hits.is_hit) + objects)

    def by_class(self, names: Sequence[str]) -> list[ObjectScore]:
        all_hits = visible_hits(self.scenes, self.min_score)
        right_k, predicted_k = (
            np.bincount(labels, minlength=self.classes)
            for labels in (all_hits.label[all_hits.is_hit], all_hits.label)
        )
        objects_k = object_counts(self.scenes, self.classes).sum(0)
        precisions = average_precisions(self.scenes, self.classes)
        columns = (each.tolist() for each in (right_k, objects_k, predicted_k, precisions))
        return [
            ObjectScore.of_counts(
                name, right, objects, predicted, ap50=100 * precision if objects else None
            )
            for name, right, objects, predicted, precision in zip(names, *columns, strict=True)
        ]
