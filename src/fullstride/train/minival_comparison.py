"""Which of two networks of a run is better on its minival? By the metric, and then by the loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

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
