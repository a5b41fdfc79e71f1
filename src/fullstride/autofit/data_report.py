"""What is in the data, and what would make a score a lie?"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two images that show the same."""

    names: tuple[str, str]
    splits: tuple[str, str]  # of each: train, minival or test
    classes: tuple[str, str]
    bits: int  # that differ between their perceptual hashes; 0 for the same pixels


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What a look at all images of a data set tells."""

    images: Mapping[str, int]  # split -> number
    classes: int
    smallest: tuple[str, int]  # class and number of its training images
    largest: tuple[str, int]
    sides: tuple[int, int, int]  # shorter side in pixels: smallest, median, largest
    channels: int
    unreadable: Mapping[str, str]  # name -> reason
    across_splits: tuple[Pair, ...]  # the second one is scored on
    across_classes: tuple[Pair, ...]
    notes: tuple[str, ...] = ()
