"""The task of multi-label recognition: each image has any number of K labels."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.data.dataset import DEFAULT_RULE, DataSet, SplitRule
from fullstride.data.targets import open_labels
from fullstride.io.console import count_of
from fullstride.io.records import BelowOne, Bounds, NonNegative
from fullstride.tasks.losses import weight_tensor
from fullstride.tasks.task import (
    ClassScore,
    Metric,
    Score,
    Task,
    best_f1_threshold,
    bootstrap,
    full_precision,
)

# The average precision of each label. Letters: N images, K labels, b resamples of the images.


def average_precisions(scores_nk: np.ndarray, has_nk: np.ndarray) -> np.ndarray:
    """(K,): the non-interpolated average precision of each label, from 0 to 1; NaN without images.

    The sum over distinct scores of (recall - recall at the next higher score) * precision, so that
    the order of images with equal scores has no influence.
    """
    once_n1 = np.ones((len(scores_nk), 1), np.int32)
    precisions = [
        _Ranking.of(scores_n, has_n).average_precision(once_n1)[0][0] if has_n.any() else np.nan
        for scores_n, has_n in zip(scores_nk.T, has_nk.T, strict=True)
    ]
    return np.array(precisions)


@dataclass(frozen=True)
class _Ranking:
    """The images by falling score for a label, in groups that each end in images with the label."""

    order: np.ndarray  # images
    hits: np.ndarray  # images that have the label
    groups: np.ndarray  # the first index of each group in `order`
    hit_groups: np.ndarray  # the first index of each group in `hits`

    @staticmethod
    def of(scores_n: np.ndarray, has_n: np.ndarray) -> "_Ranking":
        order = np.argsort(-scores_n, kind="stable")
        # the last image of each group of equal scores
        ends = np.append(np.flatnonzero(np.diff(scores_n[order])), len(order) - 1)
        places = np.flatnonzero(has_n[order])
        group = np.searchsorted(ends, places)
        firsts = np.flatnonzero(np.diff(group, prepend=-1))
        last = ends[group[firsts]]
        return _Ranking(order[: last[-1] + 1], order[places], np.append(0, last[:-1] + 1), firsts)

    def average_precision(self, drawn_nb: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(b,), (b,): the average precision and the images with the label in each resample."""
        images = np.add.reduceat(drawn_nb[self.order], self.groups).cumsum(0)
        hits = np.add.reduceat(drawn_nb[self.hits], self.hit_groups)
        total = hits.cumsum(0)
        sums_b = (hits * total / np.maximum(images, 1)).sum(0)
        return sums_b / np.maximum(total[-1], 1), total[-1]


def multilabel_focal(
    logits_nk: Tensor,
    targets_nk: Tensor,
    *,
    gamma_positive: float = 0.0,
    gamma_negative: float = 0.0,
    shift: float = 0.0,
    weight_gradient: bool = True,
    weights_k: Tensor | None = None,
) -> Tensor:
    """Binary losses of labels: (N, K), (N, K) -> the mean over images of the sums over labels.

    With p = sigmoid(logit) and p_m = max(p - shift, 0), the loss of a label is

        -(1 - p)^gamma_positive log p           where the target is 1, and
        -p_m^gamma_negative log(1 - p_m)        where it is 0;

    targets of mixed images, between 0 and 1, weigh the two. All is in float32 or wider. Without
    exponents and shift this is the binary cross-entropy, with equal exponents the focal loss of
    arXiv:1708.02002, otherwise the asymmetric loss (ASL) of arXiv:2009.14119; TResNet
    (arXiv:2003.13630) uses the two exponents. ASL's code sums over the batch too, which makes the
    loss N times as large: the learning rate is the same with Adam, and N times smaller with SGD.

    If training does not learn, ASL's authors advise to begin with exponents of 0, then to try
    (2, 2) without a shift, and then (0, 4) with a shift of 0.05
    (https://github.com/Alibaba-MIIL/ASL/issues/22).

    Args:
        logits_nk: Logits.
        targets_nk: 1 for a label that an image has, 0 for other labels.
        gamma_positive: Exponent for labels that an image has.
        gamma_negative: Exponent for other labels; a higher one reduces easy labels' gradients.
        shift: Probability below which a label that an image does not have costs nothing.
        weight_gradient: Whether gradients flow through the powers; in ASL's training they do not.
        weights_k: A weight for each label (K,).
    """
    x = full_precision(logits_nk)
    targets = targets_nk.to(x.dtype)
    p, miss = x.sigmoid(), (-x).sigmoid()
    log_miss = F.logsigmoid(-x)
    if shift:
        p = (p - shift).clamp(min=0)
        log_miss = (-p).log1p()
    positive = targets * _power(miss, gamma_positive, weight_gradient) * F.logsigmoid(x)
    negative = (1 - targets) * _power(p, gamma_negative, weight_gradient) * log_miss
    losses_nk = -(positive + negative)
    return (losses_nk if weights_k is None else losses_nk * weights_k).sum(1).mean()


def _power(base: Tensor, exponent: float, gradient: bool) -> Tensor | float:
    if not exponent:
        return 1.0
    # the bound keeps the gradient finite where the base is 0 and the exponent below 1
    power = base.clamp(min=torch.finfo(base.dtype).tiny) ** exponent
    return power if gradient else power.detach()


# The threshold of each label's probability, chosen on the validation split.

DEFAULT = 0.5
MIN_IMAGES = 10  # least images with a label, and without it, to choose a threshold
LIMITS = (1e-6, 1 - 1e-6)


def best_threshold(probability_n: np.ndarray, has_n: np.ndarray) -> float:
    """The threshold with the best F1, or `DEFAULT` if there are too few images."""
    if min(has_n.sum(), (~has_n).sum()) < MIN_IMAGES:
        return DEFAULT
    return float(np.clip(best_f1_threshold(probability_n, has_n, int(has_n.sum())), *LIMITS))


# The score: mAP, and precision, recall and F1 by class and overall.
#
# Letters: N images, K labels. Scores but the loss are in percent; docs/tasks/multilabel.md
# defines them.

TOP = 3  # most predicted labels of an image for the scores with `top3` in the name


@dataclass(frozen=True)
class LabelScore(ClassScore):
    """The scores of one label; its threshold decides precision, recall and F1."""

    average_precision: float | None  # None: no image has the label
    threshold: float  # of the probability, in percent


@dataclass(frozen=True)
class Counts:
    """For each label the correctly predicted images, the images with it, and the predictions."""

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


class MultiLabelScore(Score):
    """Scores of predicted labels. The logits of all images are held, 5 bytes a label and image.

    A label is predicted if its probability is at least 0.5, and, for the scores with `top3`, among
    the image's three highest; `thresholds` add a mean F1 of their own. Means over classes leave out
    classes that no image has; `absent_classes` is the number of these classes.
    """

    def __init__(self, thresholds: Sequence[float] = ()) -> None:
        self.thresholds = thresholds
        self.logits: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, logits_nk: Tensor, targets_nk: Tensor) -> None:
        self.logits.append(full_precision(logits_nk).cpu())
        self.targets.append(targets_nk.cpu() > 0)

    def merge(self, other: Self) -> None:
        self.logits += other.logits
        self.targets += other.targets

    def compute(self) -> dict[str, float]:
        logits_nk, has_nk = self.arrays()
        present = has_nk.any(0)
        if not present.any():
            raise ValueError(
                f"none of the {count_of(len(has_nk), 'image')} to score on has a label: give others"
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
        logits_nk, has_nk = (torch.from_numpy(each).double() for each in self.arrays())
        total = F.binary_cross_entropy_with_logits(logits_nk, has_nk, reduction="sum")
        return total.item() / len(logits_nk)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Logits (N, K), and booleans (N, K) for the labels of the images."""
        for parts in (self.logits, self.targets):  # joined once, and in place
            if len(parts) > 1:
                parts[:] = [torch.cat(parts)]
        return self.logits[0].numpy(), self.targets[0].numpy()

    @property
    def average_precisions(self) -> np.ndarray:
        return average_precisions(*self.arrays())

    def counts(self, thresholds: Sequence[float] = ()) -> Counts:
        """The counts of labels that are predicted by `thresholds`, by default 0.5."""
        logits_nk, has_nk = self.arrays()
        if not thresholds:
            return Counts.of(logits_nk >= 0, has_nk)
        probability_nk = torch.from_numpy(logits_nk).sigmoid().numpy()
        return Counts.of(probability_nk >= np.array(thresholds), has_nk)

    def resampled(self) -> np.ndarray:
        """A resample leaves out labels that none of its images has, and is NaN without any."""
        logits_nk, has_nk = self.arrays()
        pairs = zip(logits_nk.T, has_nk.T, strict=True)
        columns = [_Ranking.of(logits_n, has_n) for logits_n, has_n in pairs if has_n.any()]

        def weighted(drawn_nb: np.ndarray) -> np.ndarray:
            sums_b, present_b = np.zeros(drawn_nb.shape[1]), np.zeros(drawn_nb.shape[1], int)
            for ranking in columns:
                precision_b, images_b = ranking.average_precision(drawn_nb)
                sums_b += precision_b
                present_b += images_b > 0
            return np.where(present_b > 0, 100 * sums_b / np.maximum(present_b, 1), np.nan)

        return bootstrap(len(logits_nk), weighted)

    def by_class(self, names: Sequence[str]) -> list[LabelScore]:
        counts = self.counts(self.thresholds)
        columns = (counts.correct_k, counts.images_k, counts.predicted_k, self.average_precisions)
        thresholds = self.thresholds or [DEFAULT] * len(names)
        rows = zip(names, *(each.tolist() for each in columns), thresholds, strict=True)
        scores = []
        for name, correct, images, predicted, precision, threshold in rows:
            own = {"average_precision": 100 * precision if images else None}
            own |= {"threshold": 100 * threshold}
            scores.append(LabelScore.of_counts(name, correct, images, predicted, **own))
        return scores


def _harmonic(a: float, b: float) -> float:
    return 2 * a * b / (a + b) if a + b else 0.0


Threshold = Annotated[float, Bounds(gt=0, lt=1)]
TIE = 0.02  # of the largest output: the error of 16 bits, as several labels are often equal


@dataclass(frozen=True)
class LabelGuess:
    """A label, its predicted probability, and its threshold."""

    label: str
    probability: float
    threshold: float

    def __str__(self) -> str:
        text = f"{' '.join(self.label.split())} {100 * self.probability:.1f} %"
        if self.probability >= self.threshold:
            return text
        return f"{text} (below its threshold of {100 * self.threshold:.1f} %)"


@dataclass(frozen=True)
class MultiLabelOptions:
    """The options of multi-label recognition; all concern the loss `focal`."""

    # exponent for the labels that an image does not have; None: focal_gamma
    focal_gamma_negative: NonNegative | None = None
    # probability below which a label that an image does not have costs nothing
    focal_shift: BelowOne = 0.0
    focal_weight_gradient: bool = True  # let gradients flow through the powers


@dataclass(frozen=True)
class MultiLabel(MultiLabelOptions, Task):
    """Multi-label recognition by `multilabel_focal`; compared by the mAP in percent.

    A recipe's losses cross_entropy and bce set both exponents to 0, and bce takes `bce_threshold`
    and `bce_reduction`; focal takes `focal_gamma` for labels that an image has, and
    `focal_gamma_negative` for the other labels. Labels are not smoothed.
    """

    objective: Literal["cross_entropy", "bce", "focal"] = "cross_entropy"  # a recipe's `loss`
    bce_reduction: Literal["sum", "mean"] = "sum"
    bce_threshold: float = 0.0
    focal_gamma: float = 2.0
    class_weights: Literal["none", "balanced", "sqrt"] = "none"
    class_counts: tuple[int, ...] = ()  # training images with each label, for `class_weights`
    labels: int = 0  # K
    thresholds: tuple[Threshold, ...] = ()  # of the probability of each label; (): 0.5 for all

    name: ClassVar[str] = "multilabel"
    options: ClassVar[type] = MultiLabelOptions
    metric: ClassVar[Metric] = Metric("map", "mAP", "%")
    other_metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("cf1", "CF1", "%"),
        Metric("of1", "OF1", "%"),
        Metric("mean_f1", "mean F1", "%"),
        *(Metric(name, name.upper(), "%") for name in ("cp", "cr", "op", "or")),
        Metric(f"cf1_top{TOP}", f"CF1 top-{TOP}", "%", min_outputs=TOP + 1),
        Metric(f"of1_top{TOP}", f"OF1 top-{TOP}", "%", min_outputs=TOP + 1),
        Metric("loss", "loss", higher_is_better=False),
    )
    recipe_fields: ClassVar[frozenset[str]] = frozenset(
        {"loss", "class_weights", "mixup", "cutmix"}
    )
    state_fields: ClassVar[tuple[str, ...]] = ("thresholds",)

    @property
    def metric_alone(self) -> Metric:
        """The loss, as the mAP of a single image is always 100 %."""
        return self.find_metric("loss")

    def with_options(self, recipe: Any) -> "MultiLabel":
        return replace(super().with_options(recipe), objective=recipe.loss)

    def for_classes(self, classes: Sequence[str]) -> Self:
        return replace(self, labels=len(classes))

    def for_data(self, data: DataSet) -> Self:
        counts = Counter(label for labels in data.train.targets for label in labels)
        class_counts = tuple(counts[index] for index in range(len(data.classes)))
        return replace(self.for_classes(data.classes), class_counts=class_counts)

    def with_state(self, state: Mapping[str, Any]) -> Self:
        task = super().with_state(state)
        if len(task.thresholds) not in (0, self.labels):
            raise ValueError(
                f"{count_of(len(task.thresholds), 'threshold')} for "
                f"{count_of(self.labels, 'label')}"
            )
        return task

    def open_data(self, where: str, rule: SplitRule = DEFAULT_RULE) -> DataSet:
        """The data set at `where`, whose targets are tuples of the indices of labels."""
        return open_labels(where, rule)

    def renumber(self, target: tuple[int, ...], numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(numbers[label] for label in target))

    def collate(self, targets: list[tuple[int, ...]]) -> Tensor:
        """Indices of the labels of N images -> (N, K): 1 for these labels, 0 for others."""
        has_nk = torch.zeros(len(targets), self.labels)
        for row, labels in zip(has_nk, targets, strict=True):
            row[list(labels)] = 1
        return has_nk

    def loss(self, outputs: Tensor, targets: Tensor, teacher: Tensor | None = None) -> Tensor:
        """`outputs`: logits (N, K). `targets` (N, K): 1 for the labels of an image, or a share."""
        how, is_bce = self.class_weights, self.objective == "bce"
        weights_k = weight_tensor(self.class_counts, how, outputs.device, torch.float32)
        if self.objective == "focal":
            other = self.focal_gamma_negative
            return multilabel_focal(
                outputs,
                targets,
                gamma_positive=self.focal_gamma,
                gamma_negative=self.focal_gamma if other is None else other,
                shift=self.focal_shift,
                weight_gradient=self.focal_weight_gradient,
                weights_k=weights_k,
            )
        if is_bce and self.bce_threshold:
            targets = (targets > self.bce_threshold).float()
        loss = multilabel_focal(outputs, targets, weights_k=weights_k)
        return loss / outputs.shape[1] if is_bce and self.bce_reduction == "mean" else loss

    def score(self) -> MultiLabelScore:
        return MultiLabelScore(self.thresholds)

    def fit(self, outputs: Tensor, targets: Tensor) -> Self:
        """The task with the threshold of the best F1 for each label that enough images have."""
        columns = zip(self.activate(outputs).numpy().T, targets.numpy().T > 0, strict=True)
        return replace(self, thresholds=tuple(best_threshold(*column) for column in columns))

    def fit_note(self, scores: Mapping[str, float]) -> str:
        defaults = self.thresholds.count(DEFAULT)
        if not self.thresholds:
            return ""
        few = f", {defaults} with fewer than {MIN_IMAGES} images keep {DEFAULT:g}"
        chosen = count_of(self.labels - defaults, "label")
        return (
            f"thresholds of {chosen} are chosen on the validation split"
            f"{few if defaults else ''}: mean F1 {scores['mean_f1']:.2f} % before, "
            f"{scores['mean_f1_thresholds']:.2f} % with them"
        )

    def activate(self, outputs: Tensor) -> Tensor:
        """Logits (N, K) -> a probability for each label."""
        return outputs.sigmoid()

    def agree(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether the most probable labels are the same, or nearly equally probable."""
        others = expected.gather(1, outputs.argmax(1, keepdim=True))[:, 0]
        return others >= expected.amax(1) - TIE * expected.abs().amax()

    def invert(self, activated: Tensor) -> Tensor:
        # a float32 that was rounded to 0 or 1 would make the loss infinite
        return activated.double().clamp(torch.finfo(torch.float32).tiny, 1 - 2**-25).logit()

    def decode(
        self, outputs: Tensor, classes: Sequence[str], top: int
    ) -> list[tuple[LabelGuess, ...]]:
        """The labels whose probability reaches the threshold, or else the most probable label."""
        thresholds, guesses = self.thresholds or (DEFAULT,) * len(classes), []
        for probability_k in outputs:
            values = probability_k.tolist()
            order = probability_k.argsort(descending=True, stable=True).tolist()
            predicted = [k for k in order if values[k] >= thresholds[k]]
            shown = (predicted or order[:1])[:top]
            rows = (LabelGuess(classes[int(k)], values[k], thresholds[k]) for k in shown)
            guesses.append(tuple(rows))
        return guesses

    def truth(self, target: tuple[int, ...], classes: Sequence[str]) -> tuple[LabelGuess, ...]:
        return tuple(LabelGuess(classes[label], 1.0, DEFAULT) for label in target)
