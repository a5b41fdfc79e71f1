"""Which structures are trained next? First one change at a time, then what the model proposes.

On a published table of trained networks, 40 trainings by one change at a time and then the best
predicted end 0.09 points below the best; with a refit after every four it is 0.05
(benchmarks/search_table.md).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fullstride.search.structures.additive import AdditiveModel
from fullstride.search.structures.select import Costs, select
from fullstride.search.structures.space import Place, Space

PER_PLACE = 9  # samples of a place and class, as in the paper
CANDIDATES = 100_000  # random structures for each proposal


@dataclass(frozen=True, eq=False)
class Design:
    """Structures to train, and which place each of them is about."""

    structures: np.ndarray  # (n, M)
    places: np.ndarray  # (n,) index of the place; a control is the MasterNet's own structure


def first_design(
    space: Space,
    rng: np.random.Generator,
    *,
    per_place: int = PER_PLACE,
    control_each: bool = True,
    spread: bool = True,
) -> Design:
    """One change at a time: `per_place` samples of each place and class of block.

    The first sample of a place is its control, the MasterNet's own structure, whose block is
    trained again like all others; with `control_each=False`, for structures that are trained whole,
    a single control stands at the front, of place -1. The first sample of another class differs
    from the MasterNet in the least; it shows what the class alone is worth. A class with fewer
    choices has each of them once.

    The samples of a class are spread over its choices, the ends of the ranges first; with
    `spread=False` they are drawn uniformly, as in the paper. The same generator gives the same
    design.
    """
    if per_place < 2:
        raise ValueError(f"{per_place} samples of a place: use at least 2, of which 1 is a control")
    rows, places = [space.start], [-1]
    for i, place in enumerate(space.places):
        if control_each:
            rows.append(space.start)
            places.append(i)
        for choice in place_samples(place, rng, per_place, spread):
            row = space.start.copy()
            row[i] = choice
            rows.append(row)
            places.append(i)
    begin = 1 if control_each else 0
    return Design(np.array(rows[begin:]), np.array(places[begin:]))


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
            samples += farthest(points, members, int(nearest), number, rng)
        else:
            samples += rng.choice(members, number, replace=False).tolist()
    return samples


def farthest(
    points: np.ndarray, members: np.ndarray, first: int, count: int, rng: np.random.Generator
) -> list[int]:
    """`count` of `members`, each the farthest from `first` and those before; ties by the draw."""
    members = rng.permutation(members)
    distance = np.linalg.norm(points[members] - points[first], axis=1)
    chosen = []
    for _ in range(count):
        index = int(distance.argmax())
        chosen.append(int(members[index]))
        distance = np.minimum(
            distance, np.linalg.norm(points[members] - points[members[index]], axis=1)
        )
        distance[index] = -1
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
    candidates: int = CANDIDATES,
) -> np.ndarray:
    """(k, M), k <= `count`: distinct structures within `budget` ms that are not in `tried`, (n, M).

    Each is the best by a draw of its own from the model's posterior (Thompson sampling), or by its
    mean (`greedy`). Fewer, or none, where all that fit have been tried. Raises ValueError, with the
    shortest time, if nothing fits.
    """
    space = model.space
    used = {row.tobytes() for row in np.ascontiguousarray(tried, dtype=int)}
    picks: list[np.ndarray] = []
    for _ in range(count):
        gains = model.draw(rng) if method == "thompson" else model.gains()
        ranked = select(
            space, gains, costs, budget, top=len(used) + 1, count=candidates, rng=rng
        ).structures
        new = [row for row in ranked if row.tobytes() not in used]
        if not new:
            break
        picks.append(new[0])
        used.add(new[0].tobytes())
    return np.array(picks, int).reshape(-1, len(space.places))
