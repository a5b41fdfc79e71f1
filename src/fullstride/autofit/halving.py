"""Which candidate is the best? Successive halving on the training part, judged on the minival."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RungScore:
    """What a candidate achieves on the minival at the end of a rung."""

    candidate: str  # its name
    rung: int
    epochs: int
    scores: Mapping[str, float]
    correct: str  # 1 or 0 for each image of the minival, in order; "" without single labels
    seconds: float  # of training in this rung


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The scores of all rungs, and the finalists, the best first."""

    scores: tuple[RungScore, ...]
    finalists: tuple[str, ...]
    ties: tuple[tuple[str, str, float], ...]  # that were decided by time: faster, slower, p value
