"""Trains a network: `train_epochs` yields its epochs, and a `Trainer` takes the steps."""

import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fullstride.nets.backbone import Backbone, channels_last
from fullstride.nets.efficiency import is_compiled
from fullstride.nets.layers import avoid_strided_pointwise
from fullstride.nets.padding import to_padded
from fullstride.nets.spec import input_shape
from fullstride.nets.weights.convert import fit
from fullstride.tasks.task import Task
from fullstride.train.averages import Average, RunningStatistics
from fullstride.train.batches import check_task, mix
from fullstride.train.compute import (
    SINGLE_PROCESS,
    DistributedContext,
    keep_freed_memory,
    numerics,
    on_device,
    share_batch_statistics,
    step_advice,
)
from fullstride.train.distill import TeacherProbabilities
from fullstride.train.optimizer import Course, Freezing, build_optimizer, lr_at, set_rates
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.run_folder import load_optimizer, load_scaler, read_state

# A loss is high above FACTOR x the first loss + MARGIN. Healthy losses begin near the loss of
# guessing, log(classes) for a classifier, and rarely double; with trained weights they may begin
# near zero, hence the margin. Our own numbers (docs/log.md).
FACTOR, MARGIN = 4.0, 10.0
# Required high losses in a row: SHARE of all steps, from FEWEST to MOST, so that spikes do not
# count.
SHARE, FEWEST, MOST = 1 / 20, 5, 100


@dataclass
class Divergence:
    """Detects whether the last losses of a training are high."""

    total: int  # steps of the training
    first: float | None = None  # loss of the first step
    high: int = 0  # high losses in a row, up to the last step
    steps: int = 0  # examined steps

    def find(self, losses: Sequence[float], start: int) -> int | None:
        """The index of the loss at which training has diverged, or None.

        `losses` are of consecutive steps after `start` steps; no step is examined twice.
        """
        enough = min(MOST, max(FEWEST, round(SHARE * self.total)))
        if self.first is None:
            self.first = losses[0]
        for index in range(self.steps - start, len(losses)):
            self.high = self.high + 1 if losses[index] > FACTOR * self.first + MARGIN else 0
            self.steps = start + index + 1
            if self.high >= enough:
                return index
        return None


CHECK_EVERY = 100  # steps between two checks of the losses, each of which waits for the device


class BatchSource(Protocol):
    """Batches of (images, targets, indices of the images); an epoch is the same each time."""

    def __len__(self) -> int: ...

    def epoch(
        self, number: int, start: int = 0
    ) -> Generator[tuple[Tensor, Any, Tensor], None, None]: ...


@dataclass(frozen=True)
class Checkpoint:
    """The state of training after a step, made of tensors and numbers."""

    state: dict[str, Any] = field(repr=False)  # the argument `resume`


@dataclass(frozen=True)
class Epoch(Checkpoint):
    """The state after an epoch, and its statistics."""

    number: int  # from 0
    loss: float  # mean over its steps
    lr: float  # learning rate of its last step
    images_per_s: float  # since the epoch began or was resumed
    data_wait_fraction: float  # fraction of that time spent waiting for images
    average: Backbone  # the averaged network in evaluation mode, to score and to save
    epochs: int  # of the training


# Called after each step with the course, the number of steps so far, and the seconds of the step
# with its wait for images. A course that it returns is the course from there, and within an epoch a
# checkpoint is made; None changes nothing.
Pause = Callable[[Course, int, float], Course | None]


def train_epochs(
    net: Backbone,
    task: Task,
    batches: BatchSource,
    recipe: Recipe,
    resume: dict[str, Any] | None = None,
    *,
    teacher: TeacherProbabilities | None = None,
    checkpoint_every_steps: int = 0,
    context: DistributedContext = SINGLE_PROCESS,
) -> Iterator[Checkpoint]:
    """Train `net` in place, and yield an `Epoch` after each epoch for the caller to log and save.

    `net` gets the recipe's `drop_path` and `dropout`, if there are any. A recipe with a teacher
    needs the `teacher` itself, and one with `pad_channels` the padded network; else a ValueError
    says so.

    `checkpoint_every_steps` also yields `Checkpoint`s within an epoch. `resume` is the `state` of
    the last epoch or checkpoint: training then continues as if it had not stopped, bit for bit if
    the device computes reproducibly. With several processes in `context`, `batches` has each
    process's part of every batch, and all yield the same. Raises FloatingPointError, with the step,
    if the loss is not finite or diverges.

    Examples:
        >>> import fullstride
        >>> from fullstride.data.loader import Batches, LoaderOptions, TrainView
        >>> from fullstride.tasks.classify import Classify
        >>> pixels = fullstride.Preprocessing(resolution=32, mean=(0.5,), std=(0.5,))
        >>> images = fullstride.open_data("digits").train.subset(range(64))
        >>> batches = Batches(images, TrainView(pixels), LoaderOptions(batch=16, shuffle=True))
        >>> net = fullstride.zoo.create("genet_tiny", in_channels=1)
        >>> recipe = fullstride.Recipe(epochs=2, batch_size=16, lr=0.1)
        >>> [epoch.number for epoch in fullstride.train_epochs(net, Classify(), batches, recipe)]
        [0, 1]
    """
    recipe = recipe.in_epochs(len(batches))
    give_parts(net, recipe, teacher)
    trainer = build_trainer(net, task, recipe, len(batches), teacher, context)
    with keep_freed_memory(trainer.device):
        yield from run_epochs(trainer, batches, resume, every(checkpoint_every_steps, len(batches)))


def give_parts(net: Backbone, recipe: Recipe, teacher: TeacherProbabilities | None) -> None:
    """Give `net` the recipe's stochastic depth and dropout, in place.

    Raises ValueError for a teacher or padding of the recipe that the caller did not give.
    """
    if recipe.teacher and teacher is None:
        raise ValueError(
            f"recipe.teacher {recipe.teacher} without a teacher: give train_epochs one"
        )
    if recipe.pad_channels and to_padded(net) is not net:
        raise ValueError("recipe.pad_channels without padding: train nets.padding.to_padded(net)")
    if recipe.drop_path or recipe.dropout:
        like = next(net.parameters())
        net.regularise(drop_path=recipe.drop_path, by=recipe.drop_path_by, dropout=recipe.dropout)
        net.to(like)  # timm's networks are built again


def every(steps: int, per_epoch: int) -> Pause:
    """Checkpoints after each `steps` within an epoch; none for 0."""
    return lambda course, done, step_s: course if steps and done % per_epoch % steps == 0 else None


def run_epochs(
    trainer: "Trainer",
    batches: BatchSource,
    resume: dict[str, Any] | None,
    pause: Pause,
) -> Iterator[Checkpoint]:
    """The epochs of `train_epochs`."""
    net, context, per_epoch = trainer.net, trainer.context, len(batches)
    number, start, losses = trainer.resume(resume) if resume else (0, 0, [])
    while (before := number * per_epoch) < trainer.course.end:
        net.train()
        images, wait_s, pause_s = 0, 0.0, 0.0
        epoch_start = step_end = time.perf_counter()
        source = batches.epoch(trainer.epoch_at(before), start)
        for index, (x, targets, indices) in enumerate(source, start + 1):
            wait_s += time.perf_counter() - step_end
            with trainer.numerics(), step_advice(trainer.recipe, trainer.device, context):
                losses.append(trainer.step(x, targets, before + index - 1, indices))
            images += len(x)
            course = pause(trainer.course, before + index, time.perf_counter() - step_end)
            trainer.course = course or trainer.course
            if index == min(per_epoch, trainer.course.end - before):
                break  # the last epoch may be partial
            if course or index % CHECK_EVERY == 0:
                trainer.check(list(context.mean(torch.stack(losses))), number)
                if course:
                    pause_start = time.perf_counter()
                    yield Checkpoint(trainer.state(number, index, losses))
                    pause_s += time.perf_counter() - pause_start
            step_end = time.perf_counter()
        source.close()  # ends a progress bar before the scores are computed
        losses = list(context.mean(torch.stack(losses)))
        trainer.check(losses, number)
        loss = torch.stack(losses).mean().item()
        epoch_s = time.perf_counter() - epoch_start - pause_s
        state = trainer.state(number + 1, 0, [])
        lr = trainer.lr(before + len(losses) - 1)
        rate = context.world_size * images / epoch_s
        average = cast(Backbone, trainer.average.net)
        epochs = math.ceil(trainer.course.end / per_epoch)
        yield Epoch(state, number, loss, lr, rate, wait_s / epoch_s, average, epochs)
        number, start, losses = number + 1, 0, []


def build_trainer(
    net: Backbone,
    task: Task,
    recipe: Recipe,
    per_epoch: int,
    teacher: TeacherProbabilities | None = None,
    context: DistributedContext = SINGLE_PROCESS,
) -> "Trainer":
    """Build the trainer of `net`, and give `net` the modules of the recipe, in place.

    Raises ValueError, in one line, for a recipe that the task or the device does not support.
    """
    check_task(task, recipe)
    device = next(net.parameters()).device
    recipe = on_device(recipe, device)
    check_computation(recipe, device)
    if recipe.deterministic:
        # cuBLAS requires this for reproducible products
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cpu":
        avoid_strided_pointwise(net)
    if recipe.sync_bn and context.is_distributed:
        share_batch_statistics(net, device)
    return Trainer(net, task, recipe, per_epoch, teacher, context)


def check_computation(recipe: Recipe, device: torch.device) -> None:
    """Raise ValueError for fields that are not chosen yet, and for a CPU's unreliable precision."""
    if recipe.efficiency == "auto":
        raise ValueError(
            "recipe.efficiency auto is chosen before the first step: use plain or plain_compiled"
        )
    if not recipe.grad_accum_steps:
        raise ValueError("recipe.grad_accum_steps 0 is chosen before the first step: use 1 or more")
    if device.type == "cpu" and recipe.channels_last and recipe.precision in ("bf16", "fp16"):
        # With torch 2.15, gradients differ between runs, and some are NaN (docs/log.md).
        raise ValueError(
            f"recipe.precision {recipe.precision} with recipe.channels_last is not reliable on "
            "a CPU: set recipe.precision fp32, or use a GPU"
        )


class Trainer:
    """Holds the state of training, with network, average and optimizer, and takes steps."""

    def __init__(
        self,
        net: Backbone,
        task: Task,
        recipe: Recipe,
        per_epoch: int,
        teacher: TeacherProbabilities | None,
        context: DistributedContext,
    ):
        """`net` must have the modules of the recipe, see `build_trainer`."""
        self.device = next(net.parameters()).device
        self.net, self.recipe, self.per_epoch = net, recipe, per_epoch
        self.task, self.teacher, self.context = task.with_options(recipe), teacher, context
        self.layout = torch.contiguous_format
        if recipe.channels_last:
            self.layout = channels_last(1 + len(input_shape(net.spec)))
            net.to(memory_format=self.layout)
        self.course = Course(max(1, round(recipe.epochs * per_epoch)))
        self.divergence = Divergence(self.course.whole)
        self.freezing = Freezing(net, recipe, per_epoch)
        self.optimizer = build_optimizer(net, recipe)
        self.average = Average(net, recipe.ema_decay)
        self.statistics = RunningStatistics(net, recipe.bn_momentum)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=recipe.precision == "fp16")
        self.freezing.apply(0)
        self.forward = self.build_forward()

    def build_forward(self) -> Callable[..., Any]:
        """Build the module that a step calls, for the parameters that currently train."""
        net, module = self.net, self.task.training_module(self.net)
        if self.context.is_distributed:
            # beside a task's head, the network's classifier has no gradients
            has_unused = net.task_head is not None
            module = DistributedDataParallel(
                module, broadcast_buffers=False, find_unused_parameters=has_unused
            )
        self.module = module
        if not is_compiled(self.recipe.efficiency):
            return module
        from fullstride.nets.compile import compile_for_training  # takes seconds to import

        return compile_for_training(module)

    def numerics(self) -> AbstractContextManager[None]:
        """Set how steps compute: float32 parts of 16-bit training need not be exact either."""
        on_gpu = self.device.type == "cuda"
        return numerics(
            tf32=on_gpu and self.recipe.precision != "fp32",
            benchmark=not self.recipe.deterministic,
            deterministic=self.recipe.deterministic,
        )

    def step(self, x: Tensor, targets: Any, number: int, indices: Tensor | None = None) -> Tensor:
        """Take one optimizer step; return the loss on the device: reading it would stall a GPU.

        `indices` are the images' indices, for a teacher with a cache. Every random draw depends
        only on the recipe's seed and the step, so a resumed run draws the same numbers.
        """
        recipe = self.recipe
        if self.freezing.apply(int(self.course.at(number))):
            self.forward = self.build_forward()
        set_rates(self.optimizer, self.course.at(number + 0.5) / self.per_epoch, recipe)
        rng = np.random.default_rng([recipe.seed, number])
        torch.manual_seed(int(rng.integers(2**62)) + self.context.rank)
        x = x.contiguous(memory_format=self.layout)
        if recipe.mixup or recipe.cutmix:
            classes = self.net.spec.classes
            x, targets = mix(x, targets, classes, mixup=recipe.mixup, cutmix=recipe.cutmix, rng=rng)
        self.statistics.before(number, len(self.parts(len(x))))
        loss = self.backward(x, targets, self.epoch_at(number), indices)
        self.statistics.after(number)
        if recipe.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), recipe.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.average.update(number, self.course.stride)
        return loss

    def lr(self, step: int) -> float:
        return lr_at(self.course.at(step + 0.5) / self.per_epoch, self.recipe)

    def epoch_at(self, step: int) -> int:
        """The epoch of the schedule whose images are in the epoch of a step."""
        return int(self.course.at(step // self.per_epoch * self.per_epoch) / self.per_epoch)

    def backward(self, x: Tensor, targets: Any, epoch: int, indices: Tensor | None) -> Tensor:
        """Add the gradients of a batch in the recipe's number of passes; return its loss."""
        indices = torch.arange(len(x)) if indices is None else indices
        total = torch.zeros((), device=self.device)
        for part in self.parts(len(x)):
            with self.maybe_no_sync(part.stop < len(x)):
                loss = self.loss(x[part], targets[part], epoch, indices[part])
                loss = loss * (len(x[part]) / len(x))
                self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def parts(self, images: int) -> list[slice]:
        """The images of each pass, whose numbers differ by one at most; few images have fewer."""
        passes = math.ceil(images / math.ceil(images / self.recipe.grad_accum_steps))
        return [slice(images * i // passes, images * (i + 1) // passes) for i in range(passes)]

    def maybe_no_sync(self, more_follow: bool) -> AbstractContextManager[None]:
        """Let processes average their gradients only after the last part of a batch."""
        if more_follow and isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()
        return nullcontext()

    def loss(self, x: Tensor, targets: Any, epoch: int, indices: Tensor) -> Tensor:
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.recipe.precision)
        with torch.autocast(self.device.type, half, enabled=half is not None):
            # Masks are drawn here, outside compiled code; timm's networks draw their own.
            more = (targets,) if self.task.training_targets else ()
            outputs = self.forward(x, self.net.draw(len(x)), *more)
            teacher = self.teacher(x, epoch=epoch, indices=indices) if self.teacher else None
            return self.task.loss(outputs, targets, teacher)

    def check(self, losses: list[Tensor], epoch: int) -> None:
        """Raise FloatingPointError if a loss is not finite, or if the losses diverge.

        `losses` are the losses of `epoch` so far, equal in all processes.
        """
        recipe, values = self.recipe, torch.stack(losses).tolist()
        bad = next((step for step, value in enumerate(values) if not math.isfinite(value)), None)
        high = self.divergence.find(values, epoch * self.per_epoch) if bad is None else bad
        if high is None:
            return
        lr = self.lr(epoch * self.per_epoch + high)
        where = f"in step {high + 1} of epoch {epoch + 1}"
        if high == bad:
            raise FloatingPointError(
                f"the loss became {values[high]} {where}, at a learning rate of {lr:.3g}: lower "
                f"recipe.lr ({recipe.lr:g}), warm up for longer than recipe.warmup_epochs "
                f"({recipe.warmup_epochs:g}) or set recipe.clip_norm"
            )
        raise FloatingPointError(
            f"the loss diverges: {values[high]:.3g} {where}, from {self.divergence.first:.3g} in "
            f"the first step, at a learning rate of {lr:.3g} for {recipe.batch_size} images: lower "
            f"recipe.lr ({recipe.lr:g}), such as --lr {recipe.lr / 10:.2g}, or set recipe.clip_norm"
        )

    def state(self, epochs: int, index: int, losses: list[Tensor]) -> dict[str, Any]:
        """Make the checkpoint after `epochs` whole epochs and `index` batches of the next epoch."""
        for net in (self.net, self.average.net):
            self.context.sync_buffers(net)
        return {
            "epochs": epochs,
            "index": index,
            "losses": self.context.mean(torch.stack(losses)).cpu() if losses else torch.empty(0),
            "net": self.net.state_dict(),
            "average": self.average.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "turns": self.course.turns,
            "first_loss": self.divergence.first,
            "high_losses": self.divergence.high,
        }

    def resume(self, data: dict[str, Any]) -> tuple[int, int, list[Tensor]]:
        """Load the checkpoint `data`. Raises ValueError, in one line, if it does not fit."""
        where = "the checkpoint"
        state = read_state(data, where)
        course = replace(self.course, turns=state.turns)
        done = state.epochs * self.per_epoch + state.index
        course.check(where, done)
        epochs = math.ceil(course.end / self.per_epoch)
        is_beyond = state.epochs > epochs or (state.index and done >= course.end)
        if is_beyond or state.index >= self.per_epoch:
            raise ValueError(
                f"{where} is of epoch {state.epochs} and step {state.index}, training has "
                f"{epochs} epochs of {self.per_epoch} steps"
            )
        for name, net in (("net", self.net), ("average", self.average.net)):
            try:
                net.load_state_dict(fit(net.state_dict(), dict(getattr(state, name))))
            except ValueError as error:
                raise ValueError(f"{where}: {name}: {error}") from None
        by_id = {id(parameter): name for name, parameter in self.net.named_parameters()}
        groups = self.optimizer.param_groups
        names = [by_id[id(parameter)] for group in groups for parameter in group["params"]]
        load_optimizer(self.optimizer, state.optimizer, names, where)
        load_scaler(self.scaler, state.scaler, where)
        self.course = course
        self.divergence.first, self.divergence.high = state.first_loss, state.high_losses
        self.divergence.steps = done
        return state.epochs, state.index, list(state.losses.to(self.device))
