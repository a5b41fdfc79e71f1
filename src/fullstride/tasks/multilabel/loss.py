"""How wrong are the logits of several labels? A focal loss with an exponent for either side."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.tasks.task import full_precision


def multilabel_focal(
    logits_nk: Tensor,
    targets_nk: Tensor,
    *,
    gamma_positive: float = 0.0,
    gamma_negative: float = 0.0,
    shift: float = 0.0,
    weight_gradient: bool = True,
    weights_k: Tensor | None = None,
) -> Tensor:
    """A binary problem for each label: (N, K), (N, K) -> the mean over images of sums over labels.

    With p = sigmoid(logit) and p_m = max(p - shift, 0) a label costs

        -(1 - p)^gamma_positive log p           where the target is 1, and
        -p_m^gamma_negative log(1 - p_m)        where it is 0;

    targets between, of mixed images, weigh the two. It is computed in float32 or wider. Without
    exponents and shift it is the binary cross-entropy, with equal exponents the focal loss of
    arXiv:1708.02002, otherwise the asymmetric loss (ASL) of arXiv:2009.14119, of which TResNet
    (arXiv:2003.13630) has the two exponents. ASL's code takes the sum over the batch too, which is
    N times as large: for its learning rate that makes no difference with Adam, and a factor of N
    with SGD.

    If training does not learn, its authors' advice is to begin with exponents of 0, then to try
    (2, 2) without a shift, and then (0, 4) with a shift of 0.05
    (https://github.com/Alibaba-MIIL/ASL/issues/22).

    Args:
        logits_nk: Logits.
        targets_nk: 1 for a label that an image has, 0 for others.
        gamma_positive: Exponent for labels that an image has.
        gamma_negative: Exponent for the others; higher for fewer gradients of easy ones.
        shift: Probability below which a label that an image does not have costs nothing.
        weight_gradient: Whether gradients flow through the powers; in ASL's training they do not.
        weights_k: A weight for each label (K,).
    """
    x = full_precision(logits_nk)
    targets = targets_nk.to(x.dtype)
    p, miss = x.sigmoid(), (-x).sigmoid()
    log_miss = F.logsigmoid(-x)
    if shift:
        p = (p - shift).clamp(min=0)
        log_miss = (-p).log1p()
    positive = targets * _power(miss, gamma_positive, weight_gradient) * F.logsigmoid(x)
    negative = (1 - targets) * _power(p, gamma_negative, weight_gradient) * log_miss
    losses_nk = -(positive + negative)
    return (losses_nk if weights_k is None else losses_nk * weights_k).sum(1).mean()


def _power(base: Tensor, exponent: float, gradient: bool) -> Tensor | float:
    if not exponent:
        return 1.0
    # the bound keeps the gradient finite where the base is 0 and the exponent below 1
    power = base.clamp(min=torch.finfo(base.dtype).tiny) ** exponent
    return power if gradient else power.detach()
