"""How well do embeddings retrieve? Each image is a query, and all others are its gallery.

Letters: N images, D values of an embedding, Q queries.
"""

from math import nan

import torch
from torch import Tensor

from fullstride.tasks.task import Metric

RECALLS = (1, 5, 10)  # numbers of nearest images
BLOCK_VALUES = 2**22  # distances at a time: with what is computed of them at most 128 MiB


def recall_name(k: int) -> str:
    return f"recall_at_{k}"


METRICS = (
    *(Metric(recall_name(k), f"recall@{k}", "%", percent_of_images=True) for k in RECALLS),
    Metric("map_at_r", "mAP@R", "%"),
)


class RetrievalScore:
    """`retrieval_scores` of the outputs, as a `Score`.

    It holds the embeddings in float32: 4 N D bytes, 490 MB for 60,000 images of 2,048 values.
    """

    def __init__(self) -> None:
        self.embeddings: list[Tensor] = []
        self.labels: list[Tensor] = []

    def update(self, embeddings_nd: Tensor, labels_n: Tensor) -> None:
        self.embeddings.append(embeddings_nd.float().cpu())
        self.labels.append(labels_n.cpu())

    def merge(self, other: "RetrievalScore") -> None:
        self.embeddings += other.embeddings
        self.labels += other.labels

    def compute(self) -> dict[str, float]:
        return retrieval_scores(torch.cat(self.embeddings), torch.cat(self.labels))


def retrieval_scores(embeddings_nd: Tensor, labels_n: Tensor) -> dict[str, float]:
    """Recall@k for `RECALLS`, and mAP@R, in percent: (N, D), (N,) -> scores by name.

    The gallery of a query is all other images, in the order of their Euclidean distances, which is
    that of their cosines if embeddings are normalised. Of equal distances images of other classes
    come first, so that equal embeddings are not retrieved by chance. Recall@k is the share of
    queries with an image of their class among the k nearest ones. mAP@R is the mean over queries
    of the precisions at the ranks of the images of their class, of which there are R, those beyond
    rank R counting 0, divided by R (arXiv:2003.08505). An image that is the only one of its class
    is in the gallery, but is no query.

    Raises ValueError if there is no query. All are NaN for embeddings that are not finite.
    """
    _, class_n, sizes = labels_n.unique(return_inverse=True, return_counts=True)
    relevant_n = sizes[class_n] - 1
    queries = relevant_n.nonzero()[:, 0]
    if not len(queries):
        raise ValueError("no two of the images are of one class: nothing can be retrieved")
    if not embeddings_nd.isfinite().all():
        return {metric.name: nan for metric in METRICS}
    # products of embeddings far from the origin would cancel digits
    x_nd = (embeddings_nd - embeddings_nd.mean(0, dtype=torch.float64)).float()
    half_n = x_nd.square().sum(1) / 2
    most = min(len(x_nd) - 1, max(*RECALLS, int(relevant_n.max())))
    ranks = torch.arange(1, most + 1)
    recalled, precision = torch.zeros(len(RECALLS)), 0.0
    for block in queries.split(max(1, BLOCK_VALUES // len(x_nd))):
        closeness_qn = x_nd[block] @ x_nd.T - half_n  # higher for a smaller distance
        same_qn = class_n[block, None] == class_n
        lower_qn = closeness_qn.nextafter(torch.tensor(-torch.inf))
        closeness_qn = closeness_qn.where(~same_qn, lower_qn)
        closeness_qn[torch.arange(len(block)), block] = -torch.inf
        hits_qk = same_qn.gather(1, closeness_qn.topk(most).indices)
        recalled += torch.stack([hits_qk[:, :k].any(1).sum() for k in RECALLS])
        relevant_q1 = relevant_n[block, None]
        precisions_qk = hits_qk.cumsum(1) / ranks * (hits_qk & (ranks <= relevant_q1))
        precision += (precisions_qk.sum(1) / relevant_q1[:, 0]).double().sum().item()
    names = [recall_name(k) for k in RECALLS]
    recalls = dict(zip(names, (100 * recalled.double() / len(queries)).tolist(), strict=True))
    return {**recalls, "map_at_r": 100 * precision / len(queries)}
