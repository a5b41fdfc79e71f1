"""Which labels do images have? `open_labels` opens data whose images have any number of them."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullstride.data.dataset import DIGITS, DataSet, Source, digits, from_source, open_source
from fullstride.data.readers.coco import coco_files, read_coco_labels
from fullstride.data.readers.csv_table import SUFFIXES as TABLES
from fullstride.data.readers.csv_table import find_table
from fullstride.data.readers.joined_labels import join_copies
from fullstride.data.readers.label_table import read_label_table
from fullstride.data.readers.splits import SplitRule


def open_labels(where: str, **how: Any) -> DataSet:
    """The data set at `where`, whose targets are sorted tuples of the indices of all labels.

    An image without labels has the target (). It is a negative example of all classes.

    A table is a .csv or .tsv file with the columns path and labels, and optionally split. A cell
    has any number of labels, separated by ; | , or spaces: which one is read from the table, or
    written behind its name, "photos.csv?separator=;". Without a column of labels, every other one
    is a class, with 1 (true, yes) or 0 (false, no, nothing). Rows of one image are joined.

    A folder with `annotations/instances_train2017.json` and the like, or with
    `train/_annotations.coco.json`, or such a .json file, is in COCO's format: the labels of an
    image are the categories of its annotations. Images are in a folder of the split's name, in
    images/, or beside the annotations.

    What else `open_data` opens has one label for each image, but images with the same bytes in
    several class folders are one, with all their labels.

    Splits are taken by the rules of `open_data`. Where these consider the class of an image, it is
    its rarest label, of the labels of all images that splits are taken from: frequent labels are in
    every split anyhow. Images without labels are a class of their own.

    Args:
        where: The data set.
        how: The keyword arguments of `open_data`.

    Raises ValueError in one line.
    """
    left_out = how.pop("left_out", ())
    data = _open(where, SplitRule(**how))
    splits = (data.train, data.minival, data.test)
    if count := sum(not target for images in splits for target in images.targets):
        data = replace(data, notes=(*data.notes, f"{count:,} images have no label"))
    return data.without(left_out) if left_out else data


def _open(where: str, rule: SplitRule) -> DataSet:
    if where == DIGITS:
        data = digits(rule)
        return data.with_targets(data.classes, lambda label: (label,))
    path, separator = _separator_in(where)
    if Path(path).suffix.lower() in TABLES and not os.path.isdir(path):  # noqa: PTH112
        table = find_table(path)
        place = str(table) if separator is None else f"{table}?separator={separator}"
        listing = read_label_table(table, separator, rule.group)
        return from_source(Source(table.stem, place, listing), rule)
    if files := coco_files(Path(where)):
        place = Path(where).resolve()
        return from_source(Source(place.stem, str(place), read_coco_labels(files)), rule)
    source = open_source(where, rule.group)
    if source.read:  # pixels without files, each image once
        data = from_source(source, rule)
        return data.with_targets(data.classes, lambda label: (label,))
    listing, copies = join_copies(source.listing, rule.copies)
    data = from_source(replace(source, listing=listing), replace(rule, copies=copies))
    return replace(data, rule=replace(data.rule, copies=copies))


def _separator_in(where: str) -> tuple[str, str | None]:
    """Split TABLE?separator=TEXT into both, unless it is an existing path."""
    path, mark, separator = where.rpartition("?separator=")
    return (path, separator) if mark and not Path(where).exists() else (where, None)
