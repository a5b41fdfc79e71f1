"""A linear model of the scores of structures, and the structures that it proposes to train."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from fullstride.measure.budget import pareto_front
from fullstride.search.structures.space import MOST_LISTED, Place, Space, distinct, values

# A Bayesian linear model of the effect of each change of a structure on the score.
#
# score = reference + sum of coefficients x features + noise. Groups of trainings, such as the
# tunings of one super-block, may have references of their own: retraining a block changes the
# score even if its design stays. The effect of each term at its largest feature has a normal prior
# with mean 0, correlated with the effects of the same term at other places; references have flat
# priors. The posterior is then exact, and effects without data keep the uncertainty of the prior.
#
# Source: the regression of GENet, arXiv:2006.14090, section 4, which is `fit_paper`; here with a
# prior, hence a posterior for Thompson sampling and intervals.

# Grids of noise and prior: points, and decades below and above the deviation of the scores.
GRID, DECADES = 40, (-3.0, 1.0)
# The noise is expected to be this share of the scores' deviation, within a factor of e**SPREAD: one
# training for each choice cannot separate noise from effects.
NOISE_SHARE, SPREAD = 0.1, 1.0
# Between the effects of one term at two places: if more depth helps one stage, it may help others.
CORRELATION = 0.5
# Correlations between the effects in tunings and in whole trainings, and ratios of deviations.
# With an agreement of 1 the covariance would be singular.
AGREEMENTS, RATIOS = (0.0, 0.5, 0.9, 0.99), (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Slope:
    """A pseudo-gradient: points for one unit of the term, all else being equal."""

    place: str
    term: str
    value: float
    standard_error: float | None  # None: not determined


@dataclass(frozen=True, eq=False)
class AdditiveModel:
    """The posterior of the reference and the P coefficients, in the order of `space.terms`."""

    space: Space
    reference: float  # score of the MasterNet's structure
    mean: np.ndarray  # (P,)
    joint: np.ndarray  # (1 + P, 1 + P) covariance of reference and coefficients
    noise: float  # standard deviation of one training

    @property
    def covariance(self) -> np.ndarray:
        """(P, P) of the coefficients."""
        return self.joint[1:, 1:]

    def gains(self, coefficients: np.ndarray | None = None) -> list[np.ndarray]:
        """The gains of all choices over the MasterNet's choice, one array for each place."""
        values = self.mean if coefficients is None else coefficients
        places = zip(self.space.places, self.space.columns, strict=True)
        return [place.features @ values[columns] for place, columns in places]

    def draw(self, rng: np.random.Generator) -> list[np.ndarray]:
        """The gains of one draw from the posterior, for Thompson sampling."""
        scale, vectors = np.linalg.eigh(self.covariance)
        normal = rng.standard_normal(len(scale)) * np.sqrt(np.maximum(scale, 0))
        return self.gains(self.mean + vectors @ normal)

    def predict(self, structures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n, M) structures -> (n,) scores, and standard errors with the noise of a training."""
        features = self.space.features(structures)
        with_reference = np.insert(features, 0, 1.0, axis=1)
        variance = ((with_reference @ self.joint) * with_reference).sum(axis=1)
        score = self.reference + features @ self.mean
        return score, np.sqrt(np.maximum(variance, 0) + self.noise**2)

    def slopes(self) -> tuple[Slope, ...]:
        """The pseudo-gradients with standard errors."""
        errors = np.sqrt(np.diag(self.covariance))
        finite = [error if np.isfinite(error) else None for error in errors.tolist()]
        rows = zip(self.space.terms, self.mean.tolist(), finite, strict=True)
        return tuple(Slope(*names, value, error) for names, value, error in rows)


def fit(
    space: Space,
    structures: np.ndarray,
    scores: np.ndarray,
    *,
    groups: np.ndarray | None = None,
    tuned: np.ndarray | None = None,
    noise: float | None = None,
    prior: float | None = None,
) -> AdditiveModel:
    """Fit the model to the `scores`, (n,), of trainings of `structures`, (n, M).

    Args:
        groups: (n,): trainings with equal numbers share a reference; the model's reference is of
            group 0, by default the only group.
        tuned: (n,) of bool: trainings with effects of their own, as of blocks exchanged in a
            trained network; the agreement with the model's effects is estimated.
        noise: Standard deviation of a training, in points.
        prior: Standard deviation of a term's effect at its largest feature, in points.

    `noise` and `prior` default to the maximum of the restricted likelihood times a weak prior of
    the noise.
    """
    scores = np.asarray(scores, float)
    numbers = np.zeros(len(scores), int) if groups is None else np.asarray(groups)
    every = np.unique(np.append(0, numbers))
    members = (numbers[:, None] == every).astype(float)  # (n, groups), group 0 first
    members = np.concatenate([members[:, every == 0], members[:, every != 0]], axis=1)
    scale = np.concatenate([np.abs(place.features).max(axis=0) for place in space.places])
    features = space.features(structures) / scale
    centre = scores.mean()
    effects, covariances = effects_of(space, features, tuned)
    spreads = (effects @ each @ effects.T for each in covariances)
    scales = [estimate_scales(members, each, scores - centre, noise, prior) for each in spreads]
    most_likely = max(zip(scales, covariances, strict=True), key=lambda each: each[0][-1])
    (noise, prior, _), related = most_likely
    design = np.concatenate([members, effects], axis=1)
    precision = design.T @ design / noise**2
    own = slice(members.shape[1], None)
    precision[own, own] += np.linalg.inv(related) / prior**2
    covariance = np.linalg.inv(precision)
    mean = covariance @ design.T @ (scores - centre) / noise**2
    rows = np.append(0, members.shape[1] + np.arange(len(scale)))
    per_unit = np.append(1.0, 1 / scale)
    return AdditiveModel(
        space=space,
        reference=float(centre + mean[0]),
        mean=mean[rows[1:]] / scale,
        joint=covariance[np.ix_(rows, rows)] * np.outer(per_unit, per_unit),
        noise=float(noise),
    )


def correlations(space: Space) -> np.ndarray:
    """(P, P): prior correlations, which relate the effects of one term at several places."""
    terms = np.array([term for _, term in space.terms])
    same = (terms[:, None] == terms).astype(float)
    return CORRELATION * same + (1 - CORRELATION) * np.eye(len(terms))


def effects_of(
    space: Space, features: np.ndarray, tuned: np.ndarray | None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The features of all effects, and prior covariances from which the likelihood chooses.

    With two kinds of trainings, (n, P) features become (n, 2P): the effects of the model, and the
    effects of `tuned` trainings, related by `AGREEMENTS` and `RATIOS`.
    """
    related = correlations(space)
    if tuned is None or tuned.all() or not tuned.any():
        return features, [related]
    both = np.concatenate([features * ~tuned[:, None], features * tuned[:, None]], axis=1)
    kinds = (np.array([[1.0, a * r], [a * r, r**2]]) for a, r in product(AGREEMENTS, RATIOS))
    return both, [np.kron(each, related) for each in kinds]


def estimate_scales(
    members: np.ndarray,
    spread: np.ndarray,
    scores: np.ndarray,
    noise: float | None,
    prior: float | None,
) -> tuple[float, float, float]:
    """The standard deviations of a training and of the effects, and their log-likelihood.

    `spread`, (n, n): the covariance of the scores by the effects, for `prior` 1. The restricted
    likelihood is of the contrasts that no reference changes. In the basis where their covariance
    is diagonal, it is a sum for each point of the grid.
    """
    left, singular, _ = np.linalg.svd(members)
    free = left[:, int((singular > 1e-9).sum()) :]  # contrasts
    contrasts = free.T @ scores
    deviation = float(np.sqrt(np.mean(contrasts**2))) if len(contrasts) else 0.0
    deviation = deviation or 1.0  # one training, or equal scores
    own, vectors = np.linalg.eigh(free.T @ spread @ free)
    own, squares = np.maximum(own, 0), (vectors.T @ contrasts) ** 2
    grid = deviation * np.logspace(*DECADES, GRID)
    noises = grid if noise is None else np.array([noise])
    priors = grid if prior is None else np.array([prior])
    variance = own * priors[:, None, None] ** 2 + noises[:, None] ** 2
    fitness = np.asarray(-0.5 * (np.log(variance) + squares / variance).sum(axis=2))
    if noise is None:
        fitness -= 0.5 * (np.log(noises / (NOISE_SHARE * deviation)) / SPREAD) ** 2
    row, column = np.unravel_index(fitness.argmax(), fitness.shape)
    return float(noises[column]), float(priors[row]), float(fitness.max())


def fit_paper(
    space: Space, structures: np.ndarray, scores: np.ndarray, reference: float
) -> AdditiveModel:
    """The paper's form: a least-squares fit for each place and type, no intercept, no ridge.

    `reference` is the MasterNet's score, and `space` has a pair of columns for each type, as
    `net_space(paper=True)`. If the samples of a type do not determine both slopes, the solution has
    the least norm; a type without samples has slopes of 0. Standard errors are by the residuals of
    all fits together, infinite without degrees of freedom.

    Raises ValueError for structures that differ from the MasterNet's at several places.
    """
    scores = np.asarray(scores, float)
    if ((structures != space.start).sum(axis=1) > 1).any():
        raise ValueError("the paper's fit takes structures that differ at one place only")
    features = space.features(structures)
    # Types have columns of their own, and a row has one type: one solution fits all types.
    inverse = np.linalg.pinv(features, rcond=1e-9)
    mean = inverse @ (scores - reference)
    rows = features.any(axis=1)
    left = int(rows.sum()) - int(np.linalg.matrix_rank(features))
    residuals = (scores - reference - features @ mean)[rows]
    noise = float(np.sqrt((residuals**2).sum() / left)) if left > 0 else np.inf
    joint = np.zeros((1 + len(mean), 1 + len(mean)))
    if np.isfinite(noise):
        joint[1:, 1:] = noise**2 * inverse @ inverse.T
    else:
        np.fill_diagonal(joint[1:, 1:], np.inf)
    return AdditiveModel(
        space=space, reference=float(reference), mean=mean, joint=joint, noise=noise
    )


# Chooses the structures to train: one change at a time, then the model's proposals.
#
# On a published table of trained networks, 40 trainings by one change at a time and then the best
# predicted end 0.09 points below the best; with a refit after every four it is 0.05
# (benchmarks/search_table.md).

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
class StructureSelection:
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
) -> StructureSelection:
    """The `top` structures with the largest sums of `gains` whose time is at most `budget` ms.

    Compares `count` random structures, then moves of one and two places from the best ones, until
    there is no improvement. A space of at most `count` structures, and `MOST_LISTED`, is searched
    exhaustively.

    Raises ValueError, with the shortest time, if nothing fits.
    """
    best = Best(gains, costs, budget, max(top, PARENTS))
    if space.size <= min(count, MOST_LISTED):
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
    return StructureSelection(rows, values(gains, rows), costs(rows), best.compared)


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
