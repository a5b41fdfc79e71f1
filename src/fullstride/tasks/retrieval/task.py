"""Which images show the same thing? The task of retrieval, by the distances of embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fullstride.data.dataset import DataSet, open_data
from fullstride.nets.backbone import Backbone
from fullstride.strict_json import Bounds
from fullstride.tasks.losses import cross_entropy
from fullstride.tasks.metric_learning import TRIPLET_FORMS, TripletForm
from fullstride.tasks.retrieval.head import RetrievalHead, WithProjection, embedding_channels
from fullstride.tasks.retrieval.held_out import hold_out_classes
from fullstride.tasks.retrieval.score import METRICS, RetrievalScore
from fullstride.tasks.task import Metric, Score, Task, full_precision

SHOWN = 4  # values of an embedding in a line
TIE = 1e-6  # distance of embeddings of length 1 that rounding may cause between equal images


@dataclass(frozen=True)
class Embedding:
    """What images are compared by."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        first = " ".join(f"{value:.4f}" for value in self.values[:SHOWN])
        return f"embedding of {len(self.values):,} values: {first} ..."


@dataclass(frozen=True)
class Retrieval(Task):
    """Cross-entropy over the training classes and, with `triplet`, a triplet loss of embeddings.

    The network's outputs in evaluation are embeddings: the input of the classifier or, with
    `embedding_size`, a linear function of it, divided by their norm unless `normalise_embedding` is
    False. The triplet loss takes them before that, and alone trains the linear function. Compared
    by recall@1 on classes that were not trained on, see `hold_out_classes`. Scores have no loss,
    as these classes have no logits.
    """

    label_smoothing: float = 0.0  # probability taken from the true class and spread over all
    triplet: float = 0.0  # weight of the triplet loss; 0: off
    triplet_form: TripletForm = "weighted"
    embedding_size: Annotated[int, Bounds(ge=0)] = 0  # D; 0: that of the classifier's input
    normalise_embedding: bool = True

    name: ClassVar[str] = "retrieval"
    metric: ClassVar[Metric] = METRICS[0]
    other_metrics: ClassVar[tuple[Metric, ...]] = METRICS[1:]
    recipe_fields: ClassVar[frozenset[str]] = frozenset(
        {"triplet", "per_class", "balanced_sampling", "embedding_size", "normalise_embedding"}
    )
    state_fields: ClassVar[tuple[str, ...]] = ("embedding_size", "normalise_embedding")
    open_classes: ClassVar[bool] = True
    output_names: ClassVar[tuple[str, str]] = ("embedding", "embedding")

    def open_data(self, where: str, **how: Any) -> DataSet:
        return hold_out_classes(open_data(where, unseen_classes=True, **how))

    def with_options(self, recipe: Any) -> Self:
        task = super().with_options(recipe)
        if task.embedding_size and not task.triplet:
            raise ValueError(
                f"recipe.embedding_size {task.embedding_size} is a layer that the triplet loss "
                "trains: set recipe.triplet and recipe.per_class too"
            )
        return task

    def head(self, net: Backbone) -> RetrievalHead:
        channels = embedding_channels(net)
        return RetrievalHead(channels, self.embedding_size, self.normalise_embedding)

    def training_module(self, net: Backbone) -> nn.Module:
        return WithProjection(net)

    def loss(self, outputs: Any, targets: Tensor, teacher: Tensor | None = None) -> Tensor:
        """`outputs`: logits (N, K) over the training classes, and embeddings (N, D)."""
        logits, embeddings = outputs
        loss = cross_entropy(full_precision(logits), targets, smoothing=self.label_smoothing)
        if self.triplet:
            loss = loss + self.triplet * TRIPLET_FORMS[self.triplet_form](embeddings, targets)
        return loss

    def score(self) -> Score:
        return RetrievalScore()

    def agree(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether an embedding is nearest to that of its own image, among all that are expected."""
        how = "donot_use_mm_for_euclid_dist"  # products would cancel digits
        distances_nn = torch.cdist(outputs, expected, compute_mode=how)
        return distances_nn.diagonal() <= distances_nn.amin(1) + TIE

    def columns(self, outputs: Tensor, classes: Sequence[str], top: int) -> dict[str, Any]:
        return {"embedding": outputs.numpy()}

    def decode(
        self, outputs: Tensor, classes: Sequence[str], top: int
    ) -> list[tuple[Embedding, ...]]:
        return [(Embedding(tuple(row)),) for row in outputs.tolist()]
