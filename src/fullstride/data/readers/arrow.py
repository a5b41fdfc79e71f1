"""How is an image read from arrow files? As an undecoded row of `datasets`."""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullstride.data.readers.decode import UnreadableImage
from fullstride.storage import open_regular

END = b"\xff\xff\xff\xff\0\0\0\0"  # of an arrow stream; without it a shorter one is read silently


@dataclass(frozen=True)
class Rows:
    """Function from an image's name to its bytes, or to its file below `folder`.

    Each process maps the files into memory when it reads its first row.
    """

    folder: Path
    files: tuple[str, ...]
    column: str
    numbers: Mapping[str, int] = field(repr=False)  # name -> row, counted through all files
    _open: list[Any] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, name: str) -> bytes | Path:
        try:
            if not self._open:
                self._open.append(open_arrow(self.files, self.column))
            cell = self._open[0][self.numbers[name]][self.column]
            data, path = cell, None
            if isinstance(cell, dict):
                data, path = cell.get("bytes"), cell.get("path")
            if isinstance(data, bytes):
                return data
            if not path:
                raise ValueError("its cell is empty")
            file = (self.folder / path).resolve()
            if not file.is_relative_to(self.folder):
                raise ValueError("its cell is a path to a file outside of the dataset's folder")
            if not file.is_file():
                raise ValueError("its cell is a path to no file")
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a circular link
            raise UnreadableImage(name, reason(error)) from error
        return file

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.folder, self.files, self.column, self.numbers)


def open_arrow(files: tuple[str, ...], *columns: str) -> Any:
    """A `datasets.Dataset` of arrow files, mapped into memory; images stay undecoded."""
    from datasets import Dataset, Image, concatenate_datasets

    for file in files:
        with open_regular(Path(file)) as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - len(END)))
            if opened.read() != END:
                raise ValueError(f"{file} is cut short")
    dataset = concatenate_datasets([Dataset.from_file(file) for file in files])
    dataset = dataset.select_columns(list(columns))
    for name, feature in dataset.features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
    return dataset


@contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Without progress bars, log lines or network. Every error becomes one line of ValueError."""
    try:
        with _quiet_and_offline():
            yield
    except Exception as error:  # a dozen kinds on a broken file, some of which wrap the first
        first: BaseException = error
        while first.__cause__:
            first = first.__cause__
        raise ValueError(
            f"cannot read {str(path)!r} ({reason(first)}): copy or save it again"
        ) from error


@contextmanager
def _quiet_and_offline() -> Iterator[None]:
    import datasets
    from datasets import config
    from datasets.utils import logging as log

    bars, level = not datasets.are_progress_bars_disabled(), log.get_verbosity()
    offline = config.HF_HUB_OFFLINE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets.disable_progress_bars()
        log.set_verbosity(logging.CRITICAL)  # errors are reported once, as ValueError
        config.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            config.HF_HUB_OFFLINE = offline
            log.set_verbosity(level)
            if bars:
                datasets.enable_progress_bars()


def sizes_and_paths(column: Any) -> list[tuple[int, str | None]]:
    """The number of bytes of each cell of an arrow column, -1 for none, and its path."""
    import pyarrow as pa
    from pyarrow import compute as functions

    compute: Any = functions  # generated on import, which type checkers cannot see
    data, paths = column, [None] * len(column)
    if pa.types.is_struct(column.type):
        data = compute.struct_field(column, "bytes")
        if column.type.get_field_index("path") >= 0:
            paths = compute.struct_field(column, "path").to_pylist()
    sizes = compute.binary_length(data).to_pylist()
    return [(-1 if size is None else size, path) for size, path in zip(sizes, paths, strict=True)]


def reason(error: BaseException) -> str:
    strerror = getattr(error, "strerror", None)
    return strerror or (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
