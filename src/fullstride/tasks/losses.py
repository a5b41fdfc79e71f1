"""The losses of classification, as means over the images of a batch.

Targets are class indices (N,), or a probability for each class (N, K). `weights_n` multiplies the
loss of each image, and the sum is divided by N. (PyTorch's weights multiply the term of each class
in the loss of an image. With smoothing or soft targets a rare class would then be the best answer
to images of a frequent one. For class indices PyTorch divides by the sum of the weights, so that an
image's loss would depend on the other images of the batch, and thus on accumulation and on the
number of processes.)
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.nets.backbone import Backbone, Masks


def cross_entropy(
    logits_nk: Tensor, targets: Tensor, *, smoothing: float = 0.0, weights_n: Tensor | None = None
) -> Tensor:
    """Cross-entropy with label smoothing (arXiv:1512.00567)."""
    if weights_n is None:
        return F.cross_entropy(logits_nk, targets, label_smoothing=smoothing)
    losses_n = F.cross_entropy(logits_nk, targets, reduction="none", label_smoothing=smoothing)
    return (losses_n * weights_n).mean()


def focal_loss(
    logits_nk: Tensor,
    targets: Tensor,
    *,
    gamma: float,
    smoothing: float = 0.0,
    weights_n: Tensor | None = None,
) -> Tensor:
    """The sum over classes of -t (1 - p)^gamma log p, with p the softmax and t the target.

    Source: arXiv:1708.02002, there for one binary problem; in this form, over the softmax,
    arXiv:2002.09437. With gamma 0 it is the cross-entropy.
    """
    log_p_nk = logits_nk.log_softmax(1)
    # the bound keeps the gradient finite where p is rounded to 1 and gamma is below 1
    miss_nk = (-log_p_nk.expm1()).clamp(min=torch.finfo(log_p_nk.dtype).tiny)
    losses_n = (-smoothed(targets, logits_nk, smoothing) * miss_nk**gamma * log_p_nk).sum(1)
    return (losses_n if weights_n is None else losses_n * weights_n).mean()


def binary_cross_entropy(
    logits_nk: Tensor,
    targets: Tensor,
    *,
    threshold: float = 0.0,
    reduction: Literal["sum", "mean"] = "sum",
    smoothing: float = 0.0,
    weights_n: Tensor | None = None,
) -> Tensor:
    """Binary cross-entropy of each class, so that mixed images can have several classes.

    Targets above `threshold` become 1 and others 0; 0: targets stay as they are. With the reduction
    "sum" over the classes, gradients are as large as with cross-entropy.

    Source: arXiv:2110.00476 and timm's `BinaryCrossEntropy`, which takes the mean by default.
    """
    wanted_nk = smoothed(targets, logits_nk, smoothing)
    if threshold:
        wanted_nk = (wanted_nk > threshold).to(logits_nk.dtype)
    losses_nk = F.binary_cross_entropy_with_logits(logits_nk, wanted_nk, reduction="none")
    losses_n = losses_nk.sum(1) if reduction == "sum" else losses_nk.mean(1)
    return (losses_n if weights_n is None else losses_n * weights_n).mean()


def smoothed(targets: Tensor, logits_nk: Tensor, smoothing: float) -> Tensor:
    """Target probabilities (N, K) with the share `smoothing` spread over all classes."""
    classes = logits_nk.shape[1]
    dense_nk = targets if targets.ndim == 2 else F.one_hot(targets, classes)
    return dense_nk.to(logits_nk.dtype) * (1 - smoothing) + smoothing / classes


def image_weights(targets: Tensor, weights_k: Tensor) -> Tensor:
    """The weight of each image (N,): of its class, or the mean over its target's probabilities.

    A target (K,) may be probabilities times a number, which does not change the weight.
    """
    if targets.ndim == 1:
        return weights_k[targets]
    return (targets * weights_k).sum(1) / targets.sum(1)


def class_weights(counts: Sequence[int], how: Literal["balanced", "sqrt"]) -> tuple[float, ...]:
    """A weight for each class from its number of training images; the mean over images is 1.

    "balanced" is images / (classes * images of the class), as in scikit-learn's
    `compute_class_weight`; "sqrt" is proportional to the square root of that. Classes without
    images do not count, and get 0.
    """
    power = {"balanced": -1.0, "sqrt": -0.5}[how]
    raw = [count**power if count else 0.0 for count in counts]
    mean = sum(weight * count for weight, count in zip(raw, counts, strict=True)) / sum(counts)
    return tuple(weight / mean for weight in raw)


@lru_cache(maxsize=8)
def weight_tensor(
    counts: tuple[int, ...],
    how: Literal["none", "balanced", "sqrt"],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor | None:
    """`class_weights` (K,) as a tensor, which is copied to the device once; None for "none"."""
    if how == "none":
        return None
    if not counts:
        raise ValueError(
            f"class_weights {how} come from the images of each class: use task.for_data(data)"
        )
    return torch.tensor(class_weights(counts, how), device=device, dtype=dtype)


# The triplet loss, by which embeddings of one class are nearer to each other than to others.


class WithEmbedding(nn.Module):
    """Logits and embeddings in one forward pass: (N, C, H, W) -> (N, K), (N, D)."""

    def __init__(self, net: Backbone):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
        return self.net.logits_and_embedding(x, masks)


def weighted_triplet(embeddings_nd: Tensor, labels_n: Tensor) -> Tensor:
    """Triplet loss with soft margin and weights by hardness: (N, D), (N,) -> a scalar.

    With d the Euclidean distances from one image to the others, the mean over images that have both
    positives and negatives in the batch of

        log(1 + exp(sum of softmax(d) d over positives - sum of softmax(-d) d over negatives))

    and 0 if no image has both. Gradients flow through the weights too. The batch should have
    several images of each class. Embeddings should not be normalised: their scale sets how much
    hard pairs weigh.

    Source: soft margin, arXiv:1703.07737; weights, arXiv:1803.10859 as in JDAI-CV/fast-reid, except
    that an image is not among its own positives. TResNet's authors did not publish their loss
    (Alibaba-MIIL/TResNet#27).
    """
    d_nn, positive_nn, negative_nn = _pairs(embeddings_nd, labels_n)
    margin_n = _softmax_mean(d_nn, d_nn, positive_nn) - _softmax_mean(d_nn, -d_nn, negative_nn)
    return _soft_margin(margin_n, positive_nn, negative_nn)


def batch_hard_triplet(embeddings_nd: Tensor, labels_n: Tensor) -> Tensor:
    """Triplet loss with soft margin on the hardest pairs: (N, D), (N,) -> a scalar.

    The limit of `weighted_triplet` for large embeddings, the mean over the same images of

        log(1 + exp(largest d over positives - smallest d over negatives))

    Source: arXiv:1703.07737.
    """
    d_nn, positive_nn, negative_nn = _pairs(embeddings_nd, labels_n)
    far_n = d_nn.masked_fill(~positive_nn, 0).amax(1)
    near_n = d_nn.masked_fill(~negative_nn, torch.finfo(d_nn.dtype).max).amin(1)
    return _soft_margin(far_n - near_n, positive_nn, negative_nn)


TripletForm = Literal["weighted", "batch_hard"]
TRIPLET_FORMS: dict[TripletForm, Callable[[Tensor, Tensor], Tensor]] = {
    "weighted": weighted_triplet,
    "batch_hard": batch_hard_triplet,
}


def _pairs(embeddings_nd: Tensor, labels_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(N, N): distances, positive pairs without the diagonal, and negative pairs."""
    x_nd = embeddings_nd if embeddings_nd.dtype == torch.float64 else embeddings_nd.float()
    # by differences: a matrix product would cancel digits between near embeddings
    d_nn = torch.cdist(x_nd, x_nd, compute_mode="donot_use_mm_for_euclid_dist")
    same_nn = labels_n[:, None] == labels_n
    return d_nn, same_nn.clone().fill_diagonal_(False), ~same_nn


def _soft_margin(margin_n: Tensor, positive_nn: Tensor, negative_nn: Tensor) -> Tensor:
    """The mean of log(1 + exp(margin)) over images that have both kinds of pairs."""
    both_n = positive_nn.any(1) & negative_nn.any(1)
    return torch.where(both_n, F.softplus(margin_n), 0).sum() / both_n.sum().clamp(min=1)


def _softmax_mean(values_nn: Tensor, scores_nn: Tensor, mask_nn: Tensor) -> Tensor:
    """The mean over each row's entries in the mask; finite, not NaN, for an empty row."""
    least = torch.finfo(scores_nn.dtype).min
    return (scores_nn.masked_fill(~mask_nn, least).softmax(1) * values_nn).sum(1)
