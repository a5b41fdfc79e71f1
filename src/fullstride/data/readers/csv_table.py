"""Reads tables of images, CSV with a header: a row has a path, one or more labels, and a split."""

import csv
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from io import StringIO
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from fullstride.data.readers.folder import IMAGES, FileKind
from fullstride.data.readers.listing import (
    SPLITS,
    Below,
    FileSizes,
    Listing,
    Sample,
    check_classes,
    near_names,
    quote_names,
    read_text,
    sorted_classes,
)
from fullstride.data.readers.videos import frames_size
from fullstride.io.console import count_of, counted, verb_of

SUFFIXES = (".csv", ".tsv")
DELIMITERS = ",;\t"
UNUSUAL = re.compile(r"//|/\.(/|$)|/$")  # parts of a path that pathlib leaves out
COLUMNS = {  # purpose of a column -> its possible titles
    "path": ("path", "image", "filename", "file"),
    "label": ("label", "class", "target"),
    "split": ("split",),
}


class Header(NamedTuple):
    titles: tuple[str, ...]  # of all columns
    columns: dict[str, int]  # purpose -> index of the column
    delimiter: str

    @property
    def lower(self) -> tuple[str, ...]:
        return tuple(title.lower() for title in self.titles)


Labels = frozenset[str]
Lines = Iterable[tuple[int, list[str]]]  # the number of a line, and its fields


class Row(NamedTuple):
    line: int  # of the file, from 1
    name: str  # POSIX path below the table's folder, or absolute
    split: str  # "train", "val" or "test"; "train" in a table without a split column
    group: str  # "" in a table without a group column
    labels: Labels
    absent: Labels = frozenset()  # classes that the row denies


def is_table(where: str) -> bool:
    """Whether `where` names a table; the name of a folder may end in .csv too."""
    # a pattern of shards may be too long a name for `Path.is_dir`
    return Path(where).suffix.lower() in SUFFIXES and not os.path.isdir(where)  # noqa: PTH112


def find_table(where: str) -> Path:
    path = Path(where)
    if path.is_file():
        return path.resolve()
    raise ValueError(f"no table {where!r}: {near_names(path) or 'check the path'}")


def read_table(
    table: Path, group: str = "", unseen_classes: bool = False, kind: FileKind = IMAGES
) -> Listing:
    """The images or videos of a table in the order of the rows, without repeated rows.

    Paths are relative to the table's folder, or absolute. The column `group`, if there is one, has
    the groups. With `unseen_classes`, labels that no training row has are the last classes.
    """
    text = table_text(table)
    header = find_header(table, text, COLUMNS, group)
    check_columns(table, header, ("path", "label"))
    lines = counted(read_rows(table, text, header.delimiter), "rows")
    labelled = (_row(table, line, fields, header.columns) for line, fields in lines)
    rows = _joined(table, labelled, ("labels", "split", "group"))
    classes = sorted_classes(each for row in rows if row.split == "train" for each in row.labels)
    if not classes:
        raise ValueError(f"{str(table)!r} has no row to train on: give some the split 'train'")
    check_classes(repr(str(table)), classes, "add training images of a second one")
    if unseen_classes:
        classes += sorted_classes({each for row in rows for each in row.labels}.difference(classes))
    return _listing(table, header, rows, classes, kind, one_label=True).at(table)


def at_line(table: Path, line: int) -> str:
    return f"{str(table)!r} line {line}"


def table_text(table: Path) -> str:
    text = read_text(table)
    if not text.strip():
        raise ValueError(
            f"{str(table)!r} is empty: give a header with path and label, and a row for each image"
        )
    return text


def find_header(
    table: Path, text: str, names: Mapping[str, Sequence[str]], group: str = ""
) -> Header:
    """The header, split by the delimiter that gives the most known columns.

    `names` maps each purpose to the possible titles of its column; `group` is one more column.
    """
    candidates = []
    for delimiter in DELIMITERS:
        try:
            header = next(csv.reader(StringIO(text, newline=""), delimiter=delimiter))
        except csv.Error as error:
            raise _not_csv(table, 1, error) from None
        titles = [field.strip().lower() for field in header]
        columns = {}
        for column, each in names.items():
            indices = [titles.index(name) for name in each if name in titles]
            if indices:
                columns[column] = indices[0]
        if group and group.lower() in titles:
            columns["group"] = titles.index(group.lower())
        titles = tuple(field.strip() for field in header)
        candidates.append(Header(titles, columns, delimiter))
    return max(candidates, key=lambda each: (len(each.columns), len(each.titles)))


def check_columns(table: Path, header: Header, columns: Sequence[str]) -> None:
    for column in columns:
        if column not in header.columns:
            names = ", ".join(COLUMNS[column])
            raise ValueError(
                f"{at_line(table, 1)} has no column {column!r}, but {list(header.lower)}: name one "
                f"of {names}"
            )


def read_rows(table: Path, text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """The line and the fields of each row that is not blank. Raises ValueError without rows."""
    rows, line = [], 1
    reader = csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        width = len(next(reader))
        line = reader.line_num + 1
        for fields in reader:
            if len(fields) > width:
                raise ValueError(
                    f"{at_line(table, line)} has {len(fields)} fields, the header {width}: quote "
                    "fields with a delimiter"
                )
            if any(field.strip() for field in fields):
                rows.append((line, [field.strip() for field in fields]))
            line = reader.line_num + 1  # a quoted field may hold line breaks
    except csv.Error as error:
        raise _not_csv(table, line, error) from None
    if not rows:
        raise ValueError(f"{str(table)!r} has a header and no rows: add one for each image")
    return rows


def _not_csv(table: Path, line: int, error: csv.Error) -> ValueError:
    return ValueError(f"{at_line(table, line)} is not CSV ({error}): check its quotes")


def _row(
    table: Path, line: int, fields: Sequence[str], columns: Mapping[str, int], *labels: Labels
) -> Row:
    """The row of a line; labels are in `labels` (present, absent), or else in the label column."""
    texts = {}
    for column, index in columns.items():
        if value := fields[index] if index < len(fields) else "":
            texts[column] = value
        elif column != "group":
            problem = f"an empty {column}" if index < len(fields) else f"no {column}"
            raise ValueError(f"{at_line(table, line)} has {problem}: fill it in or remove the row")
    split = texts.get("split", "train")
    if split.lower() not in SPLITS:
        raise ValueError(f"{at_line(table, line)} has the split {split!r}: use train, val or test")
    name, labels = _name(table, texts["path"]), labels or (_one_label(texts["label"]),)
    return Row(line, name, SPLITS[split.lower()], texts.get("group", ""), *labels)


@lru_cache(2**16)
def _one_label(name: str) -> Labels:
    return frozenset([name])  # one object for a million rows of a class


def _name(table: Path, path: str) -> str:
    """The path below the table's folder, if it is, so that splits stay when the folder moves."""
    if os.sep == "/" and path[0] not in "/." and not UNUSUAL.search(path):
        return path  # pathlib's result, in a tenth of the time
    root, pure = table.parent, PurePath(path)
    return (pure.relative_to(root) if pure.is_relative_to(root) else pure).as_posix()


def _check_repeated(table: Path, row: Row, earlier: Row, columns: Sequence[str]) -> None:
    """Raise ValueError if two rows of one image differ in one of these fields."""
    for column in columns:
        new, old = getattr(row, column), getattr(earlier, column)
        if new != old:
            if column == "labels":
                column, (new,), (old,) = "label", new, old
            raise ValueError(
                f"{at_line(table, row.line)}: {row.name!r} has two {column}s, {old!r} on line "
                f"{earlier.line} and {new!r} here: keep one"
            )


def _listing(
    table: Path,
    header: Header,
    rows: list[Row],
    classes: tuple[str, ...],
    kind: FileKind = IMAGES,
    notes: Sequence[str] = (),
    one_label: bool = False,
) -> Listing:
    """The samples of the rows; targets are the sorted indices of the labels, or the only index."""
    indices = {name: index for index, name in enumerate(classes)}
    splits: dict[str, list[Sample]] = {"train": [], "val": [], "test": []}
    targets: dict[Labels, Any] = {}  # rows with equal labels share one object
    for row in rows:
        if row.labels in targets:
            continue
        if unknown := sorted(row.labels - indices.keys()):
            raise ValueError(
                f"{at_line(table, row.line)} has the label {unknown[0]!r}, which no training row "
                "has: add or remove it"
            )
        target = tuple(sorted(indices[label] for label in row.labels))
        targets[row.labels] = target[0] if one_label else target
    for row, size in zip(rows, _file_sizes(table, rows, kind), strict=True):
        splits[row.split].append(Sample(row.name, targets[row.labels], size))
    return Listing(
        classes,
        {name: split for name, split in splits.items() if split},
        Below(table.parent),
        columns=header.lower,
        groups={row.name: row.group for row in rows} if "group" in header.columns else None,
        notes=tuple(notes),
    )


def _file_sizes(table: Path, rows: Sequence[Row], kind: FileKind) -> list[int]:
    """The bytes of each row's file. Raises ValueError if files are missing."""
    sizes, missing, size_of = [], [], FileSizes(table.parent)
    for row in rows:
        size = size_of(row.name)
        if size is None and kind.frames:
            size = frames_size(table.parent / row.name) or None
        if size is None:
            missing.append(row)
        else:
            sizes.append(size)
    if missing:
        raise ValueError(
            f"{len(missing)} of the {count_of(len(rows), 'file')} in {str(table)!r} "
            f"{verb_of(len(missing), 'are')} missing, the first is {missing[0].name!r} on line "
            f"{missing[0].line}: paths are relative to the table's folder, or absolute"
        )
    return sizes


# ---- several labels for each image: a cell with several, or a column for each class


LABELS = (*COLUMNS["label"], "labels", "classes", "tags")
SEPARATORS = ";|,"  # of labels in a cell; spaces too, where nothing else separates them
PRESENT, ABSENT = {"1", "1.0", "true", "yes"}, {"0", "0.0", "false", "no"}


def read_label_table(table: Path, separator: str | None = None, group: str = "") -> Listing:
    """The images of a table with all their labels; rows of one image are joined.

    The column of labels has one of the titles `LABELS`, and its cells have any number of labels.
    Without it, every column except path, split and group is a class, with 1 (true, yes) or 0
    (false, no, nothing). Targets are sorted indices of the classes.

    Args:
        table: A .csv or .tsv file; paths are relative to its folder, or absolute.
        separator: The separator of labels in a cell. "": each cell is one label. None: the
            character of `SEPARATORS` in the cells, else a space if the cells have fewer distinct
            words than there are distinct cells, or are numbers.
        group: The name of a column with the groups of `SplitRule`, which may be missing.

    Raises ValueError in one line that names the file and the row.
    """
    option = "" if separator is None else f"?separator={separator}"
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
    return _listing(table, header, joined, classes, notes=notes).at(table, option)


def find_separator(table: Path, cells: Iterable[str]) -> str:
    """The separator of labels in these distinct cells; "" if each cell is one label."""
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
    several = any(len(cell.split()) > 1 for cell in cells)
    return " " if several and (numbers or len(words) < len(cells)) else ""


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


def _with_cells(table: Path, header: Header, rows: Lines, separator: str) -> list[Row]:
    columns = {name: index for name, index in header.columns.items() if name != "label"}
    labelled, sets = [], {}
    for line, fields in counted(rows, "rows"):
        cell = _labels_cell(table, header, line, fields)
        if cell not in sets:
            parts = cell.split(separator) if separator else [cell]
            sets[cell] = frozenset(filter(None, map(str.strip, parts)))
        labelled.append(_row(table, line, fields, columns, sets[cell]))
    return labelled


def _with_columns(table: Path, header: Header, rows: Lines) -> tuple[list[Row], list[str]]:
    """The rows, and the titles of the columns that are classes.

    A column without a title is not used: it is pandas' index.
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
    labelled: list[Row] = []
    sets: dict[Labels, Labels] = {}  # rows with equal labels share one object
    for line, fields in counted(rows, "rows"):
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
        both = (sets.setdefault(each, each) for each in map(frozenset, (present, absent)))
        labelled.append(_row(table, line, fields, header.columns, *both))
    return labelled, classes


def _joined(
    table: Path, rows: Iterable[Row], alike: Sequence[str] = ("split", "group")
) -> list[Row]:
    """One row for each image, with the labels of all its rows, which must agree in `alike`."""
    images: dict[str, Row] = {}
    for row in rows:
        if (earlier := images.setdefault(row.name, row)) is row:
            continue
        _check_repeated(table, row, earlier, alike)
        labels, absent = row.labels | earlier.labels, row.absent | earlier.absent
        if both := sorted(labels & absent):
            raise ValueError(
                f"{at_line(table, row.line)}: {row.name!r} has {both[0]!r} by one row and not by "
                f"another, the first on line {earlier.line}: keep one"
            )
        images[row.name] = earlier._replace(labels=labels, absent=absent)
    return list(images.values())
