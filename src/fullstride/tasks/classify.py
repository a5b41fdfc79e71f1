"""The task of classification: each image shows one of K classes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.data.dataset import DataSet
from fullstride.io.records import Positive
from fullstride.nets.backbone import Backbone
from fullstride.tasks.losses import (
    TRIPLET_FORMS,
    TripletForm,
    WithEmbedding,
    binary_cross_entropy,
    cross_entropy,
    focal_loss,
    image_weights,
    weight_tensor,
)
from fullstride.tasks.task import Calibration, ConfusionMatrix, Metric, Score, Task, full_precision

# The score: accuracies, scores by class, the loss and the calibration.
#
# Letters: N images, K classes. All scores but the loss are in percent; docs/guides/measuring.md
# defines them.

BINS = 15  # of equal width, for the calibration error
TOP = 5


class ClassificationScore(Score):
    """Scores of predicted classes, counted batch by batch.

    The memory grows with the images and the pairs of classes that occur, not with K². `loss` is the
    mean cross-entropy of the logits as they are. `ece` is the expected calibration error of
    softmax(logits / temperature); if the temperature is not 1, `ece_uncalibrated` is the error of
    softmax(logits).
    """

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self.right: list[bool] = []  # whether the class of each image is predicted, in order
        self.classes, self.in_top, self.loss = 0, 0, 0.0
        self.pairs: Counter[tuple[int, int]] = Counter()  # images by label and prediction
        # by temperature, see `calibration_bins`
        self.bins = {each: np.zeros((3, BINS)) for each in (temperature, 1.0)}

    def update(self, logits_nk: Tensor, labels_n: Tensor) -> None:
        logits, labels = full_precision(logits_nk).cpu(), labels_n.cpu()
        predictions = logits.argmax(1)
        is_correct = predictions == labels
        log_softmax = logits.log_softmax(1)
        self.right += is_correct.tolist()
        self.classes = logits.shape[1]
        self.in_top += count_in_top(logits, labels)
        self.loss += len(labels) * F.nll_loss(log_softmax, labels).item()
        for temperature, bins in self.bins.items():
            scaled = log_softmax if temperature == 1 else (logits / temperature).log_softmax(1)
            bins += calibration_bins(scaled.amax(1).exp(), is_correct)
        self.pairs.update(zip(labels.tolist(), predictions.tolist(), strict=True))

    def merge(self, other: Self) -> None:
        self.right += other.right
        self.loss += other.loss
        self.classes = max(self.classes, other.classes)  # 0 if a process had no image
        self.in_top += other.in_top
        for temperature, bins in self.bins.items():
            bins += other.bins[temperature]
        self.pairs.update(other.pairs)

    def compute(self) -> dict[str, float]:
        matrix, images = self.confusion(), len(self.right)
        top = {f"top{TOP}": 100 * (self.in_top / images)} if self.classes > TOP else {}
        ece = {"ece": self.calibration().error}
        if self.temperature != 1:
            ece["ece_uncalibrated"] = self.calibration(1.0).error
        return {
            "top1": 100 * (sum(self.right) / images),
            **top,
            "balanced_accuracy": matrix.balanced_accuracy,
            "macro_f1": matrix.macro_f1,
            "loss": self.loss / images,
            **ece,
        }

    def confusion(self) -> ConfusionMatrix:
        rows = ((*pair, images) for pair, images in sorted(self.pairs.items()))
        labels, predictions, images = zip(*rows, strict=True)
        return ConfusionMatrix(self.classes, labels, predictions, images)

    def calibration(self, temperature: float | None = None) -> Calibration:
        """The counts at a temperature: the score's own by default, or 1."""
        own = self.temperature if temperature is None else temperature
        images, correct, confidence = self.bins[own]
        return Calibration(
            tuple(map(int, images)), tuple(map(int, correct)), tuple(confidence.tolist())
        )


def count_in_top(logits_nk: Tensor, labels_n: Tensor) -> int:
    """Count images whose label is among the `TOP` largest logits; the first of equals wins."""
    true_n1 = logits_nk.gather(1, labels_n[:, None])
    is_before = torch.arange(logits_nk.shape[1]) < labels_n[:, None]
    rank_n = (logits_nk > true_n1).sum(1) + ((logits_nk == true_n1) & is_before).sum(1)
    return int((rank_n < TOP).sum())


def calibration_bins(confidence_n: Tensor, is_correct_n: Tensor) -> np.ndarray:
    """(3, `BINS`): images, correct images and the sum of confidence, for confidence in each bin.

    Bin b is (b / 15, (b + 1) / 15].
    """
    confidence = confidence_n.double().nan_to_num().numpy()
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    weights = (None, is_correct_n.double().numpy(), confidence)
    return np.stack([np.bincount(bins, each, BINS) for each in weights])


# Calibration by a temperature that logits are divided by before softmax.

LIMITS = (0.05, 20.0)  # of a temperature


def fit_temperature(logits_nk: Tensor, labels_n: Tensor) -> float:
    """The T with the lowest cross-entropy of softmax(logits / T) (arXiv:1706.04599).

    The target is a probability of (N + 1) / (N + 2) for the label, with the rest spread over the
    other classes, as in Platt's scaling; otherwise T would be 0 if all images are classified
    correctly. The derivative by 1 / T only grows, so that its root is the exact minimum; the result
    is within `LIMITS`. Dividing by T keeps the order of the classes.
    """
    from scipy.optimize import brentq  # takes most of a second to import

    n, k = logits_nk.shape
    z = logits_nk.double() - logits_nk.double().amax(1, keepdim=True)
    rest = 1 / (n + 2) if k > 1 else 0.0
    true_n = z.gather(1, labels_n[:, None])[:, 0]
    others_n = (z.sum(1) - true_n) / max(1, k - 1)
    target = torch.lerp(true_n, others_n, rest).mean().item()

    def derivative(log_scale: float) -> float:
        return ((exp(log_scale) * z).softmax(1) * z).sum(1).mean().item() - target

    low, high = (-log(limit) for limit in reversed(LIMITS))
    if derivative(low) >= 0:
        return LIMITS[1]
    if derivative(high) <= 0:
        return LIMITS[0]
    return exp(-cast(float, brentq(derivative, low, high, xtol=1e-12)))


@dataclass(frozen=True)
class Guess:
    """A predicted class."""

    label: str
    probability: float

    def __str__(self) -> str:
        return f"{' '.join(self.label.split())} {100 * self.probability:.1f} %"


@dataclass(frozen=True)
class Classify(Task):
    """Classification by a loss of `tasks.losses`; compared by top-1 accuracy in percent.

    With `triplet`, a loss of `tasks.losses.TRIPLET_FORMS` on the embeddings is added.
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
    temperature: Positive = 1.0  # divisor of the logits before softmax, but not in the loss

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

        `outputs`: logits (N, K); with `triplet`, a pair of logits and embeddings (N, D).
        """
        logits, embeddings = outputs if self.triplet else (outputs, None)
        logits = full_precision(logits)
        how = self.class_weights
        weights_k = weight_tensor(self.class_counts, how, logits.device, logits.dtype)
        weights_n = None if weights_k is None else image_weights(targets, weights_k)
        if self.objective == "bce":
            objective = partial(
                binary_cross_entropy, threshold=self.bce_threshold, reduction=self.bce_reduction
            )
        elif self.objective == "focal":
            objective = partial(focal_loss, gamma=self.focal_gamma)
        else:
            objective = cross_entropy
        loss = objective(logits, targets, smoothing=self.label_smoothing, weights_n=weights_n)
        if teacher is not None:
            taught = cross_entropy(logits, teacher, weights_n=weights_n)
            loss = torch.lerp(loss, taught, self.teacher_share)
        if embeddings is not None:
            loss = loss + self.triplet * TRIPLET_FORMS[self.triplet_form](embeddings, targets)
        return loss

    def chance_loss(self) -> float | None:
        """The entropy of the class frequencies, ln K if equal; None unless cross-entropy alone."""
        others = self.triplet or self.class_weights != "none"
        if self.objective != "cross_entropy" or others or len(self.class_counts) < 2:
            return None
        shares = np.array(self.class_counts) / sum(self.class_counts)
        shares = (1 - self.label_smoothing) * shares + self.label_smoothing / len(shares)
        shares = shares[shares > 0]
        return float(-(shares * np.log(shares)).sum()) or None

    def chance_score(
        self, metric: Metric, scores: Mapping[str, float], targets: Sequence[Any] = ()
    ) -> float | None:
        """The share of the most frequent classes of the training images, among `targets`."""
        classes = range(len(self.class_counts))
        if len(classes) < 2:
            return None
        frequent = sorted(classes, key=self.class_counts.__getitem__, reverse=True)
        images = Counter(targets) if targets else self.class_counts
        counts = [images[index] for index in frequent]
        by_name = {
            "top1": counts[0] / sum(counts),
            f"top{TOP}": sum(counts[:TOP]) / sum(counts),
            "balanced_accuracy": 1 / sum(count > 0 for count in counts),
        }
        share = by_name.get(metric.name, 1.0)
        return 100 * share if share < 1 else None

    def score(self) -> ClassificationScore:
        return ClassificationScore(self.temperature)

    def fit(self, outputs: Tensor, targets: Tensor) -> Self:
        return replace(self, temperature=fit_temperature(outputs, targets))

    def fit_note(self, scores: Mapping[str, float]) -> str:
        if self.temperature == 1:
            return ""
        return (
            f"calibration by a temperature of {self.temperature:.3g}: ECE of the validation split "
            f"{scores['ece_uncalibrated']:.1f} % before, {scores['ece']:.1f} % with it"
        )

    def activate(self, outputs: Tensor) -> Tensor:
        """Logits (N, K) -> probabilities."""
        scaled = outputs if self.temperature == 1 else outputs / self.temperature
        return scaled.softmax(1)

    def invert(self, activated: Tensor) -> Tensor:
        # a probability that was rounded to 0 would make the loss infinite
        return activated.clamp_min(torch.finfo(torch.float32).tiny).double().log()

    def uncalibrated(self) -> Self:
        return replace(self, temperature=1.0)

    def decode(self, outputs: Tensor, classes: Sequence[str], top: int) -> list[tuple[Guess, ...]]:
        indices, values = most_probable_classes(outputs, top)
        return [
            tuple(Guess(classes[int(k)], p) for k, p in zip(row, values_k, strict=True))
            for row, values_k in zip(indices.tolist(), values.tolist(), strict=True)
        ]

    def columns(self, outputs: Tensor, classes: Sequence[str], top: int) -> dict[str, Any]:
        """`label` and `probability`: the most probable class; `labels` and `probabilities`: the
        `top` most probable classes."""
        indices, values = most_probable_classes(outputs, top)
        labels = [[classes[index] for index in row] for row in indices.tolist()]
        return {
            "label": [row[0] for row in labels],
            "probability": values[:, 0].numpy(),
            "labels": labels,
            "probabilities": values.numpy(),
        }


def most_probable_classes(probabilities_nk: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Indices and probabilities (N, min(top, K)), the largest first; equal ones in class order."""
    values, indices = probabilities_nk.sort(dim=1, descending=True, stable=True)
    return indices[:, :top], values[:, :top]
