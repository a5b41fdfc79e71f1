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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fullstride.data.dataset import Images
from fullstride.data.loader import Batches, TestView
from fullstride.data.prediction_store import (
    StoreKey,
    create_or_resume,
    finished_parts,
    is_file,
    pyarrow,
    write_file,
    write_part,
)
from fullstride.data.readers.decode import UnreadableImage
from fullstride.data.sampler import LoaderOptions
from fullstride.data.transforms.crop import to_input
from fullstride.data.unlabelled import Unlabelled, of_files, open_unlabelled
from fullstride.deploy.exported import Model, as_utf8, one_input
from fullstride.deploy.predict import (
    activated,
    check_tta,
    find_images,
    input_kind,
    most_in_batch,
    probabilities,
    read_view,
)
from fullstride.deploy.settings import PART_IMAGES, Tta
from fullstride.io.records import Count, PositiveInt, check_bounds
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
class OfflineSettings:
    """How a job is computed. Only `part_images` and `tta` affect the store's content."""

    batch: PositiveInt = 32
    device: torch.device | str = "cpu"  # for a bundle
    workers: Count = 0  # processes that decode images beside this process
    tta: Tta = "none"
    rank: Count = 0  # of this process
    ranks: PositiveInt = 1  # processes that share the job
    part_images: PositiveInt = PART_IMAGES  # rows per part

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.rank >= self.ranks:
            raise ValueError(f"rank {self.rank}: use 0 to {self.ranks - 1} for {self.ranks} ranks")


def outputs(
    model: Model, images: Images, how: OfflineSettings, skipped: dict[str, str], watch: Watch
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield indices of readable images in ascending order, with activated outputs on the CPU.

    `skipped` receives the reasons for unreadable images before a larger index is yielded.
    """
    pre, kind = model.preprocessing, input_kind(model)
    batch = min(how.batch, most_in_batch(pre))
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
            yield indices.numpy(), activated(model, x, how.device, how.tta)
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
                views.append(read_view(source, model) if is_file else source)
                readable.append(index)
            except UnreadableImage as error:
                skipped[images.names[index]] = error.reason
        if readable:
            rows = probabilities(model, views, how.device, batch, how.tta)
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
    if input_kind(model) == "pictures":
        black = Image.fromarray(black.squeeze())
    rows = probabilities(model, [black], device)
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
    has_labels: bool,
    labels: Iterable[str] = (),
) -> "pa.Table":
    """Add the columns path, error and, if the data have labels, true_label."""
    pa = pyarrow()
    first = {"path": names}
    if has_labels:
        first["true_label"] = list(labels)
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
        raise ValueError(f"--out {out} is for images, and the network takes clips: use --json")


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
        if is_file(out):
            if self.how.ranks > 1:
                ranks = self.how.ranks
                raise ValueError(f"{out} is written by one process: give a folder for {ranks}")
            summary.images, summary.parts = key.images, key.parts
            empty = schema(self.model, self.columns, self.how.device)
            first = with_names(empty, [], [], self.data.has_labels)
            write_file(out, self.tables(range(key.parts)), first.schema, key)
            return summary
        create_or_resume(out, key)
        done = finished_parts(out, key)
        own = range(self.how.rank, key.parts, self.how.ranks)
        todo = [part for part in own if part not in done]
        summary.present = len(own) - len(todo)
        for part, table in zip(todo, self.tables(todo), strict=True):
            write_part(out, part, table, key)
            summary.parts, summary.images = summary.parts + 1, summary.images + len(table)
        summary.missing = key.parts - len(finished_parts(out, key))
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
            labels = [images.targets[index] for index in span] if has_labels else []
            places.clear()
            tables.clear()
            return with_names(table, names, errors, has_labels, labels)

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
        columns = partial(pseudo_label_columns, top=top)
    else:
        if task.has_places:
            raise ValueError(
                f"--out {out}: rows of the task {task.name} would have no places in the pictures: "
                "use --json"
            )
        columns = partial(task.columns, classes=model.classes, top=top)
    key = store_key(model, data, out, top, settings, kind)
    return PredictionJob(model, data, columns, key, settings, watch).write(out)


def pseudo_label_columns(probabilities_nk: Tensor, top: int) -> dict[str, np.ndarray]:
    indices, values = most_probable_classes(probabilities_nk, top)
    return {
        "classes": indices.numpy().astype(np.int32),
        "probabilities": values.numpy().astype(np.float16),
    }


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
        check_tta(model)
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
    return of_files(*find_images(words))


def this_share(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """The rank of this process and the number of processes, by default torchrun's."""
    if (rank is None) != (ranks is None):
        raise ValueError("--rank and --ranks belong together: give both or none")
    if rank is None or ranks is None:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return rank, ranks


def this_device(device: torch.device) -> torch.device:
    """This process's own GPU if torchrun started several processes on a machine."""
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device
