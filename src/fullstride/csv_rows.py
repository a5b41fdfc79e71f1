"""How is a user's table read? Each row becomes an object, and an error names file and line."""

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import TypeVar

from fullstride.storage import read_regular

T = TypeVar("T")


def read_rows(
    path: Path, row_of: Callable[[Mapping[str, str]], T], columns: str, most: int
) -> list[T]:
    """What `row_of` makes of each row of a CSV file with a header and at most `most` bytes.

    `columns` says in words what the file must have. Raises ValueError, in one line with it, for a
    file that is not a table, has no rows, or lacks a column that `row_of` looks up, and with the
    number of the line where `row_of` raises ValueError.
    """
    try:
        lines = read_regular(path, most).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8: give columns {columns}") from None
    reader = csv.DictReader(lines, restval="", skipinitialspace=True)
    rows: list[T] = []
    try:
        for row in reader:
            rows.append(row_of(row))
    except KeyError as error:
        own = ", ".join(map(shortened, reader.fieldnames or ()))
        raise ValueError(
            f"{path} has the columns {own} and lacks {error}: give columns {columns}, separated "
            "by commas"
        ) from None
    except (ValueError, csv.Error) as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: {error}: give columns {columns}"
        ) from None
    if not rows:
        raise ValueError(f"{path} has no line below its header: give columns {columns}")
    return rows
