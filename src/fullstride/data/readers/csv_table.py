"""Which images does a CSV table list? A header, and a row for each image: path, label, split."""

import csv
import stat
from difflib import get_close_matches
from io import StringIO
from pathlib import Path, PurePath
from typing import NamedTuple

from fullstride.data.readers.listing import (
    TEST,
    TRAIN,
    VAL,
    Below,
    Listing,
    Sample,
    sorted_classes,
)
from fullstride.storage import read_regular

SUFFIXES = (".csv", ".tsv")
MAX_TABLE_BYTES = 2**30  # ten million rows
DELIMITERS = ",;\t"
COLUMNS = {  # purpose of a column -> the names that its header may have
    "path": ("path", "image", "filename", "file"),
    "label": ("label", "class", "target"),
    "split": ("split",),
}
SPLITS = {name: names[0] for names in (TRAIN, VAL, TEST) for name in names}


class Row(NamedTuple):
    line: int  # of the file, from 1
    name: str  # POSIX path below the table's folder, or absolute
    label: str
    split: str  # "train", "val" or "test"; all "train" in a table without that column
    group: str  # "" without such a column


def find_table(where: str) -> Path:
    path = Path(where)
    if path.is_file():
        return path.resolve()
    near = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    close = [str(path.with_name(name)) for name in get_close_matches(path.name, near)]
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "check the path"
    raise ValueError(f"no table {where!r}: {hint}")


def read_table(table: Path, group: str = "") -> Listing:
    """The images of a table in the order of the rows, without repeated rows.

    Paths are relative to the table's folder, or absolute. The values of the column `group` are the
    groups, if there is such a column.
    """
    titles, rows = _rows(table, group)
    rows = _distinct(table, rows)
    classes = sorted_classes(row.label for row in rows if row.split == "train")
    if not classes:
        raise ValueError(f"{str(table)!r} has no row to train on: give some the split 'train'")
    if len(classes) == 1:
        raise ValueError(
            f"{str(table)!r} has one class only, {classes[0]!r}: add training images of a "
            "second one"
        )
    labels = {name: label for label, name in enumerate(classes)}
    for row in rows:
        if row.label not in labels:
            raise ValueError(
                f"{_at(table, row.line)} has the label {row.label!r}, which no training row has: "
                "add or remove it"
            )
    splits: dict[str, list[Sample]] = {"train": [], "val": [], "test": []}
    for row, size in zip(rows, _sizes(table, rows), strict=True):
        splits[row.split].append(Sample(row.name, labels[row.label], size))
    return Listing(
        classes,
        {name: split for name, split in splits.items() if split},
        Below(table.parent),
        columns=titles,
        groups={row.name: row.group for row in rows} if group.lower() in titles else None,
    )


def _at(table: Path, line: int) -> str:
    return f"{str(table)!r} line {line}"


def _text(table: Path) -> str:
    data = read_regular(table, MAX_TABLE_BYTES)
    try:
        text = data.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{_at(table, line)} is not UTF-8: save the table as UTF-8") from None
    if not text.strip():
        raise ValueError(
            f"{str(table)!r} is empty: give a header with path and label, and a row for each image"
        )
    return text


def _rows(table: Path, group: str) -> tuple[tuple[str, ...], list[Row]]:
    """The titles of the columns, in lower case, and the rows."""
    text, line = _text(table), 1
    try:
        titles, columns, delimiter = _header(table, text)
        if group.lower() in titles:
            columns["group"] = titles.index(group.lower())
        reader = csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
        width, rows = len(next(reader)), []
        line = reader.line_num + 1
        for fields in reader:
            if any(field.strip() for field in fields):
                rows.append(_row(table, line, fields, columns, width))
            line = reader.line_num + 1  # a quoted field may hold line breaks
    except csv.Error as error:
        raise ValueError(f"{_at(table, line)} is not CSV ({error}): check its quotes") from None
    if not rows:
        raise ValueError(f"{str(table)!r} has a header and no rows: add one for each image")
    return titles, rows


def _header(table: Path, text: str) -> tuple[tuple[str, ...], dict[str, int], str]:
    """All titles and the index of each column, by the delimiter that gives the most of them."""
    candidates = []
    for delimiter in DELIMITERS:
        header = next(csv.reader(StringIO(text, newline=""), delimiter=delimiter))
        titles = [field.strip().lower() for field in header]
        columns = {}
        for column, names in COLUMNS.items():
            indices = [titles.index(name) for name in names if name in titles]
            if indices:
                columns[column] = indices[0]
        candidates.append((columns, delimiter, titles))
    columns, delimiter, titles = max(candidates, key=lambda each: (len(each[0]), len(each[2])))
    for column in ("path", "label"):
        if column not in columns:
            names = ", ".join(COLUMNS[column])
            raise ValueError(
                f"{_at(table, 1)} has no column {column!r}, but {titles}: name one of {names}"
            )
    return tuple(titles), columns, delimiter


def _row(table: Path, line: int, fields: list[str], columns: dict[str, int], width: int) -> Row:
    if len(fields) > width:
        raise ValueError(
            f"{_at(table, line)} has {len(fields)} fields, the header {width}: quote fields with a "
            "delimiter"
        )
    values = {
        column: fields[index].strip() if index < len(fields) else None
        for column, index in columns.items()
    }
    group = values.pop("group", None) or ""
    for column, value in values.items():
        if not value:
            problem = f"no {column}" if value is None else f"an empty {column}"
            raise ValueError(f"{_at(table, line)} has {problem}: fill it in or remove the row")
    split = values.get("split") or "train"
    if split.lower() not in SPLITS:
        raise ValueError(f"{_at(table, line)} has the split {split!r}: use train, val or test")
    return Row(
        line,
        _name(table.parent, values["path"] or ""),
        values["label"] or "",
        SPLITS[split.lower()],
        group,
    )


def _name(root: Path, path: str) -> str:
    """Relative to the table's folder if possible, so that splits stay when the folder moves."""
    pure = PurePath(path)
    return (pure.relative_to(root) if pure.is_relative_to(root) else pure).as_posix()


def _distinct(table: Path, rows: list[Row]) -> list[Row]:
    first: dict[str, Row] = {}
    for row in rows:
        earlier = first.setdefault(row.name, row)
        for word, new, old in (
            ("labels", row.label, earlier.label),
            ("splits", row.split, earlier.split),
            ("groups", row.group, earlier.group),
        ):
            if new != old:
                raise ValueError(
                    f"{_at(table, row.line)}: {row.name!r} has two {word}, {old!r} on line "
                    f"{earlier.line} and {new!r} here: keep one"
                )
    return list(first.values())


def _sizes(table: Path, rows: list[Row]) -> list[int]:
    sizes, missing = [], []
    for row in rows:
        try:
            status = (table.parent / row.name).stat()
        except (OSError, ValueError):  # ValueError: a NUL in the path
            status = None
        if status is None or not stat.S_ISREG(status.st_mode):
            missing.append(row)
        else:
            sizes.append(status.st_size)
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(rows)} files in {str(table)!r} are missing, the first is "
            f"{missing[0].name!r} on line {missing[0].line}: paths are relative to the table's "
            "folder, or absolute"
        )
    return sizes
