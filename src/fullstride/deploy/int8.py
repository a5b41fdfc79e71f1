"""Prepares networks for int8: sensitivity of each layer, fallback to float, fine-tuning."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from fullstride.data.dataset import DataSet
from fullstride.data.loader import Batches
from fullstride.deploy.fold_batch_norm import tensors
from fullstride.nets.backbone import Backbone
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import find_task
from fullstride.tasks.task import Task
from fullstride.train import loop
from fullstride.train.batches import BatchOptions, training_batches
from fullstride.train.recipes.named import FINETUNE
from fullstride.train.recipes.recipe import Recipe

BATCH = 32  # images per forward pass
SENSITIVITY_IMAGES = 32  # images to compare logits on for each layer

# For trained weights, in a network without batch norms to bound its activations: a low learning
# rate, clipped gradients, little augmentation. The values are our own.
INT8_FINETUNE = replace(
    FINETUNE,
    epochs=2,
    lr=3e-4,
    clip_norm=1.0,
    weight_decay=0.0,
    warmup_epochs=0,
    ema_decay=0.0,
    teacher_share=1.0,
    scale=(0.7, 1.0),
    precision="fp32",  # int8 is compared with exact outputs
)


@dataclass(frozen=True)
class Range:
    """The smallest and largest input of a layer, with zero, which must be represented exactly."""

    low: float = 0.0
    high: float = 0.0

    def including(self, x: Tensor) -> "Range":
        low, high = x.aminmax()
        return Range(min(self.low, low.item()), max(self.high, high.item()))


def fake_quantize(x: Tensor, limits: Range) -> Tensor:
    """Round `x` to uint8, 256 equal steps over `limits`. Gradients pass for values in range."""
    scale = max(limits.high - limits.low, 1e-12) / 255
    return torch.fake_quantize_per_tensor_affine(x, scale, round(-limits.low / scale), 0, 255)


class Int8Weight(nn.Module):
    """Rounds a weight (C_out, ...) to int8, 255 equal steps around zero per output channel."""

    def forward(self, weight: Tensor) -> Tensor:
        scale = weight.detach().abs().flatten(1).amax(1).clamp(min=1e-12) / 127
        zero = torch.zeros_like(scale, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -127, 127)


def quantizable_layers(net: nn.Module) -> dict[str, nn.Module]:
    """The layers that are faster in int8, by path: convolutions and linear layers."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    return {path: module for path, module in net.named_modules() if isinstance(module, kinds)}


def input_ranges(net: nn.Module, images: Tensor) -> dict[str, Range]:
    """The input range of each called quantizable layer for `images` (N, C, H, W)."""
    limits: dict[str, Range] = {}

    def observe(path: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        limits[path] = limits.get(path, Range()).including(inputs[0])

    with ExitStack() as hooks:
        for path, layer in quantizable_layers(net).items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(observe, path)))
        outputs(net, images)
    return limits


@torch.no_grad()
def outputs(
    net: nn.Module, images: Tensor, weights: Mapping[str, Tensor] | None = None
) -> list[Tensor]:
    """Each output of `net` with parameters replaced by `weights`; logits (N, K) are one output."""
    parts = [functional_call(net, dict(weights or {}), (part,)) for part in images.split(BATCH)]
    return [torch.cat(each) for each in zip(*map(tensors, parts), strict=True)]


def int8_outputs(net: nn.Module, images: Tensor, limits: Mapping[str, Range]) -> list[Tensor]:
    """`outputs` with weights and inputs of the layers in `limits` rounded to int8."""
    weights = {path: net.get_submodule(path).get_parameter("weight").detach() for path in limits}
    rounded = {f"{path}.weight": Int8Weight()(weight) for path, weight in weights.items()}
    with int8_inputs(net, limits):
        return outputs(net, images, rounded)


@contextmanager
def before_decoding(net: nn.Module) -> Iterator[None]:
    """Let a task head in evaluation return its loss's inputs, which change smoothly with layers.

    Boxes do not: suppression leaves out some, and sorts the rest.
    """
    head = getattr(net, "task_head", None) or nn.Identity()
    head.training = True  # only of the head; its layers stay in evaluation
    try:
        yield
    finally:
        head.training = False


def int8_loss(net: nn.Module, images: Tensor, expected: Tensor) -> float:
    """Kullback-Leibler divergence of all-int8 `net` from the probabilities `expected` (N, K)."""
    (rows,) = int8_outputs(net, images, input_ranges(net, images))
    return F.kl_div(rows.log_softmax(1), expected, reduction="batchmean").item()


@contextmanager
def int8_inputs(net: nn.Module, limits: Mapping[str, Range]) -> Iterator[None]:
    """Round the inputs of the layers in `limits` within the block."""

    def hook(path: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return fake_quantize(inputs[0], limits[path])

    with ExitStack() as hooks:
        for path in limits:
            layer = net.get_submodule(path)
            hooks.enter_context(layer.register_forward_pre_hook(partial(hook, path)))
        yield


def sensitivity(net: nn.Module, images: Tensor) -> list[tuple[str, float]]:
    """The change of the logits when a single layer computes in int8, sorted by decreasing change.

    It is the mean squared difference divided by the variance of the logits for `images`
    (N, C, H, W), summed over the outputs of a head with several, as for boxes. `net` is in
    evaluation mode with batch norms folded and is not modified; no runtime is needed. All images
    give the ranges, and up to `SENSITIVITY_IMAGES`, evenly spaced, are run again for each layer.
    """
    with before_decoding(net):
        limits = input_ranges(net, images)
        images = images[:: math.ceil(len(images) / SENSITIVITY_IMAGES)]
        expected = outputs(net, images)
        scores = dict[str, float]()
        for path in limits:
            pairs = zip(int8_outputs(net, images, {path: limits[path]}), expected, strict=True)
            scores[path] = sum(((a - b).square().mean() / b.var()).item() for a, b in pairs)
    return sorted(scores.items(), key=lambda item: -item[1])


def fall_back_to_float(
    drop_with: Callable[[Sequence[str]], float], max_drop: float, layers: Sequence[str]
) -> list[tuple[int, float]]:
    """Put 1, 2, 4, ... of `layers` back into float until at most `max_drop` points are lost.

    `drop_with` returns the points lost with the given layers in float. Returns each attempt's
    number of layers and points lost.
    """
    tried: list[tuple[int, float]] = []
    while (last := len(tried) and tried[-1][0]) < len(layers):
        count = min(max(1, 2 * last), len(layers))
        tried.append((count, drop_with(layers[:count])))
        if tried[-1][1] <= max_drop:
            break
    return tried


def finetune_int8(
    net: nn.Module,
    pre: Preprocessing,
    data: DataSet,
    images: Tensor,
    *,
    task: Task | None = None,
    recipe: Recipe = INT8_FINETUNE,
    watch: Callable[[Batches], loop.BatchSource] = lambda batches: batches,
) -> nn.Module:
    """Copy `net` to the CPU and train it to lose less in int8; an exact copy if training harms.

    `net` is a `Backbone` with batch norms folded. With all layers rounded, it is distilled from its
    float form on the training images of `data`, without labels, so that it stays the same function.
    Gradients pass the rounding unchanged (straight-through, arXiv:1712.05877). `images`
    (N, C, H, W) give the ranges. `watch` may wrap the batches, to show progress.
    """
    task = task or find_task()
    if not task.single_label:
        raise ValueError(
            f"networks of the task {task.name} cannot be trained for int8: leave it out"
        )
    teacher, student = (copy.deepcopy(net).cpu().eval() for _ in range(2))
    limits, (rows,) = input_ranges(teacher, images), outputs(teacher, images)
    expected = rows.softmax(1)
    batches = training_batches(data, task, BatchOptions(pre), recipe)

    @torch.no_grad()
    def probabilities(x: Tensor, epoch: int, indices: Tensor) -> Tensor:
        return teacher(x).softmax(1)

    for path in limits:
        parametrize.register_parametrization(student.get_submodule(path), "weight", Int8Weight())
    with int8_inputs(student, limits):
        for _ in loop.train_epochs(
            cast(Backbone, student), task, watch(batches), recipe, teacher=probabilities
        ):
            pass
    for path in limits:
        parametrize.remove_parametrizations(
            student.get_submodule(path), "weight", leave_parametrized=False
        )
    return min(teacher, student.eval(), key=lambda each: int8_loss(each, images, expected))
