"""What is the best network to train next? A law in the axes that vary, and the steps by it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fullstride.search.scale.finished import FinishedPoint, Size
from fullstride.search.scale.power_law import PowerLaw, fit_power_law

# A step of less than this share of the time counts as this share, or noise would be the best step.
LEAST_STEP = 0.05
MOST_CONDITION = 30.0  # of the axes' logarithms, above which they changed together


class Candidate(NamedTuple):
    """A network that is not trained yet."""

    name: str
    size: Size | None  # None: unknown, it follows the others
    ms: float  # per image


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """A network to train next."""

    name: str
    size: Size | None
    ms: float
    extra_ms: float  # than the best one within the budget
    error: float  # predicted, per cent
    gain: float  # points, predicted
    low: float | None  # 95 % interval of the gain; None: unknown
    high: float | None

    @property
    def is_certain(self) -> bool:
        """Whether the interval has no loss."""
        return self.low is not None and self.low > 0


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

    def sizes(self, size: Size) -> list[float]:
        return [getattr(size, axis) for axis in self.axes]


def varying_axes(points: Sequence[FinishedPoint]) -> tuple[str, ...]:
    """Axes with more than one value; none where they changed together."""
    axes = tuple(
        axis for axis in Size._fields if len({getattr(each.size, axis) for each in points}) > 1
    )
    if not axes:
        return ()
    logs = np.log([[getattr(each.size, axis) for axis in axes] for each in points])
    scaled = (logs - logs.mean(0)) / logs.std(0)
    return axes if np.linalg.cond(scaled) < MOST_CONDITION else ()


def law_of_axes(points: Sequence[FinishedPoint], deviation: float | None) -> AxesLaw | None:
    """The law in width, depth and resolution; None if they changed together, or for few points."""
    axes = varying_axes(points)
    if not axes or len(points) < len(axes) + 3:
        return None
    sizes = [[getattr(each.size, axis) for axis in axes] for each in points]
    errors = [each.error for each in points]
    return AxesLaw(axes, fit_power_law(sizes, errors, noise=noise_of(points, deviation)))


def neighbours(points: Sequence[FinishedPoint]) -> list[Candidate]:
    """Networks of the values that were trained on each axis, and of one more value above them.

    Their times follow a power law in the axes that vary. Where these changed together: networks of
    1.25 to 3 times the longest time.
    """
    axes = varying_axes(points)
    if not axes or len(points) < len(axes) + 2:
        return longer(points)
    values = {axis: sorted({getattr(each.size, axis) for each in points}) for axis in Size._fields}
    for axis in axes:
        step = values[axis][-1] / values[axis][-2]
        values[axis].append(rounded(axis, values[axis][-1] * step))
    logs = np.log([[getattr(each.size, axis) for axis in axes] for each in points])
    design = np.column_stack([np.ones(len(points)), logs])
    coefficients, *_ = np.linalg.lstsq(design, np.log([each.ms for each in points]), rcond=None)
    done = {each.size for each in points}
    sizes = (
        Size(width, depth, resolution)
        for width in values["width"]
        for depth in values["depth"]
        for resolution in values["resolution"]
    )
    return [
        Candidate(size_name(size), size, math.exp(coefficients @ [1.0, *log_sizes(size, axes)]))
        for size in sizes
        if size not in done
    ]


def longer(points: Sequence[FinishedPoint]) -> list[Candidate]:
    """Unknown networks of 1.25 to 3 times the longest time."""
    times = (factor * points[-1].ms for factor in (1.25, 1.5, 2, 3))
    return [Candidate(f"a network of {ms:.3g} ms", None, ms) for ms in times]


def log_sizes(size: Size, axes: Sequence[str]) -> list[float]:
    return [math.log(getattr(size, axis)) for axis in axes]


def rounded(axis: str, value: float) -> Any:
    """A value that a network may have: pixels to multiples of 8, layers to whole numbers."""
    if axis == "resolution":
        return max(8, 8 * round(value / 8))
    return float(round(value)) if value >= 10 else round(value, 2)


def size_name(size: Size) -> str:
    return f"width {size.width:g}, depth {size.depth:g}, {size.resolution} pixels"


def next_steps(
    best: FinishedPoint,
    candidates: Sequence[Candidate],
    law: AxesLaw | None,
    time_law: PowerLaw | None,
) -> tuple[NextStep, ...]:
    """The candidates with a predicted gain over `best`, that of the most per extra ms first."""
    steps = []
    for each in candidates:
        if law and each.size:
            power, sizes = law.law, (law.sizes(best.size), law.sizes(each.size))
        elif time_law:
            power, sizes = time_law, ([best.ms], [each.ms])
        else:
            continue
        gain, interval = power.gain(*sizes)
        low, high = interval or (None, None)
        if gain > 0:
            steps.append(
                NextStep(
                    name=each.name,
                    size=each.size,
                    ms=each.ms,
                    extra_ms=each.ms - best.ms,
                    error=float(power.at(sizes[1])),
                    gain=gain,
                    low=low,
                    high=high,
                )
            )
    least = LEAST_STEP * best.ms
    return tuple(sorted(steps, key=lambda step: -step.gain / max(step.extra_ms, least)))
