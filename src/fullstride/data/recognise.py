"""Recognises the task of a data set by its files: boxes, masks, depths, labels or classes."""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fullstride.data.dataset import DIGITS
from fullstride.data.readers.csv_table import (
    ABSENT,
    COLUMNS,
    LABELS,
    PRESENT,
    Header,
    find_header,
    is_table,
    read_rows,
    table_text,
)
from fullstride.data.readers.decode import SUFFIXES
from fullstride.data.readers.folder import subfolders
from fullstride.data.readers.listing import SPLITS
from fullstride.data.readers.masks import DEPTHS, MASKS
from fullstride.data.readers.pairs import PICTURES, holds_pairs
from fullstride.data.targets import NoBoxesError, find_boxes, option_in
from fullstride.io.writing import open_regular

CLASSIFY = "classify"  # the task of images with one class each, and of unrecognised data
# Folder names in the layouts of other tasks, which are no classes.
LAYOUT = {*PICTURES, *MASKS.folders, *DEPTHS.folders, *SPLITS, "Annotations", "SegmentationClass"}
LAYOUT |= {"SegmentationObject", "ImageSets", "xml", "xmls"}


class Purpose(NamedTuple):
    """A task, and the part of the data that is for it."""

    task: str
    what: str


def recognise(where: str) -> Purpose:
    """The task that the data at `where` are for, by names of files and columns.

    Raises ValueError, in one line with the flag for each, if the data may be for several tasks.
    """
    if where == DIGITS:
        return Purpose(CLASSIFY, "")
    for option, task in (("separator", "multilabel"), ("colours", "segment")):
        if option_in(where, option)[1] is not None:
            return Purpose(task, f"the option {option!r}")
    if is_table(where):
        return _of_table(Path(where))
    purposes = _of_folder(where)
    if len(purposes) > 1:
        ways = "; or ".join(f"--task {task} for its {what}" for task, what in purposes)
        raise ValueError(f"{where!r} may be for several tasks: give {ways}")
    return purposes[0] if purposes else Purpose(CLASSIFY, "")


def _of_folder(where: str) -> list[Purpose]:
    purposes = []
    with suppress(NoBoxesError):
        purposes.append(Purpose("detect", f"boxes in {find_boxes(where).format}"))
    # a pattern of shards may be too long a name for `Path.is_dir`
    if not os.path.isdir(where):  # noqa: PTH112
        return purposes
    root = Path(where)
    if (root / "SegmentationClass").is_dir() or holds_pairs(root, MASKS):
        purposes.append(Purpose("segment", "pictures with masks of the same names"))
    if holds_pairs(root, DEPTHS):
        purposes.append(Purpose("depth", "pictures with depth maps of the same names"))
    classes = _class_folders(root)
    if purposes and classes:
        purposes.append(Purpose(CLASSIFY, f"class folders, {classes[0]!r} and {classes[1]!r}"))
    if not purposes and not classes and (path := _own_format(root)):
        raise ValueError(
            f"{str(path)!r} is in a labelling tool's own format: export in COCO's, YOLO's or "
            "Pascal VOC's"
        )
    return purposes


def _own_format(root: Path) -> Path | None:
    """A file in CVAT's or Label Studio's own format in a folder; None if there is none."""
    for path in (root / "annotations.xml", *sorted(root.glob("*.json"))):
        start = b"<" if path.suffix == ".xml" else b"["
        with suppress(OSError, ValueError), open_regular(path) as file:
            if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(start):
                return path
    return None


def _class_folders(root: Path) -> list[str]:
    """Two folders of pictures whose names no layout has, in the root or a split; else none."""
    for folder in (root, *(root / name for name in subfolders(root) if name.lower() in SPLITS)):
        classes = []
        for name in subfolders(folder):
            if name not in LAYOUT and _has_pictures(folder / name):
                classes.append(name)
            if len(classes) == 2:
                return classes
    return []


def _has_pictures(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(each.name.lower().endswith(SUFFIXES) for each in entries)


def _of_table(table: Path) -> Purpose:
    """Judge by the columns, and by cells with several labels that other cells have too."""
    if not table.is_file():
        return Purpose(CLASSIFY, "")  # opening it says what is wrong
    text = table_text(table)
    header = find_header(table, text, {**COLUMNS, "label": LABELS})
    if "label" not in header.columns:
        return _of_columns(table, text, header)
    index = header.columns["label"]
    if header.lower[index] not in COLUMNS["label"]:
        return Purpose("multilabel", f"the column {header.titles[index]!r}")
    for sign in ";|":
        if sign == header.delimiter or sign not in text:
            continue
        rows = read_rows(table, text, header.delimiter)
        cells = {fields[index] for _, fields in rows if len(fields) > index}
        labels = {label.strip() for cell in cells for label in cell.split(sign)}
        if len(labels) < len(cells):
            return Purpose("multilabel", f"cells of labels that are separated by {sign}")
    return Purpose(CLASSIFY, "")


def _of_columns(table: Path, text: str, header: Header) -> Purpose:
    """Judge a table without a label column by its first row: columns of labels have 1 or 0."""
    (_, fields), *_ = read_rows(table, text, header.delimiter)
    others = [word.lower() for i, word in enumerate(fields) if i not in header.columns.values()]
    if others and {*others} <= {*PRESENT, *ABSENT, ""}:
        return Purpose("multilabel", "a column for each label")
    return Purpose(CLASSIFY, "")


def check_purpose(where: str) -> None:
    """Raise ValueError, with the command to use, if the data are for another task."""
    task, what = recognise(where)
    if task != CLASSIFY:
        raise ValueError(
            f"{where!r} has {what}, and this command is for images with one class each: train on "
            f"it with fullstride train {where} --task {task} --model NAME --out FOLDER"
        )
