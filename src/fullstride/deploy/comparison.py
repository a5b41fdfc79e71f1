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
from fullstride.data.loader import View, input_of
from fullstride.data.readers.decode import UnreadableImage
from fullstride.data.transforms.clips import ViewsOfVideo
from fullstride.deploy.exported import ExportedModel, InputKind, Model, Precision, one_input
from fullstride.deploy.predict import probabilities
from fullstride.nets.bundle import Bundle
from fullstride.tasks import find_task, task_of
from fullstride.tasks.classify import Classify
from fullstride.tasks.task import Metric, Task
from fullstride.train.scoring import Evaluation, finite_scores, score_bundle

# Tolerances of a file. The largest difference of an output / the largest output shows a file that
# computes in another precision than it says; the drop is what users notice, in points of a metric.
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
        source = input_of(self.images, index, self.view)
        pixels, _ = self.view(source, self.images.targets[index], np.random.default_rng(0))
        return pixels


@dataclass(frozen=True)
class ComparisonImages:
    """Real images to compare outputs on, with their labels if these are available.

    Clips are arrays, uint8 (T, H, W, C) as the network takes them.

    Examples:
        >>> import fullstride
        >>> digits = fullstride.open_data("digits").val
        >>> images = fullstride.ComparisonImages([digits.picture(0)], labels=[digits.targets[0]])
        >>> images.pictures[0].size
        (8, 8)
    """

    pictures: Sequence[Image.Image | np.ndarray]  # of Pillow, or uint8 (H, W) or (H, W, C)
    # the class of each, by its place in the bundle's classes; of other tasks the target in the view
    labels: Sequence[Any] = ()

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
    accuracy: float | None = None  # the task's metric, PyTorch; None: without labels
    file_accuracy: float | None = None  # the task's metric, the file
    # half the 95 % interval of the loss, by resampling the images; 0 for the classes of images
    error: float = 0.0
    metric: Metric = Classify.metric

    @property
    def drop(self) -> float:
        """Points of the metric that the file loses; without labels, percent of changed predictions.

        0 where the loss is within its interval, as other images of the kind may not show it.
        """
        if self.accuracy is None or self.file_accuracy is None:
            return 100 * (1 - self.same_class / self.images)
        loss = self.metric.rank(self.accuracy) - self.metric.rank(self.file_accuracy)
        return loss if loss > self.error else 0.0


def compare(
    outputs: np.ndarray,
    expected: np.ndarray,
    labels: Sequence[Any] = (),
    task: Task | None = None,
) -> Comparison:
    """`outputs` of a file and PyTorch's `expected`, (N, ...); `labels` are `ComparisonImages`'.

    The task is classification if None.
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
            f"{path} was not written: it loses {drop:.2f} points of {comparison.metric.label}, "
            f"{max_drop:g} are allowed (on {comparison.images} images): use another --precision, "
            "or allow more by --max-drop"
        )


# The scores of an exported file on images, by the outputs that it computes itself.


MAX_VIEWS_BYTES = 2**29  # of the views that several files are scored on

FileView = Image.Image | np.ndarray  # an image as `probabilities` takes it


class Sample(NamedTuple):
    """An image that can be read, and its target in the view."""

    number: int  # of the image among all
    view: FileView
    target: Any


@dataclass(frozen=True)
class Mistake:
    """An image with a wrong prediction."""

    image: str  # its name in the data
    truth: str  # classes
    predicted: str
    probability: float  # of the predicted class


@dataclass(frozen=True)
class ImageScore:
    """An image, and the metric of the task on it alone."""

    image: str  # its name in the data
    score: float


@dataclass(frozen=True)
class ModelScores:
    """What a model achieves on a set of images, and on which."""

    evaluation: Evaluation
    correct: str  # 1 or 0 for each image, in order; 0 for one that cannot be read
    mistakes: tuple[Mistake, ...]  # the most confident ones first
    worst: tuple[ImageScore, ...]  # of tasks without one class for each image, the worst first


def score_model(
    model: Model,
    images: Images,
    *,
    views: Sequence[Sample] | None = None,
    mistakes: int = 0,
) -> ModelScores:
    """Score `model` on `images`, whose targets are those of its task, by its classes.

    `views` are the result of `load_views` for an equal preprocessing. At most `mistakes` wrong
    predictions are listed, or so many of the images with the worst scores. Raises ValueError where
    no image can be read, and FloatingPointError where a score is not finite.
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
        tuple(sorted(alone, key=lambda each: task.metric.rank(each.score))[:mistakes]),
    )


def scores_alone(
    task: Task, images: Images, samples: Sequence[Sample], rows: np.ndarray
) -> Iterator[ImageScore]:
    """The score of each image alone, where it has one: an image without objects has none."""
    for sample, outputs in zip(samples, rows, strict=True):
        score = task.score()
        score.update(task.invert(torch.from_numpy(outputs[None])), task.collate([sample.target]))
        with suppress(ValueError):
            value = score.compute()[task.metric.name]
            if math.isfinite(value):
                yield ImageScore(images.names[sample.number], value)


def evaluate(
    model: Model,
    images: Images,
    device: torch.device | str = "cpu",
    mirrored: bool = False,
    views: ViewsOfVideo | None = None,
) -> Evaluation:
    """The scores of a bundle by PyTorch on `device`, or of an exported file by its runtime.

    Raises ValueError for mirrored images and for views of a file, which are for bundles.
    """
    if isinstance(model, Bundle):
        return score_bundle(model, images, device, mirrored=mirrored, views=views)
    if mirrored or views:
        raise ValueError(
            f"--tta and --views are for runs and bundles: leave them out for {model.path}"
        )
    return score_model(model, images).evaluation


def load_views(model: Model, images: Images) -> list[Sample] | None:
    """The readable ones of `images` as `model` takes them; None if they need much memory."""
    pre = model.preprocessing
    view = math.prod(one_input(pre, "pixels"))
    if resizes(model) or len(images) * view > MAX_VIEWS_BYTES:
        return None
    return list(readable(model, images))


def batches(model: Model, samples: Iterable[Sample]) -> Iterator[tuple[list[Sample], np.ndarray]]:
    """The samples, and their activated outputs; for classification (N, K)."""
    samples, most = iter(samples), task_of(model).scoring_batch
    while batch := list(islice(samples, most)):
        yield batch, probabilities(model, [sample.view for sample in batch])


def readable(
    model: Model, images: Images, skipped: dict[str, str] | None = None
) -> Iterator[Sample]:
    """The readable images; with the whole image as the view for a file that resizes.

    The reasons for others go into `skipped`.
    """
    view, rng = task_of(model).test_view(model.preprocessing), np.random.default_rng(0)
    images = images.over(model.preprocessing.background)
    for index, name in enumerate(images.names):
        try:
            source = input_of(images, index, view)
            pixels, target = view(source, images.targets[index], rng)
            whole = images.picture(index) if resizes(model) else None
        except UnreadableImage as error:
            if skipped is not None:
                skipped[name] = error.reason
            continue
        yield Sample(index, pixels if whole is None else whole, target)


def resizes(model: Model) -> bool:
    """Whether `model` takes pictures of any size."""
    return isinstance(model, ExportedModel) and model.metadata.input_kind == "pictures"
