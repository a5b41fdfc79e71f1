"""Compares networks with which a run may end, by the metric and then the loss of the minival."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from fullstride.nets.backbone import Backbone
from fullstride.tasks.task import Metric


@dataclass(frozen=True)
class FinalNetwork:
    """A network with which a run may end."""

    net: Backbone
    scores: Mapping[str, float]  # of the minival; none without one, or where they are not finite
    epochs: tuple[int, ...] = ()  # of which it is the average, if of several

    def is_better(self, other: "FinalNetwork", metric: Metric) -> bool:
        return quality(self.scores, metric) > quality(other.scores, metric)

    def described(self, metric: Metric) -> str:
        """For example "top-1 97.50 %, loss 0.1200"."""
        if not self.scores:
            return "no finite score"
        has_loss = "loss" in self.scores and metric.name != "loss"
        loss = f", loss {self.scores['loss']:.4f}" if has_loss else ""
        return f"{metric.text(self.scores[metric.name])}{loss}"


def quality(scores: Mapping[str, float], metric: Metric) -> tuple[float, float]:
    """Higher for better scores; of equal ones the lower loss is better, and none are the worst."""
    if not scores:
        return -inf, -inf
    return metric.rank(scores[metric.name]), -scores.get("loss", 0.0)


def averaged(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each tensor over `states`, summed in float64; integers are those of the first."""

    def mean(name: str, first: Tensor) -> Tensor:
        if not first.is_floating_point():
            return first
        total = torch.zeros_like(first, dtype=torch.float64)
        for state in states:
            total += state[name]
        return (total / len(states)).to(first.dtype)

    return {name: mean(name, first) for name, first in states[0].items()}
