"""How good are predicted classes? Accuracies, scores by class, the loss and the calibration.

Letters: N images, K classes. All scores but the loss are in percent; docs/measuring.md defines
them.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.tasks.confusion import ConfusionMatrix
from fullstride.tasks.task import full_precision

BINS = 15  # of equal width, for the calibration error
TOP = 5
MAX_PENDING = 2**20  # pairs that are held before they are counted: 8 MiB


class ClassificationScore:
    """Scores of predicted classes, counted batch by batch.

    The memory is that of the pairs of classes that occur, and does not grow with K². `loss` is the
    mean cross-entropy of the outputs as they are. `ece` is the expected calibration error of
    their softmax, with another temperature than 1 of the outputs divided by it; then
    `ece_uncalibrated` is that without.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self.images, self.correct, self.loss = 0, 0, 0.0
        self.classes, self.in_top = 0, 0
        self.pairs, self.counts = np.empty(0, np.int64), np.empty(0, np.int64)
        self.pending: list[np.ndarray] = []  # pairs that are not in `counts` yet
        # by the temperature: the correct images in each bin, and the sum of the confidences there
        self.bins = {each: np.zeros((2, BINS)) for each in (temperature, 1.0)}

    def update(self, logits_nk: Tensor, labels_n: Tensor) -> None:
        logits, labels = full_precision(logits_nk).cpu(), labels_n.cpu()
        predictions = logits.argmax(1)
        is_correct = predictions == labels
        log_softmax = logits.log_softmax(1)
        self.images += len(labels)
        self.classes = logits.shape[1]
        self.correct += int(is_correct.sum())
        self.in_top += count_in_top(logits, labels)
        self.loss += len(labels) * F.nll_loss(log_softmax, labels).item()
        for temperature, bins in self.bins.items():
            scaled = log_softmax if temperature == 1 else (logits / temperature).log_softmax(1)
            bins += calibration_bins(scaled.amax(1).exp(), is_correct)
        self.pending.append((labels * self.classes + predictions).numpy())
        if sum(map(len, self.pending)) > MAX_PENDING:
            self._count_pending()

    def merge(self, other: "ClassificationScore") -> None:
        self.images += other.images
        self.correct += other.correct
        self.loss += other.loss
        self.classes = max(self.classes, other.classes)  # 0 where a process had no image
        self.in_top += other.in_top
        for temperature, bins in self.bins.items():
            bins += other.bins[temperature]
        other._count_pending()
        self._count_pending()
        self._add(other.pairs, other.counts)

    def compute(self) -> dict[str, float]:
        matrix = self.confusion()
        top = {f"top{TOP}": 100 * (self.in_top / self.images)} if self.classes > TOP else {}
        ece = {"ece": self._ece(self.temperature)}
        if self.temperature != 1:
            ece["ece_uncalibrated"] = self._ece(1.0)
        return {
            "top1": 100 * (self.correct / self.images),
            **top,
            "balanced_accuracy": matrix.balanced_accuracy,
            "macro_f1": matrix.macro_f1,
            "loss": self.loss / self.images,
            **ece,
        }

    def confusion(self) -> ConfusionMatrix:
        self._count_pending()
        labels, predictions = np.divmod(self.pairs, max(1, self.classes))
        columns = (tuple(each.tolist()) for each in (labels, predictions, self.counts))
        return ConfusionMatrix(self.classes, *columns)

    def _ece(self, temperature: float) -> float:
        bins = self.bins[temperature]
        return 100 * float(np.abs(bins[0] - bins[1]).sum()) / self.images

    def _count_pending(self) -> None:
        if self.pending:
            pairs, counts = np.unique(np.concatenate(self.pending), return_counts=True)
            self.pending = []
            self._add(pairs, counts)

    def _add(self, pairs: np.ndarray, counts: np.ndarray) -> None:
        self.pairs, where = np.unique(np.concatenate([self.pairs, pairs]), return_inverse=True)
        both = np.concatenate([self.counts, counts])
        self.counts = np.zeros(len(self.pairs), np.int64)
        np.add.at(self.counts, where, both)


def count_in_top(logits_nk: Tensor, labels_n: Tensor) -> int:
    """The images whose label is among the `TOP` largest logits; of equal ones the first count."""
    true_n1 = logits_nk.gather(1, labels_n[:, None])
    is_before = torch.arange(logits_nk.shape[1]) < labels_n[:, None]
    rank_n = (logits_nk > true_n1).sum(1) + ((logits_nk == true_n1) & is_before).sum(1)
    return int((rank_n < TOP).sum())


def calibration_bins(confidence_n: Tensor, is_correct_n: Tensor) -> np.ndarray:
    """(2, `BINS`): in each bin (b/15, (b+1)/15] of the confidence the correct images, and its sum.

    The expected calibration error of N images is the sum of the absolute differences / N
    (arXiv:1706.04599).
    """
    confidence = confidence_n.double().nan_to_num().numpy()
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    weights = (is_correct_n.double().numpy(), confidence)
    return np.stack([np.bincount(bins, each, BINS) for each in weights])
