"""What may a search change? Places with choices; a structure is one choice for each place.

Structures are rows of choice indices, so that millions of them are arrays. The numbers that a
linear model of the accuracy sees of a choice are its features, which are zero for the MasterNet's
own choice: their coefficients are then gains over the MasterNet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

MOST_LISTED = 2_000_000  # structures that `Space.all` lists


@dataclass(frozen=True, eq=False)
class Place:
    """One place of a network, as a super-block, and what may stand there."""

    name: str  # the prefix of its parameters: "stem", "stages.0", "head"
    choices: int  # number of them
    start: int  # index of the MasterNet's own choice
    features: np.ndarray  # (choices, p), zero in the row `start`
    terms: tuple[str, ...]  # names of the p columns: "depth", "log width", "kernel 5", ...
    # (choices,) the classes of block, numbered; samples are drawn within one. None: all equal
    classes: np.ndarray | None = None

    def __post_init__(self) -> None:
        rows, columns = self.features.shape
        classes = self.choices if self.classes is None else len(self.classes)
        if not rows == classes == self.choices or columns != len(self.terms):
            raise ValueError(
                f"place {self.name}: {rows} x {columns} features for {self.choices} choices and "
                f"{len(self.terms)} terms: give a row for each choice and a column for each term"
            )
        if not 0 <= self.start < self.choices or self.features[self.start].any():
            raise ValueError(f"place {self.name}: the features of choice {self.start} must be 0")


@dataclass(frozen=True, eq=False)
class Space:
    """The places of a network. A structure is a row of M integers, the choice at each place."""

    places: tuple[Place, ...]

    @cached_property
    def sizes(self) -> np.ndarray:
        """(M,) choices at each place."""
        return np.array([place.choices for place in self.places])

    @cached_property
    def start(self) -> np.ndarray:
        """(M,) the MasterNet's own structure."""
        return np.array([place.start for place in self.places])

    @cached_property
    def size(self) -> int:
        """The number of structures."""
        return math.prod(place.choices for place in self.places)

    @cached_property
    def terms(self) -> tuple[tuple[str, str], ...]:
        """(place, term) of each of the P features."""
        return tuple((place.name, term) for place in self.places for term in place.terms)

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """The features of each place among all P."""
        ends = np.cumsum([len(place.terms) for place in self.places]).tolist()
        return tuple(map(slice, [0, *ends[:-1]], ends))

    def features(self, structures: np.ndarray) -> np.ndarray:
        """(n, M) structures -> (n, P)."""
        parts = [place.features[structures[:, i]] for i, place in enumerate(self.places)]
        return np.concatenate(parts, axis=1)

    def random(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """(n, M): every place is drawn uniformly and on its own."""
        return rng.integers(self.sizes, size=(n, len(self.places)))

    def all(self) -> np.ndarray:
        """Every structure, in lexicographic order. Raises ValueError for too large a space."""
        if self.size > MOST_LISTED:
            raise ValueError(f"{self.size:,} structures: at most {MOST_LISTED:,} can be listed")
        return np.stack(np.unravel_index(np.arange(self.size), self.sizes), axis=1)

    def neighbours(self, structure: np.ndarray) -> np.ndarray:
        """Every structure that differs from `structure`, (M,), at exactly one place."""
        ends = np.cumsum(self.sizes)
        rows = np.tile(structure, (int(ends[-1]), 1))
        for i, (end, size) in enumerate(zip(ends, self.sizes, strict=True)):
            rows[end - size : end, i] = np.arange(size)
        return rows[(rows != structure).any(axis=1)]

    def active_bounds(self, structure: np.ndarray) -> tuple[str, ...]:
        """Where `structure` stands at the end of a range. Choices without an order have none."""
        return ()


def values(gains: Sequence[np.ndarray], structures: np.ndarray) -> np.ndarray:
    """The sums of the gains, one array of choices for each place: (n, M) structures -> (n,)."""
    total = np.zeros(len(structures))
    for i, gain in enumerate(gains):
        total += gain[structures[:, i]]
    return total


def distinct(structures: np.ndarray) -> np.ndarray:
    """Each row once, in the order of its first appearance."""
    _, first = np.unique(structures, axis=0, return_index=True)
    return structures[np.sort(first)]
