"""How does a network learn? `train_epochs` yields epochs; `evaluate` scores."""

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fullstride.nets import fused_form
from fullstride.nets.backbone import Backbone, Masks
from fullstride.nets.efficiency import is_compiled, is_fused
from fullstride.tasks.metric_learning import weighted_triplet
from fullstride.tasks.task import Task
from fullstride.train.distill import TeacherProbabilities
from fullstride.train.distributed import SINGLE_PROCESS, DistributedContext
from fullstride.train.mix import mix
from fullstride.train.optimizer import Average, build_optimizer, lr_at, momentum_at
from fullstride.train.recipe import Recipe

CHECK_EVERY = 100  # steps from one look at the losses to the next: each look waits for the device


class Batches(Protocol):
    """Batches of (images, targets, indices), the same ones whenever the same epoch is asked for."""

    def __len__(self) -> int: ...

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]: ...


@dataclass(frozen=True)
class Checkpoint:
    """A place in training to go on from. `state` is of tensors and numbers only."""

    state: dict[str, Any]


@dataclass(frozen=True)
class Epoch(Checkpoint):
    """What one pass over the training images brought."""

    number: int  # from 0
    loss: float  # mean over its steps
    lr: float  # of its last step
    images_per_s: float  # since the epoch began or went on
    data_share: float  # of that time, spent waiting for images
    average: Backbone  # the averaged network, in evaluation mode; the one to judge and to keep


def train_epochs(
    net: Backbone,
    task: Task,
    batches: Batches,
    recipe: Recipe,
    resume: dict[str, Any] | None = None,
    *,
    teacher: TeacherProbabilities | None = None,
    checkpoint_every_steps: int = 0,
    context: DistributedContext = SINGLE_PROCESS,
) -> Iterator[Checkpoint]:
    """Train `net` in place. Yields an `Epoch` after each one: whoever iterates prints, evaluates, saves, stops.

    With `checkpoint_every_steps`, a plain `Checkpoint` is yielded after so many steps within an epoch too. `resume` is the `state`
    of the last one that was seen; what follows is then the same, bit for bit where the device computes
    reproducibly, as if there had been no stop. `teacher` gives probabilities for the images of a batch.
    With several processes in `context`, each process has its share of every batch in `batches`, and all yield the same.
    Raises FloatingPointError, with the step, where the loss is no longer finite.
    """
    recipe = recipe.in_epochs(len(batches))
    learner = Learner(net, task, recipe, len(batches), teacher, context)
    steps = max(1, round(recipe.epochs * len(batches)))
    first, start, losses = learner.resume(resume) if resume else (0, 0, [])
    for number in range(first, math.ceil(steps / len(batches))):
        net.train()
        if start:
            net.restore_saved_tensor_choices(learner.saved_tensor_choices)
        last = min(
            len(batches), steps - number * len(batches)
        )  # the last epoch may be a part of one
        images, waited, away = 0, 0.0, 0.0
        began = mark = time.perf_counter()
        for done, (x, y, indices) in enumerate(
            islice(batches.epoch(number, start), last - start), start + 1
        ):
            waited += time.perf_counter() - mark
            with numerics(recipe.precision == "tf32", recipe.deterministic):
                losses.append(learner.step(x, y, number * len(batches) + done - 1, indices))
            images += len(x)
            marked = checkpoint_every_steps and done % checkpoint_every_steps == 0
            if done < last and (marked or done % CHECK_EVERY == 0):
                learner.check(losses, number)
                if marked:
                    left = time.perf_counter()
                    yield Checkpoint(learner.state(number, done, losses))
                    away += time.perf_counter() - left
            mark = time.perf_counter()
        losses = list(context.mean(torch.stack(losses)))
        learner.check(losses, number)
        loss = torch.stack(losses).mean().item()
        took = time.perf_counter() - began - away
        state = learner.state(number + 1, 0, [])
        lr = lr_at(number + (last - 0.5) / len(batches), recipe)
        rate = context.world_size * images / took
        average = cast(Backbone, learner.average.net)
        yield Epoch(state, number, loss, lr, rate, waited / took, average)
        start, losses = 0, []


class Learner:
    """What moves from step to step: the network, its average, the optimizer."""

    def __init__(
        self,
        net: Backbone,
        task: Task,
        recipe: Recipe,
        per_epoch: int,
        teacher: TeacherProbabilities | None,
        context: DistributedContext,
    ):
        self.net, self.task, self.recipe, self.per_epoch = net, task, recipe, per_epoch
        self.teacher, self.context = teacher, context
        self.device = next(net.parameters()).device
        if recipe.efficiency == "auto":
            raise ValueError(
                "recipe.efficiency auto is chosen before the first step: use plain, fused, "
                "plain_compiled or fused_compiled"
            )
        if recipe.deterministic:
            os.environ.setdefault(
                "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
            )  # cuBLAS wants it for reproducible products
        if (
            self.device.type == "cpu"
            and recipe.channels_last
            and recipe.precision in ("bf16", "fp16")
        ):
            # Seen with torch 2.15: gradients that change from run to run, now and then NaN (docs/log.md).
            raise ValueError(
                f"recipe.precision {recipe.precision} with recipe.channels_last is not reliable on a CPU: "
                "set one of the two back"
            )
        self.layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        if recipe.channels_last:
            net.to(memory_format=torch.channels_last)
        if is_fused(recipe.efficiency):
            fused_form.fused(net, net.spec.source, int8=recipe.int8_maps)
        else:
            fused_form.plain(net)
        self.optimizer = build_optimizer(net, recipe)
        self.average = Average(net, recipe.ema_decay)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=recipe.precision == "fp16")
        whole = WithEmbedding(net) if recipe.triplet else net
        shared = (
            DistributedDataParallel(whole, broadcast_buffers=False)
            if context.is_distributed
            else whole
        )
        self.forward: Callable[..., Any] = shared
        if is_compiled(recipe.efficiency):
            from fullstride.nets.compile import compile_for_training  # takes seconds to import

            self.forward, _, reason = compile_for_training(shared, operators=net.custom_operators)
            if reason:
                warnings.warn(f"compiled without recomputation: {reason}", stacklevel=2)

    def step(self, x: Tensor, labels: Tensor, number: int, indices: Tensor | None = None) -> Tensor:
        """One step of the optimizer; returns the loss, on the device: reading it here would stall a GPU.

        `indices` say which images these are, for a teacher that remembers. Every random draw is a function of the
        recipe's seed and the step, so that a run that goes on draws the same.
        """
        recipe = self.recipe
        epoch = (number + 0.5) / self.per_epoch
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(epoch, recipe)
            if "momentum" in group:
                group["momentum"] = momentum_at(epoch, recipe)
        rng = np.random.default_rng([recipe.seed, number])
        torch.manual_seed(int(rng.integers(2**62)) + self.context.rank)
        x = x.contiguous(memory_format=self.layout)
        targets = labels
        if recipe.mixup or recipe.cutmix:
            x, targets = mix(
                x, labels, self.net.spec.classes, mixup=recipe.mixup, cutmix=recipe.cutmix, rng=rng
            )
        total = torch.zeros((), device=self.device)
        which = torch.arange(len(x)) if indices is None else indices
        parts = (each.chunk(recipe.grad_accum_steps) for each in (x, targets, which))
        for x_part, targets_part, which_part in zip(*parts, strict=True):
            views = dict(epoch=number // self.per_epoch, indices=which_part)
            teacher = partial(self.teacher, **views) if self.teacher else None
            loss = self.loss(x_part, targets_part, teacher) * (len(x_part) / len(x))
            self.scaler.scale(loss).backward()
            total += loss.detach()
        if recipe.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), recipe.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.average.update(number)
        return total

    def loss(
        self, x: Tensor, targets: Tensor, teacher: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        recipe = self.recipe
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision)
        with torch.autocast(self.device.type, half, enabled=half is not None):
            # Masks are drawn here, outside of what may be compiled; timm's networks draw their own.
            given = self.forward(x, self.net.draw(len(x)))
            logits, embedding = given if recipe.triplet else (given, None)
            logits = logits.float() if half else logits
            loss = self.task.loss(logits, targets)
            if teacher:
                loss = torch.lerp(loss, F.cross_entropy(logits, teacher(x)), recipe.teacher_share)
            if embedding is not None:
                loss = loss + recipe.triplet * weighted_triplet(embedding, targets)
        return loss

    def check(self, losses: list[Tensor], epoch: int) -> None:
        """Stop where a loss is not finite, before it is saved. `losses` are those of `epoch` so far."""
        recipe, values = self.recipe, torch.stack(losses).tolist()
        bad = next((step for step, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is not None:
            lr = lr_at(epoch + (bad + 0.5) / self.per_epoch, recipe)
            raise FloatingPointError(
                f"the loss became {values[bad]} in step {bad + 1} of epoch {epoch + 1}, at a learning rate of "
                f"{lr:.3g}: lower recipe.lr ({recipe.lr:g}), warm up for longer than recipe.warmup_epochs "
                f"({recipe.warmup_epochs:g}) or set recipe.clip_norm"
            )

    def state(self, epochs: int, index: int, losses: list[Tensor]) -> dict[str, Any]:
        """After `epochs` whole ones and `index` batches of the next."""
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
            "saves": self.net.saved_tensor_choices(),
        }

    def resume(self, state: dict[str, Any]) -> tuple[int, int, list[Tensor]]:
        self.net.load_state_dict(state["net"])
        self.average.net.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.saved_tensor_choices = state["saves"]
        return state["epochs"], state["index"], list(state["losses"].to(self.device))


class WithEmbedding(nn.Module):
    """Logits and what the classifier saw, in one forward pass, for losses on both."""

    def __init__(self, net: Backbone):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, masks: Masks | None) -> tuple[Tensor, Tensor]:
        return self.net.logits_and_embedding(x, masks)


@contextmanager
def numerics(tf32: bool, deterministic: bool) -> Iterator[None]:
    """TF32 only where it is asked for, though PyTorch would use it in convolutions; reproducible where that is."""
    cudnn, before = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic or before)
    try:
        with cudnn.flags(
            True,
            cudnn.benchmark and not deterministic,
            deterministic=deterministic,
            allow_tf32=tf32,
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


@torch.inference_mode()
def evaluate(
    net: nn.Module, task: Task, batches: Batches, context: DistributedContext = SINGLE_PROCESS
) -> dict[str, float]:
    """Score `net` on all of `batches`, each image once. `images` in the answer counts those that could be read.

    With several processes in `context`, each has its share of the images, and all get the score of the whole.
    """
    net.eval()
    outputs, targets = [], []
    with numerics(tf32=False, deterministic=False):
        for x, y, _ in batches.epoch(0):
            outputs.append(net(x).float().cpu())
            targets.append(y.cpu())
    shares = context.gather((outputs, targets))
    outputs, targets = ([each for share in shares for each in share[part]] for part in (0, 1))
    if not targets:
        raise ValueError("none of the images to score on can be read: give others")
    return {**task.score(torch.cat(outputs), torch.cat(targets)), "images": sum(map(len, targets))}
