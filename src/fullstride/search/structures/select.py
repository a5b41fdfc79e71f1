"""Which structures are the best within a budget? Random ones, improved by a local search.

The value of a structure is the sum of its choices' gains; its time is whatever `Costs` says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fullstride.search.structures.space import Space, distinct, values

Costs = Callable[[np.ndarray], np.ndarray]  # (n, M) structures -> (n,) ms per image

CHUNK = 100_000  # structures at once, which bounds the memory
PARENTS = 8  # structures that a round of the local search starts from
COPIES = 8  # times that one structure may come in a chunk without hiding others
ROUNDS = 100  # of the local search at most; it ends when a round changes nothing
# Of the budget, left free by moves of two places: times of two changes do not quite add up.
RESERVES = (0.0, 0.005, 0.02)


@dataclass(frozen=True, eq=False)
class Selection:
    """Distinct structures within the budget, the best first."""

    structures: np.ndarray  # (k, M)
    values: np.ndarray  # (k,) predicted gains over the MasterNet
    ms: np.ndarray  # (k,) per image
    bounds: tuple[tuple[str, ...], ...]  # of each: where it stands at the end of a range
    compared: int  # structures of which these are the best


def select(
    space: Space,
    gains: Sequence[np.ndarray],
    costs: Costs,
    budget: float,
    *,
    top: int = 10,
    count: int = 1_000_000,
    rng: np.random.Generator,
) -> Selection:
    """The `top` structures with the largest sums of `gains` whose time is at most `budget` ms.

    `count` random structures, then moves of one and two places from the best of them until nothing
    better appears. A space of at most `count` structures is searched whole.

    Raises ValueError, with the shortest time, if nothing fits.
    """
    best = Best(gains, costs, budget, max(top, PARENTS))
    if space.size <= count:
        best.add(space.all())
    else:
        for n in [CHUNK] * (count // CHUNK) + [count % CHUNK]:
            best.add(space.random(rng, n))
        best.add(fastest(space, costs)[None])
        climb(space, best)
    if not len(best.structures):
        shortest = costs(fastest(space, costs)[None])[0]
        raise ValueError(f"nothing fits {budget:.4g} ms: the fastest takes {shortest:.4g} ms")
    rows = best.structures[:top]
    return Selection(
        structures=rows,
        values=best.values[:top],
        ms=costs(rows),
        bounds=tuple(space.active_bounds(row) for row in rows),
        compared=best.compared,
    )


class Best:
    """The `size` structures with the largest values within the budget, of all that were added."""

    def __init__(self, gains: Sequence[np.ndarray], costs: Costs, budget: float, size: int):
        self.gains, self.costs, self.budget, self.size = gains, costs, budget, size
        self.structures = np.empty((0, len(gains)), int)
        self.values = np.empty(0)
        self.compared = 0

    def add(self, structures: np.ndarray) -> None:
        for i in range(0, len(structures), CHUNK):
            self.add_chunk(structures[i : i + CHUNK])

    def add_chunk(self, structures: np.ndarray) -> None:
        self.compared += len(structures)
        value = values(self.gains, structures)
        if len(self.values) == self.size:  # times of the others would change nothing
            structures = structures[value > self.values[-1]]
            if not len(structures):
                return
        structures = structures[self.costs(structures) <= self.budget]
        if len(structures) > COPIES * self.size:
            value = values(self.gains, structures)
            first = np.argpartition(-value, COPIES * self.size)[: COPIES * self.size]
            structures = structures[first]
        every = distinct(np.concatenate([self.structures, structures]))
        value = values(self.gains, every)
        order = np.argsort(-value, kind="stable")[: self.size]
        self.structures, self.values = every[order], value[order]


def fastest(space: Space, costs: Costs) -> np.ndarray:
    """(M,): the structure with the shortest time that moves of one place lead to."""
    row, shortest = space.start, costs(space.start[None])[0]
    while True:
        near = space.neighbours(row)
        ms = costs(near) if len(near) else np.array([shortest])
        if ms.min() >= shortest:
            return row
        row, shortest = near[ms.argmin()], ms.min()


def climb(space: Space, best: Best) -> None:
    """Moves of one and two places from the best structures, until they are all tried."""
    tried: set[bytes] = set()
    for _ in range(ROUNDS):
        parents = [row for row in best.structures[:PARENTS] if row.tobytes() not in tried]
        if not parents:
            return
        for row in parents:
            tried.add(row.tobytes())
            near = space.neighbours(row)
            best.add(near)
            best.add(pair_moves(row, near, best))


def pair_moves(structure: np.ndarray, near: np.ndarray, best: Best) -> np.ndarray:
    """With each change of one place, the best change of each other place that still fits.

    `near`: the structures that differ from `structure` at one place. Times of two changes are taken
    to add up, less than which would need every pair.
    """
    place = (near != structure).argmax(axis=1)
    ms = best.costs(structure[None])[0]
    change = best.costs(near) - ms
    gain = values(best.gains, near)
    pairs = []
    for other in np.unique(place):
        own = np.flatnonzero(place == other)
        own = own[np.argsort(change[own], kind="stable")]
        # The most valuable of the changes that take as long as each, or less.
        leader = np.maximum.accumulate(gain[own])
        first = np.flatnonzero(np.append(True, leader[1:] > leader[:-1]))
        own = own[first]
        rest = np.flatnonzero(place != other)
        for reserve in RESERVES:
            room = best.budget * (1 - reserve) - ms - change[rest]
            index = np.searchsorted(change[own], room, side="right") - 1
            rows = near[rest[index >= 0]]
            rows[:, other] = near[own[index[index >= 0]], other]
            pairs.append(rows)
    return np.concatenate(pairs) if pairs else near[:0]
