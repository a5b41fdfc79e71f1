"""Finds the output of a network for each class of a data set, by one tolerant rule for names.

Released weights have ImageNet's words, its wnids (n01440764), or no names at all. Folders of
images have any of these, in alphabetical order (0, 1, 10, 2).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fullstride.io.console import count_of, first_names, verb_of
from fullstride.io.writing import read_regular

WNID = re.compile(r"n\d{8}")
# Number of classes -> timm's name for the subset of ImageNet.
IMAGENET = {
    1000: "imagenet-1k",
    11_221: "imagenet-21k-miil",
    11_821: "imagenet-12k",
    21_841: "imagenet-22k",
    21_843: "imagenet-21k-goog",
}
MAX_FILE_BYTES = 2**24

Names = Sequence[str]
Places = list[int | None]  # the output of each class; None where it is missing or ambiguous


class ClassMatch(NamedTuple):
    """The output of each class of a data set."""

    outputs: tuple[int, ...]
    how: str  # "" where the names are the same

    @property
    def is_identity(self) -> bool:
        return self.outputs == tuple(range(len(self.outputs)))


def match_classes(outputs: Names, classes: Names, *, named: bool = True) -> ClassMatch:
    """The index of the output for each of the data set's `classes`, which may be a subset.

    Names are compared as they are; as numbers; as words without case, underscores and all but the
    first synonym; and as ImageNet's words, wnids and indices. Where `outputs` are mere numbers, as
    names are unknown (`named` is False), K outputs are K classes in their order. Raises ValueError,
    with the first three differences, if the names do not give each class its own output.
    """
    least = list(classes)
    for how, rule in (RULES if named else {**RULES, **POSITION}).items():
        places = rule(outputs, classes)
        if not (missing := without_place(classes, places)):
            return ClassMatch(tuple(place for place in places if place is not None), how)
        least = min(least, missing, key=len)
    missing, own = (first_names([*map(repr, names)]) for names in (least, outputs))
    raise ValueError(
        f"{len(least)} of the data's {len(classes)} classes {verb_of(len(least), 'are')} not one "
        f"of the network's {len(outputs)} each: {missing} of the data, {own} of the network"
    )


def permutation(outputs: Names, classes: Names, *, named: bool = True) -> tuple[int, ...] | None:
    """`match_classes` for as many classes as outputs; None where they differ."""
    if len(outputs) != len(classes):
        return None
    try:
        return match_classes(outputs, classes, named=named).outputs
    except ValueError:
        return None


def without_place(classes: Names, places: Places) -> list[str]:
    """The classes without an output, or with the same output as another class."""
    count = Counter(places)
    return [
        name
        for name, place in zip(classes, places, strict=True)
        if place is None or count[place] > 1
    ]


def by_name(outputs: Names, classes: Names) -> Places:
    if tuple(outputs) == tuple(classes):  # also where two classes have one name, as ImageNet's
        return list(range(len(outputs)))
    return look_up([outputs], classes)


def by_number(outputs: Names, classes: Names) -> Places:
    """Match equal numbers, or as many numbers in ascending order."""
    ours, theirs = numbers(outputs), numbers(classes)
    if ours is None or theirs is None:
        return [None] * len(classes)
    if not set(theirs) <= set(ours) and len(ours) == len(theirs):
        by_value = sorted(range(len(ours)), key=ours.__getitem__)
        ranks = {value: rank for rank, value in enumerate(sorted(theirs))}
        return [by_value[ranks[value]] for value in theirs]
    return look_up([ours], theirs)


def by_word(outputs: Names, classes: Names) -> Places:
    """Match whole names, else first synonyms, else any unique synonym."""
    synonyms = [[plain(word) for word in name.split(",")] for name in outputs]
    tables = [[plain(name) for name in outputs], [words[0] for words in synonyms], synonyms]
    whole = look_up(tables, map(plain, classes))
    first = look_up(tables, (plain(name.split(",")[0]) for name in classes))
    return [b if a is None else a for a, b in zip(whole, first, strict=True)]


def by_imagenet(outputs: Names, classes: Names) -> Places:
    """Match ImageNet's wnids, words or indices of the outputs."""
    wnids = wnids_of(outputs, among_words=any(map(WNID.fullmatch, classes)))
    if wnids is None:
        return [None] * len(classes)
    words = [description(wnid) for wnid in wnids]
    indices = [str(index) for index in range(len(wnids))]
    ways = ((by_name, wnids), (by_number, indices), (by_name, words), (by_word, words))
    return min(
        (rule(names, classes) for rule, names in ways),
        key=lambda places: len(without_place(classes, places)),
    )


def by_position(outputs: Names, classes: Names) -> Places:
    """Match as many classes in their order, unless the outputs are ImageNet's.

    Training programs number the classes of a folder in the order of the names.
    """
    is_imagenet = any(place is not None for place in by_imagenet(outputs, classes))
    if is_imagenet or len(classes) != len(outputs):
        return [None] * len(classes)
    return list(range(len(outputs)))


Rule = Callable[[Names, Names], Places]
RULES: dict[str, Rule] = {
    "": by_name,
    "by number": by_number,
    "by word": by_word,
    "by ImageNet's names": by_imagenet,
}
POSITION: dict[str, Rule] = {"by position, as the outputs have no names": by_position}


def look_up(tables: Sequence[Sequence], names: Iterable) -> Places:
    """The position of each name in the first table that has it; None for none or several."""
    indices = [index_of(table) for table in tables]
    positions = (next((index[name] for index in indices if name in index), ()) for name in names)
    return [each[0] if len(each) == 1 else None for each in positions]


def index_of(table: Sequence) -> dict:
    """Entry -> its positions; a list of entries stands at one position."""
    index = {}
    for position, entry in enumerate(table):
        for each in dict.fromkeys(entry) if isinstance(entry, list) else (entry,):
            index.setdefault(each, []).append(position)
    return index


def numbers(names: Names) -> list[int] | None:
    """The names as distinct whole numbers; None if they are not."""
    if not all(re.fullmatch(r"\d{1,9}", name, re.ASCII) for name in names):
        return None
    values = [int(name) for name in names]
    return values if len(set(values)) == len(values) else None


def plain(name: str) -> str:
    return " ".join(re.sub(r"[_\-]", " ", name).casefold().split())


def wnids_of(outputs: Names, *, among_words: bool) -> Names | None:
    """ImageNet's wnids of a network's outputs; None for other classes.

    `among_words`: also recognise outputs that are a part of ImageNet-1K's words.
    """
    if all(map(WNID.fullmatch, outputs)):
        return outputs
    if len(outputs) in IMAGENET:
        wnids = imagenet_wnids(len(outputs))
        counted = tuple(str(index) for index in range(len(wnids)))
        if tuple(outputs) in (counted, imagenet_words(len(outputs))):
            return wnids
    places = by_word(imagenet_words(1000), outputs) if among_words else [None]
    wnids = [imagenet_wnids(1000)[place] for place in places if place is not None]
    return wnids if len(set(wnids)) == len(outputs) else None


@cache
def imagenet_wnids(classes: int) -> Names:
    """The wnids of a subset of ImageNet, in the order of the outputs."""
    return imagenet(IMAGENET[classes]).label_names()


def imagenet_words(classes: int) -> tuple[str, ...]:
    """Class names of the ImageNet subset with this number of classes; numbers if there is none."""
    if classes not in IMAGENET:
        return tuple(map(str, range(classes)))
    return tuple(description(wnid) for wnid in imagenet_wnids(classes))


def description(wnid: str) -> str:
    """ImageNet's word and its synonyms; the wnid itself if there is none."""
    try:
        return imagenet(IMAGENET[1000]).label_name_to_description(wnid)
    except KeyError:
        return wnid


@cache
def imagenet(subset: str):
    from timm.data.imagenet_info import ImageNetInfo  # imports torchvision: some seconds

    return ImageNetInfo(subset)


def read_class_names(path: Path, count: int) -> tuple[str, ...]:
    """The names in a file, one a line. Raises ValueError unless there are `count`."""
    try:
        lines = read_regular(path, MAX_FILE_BYTES).decode("utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8") from None
    names = tuple(line.strip() for line in lines)
    if len(names) != count:
        raise ValueError(
            f"{path} has {count_of(len(names), 'line')}, the network has "
            f"{count_of(count, 'output')}"
        )
    if empty := next((number for number, name in enumerate(names, 1) if not name), 0):
        raise ValueError(f"{path} line {empty} is empty: give a name for each output")
    return names
