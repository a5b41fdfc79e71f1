"""How sure should a network be? The temperature that its logits are divided by before softmax."""

from math import exp, log
from typing import cast

import torch
from torch import Tensor

LIMITS = (0.05, 20.0)  # of a temperature


def fit_temperature(logits_nk: Tensor, labels_n: Tensor) -> float:
    """The temperature T for which softmax(logits / T) has the lowest cross-entropy (1706.04599).

    The target is a probability of (N + 1) / (N + 2) for the label, and the rest for the other
    classes alike, as in Platt's scaling: without it T would be 0 where all images are classified
    correctly. The derivative by 1 / T only grows, so that its root is the exact minimum; the result
    is within `LIMITS`. Dividing by T keeps the order of the classes.
    """
    from scipy.optimize import brentq  # takes most of a second to import

    n, k = logits_nk.shape
    z = logits_nk.double() - logits_nk.double().amax(1, keepdim=True)
    rest = 1 / (n + 2) if k > 1 else 0.0
    true_n = z.gather(1, labels_n[:, None])[:, 0]
    others_n = (z.sum(1) - true_n) / max(1, k - 1)
    target = torch.lerp(true_n, others_n, rest).mean().item()

    def derivative(log_scale: float) -> float:
        return ((exp(log_scale) * z).softmax(1) * z).sum(1).mean().item() - target

    low, high = (-log(limit) for limit in reversed(LIMITS))
    if derivative(low) >= 0:
        return LIMITS[1]
    if derivative(high) <= 0:
        return LIMITS[0]
    return exp(-cast(float, brentq(derivative, low, high, xtol=1e-12)))
