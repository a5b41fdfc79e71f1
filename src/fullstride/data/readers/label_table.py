"""Which labels does each image of a table have? A cell with several, or a column for each class."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fullstride.data.readers.csv_table import (
    COLUMNS,
    Header,
    at_line,
    check_columns,
    check_repeated,
    file_sizes,
    find_header,
    read_rows,
    row_values,
    table_text,
)
from fullstride.data.readers.listing import Below, Listing, Sample, quote_names, sorted_classes

LABELS = (*COLUMNS["label"], "labels", "classes", "tags")
SEPARATORS = ";|,"  # of labels in a cell; spaces too, where nothing else separates them
PRESENT, ABSENT = {"1", "1.0", "true", "yes"}, {"0", "0.0", "false", "no"}


class LabelRow(NamedTuple):
    line: int  # of the file, from 1
    name: str  # POSIX path below the table's folder, or absolute
    labels: frozenset[str]
    split: str
    group: str
    absent: frozenset[str] = frozenset()  # classes that the row says the image does not have


def read_label_table(table: Path, separator: str | None = None, group: str = "") -> Listing:
    """The images of a table with all their labels; rows of one image are joined.

    The column of labels has one of the titles `LABELS`, and its cells have any number of labels;
    without such a column each one but path, split and group is a class, with 1 (true, yes) or 0
    (false, no, nothing). Targets are sorted indices of the classes.

    Args:
        table: A .csv or .tsv file; paths are relative to its folder, or absolute.
        separator: Of the labels in a cell. "": each cell is one label. None: the one of
            `SEPARATORS` that the cells have, else a space if the cells are made of fewer words than
            there are different cells, or of numbers.
        group: A column with the groups of `SplitRule`, if there is one of that name.

    Raises ValueError in one line that names the file and the row.
    """
    text = table_text(table)
    header = find_header(table, text, COLUMNS | {"label": LABELS}, group)
    check_columns(table, header, ("path",))
    rows, notes = read_rows(table, text, header.delimiter), []
    if "label" in header.columns:
        if separator is None:
            separator = find_separator(table, {_labels_cell(table, header, *row) for row in rows})
            if separator == " ":
                notes.append(
                    f"labels of {table.name} are separated by spaces; {table.name}?separator= with "
                    "nothing behind it makes each cell one label"
                )
        labelled, classes = _with_cells(table, header, rows, separator), None
    else:
        labelled, classes = _with_columns(table, header, rows)
    joined = _joined(table, labelled)
    train = {label for row in joined if row.split == "train" for label in row.labels}
    if not train:
        raise ValueError(f"{str(table)!r} has no training image with a label: add labels")
    classes = sorted_classes(classes or train)
    if unused := [name for name in classes if name not in train]:
        notes.append(f"no training image has the label {quote_names(unused)}")
    return _listing(table, header, joined, classes, notes)


def _listing(
    table: Path, header: Header, rows: list[LabelRow], classes: tuple[str, ...], notes: list[str]
) -> Listing:
    indices = {name: index for index, name in enumerate(classes)}
    splits: dict[str, list[Sample]] = {"train": [], "val": [], "test": []}
    sizes = file_sizes(table, [(row.line, row.name) for row in rows])
    for row, size in zip(rows, sizes, strict=True):
        if unknown := sorted(row.labels - indices.keys()):
            raise ValueError(
                f"{at_line(table, row.line)} has the label {unknown[0]!r}, which no training row "
                "has: add or remove it"
            )
        target = tuple(sorted(indices[label] for label in row.labels))
        splits[row.split].append(Sample(row.name, target, size))
    return Listing(
        classes,
        {name: split for name, split in splits.items() if split},
        Below(table.parent),
        columns=header.lower,
        groups={row.name: row.group for row in rows} if "group" in header.columns else None,
        notes=tuple(notes),
    )


def find_separator(table: Path, cells: Iterable[str]) -> str:
    """What separates the labels of these different cells; "" if each is one label."""
    cells = [cell for cell in cells if cell]
    signs = [sign for sign in SEPARATORS if any(sign in cell for cell in cells)]
    if len(signs) > 1:
        raise ValueError(
            f"{str(table)!r} has labels with {' and '.join(map(repr, signs))}: name the separator, "
            f"for example {table.name}?separator={signs[0]}"
        )
    if signs:
        return signs[0]
    words = {word for cell in cells for word in cell.split()}
    numbers = all(word.isdecimal() for word in words)
    return " " if numbers or len(words) < len(cells) else ""


def _labels_cell(table: Path, header: Header, line: int, fields: list[str]) -> str:
    index = header.columns["label"]
    if len(fields) <= index:
        raise ValueError(
            f"{at_line(table, line)} has no field {header.titles[index]!r}: leave it empty for an "
            "image without labels, or remove the row"
        )
    if fields[index][:1] == "[" and fields[index][-1:] == "]":
        raise ValueError(
            f"{at_line(table, line)} has the labels {fields[index]!r}: write them as cat;dog"
        )
    return fields[index]


def _with_cells(
    table: Path, header: Header, rows: Iterable[tuple[int, list[str]]], separator: str
) -> list[LabelRow]:
    columns = {name: index for name, index in header.columns.items() if name != "label"}
    labelled, sets = [], {}
    for line, fields in rows:
        cell = _labels_cell(table, header, line, fields)
        if cell not in sets:
            parts = cell.split(separator) if separator else [cell]
            sets[cell] = frozenset(filter(None, map(str.strip, parts)))
        labelled.append(_row(line, sets[cell], row_values(table, line, fields, columns)))
    return labelled


def _with_columns(
    table: Path, header: Header, rows: Iterable[tuple[int, list[str]]]
) -> tuple[list[LabelRow], list[str]]:
    """The rows, and the titles of the columns that are classes.

    A column without a title is not used: pandas writes its index so.
    """
    others = {*header.columns.values()}
    places = {i: title for i, title in enumerate(header.titles) if title and i not in others}
    classes = [*places.values()]
    if not classes:
        raise ValueError(
            f"{at_line(table, 1)} has no labels: add a column 'labels', or one of 0 and 1 for each "
            "class"
        )
    if twice := [title for title in classes if classes.count(title) > 1]:
        raise ValueError(f"{at_line(table, 1)} has two columns {twice[0]!r}: remove one")
    labelled: list[LabelRow] = []
    sets: dict[frozenset[str], frozenset[str]] = {}  # equal ones of several rows are one object
    for line, fields in rows:
        if len(fields) < len(header.titles):
            raise ValueError(
                f"{at_line(table, line)} has {len(fields)} fields, the header "
                f"{len(header.titles)}: fill it in or remove the row"
            )
        present, absent = [], []
        for index, title in places.items():
            if (word := fields[index].lower()) in PRESENT:
                present.append(title)
            elif word in ABSENT:
                absent.append(title)
            elif word:
                raise ValueError(
                    f"{at_line(table, line)} has {fields[index]!r} for {title!r}: use 1 or 0, or "
                    "name the column of labels 'labels'"
                )
        values = row_values(table, line, fields, header.columns)
        both = (frozenset(present), frozenset(absent))
        both = [sets.setdefault(each, each) for each in both]
        labelled.append(_row(line, both[0], values)._replace(absent=both[1]))
    return labelled, classes


def _row(line: int, labels: frozenset[str], values: Mapping[str, str]) -> LabelRow:
    return LabelRow(line, values["path"], labels, values["split"], values["group"])


def _joined(table: Path, rows: Iterable[LabelRow]) -> list[LabelRow]:
    """One row for each image, with the labels of all its rows."""
    images: dict[str, LabelRow] = {}
    for row in rows:
        earlier = images.setdefault(row.name, row)
        check_repeated(table, row, earlier, ("split", "group"))
        labels, absent = row.labels | earlier.labels, row.absent | earlier.absent
        if both := sorted(labels & absent):
            raise ValueError(
                f"{at_line(table, row.line)}: {row.name!r} has {both[0]!r} by one row and not by "
                f"another, the first on line {earlier.line}: keep one"
            )
        images[row.name] = earlier._replace(labels=labels, absent=absent)
    return list(images.values())
