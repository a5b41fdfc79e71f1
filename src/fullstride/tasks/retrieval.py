"""The task of retrieval: images of the same class are found by the distances of embeddings."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.data.dataset import DEFAULT_RULE, DataSet, Images, SplitRule, open_data
from fullstride.data.readers.listing import fraction
from fullstride.data.readers.splits import TEST_SHARE
from fullstride.io.console import count_of, verb_of
from fullstride.io.records import Count
from fullstride.nets.backbone import Backbone, EmbeddingHead, Masks
from fullstride.tasks.losses import TRIPLET_FORMS, TripletForm, WithEmbedding, cross_entropy
from fullstride.tasks.task import Metric, Score, Task, bootstrap, full_precision


class RetrievalHead(EmbeddingHead):
    """An optional linear layer, and division by the Euclidean norm in float32: (N, C) -> (N, D)."""

    def __init__(self, channels: int, size: int, normalise: bool):
        super().__init__()
        self.project = nn.Linear(channels, size) if size else nn.Identity()
        self.normalise = normalise

    def forward(self, embedding_nc: Tensor) -> Tensor:
        embedding_nd = full_precision(self.project(embedding_nc))
        return F.normalize(embedding_nd, dim=1) if self.normalise else embedding_nd


class WithProjection(WithEmbedding):
    """Logits, and embeddings before they are normalised: (N, C, H, W) -> (N, K), (N, D)."""

    def forward(self, x: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
        logits, embedding = super().forward(x, masks)
        return logits, cast(RetrievalHead, self.net.task_head).project(embedding)


# The splits of a data set for retrieval: the test has classes that are not trained on.

VAL_SHARE = 0.1  # of the classes
LEAST = 2  # classes of a split: with one, any image would be a right result


def hold_out_classes(data: DataSet) -> DataSet:
    """Hold out whole classes for the validation split and the test, unless the data have them.

    The test gets the classes whose names have the lowest hashes, a tenth or the share of the data's
    rule, and the validation split the same share of the other classes; at least two each. A class
    of one image stays in training. With a group, images are held out by groups, as in `open_data`.
    Splits of the data stay as they are; a note says how many of their classes are trained on too.

    The result's `classes` are the classes of the training images; other classes have larger
    targets.

    Raises ValueError for too few classes, and for a split in which nothing can be retrieved.
    """
    missing = (split for split in ("test", "val") if split not in data.own_splits)
    splits = [split for split in missing if len(getattr(data, split))]
    if splits and not data.rule.group:
        data = _split_by_class(data, splits)
    data = _training_classes_first(data)
    return replace(data, notes=(*data.notes, *_notes(data)))


def _split_by_class(data: DataSet, splits: list[str]) -> DataSet:
    """Take `splits` from the training images of `data`, by class."""
    pool = _join(data.train, *(getattr(data, split) for split in splits))
    sizes = Counter(pool.targets)
    classes = sorted(
        (label for label, size in sizes.items() if size > 1),
        key=lambda label: fraction(data.classes[label]),
    )
    needed = LEAST * (len(splits) + 1)
    if len(classes) < needed:
        raise ValueError(
            f"{data.where} has {count_of(len(classes), 'class')} of two images or more: retrieval "
            f"holds whole classes out and needs {needed}; add some, name groups by --group, or "
            "give val/ and test/"
        )
    shares = {"test": data.rule.test or TEST_SHARE, "val": data.rule.val or VAL_SHARE}
    split_of: dict[int, str] = {}
    for number, split in enumerate(splits, 1):
        left = [label for label in classes if label not in split_of]
        count = max(LEAST, round(shares[split] * len(left)))
        count = min(count, len(left) - LEAST * (len(splits) + 1 - number))
        split_of |= dict.fromkeys(left[:count], split)
    return _divide(data, pool, splits, split_of)


def _divide(data: DataSet, pool: Images, splits: list[str], split_of: dict[int, str]) -> DataSet:
    """Divide `pool` into splits by class, without training images that copy held-out images."""
    places: dict[str, list[int]] = {split: [] for split in ("train", *splits)}
    for index, label in enumerate(pool.targets):
        places[split_of.get(label, "train")].append(index)
    training = {pool.names[index] for index in places["train"]}
    copies = set[str]()
    for names in (data.rule.copies or {}).values():
        if not training.issuperset(names):
            copies |= training.intersection(names)
    places["train"] = [index for index in places["train"] if pool.names[index] not in copies]
    numbers = Counter(split_of.values())
    notes = [
        f"{numbers[split]:,} of the {len(set(pool.targets)):,} classes "
        f"{verb_of(numbers[split], 'are')} for the {split} alone"
        for split in splits
    ]
    if copies:
        copy = "a copy of an image" if len(copies) == 1 else "copies of images"
        notes.append(
            f"{count_of(len(copies), 'training image', 'are')} {copy} of held-out classes and left "
            "out"
        )
    held_out = sorted((split, data.classes[label]) for label, split in split_of.items())
    text = f"{data.fingerprint} {held_out}".encode("utf-8", "surrogateescape")
    return replace(
        data,
        **{split: pool.subset(indices) for split, indices in places.items()},
        fingerprint=hashlib.sha256(text).hexdigest()[:16],
        notes=(*data.notes, *notes),
    )


def _join(*parts: Images) -> Images:
    """The images of all parts, sorted by class and name."""
    pairs = [pair for part in parts for pair in zip(part.targets, part.names, strict=True)]
    pairs.sort()
    targets, names = zip(*pairs, strict=True)
    return replace(parts[0], names=names, targets=targets)


def _training_classes_first(data: DataSet) -> DataSet:
    present = sorted(set(data.train.targets))
    others = [label for label in range(len(data.classes)) if label not in {*present}]
    target = {label: index for index, label in enumerate([*present, *others])}
    return data.with_targets(tuple(data.classes[label] for label in present), target.__getitem__)


def _notes(data: DataSet) -> list[str]:
    notes = []
    for split in ("val", "test"):
        sizes = Counter(getattr(data, split).targets)
        if sizes and max(sizes.values()) < 2:
            raise ValueError(
                f"the {split} of {data.where} has no two images of one class, so that nothing can "
                "be retrieved: add images"
            )
        if alone := sum(size == 1 for size in sizes.values()):
            images = count_of(alone, "image")
            notes.append(
                f"{images} of the {split} {verb_of(alone, 'are')} alone in a class: no query"
            )
        if both := sum(label < len(data.classes) for label in sizes):
            notes.append(
                f"{both:,} of the {len(sizes):,} classes of the {split} {verb_of(both, 'are')} "
                "trained on too, so its scores are of known classes"
            )
    return notes


# The score: each image is a query, and all other images are its gallery.
#
# Letters: N images, D values of an embedding, Q queries.

RECALLS = (1, 5, 10)  # numbers of nearest images
BLOCK_VALUES = 2**22  # distances at a time: at most 128 MiB with all intermediate results


METRICS = (
    *(Metric(f"recall_at_{k}", f"recall@{k}", "%", percent_of_images=True) for k in RECALLS),
    Metric("map_at_r", "mAP@R", "%"),
)


class RetrievalScore(Score):
    """`retrieval_scores` as a `Score`.

    Embeddings are held in float32: 4 N D bytes, 490 MB for 60,000 images with 2,048 values each.
    """

    def __init__(self) -> None:
        self.embeddings: list[Tensor] = []
        self.labels: list[Tensor] = []

    def update(self, embeddings_nd: Tensor, labels_n: Tensor) -> None:
        self.embeddings.append(embeddings_nd.float().cpu())
        self.labels.append(labels_n.cpu())

    def merge(self, other: Self) -> None:
        self.embeddings += other.embeddings
        self.labels += other.labels

    def compute(self) -> dict[str, float]:
        return retrieval_scores(torch.cat(self.embeddings), torch.cat(self.labels))

    def resampled(self) -> np.ndarray:
        labels = torch.cat(self.labels)
        queries, recalled_qk, _ = retrieve(torch.cat(self.embeddings), labels)
        found_q = recalled_qk[:, 0].numpy()

        def weighted(drawn_nb: np.ndarray) -> np.ndarray:
            drawn_qb = drawn_nb[queries.numpy()]
            return 100 * (found_q @ drawn_qb) / np.maximum(drawn_qb.sum(0), 1)

        return bootstrap(len(labels), weighted)

    def interval(self) -> None:
        """None: the interval of recall@1, a percentage of images, is binomial."""


def retrieval_scores(
    embeddings_nd: Tensor, labels_n: Tensor, groups_n: Tensor | None = None
) -> dict[str, float]:
    """Recall@k for `RECALLS`, and mAP@R, in percent: (N, D), (N,) -> scores by name.

    The gallery of a query is all other images, or with `groups_n` (N,) the images of other groups,
    such as other writers. It is sorted by Euclidean distance, which equals the order by cosine for
    normalised embeddings. Among equal distances, images of other classes come first, so that equal
    embeddings are not retrieved by chance. Recall@k is the share of queries with an image of their
    class among the k nearest images. mAP@R, for a query with R images of its class in its gallery,
    is the sum of the precisions at their ranks up to R, divided by R; the score is the mean over
    queries (arXiv:2003.08505). An image whose gallery has no image of its class is no query.

    Raises ValueError if there is no query. All scores are NaN if an embedding is not finite.
    """
    if not embeddings_nd.isfinite().all():
        return {metric.name: nan for metric in METRICS}
    queries, recalled_qk, precision_q = retrieve(embeddings_nd, labels_n, groups_n)
    shares = 100 * recalled_qk.sum(0, dtype=torch.float64) / len(queries)
    precision = 100 * precision_q.double().sum().item() / len(queries)
    names = (metric.name for metric in METRICS)
    return dict(zip(names, (*shares.tolist(), precision), strict=True))


def retrieve(
    embeddings_nd: Tensor, labels_n: Tensor, groups_n: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, and what each query retrieves by finite embeddings: (N, D), (N,) -> a tuple.

    Indices (Q,) of the queries; bool (Q, 3), whether the `RECALLS` nearest images have the query's
    class; and mAP@R of each query (Q,), see `retrieval_scores`.
    """
    _, class_n, sizes = labels_n.unique(return_inverse=True, return_counts=True)
    whose = "" if groups_n is None else " of different groups"
    groups_n = torch.arange(len(labels_n)) if groups_n is None else groups_n
    pairs_2n = torch.stack([class_n, groups_n])
    _, pair_n, pairs = pairs_2n.unique(dim=1, return_inverse=True, return_counts=True)
    relevant_n = sizes[class_n] - pairs[pair_n]
    queries = relevant_n.nonzero()[:, 0]
    if not len(queries):
        raise ValueError(f"no two of the images{whose} are of one class: nothing can be retrieved")
    # dot products of embeddings far from the origin would cancel digits
    x_nd = (embeddings_nd - embeddings_nd.mean(0, dtype=torch.float64)).float()
    half_n = x_nd.square().sum(1) / 2
    most = min(len(x_nd) - 1, max(*RECALLS, int(relevant_n.max())))
    ranks = torch.arange(1, most + 1)
    recalled, precisions = [], []
    for block in queries.split(max(1, BLOCK_VALUES // len(x_nd))):
        closeness_qn = x_nd[block] @ x_nd.T - half_n  # higher for a smaller distance
        own_qn = groups_n[block, None] == groups_n
        same_qn = (class_n[block, None] == class_n) & ~own_qn
        lower_qn = closeness_qn.nextafter(torch.tensor(-torch.inf))
        closeness_qn = closeness_qn.where(~same_qn, lower_qn)
        closeness_qn.masked_fill_(own_qn, -torch.inf)
        hits_qk = same_qn.gather(1, closeness_qn.topk(most).indices)
        recalled.append(torch.stack([hits_qk[:, :k].any(1) for k in RECALLS], 1))
        relevant_q1 = relevant_n[block, None]
        precisions_qk = hits_qk.cumsum(1) / ranks * (hits_qk & (ranks <= relevant_q1))
        precisions.append(precisions_qk.sum(1) / relevant_q1[:, 0])
    return queries, torch.cat(recalled), torch.cat(precisions)


SHOWN = 4  # values of an embedding in a line
TIE = 1e-6  # largest distance that rounding causes between embeddings of length 1


@dataclass(frozen=True)
class Embedding:
    """A vector by which images are compared."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        first = " ".join(f"{value:.4f}" for value in self.values[:SHOWN])
        return f"embedding of {len(self.values):,} values: {first} ..."


@dataclass(frozen=True)
class RetrievalOptions:
    """The options of retrieval."""

    # values of an embedding, from a layer that the triplet loss trains; 0: the classifier's input
    embedding_size: Count = 0
    normalise_embedding: bool = True  # scale embeddings to length 1, but not in the loss


@dataclass(frozen=True)
class Retrieval(RetrievalOptions, Task):
    """Cross-entropy over the training classes and, with `triplet`, a triplet loss of embeddings.

    The outputs in evaluation are embeddings: the classifier's input or, with `embedding_size`, a
    linear function of it, divided by the norm unless `normalise_embedding` is False. The triplet
    loss takes embeddings before the division, and alone trains the linear function. Compared by
    recall@1 on classes that were not trained on, see `hold_out_classes`; scores have no loss, as
    these classes have no logits.
    """

    label_smoothing: float = 0.0  # probability taken from the true class and spread over all
    triplet: float = 0.0  # weight of the triplet loss; 0: off
    triplet_form: TripletForm = "weighted"

    name: ClassVar[str] = "retrieval"
    options: ClassVar[type] = RetrievalOptions
    metric: ClassVar[Metric] = METRICS[0]
    other_metrics: ClassVar[tuple[Metric, ...]] = METRICS[1:]
    recipe_fields: ClassVar[frozenset[str]] = frozenset(
        {"triplet", "per_class", "balanced_sampling"}
    )
    state_fields: ClassVar[tuple[str, ...]] = ("embedding_size", "normalise_embedding")
    open_classes: ClassVar[bool] = True
    output_names: ClassVar[tuple[str, str]] = ("embedding", "embedding")

    def open_data(self, where: str, rule: SplitRule = DEFAULT_RULE) -> DataSet:
        return hold_out_classes(open_data(where, rule, unseen_classes=True))

    def with_options(self, recipe: Any) -> Self:
        task = super().with_options(recipe)
        if task.embedding_size and not task.triplet:
            raise ValueError(
                f"recipe.task_options embedding_size {task.embedding_size} is a layer that the "
                "triplet loss trains: set recipe.triplet and recipe.per_class too"
            )
        return task

    def head(self, net: Backbone) -> RetrievalHead:
        classifier = net.get_submodule(net.classifier)
        if not isinstance(classifier, nn.Linear):
            raise ValueError(f"{net.spec.source} has no linear classifier: choose another network")
        size, normalise = self.embedding_size, self.normalise_embedding
        return RetrievalHead(classifier.in_features, size, normalise)

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
        """Whether the nearest expected embedding of each output is of the same image."""
        how = "donot_use_mm_for_euclid_dist"  # dot products would cancel digits
        distances_nn = torch.cdist(outputs, expected, compute_mode=how)
        return distances_nn.diagonal() <= distances_nn.amin(1) + TIE

    def columns(self, outputs: Tensor, classes: Sequence[str], top: int) -> dict[str, Any]:
        return {"embedding": outputs.numpy()}

    def decode(
        self, outputs: Tensor, classes: Sequence[str], top: int
    ) -> list[tuple[Embedding, ...]]:
        return [(Embedding(tuple(row)),) for row in outputs.tolist()]
