"""Analyses finished trainings of a scaling study: the front, the law, and the next step."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise, product, starmap
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq, least_squares
from scipy.stats import t as student

from fullstride.measure.budget import Budget, best, pareto_front, within
from fullstride.search.scale import finished
from fullstride.search.scale.finished import FinishedPoint, Size, Training
from fullstride.study.scores import mcnemar

# The law of the errors of finished trainings over their sizes, with a floor:
#
# error = floor + exp(constant - exponents . log(sizes)). The sizes are a time alone, or width,
# depth and resolution together. The pure law has no floor: on Table 7 of ResNet-RS,
# arXiv:2103.07579, it is two points too optimistic (tests/search/scale/test_scale_power_law.py).

MOST_EXPONENT = 10.0  # per e-fold of a size; the laws of Table 7 have 0.5 to 0.6
EXPONENTS = np.geomspace(1e-3, MOST_EXPONENT, 1000)  # grid of the profile likelihood
STARTS = (0.3, 1.0)  # initial exponents of the fit
LEVEL = 0.95  # of intervals
MOST_STEP = 200.0  # points of error; the largest step in the search for an interval's end


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
        free = len(self.errors) - self.parameters
        residual = self._squares / free if free > 0 else 0.0
        if self.noise is None:
            return residual, float(student.ppf((1 + LEVEL) / 2, free))
        return max(self.noise**2, residual), float(student.ppf((1 + LEVEL) / 2, np.inf))

    def interval(self, size: float) -> tuple[float, float] | None:
        """The 95 % interval of the error at `size`, for a law of one size, by profile likelihood.

        If the noise is unknown, Student's t with (points - parameters) degrees of freedom widens
        the interval: with one, to 13 standard errors on each side. None without any.
        """
        if not self.has_intervals:
            return None
        variance, quantile = self._variance_and_quantile
        limit = self._squares + variance * quantile**2
        middle = float(self.at([size]))

        def excess(error: float) -> float:
            return self._profile(error, size) - limit

        ends = []
        for sign in (-1, 1):
            end, step = middle, 0.05
            while excess(end) < 0 < end and step < MOST_STEP:
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
    sizes: Any, errors: Sequence[float], *, saturating: bool = True, noise: float | None = None
) -> PowerLaw:
    """Fit the law to errors in per cent at `sizes`: (points,) or (points, sizes), all above 0.

    The fit is by least squares, as a network's noise hardly depends on its size. Floor and
    exponents are not negative. `noise` is the standard deviation of an error in points, if known.
    """
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


# The best network to train next follows from a law in the axes that vary.

# A step of less than this share of the time counts as this share, or noise would be the best step.
LEAST_STEP = 0.05
MOST_CONDITION = 30.0  # condition number of log axes; above it, the axes changed together

Interval = tuple[float, float] | None  # both ends of the 95 % interval; None: unknown


class Candidate(NamedTuple):
    """A network that is not trained yet."""

    name: str
    size: Size | None  # None: unknown, only the time is
    ms: float  # per image


@dataclass(frozen=True)
class NextStep:
    name: str
    size: Size | None
    ms: float
    extra_ms: float  # over the best network within the budget
    error: float  # predicted, per cent
    gain: float  # points, predicted
    interval: Interval  # of the gain


def noise_of(points: Sequence[FinishedPoint], deviation: float | None) -> float | None:
    """The typical standard error of a point, for a law; None if unknown or 0."""
    if not deviation:
        return None
    errors = [point.standard_error(deviation) or 0.0 for point in points]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


class AxesLaw(NamedTuple):
    """A power law in the axes that vary."""

    axes: tuple[str, ...]
    law: PowerLaw


def values_of(size: Size, axes: Sequence[str]) -> list[float]:
    return [getattr(size, axis) for axis in axes]


def varying_axes(points: Sequence[FinishedPoint]) -> tuple[str, ...]:
    """The axes with more than one value; none if they changed together."""
    columns = zip(Size._fields, zip(*(each.size for each in points), strict=True), strict=True)
    axes = tuple(axis for axis, values in columns if len({*values}) > 1)
    if not axes:
        return ()
    logs = np.log([values_of(each.size, axes) for each in points])
    scaled = (logs - logs.mean(0)) / logs.std(0)
    return axes if np.linalg.cond(scaled) < MOST_CONDITION else ()


def law_of_axes(points: Sequence[FinishedPoint], deviation: float | None) -> AxesLaw | None:
    """The law in width, depth and resolution; None if they changed together, or for few points."""
    axes = varying_axes(points)
    if not axes or len(points) < len(axes) + 3:
        return None
    sizes, errors = [values_of(each.size, axes) for each in points], [p.error for p in points]
    return AxesLaw(axes, fit_power_law(sizes, errors, noise=noise_of(points, deviation)))


def neighbours(points: Sequence[FinishedPoint]) -> list[Candidate]:
    """All combinations of the trained values of each axis, and one larger value.

    Times are by a power law in the axes that vary. If these changed together: networks of 1.25 to 3
    times the longest time.
    """
    axes = varying_axes(points)
    if not axes or len(points) < len(axes) + 2:
        return longer(points)
    values = {axis: sorted({getattr(each.size, axis) for each in points}) for axis in Size._fields}
    for axis in axes:
        *_, before, largest = values[axis]
        values[axis].append(rounded(axis, largest**2 / before))

    def logs(sizes: Iterable[Size]) -> np.ndarray:
        return np.log([[math.e, *values_of(size, axes)] for size in sizes])

    done = [each.size for each in points]
    coefficients = np.linalg.lstsq(logs(done), np.log([each.ms for each in points]), rcond=None)[0]
    new = [size for size in starmap(Size, product(*values.values())) if size not in done]
    times = np.exp(logs(new) @ coefficients).tolist()
    return [Candidate(str(size), size, ms) for size, ms in zip(new, times, strict=True)]


def longer(points: Sequence[FinishedPoint]) -> list[Candidate]:
    """Unknown networks of 1.25 to 3 times the longest time."""
    times = (factor * points[-1].ms for factor in (1.25, 1.5, 2, 3))
    return [Candidate(f"a network of {ms:.3g} ms", None, ms) for ms in times]


def rounded(axis: str, value: float) -> Any:
    """Round to a valid value: pixels to multiples of 8, layers to whole numbers."""
    if axis == "resolution":
        return max(8, 8 * round(value / 8))
    return float(round(value)) if value >= 10 else round(value, 2)


def next_steps(
    start: FinishedPoint,
    candidates: Sequence[Candidate],
    law: AxesLaw | None,
    time_law: PowerLaw | None,
) -> tuple[NextStep, ...]:
    """The candidates with a predicted gain over `start`, by falling gain per extra ms."""
    steps = []
    for each in candidates:
        if law and each.size:
            power = law.law
            sizes = values_of(start.size, law.axes), values_of(each.size, law.axes)
        elif time_law:
            power, sizes = time_law, ([start.ms], [each.ms])
        else:
            continue
        gain, interval = power.gain(*sizes)
        if gain > 0:
            extra_ms, error = each.ms - start.ms, float(power.at(sizes[1]))
            steps.append(NextStep(*each, extra_ms, error, gain, interval))
    least = LEAST_STEP * start.ms
    return tuple(sorted(steps, key=lambda step: -step.gain / max(step.extra_ms, least)))


LAW_POINTS = 4  # least points on the front for a law
# A smaller ratio of times does not show a gain per time: launches of operators dominate the times
# of tiny networks on a GPU, whatever the size.
LEAST_RATIO = 1.1
FAR = 3.0  # largest candidate's time / longest trained time without a warning
ALTERNATIVES = 5  # listed steps


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    name: str
    size: Size
    ms: float
    error: float  # per cent
    low: float  # 95 % interval of the error, over seeds and images
    high: float
    seeds: int
    p_value: float | None = None  # of McNemar's test against the next faster point of the front


@dataclass(frozen=True)
class AxisGain:
    """The fall of the error along one axis at the front, all else being equal."""

    axis: str  # width, depth or resolution
    points_per_doubling: float  # of the time
    interval: Interval
    pairs: int  # of networks that differ in this axis alone


@dataclass(frozen=True, kw_only=True)
class Law:
    """A power law of the front in its time."""

    floor: float  # per cent
    constant: float  # of the part above the floor, exp(constant) / ms^exponent
    exponent: float
    rmse: float  # points
    points: int
    # A law of the cheaper half, the middle included: its points, and the largest network's error.
    half: int = 0
    largest: float | None = None
    largest_interval: Interval = None

    def error_at(self, ms: np.ndarray) -> np.ndarray:
        return self.floor + np.exp(self.constant - self.exponent * np.log(ms))


@dataclass(frozen=True, kw_only=True)
class RegimeAnalysis:
    """The front, the laws and the next steps for trainings of one length."""

    epochs: float
    regime: str
    points: tuple[FrontPoint, ...]  # all points, the fastest first
    front: tuple[FrontPoint, ...]
    seed_deviation: float | None  # points
    gains: tuple[AxisGain, ...]
    saturating: Law | None
    pure: Law | None
    law_by: str  # variables of the steps' law: "time" or some of "width, depth, resolution"; or ""
    best: str  # the most accurate network within the budget
    steps: tuple[NextStep, ...]  # the best first
    warnings: tuple[str, ...]

    @property
    def next(self) -> NextStep | None:
        return self.steps[0] if self.steps else None


def analyse(
    trainings: Iterable[Training],
    *,
    budget_ms: float | None = None,
    target_epochs: float | None = None,
    candidates: Sequence[Candidate] | None = None,
    by_time: bool = False,
) -> tuple[RegimeAnalysis, ...]:
    """Analyse each regime of epochs by itself, the shortest first.

    Args:
        trainings: The trainings of one family of networks.
        budget_ms: Limit of a network's time per image.
        target_epochs: Epochs of the chosen network's training; None: as in the longest training.
        candidates: Networks that may be trained next; None: `neighbours` of the trained ones.
        by_time: Compare only times, as the networks are not one network scaled.

    Raises ValueError if there is no training, or for a time or a length that is not above 0.
    """
    if budget_ms is not None:
        Budget(ms_per_image=budget_ms)
    if target_epochs is not None and not 0 < target_epochs < math.inf:
        raise ValueError(f"{target_epochs:g} epochs of the target: give a number above 0")
    points = finished.points_of(trainings)
    if not points:
        raise ValueError("no finished training to analyse: train some points first")
    target = max(point.epochs for point in points) if target_epochs is None else target_epochs
    parts = [[*part] for _, part in groupby(points, lambda point: (point.epochs, point.regime))]
    return tuple(analyse_regime(part, budget_ms, target, candidates, by_time) for part in parts)


def analyse_regime(
    points: Sequence[FinishedPoint],
    budget_ms: float | None,
    target_epochs: float,
    candidates: Sequence[Candidate] | None,
    by_time: bool,
) -> RegimeAnalysis:
    deviation, epochs = finished.seed_deviation(points), points[0].epochs
    front = pareto_front(points, lambda point: point.ms, lambda point: -point.error)
    warnings = []
    if epochs != target_epochs:
        warnings.append(
            f"trained for {epochs:g} epochs, not the target's {target_epochs:g}: short trainings "
            "prefer width, long ones depth (arXiv:2103.07579), so its steps may be others"
        )
    if deviation is None:
        warnings.append("no network was trained with two seeds: gains have no noise to compare to")
    saturating = pure = time_law = None
    ratio = front[-1].ms / front[0].ms
    if len(front) >= LAW_POINTS and ratio >= LEAST_RATIO:
        time_law = law_of_times(front, deviation)
        saturating = summary(front, deviation, saturating=True)
        pure = summary(front, deviation, saturating=False)
    else:
        warnings.append(
            f"no law of the time: it needs {LAW_POINTS} points on the front, with times of a ratio "
            f"of at least {LEAST_RATIO:g}; there are {len(front)}, with {ratio:.2g}"
        )
    limit_ms = math.inf if budget_ms is None else budget_ms
    inside = within(points, lambda each: each.ms, limit_ms)
    if not inside:
        warnings.append(f"no trained network is within {limit_ms:g} ms")
    chosen = best(inside or points[:1], lambda each: each.ms, lambda each: -each.error)
    assert chosen is not None
    law = None if by_time else law_of_axes(points, deviation)
    by, steps = "", ()
    if law or time_law:
        by = ", ".join(law.axes) if law else "time"
        if candidates is None:
            candidates = longer(points) if by_time else neighbours(points)
        inside_too = within(candidates, lambda each: each.ms, limit_ms)
        steps = next_steps(chosen, inside_too, law, time_law)
    if steps and steps[0].ms > FAR * points[-1].ms:
        warnings.append(f"{steps[0].name} takes {steps[0].ms / points[-1].ms:.1f} times as long")
    if steps and (steps[0].interval is None or steps[0].interval[0] <= 0):
        warnings.append("the interval of the next step's gain includes no gain")
    return RegimeAnalysis(
        epochs=epochs,
        regime=points[0].regime,
        points=tuple(front_point(each, deviation) for each in points),
        front=with_tests(front, deviation),
        seed_deviation=deviation,
        gains=() if by_time else tuple(gains_at(points, front, deviation)),
        saturating=saturating,
        pure=pure,
        law_by=by,
        best=chosen.name,
        steps=steps[:ALTERNATIVES],
        warnings=tuple(warnings),
    )


def front_point(point: FinishedPoint, deviation: float | None) -> FrontPoint:
    half = point.bar(deviation)
    return FrontPoint(
        name=point.name,
        size=point.size,
        ms=point.ms,
        error=point.error,
        low=max(0.0, point.error - half),
        high=min(100.0, point.error + half),
        seeds=point.seeds,
    )


def with_tests(front: Sequence[FinishedPoint], deviation: float | None) -> tuple[FrontPoint, ...]:
    """The front; p values are by McNemar's test against the point before, if images are known."""
    rows = [front_point(each, deviation) for each in front]
    for number, (before, point) in enumerate(pairwise(front), 1):
        one, other = (each.trainings[0].correct for each in (before, point))
        if one and len(one) == len(other):
            rows[number] = replace(rows[number], p_value=mcnemar(one, other))
    return tuple(rows)


def gains_at(
    points: Sequence[FinishedPoint], front: Sequence[FinishedPoint], deviation: float | None
) -> Iterable[AxisGain]:
    """The gain along each axis, over pairs of neighbours with at least one point on the front.

    A gain is the sum of the pairs' falls of the error / the sum of the doublings of the time. The
    interval is by the noise over seeds or, where it is unknown or 0, by the spread of the pairs.
    """
    on_front = {each.key for each in front}
    for axis in Size._fields:
        every = neighbouring_pairs(points, axis)
        near = [(small, large) for small, large in every if {small.key, large.key} & on_front]
        pairs = [(small, large) for small, large in near if large.ms >= LEAST_RATIO * small.ms]
        falls = np.array([small.error - large.error for small, large in pairs])
        doublings = np.array([math.log2(large.ms / small.ms) for small, large in pairs])
        if not pairs:
            continue
        gain = falls.sum() / doublings.sum()
        half = None
        if deviation:
            # Networks between two others are in two pairs, where their noise cancels.
            weights = Counter(small.key for small, _ in pairs)
            weights.subtract(large.key for _, large in pairs)
            errors = {each.key: each.standard_error(deviation) or 0.0 for each in points}
            variance = sum((weight * errors[key]) ** 2 for key, weight in weights.items())
            half = 1.96 * math.sqrt(variance) / doublings.sum()
        elif len(pairs) > 2:
            spread = np.sqrt(np.sum((falls - gain * doublings) ** 2) / (len(pairs) - 1))
            quantile = float(student.ppf(0.975, len(pairs) - 1))
            half = quantile * spread * math.sqrt(len(pairs)) / doublings.sum()
        interval = None if half is None else (float(gain - half), float(gain + half))
        yield AxisGain(axis, float(gain), interval, len(pairs))


def neighbouring_pairs(
    points: Sequence[FinishedPoint], axis: str
) -> list[tuple[FinishedPoint, FinishedPoint]]:
    """Pairs that differ in `axis` alone, with nothing between them, the smaller point first."""
    lines: dict[tuple[Any, ...], list[FinishedPoint]] = {}
    for point in points:
        others = tuple(value for name, value in point.size._asdict().items() if name != axis)
        lines.setdefault(others, []).append(point)
    return [
        pair
        for line in lines.values()
        for pair in pairwise(sorted(line, key=lambda point: getattr(point.size, axis)))
        if pair[0].size != pair[1].size
    ]


def law_of_times(
    points: Sequence[FinishedPoint], deviation: float | None, *, saturating: bool = True
) -> PowerLaw:
    return fit_power_law(
        [point.ms for point in points],
        [point.error for point in points],
        saturating=saturating,
        noise=noise_of(points, deviation),
    )


def summary(front: Sequence[FinishedPoint], deviation: float | None, *, saturating: bool) -> Law:
    """The law of the front, and the largest network's error by the law of the cheaper half."""
    law = law_of_times(front, deviation, saturating=saturating)
    half = front[: len(front) // 2 + 1]
    largest, interval = None, None
    if LAW_POINTS <= len(half) < len(front):
        of_half = law_of_times(half, deviation, saturating=saturating)
        largest = float(of_half.at([front[-1].ms]))
        interval = of_half.interval(front[-1].ms)
    return Law(
        floor=law.floor,
        constant=law.constant,
        exponent=law.exponents[0],
        rmse=law.rmse,
        points=len(front),
        half=len(half),
        largest=largest,
        largest_interval=interval,
    )
