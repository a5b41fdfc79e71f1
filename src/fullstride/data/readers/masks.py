"""Reads masks and depth maps: their values, colours and classes."""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from fullstride.data.readers.decode import MAX_MEGAPIXELS, OversizedImage, UnreadableImage
from fullstride.data.readers.folder import FileKind, PairedListing, PairKind, read_pairs
from fullstride.data.readers.listing import (
    Below,
    FileSizes,
    Listing,
    Sample,
    quote_names,
    read_text,
)
from fullstride.data.readers.voc import read_lists
from fullstride.io.console import count_of
from fullstride.io.writing import check_regular, open_regular

IGNORED = 255  # the class of a pixel that is neither trained on nor scored
MAX_CLASSES = IGNORED
MILLIMETRES = 1000.0  # in a metre


@dataclass(frozen=True)
class MaskFile:
    """The classes of a picture's pixels, in a PNG of one channel, with a palette or in colours."""

    root: Path
    name: str  # POSIX path below `root`
    classes: bytes  # class of each value from 0 on; `IGNORED` for values that are left out
    colours: tuple[int, ...] = ()  # of each value, 0xRRGGBB, if the mask is in colours

    def read(self) -> np.ndarray:
        """Classes from 0 on, and `IGNORED`: uint8 (H, W). The value 255 is `IGNORED` too.

        The values of a grey PNG are colours if the classes have greys alone. Raises
        UnreadableImage for other files, and for a value or a colour that has no class.
        """
        greys = all(colour % 0x010101 == 0 for colour in self.colours)
        modes = (*COLOURED, *(GREY if greys else ())) if self.colours else ()
        values = read_png(self.root / self.name, self.name, modes)
        if values.ndim == 3:
            values = _values_of_colours(values, self.colours, self.name)
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


@lru_cache(2)
def _value_of_colour(colours: tuple[int, ...]) -> np.ndarray:
    """A table from every colour 0xRRGGBB to its index in `colours`, or `IGNORED`."""
    values = np.full(2**24, IGNORED, np.uint8)
    values[list(colours)] = range(len(colours))
    return values


def _values_of_colours(pixels_hwc: np.ndarray, colours: tuple[int, ...], name: str) -> np.ndarray:
    """The index of each pixel's colour: (H, W, 3) -> uint8 (H, W). Raises UnreadableImage."""
    values, table = np.empty(pixels_hwc.shape[:2], np.uint8), _value_of_colour(colours)
    for row, pixels in enumerate(pixels_hwc):  # by rows: a whole mask would need 16 times its size
        values[row] = table[pixels.astype(np.uint32) @ np.array([2**16, 2**8, 1], np.uint32)]
    if (others := values == IGNORED).any():
        rgb = " ".join(map(str, pixels_hwc[others][0]))
        raise UnreadableImage(
            name,
            f"it has the colour {rgb}, which the table of colours lacks: add it, as {LEFT_OUT!r} "
            "where it is no class",
        )
    return values


@dataclass(frozen=True)
class DepthFile:
    """The depths of a picture's pixels: a PNG in millimetres, or a NumPy array in metres."""

    root: Path
    name: str  # POSIX path below `root`

    def read(self) -> np.ndarray:
        """Metres, 0 where there is no depth: float32 (H, W). Raises UnreadableImage."""
        path = self.root / self.name
        if path.suffix.lower() != ".npy":
            values = read_png(path, self.name)
            if values.dtype == np.uint8:
                reason = "it has 8 bits or less: save millimetres in 16 bits, or metres as .npy"
                raise UnreadableImage(self.name, reason)
            return values.astype(np.float32) / np.float32(MILLIMETRES)
        try:
            check_regular(path)
            stored = np.lib.format.open_memmap(path, mode="r")
            if np.size(stored) > 1e6 * MAX_MEGAPIXELS:
                raise ValueError(f"it has more than {MAX_MEGAPIXELS:g} million values")
            metres = np.array(stored, np.float32)
        except (OSError, ValueError, TypeError) as error:
            raise UnreadableImage(self.name, f"it is no array of numbers: {error}") from error
        if metres.ndim != 2:
            raise UnreadableImage(self.name, f"its shape is {metres.shape}: use (H, W)")
        return np.where(np.isfinite(metres) & (metres > 0), metres, np.float32(0))


MapFile = MaskFile | DepthFile


@contextmanager
def _opened_png(path: Path, name: str) -> Iterator[Image.Image]:
    """Open a PNG, reading the header only. Every error about it becomes UnreadableImage."""
    try:
        with warnings.catch_warnings(), open_regular(path) as file:
            warnings.simplefilter("ignore")
            with Image.open(file, formats=("PNG",)) as image:
                yield image
    except UnreadableImage:
        raise
    except Exception as error:  # Pillow raises a dozen kinds on a broken file
        what = getattr(error, "strerror", None) or "it is no whole PNG"
        raise UnreadableImage(name, what) from error


def read_png(path: Path, name: str, in_colours: Sequence[str] = ()) -> np.ndarray:
    """The stored values of a PNG: uint8, uint16 or int32 (H, W).

    A PNG of the modes `in_colours` gives its colours, (H, W, 3). Raises UnreadableImage, also for
    other PNGs of several channels.
    """
    with _opened_png(path, name) as image:
        if image.width * image.height > 1e6 * MAX_MEGAPIXELS:
            raise OversizedImage(name, f"it has more than {MAX_MEGAPIXELS:g} megapixels")
        values = np.asarray(image.convert("RGB") if image.mode in in_colours else image)
    if image.mode in in_colours:
        return values
    if values.ndim != 2:
        raise UnreadableImage(
            name, f"it has {values.shape[2]} channels: use one, with a number for each pixel"
        )
    if image.mode == "L":  # Pillow scales the values of 2 and 4 bits to 255
        with open_regular(path) as file:
            bits = file.read(BIT_DEPTH + 1)[BIT_DEPTH]
        return values // np.uint8(255 // (2**bits - 1))
    return values.astype(np.uint8) if values.dtype == bool else values


def is_in_colours(path: Path) -> bool:
    """Whether a mask is a PNG in colours, by its header; False for other files."""
    try:
        with _opened_png(path, path.name) as image:
            return image.mode in COLOURED
    except UnreadableImage:
        return False


BIT_DEPTH = 24  # byte of a PNG
COLOURED, GREY = ("RGB", "RGBA"), ("L", "1")  # Pillow's modes

# ---- the masks of a folder


VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat"),
    *("chair", "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant"),
    *("sheep", "sofa", "train", "tvmonitor"),
)
ADE_NAMES = "objectInfo150.txt"  # of ADE20K's 150 classes, in the folder of its release
CLASS_NAMES = "classes.txt"  # a name in each line, from value 0 on
# File names of colour tables in CamVid, CVAT and others.
COLOUR_TABLES = ("colours.txt", "colors.txt", "label_colors.txt", "labelmap.txt", "class_dict.csv")
VOC_PALETTE = "voc"
LEFT_OUT = "ignored"  # the name of values in `CLASS_NAMES` that are no class


MASKS = PairKind(FileKind("masks", (".png",)), ("masks", "annotations", "labels"))
DEPTHS = PairKind(FileKind("depth maps", (".png", ".npy")), ("depth", "depths"))


def read_masks(root: Path) -> PairedListing:
    """The pictures below `root` that have a mask, by VOC's lists or by folders."""
    is_voc = (root / "SegmentationClass").is_dir()
    return _read_voc(root) if is_voc else read_pairs(root, MASKS)


# ---- VOC


def _read_voc(root: Path) -> PairedListing:
    """Read the masks of VOC's lists in ImageSets/Segmentation, see `read_lists`.

    Raises ValueError in one line.
    """
    lists, masks = root / "ImageSets" / "Segmentation", root / "SegmentationClass"
    listed = read_lists(lists, masks.glob("*.png"))
    if "train" not in listed:
        raise ValueError(f"{str(lists)!r} has neither train.txt nor trainval.txt: add one")
    splits: dict[str, list[Sample]] = {}
    maps: dict[str, Sample] = {}
    size_of = FileSizes(root)
    for split, names in listed.items():
        samples = []
        for name, path in names.items():
            mask = f"SegmentationClass/{name}.png"
            picture, bytes_of_mask = size_of.picture(f"JPEGImages/{name}"), size_of(mask)
            if split == "test" and bytes_of_mask is None:
                continue  # the masks of some years were never released
            if picture is None or bytes_of_mask is None:
                missing = mask if picture else f"JPEGImages/{name}.jpg"
                raise ValueError(f"{str(path)!r} names {name!r}, but there is no {missing}")
            samples.append(Sample(picture[0], (), picture[1]))
            maps[picture[0]] = Sample(mask, (), bytes_of_mask)
        if samples:
            splits[split] = samples
    if "train" not in splits:
        raise ValueError(f"{str(root)!r} has no picture with a mask for training: add some")
    return PairedListing(Listing((), splits, Below(root)), maps, masks)


# ---- names and colours of classes


@dataclass(frozen=True)
class ColourTable:
    """The name and the colour of each class, from value 0 on."""

    names: tuple[str, ...]
    colours: tuple[int, ...]  # 0xRRGGBB


ROWS_OF_COLOURS = (  # the name after the numbers, or before them, where CVAT writes a ":"
    re.compile(r"(?P<rgb>\d{1,3}(?:[\s,;]+\d{1,3}){2})[\s,;]+(?P<name>\S.*)"),
    re.compile(r"(?P<name>[^:]*[^\s,;:])[\s,;:]+(?P<rgb>\d{1,3}(?:[\s,;]+\d{1,3}){2})(?::.*)?"),
)


def read_colours(path: Path) -> ColourTable:
    """A table with a line for each class: red, green and blue from 0 to 255, and its name.

    The name may be first. Lines that begin with # and a first line of titles are skipped. The name
    `LEFT_OUT` is no class. Raises ValueError in one line.
    """
    names, colours = [], []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not (line := line.strip()) or line.startswith("#"):
            continue
        match = next(filter(None, (row.fullmatch(line) for row in ROWS_OF_COLOURS)), None)
        red, green, blue = map(int, re.findall(r"\d+", match["rgb"])) if match else (256, 0, 0)
        if max(red, green, blue) > 255:
            if number == 1 and not any(sign.isdecimal() for sign in line):  # titles
                continue
            raise ValueError(
                f"{str(path)!r} line {number} is {line[:60]!r}: write red, green and blue from 0 "
                "to 255 and the name of a class, as 128 0 0 road"
            )
        assert match
        names.append(match["name"].strip())
        colours.append(red << 16 | green << 8 | blue)
    _check_names(path, names)
    if len({*colours}) < len(colours):
        raise ValueError(f"{str(path)!r} has one colour for two classes: give each its own")
    return ColourTable(tuple(names), tuple(colours))


def voc_colours() -> ColourTable:
    """Pascal VOC's palette: bit 7 of red, green and blue are bits 0, 1 and 2 of a class, and so on.

    The border between objects, which is no class, has the colour of value 255.
    """

    def colour(value: int) -> int:
        rgb = 0
        for bit in range(8):
            for channel, shift in ((0, 16), (1, 8), (2, 0)):
                rgb |= (value >> (3 * bit + channel) & 1) << (shift + 7 - bit)
        return rgb

    numbers = (*range(len(VOC_CLASSES)), IGNORED)
    return ColourTable((*VOC_CLASSES, LEFT_OUT), tuple(map(colour, numbers)))


def find_colours(root: Path, folder: Path, chosen: str) -> ColourTable | None:
    """The colours that the user chose, a file or `VOC_PALETTE`, else the data's table, if any.

    Raises ValueError if the chosen file is missing.
    """
    if chosen == VOC_PALETTE:
        return voc_colours()
    if chosen:
        if not (path := Path(chosen)).is_file():
            raise ValueError(
                f"no table of colours {chosen!r}: give a file with a line such as 128 0 0 road for "
                f"each class, or {VOC_PALETTE} for Pascal VOC's palette"
            )
        return read_colours(path)
    if table := _beside_masks(root, folder, COLOUR_TABLES):
        return read_colours(table)
    return voc_colours() if folder.name == "SegmentationClass" else None


def _beside_masks(root: Path, folder: Path, names: Sequence[str]) -> Path | None:
    paths = (place / name for place in (folder, folder.parent, root) for name in names)
    return next(filter(Path.is_file, paths), None)


def class_names(root: Path, folder: Path) -> tuple[str, ...]:
    """The name of each value from 0 on; () if no file has names. Raises ValueError.

    Values named `LEFT_OUT` are no class. `folder` has the training maps.
    """
    if path := _beside_masks(root, folder, (CLASS_NAMES,)):
        names = tuple(line.strip() for line in read_text(path).splitlines())
        _check_names(path, names)
        return names
    if (root / ADE_NAMES).is_file():
        return (LEFT_OUT, *_ade_names(root / ADE_NAMES))
    return VOC_CLASSES if folder.name == "SegmentationClass" else ()


def _check_names(path: Path, names: Sequence[str]) -> None:
    if {*names} <= {LEFT_OUT} or len(names) > MAX_CLASSES:
        raise ValueError(
            f"{str(path)!r} has {count_of(len(names), 'line')}: name 1 to {MAX_CLASSES} classes"
        )
    if not all(names):
        raise ValueError(f"{str(path)!r}: line {names.index('') + 1} is empty: give a name")
    counts = Counter(name for name in names if name != LEFT_OUT)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"{str(path)!r} has {quote_names(twice)} twice: give each class its name")


def _ade_names(path: Path) -> tuple[str, ...]:
    """The first name of each of the 150 classes. Raises ValueError."""
    lines = read_text(path).splitlines()[1:]
    names = [line.split("\t")[-1].split(",")[0].strip() for line in lines if line.strip()]
    # several classes have the same first name, such as "screen"
    return tuple(
        f"{name} {names[:index].count(name) + 1}" if name in names[:index] else name
        for index, name in enumerate(names)
    )
