"""What is in the data, and what would make its scores wrong?"""

import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import TypeVar

import numpy as np

from fullstride.autofit.inspection.duplicate_pairs import (
    Pair,
    as_pairs,
    group_by_pixels,
    image_name,
    images_to_leave_out,
    links_across_classes,
    links_across_splits,
)
from fullstride.autofit.inspection.near_copies import MAX_COMPARED, find_matches
from fullstride.autofit.inspection.perceptual_hash import Pictures
from fullstride.autofit.inspection.thumbnails import REPORT_S, SPLITS, look_at_images
from fullstride.console import printable
from fullstride.cores import cores
from fullstride.data.dataset import DataSet
from fullstride.data.readers.listing import quote_names

T = TypeVar("T")
MAX_LISTED = 1000  # unreadable images, and pairs of each kind
FEW = 50  # images of a split: one is 2 points
MAX_SHOWN = 5  # names in a line for a terminal

__all__ = ["DataReport", "Pair", "look_at", "report_lines", "without_duplicates"]


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What a look at all images of a data set tells."""

    images: Mapping[str, int]  # split -> number
    classes: int
    smallest: tuple[str, int]  # class and number of its training images
    largest: tuple[str, int]
    sides: tuple[int, int, int]  # shorter side in pixels: smallest, median, largest
    channels: int
    unreadable: Mapping[str, str]  # name -> reason, of at most `MAX_LISTED`
    # Of each image the closest one in every other split; at most `MAX_LISTED`.
    across_splits: tuple[Pair, ...]  # the second one is scored on
    # Of each image the closest one in another class; at most `MAX_LISTED`.
    across_classes: tuple[Pair, ...]
    notes: tuple[str, ...] = ()
    # The numbers of all, listed or not: "unreadable", "across_splits", "across_classes", and of
    # images in a scored split that an earlier split shows: "minival", "test".
    totals: Mapping[str, int] = field(default_factory=dict)
    aspect: float = 1.0  # longer / shorter side, in the median
    duplicates: tuple[str, ...] = ()  # all images that `without_duplicates` leaves out


def look_at(data: DataSet, workers: int | None = None) -> Generator[str, None, DataReport]:
    """Decode all images, and compare them with each other.

    Images with the same pixels, and those that show the same (`perceptual_hash`), are reported
    where they are in two splits or in two classes; mirrored ones too, where a flip keeps the class.

    Yields lines of progress. `workers` processes decode, by default one for each core where images
    are files. Raises ValueError if no image can be read.
    """
    if workers is None:
        workers = cores() if data.train.file else 0
    looks = yield from look_at_images(data, workers)
    groups = group_by_pixels(data, looks)
    compared = looks.pictures.subset(groups.first)
    matches = yield from _with_progress(
        find_matches(compared, groups.in_split >= 0, groups.classes, data.mirror)
    )
    splits = links_across_splits(looks, groups, matches)
    classes = links_across_classes(groups, matches)
    scored = Counter(SPLITS[looks.splits[image]] for image in {link.b for link in splits})
    by_class = Counter(label for each in data.labels("train") or () for label in each)
    sizes = {data.classes[i]: by_class[i] for i in range(len(data.classes))} if by_class else {}
    sides = np.sort([facts.shorter_side for facts in looks.facts])
    aspects = [facts.longer_side / facts.shorter_side for facts in looks.facts]
    worst_first = sorted(splits, key=lambda link: (-looks.splits[link.b], not link.exact))
    return DataReport(
        images={split: len(getattr(data, split)) for split in SPLITS},
        classes=len(data.classes),
        smallest=min(sizes.items(), key=itemgetter(1), default=("", 0)),
        largest=max(sizes.items(), key=itemgetter(1), default=("", 0)),
        sides=(int(sides[0]), int(sides[len(sides) // 2]), int(sides[-1])),
        channels=data.channels,
        unreadable=dict(islice(looks.unreadable.items(), MAX_LISTED)),
        across_splits=as_pairs(data, looks, groups, worst_first[:MAX_LISTED]),
        across_classes=as_pairs(data, looks, groups, classes[:MAX_LISTED]),
        notes=(*data.notes, *_notes(data, compared)),
        totals={
            "unreadable": len(looks.unreadable),
            "across_splits": len(splits),
            "across_classes": len(classes),
            "minival": scored["minival"],
            "test": scored["test"],
        },
        aspect=round(float(np.median(aspects)), 4),
        duplicates=tuple(
            image_name(data, looks, image) for image in images_to_leave_out(looks, groups, splits)
        ),
    )


def without_duplicates(data: DataSet, report: DataReport) -> DataSet:
    """The data set without training images that the minival or the test shows too.

    Neither has it minival images that the test shows, nor training images of which the same pixels
    have another class. Raises ValueError if a class or the minival would lose all images.
    """
    rest = data.without(report.duplicates) if report.duplicates else data
    hint = "remove copies, or leave duplicates in"
    if lost := {*rest.missing_classes("train")} - {*data.missing_classes("train")}:
        raise ValueError(
            f"all training images of {quote_names(sorted(lost))} are duplicates: {hint}"
        )
    if len(data.minival) and not len(rest.minival):
        raise ValueError(f"all {len(data.minival):,} images of the minival are in the test: {hint}")
    return rest


def report_lines(report: DataReport) -> list[str]:
    """What a look at the data tells, for a terminal: facts, then notes, then warnings."""
    images = ", ".join(f"{count:,} {split}" for split, count in report.images.items() if count)
    (least, fewest), (most, largest) = report.smallest, report.largest
    low, median, high = report.sides
    sizes = (
        f"shorter side {low} to {high} pixels, median {median}" if low < high else f"{low} pixels"
    )
    lines = [
        f"{images} images of {report.classes:,} classes; {sizes}; "
        f"{'gray' if report.channels == 1 else 'RGB'}"
    ]
    if least or most:
        lines.append(
            f"smallest class {printable(least)!r}: {fewest:,} training images; largest "
            f"{printable(most)!r}: {largest:,}"
        )
    lines += map(printable, report.notes)
    lines += _warnings(report)
    return lines


def _warnings(report: DataReport) -> list[str]:
    totals, lines = report.totals, []
    if count := totals.get("unreadable", 0):
        name, reason = next(iter(report.unreadable.items()))
        lines.append(
            f"warning: {count:,} images cannot be read and are skipped: "
            f"{_some(report.unreadable, count)} ({printable(name)}: {reason})"
        )
    for split in ("test", "minival"):
        if count := totals.get(split, 0):
            pairs = [pair for pair in report.across_splits if pair.splits[1] == split]
            names = dict.fromkeys(pair.names[1] for pair in pairs)
            lines.append(
                f"warning: {count:,} of the {report.images[split]:,} {split} images show the same "
                f"as images of an earlier split, so the score would be too high: "
                f"{_some(names, count)}"
            )
    for split, what in (("minival", "the choice"), ("test", "the final score")):
        if 0 < (count := report.images.get(split, 0)) < FEW:
            noun = "image" if count == 1 else "images"
            lines.append(
                f"warning: the {split} has {count:,} {noun}, of which one is {100 / count:.0f} "
                f"points: {what} is little more than chance"
            )
    if count := totals.get("across_classes", 0):
        pairs = (
            f"{a} in {of_a!r} and {b} in {of_b!r}"
            for (a, b), (of_a, of_b) in ((p.names, p.classes) for p in report.across_classes)
        )
        lines.append(
            f"warning: {count:,} pairs of images show the same in two classes: "
            f"{_some(pairs, count)}"
        )
    if report.duplicates:
        count = len(report.duplicates)
        lines.append(
            f"--drop-duplicates leaves out {count:,} images: {_some(report.duplicates, count)}"
        )
    return lines


def _some(names: Iterable[str], count: int) -> str:
    """The first names, and the number of the others."""
    shown = [printable(name) for name in islice(names, MAX_SHOWN)]
    more = f" and {count - len(shown):,} more" if count > len(shown) else ""
    return ", ".join(shown) + more


def _notes(data: DataSet, pictures: Pictures) -> list[str]:
    notes = []
    for split in SPLITS:
        missing = data.missing_classes(split) if len(getattr(data, split)) else ()
        if missing:
            notes.append(
                f"the {split} has no image of {len(missing):,} classes: {quote_names([*missing])}"
            )
    if flat := int((~pictures.contrasted).sum()):
        notes.append(f"{flat:,} images are of one colour: only those of the same pixels are equal")
    if len(pictures) > MAX_COMPARED:
        notes.append(
            f"near copies in two classes were not searched for, as {len(pictures):,} images are "
            f"more than {MAX_COMPARED:,}"
        )
    return notes


def _with_progress(search: Generator[float, None, T]) -> Generator[str, None, T]:
    """Lines of progress in place of the shares that are done."""
    start = last = time.monotonic()
    while True:
        try:
            done = next(search)
        except StopIteration as stop:
            return stop.value
        if (now := time.monotonic()) - last > REPORT_S:
            last = now
            yield f"{done:.0%} of the images compared, {(now - start) * (1 / done - 1):,.0f} s left"
