"""What is a task? A loss to learn by and a score to judge by."""

from typing import Protocol

from torch import Tensor


class Task(Protocol):
    def loss(self, logits: Tensor, targets: Tensor, /) -> Tensor:
        """The scalar that training lowers, for one batch."""
        ...

    def score(self, logits: Tensor, targets: Tensor, /) -> dict[str, float]:
        """Figures of merit by name, for a whole data set at once. The first one is what runs are compared by."""
        ...
