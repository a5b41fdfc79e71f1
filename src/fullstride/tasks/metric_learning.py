"""Do images of one class lie nearer to each other than to all others? A loss on embeddings, beside the task's own."""

import torch
import torch.nn.functional as F
from torch import Tensor


def weighted_triplet(embeddings_nd: Tensor, labels_n: Tensor) -> Tensor:
    """Soft margin between an image's positives and its negatives, in each of which the hard ones weigh more: a scalar.

    With d the Euclidean distances from one image to the others, the mean over images that have both kinds of

        log(1 + exp(sum of softmax(d) d over the same class - sum of softmax(-d) d over the other classes))

    and 0 where no image has both. Gradients flow through the weights too, as in public code. Wants several images of
    each class in a batch, and embeddings that are not normalised: their scale is how much the hard ones weigh.

    Source: soft margin, arXiv:1703.07737; weights, as JDAI-CV/fast-reid has them after arXiv:1803.10859, but an image
    is not among its own positives. TResNet's authors did not publish theirs (Alibaba-MIIL/TResNet#27).
    """
    x_nd = embeddings_nd if embeddings_nd.dtype == torch.float64 else embeddings_nd.float()
    # by differences: a matrix product would cancel digits between near ones
    d_nn = torch.cdist(x_nd, x_nd, compute_mode="donot_use_mm_for_euclid_dist")
    same_nn = labels_n[:, None] == labels_n
    positive_nn, negative_nn = same_nn.clone().fill_diagonal_(False), ~same_nn
    margin_n = _softmax_mean(d_nn, d_nn, positive_nn) - _softmax_mean(d_nn, -d_nn, negative_nn)
    both_n = positive_nn.any(1) & negative_nn.any(1)
    return torch.where(both_n, F.softplus(margin_n), 0).sum() / both_n.sum().clamp(min=1)


def _softmax_mean(values_nn: Tensor, scores_nn: Tensor, chosen_nn: Tensor) -> Tensor:
    """Of the chosen ones in each row. A row without any gets some finite number: infinite scores would give NaN."""
    least = torch.finfo(scores_nn.dtype).min
    return (scores_nn.masked_fill(~chosen_nn, least).softmax(1) * values_nn).sum(1)
