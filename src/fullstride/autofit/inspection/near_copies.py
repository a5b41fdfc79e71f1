"""Which images show the same as another one of another split or class? Compared in blocks.

Of each image only the closest partner is stored, so that memory grows with the number of images
and not with that of pairs.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fullstride.autofit.inspection.perceptual_hash import MAX_BITS, Pictures

ROWS, COLUMNS = 256, 4096  # hashes that are compared at once
CHUNK = 4096  # pairs whose thumbnails are compared at once
MAX_COMPARED = 200_000  # images; of more, only those of different splits are compared


class Pairs(NamedTuple):
    """P pairs of images that show the same."""

    a: np.ndarray  # int64 (P,)
    b: np.ndarray  # int64 (P,)
    bits: np.ndarray  # int64 (P,): that differ between their hashes
    distances: np.ndarray  # float32 (P,)
    mirrored: np.ndarray  # bool (P,)

    def where(self, rows: np.ndarray) -> "Pairs":
        return Pairs(*(values[rows] for values in self))

    def swapped(self) -> "Pairs":
        return self._replace(a=self.b, b=self.a)


@dataclass(frozen=True)
class Partners:
    """For each of N images the closest one of some set."""

    index: np.ndarray  # int64 (N,); -1: none
    bits: np.ndarray  # int64 (N,)
    distances: np.ndarray  # float32 (N,)
    mirrored: np.ndarray  # bool (N,)

    @staticmethod
    def none(images: int) -> "Partners":
        return Partners(
            np.full(images, -1),
            np.zeros(images, np.int64),
            np.full(images, np.inf, np.float32),
            np.zeros(images, bool),
        )

    def update(self, pairs: Pairs) -> None:
        """Take `b` as the partner of `a` where it is closer; of equals the first one."""
        order = np.lexsort((pairs.b, pairs.distances, pairs.a))
        pairs = pairs.where(order)
        pairs = pairs.where(np.diff(pairs.a, prepend=-1) > 0)
        before, distance = self.index[pairs.a], self.distances[pairs.a]
        is_first = (pairs.distances == distance) & (pairs.b < before)
        pairs = pairs.where((pairs.distances < distance) | is_first)
        self.index[pairs.a] = pairs.b
        self.bits[pairs.a] = pairs.bits
        self.distances[pairs.a] = pairs.distances
        self.mirrored[pairs.a] = pairs.mirrored


class Matches(NamedTuple):
    by_split: tuple[Partners, ...]  # the closest image in each split, of those with images beside
    by_class: Partners  # the closest image of another class


def find_matches(
    pictures: Pictures, in_split: np.ndarray, classes: np.ndarray, mirror: bool
) -> Generator[float, None, Matches]:
    """The partners of each picture in other splits, and in another class.

    Yields the share of the comparisons that is done.

    Args:
        pictures: N of them, all different.
        in_split: bool (N, splits): whether a picture is in a split.
        classes: int64 (N,): class of a picture; -1: none, or several.
        mirror: Whether mirrored pictures show the same.
    """
    n, splits = in_split.shape
    matches = Matches(tuple(Partners.none(n) for _ in range(splits)), Partners.none(n))
    split_bits = np.packbits(in_split, axis=1, bitorder="little")[:, 0]
    elsewhere = in_split.sum(1, keepdims=True) > in_split  # in another split than this one

    def concern(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Whether pairs are in several splits or in two classes."""
        of_class = classes[a], classes[b]
        apart = (of_class[0] != of_class[1]) & (of_class[0] >= 0) & (of_class[1] >= 0)
        return apart | (np.bitwise_count(split_bits[a] | split_bits[b]) > 1)

    everywhere = n <= MAX_COMPARED
    rows = np.arange(n) if everywhere else np.nonzero(in_split[:, 1:].any(1))[0]
    for start in range(0, len(rows), ROWS):
        for pairs in near_pairs(pictures, rows[start : start + ROWS], everywhere, mirror, concern):
            for each in (pairs, pairs.swapped()):
                for split, partners in enumerate(matches.by_split):
                    partners.update(each.where(in_split[each.b, split] & elsewhere[each.a, split]))
                a, b = classes[each.a], classes[each.b]
                matches.by_class.update(each.where((a != b) & (a >= 0) & (b >= 0)))
        left = max(0.0, 1 - (start + ROWS) / len(rows))
        yield 1 - left * left if everywhere else 1 - left
    return matches


def near_pairs(
    pictures: Pictures,
    rows: np.ndarray,
    later: bool,
    mirror: bool,
    concern: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Iterator[Pairs]:
    """The pairs of pictures in `rows`, which are in order, with others, or with `later` ones.

    `concern` is a function from the indices of pairs to whether they are compared.
    """
    forms = [(pictures.hashes, False), (pictures.mirrored_hashes, True)][: 1 + mirror]
    (columns,) = np.nonzero(pictures.contrasted)
    columns = columns[columns > rows[0]] if later else columns
    rows = rows[pictures.contrasted[rows]]
    for start in range(0, len(columns), COLUMNS):
        block = columns[start : start + COLUMNS]
        for hashes, mirrored in forms:
            bits = np.bitwise_count(pictures.hashes[rows, None] ^ hashes[None, block])
            near = np.flatnonzero(bits <= MAX_BITS)  # in two dimensions it is ten times slower
            i, j = np.divmod(near, len(block))
            a, b, bits = rows[i], block[j], bits.ravel()[near].astype(np.int64)
            is_wanted = (a < b if later else a != b) & concern(a, b)
            a, b, bits = a[is_wanted], b[is_wanted], bits[is_wanted]
            for first in range(0, len(a), CHUNK):
                chunk = slice(first, first + CHUNK)
                distances = pictures.distances(a[chunk], b[chunk], mirrored)
                same = pictures.same(a[chunk], b[chunk], distances, mirrored)
                flags = np.full(len(distances), mirrored)
                yield Pairs(a[chunk], b[chunk], bits[chunk], distances, flags).where(same)
