"""Writes predictions for any number of images to a store of parts, each written once.

The images are divided into parts of equal size. Each of N processes takes every N-th part, and
skips parts that are in the store, so a killed job can continue, with any number of processes.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fullstride.data import prediction_store as store
from fullstride.data.dataset import Images
from fullstride.data.loader import Batches, LoaderOptions, TestView
from fullstride.data.prediction_store import StoreKey, pyarrow
from fullstride.data.readers.decode import UnreadableImage
from fullstride.data.transforms.crop import to_input
from fullstride.data.unlabelled import Unlabelled, of_files, open_unlabelled
from fullstride.deploy import predict
from fullstride.deploy.exported import Model, as_utf8, one_input
from fullstride.deploy.settings import OfflineFlags, Tta
from fullstride.io.records import PositiveInt, check_bounds
from fullstride.io.writing import open_regular
from fullstride.nets.bundle import Bundle
from fullstride.tasks import task_of
from fullstride.tasks.classify import most_probable_classes
from fullstride.train.distill import digest

if TYPE_CHECKING:
    import pyarrow as pa


CHUNK_BYTES = 2**20
Columns = Callable[[Tensor], Mapping[str, Any]]  # activated outputs (N, ...) -> columns of N rows
Watch = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class OfflineSettings(OfflineFlags):
    """How a job is computed. Only `part_images` and `tta` affect the store's content."""

    batch: PositiveInt = 32
    device: torch.device | str = "cpu"  # for a bundle
    tta: Tta = "none"

    def __post_init__(self) -> None:
        check_bounds(self)
        rank, ranks = self.share
        if rank >= ranks:
            raise ValueError(f"rank {rank}: use 0 to {ranks - 1} for {ranks} ranks")

    @property
    def share(self) -> tuple[int, int]:
        """The rank of this process and the number of processes, by default torchrun's."""
        if (self.rank is None) != (self.ranks is None):
            raise ValueError("--rank and --ranks belong together: give both or none")
        if self.rank is None or self.ranks is None:
            return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return self.rank, self.ranks


def outputs(
    model: Model, images: Images, how: OfflineSettings, skipped: dict[str, str], watch: Watch
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield indices of readable images in ascending order, with activated outputs on the CPU.

    `skipped` receives the reasons for unreadable images before a larger index is yielded.
    """
    pre, kind = model.preprocessing, predict.input_kind(model)
    batch = min(how.batch, predict.most_in_batch(pre))
    if kind == "pictures":
        yield from _outputs_of_pictures(model, images, batch, how, skipped)
        return
    batches = Batches(
        images,
        TestView(replace(pre, draft=True)),
        LoaderOptions(
            batch=batch,
            workers=how.workers,
            device=how.device if isinstance(model, Bundle) else "cpu",
        ),
        collate=list,
        to_x=to_input if kind == "normalised" else lambda pixels_nhwc, pre: pixels_nhwc,
    )
    batches.skipped = skipped
    try:
        for x, _, indices in watch(batches).epoch(0):
            yield indices.numpy(), predict.activated(model, x, how.device, how.tta)
    except ValueError:
        if len(skipped) < len(images):  # otherwise no image can be read, and each row says why
            raise
    finally:
        batches.close()


def _outputs_of_pictures(
    model: Model, images: Images, batch: int, how: OfflineSettings, skipped: dict[str, str]
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """`outputs` of a file that resizes images; they are decoded in this process."""
    numbers = iter(range(len(images)))
    while group := list(islice(numbers, batch)):
        views, readable = [], []
        for index in group:
            try:
                source = images.source(index)
                is_file = isinstance(source, Path | bytes)
                views.append(predict.read_view(source, model) if is_file else source)
                readable.append(index)
            except UnreadableImage as error:
                skipped[images.names[index]] = error.reason
        if readable:
            rows = predict.probabilities(model, views, how.device, batch, how.tta)
            yield np.array(readable), torch.from_numpy(rows)


def fingerprint(model: Model) -> str:
    """A hash of a bundle's weights, or of a file, and of the preprocessing of images."""
    weights = digest(model.net) if isinstance(model, Bundle) else _digest_of_files(model.path)
    how = (weights, asdict(model.preprocessing), model.task, task_of(model).state())
    return hashlib.sha256(repr(how).encode()).hexdigest()[:16]


def _digest_of_files(path: Path) -> str:
    """The digest of a file, or of all files in a folder."""
    whole = hashlib.sha256()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for each in files:
        if each.is_file():
            whole.update(str(each.relative_to(path.parent)).encode(errors="surrogateescape"))
            with open_regular(each) as file:
                while chunk := file.read(CHUNK_BYTES):
                    whole.update(chunk)
    return whole.hexdigest()


def schema(model: Model, columns: Columns, device: torch.device | str) -> "pa.Table":
    """An empty table, from outputs for a black image: a part may have no readable image."""
    black: Any = np.zeros(one_input(model.preprocessing, "pixels"), np.uint8)
    if predict.input_kind(model) == "pictures":
        black = Image.fromarray(black.squeeze())
    rows = predict.probabilities(model, [black], device)
    return to_table(columns(torch.from_numpy(rows))).slice(0, 0)


def to_table(columns: Mapping[str, Any]) -> "pa.Table":
    return pyarrow().table({name: _array(values) for name, values in columns.items()})


def _array(values: Any) -> Any:
    """An arrow array from a list or a NumPy array, whose rows become lists of one size."""
    pa = pyarrow()
    if not isinstance(values, np.ndarray):
        return pa.array(_as_utf8(values))
    if values.ndim == 1:
        return pa.array(values)
    flat = pa.array(np.ascontiguousarray(values).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _as_utf8(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_utf8(each) for each in value]
    return as_utf8(value) if isinstance(value, str) else value


def with_names(
    table: "pa.Table",
    names: list[str],
    errors: list[str | None],
    labels: list[str] | None,
) -> "pa.Table":
    """Add the columns path, error and, if the data have labels, true_label."""
    pa = pyarrow()
    first = {"path": names}
    if labels is not None:
        first["true_label"] = labels
    columns = {name: pa.array(_as_utf8(values), pa.string()) for name, values in first.items()}
    columns |= {name: table.column(name) for name in table.column_names}
    columns["error"] = pa.array(_as_utf8(errors), pa.string())
    return pa.table(columns)


@dataclass
class Summary:
    """What a call wrote, and what is missing."""

    images: int = 0  # rows written
    parts: int = 0  # parts written
    present: int = 0  # parts of this process that were already in the store
    missing: int = 0  # parts that other processes have not written yet
    skipped: dict[str, str] = field(default_factory=dict)  # unreadable images -> reason


def check_takes_images(model: Model, out: Path) -> None:
    if model.preprocessing.frames:
        raise ValueError(
            f"--out {out} is for images, and the network takes clips: use --json of predict"
        )


@dataclass(frozen=True)
class PredictionJob:
    """Writes a model's predictions, one row per image, with `columns` computed from its outputs.

    Each row also has `path`, `error` (why the image cannot be read, else null) and, if the data
    have labels, `true_label`.
    """

    model: Model
    data: Unlabelled
    columns: Columns
    key: StoreKey
    how: OfflineSettings
    watch: Watch
    summary: Summary = field(default_factory=Summary)

    def write(self, out: Path) -> Summary:
        """Write all rows to a file, or this process's missing parts to a folder."""
        key, summary = self.key, self.summary
        rank, ranks = self.how.share
        if store.is_file(out):
            if ranks > 1:
                raise ValueError(f"{out} is written by one process: give a folder for {ranks}")
            summary.images, summary.parts = key.images, key.parts
            empty = schema(self.model, self.columns, self.how.device)
            first = with_names(empty, [], [], [] if self.data.has_labels else None)
            store.write_file(out, self.tables(range(key.parts)), first.schema, key)
            return summary
        store.create_or_resume(out, key)
        done = store.finished_parts(out, key)
        own = range(rank, key.parts, ranks)
        todo = [part for part in own if part not in done]
        summary.present = len(own) - len(todo)
        for part, table in zip(todo, self.tables(todo), strict=True):
            store.write_part(out, part, table, key)
            summary.parts, summary.images = summary.parts + 1, summary.images + len(table)
        summary.missing = key.parts - len(store.finished_parts(out, key))
        return summary

    def tables(self, parts: Sequence[int]) -> Iterator["pa.Table"]:
        """Yield the rows of `parts`, in ascending order; the summary lists unreadable images."""
        if not parts:
            return
        arrow, skipped, size = pyarrow(), self.summary.skipped, self.key.part_images
        images = self.data.images.subset(index for part in parts for index in self.key.rows(part))
        empty = schema(self.model, self.columns, self.how.device)
        has_labels = self.data.has_labels
        places: list[int] = []
        tables: list[Any] = []
        current = 0

        def finished() -> "pa.Table":
            """The rows of the current part, with nulls for images that cannot be read."""
            span = range(current * size, min(len(images), (current + 1) * size))
            order = np.full(len(span), -1)
            order[np.array(places, int) - span.start] = np.arange(len(places))
            indices = arrow.array(order, mask=order < 0)
            table = arrow.concat_tables([empty, *tables]).take(indices).combine_chunks()
            names = [images.names[index] for index in span]
            errors = [skipped.get(name) for name in names]
            labels = [images.targets[index] for index in span] if has_labels else None
            places.clear()
            tables.clear()
            return with_names(table, names, errors, labels)

        for indices, rows in outputs(self.model, images, self.how, skipped, self.watch):
            for part in range(int(indices[0]) // size, int(indices[-1]) // size + 1):
                while current < part:
                    yield finished()
                    current += 1
                mine = indices // size == part
                places += indices[mine].tolist()
                tables.append(to_table(self.columns(rows[torch.from_numpy(mine)])))
        while current < len(parts):
            yield finished()
            current += 1


def write_outputs(
    kind: Literal["predictions", "pseudo_labels"],
    model: Model,
    data: Unlabelled,
    out: Path,
    top: int,
    settings: OfflineSettings,
    watch: Watch = lambda batches: batches,
) -> Summary:
    """Write the `top` most probable predictions, in the columns of the model's task.

    Pseudo-labels are the indices of the `top` most probable classes and their probabilities in
    fp16. A store is a folder of parts, and a later call continues the same job; or, for an `out`
    that ends in .parquet, a file that one process writes, from the beginning after a stop. `watch`
    may wrap the batches, to show progress.

    Raises ValueError for a network of clips, for predictions with places, which need the size of
    each picture, for pseudo-labels of another task than classification, and if `out` has other
    content: of another model, other images or other arguments; FloatingPointError if an output is
    not finite.
    """
    task = task_of(model)
    if kind == "pseudo_labels":
        if not task.single_label:
            raise ValueError(f"a teacher for pseudo-labels has classes, not the task {task.name}")

        def columns(outputs: Tensor) -> Mapping[str, Any]:
            indices, values = most_probable_classes(outputs, top)
            half = values.numpy().astype(np.float16)
            return {"classes": indices.numpy().astype(np.int32), "probabilities": half}

    else:
        if task.has_places:
            raise ValueError(
                f"--out {out}: rows of the task {task.name} would have no places in the pictures: "
                "use --json"
            )
        columns = partial(task.columns, classes=model.classes, top=top)
    key = store_key(model, data, out, top, settings, kind)
    return PredictionJob(model, data, columns, key, settings, watch).write(out)


def store_key(
    model: Model,
    data: Unlabelled,
    out: Path,
    top: int,
    how: OfflineSettings,
    kind: Literal["predictions", "pseudo_labels"],
) -> StoreKey:
    """The key of the store. Raises ValueError for a model that cannot write a store."""
    check_takes_images(model, out)
    pyarrow()
    if how.tta == "flip":
        predict.check_tta(model)
    return StoreKey(
        kind=kind,
        model=as_utf8(model.name),
        fingerprint=fingerprint(model),
        task=model.task,
        classes=tuple(map(as_utf8, model.classes)),
        has_class_names=model.has_class_names,
        where=as_utf8(data.where),
        data=data.fingerprint,
        images=len(data.images),
        part_images=how.part_images,
        arguments={"top": str(top), "tta": how.tta},
    )


def open_images(words: Sequence[str]) -> Unlabelled:
    """Open the images of one place by `open_unlabelled`, or of several files and folders."""
    if len(words) == 1 and words[0] != "-":
        return open_unlabelled(words[0])
    return of_files(*predict.find_images(words))


def this_device(device: torch.device) -> torch.device:
    """This process's own GPU if torchrun started several processes on a machine."""
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


# ---- the images of a store of embeddings that are nearest to a picture, exactly, by Euclidean
# distance. Letters: Q pictures, B images per block, D values per embedding.

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
    key = store.read_key(gallery)
    if key.fingerprint != fingerprint(model):
        raise ValueError(
            f"{gallery} was made by another model, {key.model}, or by another file of it: give "
            "that file, or predict the gallery again"
        )
    if EMBEDDING not in store.column_names(gallery):
        raise ValueError(
            f"{gallery} has no embeddings but predictions of the task {key.task}: train with "
            "--task retrieval"
        )


def nearest_images(
    rows: Iterable[predict.Prediction], gallery: Path, model: Model, top: int
) -> Iterator[predict.Prediction]:
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
    labels = LABEL in store.column_names(gallery)
    columns = ("path", EMBEDDING, *[LABEL] * labels)
    distance_qk = np.empty((len(queries_qd), 0))
    image_qk = np.empty((len(queries_qd), 0), object)
    for batch in store.read_batches(gallery, columns, BLOCK):
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
