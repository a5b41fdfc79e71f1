"""Which one of K classes does an image show? The task of classification."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.nets.backbone import Backbone
from fullstride.tasks.classification_score import TOP, ClassificationScore
from fullstride.tasks.confusion import ConfusionMatrix
from fullstride.tasks.metric_learning import WithEmbedding, weighted_triplet
from fullstride.tasks.task import Metric, Score, Task, full_precision


@dataclass(frozen=True)
class Guess:
    """A class, and its probability by the network."""

    label: str
    probability: float

    def __str__(self) -> str:
        return f"{' '.join(self.label.split())} {100 * self.probability:.1f} %"


@dataclass(frozen=True)
class Classify(Task):
    """Cross-entropy with label smoothing (arXiv:1512.00567); compared by top-1 accuracy in percent.

    With `triplet`, `tasks.metric_learning.weighted_triplet` on the embeddings is added.
    """

    label_smoothing: float = 0.0  # probability taken from the true class and spread over all
    teacher_share: float = 0.5  # weight of the cross-entropy with a teacher's probabilities
    triplet: float = 0.0  # weight of the triplet loss; 0: off

    name: ClassVar[str] = "classify"
    metric: ClassVar[Metric] = Metric("top1", "top-1", "%", percent_of_images=True)
    other_metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("top5", "top-5", "%", percent_of_images=True, min_outputs=TOP + 1),
        Metric("balanced_accuracy", "balanced accuracy", "%"),
        Metric("macro_f1", "macro-F1", "%"),
        Metric("loss", "loss", higher_is_better=False),
        Metric("ece", "calibration error", "%", higher_is_better=False),
    )
    single_label: ClassVar[bool] = True

    def training_module(self, net: Backbone) -> nn.Module:
        return WithEmbedding(net) if self.triplet else net

    def loss(self, outputs: Any, targets: Tensor, teacher: Tensor | None = None) -> Tensor:
        """`targets`: class indices (N,), or a probability for each class (N, K).

        `outputs`: logits (N, K), with `triplet` a pair of logits and embeddings (N, D).
        """
        logits, embeddings = outputs if self.triplet else (outputs, None)
        logits = full_precision(logits)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        if teacher is not None:
            loss = torch.lerp(loss, F.cross_entropy(logits, teacher), self.teacher_share)
        if embeddings is not None:
            loss = loss + self.triplet * weighted_triplet(embeddings, targets)
        return loss

    def score(self) -> ClassificationScore:
        return ClassificationScore()

    def confusion(self, score: Score) -> ConfusionMatrix:
        assert isinstance(score, ClassificationScore)
        return score.confusion()

    def activate(self, outputs: Tensor) -> Tensor:
        """Logits (N, K) -> probabilities."""
        return outputs.softmax(1)

    def decode(self, outputs: Tensor, classes: Sequence[str], top: int) -> list[tuple[Guess, ...]]:
        return [most_probable(row, classes, top) for row in outputs]


def most_probable(probabilities_k: Tensor, classes: Sequence[str], top: int) -> tuple[Guess, ...]:
    order = probabilities_k.argsort(descending=True, stable=True)[:top]
    return tuple(Guess(classes[int(k)], probabilities_k[k].item()) for k in order)
