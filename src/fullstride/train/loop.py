"""How does a network learn? `fit` yields epochs; `evaluate` judges."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullstride.tasks.task import Task
from fullstride.train.optimize import Average, build_optimizer, lr_at
from fullstride.train.recipes import Recipe


class Batches(Protocol):
    """Batches of (images, targets, indices), the same ones whenever the same epoch is asked for."""

    def __len__(self) -> int: ...

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]: ...


@dataclass(frozen=True)
class Epoch:
    """What one pass over the training images brought."""

    number: int  # from 0
    loss: float  # mean over its steps
    lr: float  # of its last step
    images_per_s: float
    data_share: float  # of the time, spent waiting for images
    average: nn.Module  # the averaged network, in evaluation mode; the one to judge and to keep
    state: dict[str, Any]  # what `fit` needs to go on after this epoch: tensors and numbers only


def fit(
    net: nn.Module, task: Task, batches: Batches, recipe: Recipe, resume: dict[str, Any] | None = None
) -> Iterator[Epoch]:
    """Train `net` in place. Yields after every epoch: whoever iterates prints, evaluates, saves, stops.

    `resume` is the `state` of the last epoch that was seen; what follows is then the same, bit for bit
    where the device computes reproducibly, as if there had been no stop.
    """
    per_epoch = len(batches)
    optimizer = build_optimizer(net, recipe)
    average = Average(net, recipe.ema_decay)
    first = 0
    if resume:
        net.load_state_dict(resume["net"])
        average.net.load_state_dict(resume["average"])
        optimizer.load_state_dict(resume["optimizer"])
        first = resume["epoch"] + 1

    for number in range(first, recipe.epochs):
        net.train()
        losses, images, waited, lr = [], 0, 0.0, 0.0
        start = mark = time.perf_counter()
        for index, (x, y, _) in enumerate(batches.epoch(number)):
            waited += time.perf_counter() - mark
            step = number * per_epoch + index
            lr = lr_at((step + 0.5) / per_epoch, recipe)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = task.loss(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update(step)
            losses.append(loss.detach())  # stays on the device: reading it here would stall a GPU
            images += len(x)
            mark = time.perf_counter()
        mean = torch.stack(losses).mean().item()
        took = time.perf_counter() - start
        if not math.isfinite(mean):
            raise FloatingPointError(
                f"the loss became {mean} in epoch {number + 1} at a learning rate of {lr:.3g}: "
                f"lower recipe.lr ({recipe.lr:g}) or raise recipe.warmup_epochs ({recipe.warmup_epochs:g})"
            )
        state = {
            "epoch": number,
            "net": net.state_dict(),
            "average": average.net.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        yield Epoch(number, mean, lr, images / took, waited / took, average.net, state)


@torch.inference_mode()
def evaluate(net: nn.Module, task: Task, batches: Batches) -> dict[str, float]:
    """Score `net` on all of `batches`, each image once. `images` in the answer counts those that could be read."""
    net.eval()
    outputs, targets = [], []
    for x, y, _ in batches.epoch(0):
        outputs.append(net(x).float().cpu())
        targets.append(y.cpu())
    return {**task.score(torch.cat(outputs), torch.cat(targets)), "images": sum(map(len, targets))}
