"""Which images are in two splits or in two classes? Those with the same pixels, and near ones.

Of each image there is one pair for each other split, and one for another class, so that a picture
of which there are a thousand copies has no million pairs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fullstride.autofit.inspection.near_copies import Matches
from fullstride.autofit.inspection.thumbnails import SPLITS, Looks, same_pixels
from fullstride.data.dataset import DataSet, Images


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two images that show the same."""

    names: tuple[str, str]
    splits: tuple[str, str]  # of each: train, minival or test
    classes: tuple[str, str]  # "" where a target is not the index of one class
    bits: int  # that differ between their perceptual hashes; 0 for the same pixels
    exact: bool = False  # whether they have the same pixels
    mirrored: bool = False  # whether one is the other one flipped left to right


@dataclass(frozen=True)
class Groups:
    """The N images as P groups of the same pixels."""

    of: np.ndarray  # int64 (N,): the group of an image
    first: np.ndarray  # int64 (P,): the first image of a group
    in_split: np.ndarray  # int64 (P, splits): its first image in a split; -1: none
    # int64 (N,): class of an image, a number for each set of several labels, -1 for other targets
    targets: np.ndarray
    classes: np.ndarray  # int64 (P,): class of all images of a group; -1 if there is none
    mixed: np.ndarray  # bool (P,): whether its images are of several classes


class Link(NamedTuple):
    """Two images that show the same, by their indices."""

    a: int
    b: int
    bits: int
    exact: bool
    mirrored: bool


def group_by_pixels(data: DataSet, looks: Looks) -> Groups:
    first, of = np.unique(same_pixels(data, looks), return_inverse=True)
    in_split = np.full((len(first), len(SPLITS)), -1)
    reverse = np.arange(len(of))[::-1]  # of several, the first image is written last
    in_split[of[reverse], looks.splits[reverse]] = reverse
    sets: dict[tuple[int, ...], int] = {}

    def number(target: Any) -> int:
        if isinstance(target, tuple):
            return sets.setdefault(target, len(data.classes) + len(sets))
        return target if type(target) is int and 0 <= target < len(data.classes) else -1

    targets = np.array([number(_target(data, looks, image)) for image in range(len(of))])
    mixed = np.zeros(len(first), bool)
    mixed[of[targets != targets[first[of]]]] = True
    return Groups(of, first, in_split, targets, np.where(mixed, -1, targets[first]), mixed)


def links_across_splits(looks: Looks, groups: Groups, matches: Matches) -> list[Link]:
    """`b` is in the later split, which is scored. In the order of `a`, then of `b`."""
    links: dict[tuple[int, int], Link] = {}
    for split, partners in enumerate(matches.by_split):
        copies, near = groups.in_split[groups.of, split], partners.index[groups.of]
        (images,) = np.nonzero((looks.splits != split) & ((copies >= 0) | (near >= 0)))
        for image in images.tolist():
            exact, group = copies[image] >= 0, groups.of[image]
            other = int(copies[image] if exact else groups.in_split[near[image], split])
            bits, mirrored = int(partners.bits[group]), bool(partners.mirrored[group])
            pair = min(image, other), max(image, other)  # images are in the order of the splits
            links[pair] = Link(*pair, *((0, True, False) if exact else (bits, False, mirrored)))
    return [links[pair] for pair in sorted(links)]


def links_across_classes(groups: Groups, matches: Matches) -> list[Link]:
    """In the order of `a`, then of `b`."""
    first = groups.first[groups.of]
    (others,) = np.nonzero(groups.targets != groups.targets[first])
    links = [Link(int(first[other]), int(other), 0, True, False) for other in others]
    partners, pairs = matches.by_class, set()
    for group in np.nonzero(partners.index >= 0)[0]:
        a, b = sorted(groups.first[[group, partners.index[group]]].tolist())
        if (a, b) not in pairs:
            pairs.add((a, b))
            bits, mirrored = int(partners.bits[group]), bool(partners.mirrored[group])
            links.append(Link(a, b, bits, False, mirrored))
    return sorted(links)


def images_to_leave_out(looks: Looks, groups: Groups, across_splits: list[Link]) -> list[int]:
    """Those that a later split shows too, and training images of which a copy has another class."""
    mixed = np.nonzero(groups.mixed[groups.of] & (looks.splits == 0))[0]
    return sorted({link.a for link in across_splits} | {*mixed.tolist()})


def image_name(data: DataSet, looks: Looks, image: int) -> str:
    return _images(data, looks, image).names[looks.indices[image]]


def as_pairs(
    data: DataSet, looks: Looks, groups: Groups, links: Iterable[Link]
) -> tuple[Pair, ...]:
    def class_name(image: int) -> str:
        if groups.targets[image] < 0:
            return ""
        target = _target(data, looks, image)
        labels = target if isinstance(target, tuple) else (target,)
        return ", ".join(data.classes[label] for label in labels)

    return tuple(
        Pair(
            names=(image_name(data, looks, link.a), image_name(data, looks, link.b)),
            splits=(SPLITS[looks.splits[link.a]], SPLITS[looks.splits[link.b]]),
            classes=(class_name(link.a), class_name(link.b)),
            bits=link.bits,
            exact=link.exact,
            mirrored=link.mirrored,
        )
        for link in links
    )


def _target(data: DataSet, looks: Looks, image: int) -> Any:
    return _images(data, looks, image).targets[looks.indices[image]]


def _images(data: DataSet, looks: Looks, image: int) -> Images:
    return getattr(data, SPLITS[looks.splits[image]])
