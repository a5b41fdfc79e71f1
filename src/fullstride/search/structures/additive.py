"""A Bayesian linear model of the effect of each change of a structure on the score.

score = reference + sum of coefficients x features + noise. Groups of trainings, such as the tunings
of one super-block, may have references of their own: retraining a block changes the score even if
its design stays. The effect of each term at its largest feature has a normal prior with mean 0,
correlated with the effects of the same term at other places; references have flat priors. The
posterior is then exact, and effects without data keep the uncertainty of the prior.

Source: the regression of GENet, arXiv:2006.14090, section 4, which is `fit_paper`; here with a
prior, hence a posterior for Thompson sampling and intervals.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from fullstride.search.structures.space import Space

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
