"""What does a model predict for any number of images? A store of parts, each written once.

The images are divided into parts of equal size. A process takes every N-th part, and skips those
that are in the store, so that a job that was killed goes on, also with another number of processes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fullstride.data.prediction_store import (
    StoreKey,
    create_or_resume,
    finished_parts,
    is_file,
    pyarrow,
    write_file,
    write_part,
)
from fullstride.data.unlabelled import Unlabelled
from fullstride.deploy.exported import as_utf8
from fullstride.deploy.offline.arrow_columns import Columns, schema, to_table, with_names
from fullstride.deploy.offline.fingerprint import fingerprint, name_of
from fullstride.deploy.offline.outputs import Model, OfflineSettings, outputs
from fullstride.deploy.predict import check_tta
from fullstride.nets.bundle import Bundle

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class Summary:
    """What a call computed, and what is left."""

    images: int = 0  # rows that it wrote
    parts: int = 0
    present: int = 0  # parts of this process that were in the store before
    missing: int = 0  # parts that other processes have not written yet
    skipped: dict[str, str] = field(default_factory=dict)  # unreadable images -> reason


def check_takes_images(model: Model, out: Path) -> None:
    if model.preprocessing.frames:
        raise ValueError(f"--out {out} is for images, and the network takes clips: use --json")


def predict_all(
    model: Model,
    data: Unlabelled,
    out: Path,
    columns: Columns,
    *,
    kind: Literal["predictions", "pseudo_labels"] = "predictions",
    arguments: Mapping[str, str] | None = None,
    settings: OfflineSettings | None = None,
    watch: Callable[[Any], Any] = lambda batches: batches,
) -> Summary:
    """Write the `columns` of the outputs for all images to a store, one row for each image.

    Beside them a row has `path`, `error` (why the image cannot be read, else null) and, where the
    data have labels, `true_label`. A store is a folder of parts, or a file for an `out` that ends
    in .parquet, which one process writes and which is begun again after a stop.

    Args:
        model: A bundle or an exported file.
        data: The images.
        out: The store; one of the same job is continued.
        columns: What is written of the activated outputs of a batch, such as `Task.columns`.
        kind: Of the store.
        arguments: Of `columns`, for the key of the store.
        settings: How it is computed.
        watch: May wrap the batches, to show progress.

    Raises ValueError for a network of clips, and where `out` has something else, or predictions of
    another model, of other images or by other arguments; FloatingPointError where an output is not
    finite.
    """
    check_takes_images(model, out)
    how = settings or OfflineSettings()
    pyarrow()
    if how.tta == "flip":
        check_tta(model)
    key = StoreKey(
        kind=kind,
        model=name_of(model),
        fingerprint=fingerprint(model),
        task=model.task,
        classes=tuple(map(as_utf8, model.classes)),
        has_class_names=not isinstance(model, Bundle) or model.has_class_names,
        where=as_utf8(data.where),
        data=data.fingerprint,
        images=len(data.images),
        part_images=how.part_images,
        arguments={**(arguments or {}), "tta": how.tta},
    )
    if is_file(out):
        if how.ranks > 1:
            raise ValueError(f"{out} is written by one process: give a folder for {how.ranks}")
        return _write_one_file(model, data, out, columns, how, key, watch)
    create_or_resume(out, key)
    done = finished_parts(out, key)
    own = range(how.rank, key.parts, how.ranks)
    todo = [part for part in own if part not in done]
    summary = Summary(present=len(own) - len(todo))
    for part, table in zip(
        todo, part_tables(model, data, todo, columns, how, key, summary, watch), strict=True
    ):
        write_part(out, part, table, key)
        summary.parts, summary.images = summary.parts + 1, summary.images + len(table)
    summary.missing = key.parts - len(finished_parts(out, key))
    return summary


def _write_one_file(
    model: Model,
    data: Unlabelled,
    out: Path,
    columns: Columns,
    how: OfflineSettings,
    key: StoreKey,
    watch: Callable[[Any], Any],
) -> Summary:
    summary = Summary(images=key.images, parts=key.parts)
    first = with_names(schema(model, columns, how.device), [], [], data.has_labels)
    tables = part_tables(model, data, range(key.parts), columns, how, key, summary, watch)
    write_file(out, tables, first.schema, key)
    return summary


def part_tables(
    model: Model,
    data: Unlabelled,
    parts: Iterable[int],
    columns: Columns,
    how: OfflineSettings,
    key: StoreKey,
    summary: Summary,
    watch: Callable[[Any], Any] = lambda batches: batches,
) -> Iterator["pa.Table"]:
    """The rows of `parts`, which are in ascending order; the unreadable ones go into `summary`."""
    parts = list(parts)
    if not parts:
        return
    arrow, skipped, size = pyarrow(), summary.skipped, key.part_images
    images = data.images.subset(index for part in parts for index in key.rows(part))
    empty = schema(model, columns, how.device)
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
        labels = [images.targets[index] for index in span] if data.has_labels else []
        places.clear()
        tables.clear()
        return with_names(table, names, errors, data.has_labels, labels)

    for indices, rows in outputs(model, images, how, skipped, watch):
        for part in range(int(indices[0]) // size, int(indices[-1]) // size + 1):
            while current < part:
                yield finished()
                current += 1
            mine = indices // size == part
            places += indices[mine].tolist()
            tables.append(to_table(columns(rows[torch.from_numpy(mine)])))
    while current < len(parts):
        yield finished()
        current += 1
