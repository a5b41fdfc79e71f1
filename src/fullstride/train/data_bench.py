"""Will the network wait for images? What the data path brings and what training steps take, each measured alone."""

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

import torch

from fullstride.data.dataset import DataSet, Images
from fullstride.data.loader import Batch, Batches
from fullstride.measure.environment import Environment, find_device
from fullstride.measure.timing import timed_calls
from fullstride.nets import fused_form
from fullstride.storage import atomic_write
from fullstride.tasks import find_task
from fullstride.tasks.task import Task
from fullstride.train.autotune import BLOCK_S, MIN_SAMPLES, choose_efficiency, timed_steps
from fullstride.train.batches import measurement_batches, repeat, training_batches
from fullstride.train.distributed import SINGLE_PROCESS
from fullstride.train.loop import Learner
from fullstride.train.recipe import Recipe
from fullstride.train.run import initial_network

PICTURES = 9  # whose sizes are looked at
PACKED_SIDE = 400 / 224  # long side / resolution that `fullstride pack` recommends


@dataclass(frozen=True, kw_only=True)
class Feed:
    """What the data path brings when the network rests; rates are medians of their samples."""

    workers: int
    images_per_s: float  # with these workers, once they are warm
    images_per_s_alone: float  # of one process, by the clock: reading from a slow disk counts
    images_per_cpu_s: float  # of one process, by its user and system time
    long_side: float  # pixels, median of a few pictures
    samples: tuple[float, ...] = field(repr=False)  # of images_per_s
    samples_alone: tuple[float, ...] = field(repr=False)
    samples_cpu: tuple[float, ...] = field(repr=False)
    skipped: dict[str, str]  # pictures that cannot be read, and why


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What training steps take when a batch is always there; the rate is the median of the samples."""

    batch: int
    images_per_s: float
    samples: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Supply against demand."""

    feed: Feed
    steps: Steps
    device: str  # cpu or cuda
    cores: int  # that this process may use
    resolution: int  # pixels a side that the network sees

    @property
    def ratio(self) -> float:
        return self.feed.images_per_s / self.steps.images_per_s

    @property
    def in_turn(self) -> bool:
        """Whether one process decodes and computes in turn; a GPU computes while its process decodes."""
        return self.device == "cpu" and not self.feed.workers

    @property
    def waiting(self) -> float:
        """The share of time in which the network waits for images."""
        return 1 / (1 + self.ratio) if self.in_turn else max(0.0, 1 - self.ratio)

    @property
    def workers_needed(self) -> int:
        """By what each one brings: alone, or less where several get into each other's way."""
        feed, busy = self.feed, min(self.feed.workers, self.workers_kept_busy)
        each = min(feed.images_per_s_alone, feed.images_per_s / max(1, busy))
        return math.ceil(self.steps.images_per_s / each)

    @property
    def cores_needed(self) -> int:
        return math.ceil(self.steps.images_per_s / self.feed.images_per_cpu_s)

    @property
    def workers_kept_busy(self) -> int:
        """How many workers the cores here keep up with; more than cores where workers wait for a disk."""
        return max(1, int(self.cores * self.feed.images_per_cpu_s / self.feed.images_per_s_alone))

    def verdict(self) -> str:
        who = "network" if self.device == "cpu" else "GPU"
        if self.ratio >= 1:
            brings = f"the data path brings {self.ratio:.1f} times what the network eats"
            in_turn = f"; decoded in the same process, images still take {100 * self.waiting:.0f} % of the time"
            return brings + in_turn if self.in_turn else brings
        return (
            f"the {who} will wait {100 * self.waiting:.0f} % of the time: it needs about {self.workers_needed} workers "
            f"(have {self.feed.workers}) and the time of {self.cores_needed} such core{'s' * (self.cores_needed > 1)} "
            f"(have {self.cores})"
        )

    def levers(self, recipe: Recipe, from_files: bool) -> list[str]:
        """What would bring more images and is not used yet, the cheapest first; none where images suffice."""
        if self.ratio >= 1:
            return []
        found = []
        workers = min(self.workers_needed, self.workers_kept_busy)
        if workers > self.feed.workers:
            found.append(f"--workers {workers}")
        if from_files and recipe.decoder == "pillow":
            found.append(
                "--recipe.decoder opencv, of the extra fullstride[fast]: quicker, its pixels differ a little"
            )
        small = math.ceil(self.resolution * PACKED_SIDE)
        if from_files and self.feed.long_side > 1.5 * small:
            found.append(
                f"fullstride pack --long-side {small}: pictures here have {self.feed.long_side:.0f} pixels"
            )
        return found


def balance(
    model: str,
    data: DataSet,
    recipe: Recipe,
    *,
    task: Task | None = None,
    workers: int = 0,
    device: torch.device | str = "cpu",
    seconds: float = 5,
) -> Balance:
    """Measure for about `seconds` each: one process that decodes, the workers, and training steps without a teacher."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds {seconds:g}: use a number above 0")
    device = find_device(device)
    task = task or find_task()
    net, pre = initial_network(model, task, data, recipe)
    net.regularise(drop_path=recipe.drop_path, by=recipe.drop_path_by, dropout=recipe.dropout)
    net = fused_form.padded(net, model) if recipe.pad_channels else net
    per_epoch = len(training_batches(data, task, pre, recipe, device, workers))

    def batches(batch: int, workers: int) -> Batches:
        return measurement_batches(data, task, pre, recipe, device, batch, workers)

    few = next(batches(8, 0).epoch(0))
    recipe = choose_efficiency(recipe.in_epochs(per_epoch), task, net, few, device)
    learner = Learner(net.to(device).train(), task, recipe, per_epoch, None, SINGLE_PROCESS)
    feed, some = supply(batches, workers, device, seconds, data.train)
    steps = demand(learner, some, min(recipe.batch, len(data.train)), seconds)
    return Balance(
        feed=feed, steps=steps, device=device.type, cores=cores(), resolution=pre.resolution
    )


def save(
    path: Path,
    balance: Balance,
    model: str,
    data: DataSet,
    recipe: Recipe,
    environment: Environment,
) -> None:
    """All samples, what was measured and where, as JSON."""
    content = {
        "model": model,
        "data": data.where,
        "fingerprint": data.fingerprint,
        "recipe": asdict(recipe),
        **asdict(balance),
        "verdict": balance.verdict(),
        "waiting": balance.waiting,
        "levers": balance.levers(recipe, from_files=data.train.file is not None),
        "environment": asdict(environment),
    }
    with atomic_write(path) as beside:
        beside.write_text(json.dumps(content, indent=1))


def supply(
    batches: Callable[[int, int], Batches],
    workers: int,
    device: torch.device,
    seconds: float,
    images: Images,
) -> tuple[Feed, Batch]:
    """What `batches(images a batch, workers)` bring, and one of them."""
    few = endless(batches(8, 0), 0)
    some = next(few)  # imports what decodes, opens files
    (first_s,), _ = timed_calls(lambda: next(few), 1, device)
    in_block = round(len(some.x) / first_s * BLOCK_S)

    def samples(workers: int) -> tuple[list[float], list[float], dict[str, str]]:
        source = batches(in_block, workers)
        stream = endless(
            source, 1 + workers
        )  # other pictures first: those read before wait in memory
        batch = len(next(stream).x)
        calls = max(1, workers) * max(
            1, round(in_block / batch)
        )  # workers' batches come in bursts of as many
        for _ in range(calls):  # until all workers are at work
            next(stream)
        by_clock, by_cpu, deadline = [], [], time.perf_counter() + seconds
        while len(by_clock) < MIN_SAMPLES or time.perf_counter() < deadline:
            (block_s,), cpu_s = timed_calls(lambda: next(stream), calls, device)
            by_clock.append(calls * batch / block_s)
            by_cpu.append(calls * batch / cpu_s)
        return by_clock, by_cpu, source.skipped

    alone, cpu, skipped = samples(0)
    found = alone
    if workers:
        found, _, more = samples(workers)
        skipped = skipped | more
    feed = Feed(
        workers=workers,
        images_per_s=statistics.median(found),
        images_per_s_alone=statistics.median(alone),
        images_per_cpu_s=statistics.median(cpu),
        long_side=long_side(images),
        samples=tuple(found),
        samples_alone=tuple(alone),
        samples_cpu=tuple(cpu),
        skipped=skipped,
    )
    return feed, some


def endless(batches: Batches, first: int) -> Iterator[Batch]:
    for number in count(first):
        yield from batches.epoch(number)


def long_side(images: Images) -> float:
    step = math.ceil(len(images) / PICTURES)
    few = images.subset(range(0, len(images), step))
    return statistics.median([max(picture.size) for _, picture in few.readable()] or [0])


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def demand(learner: Learner, some: Batch, batch: int, seconds: float) -> Steps:
    """Times of training steps of `batch` images, which repeat those of `some`."""
    samples = timed_steps(learner, repeat(some, batch), seconds)
    return Steps(batch=batch, images_per_s=statistics.median(samples), samples=tuple(samples))
