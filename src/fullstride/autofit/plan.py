"""How long will it take? Rungs of successive halving within the hours that a user has."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rung:
    """All of its candidates train until `epochs`, and the best `keep` go on."""

    number: int  # from 1
    epochs: int  # since the start of training
    candidates: int
    keep: int


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """What will be trained, and the seconds that each part is expected to take here."""

    candidates: tuple[str, ...]  # the names of those of the first rung
    left_out: Mapping[str, str]  # name -> why a candidate within the budget is not trained
    epochs: int  # of the finalists
    rungs: tuple[Rung, ...]
    epoch_s: Mapping[str, float]  # name -> seconds of an epoch with its minival
    train_s: float
    ship_s: float

    @property
    def total_s(self) -> float:
        return self.train_s + self.ship_s
