"""How uncertain are the numbers of a profile that is fitted to published tables?"""

from collections.abc import Mapping

import numpy as np
from scipy.optimize import minimize
from scipy.stats import t as student

from fullstride.latency.fitting import NOISE, Parameters
from fullstride.latency.roofline import MEMORY, NORMAL_95, REST, PeakTimes, bounds, sensitivities

# The numbers that times of full batches determine, and those that they do not: launches take under
# a tenth of such a batch. Device time of a launch: V100, the one eager table with small batches.
# Host time: between the 56 us of that table, of PyTorch in 2020, and 10 us; 90 % are 9 to 67.
FULL_BATCH = ("dense", "1x1", "depthwise", "group_channels", *MEMORY)
ASSUMED = {"launch_us": (3.0, 0.5), "host_us": (25.0, 0.6)}
# A compiled network calls its kernels without PyTorch's dispatch; nothing here has measured it.
ASSUMED_COMPILED = {**ASSUMED, "host_us": (10.0, 0.8)}


def fit_spreads(
    sensitive: np.ndarray, errors: np.ndarray, families: np.ndarray, parameters: Parameters
) -> dict[str, float]:
    """Standard deviations of the logarithms of numbers, for networks of families not fitted.

    `sensitive`: `roofline.sensitivities` to the fitted numbers, (networks, numbers). `errors`:
    log(measured / estimate) by numbers that were fitted without a network's family. The variance of
    an error is the sum of squares of its sensitivities times the deviations, and of a deviation
    that no number explains (`REST`). They are the most likely ones, where each family counts as one
    sample. A number is known better after a fit than before: its deviation is half that of its
    prior where no network shows it, and at most that of the prior. Assumed numbers keep theirs.
    """
    names, place, size = np.unique(families, return_inverse=True, return_counts=True)
    weights = 1 / size[place]
    squares = np.column_stack([sensitive**2, np.ones(len(errors))])
    before = [parameters.priors[name][1] for name in parameters.names]
    expected = np.log([*(deviation / 2 for deviation in before), NOISE])
    limits = [(None, np.log(deviation)) for deviation in before] + [(None, None)]

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        own = np.exp(2 * x)
        variance = squares @ own
        value = weights @ (np.log(variance) + errors**2 / variance) + ((x - expected) ** 2).sum()
        slope = squares.T @ (weights * (1 / variance - errors**2 / variance**2)) * own
        return 0.5 * float(value), slope + x - expected

    result = minimize(objective, expected, jac=True, method="L-BFGS-B", bounds=limits)
    # Student's t with few families, and a new draw around a mean of few
    freedom = max(len(names) - 1, 1)
    factor = float(student.ppf(0.95, freedom)) / NORMAL_95 * np.sqrt(1 + 2 / freedom)
    spreads = dict(
        zip((*parameters.names, REST), (factor * np.exp(result.x)).tolist(), strict=True)
    )
    return spreads | {name: deviation for name, (_, deviation) in parameters.assumed.items()}


def inside(
    work: PeakTimes,
    numbers: Mapping[str, float],
    errors: np.ndarray,
    families: np.ndarray,
    parameters: Parameters,
) -> np.ndarray:
    """Which errors are in the 90 % interval that the errors of the other families give."""
    sensitive = sensitivities(work, numbers, parameters.names)
    result = np.empty(len(errors), dtype=bool)
    for family in np.unique(families):
        own = families == family
        spreads = fit_spreads(sensitive[~own], errors[~own], families[~own], parameters)
        low, high = np.log(bounds(work.select(own), numbers, spreads))
        result[own] = (low <= errors[own]) & (errors[own] <= high)
    return result
