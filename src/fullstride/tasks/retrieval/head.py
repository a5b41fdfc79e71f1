"""How does a classifier become a network for retrieval? By a head over its embedding."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.nets.backbone import Backbone, EmbeddingHead, Masks
from fullstride.tasks.task import full_precision


class RetrievalHead(EmbeddingHead):
    """An optional linear layer, and division by the Euclidean norm in float32: (N, C) -> (N, D)."""

    def __init__(self, channels: int, size: int, normalise: bool):
        super().__init__()
        self.project = nn.Linear(channels, size) if size else nn.Identity()
        self.normalise = normalise

    def forward(self, embedding_nc: Tensor) -> Tensor:
        embedding_nd = full_precision(self.project(embedding_nc))
        return F.normalize(embedding_nd, dim=1) if self.normalise else embedding_nd


class WithProjection(nn.Module):
    """Logits, and what the head would normalise: (N, C, H, W) -> (N, K), (N, D)."""

    def __init__(self, net: Backbone):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
        logits, embedding = self.net.logits_and_embedding(x, masks)
        return logits, cast(RetrievalHead, self.net.task_head).project(embedding)


def embedding_channels(net: Backbone) -> int:
    """C, the inputs of the classifier. Raises ValueError where that is no linear layer."""
    classifier = net.get_submodule(net.classifier)
    if not isinstance(classifier, nn.Linear):
        raise ValueError(f"{net.spec.source} has no linear classifier: choose another network")
    return classifier.in_features
