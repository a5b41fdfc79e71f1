"""Which labels do images have? `open_labels` opens data whose images have any number of them."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullstride.data.dataset import DataSet, from_listing, open_place
from fullstride.data.readers.csv_table import SUFFIXES as TABLES
from fullstride.data.readers.csv_table import find_table
from fullstride.data.readers.label_table import read_label_table
from fullstride.data.readers.splits import SplitRule


def open_labels(where: str, **how: Any) -> DataSet:
    """The data set at `where`, whose targets are sorted tuples of the indices of all labels.

    An image without labels has the target (). It is a negative example of all classes.

    A table is a .csv or .tsv file with the columns path and labels, and optionally split. A cell
    has any number of labels, separated by ; | , or spaces: which one is read from the table, or
    written behind its name, "photos.csv?separator=;". Without a column of labels, every other one
    is a class, with 1 (true, yes) or 0 (false, no, nothing). Rows of one image are joined.

    What else `open_data` opens has one label for each image.

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
    path, separator = _separator_in(where)
    if Path(path).suffix.lower() in TABLES and not os.path.isdir(path):  # noqa: PTH112
        table = find_table(path)
        place = str(table) if separator is None else f"{table}?separator={separator}"
        return from_listing(table.stem, place, read_label_table(table, separator, rule.group), rule)
    data = open_place(where, rule)
    return data.with_targets(data.classes, lambda label: (label,))


def _separator_in(where: str) -> tuple[str, str | None]:
    """Split TABLE?separator=TEXT into both, unless it is an existing path."""
    path, mark, separator = where.rpartition("?separator=")
    return (path, separator) if mark and not Path(where).exists() else (where, None)
