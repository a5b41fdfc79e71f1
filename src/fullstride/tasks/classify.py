"""Which one of K classes does an image show? The task of classification."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from fullstride.data.dataset import DataSet
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import Temperature
from fullstride.tasks.classification_score import TOP, ClassificationScore
from fullstride.tasks.confusion import ConfusionMatrix
from fullstride.tasks.losses import (
    binary_cross_entropy,
    cross_entropy,
    focal_loss,
    weight_tensor,
)
from fullstride.tasks.metric_learning import TRIPLET_FORMS, TripletForm, WithEmbedding
from fullstride.tasks.task import Metric, Score, Task, full_precision
from fullstride.tasks.temperature import fit_temperature


@dataclass(frozen=True)
class Guess:
    """A class, and its probability by the network."""

    label: str
    probability: float

    def __str__(self) -> str:
        return f"{' '.join(self.label.split())} {100 * self.probability:.1f} %"


@dataclass(frozen=True)
class Classify(Task):
    """One of the losses of `tasks.losses`; compared by top-1 accuracy in percent.

    With `triplet`, the loss of `tasks.metric_learning.TRIPLET_FORMS` on the embeddings is added.
    """

    label_smoothing: float = 0.0  # probability taken from the true class and spread over all
    teacher_share: float = 0.5  # weight of the cross-entropy with a teacher's probabilities
    triplet: float = 0.0  # weight of the triplet loss; 0: off
    triplet_form: TripletForm = "weighted"
    objective: Literal["cross_entropy", "bce", "focal"] = "cross_entropy"  # a recipe's `loss`
    bce_reduction: Literal["sum", "mean"] = "sum"
    bce_threshold: float = 0.0
    focal_gamma: float = 2.0
    class_weights: Literal["none", "balanced", "sqrt"] = "none"
    class_counts: tuple[int, ...] = ()  # training images of each class, for `class_weights`
    temperature: Temperature = 1.0  # that logits are divided by before softmax, not in the loss

    name: ClassVar[str] = "classify"
    metric: ClassVar[Metric] = Metric("top1", "top-1", "%", percent_of_images=True)
    other_metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("top5", "top-5", "%", percent_of_images=True, min_outputs=TOP + 1),
        Metric("balanced_accuracy", "balanced accuracy", "%"),
        Metric("macro_f1", "macro-F1", "%"),
        Metric("loss", "loss", higher_is_better=False),
        Metric("ece", "ECE", "%", higher_is_better=False),
    )
    single_label: ClassVar[bool] = True
    state_fields: ClassVar[tuple[str, ...]] = ("temperature",)

    def with_options(self, recipe: Any) -> "Classify":
        return replace(super().with_options(recipe), objective=recipe.loss)

    def for_data(self, data: DataSet) -> "Classify":
        data.check_one_class()
        counts = Counter(data.train.targets)
        return replace(self, class_counts=tuple(counts[i] for i in range(len(data.classes))))

    def training_module(self, net: Backbone) -> nn.Module:
        return WithEmbedding(net) if self.triplet else net

    def loss(self, outputs: Any, targets: Tensor, teacher: Tensor | None = None) -> Tensor:
        """`targets`: class indices (N,), or a probability for each class (N, K).

        `outputs`: logits (N, K), with `triplet` a pair of logits and embeddings (N, D).
        """
        logits, embeddings = outputs if self.triplet else (outputs, None)
        logits = full_precision(logits)
        weights = self.weights(logits)
        options: dict[str, Any] = dict(smoothing=self.label_smoothing, weights_k=weights)
        if self.objective == "bce":
            how, threshold = self.bce_reduction, self.bce_threshold
            loss = binary_cross_entropy(
                logits, targets, threshold=threshold, reduction=how, **options
            )
        elif self.objective == "focal":
            loss = focal_loss(logits, targets, gamma=self.focal_gamma, **options)
        else:
            loss = cross_entropy(logits, targets, **options)
        if teacher is not None:
            taught = cross_entropy(logits, teacher, weights_k=weights)
            loss = torch.lerp(loss, taught, self.teacher_share)
        if embeddings is not None:
            loss = loss + self.triplet * TRIPLET_FORMS[self.triplet_form](embeddings, targets)
        return loss

    def weights(self, logits: Tensor) -> Tensor | None:
        """The weight of each class (K,) in the loss of `logits`; None for equal ones."""
        if self.class_weights == "none":
            return None
        if not self.class_counts:
            raise ValueError(
                f"class_weights {self.class_weights} come from the images of each class: use "
                "task.for_data(data)"
            )
        how = self.class_weights
        return weight_tensor(self.class_counts, how, logits.device, logits.dtype)

    def score(self) -> ClassificationScore:
        return ClassificationScore(self.temperature)

    def fit(self, outputs: Tensor, targets: Tensor) -> Self:
        return replace(self, temperature=fit_temperature(outputs, targets))

    def fit_note(self, scores: Mapping[str, float]) -> str:
        if self.temperature == 1:
            return ""
        return (
            f"calibration by a temperature of {self.temperature:.3g}: ECE of the minival "
            f"{scores['ece_uncalibrated']:.1f} % before, {scores['ece']:.1f} % with it"
        )

    def confusion(self, score: Score) -> ConfusionMatrix:
        assert isinstance(score, ClassificationScore)
        return score.confusion()

    def activate(self, outputs: Tensor) -> Tensor:
        """Logits (N, K) -> probabilities."""
        scaled = outputs if self.temperature == 1 else outputs / self.temperature
        return scaled.softmax(1)

    def invert(self, activated: Tensor) -> Tensor:
        # a probability that is rounded to 0 would make the loss infinite
        return activated.clamp_min(torch.finfo(torch.float32).tiny).double().log()

    def uncalibrated(self) -> Self:
        return replace(self, temperature=1.0)

    def decode(self, outputs: Tensor, classes: Sequence[str], top: int) -> list[tuple[Guess, ...]]:
        return [most_probable(row, classes, top) for row in outputs]

    def columns(self, outputs: Tensor, classes: Sequence[str], top: int) -> dict[str, Any]:
        """`label` and `probability` of the most probable class; `labels`, `probabilities` of all.

        The lists have the `top` most probable classes, the first included.
        """
        indices, values = most_probable_classes(outputs, top)
        labels = [[classes[index] for index in row] for row in indices.tolist()]
        return {
            "label": [row[0] for row in labels],
            "probability": values[:, 0].numpy(),
            "labels": labels,
            "probabilities": values.numpy(),
        }


def most_probable_classes(probabilities_nk: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Indices and probabilities (N, min(top, K)), the largest first; of equal ones the first."""
    values, indices = probabilities_nk.sort(dim=1, descending=True, stable=True)
    return indices[:, :top], values[:, :top]


def most_probable(probabilities_k: Tensor, classes: Sequence[str], top: int) -> tuple[Guess, ...]:
    order = probabilities_k.argsort(descending=True, stable=True)[:top]
    return tuple(Guess(classes[int(k)], probabilities_k[k].item()) for k in order)
