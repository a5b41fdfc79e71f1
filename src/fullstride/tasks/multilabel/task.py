"""Which of K labels does an image have, any number of them? The task of multi-label recognition."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from fullstride.data.dataset import DataSet
from fullstride.data.label_data import open_labels
from fullstride.strict_json import Bounds
from fullstride.tasks.losses import weight_tensor
from fullstride.tasks.multilabel.loss import multilabel_focal
from fullstride.tasks.multilabel.scores import TOP, LabelScore, MultiLabelScore
from fullstride.tasks.multilabel.thresholds import DEFAULT, MIN_IMAGES, choose_thresholds
from fullstride.tasks.task import Metric, Score, Task

Threshold = Annotated[float, Bounds(gt=0, lt=1)]
TIE = 0.02  # of the largest output: what 16 bits may change, and several labels are often equal
AT_TOP: dict[str, Any] = dict(unit="%", min_outputs=TOP + 1)


@dataclass(frozen=True)
class LabelGuess:
    """A label, its probability by the network, and the threshold that this is compared with."""

    label: str
    probability: float
    threshold: float

    def __str__(self) -> str:
        text = f"{' '.join(self.label.split())} {100 * self.probability:.1f} %"
        if self.probability >= self.threshold:
            return text
        return f"{text} (below its threshold of {100 * self.threshold:.1f} %)"


@dataclass(frozen=True)
class MultiLabel(Task):
    """`multilabel_focal` on a binary problem for each label; compared by the mAP in percent.

    Of the losses of recipes, cross_entropy and bce are exponents of 0, and focal has those of
    `focal_gamma`, for labels that an image has, and `focal_gamma_negative`, for the others.
    """

    objective: Literal["cross_entropy", "bce", "focal"] = "cross_entropy"  # a recipe's `loss`
    focal_gamma: float = 2.0
    focal_gamma_negative: float | None = None  # None: that of `focal_gamma`
    focal_shift: float = 0.0
    focal_weight_gradient: bool = True
    class_weights: Literal["none", "balanced", "sqrt"] = "none"
    class_counts: tuple[int, ...] = ()  # training images with each label, for `class_weights`
    labels: int = 0  # K
    thresholds: tuple[Threshold, ...] = ()  # of the probability of each label; (): 0.5 for all

    name: ClassVar[str] = "multilabel"
    metric: ClassVar[Metric] = Metric("map", "mAP", "%")
    other_metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("cf1", "CF1", "%"),
        Metric("of1", "OF1", "%"),
        Metric("mean_f1", "mean F1", "%"),
        *(Metric(name, name.upper(), "%") for name in ("cp", "cr", "op", "or")),
        *(
            Metric(f"{name}_top{TOP}", f"{name.upper()} top-{TOP}", **AT_TOP)
            for name in ("cf1", "of1")
        ),
        Metric("loss", "loss", higher_is_better=False),
    )
    recipe_fields: ClassVar[frozenset[str]] = frozenset(
        ("loss", "class_weights", "mixup", "cutmix", "focal_gamma_negative", "focal_shift")
    ) | {"focal_weight_gradient"}
    state_fields: ClassVar[tuple[str, ...]] = ("thresholds",)

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
            raise ValueError(f"{len(task.thresholds)} thresholds for {self.labels} labels")
        return task

    def open_data(self, where: str, **how: Any) -> DataSet:
        """The data set at `where`, whose targets are tuples of the indices of labels."""
        return open_labels(where, **how)

    def collate(self, targets: list[tuple[int, ...]]) -> Tensor:
        """Indices of the labels of N images -> 1 for each, and 0 for the others (N, K)."""
        has_nk = torch.zeros(len(targets), self.labels)
        for row, labels in zip(has_nk, targets, strict=True):
            row[list(labels)] = 1
        return has_nk

    def loss(self, outputs: Tensor, targets: Tensor, teacher: Tensor | None = None) -> Tensor:
        """`outputs`: logits (N, K). `targets`: 1 for a label that an image has, or a share."""
        weights = None
        if self.class_weights != "none":
            how = self.class_weights
            weights = weight_tensor(self.class_counts, how, outputs.device, torch.float32)
        if self.objective != "focal":
            return multilabel_focal(outputs, targets, weights_k=weights)
        other = self.focal_gamma_negative
        return multilabel_focal(
            outputs,
            targets,
            gamma_positive=self.focal_gamma,
            gamma_negative=self.focal_gamma if other is None else other,
            shift=self.focal_shift,
            weight_gradient=self.focal_weight_gradient,
            weights_k=weights,
        )

    def score(self) -> MultiLabelScore:
        return MultiLabelScore(self.thresholds)

    def fit(self, outputs: Tensor, targets: Tensor) -> Self:
        """With the threshold of the highest F1 for each label that enough images have."""
        probability_nk = self.activate(outputs).numpy()
        return replace(self, thresholds=choose_thresholds(probability_nk, targets.numpy() > 0))

    def fit_note(self, scores: Mapping[str, float]) -> str:
        defaults = self.thresholds.count(DEFAULT)
        if not self.thresholds:
            return ""
        few = f", {defaults} with fewer than {MIN_IMAGES} images keep {DEFAULT:g}"
        return (
            f"thresholds of {self.labels - defaults} labels are chosen on the minival"
            f"{few if defaults else ''}: mean F1 {scores['mean_f1']:.2f} % before, "
            f"{scores['mean_f1_thresholds']:.2f} % with them"
        )

    def by_class(self, score: Score, classes: Sequence[str]) -> list[LabelScore]:
        assert isinstance(score, MultiLabelScore)
        return score.by_class(classes)

    def interval(self, score: Score) -> tuple[float, float] | None:
        assert isinstance(score, MultiLabelScore)
        return score.interval()

    def activate(self, outputs: Tensor) -> Tensor:
        """Logits (N, K) -> a probability for each label."""
        return outputs.sigmoid()

    def agree(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether the largest output is of the same label, or of one that is hardly less."""
        others = expected.gather(1, outputs.argmax(1, keepdim=True))[:, 0]
        return others >= expected.amax(1) - TIE * expected.abs().amax()

    def invert(self, activated: Tensor) -> Tensor:
        # a float32 that is rounded to 0 or 1 would make the loss infinite
        return activated.double().clamp(torch.finfo(torch.float32).tiny, 1 - 2**-25).logit()

    def decode(
        self, outputs: Tensor, classes: Sequence[str], top: int
    ) -> list[tuple[LabelGuess, ...]]:
        """The labels whose probability is not below the threshold; of none the most probable."""
        return [self._guesses(row, classes, top) for row in outputs]

    def _guesses(
        self, probability_k: Tensor, classes: Sequence[str], top: int
    ) -> tuple[LabelGuess, ...]:
        thresholds = self.thresholds or (DEFAULT,) * len(classes)
        values = probability_k.tolist()
        order = probability_k.argsort(descending=True, stable=True).tolist()
        predicted = [k for k in order if values[k] >= thresholds[k]]
        shown = (predicted or order[:1])[:top]
        return tuple(LabelGuess(classes[int(k)], values[k], thresholds[k]) for k in shown)
