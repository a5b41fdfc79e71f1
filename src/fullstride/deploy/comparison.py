"""Does an exported file compute what PyTorch does? Outputs are compared on the same images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fullstride.data.dataset import Images
from fullstride.data.loader import View
from fullstride.data.readers.decode import UnreadableImage
from fullstride.deploy.exported import InputKind, Precision
from fullstride.tasks import find_task
from fullstride.tasks.task import Task

# Tolerances of a file. The largest difference of an output / the largest output shows a file that
# computes in another precision than it says; the drop, in points of top-1, is what users notice.
MAX_DIFFERENCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 0.2, "int8": float("inf")}
MAX_DROP = {"fp32": 0.0, "fp16": 0.2, "bf16": 0.2, "int8": 0.5}
# At least these for files that resize, which may round a pixel to the next level of brightness.
RESIZE_MAX_DIFFERENCE, RESIZE_MAX_DROP = 0.05, 0.2


@dataclass(frozen=True)
class LazyImages(Sequence[Image.Image | np.ndarray]):
    """The images at `indices` of a split, decoded at each access: few photographs fit in memory.

    With a `view`, such as of the clips of videos, they are what it makes of them.
    """

    images: Images
    indices: Sequence[int]
    view: View | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            return [self._at(index) for index in self.indices[item]]
        return self._at(self.indices[item])

    def readable(self) -> Iterator[int]:
        """Those of `indices` whose image can be read."""
        for index in self.indices:
            try:
                self._at(index)
            except UnreadableImage:
                continue
            yield index

    def _at(self, index: int) -> Image.Image | np.ndarray:
        if self.view is None:
            return self.images.picture(index)
        source = (
            self.images.source(index) if self.view.decodes_files else self.images.picture(index)
        )
        pixels, _ = self.view(source, self.images.targets[index], np.random.default_rng(0))
        return pixels


@dataclass(frozen=True)
class ComparisonImages:
    """Real images to compare outputs on, with their labels if these are available.

    Clips are arrays, uint8 (T, H, W, C) as the network takes them.
    """

    pictures: Sequence[Image.Image | np.ndarray]
    labels: Sequence[int] = ()

    def __post_init__(self) -> None:
        if len(self.labels) not in (0, len(self.pictures)):
            raise ValueError(
                f"{len(self.labels)} labels for {len(self.pictures)} pictures: "
                f"use one for each, or none"
            )


@dataclass(frozen=True)
class Comparison:
    """How the outputs of a file differ from PyTorch's on the same images."""

    images: int
    relative_difference: float  # `Task.difference`
    cosine: float  # between the two outputs of an image, mean over images
    same_class: int  # images for which both predict the same, such as the same class
    accuracy: float | None = None  # percent of images, PyTorch; None: without labels
    file_accuracy: float | None = None  # percent of images, the file

    @property
    def drop(self) -> float:
        """Points of top-1 that the file loses; without labels, percent of changed predictions."""
        if self.accuracy is None or self.file_accuracy is None:
            return 100 * (1 - self.same_class / self.images)
        return max(0.0, self.accuracy - self.file_accuracy)


def compare(
    outputs: np.ndarray,
    expected: np.ndarray,
    labels: Sequence[int] = (),
    task: Task | None = None,
) -> Comparison:
    """`outputs` of a file and PyTorch's `expected`, (N, ...); `labels` are the true classes.

    The task is classification if None.
    """
    task = task or find_task()
    tensors = torch.from_numpy(outputs), torch.from_numpy(expected)
    difference, same = task.difference(*tensors), task.agree(*tensors)
    scores = [
        float(100 * (rows.argmax(1) == np.array(labels)).mean()) if labels else None
        for rows in (expected, outputs)
    ]
    with np.errstate(all="ignore"):  # outputs that are not finite are refused later
        ours, theirs = (rows.reshape(len(rows), -1) for rows in (outputs, expected))
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosine = float(((ours * theirs).sum(1) / norms).mean())
    return Comparison(
        images=len(expected),
        relative_difference=difference,
        cosine=cosine,
        same_class=int(same.sum()),
        accuracy=scores[0],
        file_accuracy=scores[1],
    )


def tolerances(
    precision: Precision, input_kind: InputKind, task: Task | None = None
) -> tuple[float, float]:
    """The largest `Task.difference`, and the largest drop in points."""
    least = (task or find_task()).max_difference
    difference, drop = max(MAX_DIFFERENCE[precision], least), MAX_DROP[precision]
    if input_kind == "pictures":
        return max(difference, RESIZE_MAX_DIFFERENCE), max(drop, RESIZE_MAX_DROP)
    return difference, drop


def check(path: Path, comparison: Comparison, max_difference: float, max_drop: float) -> None:
    """Raises ValueError where the file that was to be written to `path` is off by more."""
    difference, drop = comparison.relative_difference, comparison.drop
    if not difference <= max_difference:  # also where it is not a number
        raise ValueError(
            f"{path} was not written: its outputs differ from PyTorch's by {difference:.1e} of the "
            f"largest, {max_difference:g} is allowed (on {comparison.images} images)"
        )
    if not drop <= max_drop:
        raise ValueError(
            f"{path} was not written: it loses {drop:.2f} points of top-1, {max_drop:g} are "
            f"allowed (on {comparison.images} images): use another --precision, or allow more "
            f"by --max-drop"
        )
