"""What happens to a whole batch by chance? Images and targets are mixed in pairs: mixup and CutMix."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def mix(
    x: Tensor,
    labels: Tensor,
    classes: int,
    *,
    mixup: float,
    cutmix: float,
    rng: np.random.Generator,
) -> tuple[Tensor, Tensor]:
    """Mix every image (N, C, H, W) with the one before it, and their targets alike: -> images, targets (N, K).

    `mixup` and `cutmix` are the parameters of the Beta distribution that the share is drawn from, 0 for
    never; where both are set, one of the two is chosen for each batch, with equal probability.
    """
    if mixup and (not cutmix or rng.random() < 0.5):
        return mixed_up(x, labels, classes, share=float(rng.beta(mixup, mixup)))
    share = float(rng.beta(cutmix, cutmix))
    return cut_and_mixed(x, labels, classes, share, at=(rng.random(), rng.random()))


def mixed_up(x: Tensor, labels: Tensor, classes: int, share: float) -> tuple[Tensor, Tensor]:
    """`share` of each image and the rest of its neighbour, pixel by pixel. Source: mixup, arXiv:1710.09412."""
    return torch.lerp(x.roll(1, 0), x, share), mixed_targets(labels, classes, share)


def cut_and_mixed(
    x: Tensor, labels: Tensor, classes: int, share: float, at: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """A rectangle of the neighbour, 1 - `share` of the area before it is cut at the border, in each image.

    `at` is its middle, as shares of height and width; targets follow the area that is really covered.
    Source: CutMix, arXiv:1905.04899.
    """
    h, w = x.shape[2:]
    half = 0.5 * (1 - share) ** 0.5
    middle_y, middle_x = int(at[0] * h), int(at[1] * w)
    top, bottom = max(middle_y - int(half * h), 0), min(middle_y + int(half * h), h)
    left, right = max(middle_x - int(half * w), 0), min(middle_x + int(half * w), w)
    mixed = x.clone()
    mixed[:, :, top:bottom, left:right] = x.roll(1, 0)[:, :, top:bottom, left:right]
    return mixed, mixed_targets(labels, classes, 1 - (bottom - top) * (right - left) / (h * w))


def mixed_targets(labels: Tensor, classes: int, share: float) -> Tensor:
    own = F.one_hot(labels, classes).float()
    return torch.lerp(own.roll(1, 0), own, share)
