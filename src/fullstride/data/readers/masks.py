"""Pairs of pictures and their maps, by folders or by VOC's lists of names, and what maps say."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from PIL import Image

from fullstride.data.readers.decode import MAX_MEGAPIXELS, OversizedImage, UnreadableImage
from fullstride.data.readers.folder import find_files
from fullstride.data.readers.listing import (
    TEST,
    TRAIN,
    VAL,
    Below,
    FileSizes,
    Listing,
    Sample,
    quote_names,
    read_names,
    read_text,
)
from fullstride.io.writing import check_regular, open_regular

IGNORED = 255  # the class of a pixel that is neither trained on nor scored
MAX_CLASSES = IGNORED
MILLIMETRES = 1000.0  # in a metre


@dataclass(frozen=True)
class MaskFile:
    """The classes of a picture's pixels, in a PNG of one channel or with a palette."""

    root: Path
    name: str  # POSIX path below `root`
    classes: bytes  # of each value from 0 on, `IGNORED` for those that are left out

    def read(self) -> np.ndarray:
        """Classes from 0 on, and `IGNORED`: uint8 (H, W). 255 is `IGNORED` too.

        Raises UnreadableImage for other files, and for a value that has no class.
        """
        values = read_png(self.root / self.name, self.name)
        unknown = (values >= len(self.classes)) & (values != IGNORED)
        if unknown.any():
            raise UnreadableImage(
                self.name,
                f"it has the value {values[unknown].min()}, and the classes are 0 to "
                f"{len(self.classes) - 1}, and {IGNORED} for pixels without one",
            )
        table = np.full(IGNORED + 1, IGNORED, np.uint8)
        table[: len(self.classes)] = np.frombuffer(self.classes, np.uint8)
        return table[values]


@dataclass(frozen=True)
class DepthFile:
    """The depths of a picture's pixels: a PNG in millimetres, or a NumPy array in metres."""

    root: Path
    name: str  # POSIX path below `root`

    def read(self) -> np.ndarray:
        """Metres, 0 where there is no depth: float32 (H, W). Raises UnreadableImage."""
        path = self.root / self.name
        if path.suffix.lower() != ".npy":
            return read_png(path, self.name).astype(np.float32) / np.float32(MILLIMETRES)
        try:
            check_regular(path)
            metres = np.array(np.load(path, mmap_mode="r", allow_pickle=False), np.float32)
        except (OSError, ValueError, TypeError) as error:
            raise UnreadableImage(self.name, f"it is no array of numbers: {error}") from error
        if metres.ndim != 2:
            raise UnreadableImage(self.name, f"its shape is {metres.shape}: use (H, W)")
        return np.where(np.isfinite(metres) & (metres > 0), metres, np.float32(0))


MapFile = MaskFile | DepthFile


def read_png(path: Path, name: str) -> np.ndarray:
    """The values of a PNG as they are stored: uint8, uint16 or int32 (H, W).

    Raises UnreadableImage, also for one of several channels.
    """
    try:
        with warnings.catch_warnings(), open_regular(path) as file:
            warnings.simplefilter("ignore")
            with Image.open(file, formats=("PNG",)) as image:
                if image.width * image.height > 1e6 * MAX_MEGAPIXELS:
                    limit = f"more than {MAX_MEGAPIXELS:g} megapixels"
                    raise OversizedImage(name, f"it has {limit}")
                values = np.asarray(image)
    except UnreadableImage:
        raise
    except Exception as error:  # Pillow raises a dozen kinds on a broken file
        what = getattr(error, "strerror", None) or "it is no whole PNG"
        raise UnreadableImage(name, what) from error
    if values.ndim != 2:
        raise UnreadableImage(
            name, f"it has {values.shape[2]} channels: use one, with a number for each pixel"
        )
    return values.astype(np.uint8) if values.dtype == bool else values


# ---- which map belongs to which picture


VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat"),
    *("chair", "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant"),
    *("sheep", "sofa", "train", "tvmonitor"),
)
ADE_NAMES = "objectInfo150.txt"  # of ADE20K's 150 classes, in the folder of its release
CLASS_NAMES = "classes.txt"  # a name in each line, that of value 0 first
LEFT_OUT = "ignored"  # the name of values in `CLASS_NAMES` that are no class


class MapKind(NamedTuple):
    """How folders of maps are called, and their files."""

    what: str  # for messages
    folders: tuple[str, ...]
    suffixes: tuple[str, ...]


MASKS = MapKind("masks", ("masks", "annotations", "labels"), (".png",))
DEPTHS = MapKind("depth maps", ("depth", "depths"), (".png", ".npy"))
PICTURES = ("images", "rgb")


@dataclass(frozen=True)
class PairedListing:
    """Pictures as a listing, whose targets are empty, and the map of each."""

    listing: Listing
    maps: dict[str, Sample]  # picture -> name and size of its map
    folder: Path  # of the maps of the training


def read_pairs(root: Path, kind: MapKind) -> PairedListing:
    """The pictures below `root` that have a map, by their splits.

    A map has the name of its picture, but for the suffix. For a split, such as train, pictures are
    in images/train, train/images or train, and maps in masks/train or train/masks; without splits
    they are in images and masks. `kind` has other names for masks, and rgb is one for images.

    Raises ValueError in one line.
    """
    if kind is MASKS and (root / "SegmentationClass").is_dir():
        return _read_voc(root)
    splits: dict[str, list[Sample]] = {}
    maps, notes, names, folders = {}, [], {}, {}
    for split, words in (("train", TRAIN), ("val", VAL), ("test", TEST)):
        if not (pair := _pair(root, kind, words)):
            continue
        names[split], folders[split] = pair[0], pair[2]
        splits[split], of_pictures, lacking = _matched(root, *pair[1:], kind)
        maps |= of_pictures
        notes += lacking
    if not splits and (pair := _pair(root, kind, ("",))):
        folders["train"] = pair[2]
        splits["train"], maps, notes = _matched(root, *pair[1:], kind)
    if "train" not in splits:
        raise ValueError(
            f"{str(root)!r} has no pictures with {kind.what} for training: put pictures into "
            f"images/train and {kind.what} of the same names into {kind.folders[0]}/train"
        )
    listing = Listing((), splits, Below(root), names.get("val", ""), notes=tuple(notes))
    return PairedListing(listing, maps, folders["train"])


def _pair(root: Path, kind: MapKind, words: Sequence[str]) -> tuple[str, Path, Path] | None:
    """The name of a split, its folder of pictures and that of maps, if there are both.

    A word of "" is for folders without splits.
    """
    for word, maps, pictures in product(words, kind.folders, PICTURES):
        places = [(f"{pictures}/{word}", f"{maps}/{word}")]
        if word:
            places += [(f"{word}/{pictures}", f"{word}/{maps}"), (word, f"{maps}/{word}")]
        for names in places:
            both = [root / name for name in names]
            if all(each.is_dir() for each in both):
                return word, both[0], both[1]
    return None


class _Matched(NamedTuple):
    samples: list[Sample]
    maps: dict[str, Sample]  # picture -> name and size of its map
    notes: list[str]  # on pictures that have none


def _matched(root: Path, pictures: Path, folder: Path, kind: MapKind) -> _Matched:
    maps = dict(_map_files(root, folder, kind.suffixes))
    below, samples, of_pictures, lacking = pictures.relative_to(root), [], {}, []
    for name, size in find_files(pictures):
        sample = Sample((below / name).as_posix(), (), size)
        if map_file := maps.get(_stem(name)):
            samples.append(sample)
            of_pictures[sample.name] = map_file
        else:
            lacking.append(sample.name)
    if not samples:
        raise ValueError(
            f"no picture in {str(pictures)!r} has one of the {kind.what} in {str(folder)!r}: give "
            "both the same name"
        )
    notes = []
    if lacking:
        notes = [
            f"{len(lacking):,} pictures have no map in {folder.relative_to(root).as_posix()} and "
            f"are left out: {quote_names(lacking)}"
        ]
    return _Matched(samples, of_pictures, notes)


def _map_files(root: Path, folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, Sample]]:
    """The path below `folder` without its suffix, and the file, of each map."""
    for place, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files):
            path = Path(place, file)
            if path.suffix.lower() in suffixes and not file.startswith("."):
                name = path.relative_to(root).as_posix()
                stem = _stem(path.relative_to(folder).as_posix())
                yield stem, Sample(name, (), _size(path))


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))


def _size(path: Path) -> int:
    """Bytes; -1 for a broken link."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


# ---- VOC


def _read_voc(root: Path) -> PairedListing:
    """VOC's folders: lists of names in ImageSets/Segmentation, train or else trainval for training.

    Raises ValueError in one line.
    """
    lists = root / "ImageSets" / "Segmentation"
    files = {split: lists / f"{split}.txt" for split in ("train", "val", "test")}
    files = {split: path for split, path in files.items() if path.is_file()}
    if "train" not in files and (both := lists / "trainval.txt").is_file():
        files = {"train": both, **{s: p for s, p in files.items() if s == "test"}}
    if "train" not in files:
        raise ValueError(f"{str(lists)!r} has neither train.txt nor trainval.txt: add one")
    splits: dict[str, list[Sample]] = {}
    maps: dict[str, Sample] = {}
    size_of = FileSizes(root)
    for split, path in files.items():
        samples = []
        for name in read_names(path):
            picture, mask = f"JPEGImages/{name}.jpg", f"SegmentationClass/{name}.png"
            if split == "test" and size_of(mask) is None:
                continue  # the masks of some years were never released
            for each in (picture, mask):
                if size_of(each) is None:
                    raise ValueError(f"{str(path)!r} names {name!r}, but there is no {each}")
            samples.append(Sample(picture, (), size_of(picture) or 0))
            maps[picture] = Sample(mask, (), size_of(mask) or 0)
        if samples:
            splits[split] = samples
    if "train" not in splits:
        raise ValueError(f"{str(files['train'])!r} names no picture: add some")
    return PairedListing(Listing((), splits, Below(root)), maps, root / "SegmentationClass")


# ---- names of classes


def class_names(root: Path, folder: Path) -> tuple[str, ...]:
    """The name of each value from 0 on; () where no file says it. Raises ValueError.

    `LEFT_OUT` is that of values that are no class. `folder` has the maps of the training.
    """
    for place in (folder, folder.parent, root):
        if (path := place / CLASS_NAMES).is_file():
            return _names(path)
    if (root / ADE_NAMES).is_file():
        return (LEFT_OUT, *_ade_names(root / ADE_NAMES))
    return VOC_CLASSES if folder.name == "SegmentationClass" else ()


def _names(path: Path) -> tuple[str, ...]:
    names = tuple(line.strip() for line in read_text(path).splitlines())
    if {*names} <= {LEFT_OUT} or len(names) > MAX_CLASSES:
        raise ValueError(f"{str(path)!r} has {len(names)} lines: name 1 to {MAX_CLASSES} classes")
    if not all(names):
        raise ValueError(f"{str(path)!r}: line {names.index('') + 1} is empty: give a name")
    counts = Counter(name for name in names if name != LEFT_OUT)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"{str(path)!r} has {quote_names(twice)} twice: give each class its name")
    return names


def _ade_names(path: Path) -> tuple[str, ...]:
    """The first name of each of the 150 classes. Raises ValueError."""
    lines = read_text(path).splitlines()[1:]
    names = [line.split("\t")[-1].split(",")[0].strip() for line in lines if line.strip()]
    # several classes have one first name, such as "screen"
    return tuple(
        f"{name} {names[:index].count(name) + 1}" if name in names[:index] else name
        for index, name in enumerate(names)
    )
