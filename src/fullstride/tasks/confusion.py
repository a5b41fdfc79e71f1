"""Which classes are taken for which? Counts of images by class and prediction, and their scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

import numpy as np

from fullstride.strict_json import Bounds

MAX_CLASSES = 10**6

Count = Annotated[int, Bounds(ge=0)]


@dataclass(frozen=True)
class ClassScore:
    """The scores of one class, in percent. None: not defined, as it would divide by zero."""

    # of columns in tables, where they are not the names of the fields
    headers: ClassVar[Mapping[str, str]] = {"name": "class", "f1": "F1"}

    name: str
    images: int  # of the class
    predicted: int  # images, of any class, for which it was predicted
    precision: float | None  # share of `predicted` that are of the class
    recall: float | None  # share of `images` for which it was predicted
    f1: float | None  # harmonic mean of the two; 0 where no image of the class was recognised

    @classmethod
    def of_counts(cls, name: str, hits: int, images: int, predicted: int, **others: Any) -> Self:
        """By the images of the class, those it was predicted for, and those that are both."""
        return cls(
            name=name,
            images=images,
            predicted=predicted,
            precision=_percent(hits, predicted),
            recall=_percent(hits, images),
            f1=_percent(2 * hits, images + predicted),
            **others,
        )


@dataclass(frozen=True)
class ConfusionMatrix:
    """How often each class was predicted for the images of each; only pairs that occur.

    Raises ValueError for columns of different lengths, and for classes that do not exist.
    """

    classes: Annotated[int, Bounds(ge=1, le=MAX_CLASSES)]
    labels: tuple[Count, ...]
    predictions: tuple[Count, ...]
    images: tuple[Count, ...]  # of each pair of a label and a prediction

    def __post_init__(self) -> None:
        if not len(self.labels) == len(self.predictions) == len(self.images):
            raise ValueError("the columns of a confusion matrix differ in length")
        largest = max((*self.labels, *self.predictions), default=0)
        if largest >= self.classes:
            raise ValueError(f"class {largest} of a confusion matrix: there are {self.classes}")

    @cached_property
    def sums(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each class the images that are recognised, are of it, and are predicted as it."""
        labels, predictions = np.array(self.labels, int), np.array(self.predictions, int)
        images, same = np.array(self.images, np.int64), labels == predictions
        hits_k, images_k, predicted_k = np.zeros((3, self.classes), np.int64)
        np.add.at(hits_k, labels[same], images[same])
        np.add.at(images_k, labels, images)
        np.add.at(predicted_k, predictions, images)
        return hits_k, images_k, predicted_k

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that have images, in percent."""
        hits_k, images_k, _ = self.sums
        present = images_k > 0
        return 100 * float((hits_k[present] / images_k[present]).mean())

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that have images or were predicted, in percent."""
        hits_k, images_k, predicted_k = self.sums
        occurs = images_k + predicted_k > 0
        return 100 * float((2 * hits_k[occurs] / (images_k + predicted_k)[occurs]).mean())

    def by_class(self, names: Sequence[str]) -> list[ClassScore]:
        """The scores of each class; `names` are those of all classes, in their order."""
        columns = (each.tolist() for each in self.sums)
        return [
            ClassScore.of_counts(name, hits, images, predicted)
            for name, hits, images, predicted in zip(names, *columns, strict=True)
        ]

    def most_confused(self, count: int) -> list[tuple[int, int, int]]:
        """(label, another prediction, images) of the most frequent confusions, at most `count`."""
        pairs = zip(self.labels, self.predictions, self.images, strict=True)
        wrong = [pair for pair in pairs if pair[0] != pair[1]]
        return sorted(wrong, key=lambda pair: (-pair[2], pair))[:count]

    def dense(self) -> np.ndarray:
        """(K, K): images by label (rows) and prediction (columns)."""
        matrix_kk = np.zeros((self.classes, self.classes), np.int64)
        matrix_kk[list(self.labels), list(self.predictions)] = self.images
        return matrix_kk


def _percent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None
