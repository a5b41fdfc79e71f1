"""How good is a network? Its scores on images."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fullstride.data.dataset import Images
from fullstride.data.loader import Batches
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import find_task
from fullstride.tasks.confusion import ConfusionMatrix
from fullstride.tasks.task import Score, Task
from fullstride.tasks.temperature import MAX_LOGITS, TemperatureScore
from fullstride.train.compute import numerics
from fullstride.train.distributed import SINGLE_PROCESS, DistributedContext
from fullstride.train.loop import BatchSource

BATCH = 128  # images, over all processes


class Evaluation(NamedTuple):
    """What a network achieves on a set of images."""

    scores: dict[str, float]  # with `images`, the number of readable ones
    skipped: dict[str, str]  # the reason for each image that cannot be read
    confusion: ConfusionMatrix | None  # for a task with classes


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
    bundle: Bundle, images: Images, device: torch.device | str, *, mirrored: bool = False
) -> Evaluation:
    """What `bundle` achieves on `images`; with `mirrored` by the mean with their mirror images."""
    net, task = bundle.net.to(device), find_task(bundle.task, bundle.temperature)
    if mirrored:
        net, task = MirrorAverage(net, task), task.calibrated(1.0)
    return score_images(net, task, images, bundle.preprocessing, device)


class MirrorAverage(nn.Module):
    """The mean of a network's probabilities for an image and its mirror image.

    (N, C, H, W) -> (N, K), the logarithms of the means, which are logits of temperature 1.
    """

    def __init__(self, net: nn.Module, task: Task):
        super().__init__()
        self.net, self.task = net, task

    def forward(self, x: Tensor) -> Tensor:
        both = [self.task.activate(self.net(each).float()) for each in (x, x.flip(-1))]
        mean = torch.stack(both).mean(0)
        return mean.clamp_min(torch.finfo(mean.dtype).tiny).log()


def score_batches(
    net: nn.Module, task: Task, batches: Batches, context: DistributedContext
) -> Evaluation:
    """What `net` achieves on the images of `batches`."""
    score, images = count(net, task.score(), batches, context)
    scores = finite_scores(score, images)
    return Evaluation(scores, all_skipped(batches, context), task.confusion(score))


def score_calibrated(
    net: nn.Module, task: Task, batches: Batches, context: DistributedContext
) -> tuple[float, Evaluation]:
    """The temperature by which `net` fits the images of `batches`, and what it achieves with it.

    The outputs are computed once, and held in memory.
    """
    outputs, images = count(net, TemperatureScore(), batches, context)
    assert isinstance(outputs, TemperatureScore)
    temperature = finite_scores(outputs, images)["temperature"]
    task = task.calibrated(temperature)
    score = task.score()
    for logits, labels in zip(outputs.logits, outputs.labels, strict=True):
        score.update(logits, labels)
    scores = finite_scores(score, images)
    return temperature, Evaluation(scores, all_skipped(batches, context), task.confusion(score))


def fit_temperature_on(
    net: nn.Module,
    task: Task,
    images: Images,
    pre: Preprocessing,
    device: torch.device | str,
    workers: int = 0,
    context: DistributedContext = SINGLE_PROCESS,
    *,
    classes: int,
) -> float:
    """The temperature by which `net` fits `images`, or as many as `MAX_LOGITS` permits."""
    number = min(len(images), max(1, MAX_LOGITS // classes))
    some = images.subset([index * len(images) // number for index in range(number)])
    batches = scoring_batches(task, some, pre, device, workers, context)
    try:
        return finite_scores(*count(net, TemperatureScore(), batches, context))["temperature"]
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
        batch=BATCH,
        workers=workers if len(images) > BATCH else 0,
        device=device,
        rank=context.rank,
        world_size=context.world_size,
        collate=task.collate,
    )


def all_skipped(batches: Batches, context: DistributedContext) -> dict[str, str]:
    """The unreadable images of all processes, each with the reason."""
    return {name: why for each in context.gather(batches.skipped) for name, why in each.items()}
