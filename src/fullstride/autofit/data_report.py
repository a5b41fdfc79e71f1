"""Reports the content of the data of a fit, and problems that would make scores wrong."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from fullstride.autofit import near_copies
from fullstride.autofit.near_copies import MAX_COMPARED, SPLITS, ComparedImages, ImageIndex, Matches
from fullstride.data.dataset import DataSet
from fullstride.data.readers.listing import Objects, quote_names
from fullstride.io.console import count_of, printable, verb_of
from fullstride.io.writing import cores
from fullstride.report.console_lines import few_images_line
from fullstride.study.trials import Work

# Images of two splits or two classes that have the same pixels, or show nearly the same.
#
# Each image has at most one pair for each other split, and one for another class, so that a
# thousand copies of a picture do not give a million pairs.


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two images that show the same."""

    names: tuple[str, str]
    splits: tuple[str, str]  # train, val or test
    classes: tuple[str, str]  # "" if a target has no class index
    exact: bool = False  # whether they have the same pixels
    mirrored: bool = False  # whether one image is the other one flipped left to right


@dataclass(frozen=True)
class Groups:
    """The N images as P groups of the same pixels."""

    of: np.ndarray  # int64 (N,): the group of an image
    first: np.ndarray  # int64 (P,): the first image of a group
    in_split: np.ndarray  # int64 (P, splits): the first image of a group in a split; -1: none
    # int64 (N,): class of an image, a number for each set of several labels, -1 for other targets
    targets: np.ndarray
    classes: np.ndarray  # int64 (P,): class of all images of a group; -1 if there is none
    mixed: np.ndarray  # bool (P,): whether the images of a group have several classes


class Link(NamedTuple):
    """Two images that show the same, by their indices."""

    a: int
    b: int
    exact: bool
    mirrored: bool


def group_by_pixels(all_images: ImageIndex) -> Groups:
    first, of = np.unique(near_copies.same_pixels(all_images), return_inverse=True)
    classes = len(all_images.data.classes)
    in_split = np.full((len(first), len(SPLITS)), -1)
    reverse = np.arange(len(of))[::-1]  # the first image of a group is written last
    in_split[of[reverse], all_images.splits[reverse]] = reverse
    sets: dict[tuple[int, ...], int] = {}

    def number(target: Any) -> int:
        if isinstance(target, tuple):
            return sets.setdefault(target, classes + len(sets))
        return target if type(target) is int and 0 <= target < classes else -1

    targets = np.array([number(_target(all_images, image)) for image in range(len(of))])
    mixed = np.zeros(len(first), bool)
    mixed[of[targets != targets[first[of]]]] = True
    return Groups(of, first, in_split, targets, np.where(mixed, -1, targets[first]), mixed)


def links_across_splits(all_images: ImageIndex, groups: Groups, matches: Matches) -> list[Link]:
    """The links between splits, sorted; `b` is in the later split, which is scored."""
    links: dict[tuple[int, int], Link] = {}
    for split, partners in enumerate(matches.by_split):
        copies, near = groups.in_split[groups.of, split], partners.index[groups.of]
        (images,) = np.nonzero((all_images.splits != split) & ((copies >= 0) | (near >= 0)))
        for image in images.tolist():
            exact = bool(copies[image] >= 0)
            other = int(copies[image] if exact else groups.in_split[near[image], split])
            mirrored = not exact and bool(partners.mirrored[groups.of[image]])
            pair = min(image, other), max(image, other)  # images are in the order of the splits
            links[pair] = Link(*pair, exact, mirrored)
    return [links[pair] for pair in sorted(links)]


def links_across_classes(groups: Groups, matches: Matches) -> list[Link]:
    """The links between classes, sorted."""
    first = groups.first[groups.of]
    (others,) = np.nonzero(groups.targets != groups.targets[first])
    links = [Link(int(first[other]), int(other), True, False) for other in others]
    partners, pairs = matches.by_class, set()
    for group in np.nonzero(partners.index >= 0)[0]:
        a, b = sorted(groups.first[[group, partners.index[group]]].tolist())
        if (a, b) not in pairs:
            pairs.add((a, b))
            links.append(Link(a, b, False, bool(partners.mirrored[group])))
    return sorted(links)


def image_name(all_images: ImageIndex, image: int) -> str:
    images, index = all_images.place(image)
    return images.names[index]


def as_pairs(all_images: ImageIndex, groups: Groups, links: Iterable[Link]) -> tuple[Pair, ...]:
    def class_name(image: int) -> str:
        if groups.targets[image] < 0:
            return ""
        target = _target(all_images, image)
        labels = target if isinstance(target, tuple) else (target,)
        return ", ".join(all_images.data.classes[label] for label in labels)

    return tuple(
        Pair(
            names=(image_name(all_images, link.a), image_name(all_images, link.b)),
            splits=(SPLITS[all_images.splits[link.a]], SPLITS[all_images.splits[link.b]]),
            classes=(class_name(link.a), class_name(link.b)),
            exact=link.exact,
            mirrored=link.mirrored,
        )
        for link in links
    )


def _target(all_images: ImageIndex, image: int) -> Any:
    """A class or several classes; None for objects with boxes."""
    images, index = all_images.place(image)
    target = images.targets[index]
    return None if isinstance(target, Objects) else target


MAX_LISTED = 1000  # unreadable images, and pairs of each kind
MAX_SHOWN = 5  # names in a line for a terminal


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Facts about the images of a data set."""

    images: Mapping[str, int]  # split -> number
    classes: int
    smallest: tuple[str, int]  # class and number of its training images
    largest: tuple[str, int]
    sides: tuple[int, int, int]  # shorter side in pixels: smallest, median, largest
    channels: int
    unreadable: Mapping[str, str]  # name -> reason, at most `MAX_LISTED`
    # Each image with the closest image in every other split, which is scored if it comes second; at
    # most `MAX_LISTED`.
    across_splits: tuple[Pair, ...]
    # Each image with the closest image of another class; at most `MAX_LISTED`.
    across_classes: tuple[Pair, ...]
    notes: tuple[str, ...] = ()
    # Numbers, listed or not: "unreadable", "across_splits", "across_classes", and the images of a
    # scored split that an earlier split shows: "val", "test".
    totals: Mapping[str, int] = field(default_factory=dict)
    aspect: float = 1.0  # median of longer / shorter side
    duplicates: tuple[str, ...] = ()  # all images that `without_duplicates` leaves out


def inspect(data: DataSet, workers: int | None = None) -> Work[DataReport]:
    """Decode all images, and compare them with each other.

    Images with the same pixels, and images that show the same (`perceptual_hashes`), are reported
    if they are in two splits or in two classes; mirrored ones too, if a flip keeps the class.

    Yields lines of progress. `workers` processes decode, by default one for each core if images are
    files. Raises ValueError if no image can be read.
    """
    if workers is None:
        workers = cores() if data.train.file else 0
    all_images = yield from near_copies.index_images(data, workers)
    groups = group_by_pixels(all_images)
    compared = all_images.pictures.subset(groups.first)
    matches = yield from near_copies.find_matches(
        compared, groups.in_split >= 0, groups.classes, data.mirror
    )
    splits = links_across_splits(all_images, groups, matches)
    classes = links_across_classes(groups, matches)
    scored = Counter(SPLITS[all_images.splits[image]] for image in {link.b for link in splits})
    by_class = Counter(label for each in data.labels("train") or () for label in each)
    sizes = {data.classes[i]: by_class[i] for i in range(len(data.classes))} if by_class else {}
    sides = np.sort([facts.shorter_side for facts in all_images.facts])
    aspects = [facts.longer_side / facts.shorter_side for facts in all_images.facts]
    worst_first = sorted(splits, key=lambda link: (-all_images.splits[link.b], not link.exact))
    # images that a later split shows too, and training images with a copy of another class
    mixed = np.nonzero(groups.mixed[groups.of] & (all_images.splits == 0))[0].tolist()
    return DataReport(
        images={split: len(getattr(data, split)) for split in SPLITS},
        classes=len(data.classes),
        smallest=min(sizes.items(), key=itemgetter(1), default=("", 0)),
        largest=max(sizes.items(), key=itemgetter(1), default=("", 0)),
        sides=(int(sides[0]), int(sides[len(sides) // 2]), int(sides[-1])),
        channels=data.channels,
        unreadable=dict(islice(all_images.unreadable.items(), MAX_LISTED)),
        across_splits=as_pairs(all_images, groups, worst_first[:MAX_LISTED]),
        across_classes=as_pairs(all_images, groups, classes[:MAX_LISTED]),
        notes=(*data.notes, *_notes(all_images, compared)),
        totals={
            "unreadable": len(all_images.unreadable),
            "across_splits": len(splits),
            "across_classes": len(classes),
            "val": scored["val"],
            "test": scored["test"],
        },
        aspect=round(float(np.median(aspects)), 4),
        duplicates=tuple(
            image_name(all_images, image)
            for image in sorted({*(link.a for link in splits), *mixed})
        ),
    )


def without_duplicates(data: DataSet, report: DataReport) -> DataSet:
    """Leave out training images that the validation split or the test shows too.

    Validation images that the test shows, and training images whose pixels have another class too,
    are left out as well. Raises ValueError if a class or the validation split would lose all
    images.
    """
    rest = data.without(report.duplicates) if report.duplicates else data
    hint = "remove copies, or leave duplicates in"
    if lost := {*rest.missing_classes("train")} - {*data.missing_classes("train")}:
        raise ValueError(
            f"all training images of {quote_names(sorted(lost))} are duplicates: {hint}"
        )
    if len(data.val) and not len(rest.val):
        raise ValueError(
            f"the validation split would be empty: {count_of(len(data.val), 'image', 'are')} in "
            f"the test: {hint}"
        )
    return rest


def report_lines(report: DataReport) -> list[str]:
    """The report for a terminal: facts, then notes, then warnings."""
    counts = {split: count for split, count in report.images.items() if count}
    *others, last = counts
    images = "".join(f"{counts[split]:,} {split}, " for split in others)
    images += count_of(counts[last], f"{last} image")
    (least, fewest), (most, largest) = report.smallest, report.largest
    low, median, high = report.sides
    sizes = (
        f"shorter side {low} to {high} pixels, median {median}" if low < high else f"{low} pixels"
    )
    lines = [
        f"{images} of {count_of(report.classes, 'class')}; {sizes}; "
        f"{'gray' if report.channels == 1 else 'RGB'}"
    ]
    if least or most:
        lines.append(
            f"smallest class {printable(least)!r}: {count_of(fewest, 'training image')}; largest "
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
            f"warning: {count_of(count, 'image')} cannot be read and {verb_of(count, 'are')} "
            f"skipped: {_some(report.unreadable, count)} ({printable(name)}: {reason})"
        )
    for split in ("test", "val"):
        if count := totals.get(split, 0):
            pairs = [pair for pair in report.across_splits if pair.splits[1] == split]
            names = dict.fromkeys(pair.names[1] for pair in pairs)
            lines.append(
                f"warning: {count:,} of the {count_of(report.images[split], f'{split} image')} "
                f"{verb_of(count, 'show')} the same as images of an earlier split, so the score "
                f"would be too high: {_some(names, count)}"
            )
    for split in ("val", "test"):
        if line := few_images_line(split, report.images.get(split, 0)):
            lines.append(f"warning: {line}")
    if count := totals.get("across_classes", 0):
        pairs = (
            f"{a} in {of_a!r} and {b} in {of_b!r}"
            for (a, b), (of_a, of_b) in ((p.names, p.classes) for p in report.across_classes)
        )
        lines.append(
            f"warning: {count_of(count, 'pair')} of images {verb_of(count, 'show')} the same in "
            f"two classes: {_some(pairs, count)}"
        )
    if report.duplicates:
        count = len(report.duplicates)
        lines.append(
            f"--drop-duplicates leaves out {count_of(count, 'image')}: "
            f"{_some(report.duplicates, count)}"
        )
    return lines


def _some(names: Iterable[str], count: int) -> str:
    """The first names, and the number of further names."""
    shown = [printable(name) for name in islice(names, MAX_SHOWN)]
    more = f" and {count - len(shown):,} more" if count > len(shown) else ""
    return ", ".join(shown) + more


def _notes(all_images: ImageIndex, pictures: ComparedImages) -> list[str]:
    data, notes = all_images.data, []
    for split in SPLITS:
        missing = data.missing_classes(split) if len(getattr(data, split)) else ()
        if missing:
            notes.append(
                f"the {split} split has no image of {count_of(len(missing), 'class')}: "
                f"{quote_names([*missing])}"
            )
    if flat := int((~pictures.contrasted).sum()):
        notes.append(
            f"{count_of(flat, 'image', 'are')} of one colour: equal only if all pixels are"
        )
    if len(pictures) > MAX_COMPARED:
        notes.append(
            f"near copies in two classes were not searched for, as {len(pictures):,} images are "
            f"more than {MAX_COMPARED:,}"
        )
    if count := sum(facts.had_alpha for facts in all_images.facts):
        notes.append(
            f"{count_of(count, 'image', 'have')} transparent pixels, which are put on "
            f"{data.train.background}; --background sets another colour"
        )
    return notes
