"""How does a classifier become a network for retrieval? By a head over its embedding."""

import torch.nn.functional as F
from torch import Tensor

from fullstride.nets.backbone import EmbeddingHead
from fullstride.tasks.task import full_precision


class NormalisedEmbedding(EmbeddingHead):
    """The embedding divided by its Euclidean norm, in float32: (N, C) -> (N, C)."""

    def forward(self, embedding_nc: Tensor) -> Tensor:
        return F.normalize(full_precision(embedding_nc), dim=1)
