"""Finds the images of a gallery nearest to a picture, exactly, by Euclidean distance.

A gallery is a store by `fullstride predict --out` for a task with embeddings as outputs. Letters:
Q pictures, B images per block, D values per embedding.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullstride.data.prediction_store import column_names, pyarrow, read_batches, read_key
from fullstride.deploy.exported import Model
from fullstride.deploy.offline import fingerprint
from fullstride.deploy.predict import Prediction

if TYPE_CHECKING:
    import pyarrow as pa


EMBEDDING, LABEL = "embedding", "true_label"  # columns
QUERIES = 512  # pictures per pass over the gallery
BLOCK = 4096  # gallery images at a time: 16 MiB of distances, 64 MiB of 2,048 values


@dataclass(frozen=True)
class Neighbour:
    """An image of the gallery; for embeddings of length 1, the cosine is 1 - distance² / 2."""

    path: str
    label: str | None  # None if the gallery has no labels
    distance: float

    def __str__(self) -> str:
        label = "" if self.label is None else f" ({self.label})"
        return f"{self.path}{label} {self.distance:.4f}"


def check_gallery(gallery: Path, model: Model) -> None:
    """Raise ValueError, in one line, unless `gallery` has the embeddings of exactly `model`."""
    key = read_key(gallery)
    if key.fingerprint != fingerprint(model):
        raise ValueError(
            f"{gallery} was made by another model, {key.model}, or by another file of it: give "
            "that file, or predict the gallery again"
        )
    if EMBEDDING not in column_names(gallery):
        raise ValueError(
            f"{gallery} has no embeddings but predictions of the task {key.task}: train with "
            "--task retrieval"
        )


def nearest_images(
    rows: Iterable[Prediction], gallery: Path, model: Model, top: int
) -> Iterator[Prediction]:
    """Replace the embeddings in predictions of `model` by the `top` nearest images of `gallery`.

    The nearest image comes first; at equal distances, the earlier one in the gallery.
    """
    check_gallery(gallery, model)
    rows = iter(rows)
    while group := list(islice(rows, QUERIES)):
        readable = [row.guesses[0].values for row in group if not row.unreadable]
        neighbours = iter(search(np.array(readable), gallery, top) if readable else [])
        for row in group:
            yield row if row.unreadable else replace(row, guesses=next(neighbours))


def search(queries_qd: np.ndarray, gallery: Path, top: int) -> list[tuple[Neighbour, ...]]:
    """Find the `top` nearest readable images for each query, in float64.

    Raises ValueError if the gallery's embeddings do not have D values.
    """
    queries_qd = queries_qd.astype(np.float64)
    labels = LABEL in column_names(gallery)
    columns = ("path", EMBEDDING, *[LABEL] * labels)
    distance_qk = np.empty((len(queries_qd), 0))
    image_qk = np.empty((len(queries_qd), 0), object)
    for batch in read_batches(gallery, columns, BLOCK):
        batch = batch.filter(batch.column(EMBEDDING).is_valid())
        block_bd = embeddings(batch, queries_qd.shape[1], gallery)
        images = np.empty(len(batch), object)
        names = batch.column("path").to_pylist()
        truths = batch.column(LABEL).to_pylist() if labels else [None] * len(batch)
        images[:] = list(zip(names, truths, strict=True))
        squares_qb = (
            np.square(queries_qd).sum(1)[:, None]
            + np.square(block_bd).sum(1)
            - 2 * queries_qd @ block_bd.T
        )
        distances_qb = np.sqrt(squares_qb.clip(min=0))
        distance_qk = np.concatenate([distance_qk, distances_qb], 1)
        all_images = np.broadcast_to(images, distances_qb.shape)
        image_qk = np.concatenate([image_qk, all_images], 1)
        order_qk = np.argsort(distance_qk, 1, kind="stable")[:, :top]
        distance_qk = np.take_along_axis(distance_qk, order_qk, 1)
        image_qk = np.take_along_axis(image_qk, order_qk, 1)
    return [
        tuple(
            Neighbour(path, label, distance)
            for (path, label), distance in zip(images, distances, strict=True)
            if isfinite(distance)
        )
        for images, distances in zip(image_qk, distance_qk.tolist(), strict=True)
    ]


def embeddings(batch: "pa.RecordBatch", size: int, gallery: Path) -> np.ndarray:
    """The column of embeddings as (B, D) float64."""
    pa, column = pyarrow(), batch.column(EMBEDDING)
    kind: Any = column.type
    is_vector = pa.types.is_fixed_size_list(kind) and pa.types.is_floating(kind.value_type)
    if not is_vector or kind.list_size != size:
        raise ValueError(f"{gallery} has embeddings of {kind}, the model {size} numbers")
    values = column.flatten().to_numpy(zero_copy_only=False)
    return values.astype(np.float64).reshape(len(batch), size)
