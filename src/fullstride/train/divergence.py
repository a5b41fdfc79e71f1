"""Does a training diverge? Finite losses that stay far above the first one."""

from collections.abc import Sequence
from dataclasses import dataclass

# A loss is high above FACTOR times the first one plus MARGIN. Healthy losses begin near that of
# guessing, log(classes) for a classifier, and rarely double; the margin is for those that begin
# near zero, with trained weights. Our own numbers (docs/log.md).
FACTOR, MARGIN = 4.0, 10.0
# High losses in a row: this share of all steps, within these bounds, so that spikes do not count.
SHARE, FEWEST, MOST = 1 / 20, 5, 100


@dataclass
class Divergence:
    """Whether the last losses of a training are high."""

    total: int  # steps of the training
    first: float | None = None  # loss of the first step
    high: int = 0  # high losses in a row, up to the last step
    steps: int = 0  # that have been examined

    def find(self, losses: Sequence[float], start: int) -> int | None:
        """The index of the loss by which training has diverged, or None.

        Args:
            losses: Of consecutive steps. Those that have been examined are not examined again.
            start: Number of steps before them.
        """
        enough = min(MOST, max(FEWEST, round(SHARE * self.total)))
        if self.first is None:
            self.first = losses[0]
        for index in range(self.steps - start, len(losses)):
            self.high = self.high + 1 if losses[index] > FACTOR * self.first + MARGIN else 0
            self.steps = start + index + 1
            if self.high >= enough:
                return index
        return None
