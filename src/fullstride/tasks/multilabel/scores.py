"""How good are predicted labels? mAP, and precision, recall and F1 by class and overall.

Letters: N images, K labels. Scores but the loss are in percent; docs/tasks.md defines them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.tasks.confusion import ClassScore
from fullstride.tasks.multilabel.average_precision import average_precisions, bootstrap_interval
from fullstride.tasks.multilabel.thresholds import DEFAULT
from fullstride.tasks.task import full_precision

TOP = 3  # labels of an image that the scores of the name count


@dataclass(frozen=True)
class LabelScore(ClassScore):
    """The scores of one label; precision, recall and F1 are those at its threshold."""

    average_precision: float | None  # None: no image has the label
    threshold: float  # of the probability, in percent


@dataclass(frozen=True)
class Counts:
    """For each label the images that have it and are predicted to, have it, and are predicted."""

    correct_k: np.ndarray
    images_k: np.ndarray
    predicted_k: np.ndarray

    @classmethod
    def of(cls, predicted_nk: np.ndarray, has_nk: np.ndarray) -> "Counts":
        both = (predicted_nk & has_nk).sum(0)
        return cls(both, has_nk.sum(0), predicted_nk.sum(0))

    def scores(self, suffix: str = "") -> dict[str, float]:
        """CP, CR, CF1, the mean F1 and OP, OR, OF1, in percent."""
        present = self.images_k > 0
        columns = (self.correct_k, self.images_k, self.predicted_k)
        correct, images, predicted = (each[present] for each in columns)
        cp = float((correct / np.maximum(predicted, 1)).mean())
        cr = float((correct / images).mean())
        op = float(self.correct_k.sum() / max(1, self.predicted_k.sum()))
        recall = float(self.correct_k.sum() / self.images_k.sum())
        mean_f1 = float((2 * correct / (images + predicted)).mean())
        values = dict(cp=cp, cr=cr, cf1=_harmonic(cp, cr), mean_f1=mean_f1)
        values |= {"op": op, "or": recall, "of1": _harmonic(op, recall)}
        return {f"{name}{suffix}": 100 * value for name, value in values.items()}


class MultiLabelScore:
    """Scores of predicted labels. The logits of all images are held, 5 bytes a label and image.

    Labels are predicted from a probability of 0.5 on, for the names with `top3` if they are among
    the three most probable too; with `thresholds` there is the mean F1 by these as well. Means over
    classes are those of the classes that an image has; the number of others is a score.
    """

    def __init__(self, thresholds: Sequence[float] = ()) -> None:
        self.thresholds = thresholds
        self.logits: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, logits_nk: Tensor, targets_nk: Tensor) -> None:
        self.logits.append(full_precision(logits_nk).cpu())
        self.targets.append(targets_nk.cpu() > 0)

    def merge(self, other: "MultiLabelScore") -> None:
        self.logits += other.logits
        self.targets += other.targets

    def compute(self) -> dict[str, float]:
        logits_nk, has_nk = self.arrays()
        present = has_nk.any(0)
        if not present.any():
            raise ValueError(
                f"none of the {len(has_nk):,} images to score on has a label: give others"
            )
        rank_nk = np.argsort(-logits_nk, axis=1, kind="stable").argsort(axis=1)
        half_nk = logits_nk >= 0
        top = Counts.of(half_nk & (rank_nk < TOP), has_nk).scores(f"_top{TOP}")
        has_top = logits_nk.shape[1] > TOP
        fitted = self.counts(self.thresholds) if self.thresholds else None
        at_thresholds = {"mean_f1_thresholds": fitted.scores()["mean_f1"]} if fitted else {}
        return {
            "map": 100 * float(self.average_precisions[present].mean()),
            **Counts.of(half_nk, has_nk).scores(),
            **(top if has_top else {}),
            **at_thresholds,
            "loss": self.loss(),
            "absent_classes": float((~present).sum()),
        }

    def loss(self) -> float:
        """The mean over images of the binary cross-entropy, summed over labels."""
        logits_nk, has_nk = (torch.cat(each).double() for each in (self.logits, self.targets))
        total = F.binary_cross_entropy_with_logits(logits_nk, has_nk, reduction="sum")
        return total.item() / len(logits_nk)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Logits (N, K), and which labels the images have (N, K)."""
        return torch.cat(self.logits).numpy(), torch.cat(self.targets).numpy()

    @property
    def average_precisions(self) -> np.ndarray:
        return average_precisions(*self.arrays())

    def counts(self, thresholds: Sequence[float] = ()) -> Counts:
        """The counts of labels that are predicted by `thresholds`, or from 0.5 on."""
        logits_nk, has_nk = self.arrays()
        if not thresholds:
            return Counts.of(logits_nk >= 0, has_nk)
        probability_nk = torch.from_numpy(logits_nk).sigmoid().numpy()
        return Counts.of(probability_nk >= np.array(thresholds), has_nk)

    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mAP, in percent."""
        limits = bootstrap_interval(*self.arrays())
        return limits and (100 * limits[0], 100 * limits[1])

    def by_class(self, names: Sequence[str]) -> list[LabelScore]:
        counts = self.counts(self.thresholds)
        columns = (counts.correct_k, counts.images_k, counts.predicted_k)
        precisions = self.average_precisions.tolist()
        thresholds = self.thresholds or [DEFAULT] * len(names)
        return [
            LabelScore.of_counts(
                name,
                correct,
                images,
                predicted,
                average_precision=100 * precision if images else None,
                threshold=100 * threshold,
            )
            for name, correct, images, predicted, precision, threshold in zip(
                names, *(each.tolist() for each in columns), precisions, thresholds, strict=True
            )
        ]


def _harmonic(a: float, b: float) -> float:
    return 2 * a * b / (a + b) if a + b else 0.0
