"""How good is a network? Its scores on images."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullstride.data.dataset import Images
from fullstride.data.loader import Batches
from fullstride.data.transforms.clips import ViewsOfVideo
from fullstride.data.transforms.crop import to_input
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import task_of
from fullstride.tasks.confusion import ClassScore, ConfusionMatrix
from fullstride.tasks.task import Score, Task, full_precision
from fullstride.train.compute import numerics
from fullstride.train.distributed import SINGLE_PROCESS, DistributedContext
from fullstride.train.loop import BatchSource

MAX_OUTPUTS = 2**24  # numbers that a task is fitted to: 64 MiB


class Evaluation(NamedTuple):
    """What a network achieves on a set of images."""

    scores: dict[str, float]  # with `images`, the number of readable ones
    skipped: dict[str, str]  # the reason for each image that cannot be read
    task: Task
    score: Score  # of the task, that counted the images

    @property
    def confusion(self) -> ConfusionMatrix | None:
        """For a task with one class for each image."""
        return self.task.confusion(self.score)

    def by_class(self, classes: Sequence[str]) -> Sequence[ClassScore]:
        return self.task.by_class(self.score, classes)

    def with_interval(self) -> "Evaluation":
        """With the 95 % interval of the task's metric, as scores, where the task computes one."""
        return self._replace(scores={**self.scores, **interval_scores(self.task, self.score)})


def interval_scores(task: Task, score: Score) -> dict[str, float]:
    """The 95 % interval of the task's metric, by the names of scores; none for some tasks."""
    limits = task.interval(score) or ()
    return {f"{task.metric.name}_{end}": x for end, x in zip(("low", "high"), limits, strict=False)}


class HeldOutputs:
    """The outputs and targets of all images, as a `Score`, for what is fitted to them."""

    def __init__(self) -> None:
        self.batches: list[tuple[Tensor, Any]] = []

    def update(self, outputs: Tensor, targets: Any) -> None:
        self.batches.append((outputs.cpu(), targets.cpu()))

    def merge(self, other: "HeldOutputs") -> None:
        self.batches += other.batches

    def compute(self) -> dict[str, float]:
        return {}

    def fit(self, task: Task) -> Task:
        """`task` fitted to them. Raises FloatingPointError where an output is not finite."""
        if not self.batches:
            raise ValueError("none of the images to score on can be read: give others")
        outputs, targets = (torch.cat(each) for each in zip(*self.batches, strict=True))
        if not outputs.isfinite().all():
            raise FloatingPointError("the network's outputs are not finite")
        return task.fit(full_precision(outputs), targets)


def evaluate(
    net: nn.Module,
    task: Task,
    batches: BatchSource,
    context: DistributedContext = SINGLE_PROCESS,
) -> dict[str, float]:
    """Scores of `net` over an epoch of `batches`; `images` is the number of readable images.

    With several processes in `context`, each has a part of the images, and all return the scores of
    the whole. Raises ValueError if there is no readable image, and FloatingPointError if a score is
    not finite.
    """
    score, images = count(net, task.score(), batches, context)
    return finite_scores(score, images)


@torch.inference_mode()
def count(
    net: nn.Module, score: Score, batches: BatchSource, context: DistributedContext
) -> tuple[Score, int]:
    """`score` of the images of all processes, and the number of readable ones."""
    net.eval()
    images = 0
    with numerics(tf32=False, benchmark=False, deterministic=False):
        for x, targets, _ in batches.epoch(0):
            score.update(net(x), targets)
            images += len(x)
    (score, images), *others = context.gather((score, images))
    for other, number in others:
        score.merge(other)
        images += number
    return score, images


def finite_scores(score: Score, images: int) -> dict[str, float]:
    if not images:
        raise ValueError("none of the images to score on can be read: give others")
    scores = score.compute()
    if not all(map(math.isfinite, scores.values())):
        values = ", ".join(f"{name} {value:g}" for name, value in scores.items())
        raise FloatingPointError(f"the network's outputs are not finite ({values})")
    return {**scores, "images": images}


def score_images(
    net: nn.Module,
    task: Task,
    images: Images,
    pre: Preprocessing,
    device: torch.device | str,
    workers: int = 0,
    context: DistributedContext = SINGLE_PROCESS,
) -> Evaluation:
    """What `net` achieves on `images`."""
    batches = scoring_batches(task, images, pre, device, workers, context)
    try:
        return score_batches(net, task, batches, context)
    finally:
        batches.close()


def score_bundle(
    bundle: Bundle,
    images: Images,
    device: torch.device | str,
    *,
    mirrored: bool = False,
    views: ViewsOfVideo | None = None,
) -> Evaluation:
    """What `bundle` achieves on `images`; with `mirrored` by the mean with their mirror images.

    With `views`, by the mean over these views of each video.
    """
    net, task = bundle.net.to(device), task_of(bundle)
    if mirrored:
        net, task = MirrorAverage(net, task), task.uncalibrated()
    if views is None:
        return score_images(net, task, images, bundle.preprocessing, device).with_interval()
    average = ViewAverage(net, task, views.pre)
    # one video at a time, whose views stay uint8: in float32 they would have four times the bytes
    batches = Batches(
        images, views, batch=1, device=device, collate=task.collate, to_x=lambda pixels, _: pixels
    )
    try:
        result = score_batches(average, task.uncalibrated(), batches, SINGLE_PROCESS)
        return result.with_interval()
    finally:
        batches.close()


class MirrorAverage(nn.Module):
    """The mean of a network's probabilities for an image and its mirror image.

    (N, C, H, W) -> (N, K), the logarithms of the means, which are logits of temperature 1.
    """

    def __init__(self, net: nn.Module, task: Task):
        super().__init__()
        self.net, self.task = net, task

    def forward(self, x: Tensor) -> Tensor:
        both = [self.task.activate(self.net(each).float()) for each in (x, x.flip(-1))]
        return logarithms(torch.stack(both).mean(0))


class ViewAverage(nn.Module):
    """The mean of a network's probabilities for the views of a video.

    Views uint8 (N, V, T, H, W, C) -> (N, K), the logarithms of the means. As many views as the task
    scores at once become float32 at a time.
    """

    def __init__(self, net: nn.Module, task: Task, pre: Preprocessing):
        super().__init__()
        self.net, self.task, self.pre = net, task, pre

    def forward(self, pixels: Tensor) -> Tensor:
        parts = pixels.flatten(0, 1).split(self.task.scoring_batch)
        rows = [self.task.activate(self.net(to_input(part, self.pre)).float()) for part in parts]
        return logarithms(torch.cat(rows).unflatten(0, pixels.shape[:2]).mean(1))


def logarithms(probabilities: Tensor) -> Tensor:
    """Finite logits of these probabilities."""
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def score_batches(
    net: nn.Module, task: Task, batches: Batches, context: DistributedContext
) -> Evaluation:
    """What `net` achieves on the images of `batches`."""
    score, images = count(net, task.score(), batches, context)
    scores = finite_scores(score, images)
    return Evaluation(scores, all_skipped(batches.skipped, context), task, score)


def fit_and_score(
    net: nn.Module, task: Task, batches: Batches, context: DistributedContext
) -> Evaluation:
    """What `net` achieves on the images of `batches` with `task` fitted to them.

    The outputs are computed once, and held in memory.
    """
    held, images = count(net, HeldOutputs(), batches, context)
    assert isinstance(held, HeldOutputs)
    task = held.fit(task)
    score = task.score()
    for outputs, targets in held.batches:
        score.update(outputs, targets)
    scores = finite_scores(score, images)
    return Evaluation(scores, all_skipped(batches.skipped, context), task, score)


def fit_on(
    net: nn.Module,
    task: Task,
    images: Images,
    pre: Preprocessing,
    device: torch.device | str,
    workers: int = 0,
    context: DistributedContext = SINGLE_PROCESS,
    *,
    classes: int,
) -> Task:
    """`task` fitted to the outputs of `net` for `images`, or as many as `MAX_OUTPUTS` permits."""
    number = min(len(images), max(1, MAX_OUTPUTS // classes))
    some = images.subset([index * len(images) // number for index in range(number)])
    batches = scoring_batches(task, some, pre, device, workers, context)
    try:
        held, _ = count(net, HeldOutputs(), batches, context)
        assert isinstance(held, HeldOutputs)
        return held.fit(task)
    finally:
        batches.close()


def scoring_batches(
    task: Task,
    images: Images,
    pre: Preprocessing,
    device: torch.device | str,
    workers: int = 0,
    context: DistributedContext = SINGLE_PROCESS,
) -> Batches:
    """Batches of `images` to score networks on. A single batch needs no worker."""
    return Batches(
        images,
        task.test_view(pre),
        batch=task.scoring_batch,
        workers=workers if len(images) > task.scoring_batch else 0,
        device=device,
        rank=context.rank,
        world_size=context.world_size,
        collate=task.collate,
    )


def all_skipped(skipped: Mapping[str, str], context: DistributedContext) -> dict[str, str]:
    """The unreadable images of all processes, each with the reason."""
    return {name: why for each in context.gather(skipped) for name, why in each.items()}
