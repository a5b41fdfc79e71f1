"""How do weights move? Parameter groups, the learning rate of every step, and the average of the weights."""

import copy
import math

import torch
from torch import nn

from fullstride.train.recipes import Recipe


def build_optimizer(net: nn.Module, recipe: Recipe) -> torch.optim.SGD:
    """SGD with Nesterov momentum. Biases and batch norms, all vectors, do not decay."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.momentum > 0)


def lr_at(epoch: float, recipe: Recipe) -> float:
    """Linear warm-up, then half a cosine down to zero. `epoch` counts fractions, from 0."""
    if epoch < recipe.warmup_epochs:
        return recipe.lr * epoch / recipe.warmup_epochs
    done = (epoch - recipe.warmup_epochs) / (recipe.epochs - recipe.warmup_epochs)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * done))


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
