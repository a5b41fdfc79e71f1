"""Compares the outputs of exported files with PyTorch's, and scores files on images."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from fullstride.data.dataset import Images
from fullstride.data.loader import View
from fullstride.data.readers.decode import UnreadableImage
from fullstride.data.transforms.clips import ViewsOfVideo
from fullstride.deploy.exported import InputKind, Model, Precision, one_input
from fullstride.deploy.predict import input_kind, probabilities
from fullstride.io.console import count_of
from fullstride.nets.bundle import Bundle
from fullstride.tasks import find_task, task_of
from fullstride.tasks.classify import Classify
from fullstride.tasks.task import Metric, Task
from fullstride.train.scoring import Evaluation, finite_scores, score_bundle

# Tolerances. The largest difference of an output / the largest output reveals a file that computes
# in another precision than it says; users notice the drop, in points of a metric.
MAX_DIFFERENCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 0.2, "int8": float("inf")}
MAX_DROP = {"fp32": 0.0, "fp16": 0.2, "bf16": 0.2, "int8": 0.5}
# Minimum tolerances of files that resize, which may round a pixel to the next level of brightness.
RESIZE_MAX_DIFFERENCE, RESIZE_MAX_DROP = 0.05, 0.2


@dataclass(frozen=True)
class LazyImages(Sequence[Image.Image | np.ndarray]):
    """The images at `indices` of a split, decoded at each access, since few fit in memory.

    A `view` transforms them, such as videos to clips.
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
        """The indices whose image can be read."""
        for index in self.indices:
            with suppress(UnreadableImage):
                self._at(index)
                yield index

    def _at(self, index: int) -> Image.Image | np.ndarray:
        if self.view is None:
            return self.images.picture(index)
        source, target = self.images.source(index), self.images.targets[index]
        pixels, _ = self.view(source, target, np.random.default_rng(0))
        return pixels


@dataclass(frozen=True)
class ComparisonImages:
    """Real images to compare outputs on, with labels if available.

    Clips are uint8 arrays (T, H, W, C) of the network's input size.

    Examples:
        >>> import fullstride
        >>> digits = fullstride.open_data("digits").val
        >>> images = fullstride.ComparisonImages([digits.picture(0)], labels=[digits.targets[0]])
        >>> images.pictures[0].size
        (8, 8)
    """

    pictures: Sequence[Image.Image | np.ndarray]  # Pillow images, or uint8 (H, W) or (H, W, C)
    # class indices into the bundle's classes; for other tasks, targets in the view
    labels: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if len(self.labels) not in (0, len(self.pictures)):
            raise ValueError(
                f"{count_of(len(self.labels), 'label')} for "
                f"{count_of(len(self.pictures), 'picture')}: use one for each, or none"
            )


@dataclass(frozen=True)
class Comparison:
    """Differences between a file's outputs and PyTorch's on the same images."""

    images: int
    relative_difference: float  # `Task.difference`
    cosine: float  # between both outputs of an image, mean over images
    same_class: int  # images with equal predictions, such as the same class
    accuracy: float | None = None  # the task's metric, PyTorch; None: without labels
    file_accuracy: float | None = None  # the task's metric, the file's
    # half of the drop's 95 % interval, by resampling the images; 0 for classification
    error: float = 0.0
    metric: Metric = Classify.metric

    @property
    def drop(self) -> float:
        """Points of the metric that the file loses; without labels, percent of changed predictions.

        0 if the loss is within its interval, since similar images may not show it.
        """
        if self.accuracy is None or self.file_accuracy is None:
            return 100 * (1 - self.same_class / self.images)
        loss = self.metric.rank(self.accuracy) - self.metric.rank(self.file_accuracy)
        return loss if loss > self.error else 0.0


def compare(
    outputs: np.ndarray, expected: np.ndarray, labels: Sequence[Any] = (), task: Task | None = None
) -> Comparison:
    """Compare a file's `outputs` with PyTorch's `expected`, (N, ...).

    `labels` are the field of `ComparisonImages`. The task is classification if None.
    """
    task = task or find_task()
    tensors = torch.from_numpy(outputs), torch.from_numpy(expected)
    difference, same = task.difference(*tensors), task.agree(*tensors)
    scores: list[float | None] = [None, None]
    error = 0.0
    if labels and task.single_label:
        classes = np.array(labels)
        scores = [float(100 * (rows.argmax(1) == classes).mean()) for rows in (expected, outputs)]
    elif labels:
        both = ours, theirs = task.score(), task.score()
        for score, rows in zip(both, (expected, outputs), strict=True):
            score.update(torch.from_numpy(rows), task.collate(list(labels)))
        scores = [score.compute()[task.metric.name] for score in both]
        losses = ours.resampled() - theirs.resampled()
        losses = losses[~np.isnan(losses)]
        error = float(np.diff(np.percentile(losses, (2.5, 97.5)))[0]) / 2 if len(losses) else 0.0
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
        error=error,
        metric=task.metric,
    )


def tolerances(precision: Precision, input_kind: InputKind) -> tuple[float, float]:
    """The largest `Task.difference`, and the largest drop in points."""
    difference, drop = MAX_DIFFERENCE[precision], MAX_DROP[precision]
    if input_kind == "pictures":
        return max(difference, RESIZE_MAX_DIFFERENCE), max(drop, RESIZE_MAX_DROP)
    return difference, drop


def check(path: Path, comparison: Comparison, max_difference: float, max_drop: float) -> None:
    """Raise ValueError if the comparison of the file for `path` exceeds a tolerance."""
    difference, drop = comparison.relative_difference, comparison.drop
    images = count_of(comparison.images, "image")
    if not difference <= max_difference:  # also catches NaN
        raise ValueError(
            f"{path} was not written: its outputs differ from PyTorch's by {difference:.1e} of the "
            f"largest, {max_difference:g} is allowed (on {images})"
        )
    if not drop <= max_drop:
        raise ValueError(
            f"{path} was not written: it loses {drop:.2f} points of {comparison.metric.label}, "
            f"{max_drop:g} are allowed (on {images}): use another --precision, or allow more by "
            "--max-drop"
        )


# Scores of an exported file on images, by its own outputs.


MAX_VIEWS_BYTES = 2**29  # of views in memory for scoring several files

FileView = Image.Image | np.ndarray  # an image as an argument of `probabilities`


class Sample(NamedTuple):
    """A readable image with its target in the view."""

    number: int  # index of the image among all
    view: FileView
    target: Any


@dataclass(frozen=True)
class Mistake:
    """An image with a wrong prediction."""

    image: str  # name in the data
    truth: str  # the true class
    predicted: str
    probability: float  # of the predicted class


@dataclass(frozen=True)
class ImageScore:
    """An image with the task's `metric_alone` on it."""

    image: str  # name in the data
    score: float


@dataclass(frozen=True)
class ModelScores:
    """The scores of a model on a set of images, with its worst images."""

    evaluation: Evaluation
    correct: str  # 1 or 0 for each image, in order; 0 for an unreadable image
    mistakes: tuple[Mistake, ...]  # the most confident first
    worst: tuple[ImageScore, ...]  # for tasks without one class per image, the worst first


def score_model(
    model: Model, images: Images, *, views: Sequence[Sample] | None = None, mistakes: int = 0
) -> ModelScores:
    """Score `model` on `images`, whose targets belong to the model's task and classes.

    `views` are the result of `load_views` for an equal preprocessing. At most `mistakes` wrong
    predictions, or images with the worst scores, are listed. Raises ValueError if no image can be
    read, and FloatingPointError if a score is not finite.
    """
    task = task_of(model).uncalibrated()
    skipped: dict[str, str] = {}
    score, correct = task.score(), ["0"] * len(images)
    wrong: list[tuple[float, int, int]] = []
    alone: list[ImageScore] = []
    samples = readable(model, images, skipped) if views is None else views
    for batch, rows in batches(model, samples):
        labels = task.collate([sample.target for sample in batch])
        score.update(task.invert(torch.from_numpy(rows)), labels)
        if not task.single_label:
            alone += scores_alone(task, images, batch, rows) if mistakes else []
            continue
        predicted = rows.argmax(1)
        for row, ((index, _, target), guess) in enumerate(
            zip(batch, predicted.tolist(), strict=True)
        ):
            if guess == target:
                correct[index] = "1"
            else:
                wrong.append((float(rows[row, guess]), index, guess))
    number = len(images) - len(skipped) if views is None else len(views)
    names = model.classes
    first = sorted(wrong, key=lambda each: (-each[0], each[1]))[:mistakes]
    evaluation = Evaluation(finite_scores(score, number), skipped, task, score)
    return ModelScores(
        evaluation.with_interval(),
        "".join(correct),
        tuple(
            Mistake(images.names[index], names[images.targets[index]], names[guess], probability)
            for probability, index, guess in first
        ),
        tuple(sorted(alone, key=lambda each: task.metric_alone.rank(each.score))[:mistakes]),
    )


def scores_alone(
    task: Task, images: Images, samples: Sequence[Sample], rows: np.ndarray
) -> Iterator[ImageScore]:
    """The score of each image alone, except images without a score, such as without objects."""
    for sample, outputs in zip(samples, rows, strict=True):
        score = task.score()
        score.update(task.invert(torch.from_numpy(outputs[None])), task.collate([sample.target]))
        with suppress(ValueError):
            value = score.compute()[task.metric_alone.name]
            if math.isfinite(value):
                yield ImageScore(images.names[sample.number], value)


def evaluate(
    model: Model,
    images: Images,
    device: torch.device | str = "cpu",
    mirrored: bool = False,
    views: ViewsOfVideo | None = None,
) -> Evaluation:
    """Score a bundle by PyTorch on `device`, or an exported file by its runtime.

    Raises ValueError for `mirrored` and `views` with a file.
    """
    if isinstance(model, Bundle):
        return score_bundle(model, images, device, mirrored=mirrored, views=views)
    if mirrored or views:
        raise ValueError(
            f"--tta and --views are for runs and bundles: leave them out for {model.path}"
        )
    return score_model(model, images).evaluation


def load_views(model: Model, images: Images) -> list[Sample] | None:
    """Load the readable images as inputs for `model`; None if they need much memory."""
    pre = model.preprocessing
    view = math.prod(one_input(pre, "pixels"))
    if input_kind(model) == "pictures" or len(images) * view > MAX_VIEWS_BYTES:
        return None
    return list(readable(model, images))


def batches(model: Model, samples: Iterable[Sample]) -> Iterator[tuple[list[Sample], np.ndarray]]:
    """Yield samples with their activated outputs; for classification (N, K)."""
    samples, most = iter(samples), task_of(model).scoring_batch
    while batch := list(islice(samples, most)):
        yield batch, probabilities(model, [sample.view for sample in batch])


def readable(
    model: Model, images: Images, skipped: dict[str, str] | None = None
) -> Iterator[Sample]:
    """Yield the readable images; for a file that resizes, the view is the whole image.

    `skipped` receives the reasons for unreadable images.
    """
    view, rng = task_of(model).test_view(model.preprocessing), np.random.default_rng(0)
    is_whole = input_kind(model) == "pictures"
    images = images.over(model.preprocessing.background)
    for index, name in enumerate(images.names):
        try:
            pixels, target = view(images.source(index), images.targets[index], rng)
            whole = images.picture(index) if is_whole else None
        except UnreadableImage as error:
            if skipped is not None:
                skipped[name] = error.reason
            continue
        yield Sample(index, pixels if whole is None else whole, target)
