"""Are embeddings of one class nearer to each other than to others? The triplet loss."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.nets.backbone import Backbone, Masks


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

    and 0 where no image has both. Gradients flow through the weights too. The batch should have
    several images of each class. Embeddings should not be normalised: their scale sets how much
    the hard pairs weigh.

    Source: soft margin, arXiv:1703.07737; weights, arXiv:1803.10859 as in JDAI-CV/fast-reid, except
    that an image is not among its own positives. TResNet's authors did not publish theirs
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
    """The distances (N, N), and which pairs are positive and negative; no image is with itself."""
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
    """Over each row's entries in the mask; an empty row gets a finite number in place of NaN."""
    least = torch.finfo(scores_nn.dtype).min
    return (scores_nn.masked_fill(~mask_nn, least).softmax(1) * values_nn).sum(1)
