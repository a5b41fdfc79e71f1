"""In which form do training images reach a network: as pictures, or folded for its stem while bytes become floats?

Either way the network computes the same numbers, bit for bit; folding spares a pass over the pictures in float32.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fullstride.data.transforms.crop import to_input
from fullstride.nets.blocks import SpaceToDepthStem
from fullstride.nets.fused.dispatch import choose
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.timm_wrapper import TimmNetwork
from fullstride.train.recipe import Recipe

PATCH = SpaceToDepthStem.stride
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def arrival(
    net: Network | TimmNetwork, pre: Preprocessing, recipe: Recipe, device: torch.device | str
) -> Callable[[Tensor], Tensor]:
    """What makes a step's input of bytes (N, H, W, C) on `device`: pictures, or where `net` takes them, folded ones.

    Folded values are of the type that autocast rounds them to before the first convolution. Mixup comes before that
    rounding, so for it they stay float32.
    """
    if why_whole(net, pre, recipe):
        return partial(to_input, pre=pre)
    half = None if recipe.mixup else HALF.get(recipe.precision)
    mean_c, std_c = (torch.tensor(numbers, device=device) for numbers in (pre.mean, pre.std))
    return lambda pixels_nhwc: choose(pixels_nhwc).fold(
        pixels_nhwc, PATCH, mean_c, std_c, half or torch.float32
    )


def why_whole(net: Network | TimmNetwork, pre: Preprocessing, recipe: Recipe) -> str:
    """Why training images must not arrive folded; "" where they may."""
    if not isinstance(net, Network) or net.spec.stem is not SpaceToDepthStem:
        return "the network has no space-to-depth stem"
    if recipe.efficiency not in ("lean", "compiled"):
        return f"recipe.efficiency {recipe.efficiency} leaves PyTorch's modules as they are"
    if recipe.cutmix:
        return "recipe.cutmix cuts boxes out of pictures"
    if recipe.teacher:
        return "recipe.teacher looks at the same pictures"
    odd = [side for side in (*recipe.sides(pre.resolution), pre.resolution) if side % PATCH]
    return f"{odd[0]} pixels a side do not divide by {PATCH}" if odd else ""
