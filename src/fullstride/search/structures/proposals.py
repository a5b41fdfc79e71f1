"""Chooses the structures to train: one change at a time, then the model's proposals.

On a published table of trained networks, 40 trainings by one change at a time and then the best
predicted end 0.09 points below the best; with a refit after every four it is 0.05
(benchmarks/search_table.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fullstride.measure.budget import pareto_front
from fullstride.search.structures.additive import AdditiveModel
from fullstride.search.structures.space import Place, Space, distinct, values

# The best structures within a budget: random ones, improved by a local search. The value of a
# structure is the sum of its choices' gains; among equal values the shorter time is better.

Costs = Callable[[np.ndarray], np.ndarray]  # (n, M) structures -> (n,) ms per image

CHUNK = 100_000  # structures at once, which bounds the memory
PARENTS = 8  # structures from which a round of the local search starts
COPIES = 8  # duplicates in a chunk that cannot displace other structures
ROUNDS = 100  # most rounds of the local search; it ends when a round changes nothing
# Shares of the budget that moves of two places leave free, as times do not quite add up.
RESERVES = (0.0, 0.005, 0.02)


@dataclass(frozen=True, eq=False)
class Selection:
    """Distinct structures within the budget, the best first."""

    structures: np.ndarray  # (k, M)
    values: np.ndarray  # (k,) predicted gains over the MasterNet
    ms: np.ndarray  # (k,) per image
    compared: int  # structures that were compared


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

    Compares `count` random structures, then moves of one and two places from the best ones, until
    there is no improvement. A space of at most `count` structures is searched exhaustively.

    Raises ValueError, with the shortest time, if nothing fits.
    """
    best = Best(gains, costs, budget, max(top, PARENTS))
    if space.size <= count:
        every = space.all()
        for begin in range(0, len(every), CHUNK):
            best.add(every[begin : begin + CHUNK])
    else:
        for n in [CHUNK] * (count // CHUNK) + [count % CHUNK]:
            best.add(space.random(rng, n))
        best.add(fastest(space, costs)[None])
        climb(space, best)
    if not len(best.structures):
        shortest = costs(fastest(space, costs)[None])[0]
        raise ValueError(f"nothing fits {budget:.4g} ms: the fastest takes {shortest:.4g} ms")
    rows = best.structures[:top]
    return Selection(rows, values(gains, rows), costs(rows), best.compared)


class Best:
    """The `size` best added structures within the budget."""

    def __init__(self, gains: Sequence[np.ndarray], costs: Costs, budget: float, size: int):
        self.gains, self.costs, self.budget, self.size = gains, costs, budget, size
        self.structures = np.empty((0, len(gains)), int)
        self.compared = 0

    def add(self, structures: np.ndarray) -> None:
        self.compared += len(structures)
        if len(self.structures) == self.size:  # lower values need no times
            least = values(self.gains, self.structures[-1:])
            structures = structures[values(self.gains, structures) >= least]
        inside = structures[self.costs(structures) <= self.budget]
        inside = self.in_order(inside)[: COPIES * self.size]
        every = distinct(np.concatenate([self.structures, inside]))
        self.structures = self.in_order(every)[: self.size]

    def in_order(self, structures: np.ndarray) -> np.ndarray:
        """The best first, as in `measure.budget.best`."""
        return structures[np.lexsort((self.costs(structures), -values(self.gains, structures)))]


def fastest(space: Space, costs: Costs) -> np.ndarray:
    """(M,): the structure with the shortest time that moves of one place reach."""
    row, shortest = space.start, costs(space.start[None])[0]
    while True:
        near = space.neighbours(row)
        ms = costs(near) if len(near) else np.array([shortest])
        if ms.min() >= shortest:
            return row
        row, shortest = near[ms.argmin()], ms.min()


def climb(space: Space, best: Best) -> None:
    """Add moves of one and two places from the best structures, until all are tried."""
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
    """Combine each change of one place with the best change of each other place that still fits.

    `near`: the structures that differ from `structure` at one place. The times of two changes are
    assumed to add up; to be exact would need the times of all pairs.
    """
    place = (near != structure).argmax(axis=1)
    ms = best.costs(structure[None])[0]
    change = best.costs(near) - ms
    gain = values(best.gains, near)
    pairs = []
    for other in np.unique(place):
        changes = np.flatnonzero(place == other)
        own = np.array(pareto_front(changes, change.__getitem__, gain.__getitem__))
        rest = np.flatnonzero(place != other)
        for reserve in RESERVES:
            room = best.budget * (1 - reserve) - ms - change[rest]
            index = np.searchsorted(change[own], room, side="right") - 1
            rows = near[rest[index >= 0]]
            rows[:, other] = near[own[index[index >= 0]], other]
            pairs.append(rows)
    return np.concatenate(pairs) if pairs else near[:0]


PER_PLACE = 9  # samples of a place and class, as in the paper
CANDIDATES = 100_000  # random structures for each proposal


@dataclass(frozen=True, eq=False)
class Design:
    """Structures to train, and the place that each one changes."""

    structures: np.ndarray  # (n, M)
    places: np.ndarray  # (n,) index of the place; a control has the MasterNet's structure


def first_design(
    space: Space,
    rng: np.random.Generator,
    *,
    per_place: int = PER_PLACE,
    control_each: bool = True,
    spread: bool = True,
) -> Design:
    """One change at a time: `per_place` samples of each place and class of block.

    The first sample of a place is its control, the MasterNet's structure, whose block is retrained
    like all others; without `control_each` there is no control. The first sample of another class
    is the nearest to the MasterNet, and shows the effect of the class alone. Further samples are
    spread over the choices of the class, the ends of the ranges first; with `spread=False` they are
    drawn uniformly, as in the paper.
    """
    rows, places = list[np.ndarray](), list[int]()
    for i, place in enumerate(space.places):
        control = [place.start] if control_each else []
        for choice in [*control, *place_samples(place, rng, per_place, spread)]:
            rows.append(space.start.copy())
            rows[-1][i] = choice
            places.append(i)
    return Design(np.array(rows), np.array(places))


def place_samples(place: Place, rng: np.random.Generator, count: int, spread: bool) -> list[int]:
    """The choices of a place to train besides its control."""
    classes = np.zeros(place.choices, int) if place.classes is None else place.classes
    scale = np.abs(place.features).max(axis=0, initial=0)
    points = place.features / np.where(scale > 0, scale, 1)
    samples: list[int] = []
    for label in np.unique(classes):
        members = np.flatnonzero(classes == label)
        nearest = members[(points[members] ** 2).sum(axis=1).argmin()]
        members = members[members != nearest]
        if nearest != place.start:
            samples.append(int(nearest))
        number = min(count - 1, len(members))
        if spread:
            samples += farthest(points, rng.permutation(members), int(nearest), number)
        else:
            samples += rng.choice(members, number, replace=False).tolist()
    return samples


def farthest(points: np.ndarray, members: np.ndarray, last: int, count: int) -> list[int]:
    """`count` of `members`, each the farthest from the initial `last` and all previous picks."""
    distance, chosen = np.full(len(members), np.inf), list[int]()
    for _ in range(count):
        to_last = np.linalg.norm(points[members] - points[last], axis=1)
        distance = np.minimum(distance, to_last)
        distance[np.isin(members, chosen)] = -1
        last = int(members[distance.argmax()])
        chosen.append(last)
    return chosen


def next_structures(
    model: AdditiveModel,
    costs: Costs,
    budget: float,
    tried: np.ndarray,
    rng: np.random.Generator,
    *,
    count: int = 4,
    method: Literal["thompson", "greedy"] = "thompson",
) -> np.ndarray:
    """(k, M), k <= `count`: distinct structures within `budget` ms that are not in `tried`, (n, M).

    Each structure is the best by its own draw from the model's posterior (Thompson sampling), or by
    the posterior mean (`greedy`). k < `count` if all structures that fit have been tried. Raises
    ValueError if nothing fits.
    """
    space = model.space
    used = {row.tobytes() for row in np.ascontiguousarray(tried, dtype=int)}
    picks: list[np.ndarray] = []
    for _ in range(count):
        gains = model.draw(rng) if method == "thompson" else model.gains()
        ranked = select(
            space, gains, costs, budget, top=len(used) + 1, count=CANDIDATES, rng=rng
        ).structures
        new = [row for row in ranked if row.tobytes() not in used]
        if not new:
            break
        picks.append(new[0])
        used.add(new[0].tobytes())
    return np.array(picks, int).reshape(-1, len(space.places))
