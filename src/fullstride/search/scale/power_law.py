"""Fits a power law with a floor to the errors of finished trainings over their sizes.

error = floor + exp(constant - exponents . log(sizes)). The sizes are a time alone, or width, depth
and resolution together. The pure law has no floor: on Table 7 of ResNet-RS, arXiv:2103.07579, it is
two points too optimistic (tests/search/scale/test_scale_power_law.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

MOST_EXPONENT = 10.0  # per e-fold of a size; the laws of Table 7 have 0.5 to 0.6
EXPONENTS = np.geomspace(1e-3, MOST_EXPONENT, 1000)  # grid of the profile likelihood
STARTS = (0.3, 1.0)  # initial exponents of the fit
LEVEL = 0.95  # of intervals
FAR = 200.0  # points of error; the largest step in the search for an interval's end


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """A result of `fit_power_law`."""

    floor: float  # limit of the error for large sizes, in per cent; 0 for the pure law
    constant: float
    exponents: tuple[float, ...]  # of each size
    log_sizes: np.ndarray  # (points, sizes)
    errors: np.ndarray  # per cent, (points,)
    is_saturating: bool
    noise: float | None  # standard deviation of an error, in points; None: unknown

    @property
    def rmse(self) -> float:
        """Root of the mean squared residual, in points."""
        return float(np.sqrt(self._squares / len(self.errors)))

    @property
    def parameters(self) -> int:
        return 1 + len(self.exponents) + self.is_saturating

    @property
    def _squares(self) -> float:
        return float(np.sum((self.at(np.exp(self.log_sizes)) - self.errors) ** 2))

    def at(self, sizes: Any) -> np.ndarray:
        """The error in per cent at `sizes`: (..., sizes) -> (...)."""
        logs = np.log(np.asarray(sizes, float))
        return self.floor + np.exp(self.constant - logs @ np.array(self.exponents))

    @property
    def has_intervals(self) -> bool:
        """Whether the noise is known, or there are enough points to estimate it."""
        return self.noise is not None or len(self.errors) > self.parameters

    @property
    def _variance_and_quantile(self) -> tuple[float, float]:
        """Variance of an error, and the quantile of Student's t for it.

        If the residuals are larger than a known noise, they count instead.
        """
        from scipy.stats import t

        free = len(self.errors) - self.parameters
        residual = self._squares / free if free > 0 else 0.0
        if self.noise is None:
            return residual, float(t.ppf((1 + LEVEL) / 2, free))
        return max(self.noise**2, residual), float(t.ppf((1 + LEVEL) / 2, np.inf))

    def interval(self, size: float) -> tuple[float, float] | None:
        """The 95 % interval of the error at `size`, for a law of one size, by profile likelihood.

        If the noise is unknown, Student's t with (points - parameters) degrees of freedom widens
        the interval: with one, to 13 standard errors on each side. None without any.
        """
        if not self.has_intervals:
            return None
        from scipy.optimize import brentq

        variance, quantile = self._variance_and_quantile
        limit = self._squares + variance * quantile**2
        middle = float(self.at([size]))

        def excess(error: float) -> float:
            return self._profile(error, size) - limit

        ends = []
        for sign in (-1, 1):
            end, step = middle, 0.05
            while excess(end) < 0 < end and step < FAR:
                end, step = max(0.0, end + sign * step), 2 * step
            if excess(middle) < 0 < excess(end):
                root: Any = brentq(excess, middle, end)
                end = float(root)
            ends.append(end)
        return ends[0], ends[1]

    def _profile(self, error: float, size: float) -> float:
        """The least sum of squared residuals of laws that have `error` at `size`.

        Given an exponent and this error, a law has one free number, the part above the floor, which
        a regression without a constant determines.
        """
        (distances,) = self.log_sizes.T - np.log(size)
        shapes = np.exp(-EXPONENTS[:, None] * distances) - 1
        above = shapes @ (self.errors - error) / np.maximum(np.sum(shapes**2, 1), 1e-300)
        above = np.clip(above, 0.0, error) if self.is_saturating else np.full(len(shapes), error)
        residuals = error + above[:, None] * shapes - self.errors
        return float(np.min(np.sum(residuals**2, 1)))

    @cached_property
    def _covariance(self) -> np.ndarray:
        """The covariance of floor, constant and exponents, by the derivatives at the fit."""
        derivatives = self._derivatives(self.log_sizes)
        variance, quantile = self._variance_and_quantile
        return np.linalg.pinv(derivatives.T @ derivatives) * variance * quantile**2

    def _derivatives(self, log_sizes: np.ndarray) -> np.ndarray:
        part = np.exp(self.constant - log_sizes @ np.array(self.exponents))[:, None]
        columns = [part, -part * log_sizes]
        return np.hstack([np.ones_like(part), *columns] if self.is_saturating else columns)

    def gain(
        self, sizes: Sequence[float], other: Sequence[float]
    ) -> tuple[float, tuple[float, float] | None]:
        """The points by which the error at `other` is lower than at `sizes`, with a 95 % interval.

        The interval is linear in the derivatives of the law at the fit. It is accurate for nearby
        sizes, as their common uncertainty cancels.
        """
        value = float(self.at(sizes) - self.at(other))
        if not self.has_intervals:
            return value, None
        logs = np.log(np.array([sizes, other], float))
        change = np.subtract(*self._derivatives(logs))
        half = float(np.sqrt(max(0.0, change @ self._covariance @ change)))
        return value, (value - half, value + half)


def fit_power_law(
    sizes: Any,
    errors: Sequence[float],
    *,
    saturating: bool = True,
    noise: float | None = None,
) -> PowerLaw:
    """Fit the law to errors in per cent at `sizes`: (points,) or (points, sizes), all above 0.

    The fit is by least squares, as a network's noise hardly depends on its size. Floor and
    exponents are not negative. `noise` is the standard deviation of an error in points, if known.
    """
    from scipy.optimize import least_squares  # takes most of a second to import

    table = np.asarray(sizes, float)
    table = table[:, None] if table.ndim == 1 else table
    y, count = np.asarray(errors, float), table.shape[1]
    logs = np.log(table)
    center = logs.mean(0)
    x = logs - center

    def residuals(values: np.ndarray) -> np.ndarray:
        return values[0] + np.exp(values[1] - x @ values[2:]) - y

    def jacobian(values: np.ndarray) -> np.ndarray:
        part = np.exp(values[1] - x @ values[2:])[:, None]
        return np.hstack([np.full_like(part, float(saturating)), part, -part * x])

    floors = (0.0, 0.9) if saturating else (0.0,)
    starts = [
        np.array([share * y.min(), np.log(max(y.mean() - share * y.min(), 1e-3)), *[start] * count])
        for share in floors
        for start in STARTS
    ]
    low = np.array([0.0, -30.0, *[0.0] * count])
    high = np.array([y.max() + 1e-6 if saturating else 1e-12, 30.0, *[MOST_EXPONENT] * count])
    inner = [np.clip(start, low + 1e-13, high - 1e-13) for start in starts]
    options: Any = dict(jac=jacobian, bounds=(low, high), max_nfev=200, x_scale="jac")
    fits = [least_squares(residuals, start, **options) for start in inner]
    floor, constant, *exponents = min(fits, key=lambda each: each.cost).x
    return PowerLaw(
        floor=float(floor) if saturating else 0.0,
        constant=float(constant + center @ np.array(exponents)),
        exponents=tuple(map(float, exponents)),
        log_sizes=logs,
        errors=y,
        is_saturating=saturating,
        noise=noise,
    )
