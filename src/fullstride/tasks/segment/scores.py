"""How good are predicted classes of pixels? mIoU and accuracies, from one table of counts.

Letters: N images, K classes, H x W pixels. Scores but the loss are in percent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.data.readers.map_files import IGNORED
from fullstride.tasks.confusion import ClassScore
from fullstride.tasks.task import full_precision


@dataclass(frozen=True)
class RegionScore(ClassScore):
    """The scores of one class. `images` and `predicted` are numbers of pixels."""

    headers: ClassVar[Mapping[str, str]] = {
        **ClassScore.headers,
        "images": "pixels",
        "predicted": "predicted pixels",
        "iou": "IoU",
    }

    iou: float | None  # pixels that are rightly of the class / those that are or are taken for it


class SegmentScore:
    """Pixels by class and prediction over all images, at the size of the view.

    Pixels of class `IGNORED` count nowhere: padding is among them. A class that no pixel has and
    none is taken for has no IoU; `absent_classes` is their number. `miou_constant` is the mIoU of
    the most frequent class for all pixels.
    """

    def __init__(self) -> None:
        self.counts_kk = np.zeros((0, 0), np.int64)  # by class (rows) and prediction (columns)
        self.loss = 0.0  # the sum over pixels

    def update(self, logits_nkhw: Tensor, targets_nhw: Tensor) -> None:
        classes = logits_nkhw.shape[1]
        logits, targets = full_precision(logits_nkhw), targets_nhw.long()
        valid = targets != IGNORED
        pairs = targets[valid] * classes + logits.argmax(1)[valid]
        counts = pairs.bincount(minlength=classes**2).view(classes, classes)
        self._add(counts.cpu().numpy())
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        self.loss += loss.sum(dtype=torch.float64).item()

    def merge(self, other: "SegmentScore") -> None:
        self._add(other.counts_kk)
        self.loss += other.loss

    def _add(self, counts_kk: np.ndarray) -> None:
        if not self.counts_kk.size:  # of a process that had no image
            self.counts_kk = np.zeros_like(counts_kk)
        if counts_kk.size:
            self.counts_kk = self.counts_kk + counts_kk

    def compute(self) -> dict[str, float]:
        pixels = self.counts_kk.sum()
        if not pixels:
            raise ValueError("none of the images to score on has a pixel with a class: give others")
        hits, of_class, union = self.sums()
        occurs = union > 0
        return {
            "miou": 100 * float((hits[occurs] / union[occurs]).mean()),
            "pixel_accuracy": 100 * float(hits.sum() / pixels),
            "mean_accuracy": 100 * float((hits / np.maximum(of_class, 1))[of_class > 0].mean()),
            "miou_constant": 100 * float(of_class.max() / pixels / (of_class > 0).sum()),
            "loss": self.loss / int(pixels),
            "absent_classes": float((~occurs).sum()),
        }

    def sums(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each class the pixels that are rightly of it, are of it, and in either set."""
        hits, of_class = self.counts_kk.diagonal(), self.counts_kk.sum(1)
        return hits, of_class, of_class + self.counts_kk.sum(0) - hits

    def by_class(self, names: Sequence[str]) -> list[RegionScore]:
        hits, of_class, union = self.sums()
        predicted = self.counts_kk.sum(0)
        return [
            RegionScore.of_counts(
                name,
                int(hits[k]),
                int(of_class[k]),
                int(predicted[k]),
                iou=100 * float(hits[k] / union[k]) if union[k] else None,
            )
            for k, name in enumerate(names)
        ]
