"""Which of several things is beaten by no cheaper one? The Pareto front of two numbers."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def pareto_front(
    items: Iterable[T], cost: Callable[[T], float], value: Callable[[T], float]
) -> list[T]:
    """Those that are better than all of lower cost, the cheapest first; of equals the first."""
    front: list[T] = []
    for item in sorted(items, key=lambda item: (cost(item), -value(item))):
        if not front or value(item) > value(front[-1]):
            front.append(item)
    return front
