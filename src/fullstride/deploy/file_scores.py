"""How good is an exported file? Its scores on images, by the outputs that it computes itself."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from fullstride.data.dataset import Images
from fullstride.data.readers.decode import UnreadableImage
from fullstride.deploy.exported import ExportedModel, one_input
from fullstride.deploy.predict import probabilities
from fullstride.nets.bundle import Bundle
from fullstride.tasks import task_of
from fullstride.tasks.confusion import ClassScore, ConfusionMatrix
from fullstride.train.scoring import finite_scores, interval_scores

MAX_VIEWS_BYTES = 2**29  # of the views that several files are scored on

Model = Bundle | ExportedModel
View = Image.Image | np.ndarray  # an image as `probabilities` takes it


class Sample(NamedTuple):
    """An image that can be read, and its target in the view."""

    number: int  # of the image among all
    view: View
    target: Any


@dataclass(frozen=True)
class Mistake:
    """An image with a wrong prediction."""

    image: str  # its name in the data
    truth: str  # classes
    predicted: str
    probability: float  # of the predicted class


@dataclass(frozen=True)
class ModelScores:
    """What a model achieves on a set of images."""

    scores: dict[str, float]  # with `images`, the number of readable ones
    skipped: dict[str, str]  # the reason for each image that cannot be read
    confusion: ConfusionMatrix | None
    by_class: Sequence[ClassScore]
    correct: str  # 1 or 0 for each image, in order; 0 for one that cannot be read
    mistakes: tuple[Mistake, ...]  # the most confident ones first


def score_model(
    model: Model,
    images: Images,
    *,
    views: Sequence[Sample] | None = None,
    mistakes: int = 0,
) -> ModelScores:
    """Score `model` on `images`, whose targets are those of its task, by its classes.

    `views` are the result of `load_views` for an equal preprocessing. At most `mistakes` wrong
    predictions are listed. Raises ValueError where no image can be read, and FloatingPointError
    where a score is not finite.
    """
    task = task_of(model).uncalibrated()
    skipped: dict[str, str] = {}
    score, correct = task.score(), ["0"] * len(images)
    wrong: list[tuple[float, int, int]] = []
    samples = readable(model, images, skipped) if views is None else views
    for batch, rows in batches(model, samples):
        labels = task.collate([sample.target for sample in batch])
        score.update(task.invert(torch.from_numpy(rows)), labels)
        if not task.single_label:
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
    return ModelScores(
        {**finite_scores(score, number), **interval_scores(task, score)},
        skipped,
        task.confusion(score),
        task.by_class(score, names),
        "".join(correct),
        tuple(
            Mistake(images.names[index], names[images.targets[index]], names[guess], probability)
            for probability, index, guess in first
        ),
    )


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
    for index, name in enumerate(images.names):
        try:
            source = images.source(index) if view.decodes_files else images.picture(index)
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
