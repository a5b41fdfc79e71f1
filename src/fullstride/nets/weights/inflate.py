"""How do the weights of a network of images begin one of clips? Their kernels get frames."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Inflation = Literal["centre", "mean"]


def inflated(
    state: Mapping[str, Tensor], like: Mapping[str, Tensor], how: Inflation = "centre"
) -> dict[str, Tensor]:
    """`state` of a network of images with the kernels of `like`, one of clips of equal names.

    A kernel (C_out, C_in, k, k) becomes (C_out, C_in, t, k, k). `centre`: the middle frame has it,
    the others are zero, so each frame is seen alone at first. `mean`: each frame has a t-th of it
    (I3D, arXiv:1705.07750). Values whose other sizes differ stay as they are.

    The network of clips then answers a clip of equal frames as the network of images answers one
    of them, where both have the same layers: with `centre` always, with `mean` for outputs that
    depend on no frame beyond an end of the clip, as those are zeros in both. After the average
    over frames that is no network with a kernel of three or more, so training begins with `centre`.
    """
    result = dict(state)
    for name, value in state.items():
        shape = like[name].shape if name in like else ()
        if len(shape) == 5 and value.ndim == 4 and value.shape == (*shape[:2], *shape[3:]):
            frames = shape[2]
            kernel = value[:, :, None] / (frames if how == "mean" else 1)
            result[name] = kernel.repeat(1, 1, frames, 1, 1)
            if how == "centre":
                others = torch.arange(frames) != frames // 2
                result[name][:, :, others] = 0
    return result
