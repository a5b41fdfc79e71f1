"""Which images does a CSV table name? It has a header and a row for each image: path, label and perhaps split."""

import csv
import stat
from difflib import get_close_matches
from io import StringIO
from pathlib import Path, PurePath
from typing import NamedTuple

from fullstride.data.readers.splits import (
    TEST,
    TRAIN,
    VAL,
    Parts,
    Sample,
    divide,
    in_order,
)

SUFFIXES = (".csv", ".tsv")
DELIMITERS = ",;\t"
COLUMNS = {  # what a column is for, and what its header may say
    "path": ("path", "image", "filename", "file"),
    "label": ("label", "class", "target"),
    "split": ("split",),
}
SPLITS = {word: words[0] for words in (TRAIN, VAL, TEST) for word in words}


class Row(NamedTuple):
    line: int  # of the file, from 1
    name: str  # POSIX path below the table's folder, or absolute
    label: str
    split: str  # "train", "val" or "test"; all "train" in a table without that column


def find_table(where: str) -> Path:
    path = Path(where)
    if path.is_file():
        return path.resolve()
    near = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    close = [str(path.with_name(name)) for name in get_close_matches(path.name, near)]
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "check the path"
    raise ValueError(f"no table {where!r}: {hint}")


def read_table(table: Path, minival: float | None) -> tuple[tuple[str, ...], Parts]:
    """Class names, and the samples of each part in the order of the rows; a row that stands twice counts once.

    Paths begin at the table's folder or are absolute. Parts that the column `split` does not name are cut from the
    training rows, as `open_data` says; val alone is the test.
    """
    rows = _distinct(table, _rows(table))
    classes = in_order(row.label for row in rows if row.split == "train")
    if not classes:
        raise ValueError(f"{str(table)!r} has no row to train on: give some the split 'train'")
    if len(classes) == 1:
        raise ValueError(
            f"{str(table)!r} has one class only, {classes[0]!r}: add images of a second one to train on"
        )
    labels = {name: label for label, name in enumerate(classes)}
    for row in rows:
        if row.label not in labels:
            raise ValueError(
                f"{_at(table, row.line)} has the label {row.label!r}, which no training row has: add or remove it"
            )
    parts: dict[str, list[Sample]] = {"train": [], "val": [], "test": []}
    for row, size in zip(rows, _sizes(table, rows), strict=True):
        parts[row.split].append(Sample(row.name, labels[row.label], size))
    return classes, divide(
        parts.pop("train"), {split: part for split, part in parts.items() if part}, minival
    )


def _at(table: Path, line: int) -> str:
    return f"{str(table)!r} line {line}"


def _text(table: Path) -> str:
    data = table.read_bytes()
    try:
        text = data.decode("utf-8-sig")  # with or without the mark that spreadsheets write first
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{_at(table, line)} is not UTF-8: save the table as UTF-8") from None
    if not text.strip():
        raise ValueError(
            f"{str(table)!r} is empty: give a header with path and label, and a row for each image"
        )
    return text


def _rows(table: Path) -> list[Row]:
    text, line = _text(table), 1
    try:
        places, delimiter = _header(table, text)
        reader = csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
        width, rows = len(next(reader)), []
        line = reader.line_num + 1
        for fields in reader:
            if any(field.strip() for field in fields):
                rows.append(_row(table, line, fields, places, width))
            line = reader.line_num + 1  # a quoted field may hold line breaks
    except csv.Error as error:
        raise ValueError(f"{_at(table, line)} is not CSV ({error}): check its quotes") from None
    if not rows:
        raise ValueError(f"{str(table)!r} has a header and no rows: add one for each image")
    return rows


def _header(table: Path, text: str) -> tuple[dict[str, int], str]:
    """Where each column stands, and the delimiter that makes most of them appear."""
    found = []
    for delimiter in DELIMITERS:
        header = next(csv.reader(StringIO(text, newline=""), delimiter=delimiter))
        said = [field.strip().lower() for field in header]
        places = {}
        for column, words in COLUMNS.items():
            known = [said.index(word) for word in words if word in said]
            if known:
                places[column] = known[0]
        found.append((places, delimiter, header))
    places, delimiter, header = max(found, key=lambda each: (len(each[0]), len(each[2])))
    for column in ("path", "label"):
        if column not in places:
            words = ", ".join(COLUMNS[column])
            raise ValueError(
                f"{_at(table, 1)} has no column {column!r}, but {header}: name one of {words}"
            )
    return places, delimiter


def _row(table: Path, line: int, fields: list[str], places: dict[str, int], width: int) -> Row:
    if len(fields) > width:
        raise ValueError(
            f"{_at(table, line)} has {len(fields)} fields, the header {width}: quote what holds a delimiter"
        )
    told = {
        column: fields[place].strip() if place < len(fields) else None
        for column, place in places.items()
    }
    for column, value in told.items():
        if not value:
            what = f"no {column}" if value is None else f"an empty {column}"
            raise ValueError(f"{_at(table, line)} has {what}: fill it in or remove the row")
    split = told.get("split") or "train"
    if split.lower() not in SPLITS:
        raise ValueError(f"{_at(table, line)} has the split {split!r}: use train, val or test")
    return Row(
        line, _name(table.parent, told["path"] or ""), told["label"] or "", SPLITS[split.lower()]
    )


def _name(root: Path, path: str) -> str:
    """Below the table's folder where that can be said, so that the parts stay when the folder moves."""
    pure = PurePath(path)
    return (pure.relative_to(root) if pure.is_relative_to(root) else pure).as_posix()


def _distinct(table: Path, rows: list[Row]) -> list[Row]:
    first: dict[str, Row] = {}
    for row in rows:
        seen = first.setdefault(row.name, row)
        for word, now, before in (
            ("labels", row.label, seen.label),
            ("splits", row.split, seen.split),
        ):
            if now != before:
                raise ValueError(
                    f"{_at(table, row.line)}: {row.name!r} has two {word}, {before!r} on line {seen.line} and "
                    f"{now!r} here: keep one"
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
            f"{len(missing)} of the {len(rows)} files that {str(table)!r} names are missing, the first is "
            f"{missing[0].name!r} on line {missing[0].line}: paths begin at the table's folder or are absolute"
        )
    return sizes
