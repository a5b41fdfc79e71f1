"""Which one of K classes is it?"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Classify:
    """Cross-entropy against softened labels; judged by top-1 accuracy in percent.

    Source of the softening: label smoothing, arXiv:1512.00567.
    """

    label_smoothing: float = 0.0  # probability taken from the true class and spread over all

    def loss(self, logits_nk: Tensor, targets: Tensor) -> Tensor:
        """`targets`: labels (N,), or a probability for each class (N, K)."""
        return F.cross_entropy(logits_nk, targets, label_smoothing=self.label_smoothing)

    def score(self, logits_nk: Tensor, labels_n: Tensor) -> dict[str, float]:
        right_n = logits_nk.argmax(1) == labels_n
        return {
            "top1": 100 * right_n.double().mean().item(),
            "loss": F.cross_entropy(logits_nk, labels_n).item(),
        }
