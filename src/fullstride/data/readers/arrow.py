"""How is a picture read from arrow files? Mapped into memory by each process for itself, one cell at a time."""

import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from fullstride.data.readers.decode import UnreadableImage

END = b"\xff\xff\xff\xff\0\0\0\0"  # of an arrow stream; one cut between two batches is read without a word otherwise


@dataclass(frozen=True)
class Cells:
    """Gives a picture's bytes, or its file below `folder`, by its name. Each process maps the files for itself."""

    folder: Path
    files: tuple[str, ...]
    column: str
    rows: Mapping[str, int] = field(repr=False)  # by name, counted through all files
    _open: list["_Column"] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, name: str) -> bytes | Path:
        try:
            if not self._open:
                self._open.append(
                    _Column([batch[self.column] for file in self.files for batch in batches(file)])
                )
            cell = self._open[0][self.rows[name]]
            data, path = (
                (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
            )
            if isinstance(data, bytes):
                return data
            if not path:
                raise ValueError("its cell is empty")
            file = (self.folder / path).resolve()
            if not file.is_relative_to(self.folder):
                raise ValueError("its cell is a path to a file outside of the dataset's folder")
            if not file.is_file():
                raise ValueError("its cell is a path to no file")
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # RuntimeError: a link that leads back to itself
            raise UnreadableImage(name, reason(error)) from error
        return file

    def __reduce__(self) -> tuple[Any, ...]:
        return Cells, (self.folder, self.files, self.column, self.rows)


class _Column:
    """The cells of arrow arrays one behind the other."""

    def __init__(self, arrays: list[Any]):
        self.arrays, self.starts = arrays, [0, *accumulate(map(len, arrays))]

    def __getitem__(self, row: int) -> Any:
        number = bisect_right(self.starts, row) - 1
        return self.arrays[number][row - self.starts[number]].as_py()


def sizes_and_paths(column: Any) -> list[tuple[int, str | None]]:
    """How many bytes each cell has, -1 for none, and its path."""
    import pyarrow as pa
    from pyarrow import compute as functions

    compute: Any = functions  # made when it is imported, which type checkers cannot see
    data, paths = column, [None] * len(column)
    if pa.types.is_struct(column.type):
        data = compute.struct_field(column, "bytes")
        if column.type.get_field_index("path") >= 0:
            paths = compute.struct_field(column, "path").to_pylist()
    sizes = compute.binary_length(data).to_pylist()
    return [(-1 if size is None else size, path) for size, path in zip(sizes, paths, strict=True)]


def batches(file: str) -> list[Any]:
    import pyarrow as pa

    with Path(file).open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - len(END)))
        if opened.read() != END:
            raise ValueError(f"{file} is cut short")
    with pa.memory_map(file) as source:  # what is read stays mapped
        return list(pa.ipc.open_stream(source))


def reason(error: BaseException) -> str:
    strerror = getattr(error, "strerror", None)
    return strerror or (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
