"""How wrong are the logits of a batch? The losses of classification, as means over its images.

Targets are class indices (N,), or a probability for each class (N, K). With `weights_k`, a weight
for each class, the loss of an image has the weight of its class, and the sum is divided by N. (For
class indices PyTorch divides by the sum of the weights, by which the loss of an image would depend
on the other images of its batch, and so on accumulation and on the number of processes.)
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(
    logits_nk: Tensor, targets: Tensor, *, smoothing: float = 0.0, weights_k: Tensor | None = None
) -> Tensor:
    """Cross-entropy with label smoothing (arXiv:1512.00567)."""
    if weights_k is None:
        return F.cross_entropy(logits_nk, targets, label_smoothing=smoothing)
    total = F.cross_entropy(
        logits_nk, targets, weights_k, reduction="sum", label_smoothing=smoothing
    )
    return total / len(logits_nk)


def focal_loss(
    logits_nk: Tensor,
    targets: Tensor,
    *,
    gamma: float,
    smoothing: float = 0.0,
    weights_k: Tensor | None = None,
) -> Tensor:
    """The sum over classes of -t (1 - p)^gamma log p, with p the softmax and t the target.

    Source: arXiv:1708.02002, there for one binary problem; in this form, over the softmax,
    arXiv:2002.09437. With gamma 0 it is the cross-entropy.
    """
    log_p_nk = logits_nk.log_softmax(1)
    # the bound keeps the gradient finite where p is rounded to 1 and gamma is below 1
    miss_nk = (-log_p_nk.expm1()).clamp(min=torch.finfo(log_p_nk.dtype).tiny)
    losses_nk = -smoothed(targets, logits_nk, smoothing) * miss_nk**gamma * log_p_nk
    return (losses_nk if weights_k is None else losses_nk * weights_k).sum(1).mean()


def binary_cross_entropy(
    logits_nk: Tensor,
    targets: Tensor,
    *,
    threshold: float = 0.0,
    reduction: Literal["sum", "mean"] = "sum",
    smoothing: float = 0.0,
    weights_k: Tensor | None = None,
) -> Tensor:
    """A binary problem for each class, so that mixed images have several.

    Args:
        threshold: Targets above it become 1 and others 0; 0: as they are.
        reduction: Over the classes. The gradients of "sum" are of the size of cross-entropy's.

    Source: arXiv:2110.00476 and timm's `BinaryCrossEntropy`, which takes the mean by default.
    """
    wanted_nk = smoothed(targets, logits_nk, smoothing)
    if threshold:
        wanted_nk = (wanted_nk > threshold).to(logits_nk.dtype)
    losses_nk = F.binary_cross_entropy_with_logits(logits_nk, wanted_nk, reduction="none")
    losses_n = losses_nk.sum(1) if reduction == "sum" else losses_nk.mean(1)
    if weights_k is not None:
        losses_n = losses_n * (weights_k[targets] if targets.ndim == 1 else targets @ weights_k)
    return losses_n.mean()


def smoothed(targets: Tensor, logits_nk: Tensor, smoothing: float) -> Tensor:
    """Probabilities (N, K): the share `smoothing` of each target is spread over all classes."""
    classes = logits_nk.shape[1]
    dense_nk = targets if targets.ndim == 2 else F.one_hot(targets, classes)
    return dense_nk.to(logits_nk.dtype) * (1 - smoothing) + smoothing / classes


def class_weights(counts: Sequence[int], how: Literal["balanced", "sqrt"]) -> tuple[float, ...]:
    """A weight for each class from its number of training images; their mean over images is 1.

    "balanced" is images / (classes * images of the class), as scikit-learn's
    `compute_class_weight`; "sqrt" is proportional to its square root. Classes without images do
    not count, and weigh 0.
    """
    power = {"balanced": -1.0, "sqrt": -0.5}[how]
    raw = [count**power if count else 0.0 for count in counts]
    mean = sum(weight * count for weight, count in zip(raw, counts, strict=True)) / sum(counts)
    return tuple(weight / mean for weight in raw)


@lru_cache(maxsize=8)
def weight_tensor(
    counts: tuple[int, ...],
    how: Literal["balanced", "sqrt"],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """`class_weights` on a device, to which they are copied once."""
    return torch.tensor(class_weights(counts, how), device=device, dtype=dtype)
