"""Where do pictures come from? `open_data` makes a data set of a folder, a table, shards, Hugging Face's or "digits".

The digits travel with the package: 1,797 gray handwritten digits of 8 x 8 pixels, the test set of "Optical Recognition
of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI machine learning repository, CC BY 4.0), unchanged from
scikit-learn, which redistributes it.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from PIL import Image

from fullstride.data.readers.csv_table import SUFFIXES as TABLES
from fullstride.data.readers.csv_table import find_table, read_table
from fullstride.data.readers.decode import UnreadableImage, decode
from fullstride.data.readers.folder import find_folder, read_folder
from fullstride.data.readers.hugging_face import choice_in, holds_dataset, read_dataset
from fullstride.data.readers.splits import Sample, Splits
from fullstride.data.readers.tar_shards import holds_shards, read_shards

__all__ = ["DataSet", "Images", "UnreadableImage", "decode", "open_data"]


@dataclass(frozen=True)
class Images:
    """Pictures in a fixed order, decoded when asked for."""

    names: tuple[str, ...]  # POSIX paths below the data folder
    targets: tuple[Any, ...]  # one for each image: its class as an int, or what a task makes of it
    read: Callable[
        [str], Image.Image
    ]  # a name's picture; must pickle, because loader workers get a copy
    file: Callable[[str], Path | bytes] | None = (
        None  # what it is decoded from, a file or its bytes, where there is one
    )

    def __len__(self) -> int:
        return len(self.names)

    def subset(self, indices: Iterable[int]) -> "Images":
        """The images at `indices`, in that order."""
        chosen = list(indices)
        return replace(
            self,
            names=tuple(self.names[index] for index in chosen),
            targets=tuple(self.targets[index] for index in chosen),
        )

    def picture(self, index: int) -> Image.Image:
        """Upright, of mode "L" or "RGB". Raises UnreadableImage."""
        return self.read(self.names[index])

    def readable(self) -> Iterator[tuple[int, Image.Image]]:
        """Index and picture of each one that can be read, in order."""
        for index in range(len(self)):
            try:
                picture = self.picture(index)
            except UnreadableImage:
                continue
            yield index, picture


@dataclass(frozen=True)
class DataSet:
    """Images to learn from (`train`), to choose by (`minival`) and to report on (`test`)."""

    name: str
    where: str  # what `open_data` finds it by from any working directory
    classes: tuple[str, ...]
    train: Images
    minival: Images
    test: Images
    channels: int  # 1: gray, 3: RGB
    mirror: bool  # whether a picture flipped left to right is still of its class
    fingerprint: str  # of class names, and of each part's names, labels and file sizes
    minival_share: float | None = None  # as it was asked for


def open_data(where: str, *, minival: float | None = None) -> DataSet:
    """The data set at `where`: "digits" (for a folder of that name, "./digits"), a folder, a table or tar shards.

    A folder holds one subfolder per class, or train/ beside val/ (or valid/, validation/), test/ or both, each with
    such subfolders; val/ alone is the test. What is missing is cut from the training images by a hash of their names:
    a tenth for the test, so that no image changes sides when others come or go, and of the rest the share `minival`,
    by default a tenth, but no more than 500 images or a fiftieth, whichever is more.

    A table is a .csv or .tsv file with the columns path and label and perhaps split. Shards are a folder of .tar files
    such as `fullstride pack` writes, or a pattern: `photos-{000000..000007}.tar`, `photos-*.tar`.

    A dataset of Hugging Face is a folder that `save_to_disk` wrote, or one of parquet files. Where several columns fit,
    FOLDER?label=NAME&image=NAME chooses. Needs the extra `hf`.
    """
    if minival is not None and not 0 < minival < 1:
        raise ValueError(
            f"minival {minival}: use a share of the training images above 0 and below 1"
        )
    return replace(_open(where, minival), minival_share=minival)


def _open(where: str, minival: float | None) -> DataSet:
    if where == "digits":
        classes, parts = tuple("0123456789"), _digit_parts(minival)
        return _data_set("digits", where, classes, parts, _read_digit, channels=1, mirror=False)
    folder, choice = choice_in(where)
    if choice:
        return _of_dataset(find_folder(folder), choice, minival)
    path = Path(where)
    if path.suffix.lower() in TABLES and not path.is_dir():
        table = find_table(where)
        return _of_files(table.stem, table, *read_table(table, minival), _Below(table.parent))
    if path.suffix.lower() == ".tar" and not path.is_dir():
        return _of_shards(find_folder(str(path.parent)), path.name, minival)
    root = find_folder(where)
    if holds_shards(root):
        return _of_shards(root, "", minival)
    if holds_dataset(root):
        return _of_dataset(root, {}, minival)
    return _of_files(root.name, root, *read_folder(root, minival), _Below(root))


def _of_files(
    name: str,
    where: Path | str,
    classes: tuple[str, ...],
    parts: Splits,
    file: Callable[[str], Path | bytes],
    channels: int = 3,
    mirror: bool = True,
) -> DataSet:
    return _data_set(
        name, str(where), classes, parts, _Decoded(file, channels), channels, mirror, file
    )


def _of_shards(folder: Path, pattern: str, minival: float | None) -> DataSet:
    index, parts, file = read_shards(folder, pattern, minival)
    return _of_files(
        folder.name, folder / pattern, index.classes, parts, file, index.channels, index.mirror
    )


def _of_dataset(folder: Path, choice: dict[str, str], minival: float | None) -> DataSet:
    where = f"{folder}?{urlencode(choice)}" if choice else folder
    return _of_files(folder.name, where, *read_dataset(folder, choice, minival))


def _data_set(
    name: str,
    where: str,
    classes: tuple[str, ...],
    parts: Splits,
    read: Callable[[str], Image.Image],
    channels: int,
    mirror: bool,
    file: Callable[[str], Path | bytes] | None = None,
) -> DataSet:
    train, minival, test = (
        Images(tuple(s.name for s in p), tuple(s.target for s in p), read, file) for p in parts
    )
    fingerprint = hashlib.sha256(json.dumps([classes, parts]).encode()).hexdigest()[:16]
    return DataSet(name, where, classes, train, minival, test, channels, mirror, fingerprint)


@dataclass(frozen=True)
class _Below:
    """The file of a name below `root`."""

    root: Path

    def __call__(self, name: str) -> Path:
        return self.root / name


@dataclass(frozen=True)
class _Decoded:
    """The picture of a name, decoded from what `file` gives for it."""

    file: Callable[[str], Path | bytes]
    channels: int

    def __call__(self, name: str) -> Image.Image:
        try:
            return decode(self.file(name), self.channels)
        except UnreadableImage as error:
            raise UnreadableImage(name, error.reason) from error


def _digit_parts(minival: float | None) -> Splits:
    """Split by position: the last 500 were written by other people."""
    _, labels = _digit_arrays()
    samples = [Sample(f"digits/{i:04}", int(label), 64) for i, label in enumerate(labels)]
    pool, test = samples[:1297], samples[1297:]
    held_out = 260 if minival is None else min(max(1, round(minival * len(pool))), len(pool) - 1)
    return Splits(pool[:-held_out], pool[-held_out:], test)


def _read_digit(name: str) -> Image.Image:
    images, _ = _digit_arrays()
    return Image.fromarray(
        np.rint(images[int(name.removeprefix("digits/"))] * (255 / 16)).astype(np.uint8)
    )


@cache
def _digit_arrays() -> tuple[np.ndarray, np.ndarray]:
    """Images (1797, 8, 8) of 0..16 and their labels, in scikit-learn's order."""
    with (resources.files("fullstride.data") / "digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        return arrays["images"], arrays["labels"]
