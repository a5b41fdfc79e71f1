"""How are images and targets of a batch mixed? Mixup and CutMix, with draws from a generator."""

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from torchvision.transforms import v2


def mix(
    x: Tensor,
    labels: Tensor,
    classes: int,
    *,
    mixup: float,
    cutmix: float,
    rng: np.random.Generator,
) -> tuple[Tensor, Tensor]:
    """Mix every image and its target with the previous one of the batch.

    Args:
        x: Images (N, C, H, W), or clips (N, C, T, H, W), all of whose frames are mixed alike.
        labels: Class indices (N,), or a target for each class (N, K).
        classes: Number of classes K.
        mixup: Alpha of the Beta distribution for mixup (arXiv:1710.09412), 0 for never.
        cutmix: Alpha for CutMix (arXiv:1905.04899), 0 for never. If both are set, one of the two is
            chosen for each batch, with equal probability.
        rng: The source of all draws: the same state gives the same batch.

    Returns: images and targets (N, K).
    """
    from torchvision.transforms import v2  # takes seconds to import, which scoring does not need

    if mixup and (not cutmix or rng.random() < 0.5):
        return apply(v2.MixUp(num_classes=classes), x, labels, lam=float(rng.beta(mixup, mixup)))
    share, height, width = float(rng.beta(cutmix, cutmix)), *x.shape[-2:]
    box = box_of(share, rng.random(), rng.random(), height, width)
    x1, y1, x2, y2 = box
    visible = 1 - (x2 - x1) * (y2 - y1) / (width * height)
    return apply(v2.CutMix(num_classes=classes), x, labels, box=box, lam_adjusted=visible)


def apply(
    transform: "v2.Transform", x: Tensor, labels: Tensor, **params: Any
) -> tuple[Tensor, Tensor]:
    """Run a transform with our parameters in place of those that its `make_params` would draw."""
    params |= {"labels": labels, "batch_size": len(x)}
    mixed = transform.transform(x.flatten(1, -3), params)  # the transforms know no clips
    return mixed.view(x.shape), transform.transform(labels, params)


def box_of(
    share: float, middle_y: float, middle_x: float, height: int, width: int
) -> tuple[int, int, int, int]:
    """The box x1, y1, x2, y2 with 1 - `share` of the area around a point, clipped to the image.

    The point is given as fractions of height and width.
    """
    half = 0.5 * (1 - share) ** 0.5
    x, y = int(middle_x * width), int(middle_y * height)
    half_width, half_height = int(half * width), int(half * height)
    return (
        max(x - half_width, 0),
        max(y - half_height, 0),
        min(x + half_width, width),
        min(y + half_height, height),
    )
