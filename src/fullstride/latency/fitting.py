"""Fits the numbers of a device to measured times, with errors for families left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t as student

from fullstride.latency.roofline import SHARES, PeakTimes, sensitivities, times

# Median, and standard deviation of the logarithm, before any measurement. These weak priors decide
# only where no fitted network has such an operator.
PRIORS: dict[str, tuple[float, float]] = {
    "dense": (0.5, 0.5),
    "1x1": (0.4, 0.5),
    "depthwise": (0.05, 0.7),
    "group_channels": (64, 0.7),
    "convolution": (0.6, 0.5),
    "elementwise": (0.8, 0.3),
    "norm": (0.8, 0.3),
    "statistics": (0.3, 0.5),
    "gather": (0.5, 0.5),
    "launch_us": (3, 0.5),
    "host_us": (10, 1.0),
    "start_us": (400, 1.0),
    "image_us": (30, 0.5),
}
NOISE = 0.1  # in the logarithm of a time: larger errors count linearly


@dataclass(frozen=True)
class Parameters:
    """The numbers to fit, with priors."""

    names: Sequence[str]
    priors: Mapping[str, tuple[float, float]] = field(default_factory=lambda: PRIORS)
    assumed: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # not fitted
    # The largest share of a peak rate. Caches and clocks can exceed a measured peak. A rate above a
    # data sheet's peak is a property of one device that does not move to others.
    max_share: float = 1.3

    def numbers(self, logarithms: np.ndarray) -> dict[str, float]:
        """All numbers: fitted numbers, from their logarithms, and assumed numbers."""
        fitted = dict(zip(self.names, np.exp(logarithms).tolist(), strict=True))
        return fitted | {name: median for name, (median, _) in self.assumed.items()}


def fit(work: PeakTimes, seconds: np.ndarray, parameters: Parameters) -> dict[str, float]:
    """Fit the numbers so that the times of `work` are closest to `seconds` (per batch)."""
    if len(work) != len(seconds):
        raise ValueError(f"{len(seconds)} times for {len(work)} networks: give one for each")
    names = parameters.names
    prior, deviation = np.array([parameters.priors[name] for name in names]).T
    upper = np.array([parameters.max_share if name in SHARES else np.inf for name in names])
    prior, upper, measured = np.log(prior), np.log(upper), np.log(seconds)

    def errors(x: np.ndarray) -> np.ndarray:
        estimated = times(work, parameters.numbers(x)).total_s
        return np.concatenate([(np.log(estimated) - measured) / NOISE, (x - prior) / deviation])

    def jacobian(x: np.ndarray) -> np.ndarray:
        slopes = sensitivities(work, parameters.numbers(x), names)
        return np.concatenate([slopes / NOISE, np.diag(1 / deviation)])

    start = np.minimum(prior, upper - 1e-3)  # inside the bounds
    result = least_squares(
        errors,
        start,
        jacobian,  # pyright: ignore[reportArgumentType]
        bounds=(-np.inf, upper),
        loss="soft_l1",
        max_nfev=100,
    )
    return parameters.numbers(result.x)


def left_out(
    work: PeakTimes, seconds: np.ndarray, families: np.ndarray, parameters: Parameters
) -> np.ndarray:
    """Estimate each network's time with numbers that were fitted without its family."""
    estimated = np.empty(len(work))
    for family in np.unique(families):
        own = families == family
        numbers = fit(work.select(~own), seconds[~own], parameters)
        estimated[own] = times(work.select(own), numbers).total_s
    return estimated


def error(estimated: np.ndarray, measured: np.ndarray) -> float:
    """Mean of |estimate / measured - 1| in percent."""
    return float(np.abs(estimated / measured - 1).mean() * 100)


def interval(
    estimated: np.ndarray, measured: np.ndarray, families: np.ndarray
) -> tuple[float, float]:
    """Bounds of measured / estimated for nine of ten networks of a family that was not fitted.

    Errors within a family are correlated, so families are the samples. The variance is the variance
    between family means, corrected for the number of families, plus the variance within families;
    Student's t has one degree of freedom less than families.
    """
    errors = np.log(measured / estimated)
    names, place = np.unique(families, return_inverse=True)
    size = np.bincount(place)
    means = np.bincount(place, weights=errors) / size
    within = np.bincount(place, weights=(errors - means[place]) ** 2) / size
    weight = size / size.sum()
    middle = float(weight @ means)
    correction = (len(names) + 1) / max(len(names) - 1, 1)  # a new draw around the mean of a few
    deviation = float(np.sqrt(weight @ (correction * (means - middle) ** 2 + within)))
    reach = deviation * float(student.ppf(0.95, max(len(names) - 1, 1)))
    return float(np.exp(middle - reach)), float(np.exp(middle + reach))


def resolvable_ratio(
    estimated: np.ndarray, measured: np.ndarray, groups: np.ndarray | None = None
) -> float:
    """The ratio of two estimates above which their order is right in eight cases of ten.

    Both estimates of a pair are in one group (a batch size). For each ratio r from 1 to 2 in steps
    of 0.02, pairs with ratios within 5 % of r are counted. Without any such pair, r is compared
    with the ratio that normal errors of the logarithms have.
    """
    # The difference of two errors has sqrt(2) times their deviation, and turns an order round if it
    # exceeds the logarithm of the ratio; it exceeds 0.84 of its own deviation in two cases of ten.
    normal_gap = 0.84 * np.sqrt(2) * np.log(estimated / measured).std()
    groups = np.zeros(len(estimated)) if groups is None else groups
    gaps, right = [], []
    for group in np.unique(groups):
        own = groups == group
        a, b = np.log(estimated[own]), np.log(measured[own])
        i, j = np.triu_indices(len(a), 1)
        gap = a[i] - a[j]
        gaps.append(np.abs(gap))
        right.append(np.sign(gap) == np.sign(b[i] - b[j]))
    gap, correct = np.concatenate(gaps), np.concatenate(right)
    ratios = [1 + 0.02 * step for step in range(51)]
    for ratio in reversed(ratios):
        near = (gap >= np.log(ratio / 1.05)) & (gap < np.log(ratio * 1.05))
        is_right = correct[near].mean() >= 0.8 if near.any() else np.log(ratio) >= normal_gap
        if not is_right:
            return min(ratio + 0.02, 2.0)
    return ratios[0]
