"""Reads IDX files, MNIST's format of gray pixels in one file and labels in another; the digits.

A file begins with two zeros, its type (8: bytes) and its number of dimensions, then the sizes as
big-endian 32-bit numbers, then the values. Files may be compressed by gzip.
"""

import gzip
import math
import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fullstride.data.readers.folder import subfolders
from fullstride.data.readers.listing import (
    Listing,
    Sample,
    check_classes,
    quote_names,
    sorted_classes,
)
from fullstride.data.readers.splits import SplitRule, Splits
from fullstride.io.console import count_of, reason, verb_of
from fullstride.io.writing import open_regular

MAX_BYTES = 2**30  # of pixels in a file; MNIST has 47 MB
MAX_SIDE = 4096  # pixels
MAX_DEFLATION = 1032  # the most values that zlib packs into a byte
NAME = re.compile(r"(?:(.+)[-_.])?(train|t10k|test)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
SPLIT_OF = {"train": "train", "t10k": "test", "test": "test"}


@dataclass(frozen=True)
class IdxReader:
    """Maps an image's name to its pixels as bytes. Each process reads the files once."""

    files: dict[str, Path]  # of the images, by split
    _pixels: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, name: str) -> bytes:
        return self.pixels(name).tobytes()

    def pixels(self, name: str) -> np.ndarray:
        """(H, W) of 0..255."""
        split, _, number = name.partition("/")
        return self.of_split(split)[int(number)]

    def of_split(self, split: str) -> np.ndarray:
        """(N, H, W)"""
        if split not in self._pixels:
            self._pixels[split] = read_idx(self.files[split], 3)
        return self._pixels[split]

    def picture(self, name: str) -> Image.Image:
        return Image.fromarray(self.pixels(name))

    def __reduce__(self) -> tuple[Any, ...]:
        return IdxReader, (self.files,)


def holds_idx(folder: Path) -> bool:
    """Whether a folder has a file of training images, and no subfolders."""
    return "train" in idx_files(folder, "images") and not subfolders(folder)


def idx_files(folder: Path, kind: str) -> dict[str, Path]:
    """The file of "images" or "labels" of each split; the uncompressed one if there are both."""
    files = {}
    for path in sorted(folder.iterdir(), reverse=True):  # the uncompressed file comes last
        if (match := NAME.fullmatch(path.name)) and match[3] == kind:
            files[SPLIT_OF[match[2]]] = path
    return files


def read_idx_folder(folder: Path) -> Listing:
    """The images of a folder of IDX files; class names are the labels of the training images.

    If a file is there with and without compression, the uncompressed one is read. Raises ValueError
    in one line.
    """
    names = filter(None, (NAME.fullmatch(path.name) for path in folder.iterdir()))
    if len(prefixes := {name[1] or "" for name in names}) > 1:
        raise ValueError(
            f"{str(folder)!r} has several data sets, {quote_names(sorted(prefixes))}: put each "
            "into a folder of its own"
        )
    images, of_labels = idx_files(folder, "images"), idx_files(folder, "labels")
    reader, labels = IdxReader(images), {}
    for split, path in images.items():
        if split not in of_labels:
            raise ValueError(f"{str(path)!r} has no file of labels beside it: add {split} labels")
        counts = [idx_sizes(each, n)[0] for each, n in ((path, 3), (of_labels[split], 1))]
        if counts[0] != counts[1]:  # before either file is read whole
            raise ValueError(
                f"{str(path)!r} has {count_of(counts[0], 'image')}, but there "
                f"{verb_of(counts[1], 'are')} {count_of(counts[1], 'label')}: copy both again"
            )
        labels[split] = read_idx(of_labels[split], 1).tolist()
    classes = sorted_classes(map(str, labels["train"]))
    if unknown := {str(each) for values in labels.values() for each in values} - {*classes}:
        raise ValueError(
            f"{str(folder)!r} has the labels {quote_names(sorted(unknown))}, which the training "
            "images lack: remove them"
        )
    check_classes(repr(str(folder)), classes, "add a second one")
    targets = {int(name): target for target, name in enumerate(classes)}
    splits = {
        split: [
            Sample(f"{split}/{number:05}", targets[label], reader.pixels(f"{split}/0").size)
            for number, label in enumerate(labels[split])
        ]
        for split in sorted(images, key=list(SPLIT_OF.values()).index)
    }
    listing = Listing(classes, splits, reader, channels=1, mirror=False, read=reader.picture)
    return listing.at(folder)


@contextmanager
def _opened(path: Path, dimensions: int) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The sizes in the header of an IDX file, and the stream of values. Raises ValueError."""
    try:
        with open_regular(path) as file:
            stream: Any = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            head = stream.read(4 + 4 * dimensions)
            if head[:4] != bytes([0, 0, 8, dimensions]) or len(head) < 4 + 4 * dimensions:
                raise ValueError(f"it is no IDX file of bytes in {dimensions} dimensions")
            sizes = struct.unpack(f">{dimensions}I", head[4:])
            size, file_bytes = math.prod(sizes), os.fstat(file.fileno()).st_size
            if not size or size > MAX_BYTES or any(side > MAX_SIDE for side in sizes[1:]):
                raise ValueError(f"its sizes are {' x '.join(map(str, sizes))}")
            if size > file_bytes * (MAX_DEFLATION if path.suffix == ".gz" else 1):
                raise ValueError(f"it is cut short, {file_bytes:,} bytes for {size:,} values")
            yield sizes, stream
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"cannot read {str(path)!r} ({reason(error)}): copy it again") from None


def idx_sizes(path: Path, dimensions: int) -> tuple[int, ...]:
    """The sizes in the header of an IDX file. Raises ValueError in one line."""
    with _opened(path, dimensions) as (sizes, _):
        return sizes


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The values of an IDX file with one (N) or three dimensions (N, H, W).

    Only the size in the header is read, which is limited. Raises ValueError in one line.
    """
    with _opened(path, dimensions) as (sizes, stream):
        size = math.prod(sizes)
        data = stream.read(size + 1)
        if len(data) != size:
            difference = "is cut short" if len(data) < size else "has bytes after its last one"
            raise ValueError(f"it {difference}, of {size:,}")
    return np.frombuffer(data, np.uint8).reshape(sizes)


# ---- the digits of the package, split by their writers
#
# 1,797 gray handwritten digits of 8 x 8 pixels, the test set of "Optical Recognition of Handwritten
# Digits" by E. Alpaydin and C. Kaynak (UCI machine learning repository, CC BY 4.0), unchanged from
# scikit-learn, which redistributes it.


DIGITS = "digits"  # the name of the data set in the package
DIGIT_CLASSES = tuple("0123456789")


def split_digits(rule: SplitRule) -> Splits:
    """Split by position: the last 500 were written by other people."""
    if rule.group:
        raise ValueError(f"group {rule.group!r}: the digits have none; leave it out")
    if rule.test:
        raise ValueError(f"test {rule.test}: the digits have a test already; leave the share out")
    samples = [Sample(f"digits/{i:04}", int(k), 64) for i, k in enumerate(_digit_arrays()[1])]
    pool, test = samples[:1297], samples[1297:]
    count = 260 if rule.val is None else round(rule.val * len(pool))
    if rule.val:
        count = min(max(1, count), len(pool) - 1)
    train, val = pool[: len(pool) - count], pool[len(pool) - count :]
    return Splits(train + test, val, []) if rule.test == 0 else Splits(train, val, test)


def read_digit(name: str) -> Image.Image:
    pixels = _digit_arrays()[0][int(name.removeprefix("digits/"))]
    return Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8))


@cache
def _digit_arrays() -> tuple[np.ndarray, np.ndarray]:
    """Images (1797, 8, 8) of 0..16 and their labels, in scikit-learn's order."""
    with (resources.files("fullstride.data") / "digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        return arrays["images"], arrays["labels"]
