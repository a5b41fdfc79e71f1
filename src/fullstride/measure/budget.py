"""Defines a limit on a network's time per image, and the choice of the best item within it."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fullstride.io.records import check_range

MOST_IMAGES = 65_536  # per call
UNLIMITED_MS = 1e9  # a budget that every network is within
HERE = "here"  # the name of this machine's device, on which times are measured
SSH = "ssh://"


def is_elsewhere(target: str) -> bool:
    """Whether a target is another machine to measure on: an address or a command.

    Any other target is this machine, or a profile that estimates times.
    """
    words = target.split()
    is_command = len(words) > 1 or Path(target).name.startswith("python")
    return target.startswith(SSH) or (is_command and not target.endswith(".json"))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A limit on the time of one call divided by its number of images.

    `choose`, `estimate` and `export` call this milliseconds per image. Raises ValueError for a time
    not above 0 and for a batch below 1.
    """

    ms_per_image: float
    batch: int = 1  # images per call
    device: str = ""  # where the network runs, in words
    precision: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.ms_per_image < math.inf:
            raise ValueError(f"a budget of {self.ms_per_image:g} ms an image: give a time above 0")
        check_range("batch", self.batch, MOST_IMAGES)

    @property
    def images_per_s(self) -> float:
        return 1e3 / self.ms_per_image

    @property
    def conditions(self) -> str:
        return conditions(self.batch, self.device, self.precision)

    def __str__(self) -> str:
        return f"{self.ms_per_image:g} ms an image ({self.conditions})"

    def on(self, device: str, precision: str) -> "Budget":
        return replace(self, device=device, precision=precision)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {
            "budget_ms": self.ms_per_image,
            "images_per_s": self.images_per_s,
            "batch": self.batch,
            "device": self.device,
            "precision": self.precision,
        }


def conditions(batch: int, device: str, precision: str) -> str:
    """Batch, device and precision as text for every answer."""
    return ", ".join(filter(None, (f"batch {batch}", device, precision)))


def find_budget(
    budget_ms: float | None, images_per_s: float | None, batch: int = 1
) -> Budget | None:
    """The budget that a user gave as a time or as a rate; None for neither.

    Raises ValueError for both, for a batch below 1, and for one above 1 without a budget.
    """
    check_range("--call-batch", batch, MOST_IMAGES)
    if budget_ms is not None and images_per_s is not None:
        raise ValueError(
            f"--budget-ms {budget_ms:g} and --images-per-s {images_per_s:g} are two budgets: "
            "give one"
        )
    if images_per_s is not None:
        if not 0 < images_per_s < math.inf:
            raise ValueError(f"{images_per_s:g} images per second: give a rate above 0")
        budget_ms = 1e3 / images_per_s
    if budget_ms is None:
        if batch != 1:
            raise ValueError(
                f"--call-batch {batch} belongs to a budget: give --budget-ms or --images-per-s too"
            )
        return None
    return Budget(ms_per_image=budget_ms, batch=batch)


def time_limit_s(hours: float | None, minutes: float | None) -> float | None:
    """The sum of `hours` and `minutes` in seconds; None where neither is given.

    Raises ValueError for a time that is not above 0.
    """
    for flag, value in (("--hours", hours), ("--minutes", minutes)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag} {value:g}: give a time above 0")
    if hours is None and minutes is None:
        return None
    return 3600 * (hours or 0.0) + 60 * (minutes or 0.0)


def deadline_s(hours: float | None, minutes: float | None) -> float | None:
    """The end of a time limit that begins now, by `time.perf_counter`; None without a limit."""
    limit_s = time_limit_s(hours, minutes)
    return limit_s and time.perf_counter() + limit_s


def required_budget(budget_ms: float | None, images_per_s: float | None, batch: int = 1) -> Budget:
    """`find_budget` that raises ValueError for neither time nor rate."""
    budget = find_budget(budget_ms, images_per_s, batch)
    if budget is None:
        raise ValueError(
            "no budget: say by --budget-ms how long an image may take, or by --images-per-s"
        )
    return budget


T = TypeVar("T")
Number = Callable[[T], float]


def within(items: Iterable[T], ms: Number[T], budget_ms: float) -> list[T]:
    """The items whose time per image is not above the budget, in order."""
    return [item for item in items if ms(item) <= budget_ms]


def ties(items: Sequence[T], value: Number[T]) -> list[T]:
    """The items with the highest value, in order."""
    highest = max(map(value, items), default=None)
    return [item for item in items if value(item) == highest]


def best(items: Sequence[T], ms: Number[T], value: Number[T]) -> T | None:
    """The item with the highest value, and the fastest among ties; None if there are no items."""
    return min(ties(items, value), key=ms, default=None)


def pareto_front(items: Iterable[T], cost: Number[T], value: Number[T]) -> list[T]:
    """Items with a higher value than all cheaper items, cheapest first; the first among equals."""
    front: list[T] = []
    for item in sorted(items, key=lambda item: (cost(item), -value(item))):
        if not front or value(item) > value(front[-1]):
            front.append(item)
    return front
