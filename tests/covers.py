"""Which rows of a grid of options cover every pair of values? For tests too many to run in full."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def pairwise_cover(
    *axes: Sequence[Any], allowed: Callable[..., bool] = lambda *row: True
) -> list[tuple[Any, ...]]:
    """Rows of one value per axis, in which every pair of values of two axes occurs.

    Pairs that no `allowed` row has are left out. The greedy choice, always the same.
    """
    rows = [row for row in product(*axes) if allowed(*row)]
    pairs = {
        row: {(i, j, row[i], row[j]) for i, j in combinations(range(len(row)), 2)} for row in rows
    }
    missing, cover = set().union(*pairs.values()), []
    while missing:
        cover.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[cover[-1]]
    return cover
