"""Takes missing validation and test splits from the training images, by a hash of names.

The papers call the validation split minival: it chooses epochs and settings, never the reported
scores.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import PurePosixPath
from typing import NamedTuple

from fullstride.data.readers.listing import (
    NO_LABEL,
    SPLITS,
    Copies,
    Listing,
    Sample,
    TooManyImagesError,
    find_copies,
    fraction,
    labels_of,
    quote_names,
    target_text,
)
from fullstride.io.console import count_of, verb_of
from fullstride.io.records import BelowOne

# ---- units: images that must be in one split: a group, such as a patient's images, and copies
#
# A group is a value in a column, a folder, or a pattern's match in the name.


PARENT = "parent"  # the group is the folder of the image
ENOUGH = 3  # one unit is taken from a class with so many more than must be left


SameImages = Sequence[tuple[str, list[Sample]]]  # the hash of a content, and the images with it


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Samples that must be in one split."""

    fraction: float  # in [0, 1): the units with the lowest are taken
    samples: Sequence[Sample]

    @property
    def images(self) -> Counter[int]:
        """The number of samples by class."""
        return Counter(label for sample in self.samples for label in labels_of(sample.target))

    def stratum(self, images_of: Mapping[int, int]) -> int:
        """The class that the unit counts for: the most frequent class of its images.

        If images have several labels, the rarest label, by `images_of`: a frequent label is in
        every split anyhow, and only images with rare labels must be shared out.
        """
        target = self.samples[0].target
        if isinstance(target, tuple):
            return min(self.images, key=lambda label: (images_of[label], label))
        if len(self.samples) == 1:
            return target
        images = self.images
        return max(images, key=lambda target: (images[target], -target))


def group_keys(listing: Listing, group: str) -> dict[str, str]:
    """The names of images that have a group -> the group.

    `group` is a column of the data, a level of folders from 1 on (below the class folder, if the
    names of all images begin with it), "parent", or a regular expression with one group that is
    searched in the name. Raises ValueError in one line for a `group` that the data do not have.
    """
    if listing.groups is not None:
        keys = {name: value for name, value in listing.groups.items() if value}
    elif "(" in group:
        keys = _by_pattern(listing, group)
    elif group == PARENT or (group.isascii() and group.isdecimal() and int(group) > 0):
        keys = _by_level(listing, group)
    else:
        titles = quote_names([*listing.columns])
        has = f"columns are {titles}" if titles else "no column"
        raise ValueError(
            f"group {group!r}: {has}; use a column, a level of folders (1, 2, ...), parent, or a "
            r"pattern with one group such as '(patient\d+)'"
        )
    if not keys:
        example = listing.splits["train"][0].name
        raise ValueError(f"group {group!r}: no image has one, for example {example!r}")
    return keys


def _by_pattern(listing: Listing, pattern: str) -> dict[str, str]:
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"group {pattern!r} is no regular expression: {error}") from None
    if compiled.groups != 1:
        raise ValueError(
            f"group {pattern!r} has {compiled.groups} groups: put what all images of one group "
            "share in parentheses, and use (?:...) for others"
        )
    matches = ((s.name, compiled.search(s.name)) for s in listing.samples)
    return {name: match[1] for name, match in matches if match and match[1]}


def _by_level(listing: Listing, level: str) -> dict[str, str]:
    above = _class_folders(listing)
    keys = {}
    for sample in listing.samples:
        folders = PurePosixPath(sample.name).parts[:-1][above(sample) :]
        depth = len(folders) if level == PARENT else int(level)
        if 0 < depth <= len(folders):
            keys[sample.name] = "/".join(folders[:depth])
    return keys


def _class_folders(listing: Listing) -> Callable[[Sample], int]:
    """A function that counts the folders down to the class folder; 0 unless all names have one."""

    def depth(sample: Sample) -> int:
        parts = sample.name.split("/")
        names = [listing.classes[label] for label in labels_of(sample.target) if label != NO_LABEL]
        if parts[0].lower() in SPLITS and len(parts) > 2 and parts[1] in names:
            return 2
        return int(parts[0] in names and len(parts) > 1)

    return depth if all(map(depth, listing.samples)) else lambda sample: 0


def join_units(
    samples: Sequence[Sample], keys: Mapping[str, str], copies: SameImages
) -> list[Unit]:
    """The samples as units: samples with the same key, and copies, are together.

    A unit's fraction is a hash of its alphabetically first group, else of its content's hash, else
    of the name of its only image.
    """
    if not keys and not copies:
        return [Unit(fraction(sample.name), [sample]) for sample in samples]
    parents: dict[str, str] = {}  # node -> node of the same set; a node is a name or a group

    def root(node: str) -> str:
        while (parent := parents.setdefault(node, node)) != node:
            parents[node] = parents[parent]
            node = parent
        return node

    hashes: dict[str, str] = {}
    for sample in samples:
        if key := keys.get(sample.name):
            parents[root(f"image {sample.name}")] = root(f"group {key}")
    for content, same in copies:
        for sample in same:
            hashes[sample.name] = content
            parents[root(f"image {sample.name}")] = root(f"image {same[0].name}")
    sets: dict[str, list[Sample]] = {}
    for sample in samples:
        sets.setdefault(root(f"image {sample.name}"), []).append(sample)

    def key_of(members: Sequence[Sample]) -> str:
        for names in (keys, hashes):
            if present := [names[each.name] for each in members if each.name in names]:
                return min(present)
        return members[0].name

    return [Unit(fraction(key_of(members)), members) for members in sets.values()]


def take_groups(ordered: Sequence[Unit], share: float, leave: int) -> set[Unit]:
    """Units with about the `share` of each class's images.

    In their order, a unit is taken if the shares of its classes come closer to `share`. `leave`
    units of each class are left for other splits; at least one unit is taken of a class with ENOUGH
    more. Raises ValueError if taking any unit would leave a class without training images.
    """
    counts = {unit: unit.images for unit in ordered}
    images = Counter(label for count in counts.values() for label in count.elements())
    wanted = {target: share * count for target, count in images.items()}
    total = Counter(target for count in counts.values() for target in count)
    left = total.copy()
    reached: Counter[int] = Counter()
    taken: set[Unit] = set()

    def change(unit: Unit) -> float:
        """The change of the relative distances to the wanted numbers; below 0 if they shrink."""
        return sum(
            (abs(reached[t] + count - wanted[t]) - abs(reached[t] - wanted[t])) / wanted[t]
            for t, count in counts[unit].items()
        )

    def take(unit: Unit) -> None:
        taken.add(unit)
        reached.update(counts[unit])
        left.subtract(counts[unit].keys())

    def can_spare(unit: Unit, leave: int) -> bool:
        return unit not in taken and all(left[target] > leave for target in counts[unit])

    for unit in ordered:
        if can_spare(unit, leave) and change(unit) < 0:
            take(unit)
    for target in sorted(total, key=lambda target: (images[target], target)):
        if not reached[target] and total[target] - leave >= ENOUGH:
            spare = [u for u in ordered if target in counts[u] and can_spare(u, leave)]
            if spare:
                take(min(spare, key=change))
    if not taken:
        tries = ([u for u in ordered if can_spare(u, n)] for n in range(leave, 0, -1))
        spare = next(filter(None, tries), None)
        if not spare:
            raise ValueError(
                f"too few groups, or too large ones, to hold one of {len(ordered)} out and train "
                "on all classes: use smaller groups, or --val 0 or --test 0"
            )
        take(min(spare, key=change))
    return taken


TEST_SHARE = 0.1


@dataclass(frozen=True)
class SplitRule:
    """How missing splits are taken from the training images.

    A share of 0 means that there is no such split: its images, even a split of the data, are used
    for training.
    """

    val: BelowOne | None = None  # share of the training images; None: by their number
    test: BelowOne | None = None  # share of images; None: 0.1, or none beside a validation split
    group: str = ""  # images of one group stay in one split, see `group_keys`
    keep_duplicates: bool = False  # whether copies of an image may be in several splits
    # the copies of an earlier search, see `DataSet.rule`; None: search for them
    copies: Copies | None = None
    left_out: tuple[str, ...] = ()  # unused images, see `DataSet.without`

    def __post_init__(self) -> None:
        for name, share in (("val", self.val), ("test", self.test)):
            if share is not None and not 0 <= share < 1:
                raise ValueError(
                    f"{name} {share}: use a share of the images above 0 and below 1, or 0 for none"
                )


DEFAULT_RULE = SplitRule()


class OnlyCopiesError(ValueError):
    """All training images of a class are copies of images in other splits."""


class Splits(NamedTuple):
    train: list[Sample]
    val: list[Sample]
    test: list[Sample]


class TakenSplits(NamedTuple):
    splits: Splits
    rule: SplitRule  # with the result of the search for copies
    own: tuple[str, ...]  # the names of the data's own splits, used or not
    notes: tuple[str, ...]  # what a user should know of the splits, a line each


def take_splits(listing: Listing, rule: SplitRule) -> TakenSplits:
    """Take missing splits from the training images.

    If the data have neither, a test and a validation split are taken, both stratified by class. If
    they have a test, a validation split is taken. Data with a validation split keep it; there is
    then no test, unless the data have one or the rule asks for it.

    Images of one group, and copies, are in one split. Splits of the data stay as they are, except
    that training images with copies in other splits are left out.

    Raises ValueError in one line, OnlyCopiesError if copies leave a class no training image.
    """
    own = tuple(name for name in ("val", "test") if name in listing.splits)
    listing = _for_training(listing, rule)
    train, val, test = (listing.splits.get(name) for name in ("train", "val", "test"))
    assert train is not None
    for flag, name, share, samples, what in (
        ("val", listing.val_name, rule.val, val, "validation split"),
        ("test", "test", rule.test, test, "test"),
    ):
        if samples is not None and share:
            raise ValueError(f"{flag} {share}: {name!r} is the {what} already; leave the share out")
    if rule.val == rule.test == 0:
        return TakenSplits(Splits(listing.samples, [], []), rule, own, ())
    copies, notes = _find_copies(listing, rule)
    if held_out := {name: each for name, each in (("val", val), ("test", test)) if each}:
        train, more = _without_copies(listing, held_out, copies)
        notes += more
    keys: dict[str, str] = {}
    if rule.group:
        keys = group_keys(listing, rule.group)
        notes += _group_notes(listing, rule, keys)
    units, derived, start = join_units(train, keys, copies), [], 0.0
    if test is None and ("val" not in own or rule.test):
        share = start = rule.test or TEST_SHARE
        units, taken = _take(units, share, 0.0, 2 if val is None else 1, rule)
        test = _ordered(train, _samples(taken))
        derived.append("test")
    if val is None and rule.val != 0:
        share = rule.val or min(0.1, max(0.02, 500 / sum(len(u.samples) for u in units)))
        units, taken = _take(units, share, start, 1, rule)
        val = _ordered(train, _samples(taken))
        derived.append("val")
    splits = Splits(_ordered(train, _samples(units)), val or [], test or [])
    if rule.group:
        notes += _forced_out(listing.classes, splits, derived)
    if rule.test == 0:
        with_test = _ordered(listing.samples, [*splits.train, *splits.test])
        splits = splits._replace(train=with_test, test=[])
    if not rule.keep_duplicates:
        names = {key: tuple(sample.name for sample in same) for key, same in copies}
        rule = replace(rule, copies=names)
    return TakenSplits(splits, rule, own, tuple(notes))


def _for_training(listing: Listing, rule: SplitRule) -> Listing:
    """The listing with splits that have a share of 0 among its training images."""
    shares = {"val": rule.val, "test": rule.test}
    splits = {split: each for split, each in listing.splits.items() if shares.get(split) != 0}
    splits["train"] = [
        sample
        for split, samples in listing.splits.items()
        if split == "train" or split not in splits
        for sample in samples
    ]
    return replace(listing, splits=splits)


def _find_copies(listing: Listing, rule: SplitRule) -> tuple[SameImages, list[str]]:
    if rule.keep_duplicates:
        return [], []
    by_hash = rule.copies
    if by_hash is None:
        try:
            by_hash = find_copies(listing.samples, listing.file)
        except TooManyImagesError as error:
            return [], [f"copies of images were not searched for: {error}"]
    samples = {sample.name: sample for sample in listing.samples}
    sets = {key: [samples[n] for n in names if n in samples] for key, names in by_hash.items()}
    copies = [(key, same) for key, same in sets.items() if len(same) > 1]
    mixed = [same for _, same in copies if len({labels_of(each.target) for each in same}) > 1]
    if not mixed:
        return copies, []
    ordered = sorted(mixed[0], key=lambda sample: labels_of(sample.target))
    first, second = ordered[0], ordered[-1]
    return copies, [
        f"in several classes: {count_of(len(mixed), 'picture')}, for example {first.name!r} in "
        f"{target_text(listing.classes, first.target)} and {second.name!r} in "
        f"{target_text(listing.classes, second.target)}: remove the wrong ones"
    ]


def _without_copies(
    listing: Listing, held_out: Mapping[str, list[Sample]], copies: SameImages
) -> tuple[list[Sample], list[str]]:
    """The training images without copies in `held_out`, and notes on the others."""
    split_of = {s.name: split for split, samples in held_out.items() for s in samples}
    left_out: dict[str, dict[str, str]] = {split: {} for split in held_out}  # copy -> original
    in_both: dict[str, str] = {}
    for _, same in copies:
        originals = {split_of[s.name]: s.name for s in reversed(same) if s.name in split_of}
        if len(originals) > 1:
            in_both |= {s.name: originals["test"] for s in same if split_of.get(s.name) == "val"}
        if originals:
            split = "test" if "test" in originals else "val"
            left_out[split] |= {s.name: originals[split] for s in same if s.name not in split_of}
    gone = {name for each in left_out.values() for name in each}
    train = [sample for sample in listing.splits["train"] if sample.name not in gone]
    if lost := _classes_in(listing.splits["train"]) - _classes_in(train):
        name = listing.classes[min(lost)]
        raise OnlyCopiesError(
            f"all training images of {name!r} are copies of images in other splits: remove the "
            "copies, or use --keep-duplicates"
        )
    notes = [
        f"{_copies('training', len(each), split)} and left out: {quote_names(list(each))}"
        for split, each in left_out.items()
        if each
    ]
    if in_both:
        notes.append(
            f"{_copies('validation', len(in_both), 'test')}, which is so chosen by: "
            f"{quote_names(list(in_both))}"
        )
    return train, notes


def _copies(of: str, count: int, split: str) -> str:
    """ "training", 2, "val" -> 2 training images are copies of images of the val split."""
    copies = "a copy of an image" if count == 1 else "copies of images"
    where = "test" if split == "test" else f"{split} split"
    return f"{count_of(count, f'{of} image', 'are')} {copies} of the {where}"


def _classes_in(samples: Iterable[Sample]) -> set[int]:
    return {label for sample in samples for label in labels_of(sample.target)} - {NO_LABEL}


def _group_notes(listing: Listing, rule: SplitRule, keys: Mapping[str, str]) -> list[str]:
    """Notes on the number of groups, and on groups in several splits of the data."""
    sizes = Counter(keys.values())
    alone = sum(sample.name not in keys for sample in listing.samples)
    single = f"; {count_of(alone, 'image')} without one counted alone" if alone else ""
    notes = [
        f"{count_of(len(sizes), 'group')} by {rule.group!r}, the largest of "
        f"{count_of(max(sizes.values()), 'image')}{single}"
    ]
    groups = {
        split: {keys[s.name] for s in samples if s.name in keys}
        for split, samples in listing.splits.items()
    }
    for a, b in combinations(groups, 2):
        if both := sorted(groups[a] & groups[b]):
            count = count_of(len(both), "group")
            notes.append(f"both {a} and {b} have {count}: {quote_names(both)}")
    return notes


def _forced_out(classes: Sequence[str], splits: Splits, derived: Iterable[str]) -> list[str]:
    """Notes on classes with enough images for a split, but too few or too large groups."""
    images = Counter(t for samples in splits for s in samples for t in labels_of(s.target))
    images.pop(NO_LABEL, None)
    notes = []
    for split in derived:
        present = _classes_in(getattr(splits, split))
        absent = [t for t in sorted(images) if t not in present and images[t] >= ENOUGH + 2]
        if absent:
            notes.append(
                f"the {split} split has no image of {quote_names([classes[t] for t in absent])}, "
                f"which {verb_of(len(absent), 'have')} too few groups"
            )
    return notes


def _ordered(samples: Iterable[Sample], chosen: Iterable[Sample]) -> list[Sample]:
    """The samples in `chosen`, in the order of `samples`."""
    names = {sample.name for sample in chosen}
    return [sample for sample in samples if sample.name in names]


def _samples(units: Iterable[Unit]) -> Iterator[Sample]:
    return (sample for unit in units for sample in unit.samples)


def _take(
    units: Sequence[Unit], share: float, start: float, leave: int, rule: SplitRule
) -> tuple[list[Unit], list[Unit]]:
    """Take about the `share` of `units`; returns (the others, the taken).

    `start` is the lowest fraction in the pool. `leave` units of each class are left for other
    splits. At least one unit is taken, and never all.
    """
    ordered = sorted(units, key=lambda unit: unit.fraction)
    if rule.group:
        taken = take_groups(ordered, share, leave)
    elif len(units) < 2:
        raise ValueError(
            "too few images to keep one each for validation and test: add more, at least 3 in all"
        )
    else:
        taken = _take_by_class(ordered, start + (1 - start) * share, leave)
    return [u for u in units if u not in taken], [u for u in units if u in taken]


def _take_by_class(ordered: Sequence[Unit], below: float, leave: int) -> set[Unit]:
    """The units of each class with a fraction below a limit.

    `leave` units of each class are left; at least one is taken of a class with ENOUGH more. If no
    unit would be taken, the unit with the lowest fraction is, of the classes with enough units.
    """
    by_class: dict[int, list[Unit]] = {}
    images = Counter(t for unit in ordered for s in unit.samples for t in labels_of(s.target))
    for unit in ordered:
        by_class.setdefault(unit.stratum(images), []).append(unit)
    taken: set[Unit] = set()
    for units in by_class.values():
        count = sum(unit.fraction < below for unit in units)
        count = max(count, int(len(units) - leave >= ENOUGH))
        taken.update(units[: min(count, max(0, len(units) - leave))])
    if not taken:
        classes = list(by_class.values())
        enough = [units for units in classes if len(units) > leave] or classes
        enough = [units for units in enough if len(units) > 1] or enough
        taken.add(min((units[0] for units in enough), key=lambda unit: unit.fraction))
    return taken
