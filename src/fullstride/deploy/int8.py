"""Which layers may be int8? Each is tried alone, the worst are released, and if that is not enough all are trained."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from fullstride.data.dataset import DataSet
from fullstride.data.loader import Batches
from fullstride.nets.backbone import Backbone
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify
from fullstride.train import loop, run
from fullstride.train.distributed import SINGLE_PROCESS
from fullstride.train.recipe import Recipe
from fullstride.train.recipes import FINETUNE

BATCH = 32  # images at once
TRIED = 32  # images whose logits are compared for each layer

# For weights that are good already, and without batch norms to keep them in bounds: small steps, short gradients,
# pictures nearly as they are when it counts. Ours.
GENTLE = replace(
    FINETUNE,
    epochs=2,
    lr=3e-4,
    clip_norm=1.0,
    weight_decay=0.0,
    warmup_epochs=0,
    ema_decay=0.0,
    teacher_share=1.0,
    scale=(0.7, 1.0),
)


@dataclass(frozen=True)
class Range:
    """The least and the largest value that a layer was given; zero is always among them, so that it stays exact."""

    low: float = 0.0
    high: float = 0.0

    def including(self, x: Tensor) -> "Range":
        low, high = x.aminmax()
        return Range(min(self.low, low.item()), max(self.high, high.item()))


def rounded(x: Tensor, seen: Range) -> Tensor:
    """What uint8 keeps of a map: 256 even steps over the range that was seen. Gradients pass where it was not cut."""
    scale = max(seen.high - seen.low, 1e-12) / 255
    return torch.fake_quantize_per_tensor_affine(x, scale, round(-seen.low / scale), 0, 255)


class RoundedWeight(nn.Module):
    """What int8 keeps of a weight (C_out, ...): 255 even steps around zero for each output channel."""

    def forward(self, weight: Tensor) -> Tensor:
        scale = weight.detach().abs().flatten(1).amax(1).clamp(min=1e-12) / 127
        zero = torch.zeros_like(scale, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -127, 127)


def layers(net: nn.Module) -> dict[str, nn.Module]:
    """The layers that int8 makes faster, by path: convolutions and linear ones."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    return {path: module for path, module in net.named_modules() if isinstance(module, kinds)}


def ranges(net: nn.Module, images: Tensor) -> dict[str, Range]:
    """What each of `layers(net)` is given when `images` (N, C, H, W) pass; without those that are not called."""
    seen: dict[str, Range] = {}

    def look(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[path] = seen.get(path, Range()).including(inputs[0])

        return hook

    hooks = [layer.register_forward_pre_hook(look(path)) for path, layer in layers(net).items()]
    try:
        logits(net, images)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.no_grad()
def logits(net: nn.Module, images: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """(N, K), with some of the weights replaced."""
    return torch.cat(
        [functional_call(net, dict(weights or {}), (part,)) for part in images.split(BATCH)]
    )


def rounded_logits(net: nn.Module, images: Tensor, seen: Mapping[str, Range]) -> Tensor:
    """(N, K), where these layers compute in int8: their weights and what they are given are rounded."""
    weights = {
        f"{path}.weight": net.get_submodule(path).get_parameter("weight").detach() for path in seen
    }
    with rounding(net, seen):
        return logits(
            net, images, {name: RoundedWeight()(weight) for name, weight in weights.items()}
        )


def int8_loss(net: nn.Module, images: Tensor, expected: Tensor) -> float:
    """How far `net` with all layers in int8 is from the probabilities (N, K): Kullback-Leibler divergence."""
    given = rounded_logits(net, images, ranges(net, images))
    return F.kl_div(given.log_softmax(1), expected, reduction="batchmean").item()


@contextmanager
def rounding(net: nn.Module, seen: Mapping[str, Range]) -> Iterator[None]:
    """Round what these layers are given."""

    def hook(path: str) -> Callable[..., Tensor]:
        return lambda _, inputs: rounded(inputs[0], seen[path])

    hooks = [net.get_submodule(path).register_forward_pre_hook(hook(path)) for path in seen]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def sensitivity(net: nn.Module, images: Tensor) -> list[tuple[str, float]]:
    """How far int8 in one layer alone moves the logits of `images` (N, C, H, W), the most sensitive layer first.

    The mean squared difference as a share of the logits' variance. `net` is in evaluation mode, with its batch norms
    folded, and stays as it is. No engine is needed. Ranges are those of all images; up to `TRIED` of them, evenly
    taken, pass once more for each layer.
    """
    seen = ranges(net, images)
    images = images[:: math.ceil(len(images) / TRIED)]
    expected = logits(net, images)
    moved = {path: rounded_logits(net, images, {path: seen[path]}) - expected for path in seen}
    found = {path: (by.square().mean() / expected.var()).item() for path, by in moved.items()}
    return sorted(found.items(), key=lambda each: -each[1])


def release(
    drop_with: Callable[[Sequence[str]], float], max_drop: float, order: Sequence[str]
) -> list[tuple[int, float]]:
    """Put one more layer of `order` back into float until no more than `max_drop` points are lost.

    `drop_with` says how many are lost with these layers in float. Returns how many were tried and what each lost.
    """
    tried: list[tuple[int, float]] = []
    for count in range(1, len(order) + 1):
        tried.append((count, drop_with(order[:count])))
        if tried[-1][1] <= max_drop:
            break
    return tried


def finetuned(
    net: nn.Module,
    pre: Preprocessing,
    data: DataSet,
    images: Tensor,
    *,
    recipe: Recipe = GENTLE,
    device: torch.device | str = "cpu",
    workers: int = 0,
    watch: Callable[[Batches], loop.Batches] = lambda batches: batches,
) -> nn.Module:
    """A copy of `net` on the CPU whose weights bear int8 better, or one as it is where that does not come of it.

    `net` is a `Backbone` with its batch norms folded. With all layers rounded it learns to say what
    it says without, from the training pictures of `data` but not from their classes, so that it stays the same
    network. Gradients pass the rounding as if it were not there (arXiv:1712.05877). Ranges are those of `images`
    (N, C, H, W). `watch` may wrap the batches, to show progress.
    """
    images = images.to(device)
    teacher, student = (copy.deepcopy(net).to(device).eval() for _ in range(2))
    seen, expected = ranges(teacher, images), logits(teacher, images).softmax(1)
    batches = run.training_batches(data, pre, recipe, device, workers, SINGLE_PROCESS)

    @torch.no_grad()
    def answers(x: Tensor, epoch: int, indices: Tensor) -> Tensor:
        return teacher(x).softmax(1)

    for path in seen:
        parametrize.register_parametrization(student.get_submodule(path), "weight", RoundedWeight())
    with rounding(student, seen):
        for _ in loop.train_epochs(
            cast(Backbone, student),
            Classify(),
            watch(batches),
            recipe,
            teacher=answers,
        ):
            pass
    for path in seen:
        parametrize.remove_parametrizations(
            student.get_submodule(path), "weight", leave_parametrized=False
        )
    return min(teacher, student.eval(), key=lambda each: int8_loss(each, images, expected)).cpu()
