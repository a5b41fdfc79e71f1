"""Which images must be in one split? Those of one group, such as a patient, and copies.

A group is a column of a table, a level of folders, or what a pattern finds in the name.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from fullstride.data.readers.listing import (
    NO_LABEL,
    TEST,
    TRAIN,
    VAL,
    Listing,
    Sample,
    fraction,
    labels_of,
    quote_names,
)

PARENT = "parent"  # the group is the folder of the image
ENOUGH = 3  # units of a class beyond those that must be left, from which on one is taken


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Samples that are in one split."""

    fraction: float  # in [0, 1): the lowest are taken
    samples: Sequence[Sample]

    @property
    def images(self) -> Counter[int]:
        """Their number by class."""
        return Counter(label for sample in self.samples for label in labels_of(sample.target))

    def stratum(self, images_of: Mapping[int, int]) -> int:
        """The class that the unit counts for: that of most of its images.

        Of several labels it is the rarest one, by the number of images of each: a frequent label is
        in every split anyhow, and only images of rare ones must be shared out.
        """
        target = self.samples[0].target
        if isinstance(target, tuple):
            return min(self.images, key=lambda label: (images_of[label], label))
        if len(self.samples) == 1:
            return target
        images = self.images
        return max(images, key=lambda target: (images[target], -target))


def group_keys(listing: Listing, group: str) -> dict[str, str]:
    """The group of each image that has one, by its name.

    Args:
        listing: The images.
        group: A column of the data, a level of folders from 1 on (below the folder of the class,
            if the names of all images begin with that), "parent", or a regular expression with one
            group that is searched in the name.

    Raises ValueError in one line for a `group` that the data do not have.
    """
    if listing.groups is not None:
        return {name: value for name, value in listing.groups.items() if value}
    if "(" in group:
        keys = _by_pattern(listing, group)
    elif group == PARENT or (group.isascii() and group.isdecimal() and int(group) > 0):
        keys = _by_level(listing, group)
    else:
        has = (
            f"columns are {quote_names(list(listing.columns))}" if listing.columns else "no column"
        )
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
    """The number of folders down to the class's: 0 unless all names begin with their class's."""
    splits = {*TRAIN, *VAL, *TEST}

    def depth(sample: Sample) -> int:
        parts = sample.name.split("/")
        names = [listing.classes[label] for label in labels_of(sample.target) if label != NO_LABEL]
        if parts[0].lower() in splits and len(parts) > 2 and parts[1] in names:
            return 2
        return int(parts[0] in names and len(parts) > 1)

    return depth if all(map(depth, listing.samples)) else lambda sample: 0


def join_units(
    samples: Sequence[Sample], keys: Mapping[str, str], copies: Sequence[tuple[str, list[Sample]]]
) -> list[Unit]:
    """The samples as units: those with one key, and copies, are together.

    Its fraction is that of the first of its groups in the alphabet, else of its content's hash,
    else of the name of its only image.
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


def take_groups(units: Sequence[Unit], share: float, leave: int) -> tuple[list[Unit], list[Unit]]:
    """The other units, and about the `share` of each class's images.

    In the order of their hashes, a unit is taken if the shares of its classes come closer to
    `share`. `leave` units of each class are left, for the splits that are still to be filled; of a
    class with ENOUGH more, at least one is taken.

    Raises ValueError if none can be taken without all training images of a class.
    """
    ordered = sorted(units, key=lambda unit: unit.fraction)
    counts = {unit: unit.images for unit in ordered}
    images: Counter[int] = Counter()
    for count in counts.values():
        images.update(count)
    wanted = {target: share * count for target, count in images.items()}
    total = Counter(target for count in counts.values() for target in count)
    left = total.copy()
    reached: Counter[int] = Counter()
    taken: set[Unit] = set()

    def change(unit: Unit) -> float:
        """Of the relative differences from the wanted numbers; below 0 where they get smaller."""
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
                f"too few groups, or too large ones, to hold one of {len(units)} out and train on "
                "all classes: use smaller groups, or --minival 0 or --test 0"
            )
        take(min(spare, key=change))
    return [u for u in units if u not in taken], [u for u in units if u in taken]
