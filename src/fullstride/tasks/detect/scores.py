"""How good are detected boxes? VOC's AP50 and, with an extra, COCO's scores.

Letters: N images, D detections, M objects. All scores are in percent; docs/dense.md defines them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fullstride.tasks.confusion import ClassScore
from fullstride.tasks.detect import voc_ap
from fullstride.tasks.detect.coco_ap import coco_scores, has_coco
from fullstride.tasks.detect.voc_ap import Scene

SURE = 0.5  # score from which a detection counts for precision, recall and F1


@dataclass(frozen=True)
class ObjectScore(ClassScore):
    """The scores of one class; `images` are its objects, and `predicted` its detections.

    Precision, recall and F1 are those of detections with a score of 0.5 or more.
    """

    headers: ClassVar[Mapping[str, str]] = {
        **ClassScore.headers,
        "images": "objects",
        "predicted": "detections",
        "ap50": "AP50",
    }

    ap50: float | None  # None: no image has such an object


class DetectionScore:
    """Scores of detections. Those and the objects of all images are held.

    Boxes are compared in pixels of the pictures, by which COCO calls objects small or large.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.scenes: list[Scene] = []

    def update(self, detections_nd6: Tensor, targets: Sequence[Mapping[str, Tensor]]) -> None:
        images = detections_nd6.detach().float().cpu().numpy().astype(np.float64)
        if not np.isfinite(images).all():
            raise FloatingPointError("the network's outputs are not finite")
        for rows, target in zip(images, targets, strict=True):
            scale = target["scale"].item()
            detections = rows[rows[:, 5] >= 0]
            detections[:, :4] /= scale
            boxes, labels, difficult = (
                target[name].cpu().numpy() for name in ("boxes", "labels", "difficult")
            )
            boxes = boxes.astype(np.float64).reshape(-1, 4) / scale
            self.scenes.append(Scene(detections, boxes, labels, difficult))

    def merge(self, other: "DetectionScore") -> None:
        self.scenes += other.scenes

    def compute(self) -> dict[str, float]:
        """`ap50`, those of `coco_scores` where the extra is installed, and `absent_classes`."""
        precision_k = self.average_precisions()
        present_k = ~np.isnan(precision_k)
        if not present_k.any():
            raise ValueError(
                f"none of the {len(self.scenes):,} images to score on has an object that is not "
                "difficult: give others"
            )
        return {
            "ap50": 100 * float(precision_k[present_k].mean()),
            **(coco_scores(self.scenes, self.classes) if has_coco() else {}),
            "absent_classes": float((~present_k).sum()),
        }

    def average_precisions(self) -> np.ndarray:
        return voc_ap.average_precisions(self.scenes, self.classes)

    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of `ap50`, in percent."""
        limits = voc_ap.bootstrap_interval(self.scenes, self.classes)
        return limits and (100 * limits[0], 100 * limits[1])

    def by_class(self, names: Sequence[str]) -> list[ObjectScore]:
        all_hits = voc_ap.hits(self.scenes)
        sure = all_hits.score >= SURE
        right_k, predicted_k = (
            np.bincount(all_hits.label[chosen], minlength=self.classes)
            for chosen in (sure & all_hits.is_hit, sure)
        )
        objects_k = voc_ap.object_counts(self.scenes, self.classes).sum(0)
        precisions = self.average_precisions()
        columns = (each.tolist() for each in (right_k, objects_k, predicted_k, precisions))
        return [
            ObjectScore.of_counts(
                name, right, objects, predicted, ap50=100 * precision if objects else None
            )
            for name, right, objects, predicted, precision in zip(names, *columns, strict=True)
        ]
