"""How do weights move? Optimizers and what decays, the learning rate of every step, the average of the weights."""

import copy
import math
from bisect import bisect_right
from typing import Any

import timm.optim
import torch
from torch import nn

from fullstride.train.recipe import Recipe


def build_optimizer(net: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over two groups of parameters: those that decay, then those that do not."""
    decayed, free = [], []
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            (decayed if decays(module, name, recipe) else free).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr)
    if recipe.optimizer == "rmsprop":
        # TensorFlow's form, with the constants of EfficientNet (arXiv:1905.11946) and its TPU code
        rmsprop = timm.optim.RMSpropTF(
            groups, lr=recipe.lr, alpha=0.9, eps=1e-3, momentum=recipe.momentum
        )
        rmsprop.register_load_state_dict_pre_hook(with_current_rmsprop_names)
        return rmsprop
    sgd = timm.optim.SGDW if recipe.decoupled_weight_decay else torch.optim.SGD
    return sgd(
        groups,
        lr=recipe.lr,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov and recipe.momentum > 0,
    )


NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def decays(module: nn.Module, name: str, recipe: Recipe) -> bool:
    if recipe.decay_on == "all":
        return True
    if recipe.decay_on == "all_but_norms":
        return not isinstance(module, NORMS)
    return name == "weight" and not isinstance(module, NORMS)


def with_current_rmsprop_names(optimizer: torch.optim.Optimizer, state_dict: Any) -> Any:
    """Hook for `load_state_dict`: the state of RMSProp in checkpoints of version 0.1, as timm's."""
    if all("decay" not in group for group in state_dict["param_groups"]):
        return None
    current = optimizer.param_groups
    groups = [
        {**now, "params": old["params"], "lr": old["lr"], "momentum": old["momentum"]}
        for old, now in zip(state_dict["param_groups"], current, strict=True)
    ]
    state = {
        index: {
            "step": torch.tensor(0.0),
            "square_avg": old["square"],
            "momentum_buffer": old["velocity"],
        }
        for index, old in state_dict["state"].items()
    }
    return {"state": state, "param_groups": groups}


# 1-cycle, arXiv:1803.09820, with the numbers of PyTorch's OneCycleLR; TResNet does not print its own.
RISE, START, END = (
    0.3,
    1 / 25,
    1 / 25e4,
)  # share of training that rises; first and last lr / highest lr
MOMENTUM_SPAN = 0.1  # momentum falls by this while the learning rate is high


def lr_at(epoch: float, recipe: Recipe) -> float:
    """The learning rate at a moment of training; `epoch` counts fractions, from 0."""
    if recipe.schedule == "one_cycle":
        return recipe.lr * one_cycle(epoch / recipe.epochs, START, 1.0, END)
    if epoch < recipe.warmup_epochs:
        return recipe.lr * epoch / recipe.warmup_epochs
    if recipe.schedule == "steps":
        return recipe.lr * recipe.factor ** bisect_right(recipe.milestones, epoch / recipe.epochs)
    if recipe.schedule == "exponential":
        return recipe.lr * recipe.factor ** (epoch // recipe.factor_epochs)
    done = (epoch - recipe.warmup_epochs) / (recipe.epochs - recipe.warmup_epochs)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * done))


def momentum_at(epoch: float, recipe: Recipe) -> float:
    """The momentum at a moment of training: with 1-cycle it is lowest where the learning rate is highest."""
    if recipe.schedule != "one_cycle":
        return recipe.momentum
    low = max(recipe.momentum - MOMENTUM_SPAN, 0.0)
    return one_cycle(epoch / recipe.epochs, recipe.momentum, low, recipe.momentum)


def one_cycle(done: float, first: float, middle: float, last: float) -> float:
    """Half a cosine from `first` to `middle` while training rises, then half a cosine to `last`."""
    a, b, share = (
        (first, middle, done / RISE) if done < RISE else (middle, last, (done - RISE) / (1 - RISE))
    )
    return b + (a - b) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


class Average:
    """Exponential moving average of weights and of batch-norm statistics; counters are copied.

    The decay warms up as min(decay, (1 + step) / (10 + step)), TensorFlow's rule, so that a short run
    forgets its first weights. Without the statistics the average would see activations it does not fit.
    """

    def __init__(self, net: nn.Module, decay: float):
        self.decay = decay
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        pairs = list(zip(self.net.state_dict().values(), net.state_dict().values(), strict=True))
        self.moving = [pair for pair in pairs if pair[0].is_floating_point()]
        self.copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in what the network's weights are after `step`, counted from 0."""
        keep = min(self.decay, (1 + step) / (10 + step)) if self.decay else 0.0
        ours, theirs = [a for a, _ in self.moving], [b for _, b in self.moving]
        torch._foreach_lerp_(ours, theirs, 1 - keep)  # pyright: ignore[reportPrivateImportUsage]  # one launch for all
        for a, b in self.copied:
            a.copy_(b)
