"""Builds a recipe's optimizer, sets its rates by a schedule, and freezes layers."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.nets.backbone import Backbone
from fullstride.train.recipes.recipe import Recipe

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def build_optimizer(net: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Build the recipe's optimizer, without parameters that never train.

    It has two groups of parameters, with and without weight decay; or two per layer with its own
    rate, whose factor is "lr_scale".
    """
    groups = parameter_groups(net, recipe)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr)
    if recipe.optimizer == "muon":
        return Muon(groups, recipe)
    if recipe.optimizer == "lamb":
        from timm.optim.lamb import Lamb  # timm takes a second to import

        # arXiv:1904.00962, with timm's defaults: gradients are clipped to a global norm of 1
        return Lamb(groups, lr=recipe.lr)
    if recipe.optimizer == "rmsprop":
        from timm.optim.rmsprop_tf import RMSpropTF

        # TensorFlow's form, with the constants of EfficientNet (arXiv:1905.11946) and its TPU code
        return RMSpropTF(groups, lr=recipe.lr, alpha=0.9, eps=1e-3, momentum=recipe.momentum)
    if recipe.decoupled_weight_decay:
        from timm.optim.sgdw import SGDW as SGD
    else:
        from torch.optim import SGD
    return SGD(
        groups,
        lr=recipe.lr,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov and recipe.momentum > 0,
    )


class Muon(torch.optim.AdamW):
    """Orthogonalised momentum for weights of layers, AdamW for all other parameters.

    Each step has the direction of the nearest matrix with orthonormal rows or columns to the
    momentum of a weight, whose elements have a root mean square of 0.2, as have AdamW's: so both
    share the rate and the decay. Sources: https://kellerjordan.github.io/posts/muon and, for the
    scale, arXiv:2502.16982. A convolution's weight (out, in, H, W) is the matrix (out, in H W).
    """

    def __init__(self, groups: list[dict[str, Any]], recipe: Recipe):
        super().__init__(
            [{**group, "momentum": recipe.momentum} for group in groups],
            lr=recipe.lr,
            betas=(0.9, 0.95),
        )
        self.nesterov = recipe.nesterov

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and is_matrix(weight):
                    self.step_matrix(weight, group)
                    weight.grad = None  # nothing is left for AdamW
        super().step()

    def step_matrix(self, weight: Tensor, group: dict[str, Any]) -> None:
        from timm.optim.muon import zeropower_via_newtonschulz as orthogonal

        gradient, momentum, rate = weight.grad, group["momentum"], group["lr"]
        assert gradient is not None
        state = self.state[weight]
        if not state:
            # AdamW reads the step of each parameter
            state |= {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(weight)}
        state["step"] += 1
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum) if self.nesterov else buffer
        matrix = direction.flatten(1)
        # CPUs without bfloat16 are up to 18 times slower with it than with fp32 (docs/log.md)
        dtype = torch.bfloat16 if weight.is_cuda else weight.dtype
        matrix = orthogonal(matrix, len(QUINTIC), QUINTIC, dtype=dtype).to(weight.dtype)
        weight.mul_(1 - rate * group["weight_decay"])
        weight.add_(matrix.view(weight.shape), alpha=-0.2 * rate * math.sqrt(max(matrix.shape)))


# The polynomials of Newton and Schulz's iterations.
# Source: https://leloykun.github.io/ponder/muon-opt-coeffs
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def is_matrix(weight: Tensor) -> bool:
    """Whether Muon orthogonalises a parameter: no bias, gain or depthwise convolution."""
    return weight.ndim > 1 and min(weight.shape[:2]) > 1


def parameter_groups(net: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Group the parameters for `build_optimizer`."""
    frozen, scales = frozen_names(net, recipe), lr_scales(net, recipe)
    # both groups in this order, even if one is empty, as in checkpoints
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(1.0, True): [], (1.0, False): []}
    for path, module in net.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if full not in frozen:
                key = scales.get(full, 1.0), has_weight_decay(module, name, recipe)
                groups.setdefault(key, []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": recipe.weight_decay if decays else 0.0,
            **({"lr_scale": scale} if scales else {}),
        }
        for (scale, decays), parameters in groups.items()
    ]


def lr_scales(net: nn.Module, recipe: Recipe) -> dict[str, float]:
    """Each parameter's factor of the rate: `layer_decay` to the power of the layers above it.

    Empty if all are 1. Source: BEiT, arXiv:2106.08254.
    """
    if recipe.layer_decay == recipe.head_lr_scale == 1:
        return {}
    assert isinstance(net, Backbone)
    numbers = net.layer_numbers()
    last = max(numbers.values())
    return {
        name: recipe.head_lr_scale if number == last else recipe.layer_decay ** (last - number)
        for name, number in numbers.items()
    }


def frozen_names(net: nn.Module, recipe: Recipe) -> set[str]:
    """The names of parameters that never train, by `freeze_stages` and `frozen`.

    Raises ValueError for too many stages, a path without parameters, and if nothing would train.
    """
    frozen = frozen_by_path(net, recipe.frozen) | frozen_by_stage(net, recipe)
    if frozen and frozen.issuperset(name for name, _ in net.named_parameters()):
        raise ValueError(
            f"recipe.frozen {' '.join(recipe.frozen)} leaves nothing to train: leave out what "
            "should learn"
        )
    return frozen


def frozen_by_path(net: nn.Module, paths: Sequence[str]) -> set[str]:
    """The names of parameters at `paths`, of modules or parameters."""
    names = [name for name, _ in net.named_parameters()]
    frozen = set[str]()
    for path in paths:
        below = {name for name in names if name == path or name.startswith(f"{path}.")}
        if not below:
            parts = dict.fromkeys(".".join(name.split(".")[:2]) for name in names)
            raise ValueError(
                f"recipe.frozen {path!r} is no layer of the network: use paths that begin with "
                f"{', '.join(parts)}"
            )
        frozen |= below
    return frozen


def frozen_by_stage(net: nn.Module, recipe: Recipe) -> set[str]:
    """The names of parameters in the first `freeze_stages` stages."""
    if not recipe.freeze_stages:
        return set()
    assert isinstance(net, Backbone)
    numbers = net.layer_numbers(coarse=True)
    stages = max(numbers.values()) - 1
    wanted = stages if recipe.freeze_stages == -1 else recipe.freeze_stages
    if wanted > stages:
        raise ValueError(
            f"recipe.freeze_stages {wanted}: the network has {stages}; use at most that, or -1 "
            "for all layers but the classifier"
        )
    return {name for name, number in numbers.items() if number <= wanted}


def has_weight_decay(module: nn.Module, name: str, recipe: Recipe) -> bool:
    """Whether the parameter `name` of `module` decays, by `recipe.decay_on`."""
    if recipe.decay_on == "all":
        return True
    if recipe.decay_on == "all_but_norms":
        return not isinstance(module, NORMS)
    return name == "weight" and not isinstance(module, NORMS)


class Freezing:
    """Turns off gradients of parameters that do not train, and updates of their batch norms.

    Which parameters train depends only on the step, so a resumed run is unchanged. A frozen batch
    norm uses its statistics and does not update them. With the recipe's `frozen_statistics` this
    applies to all batch norms, whose gains and biases still train.
    """

    def __init__(self, net: Backbone, recipe: Recipe, steps_per_epoch: int):
        self.net, self.until = net, round(recipe.freeze_epochs * steps_per_epoch)
        never = frozen_names(net, recipe)
        at_first = never
        if self.until:
            numbers = net.layer_numbers(coarse=True)
            last = max(numbers.values())
            at_first = never | {name for name, number in numbers.items() if number < last}
        names = {parameter: name for name, parameter in net.named_parameters()}
        if at_first.issuperset(names.values()):
            raise ValueError(
                "recipe.freeze_epochs trains the classifier alone, which recipe.frozen has: leave "
                "out one of them"
            )
        self.own = [each for each, name in names.items() if name in at_first]
        self.frozen = {True: at_first, False: never}
        self.norms = [
            (module, {names[each] for each in module.parameters()})
            for module in net.modules()
            if isinstance(module, NORMS)
        ]
        self.names, self.is_start = names, None
        self.keeps_statistics = recipe.frozen_statistics

    def apply(self, step: int) -> bool:
        """Freeze for `step`, counted from 0; return whether anything changed since the last call.

        Call it before every step, because `net.train()` resets the batch norms.
        """
        is_start = step < self.until
        frozen = self.frozen[is_start]
        changes = is_start != self.is_start and bool(self.own)
        if changes:
            for parameter in self.own:
                parameter.requires_grad_(self.names[parameter] not in frozen)
        for norm, names in self.norms if self.own or self.keeps_statistics else ():
            norm.train(self.net.training and not (names & frozen or self.keeps_statistics))
        self.is_start = is_start
        return changes


@dataclass(frozen=True)
class Course:
    """Where in the recipe's schedule each step of a training is.

    Step N is at N of the schedule, until a turn: from its step on, the rest of the schedule is
    spread evenly over the steps before its end. Images and their sizes follow the schedule too.
    """

    whole: int  # steps of the schedule
    turns: tuple[tuple[int, int], ...] = ()  # (step, end), see `check`

    @property
    def end(self) -> int:
        """The number of steps of the training."""
        return self.turns[-1][1] if self.turns else self.whole

    @property
    def stride(self) -> float:
        """Steps of the schedule per step of training, after the last turn."""
        return self._last(self.turns)[2]

    def at(self, step: float) -> float:
        place, begin, stride = self._last([each for each in self.turns if each[0] <= step])
        return place + (step - begin) * stride

    def turned(self, step: int, end: int) -> "Course":
        return replace(self, turns=(*self.turns, (step, end)))

    def check(self, where: str, done: int) -> None:
        """Raise ValueError for turns that no training makes in its first `done` steps."""
        earlier, last = 0, self.whole
        for step, end in self.turns:
            if not earlier < step <= done or not step < min(last, end) or end > self.whole:
                raise ValueError(f"{where}: turns: step {step} to {end}, after {done} steps")
            earlier, last = step, end

    def _last(self, turns: Sequence[tuple[int, int]]) -> tuple[float, int, float]:
        """Where the last of `turns` is in the schedule, its step, and the stride from there."""
        place, begin, stride = 0.0, 0, 1.0
        for step, end in turns:
            place, begin = place + (step - begin) * stride, step
            stride = (self.whole - place) / (end - step)
        return place, begin, stride


# Learning rate and momentum over the course of training.
#
# 1-cycle (arXiv:1803.09820) with the defaults of PyTorch's OneCycleLR; TResNet states none.
RISE = 0.3  # fraction of training in which the learning rate rises
START, END = 1 / 25, 1 / 25e4  # first and last learning rate / the highest
# decrease of the momentum while the learning rate rises; OneCycleLR: from 0.95 to 0.85
MOMENTUM_RANGE = 0.1

# Multipliers of the learning rate: 0.1 at each step as for ResNets (arXiv:1512.03385), and
# EfficientNet's 0.97 every 2.4 epochs (arXiv:1905.11946).
FACTORS = {"steps": 0.1, "exponential": 0.97}


def lr_at(epoch: float, recipe: Recipe) -> float:
    """The learning rate at a time of training, in epochs with fractions, from 0."""
    if recipe.schedule == "one_cycle":
        return recipe.lr * one_cycle(epoch / recipe.epochs, START, 1.0, END)
    if epoch < recipe.warmup_epochs:
        return recipe.lr * epoch / recipe.warmup_epochs
    if recipe.schedule in FACTORS:
        factor = recipe.factor or FACTORS[recipe.schedule]
        if recipe.schedule == "steps":
            return recipe.lr * factor ** bisect_right(recipe.milestones, epoch / recipe.epochs)
        return recipe.lr * factor ** (epoch // recipe.factor_epochs)
    progress = (epoch - recipe.warmup_epochs) / (recipe.epochs - recipe.warmup_epochs)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * progress))


def momentum_at(epoch: float, recipe: Recipe) -> float:
    """The momentum at a time of training; with 1-cycle it is lowest at the peak learning rate."""
    if recipe.schedule != "one_cycle":
        return recipe.momentum
    low = max(recipe.momentum - MOMENTUM_RANGE, 0.0)
    return one_cycle(epoch / recipe.epochs, recipe.momentum, low, recipe.momentum)


def one_cycle(progress: float, first: float, middle: float, last: float) -> float:
    """Half a cosine from `first` to `middle` until `RISE`, then half a cosine to `last`."""
    if progress < RISE:
        a, b, share = first, middle, progress / RISE
    else:
        a, b, share = middle, last, (progress - RISE) / (1 - RISE)
    return b + (a - b) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def set_rates(optimizer: torch.optim.Optimizer, epoch: float, recipe: Recipe) -> None:
    """Set the learning rate and momentum of all parameters for a time in epochs."""
    for group in optimizer.param_groups:
        group["lr"] = lr_at(epoch, recipe) * group.get("lr_scale", 1.0)
        if "momentum" in group:
            group["momentum"] = momentum_at(epoch, recipe)
