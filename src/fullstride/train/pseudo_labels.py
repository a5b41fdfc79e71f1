"""Which images without labels are trained on? The confident ones, as many of each class as wanted.

Pseudo-labels are a teacher's probabilities, which `fullstride pseudo-label` stores (Noisy Student,
arXiv:1911.04252; ResNet-RS trains on them too, arXiv:2103.07579).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullstride.data.prediction_store import StoreKey, pyarrow, read_key, read_table
from fullstride.data.unlabelled import Unlabelled, open_unlabelled
from fullstride.nets.class_names import match_classes


@dataclass(frozen=True)
class PseudoLabels:
    """The k most probable classes of each of M readable images, of K classes."""

    key: StoreKey
    images_m: np.ndarray  # int64: index of the image in the data
    classes_mk: np.ndarray  # int64, the most probable first
    probabilities_mk: np.ndarray  # float32, from half precision

    def __len__(self) -> int:
        return len(self.images_m)

    @property
    def fingerprint(self) -> str:
        """A hash of the images and of their labels."""
        whole = hashlib.sha256(self.key.data.encode())
        for array in (self.images_m, self.classes_mk, self.probabilities_mk):
            whole.update(array.tobytes())
        return whole.hexdigest()[:16]

    def for_classes(self, classes: tuple[str, ...]) -> "PseudoLabels":
        """The same labels as indices of a student's `classes`, by `match_classes`.

        Raises ValueError where the teacher has other classes.
        """
        theirs = self.key.classes
        if len(theirs) != len(classes):
            raise ValueError(
                f"the pseudo-labels are of {len(theirs)} classes, the images have {len(classes)}"
            )
        match = match_classes(theirs, classes, named=self.key.has_class_names)
        ours = np.argsort(match.outputs)  # index of the student's class of each output
        return PseudoLabels(self.key, self.images_m, ours[self.classes_mk], self.probabilities_mk)

    def dense(self, rows: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Probabilities (N, K) of N rows. What k classes leave of 1 is spread over the others.

        They sum to 1, which half precision misses by up to 0.5 %.
        """
        numbers = np.array(rows)
        indices = sent(torch.from_numpy(self.classes_mk[numbers]), device)
        values = sent(torch.from_numpy(self.probabilities_mk[numbers]), device)
        classes, stored = len(self.key.classes), indices.shape[1]
        left = (1 - values.sum(1, keepdim=True)).clamp_min(0) / max(1, classes - stored)
        spread = left.expand(-1, classes).clone() * (classes > stored)
        probabilities = spread.scatter_(1, indices, values)
        return probabilities / probabilities.sum(1, keepdim=True)


def sent(values: Tensor, device: torch.device | str) -> Tensor:
    """A copy on `device`, for which this process does not wait."""
    on_gpu = torch.device(device).type == "cuda"
    return (values.pin_memory() if on_gpu else values).to(device, non_blocking=True)


@dataclass(frozen=True)
class ClassCount:
    """What is left of the images that a teacher gives to one class."""

    name: str
    predicted: int  # images whose most probable class it is
    confident: int  # of these, images that are confident enough
    used: int  # of these, images that are trained on
    repeated: int  # times that one of them occurs again


@dataclass(frozen=True)
class Selection:
    """Rows of pseudo-labels to train on, in ascending order, some of them several times."""

    rows: np.ndarray
    by_class: tuple[ClassCount, ...]


def select(labels: PseudoLabels, min_confidence: float, per_class: int) -> Selection:
    """The rows whose best class has at least `min_confidence`, with `per_class` for each class.

    Of more the most confident are taken, of equal ones the first; of fewer all, repeated in turn. A
    class without any stays without. `per_class` 0 takes all once. Source: arXiv:1911.04252, with
    .3 and 130,000.
    """
    best, confidence = labels.classes_mk[:, 0], labels.probabilities_mk[:, 0]
    chosen, counts = [], []
    for index, name in enumerate(labels.key.classes):
        predicted = np.flatnonzero(best == index)
        confident = predicted[confidence[predicted] >= np.float16(min_confidence)]
        order = confident[np.argsort(-confidence[confident], kind="stable")]
        rows = order
        if per_class:
            rows = np.resize(order, per_class) if 0 < len(order) < per_class else order[:per_class]
        used = min(len(order), len(rows))
        counts.append(ClassCount(name, len(predicted), len(confident), used, len(rows) - used))
        chosen.append(rows)
    rows = np.sort(np.concatenate(chosen))
    return Selection(rows, tuple(counts))


def read_pseudo_labels(store: Path) -> PseudoLabels:
    """The finished store of `fullstride pseudo-label`. Raises ValueError, in one line."""
    if not store.exists():
        raise ValueError(f"no pseudo-labels at {store}: write them by `fullstride pseudo-label`")
    key = read_key(store)
    if key.kind != "pseudo_labels":
        raise ValueError(f"{store} has {key.kind}: give what `fullstride pseudo-label` wrote")
    table = read_table(store, ["classes", "probabilities"])
    readable = _valid(table["classes"]) & _valid(table["probabilities"])
    numbers = np.flatnonzero(readable)
    taken = table.take(numbers)
    classes = _matrix(store, taken["classes"], np.int32).astype(np.int64)
    probabilities = _matrix(store, taken["probabilities"], np.float16).astype(np.float32)
    if classes.shape != probabilities.shape or not classes.shape[1] <= len(key.classes):
        raise ValueError(f"{store} has {classes.shape[1]} classes an image, it can have no more")
    ordered = np.sort(classes, axis=1)
    if (
        (classes.size and not 0 <= ordered.min() <= ordered.max() < len(key.classes))
        or (np.diff(ordered, axis=1) == 0).any()
        or not ((probabilities >= 0) & (probabilities <= 1)).all()
    ):
        raise ValueError(f"{store} has labels that are no probabilities of classes: label again")
    return PseudoLabels(key, numbers, classes, probabilities)


def _valid(column: Any) -> np.ndarray:
    return column.is_valid().to_numpy()


def _matrix(store: Path, column: Any, dtype: type) -> np.ndarray:
    """An arrow column of lists of one size, without nulls, as (M, k)."""
    types = pyarrow().types
    kind = column.type
    if not types.is_fixed_size_list(kind) or kind.value_type.to_pandas_dtype() is not dtype:
        raise ValueError(f"{store} has a column of the type {kind}: label the images again")
    flat = column.combine_chunks().flatten()
    if flat.null_count or not kind.list_size:
        raise ValueError(f"{store} has labels without a value: label the images again")
    return flat.to_numpy(zero_copy_only=False).reshape(-1, kind.list_size)


def open_images_of(labels: PseudoLabels, store: Path) -> Unlabelled:
    """The images that were labelled. Raises ValueError where they are gone or have changed."""
    where = labels.key.where
    if not where:
        raise ValueError(f"{store} is of images in several places: label one folder or list")
    data = open_unlabelled(where)
    if data.fingerprint != labels.key.data:
        raise ValueError(
            f"{where} has other images than when {store} was written: label them again"
        )
    return data
