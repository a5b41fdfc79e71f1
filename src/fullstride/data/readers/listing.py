"""Holds the result of readers, names, targets and sizes of images by split, and their helpers."""

import hashlib
import math
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL.Image import Image

from fullstride.data.readers.decode import SUFFIXES, Box, Size, UnreadableImage, image_size
from fullstride.io.console import count_of, verb_of, with_verbs
from fullstride.io.writing import open_regular, read_regular

# ---- objects in images


MOST_SIZES = 200  # most images whose sizes are compared with the annotations
CLIPPED = 0.5  # a note counts the boxes that reach farther beyond the image, in pixels


class Objects(NamedTuple):
    """The objects of an image, a value for each; an image may have none."""

    boxes: tuple[Box, ...]  # in pixels of the upright image
    labels: tuple[int, ...]  # class indices
    # counts neither as missed nor as a detection: "difficult" of Pascal VOC, "iscrowd" of COCO
    difficult: tuple[bool, ...]


NO_OBJECTS = Objects((), (), ())


class Described(NamedTuple):
    """An object as a file of annotations has it."""

    where: str  # the file and the entry, for messages
    box: Box
    label: Any  # the name or the index of its class
    difficult: bool = False


class BoxCheck:
    """Clips boxes to their images, and counts clipped and unusable boxes."""

    def __init__(self) -> None:
        self.problems: Counter[str] = Counter()
        self.first: dict[str, str] = {}  # problem -> place of the first box that has it
        self.stated: list[tuple[Path, Size]] = []  # images, and their sizes by the annotations

    def size(self, path: Path, stated: Size | None = None) -> Size | None:
        """The (width, height) that annotations state, else the file's; None if unreadable."""
        if stated:
            self.stated.append((path, stated))
            return stated
        with suppress(UnreadableImage):  # it is left out and counted where it is decoded
            return image_size(path)
        return None

    def objects(self, size: Size | None, described: Iterable[Described]) -> Objects:
        """The objects of an image of `size`, with boxes clipped to it; none without a size.

        An object is left out if its box has no area there, or repeats another one of its class.
        """
        if size is None:
            return NO_OBJECTS
        usable: dict[tuple[Box, Any], bool] = {}
        for where, box, label, difficult in described:
            edges = zip(box, 2 * size, strict=True)
            left, top, right, bottom = (min(max(edge, 0.0), side) for edge, side in edges)
            inside = left, top, right, bottom
            if not all(map(math.isfinite, box)):
                self._note("{have} no finite edges and {are} left out", where)
            elif box[2] <= box[0] or box[3] <= box[1]:
                self._note("{have} no area and {are} left out", where)
            elif right <= left or bottom <= top:
                self._note("{are} outside of the image and {are} left out", where)
            elif (inside, label) in usable:
                self._note("{stand} in an image twice and {count} once", where)
            else:
                usable[inside, label] = difficult
                if max(abs(a - b) for a, b in zip(box, inside, strict=True)) > CLIPPED:
                    self._note("{reach} beyond the image and {are} clipped", where)
        boxes, labels = tuple(box for box, _ in usable), tuple(label for _, label in usable)
        return Objects(boxes, labels, tuple(usable.values()))

    def _note(self, problem: str, where: str) -> None:
        self.problems[problem] += 1
        self.first.setdefault(problem, where)

    def notes(self) -> tuple[str, ...]:
        """A line on each kind of problem so far, and on images of other sizes than stated."""
        lines = [
            f"{count_of(count, 'box')} {with_verbs(problem, count)}; the first is "
            f"{self.first[problem]}"
            for problem, count in sorted(self.problems.items(), reverse=True)
        ]
        compared, others = self.stated[:: 1 + len(self.stated) // MOST_SIZES], []
        for path, stated in compared:
            with suppress(UnreadableImage):
                if (size := image_size(path)) != stated:
                    sizes = "{} x {}, not {} x {}".format(*size, *stated)
                    others.append(f"{path.name!r}: {sizes}")
        if others:
            lines.append(
                f"{len(others)} of {count_of(len(compared), 'compared image')} "
                f"{verb_of(len(others), 'have')} another size than the annotations say, so that "
                f"boxes may be elsewhere; the first is {others[0]}"
            )
        return tuple(lines)


NO_LABEL = -1  # the class of an image without labels when splits are taken

# Names of splits in folders, tables, shards and datasets.
TRAIN, VAL, TEST = ("train", "training"), ("val", "valid", "validation"), ("test", "testing")
SPLITS = {name: names[0] for names in (TRAIN, VAL, TEST) for name in names}
MAX_TEXT_BYTES = 2**30  # of a table or a list; ten million rows


class Sample(NamedTuple):
    name: str  # POSIX path below the data folder
    # a class index, the sorted indices of all labels, or `Objects`; () of an image with a map, and
    # of unlabelled images the name of the class
    target: Any
    size: int  # bytes; -1 for a broken link


@dataclass(frozen=True)
class Below:
    """The path of a name relative to `root`."""

    root: Path

    def __call__(self, name: str) -> Path:
        return self.root / name


@dataclass(frozen=True)
class Listing:
    """The images of a data set, before splits are taken from the training images."""

    classes: tuple[str, ...]
    splits: Mapping[str, list[Sample]]  # "train", and "val" and "test" where the data have them
    file: Callable[[str], Path | bytes]  # name -> the file of an image, or its bytes
    val_name: str = "val"  # what the data call the validation split
    columns: tuple[str, ...] = ()  # titles of the data's columns, if any
    # name -> value in the column that `SplitRule.group` names; None without such a column
    groups: Mapping[str, str] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()  # what a user should know of the data, a line each
    read: Callable[[str], Image] | None = None  # name -> image, if the images are not in files
    # as in `DataSet`; `at` sets the first two
    name: str = ""
    where: str = ""
    channels: int = 3
    mirror: bool = True
    ignored: Mapping[str, int] = field(default_factory=dict)

    def at(self, place: Path, option: str = "") -> "Listing":
        """The listing of a file or a folder, which `place` with `option` behind it opens again."""
        name = place.stem if place.is_file() else place.name
        return replace(self, name=name, where=f"{place}{option}")

    @property
    def samples(self) -> list[Sample]:
        """The samples of all splits."""
        return [sample for samples in self.splits.values() for sample in samples]


def sorted_classes(classes: Iterable[str]) -> tuple[str, ...]:
    """Distinct class names: by value if all are whole numbers, else alphabetically."""
    names = set(classes)
    if all(name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def labels_of(target: Any) -> tuple[int, ...]:
    """The classes of a sample: one, all its labels, the classes of its objects, or `NO_LABEL`."""
    if isinstance(target, Objects):
        target = tuple(sorted({*target.labels}))
    return (target or (NO_LABEL,)) if isinstance(target, tuple) else (target,)


def target_text(classes: Sequence[str], target: Any) -> str:
    """The class names of a sample, for messages."""
    names = [repr(classes[label]) for label in labels_of(target) if label != NO_LABEL]
    return " with ".join(names) or "no class"


def quote_names(names: list[str]) -> str:
    """The first three names for an error message, and the number of the others."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + rest


def fraction(name: str) -> float:
    """A number in [0, 1) that is a function of the name alone."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48  # 48 bits: the quotient cannot round up to 1


def near_names(path: Path, names: Iterable[str] | None = None) -> str:
    """ "did you mean ...?" with similar `names`, by default of files beside `path`; else ""."""
    if names is None:
        names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    close = [repr(str(path.with_name(name))) for name in get_close_matches(path.name, names)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def check_classes(where: str, classes: Sequence[str], hint: str) -> None:
    """Raise ValueError if there is only one class; `where` begins the message."""
    if len(classes) == 1:
        raise ValueError(f"{where} has one class only, {classes[0]!r}: {hint}")


MANY_CLASSES = 25_000  # more need as many images; ImageNet-21k has 21,841


def check_class_count(where: str, classes: int, images: int) -> None:
    """Raise ValueError for more classes than a network could learn from these images.

    A small file may claim millions of classes, and the network would have an output for each.
    """
    if classes > max(MANY_CLASSES, images):
        raise ValueError(
            f"{where} names {classes:,} classes for {count_of(images, 'image')}: leave out classes "
            f"that no image has; of more than {MANY_CLASSES:,} each needs an image"
        )


def check_once(splits: Mapping[str, Sequence[Sample]]) -> None:
    """Raise ValueError for images in several splits."""
    split_of: dict[str, str] = {}
    for split, samples in splits.items():
        both = [each.name for each in samples if split_of.setdefault(each.name, split) != split]
        if both:
            raise ValueError(
                f"{quote_names(both)} in {split} and in {split_of[both[0]]}: remove from one"
            )


# ---- files


def read_text(path: Path) -> str:
    """The text of a table or a list. Raises ValueError for other encodings."""
    data = read_regular(path, MAX_TEXT_BYTES)
    try:
        return data.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{str(path)!r} line {line} is not UTF-8: save it as UTF-8") from None


def read_names(path: Path) -> list[str]:
    """The first word of each line of a list of images. Raises ValueError."""
    names = [line.split()[0] for line in read_text(path).splitlines() if line.strip()]
    if wrong := [each for each in names if "/" in each or "\\" in each or each.startswith(".")]:
        raise ValueError(f"{str(path)!r} has {wrong[0]!r}: use names of images without folders")
    return names


class FileSizes:
    """Maps names below a folder to the bytes of regular files; None for a missing file.

    Each folder is listed once, so that a million names need no million system calls.
    """

    def __init__(self, root: Path):
        self.root, self.folders = root, {}

    def __call__(self, name: str) -> int | None:
        file = name.rpartition("/")[2]
        folder = name[: len(name) - len(file)]
        if folder not in self.folders:
            self.folders[folder] = self.entries(self.root / folder)
        entries = self.folders[folder]
        try:
            if entries is None:
                status = (self.root / name).stat()
            elif file in entries:
                status = entries[file].stat()
            else:
                return None
        except (OSError, ValueError):  # ValueError: a NUL in the path
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def picture(self, stem: str) -> tuple[str, int] | None:
        """The name of the picture `stem` with its suffix, and its bytes; None if it is missing."""
        for suffix in (*SUFFIXES, *map(str.upper, SUFFIXES)):
            if (size := self(stem + suffix)) is not None:
                return stem + suffix, size
        return None

    def entries(self, folder: Path) -> dict[str, os.DirEntry[str]] | None:
        """The entries of a folder by name; None where each file must be looked up."""
        if sys.platform != "linux":  # names that differ in case may be one file
            return None
        try:
            with os.scandir(folder) as entries:
                return {entry.name: entry for entry in entries}
        except PermissionError:  # it may be reached, but not listed
            return None
        except (OSError, ValueError):
            return {}


# ---- images whose files have the same bytes are copies


MAX_COMPARED = 250_000  # images; reading a part of each of more files would take minutes or hours
WHOLE_BYTES = 2**16  # files up to this size are read whole at once
PROBE_BYTES = 2**12  # of larger files, read first at the start, in the middle and at the end


class TooManyImagesError(ValueError):
    """More than `MAX_COMPARED` images have a size in common with another image."""


Copies = Mapping[str, tuple[str, ...]]  # hash of a content -> the names of the images with it


def find_copies(samples: Sequence[Sample], file: Callable[[str], Path | bytes]) -> Copies:
    """The contents that several images share, and the names of these images, in input order.

    Only files of equal sizes are read. A file that cannot be read has no copies.

    Raises TooManyImagesError.
    """
    alike = _several(samples, lambda sample: sample.size if sample.size > 0 else None)
    if (count := sum(len(same_size) for _, same_size in alike)) > MAX_COMPARED:
        raise TooManyImagesError(f"{count:,} images have the size of another one")
    whole, sets = partial(_digest, file, whole=True), []
    for size, same_size in alike:
        if size <= WHOLE_BYTES:
            sets += _several(same_size, whole)
            continue
        for _, same_probe in _several(same_size, partial(_digest, file, whole=False)):
            sets += _several(same_probe, whole)
    order = {sample.name: number for number, sample in enumerate(samples)}
    sets.sort(key=lambda each: order[each[1][0].name])
    return {key: tuple(sample.name for sample in same) for key, same in sets}


def _several(
    samples: Iterable[Sample], key: Callable[[Sample], Any]
) -> list[tuple[Any, list[Sample]]]:
    """Each key that two or more samples share, and the samples; None is no key."""
    by_key: dict[Any, list[Sample]] = {}
    for sample in samples:
        if (value := key(sample)) is not None:
            by_key.setdefault(value, []).append(sample)
    return [(value, each) for value, each in by_key.items() if len(each) > 1]


def _digest(file: Callable[[str], Path | bytes], sample: Sample, *, whole: bool) -> str | None:
    """A hash of the bytes of an image, or of three blocks of them; None if they cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        source = file(sample.name)
        if isinstance(source, bytes):
            digest.update(source)
            return digest.hexdigest()
        with open_regular(source) as opened:
            if whole:
                for block in iter(lambda: opened.read(2**20), b""):
                    digest.update(block)
            else:
                for offset in (0, sample.size // 2, sample.size - PROBE_BYTES):
                    digest.update(os.pread(opened.fileno(), PROBE_BYTES, offset))
    except (OSError, ValueError):  # also UnreadableImage, which is reported when it is decoded
        return None
    return digest.hexdigest()


# ---- images in several class folders are one image with all their labels


def join_copies(listing: Listing, copies: Copies | None = None) -> tuple[Listing, Copies | None]:
    """The images with tuples of all their labels, each once in a split, and the copies.

    Images with the same bytes in several classes of a split become one image, the first.
    `copies` come from an earlier call; None: files of equal sizes are compared. If there are too
    many to compare, the result has None and a note.
    """
    notes = listing.notes
    if copies is None:
        try:
            copies = find_copies(listing.samples, listing.file)
        except TooManyImagesError as error:
            notes = (*notes, f"images in several class folders were not searched for: {error}")
    content = {name: key for key, names in (copies or {}).items() for name in names}
    splits: dict[str, list[Sample]] = {}
    joined = 0
    for split, samples in listing.splits.items():
        labels: dict[str, set[int]] = {}  # by content, or by name without copies
        for sample in samples:
            key = content.get(sample.name, sample.name)
            labels.setdefault(key, set()).update({*labels_of(sample.target)} - {NO_LABEL})
        joined += sum(len(labels.get(key, ())) > 1 for key in copies or ())
        splits[split], written = [], set()
        for sample in samples:
            key = content.get(sample.name, sample.name)
            if len(labels[key]) < 2 or key not in written:
                written.add(key)
                splits[split].append(sample._replace(target=tuple(sorted(labels[key]))))
    if joined:
        images, have = count_of(joined, "image"), verb_of(joined, "have")
        notes = (*notes, f"{images} in several classes {have} all labels")
    return replace(listing, splits=splits, notes=notes), copies
