"""Data sets of images with splits: a folder, a table, shards, Hugging Face data or the digits."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Literal

from PIL import Image

from fullstride.data.readers.csv_table import find_table, is_table, read_table
from fullstride.data.readers.decode import UnreadableImage, decode
from fullstride.data.readers.folder import IMAGES, FileKind, find_folder, read_folder
from fullstride.data.readers.hugging_face import choice_in, holds_dataset, read_dataset
from fullstride.data.readers.idx import (
    DIGIT_CLASSES,
    DIGITS,
    holds_idx,
    read_digit,
    read_idx_folder,
    split_digits,
)
from fullstride.data.readers.listing import Listing, Objects, check_class_count
from fullstride.data.readers.shards import holds_shards, read_shards
from fullstride.data.readers.splits import DEFAULT_RULE, SplitRule, TakenSplits, take_splits
from fullstride.nets.preprocessing import WHITE


@dataclass(frozen=True)
class Images:
    """Images in a fixed order with their targets, decoded at each access."""

    names: tuple[str, ...]  # POSIX paths relative to the data folder
    targets: tuple[Any, ...]  # one for each image: a class index, or what a task reads
    read: Callable[[str], Image.Image]  # name -> decoded image; pickled to loader workers
    # name -> the file that `read` decodes, or its bytes; None if there is no file
    file: Callable[[str], Path | bytes] | None = None

    def __repr__(self) -> str:
        return f"Images({len(self):,}: {shortened(self.names)})"

    def __len__(self) -> int:
        return len(self.names)

    def subset(self, indices: Iterable[int]) -> "Images":
        """The images at `indices`, in that order."""
        indices = list(indices)
        return replace(
            self,
            names=tuple(self.names[index] for index in indices),
            targets=tuple(self.targets[index] for index in indices),
        )

    def spaced(self, count: int) -> "Images":
        """At most `count` images, evenly spaced, since images may be sorted by class."""
        count = min(count, len(self))
        return self.subset(index * len(self) // count for index in range(count))

    @property
    def background(self) -> str:
        """The colour of `picture` behind transparent pixels."""
        return self.read.background if isinstance(self.read, Decoded) else WHITE

    def over(self, background: str) -> "Images":
        """The same images with another colour behind transparent pixels."""
        if not isinstance(self.read, Decoded):  # pixels without a file are opaque
            return self
        return replace(self, read=replace(self.read, background=background))

    def picture(self, index: int) -> Image.Image:
        """The image upright, of mode "L" or "RGB". Raises UnreadableImage."""
        return self.read(self.names[index])

    def source(self, index: int) -> Image.Image | Path | bytes:
        """The image's file, undecoded, or the image itself where it has no file."""
        return self.file(self.names[index]) if self.file else self.picture(index)

    def readable(self) -> Iterator[tuple[int, Image.Image]]:
        """Index and image of each readable image, in order."""
        for index in range(len(self)):
            try:
                picture = self.picture(index)
            except UnreadableImage:
                continue
            yield index, picture


@dataclass(frozen=True)
class DataSet:
    """Images for training (`train`), model selection (`val`) and the final score (`test`)."""

    name: str  # the last part of `where`
    where: str  # opens the same data set from any working directory
    classes: tuple[str, ...]  # a name for each output of a network
    train: Images  # to learn from
    val: Images  # to choose epochs and networks by
    test: Images  # none where the data have a validation split of their own, but no test
    channels: int  # 1: gray, 3: RGB
    mirror: bool  # whether a left-right flip keeps the class
    fingerprint: str  # of class names, and of names, targets and file sizes of each split
    # the rule of `open_data` and the copies, so that another call need not read the files
    rule: SplitRule = SplitRule()
    own_splits: tuple[str, ...] = ()  # which of "val" and "test" the data have
    notes: tuple[str, ...] = ()  # what a user should know of the splits, a line each
    # number of files below its folder that are not used, by reason
    ignored: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        splits = {"train": self.train, "val": self.val, "test": self.test}
        images = ", ".join(f"{len(images):,} {name}" for name, images in splits.items())
        return (
            f"DataSet({shortened(self.where)}, classes {len(self.classes):,}: "
            f"{shortened(self.classes)}, images: {images}, channels {self.channels})"
        )

    @property
    def score_split(self) -> Literal["test", "val"]:
        """The split that finished networks are scored on."""
        return "test" if len(self.test) else "val"

    @property
    def val_is_drawn(self) -> bool:
        """Whether validation and training images are alike: drawn by chance, and none left out."""
        return not ("val" in self.own_splits or self.rule.group or self.rule.left_out)

    def labels(self, split: str) -> list[tuple[int, ...]] | None:
        """The classes of each image of a split, one or several; None if targets are not classes."""
        targets = getattr(self, split).targets
        targets = [each.labels if isinstance(each, Objects) else each for each in targets]
        labels = [target if isinstance(target, tuple) else (target,) for target in targets]
        indices = range(len(self.classes))
        valid = all(type(label) is int and label in indices for each in labels for label in each)
        return labels if valid else None

    def check_one_class(self) -> None:
        """Raises ValueError unless the target of each training image is the index of a class."""
        if any(type(target) is not int for target in self.train.targets):
            raise ValueError(
                f"the images of {self.where!r} have other targets than one class each, such as "
                "several labels: use a task that predicts these, as --task multilabel"
            )

    def check_apart(self, out: Path) -> None:
        """Raises ValueError if `out` is among the folders of the classes, and would become one."""
        for folder in out.resolve().parents:
            # other classes than folders may be too long names for `Path.is_dir`
            taken = (os.path.isdir(folder / name) for name in self.classes)  # noqa: PTH112
            if folder.is_relative_to(self.where) and any(taken):
                raise ValueError(
                    f"--out {out} would be taken for images, as each folder in {str(folder)!r} is "
                    "a class: give a folder elsewhere"
                )

    def missing_classes(self, split: str) -> tuple[str, ...]:
        """The classes that no image of a split has; () if targets are not classes."""
        labels = self.labels(split)
        if labels is None:
            return ()
        present = {label for each in labels for label in each}
        return tuple(name for index, name in enumerate(self.classes) if index not in present)

    def map_images(self, change: Callable[[Images], Images]) -> "DataSet":
        """The data set with `change` applied to the images of each split."""
        train, val, test = map(change, (self.train, self.val, self.test))
        return replace(self, train=train, val=val, test=test)

    def over(self, background: str) -> "DataSet":
        """The same data with another colour behind transparent pixels."""
        return self.map_images(lambda images: images.over(background))

    def without(self, names: tuple[str, ...]) -> "DataSet":
        """The data set without these training and validation images; `rule` lists them."""
        if not names:
            return self
        fingerprint, missing = self.fingerprint, {*names}
        for name in names:
            text = f"{fingerprint} {name}".encode("utf-8", "surrogateescape")
            fingerprint = hashlib.sha256(text).hexdigest()[:16]

        def others(images: Images) -> Images:
            return images.subset(i for i, name in enumerate(images.names) if name not in missing)

        rule = replace(self.rule, left_out=(*self.rule.left_out, *names))
        changed = replace(self, fingerprint=fingerprint, rule=rule)
        return replace(changed, train=others(self.train), val=others(self.val))

    def with_targets(self, classes: tuple[str, ...], target: Callable[[Any], Any]) -> "DataSet":
        """The same images, with `target` applied to each target."""

        def changed(images: Images) -> Images:
            return replace(images, targets=tuple(map(target, images.targets)))

        return replace(self.map_images(changed), classes=classes)


def open_data(
    where: str | Path, rule: SplitRule = DEFAULT_RULE, *, unseen_classes: bool = False
) -> DataSet:
    """The data set at `where`: "digits", a folder, a table or tar shards. "./digits" is a folder.

    A folder has one subfolder per class, or train/ beside val/ (or valid/, validation/), test/ or
    both, each with such subfolders. With val/ and without test/ there is no test. Without val/ the
    missing splits are taken from each class of the training images by a hash of their names, so
    that hardly any image changes its split when others are added or removed: a tenth for the test,
    then the share `rule.val` of the rest, by default a tenth, but at most the larger of 500 images
    and a fiftieth. A class of five images or more is in all splits.

    A folder may also have the IDX files of MNIST, `train-images-idx3-ubyte` and so on, or these
    with .gz.

    A table is a .csv or .tsv file with the columns path and label, and optionally split. Shards
    are a folder of .tar files such as `fullstride data pack` writes, or a pattern:
    `photos-{000000..000007}.tar`, `photos-*.tar`.

    A dataset of Hugging Face is a folder written by `save_to_disk`, or one of parquet files. If
    several columns fit, FOLDER?label=NAME&image=NAME selects them. Needs the extra `hf`.

    With `unseen_classes`, val/ and test/, or such rows of a table, may have classes that the
    training images lack; these are the last classes. Raises ValueError in one line.

    Examples:
        >>> import fullstride
        >>> data = fullstride.open_data("digits")
        >>> len(data.train), len(data.val), len(data.test)
        (1037, 260, 500)
    """
    if where == DIGITS:
        data = digits(rule)
    else:
        data = from_listing(open_listing(str(where), rule.group, unseen_classes), rule)
    data.check_one_class()
    return data.without(rule.left_out)


def open_listing(
    where: str, group: str, unseen_classes: bool = False, kind: FileKind = IMAGES
) -> Listing:
    """Open whatever `open_data` opens, except the digits. `group` may be a column of the data.

    Videos are in a folder with one subfolder per class, a table or shards.
    """
    folder, choice = choice_in(where) if kind is IMAGES else (where, {})
    if choice:
        return read_dataset(find_folder(folder), choice, group)
    if is_table(where):
        return read_table(find_table(where), group, unseen_classes, kind)
    if where.lower().endswith(".tar") and not os.path.isdir(where):  # noqa: PTH112
        return read_shards(find_folder(str(Path(where).parent)), Path(where).name, kind)
    root = find_folder(where)
    if holds_shards(root):
        return read_shards(root, "", kind)
    if kind is IMAGES and holds_dataset(root):
        return read_dataset(root, {}, group)
    if kind is IMAGES and holds_idx(root):
        return read_idx_folder(root)
    return read_folder(root, unseen_classes, kind)


def from_listing(listing: Listing, rule: SplitRule) -> DataSet:
    """The images split by `rule`, including the images in `rule.left_out`."""
    check_class_count(repr(listing.where), len(listing.classes), len(listing.samples))
    return _data_set(listing, take_splits(listing, rule))


def digits(rule: SplitRule) -> DataSet:
    """The digits of the package."""
    splits = split_digits(rule)
    listing = Listing(DIGIT_CLASSES, splits._asdict(), Path, channels=1, mirror=False)
    listing = replace(listing, name=DIGITS, where=DIGITS, read=read_digit)
    return _data_set(listing, TakenSplits(splits, rule, own=("val", "test"), notes=()))


def _data_set(listing: Listing, taken: TakenSplits) -> DataSet:
    file = None if listing.read else listing.file
    read = listing.read or Decoded(listing.file, listing.channels)
    train, val, test = (
        Images(tuple(s.name for s in samples), tuple(s.target for s in samples), read, file)
        for samples in taken.splits
    )
    return DataSet(
        listing.name,
        listing.where,
        listing.classes,
        train,
        val,
        test,
        listing.channels,
        listing.mirror,
        fingerprint(listing.classes, taken.splits),
        replace(taken.rule, left_out=()),
        taken.own,
        (*listing.notes, *taken.notes),
        listing.ignored,
    )


def fingerprint(*parts: Any) -> str:
    """A hash of parts that have a form in JSON."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Decoded:
    """Decodes the image of a name from the result of `file`."""

    file: Callable[[str], Path | bytes]
    channels: int
    background: str = WHITE

    def __call__(self, name: str) -> Image.Image:
        try:
            return decode(self.file(name), self.channels, background=self.background)
        except UnreadableImage as error:
            raise UnreadableImage(name, error.reason) from error
