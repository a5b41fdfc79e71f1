"""Which class or depth has each pixel? `open_masks` and `open_depths` open pictures with maps."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullstride.data.dataset import DataSet, Images, Source, from_source
from fullstride.data.readers.map_files import (
    IGNORED,
    MAX_CLASSES,
    DepthFile,
    MapFile,
    MaskFile,
    UnreadableImage,
    read_png,
)
from fullstride.data.readers.masks import (
    DEPTHS,
    LEFT_OUT,
    MASKS,
    MapKind,
    PairedListing,
    class_names,
    read_pairs,
)
from fullstride.data.readers.splits import SplitRule


def open_masks(where: str, **how: Any) -> DataSet:
    """The data set at `where`, whose targets are `MaskFile`s: a class for each pixel.

    A folder has pictures in images/ and PNGs of the same names in masks/, whose values are classes
    from 0 on, and 255 for pixels that are neither trained on nor scored. With splits, these are
    images/train and masks/train, train/images and train/masks, or train/ and masks/train, beside
    val and test; else splits are taken by the rules of `open_data`, which consider no classes here.
    images/ may be rgb/, and masks/ annotations/ or labels/.

    The names of the classes are the lines of classes.txt beside the masks or in the folder. Values
    whose line is "ignored" are as 255. Without it, the classes are "0" to the largest value of the
    training. A release of ADE20K, with images/training, annotations/training and
    objectInfo150.txt, has the 150 classes of that file; value 0 is ignored.

    A folder with JPEGImages, SegmentationClass and ImageSets/Segmentation is one year of VOC.

    Args:
        where: The data set.
        how: The keyword arguments of `open_data`.

    Raises ValueError in one line.
    """

    def classes_of(root: Path, pairs: PairedListing) -> tuple[str, ...]:
        return class_names(root, pairs.folder) or _numbers(root, pairs)

    def target(root: Path, name: str, classes: tuple[str, ...]) -> MaskFile:
        return MaskFile(root, name, _classes_of_values(classes))

    data = _open(where, MASKS, classes_of, target, how)
    return replace(data, classes=tuple(name for name in data.classes if name != LEFT_OUT))


def open_depths(where: str, **how: Any) -> DataSet:
    """The data set at `where`, whose targets are `DepthFile`s: the depth of each pixel.

    The folders are those of `open_masks`, with depth/ in place of masks/: PNGs of 16 bits in
    millimetres, where 0 is no depth, or .npy files with an array (H, W) of metres, where what is
    not finite or not above 0 is no depth. The one class, "depth", is the output of a network.

    Args:
        where: The data set.
        how: The keyword arguments of `open_data`.

    Raises ValueError in one line.
    """
    return _open(
        where,
        DEPTHS,
        lambda root, pairs: ("depth",),
        lambda root, name, classes: DepthFile(root, name),
        how,
    )


def _open(
    where: str,
    kind: MapKind,
    classes_of: Callable[[Path, PairedListing], tuple[str, ...]],
    target: Callable[[Path, str, tuple[str, ...]], MapFile],
    how: dict[str, Any],
) -> DataSet:
    how = dict(how)
    left_out = how.pop("left_out", ())
    if not where or not Path(where).is_dir():
        raise ValueError(
            f"{where!r} is no folder: give one with pictures in images/ and {kind.what} of the "
            f"same names in {kind.folders[0]}/"
        )
    root = Path(where).resolve()
    pairs = read_pairs(root, kind)
    classes = classes_of(root, pairs)
    listing = replace(pairs.listing, classes=classes)
    data = from_source(Source(root.name, str(root), listing), SplitRule(**how))

    def with_maps(images: Images) -> Images:
        targets = (target(root, pairs.maps[name].name, classes) for name in images.names)
        return replace(images, targets=tuple(targets))

    data = replace(
        data,
        train=with_maps(data.train),
        minival=with_maps(data.minival),
        test=with_maps(data.test),
        fingerprint=_fingerprint(data.fingerprint, pairs),
    )
    return data.without(left_out) if left_out else data


def _fingerprint(of_pictures: str, pairs: PairedListing) -> str:
    maps = sorted((name, *each) for name, each in pairs.maps.items())
    return hashlib.sha256(json.dumps([of_pictures, maps]).encode()).hexdigest()[:16]


def _numbers(root: Path, pairs: PairedListing) -> tuple[str, ...]:
    """ "0" to the largest value of the training; each mask is read once for it."""
    largest = -1
    for sample in pairs.listing.splits["train"]:
        name = pairs.maps[sample.name].name
        try:
            values = read_png(root / name, name)
        except UnreadableImage:
            continue  # it is left out where it is used
        largest = max(largest, int(values[values != IGNORED].max(initial=-1)))
    if largest < 0:
        raise ValueError(f"no mask in {str(pairs.folder)!r} has a class: add some")
    if largest >= MAX_CLASSES:
        raise ValueError(
            f"masks in {str(pairs.folder)!r} have values up to {largest}: use at most "
            f"{MAX_CLASSES} classes from 0 on, and {IGNORED} for pixels without one"
        )
    return tuple(map(str, range(largest + 1)))


def _classes_of_values(names: tuple[str, ...]) -> bytes:
    """The class of each value: those that are not left out, in their order."""
    left_out = [name == LEFT_OUT for name in names]
    return bytes(
        IGNORED if out else value - sum(left_out[:value]) for value, out in enumerate(left_out)
    )
