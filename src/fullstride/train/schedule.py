"""The learning rate and the momentum of a recipe at every time of a training."""

import math
from bisect import bisect_right

import torch

from fullstride.train.recipes.recipe import Recipe

# 1-cycle (arXiv:1803.09820) with the defaults of PyTorch's OneCycleLR; TResNet does not state its.
RISE = 0.3  # fraction of training in which the learning rate rises
START, END = 1 / 25, 1 / 25e4  # first and last learning rate / the highest
# how far the momentum falls while the learning rate rises; OneCycleLR: from 0.95 to 0.85
MOMENTUM_RANGE = 0.1

# Multipliers of the learning rate: a tenth at each step as for ResNets (arXiv:1512.03385), and
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
    """Give all parameters of `optimizer` the learning rate and the momentum of a time."""
    for group in optimizer.param_groups:
        group["lr"] = lr_at(epoch, recipe) * group.get("lr_scale", 1.0)
        if "momentum" in group:
            group["momentum"] = momentum_at(epoch, recipe)
