"""What will a training run do, and how long will it take? Its plan, and the time of its steps."""

import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

from fullstride.data.dataset import DataSet
from fullstride.nets.backbone import Backbone
from fullstride.train.loop import BatchSource
from fullstride.train.recipe import Recipe
from fullstride.train.recipes.named import NOMINAL, Case

START_STEPS = 3  # compile, choose kernels and start workers, so they are not timed
MIN_STEPS, MIN_S = 20, 10.0  # to be timed, or fewer steps
FEWER_STEPS_S = 30.0
SCORING_SHARE = 1 / 3  # time of a forward pass / time of a training step


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What a run does, known before its first step."""

    model: str
    weights: str  # source of the initial weights; "" for random ones
    net: Backbone
    data: DataSet
    recipe_name: str = ""  # of the named recipe that `recipe` was made from
    case: Case = NOMINAL  # for which it was made
    recipe: Recipe  # in numbers
    resolved: Recipe  # with its length in epochs and its efficiency
    resolution: int  # pixels per side
    weights_resolution: int | None = None  # of the initial weights; None for random ones
    steps_per_epoch: int
    device: torch.device
    processes: int = 1
    workers: int = 0  # of each process, which decode images
    start: tuple[int, int] = (0, 0)  # epochs of an earlier call, and steps in the next epoch

    @property
    def steps(self) -> int:
        """Of the whole training."""
        return max(1, round(self.resolved.epochs * self.steps_per_epoch))

    def seconds_left(self, step_s: float, epoch: int, step: int) -> float:
        """The time from a step of an epoch (from 0) to the end, if a step there takes `step_s`.

        The time of a step is proportional to the pixels of an image. Scoring is a third of that.
        """
        sides = self.resolved.resolutions(self.resolution)
        epochs, resolution = math.ceil(self.resolved.epochs), self.resolution
        work = [(side / resolution) ** 2 for side in sides] + [1.0] * (epochs - len(sides))
        left = sum(work[: self.steps // self.steps_per_epoch]) * self.steps_per_epoch
        left += work[-1] * (self.steps % self.steps_per_epoch)
        left -= sum(work[:epoch]) * self.steps_per_epoch + work[epoch] * step
        scores = math.ceil((epochs - epoch) / self.resolved.score_every_epochs) + 1
        scored = scores * len(self.data.minival) + len(self.data.test)
        left += SCORING_SHARE * scored / self.resolved.batch
        return left * step_s / work[epoch]


class TimedBatches:
    """Batches whose steps are timed, with the wait for images.

    `report` is called once, with the mean time of a step in seconds, the epoch and the step.
    """

    def __init__(self, batches: BatchSource, report: Callable[[float, int, int], None]):
        self.batches, self.report = batches, report
        self.step_s: list[float] = []
        self.is_reported = False

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, number: int, start: int = 0) -> Generator[Any, None, None]:
        begin = time.perf_counter()
        for index, batch in enumerate(self.batches.epoch(number, start), start + 1):
            yield batch
            if not self.is_reported:
                end = time.perf_counter()
                self.count(end - begin, number, index)
                begin = end

    def count(self, step_s: float, epoch: int, step: int) -> None:
        self.step_s.append(step_s)
        timed = self.step_s[START_STEPS:]
        is_enough = len(timed) >= MIN_STEPS and sum(timed) >= MIN_S
        if is_enough or sum(timed) >= FEWER_STEPS_S:
            self.is_reported = True
            self.report(sum(timed) / len(timed), epoch, step)
