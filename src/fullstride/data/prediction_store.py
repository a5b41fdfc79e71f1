"""Stores predictions in Parquet, a row for each image, with the arguments that made them.

A store is a folder of parts or, for few images, one file. Every file has the JSON of the store's
`StoreKey` in its metadata, under `METADATA`, and rows for consecutive images of the data.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fullstride.io import records
from fullstride.io.console import count_of, reason
from fullstride.io.writing import Output, atomic_write, check_output, open_regular

if TYPE_CHECKING:
    import pyarrow as pa

METADATA = b"fullstride"
# In the folder of a store. Readers of folders, such as pandas', skip names that begin like that.
KEY = "_predictions.json"
PART = re.compile(r"part-(\d{6,12})\.parquet")
MAX_HEADER_BYTES = 2**26  # of Parquet's metadata in a file


@dataclass(frozen=True, kw_only=True)
class StoreKey:
    """What determines the content of a store."""

    format: Literal["fullstride predictions 1"] = "fullstride predictions 1"
    kind: Literal["predictions", "pseudo_labels"]
    model: str  # name
    fingerprint: str  # of the model's weights and preprocessing
    task: str
    classes: tuple[str, ...]
    has_class_names: bool  # whether `classes` are more than numbers
    where: str  # the data; "" for a list of files
    data: str  # fingerprint of the images' names and sizes
    images: records.PositiveInt
    part_images: records.PositiveInt
    arguments: Mapping[str, str]  # of the command, as far as they change the columns

    @property
    def parts(self) -> int:
        return -(-self.images // self.part_images)

    def rows(self, part: int) -> range:
        """The images of a part."""
        return range(part * self.part_images, min(self.images, (part + 1) * self.part_images))


KEY_RECORD = records.Record(
    StoreKey,
    "the key of predictions",
    ("format", "fingerprint", "part_images"),
    "give what `fullstride predict --out` wrote",
)


def pyarrow() -> Any:
    """Import pyarrow. Raises ValueError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            "files of predictions need pyarrow: pip install 'fullstride[parquet]'"
        ) from None
    return pyarrow


def is_store_file(path: Path) -> bool:
    """Whether a file has predictions of fullstride."""
    try:
        read_key(path)
    except ValueError:
        return False
    return True


# Endings of files that are not written, which are no names of folders either.
OTHER_FILES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".xlsx")
FILE_OUTPUT = Output("predictions of fullstride", ".parquet", is_store_file)


def is_file(out: Path) -> bool:
    """Whether `out` names a store of one file."""
    return out.suffix.lower() == ".parquet" and not out.is_dir()


def check_store(out: Path) -> None:
    """Raise ValueError or PermissionError if a store cannot be written; writes nothing."""
    if is_file(out):
        check_output(out, FILE_OUTPUT)
        return
    if out.suffix.lower() in OTHER_FILES and not out.exists():
        raise ValueError(
            f"{out} would be a folder of parquet files: give a name that ends in .parquet, or the "
            "name of a folder"
        )
    check_output(out / KEY, KEY_RECORD.output)
    if out.is_dir() and not (out / KEY).exists():
        files = sorted(each.name for each in out.iterdir())
        if files:
            raise ValueError(
                f"{out} is a folder with other files in it, such as {files[0]}: give another --out"
            )


def create_or_resume(out: Path, key: StoreKey) -> None:
    """Write the key of a folder. Raises ValueError if the folder has another key."""
    check_store(out)
    if (out / KEY).exists():
        refuse_other(out, read_key(out), key)
        return
    KEY_RECORD.save(out / KEY, key)


def refuse_other(path: Path, there: StoreKey, now: StoreKey) -> None:
    """Raise ValueError, in one line, if two keys make different rows."""
    for each in fields(StoreKey):
        if each.name in ("model", "where"):  # may have moved
            continue
        old, new = getattr(there, each.name), getattr(now, each.name)
        if old != new:
            what = {"fingerprint": "the model", "data": "the images"}.get(each.name, each.name)
            is_long = what in ("the model", "the images", "classes")
            values = "" if is_long else f" ({old}, now {new})"
            raise ValueError(
                f"{path} has other predictions: {what} differs{values}; give another --out, or the "
                "same arguments"
            )


def read_key(path: Path) -> StoreKey:
    """The key of a folder or a file. Raises ValueError, in one line, for anything else."""
    if path.is_dir():
        return KEY_RECORD.load(path / KEY)
    with _opened(path) as file:
        return _key_of(file)


def _key_of(file: Any) -> StoreKey:
    text = (file.schema_arrow.metadata or {}).get(METADATA)
    if text is None or len(text) > records.MAX_JSON_BYTES:
        raise ValueError("it was not written by `fullstride predict`")
    return records.from_json(StoreKey, records.parse_json(text, "its key"), "its key")


def part_path(out: Path, part: int) -> Path:
    return out / f"part-{part:06}.parquet"


def finished_parts(out: Path, key: StoreKey) -> set[int]:
    """The numbers of the parts in a folder. Raises ValueError for a damaged or foreign part."""
    done = set()
    for path in sorted(out.iterdir()) if out.is_dir() else ():
        if match := PART.fullmatch(path.name):
            part = int(match[1])
            with _opened(path) as file:
                refuse_other(path, _key_of(file), key)
                if part >= key.parts or file.metadata.num_rows != len(key.rows(part)):
                    raise ValueError("its number of rows is wrong")
            done.add(part)
    return done


def metadata(key: StoreKey) -> dict[bytes, bytes]:
    """The metadata for the schema of a file."""
    return {METADATA: records.to_json(key).encode()}


def write_part(out: Path, part: int, table: "pa.Table", key: StoreKey) -> None:
    write_file(part_path(out, part), iter([table]), table.schema, key)


def write_file(out: Path, tables: Iterator["pa.Table"], schema: "pa.Schema", key: StoreKey) -> None:
    """Write a store of one file, with a row group for each of `tables`.

    Raises ValueError if the file has another key.
    """
    if out.exists():
        refuse_other(out, read_key(out), key)
    schema = schema.with_metadata(metadata(key))
    writer = pyarrow().parquet.ParquetWriter
    with atomic_write(out, FILE_OUTPUT) as temporary, writer(temporary, schema) as file:
        for table in tables:
            file.write_table(table.replace_schema_metadata(metadata(key)))


def read_table(path: Path, columns: Sequence[str] | None = None) -> "pa.Table":
    """All rows of a finished store, in the order of the images; by default all columns.

    Raises ValueError, in one line, if a part is missing or damaged or lacks a column.
    """
    pa, key = pyarrow(), read_key(path)
    tables = []
    for each in _finished_files(path, key):
        with _opened(each) as file:
            _check_columns(file, columns or ())
            tables.append(file.read(columns=list(columns) if columns else None))
    try:
        table = pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise ValueError(f"the parts of {path} differ in their columns: {reason(error)}") from None
    if len(table) != key.images:
        rows, images = count_of(len(table), "row"), count_of(key.images, "image")
        raise ValueError(f"{path} has {rows} for {images}: predict again")
    return table


def column_names(path: Path) -> tuple[str, ...]:
    """The columns of a finished store."""
    with _opened(_finished_files(path, read_key(path))[0]) as file:
        return tuple(file.schema_arrow.names)


def read_batches(path: Path, columns: Sequence[str], rows: int) -> Iterator["pa.RecordBatch"]:
    """The rows of a finished store in the order of the images, at most `rows` at a time.

    Raises ValueError as `read_table` does.
    """
    for each in _finished_files(path, read_key(path)):
        with _opened(each) as file:
            _check_columns(file, columns)
            yield from file.iter_batches(rows, columns=list(columns))


def _check_columns(file: Any, columns: Sequence[str]) -> None:
    if missing := {*columns} - {*file.schema_arrow.names}:
        raise ValueError(f"it has no column {', '.join(sorted(missing))}")


def _finished_files(path: Path, key: StoreKey) -> list[Path]:
    """All files of a store. Raises ValueError if a part is missing."""
    if not path.is_dir():
        return [path]
    done = finished_parts(path, key)
    if len(done) < key.parts:
        raise ValueError(
            f"{path} has {len(done):,} of {key.parts:,} parts: run the command again that writes it"
        )
    return [part_path(path, part) for part in range(key.parts)]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a Parquet file. Every error about it becomes a ValueError in one line."""
    pa = pyarrow()
    try:
        names = ("thrift_string_size_limit", "thrift_container_size_limit")
        limits = dict.fromkeys(names, MAX_HEADER_BYTES)
        with open_regular(path) as stream, pa.parquet.ParquetFile(stream, **limits) as file:
            yield file
    except (pa.ArrowException, ValueError, OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"cannot read the predictions in {path}: {reason(error)}") from None
