"""How good are predicted depths? Shares of pixels within a ratio, and errors, beside the priors.

Letters: N images, H x W pixels. delta1, delta2 and delta3 are percentages of the valid pixels of
all images whose predicted and true depth, the larger by the smaller, are below 1.25, 1.25 squared
and cubed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fullstride.tasks.depth.priors import row_numbers
from fullstride.tasks.task import full_precision

RATIO = 1.25
SUMS = ("pixels", "delta1", "delta2", "delta3", "mae", "rmse", "loss")
PRIORS = ("constant", "rows")


class DepthScore:
    """Scores of depths over the valid pixels of all images, at the size of the view.

    With `constant` and `rows`, the priors of the training, `delta1_constant` and `delta1_rows` are
    the scores of predicting these.

    Args:
        constant: In metres; 0: no prior.
        rows: In metres, from the top of the picture to its bottom.
        max_depth: In metres; true depths above are not valid. 0: all are.
    """

    def __init__(
        self, constant: float = 0.0, rows: Sequence[float] = (), max_depth: float = 0.0
    ) -> None:
        self.constant, self.max_depth = constant, max_depth
        self.rows = torch.tensor(tuple(rows), dtype=torch.float32)
        self.sums: dict[str, float] = dict.fromkeys((*SUMS, *PRIORS), 0.0)

    def update(self, metres_n1hw: Tensor, targets_nhw: Tensor) -> None:
        predicted = full_precision(metres_n1hw)[:, 0]
        valid = valid_pixels(targets_nhw, self.max_depth)
        depth, true = predicted[valid].double(), targets_nhw[valid].double()
        error = (depth - true).abs()
        self.sums["pixels"] += len(true)
        for power in (1, 2, 3):
            self.sums[f"delta{power}"] += within(depth, true, RATIO**power)
        self.sums["mae"] += error.sum().item()
        self.sums["rmse"] += error.square().sum().item()
        self.sums["loss"] += (depth.log() - true.log()).abs().sum().item()
        if self.constant:
            constant = torch.full_like(true, self.constant)
            self.sums["constant"] += within(constant, true, RATIO)
            self.sums["rows"] += within(self._by_row(targets_nhw)[valid].double(), true, RATIO)

    def _by_row(self, targets_nhw: Tensor) -> Tensor:
        """The prior of each pixel by its row of the picture, (N, H, W)."""
        inside_nh = (targets_nhw >= 0).any(2).cpu().numpy()
        numbers = np.stack([row_numbers(inside_h, len(self.rows)) for inside_h in inside_nh])
        prior_nh = self.rows[torch.from_numpy(numbers)].to(targets_nhw.device)
        return prior_nh[:, :, None].expand(targets_nhw.shape)

    def merge(self, other: "DepthScore") -> None:
        self.sums = {name: value + other.sums[name] for name, value in self.sums.items()}

    def compute(self) -> dict[str, float]:
        sums, pixels = self.sums, self.sums["pixels"]
        if not pixels:
            raise ValueError("none of the images to score on has a valid depth: give others")
        priors = {f"delta1_{name}": 100 * sums[name] / pixels for name in PRIORS}
        return {
            **{name: 100 * sums[name] / pixels for name in ("delta1", "delta2", "delta3")},
            **(priors if self.constant else {}),
            "mae": sums["mae"] / pixels,
            "rmse": (sums["rmse"] / pixels) ** 0.5,
            "loss": sums["loss"] / pixels,
        }


def within(depth: Tensor, true: Tensor, ratio: float) -> int:
    """The number of pixels whose depths, the larger by the smaller, are below `ratio`."""
    return int((torch.maximum(depth / true, true / depth) < ratio).sum())


def valid_pixels(targets: Tensor, max_depth: float) -> Tensor:
    """Which true depths count: those above 0 and up to `max_depth`, if that is not 0."""
    valid = targets > 0
    return valid & (targets <= max_depth) if max_depth else valid
