"""What happens to the maps between two convolutions? Each pass over them, in plain PyTorch, on any device.

These are the definitions: the Triton forms have the same names and arguments. A pass reads or writes whole maps; what
lies between two passes is arithmetic on (N, C) numbers, which `nets/fused/pointwise_ops.py` does.

Maps are (N, C, H, W) of any floating type and memory format, and so is what comes out. Numbers for each image and
channel are (N, C), or (1, C) where they are the same for all images, in float32, or float64 for maps of float64. Every
sum is taken about a pivot near the channel's mean, where it does not cancel digits.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

INT8_MAX = 127  # of int8, on either side of zero
MIN_POSITIVE = 2.0**-14  # of what float16 holds in full precision


class Affine(NamedTuple):
    """scale * (map - pivot) + shift."""

    pivot_c: Tensor  # (C,)
    scale_nc: Tensor
    shift_nc: Tensor


class Slopes(NamedTuple):
    """The gradient of a map that is d behind its batch norm: scale * d + constant + linear * (map - pivot).

    The last two come of the map's part in the batch's mean and variance.
    """

    scale_nc: Tensor
    constant_nc: Tensor
    linear_nc: Tensor


def stats(x: Tensor, pivot_c: Tensor) -> tuple[Tensor, Tensor]:
    """Means over the pixels of x - pivot and of its square: twice (N, C)."""
    centred = wide(x) - per_map(pivot_c)
    return centred.mean((2, 3)), centred.square().mean((2, 3))


def bn_add_act(
    x: Tensor,
    affine: Affine,
    other: Tensor | None,
    other_affine: Affine | None,
    slope: float | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y = act(affine(x) + other), or + other_affine(other): the end of a block; without `other`, batch norm and act.

    `slope` is of the activation for negative values; None: no activation. `dtype` is of y; None: as x. Where x is codes
    of `bn_add_act_int8`, y has the sign that they tell.
    """
    z = affine_sum(x, affine, other, other_affine)
    if x.dtype == torch.int8:
        z = torch.where(x % 2 == 1, z.clamp(min=MIN_POSITIVE), z.clamp(max=0))
    return activated(z, slope).to(dtype or x.dtype)


def bn_add_act_int8(
    x: Tensor,
    affine: Affine,
    other: Tensor | None,
    other_affine: Affine | None,
    slope: float | None,
    rate_c: Tensor,
    other_rate_c: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`bn_add_act`, and codes in int8: the number from -127 to 127 nearest to (x - pivot) * rate that is odd where y > 0,
    and even elsewhere, so that a result that is made again of it can have the same sign.

    With `other_affine`, also the nearest numbers for `other`, of both kinds.
    """
    y = bn_add_act(x, affine, other, other_affine, slope)
    odd = (y > 0).to(torch.float32)
    halves = (per_map(rate_c) * (wide(x) - per_map(affine.pivot_c))).clamp(
        1 - INT8_MAX, INT8_MAX - 1
    ) - odd
    codes = (2 * torch.floor(halves / 2 + 0.5) + odd).to(torch.int8)
    if other is None or other_affine is None or other_rate_c is None:
        return y, codes, None
    others = torch.floor(
        (wide(other) - per_map(other_affine.pivot_c)) * per_map(other_rate_c) + 0.5
    )
    return y, codes, others.clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


def bn_add_act_sums(
    grad: Tensor,
    y: Tensor,
    x: Tensor | None,
    affine: Affine,
    other: Tensor | None,
    other_affine: Affine | None,
    slope: float | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums over the pixels of d, d * (x - pivot) and, with `other_affine`, d * (other - its pivot): each (N, C).

    x and `other` may be codes, whose pivot is 0.

    d = grad * act'(y), the gradient before the activation. Without `x` it is made of y, whose slope must then be above
    0 and which has no `other`.
    """
    d = before(grad, y, slope)
    centred = recovered(y, affine, slope) if x is None else wide(x) - per_map(affine.pivot_c)
    sums = d.sum((2, 3)), (d * centred).sum((2, 3))
    if other is None or other_affine is None:
        return *sums, None
    return *sums, (d * (wide(other) - per_map(other_affine.pivot_c))).sum((2, 3))


def bn_add_act_gradients(
    grad: Tensor,
    y: Tensor,
    x: Tensor | None,
    affine: Affine,
    slopes: Slopes,
    other: Tensor | None,
    other_affine: Affine | None,
    other_slopes: Slopes | None,
    slope: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of `other`; arguments as of `bn_add_act_sums`. The second one is d where `other` came as it was."""
    d = before(grad, y, slope)
    centred = recovered(y, affine, slope) if x is None else wide(x) - per_map(affine.pivot_c)
    grad_x = sloped(d, centred, slopes).to(y.dtype)
    if other is None:
        return grad_x, None
    if other_affine is None or other_slopes is None:
        return grad_x, d.to(y.dtype)
    return grad_x, sloped(d, wide(other) - per_map(other_affine.pivot_c), other_slopes).to(y.dtype)


def squeezed(x: Tensor, affine: Affine, slope: float | None) -> Tensor:
    """Means over the pixels of act(affine(x)): (N, C)."""
    return activated(affine_sum(x, affine, None, None), slope).mean((2, 3))


def gated(x: Tensor, affine: Affine, gate_nc: Tensor, slope: float | None) -> Tensor:
    """y = gate * act(affine(x)): batch norm, activation and squeeze-and-excitation."""
    return (per_map(gate_nc) * activated(affine_sum(x, affine, None, None), slope)).to(x.dtype)


def gated_sums(
    grad: Tensor, y: Tensor, affine: Affine, gate_nc: Tensor, slope: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the gradients of `gated` are made of, from its output alone: five sums over the pixels, each (N, C).

    With s = act(affine(x)) = y / gate and x made of s: of grad * s, grad * act'(s), grad * act'(s) * (x - pivot),
    act'(s) and act'(s) * (x - pivot).
    """
    s = wide(y) / per_map(gate_nc)
    centred, steep, g = recovered(s, affine, slope), act_slope(s, slope), wide(grad)
    parts = (g * s, g * steep, g * steep * centred, steep, steep * centred)
    first, second, third, fourth, fifth = (part.sum((2, 3)) for part in parts)
    return first, second, third, fourth, fifth


def gated_gradients(
    grad: Tensor,
    y: Tensor,
    affine: Affine,
    gate_nc: Tensor,
    squeeze_nc: Tensor,
    slopes: Slopes,
    slope: float,
) -> Tensor:
    """The gradient of x, where each pixel of act(affine(x)) has the gradient gate * grad + squeeze."""
    s = wide(y) / per_map(gate_nc)
    d = (per_map(gate_nc) * wide(grad) + per_map(squeeze_nc)) * act_slope(s, slope)
    return sloped(d, recovered(s, affine, slope), slopes).to(y.dtype)


def blurred(x: Tensor, affine: Affine, slope: float | None) -> tuple[Tensor, Tensor]:
    """act(affine(x)), blurred by [1 2 1] / 4 each way with a reflected border, of every second pixel; and its means.

    (N, C, H, W) -> (N, C, H/2, W/2), rounded up, and (N, C) in full precision. A side of one pixel is repeated.
    """
    y = blur(activated(affine_sum(x, affine, None, None), slope))
    return y.to(x.dtype), y.mean((2, 3))


def blurred_sums(
    grad: Tensor, squeeze_nc: Tensor | None, x: Tensor, affine: Affine, slope: float | None
) -> tuple[Tensor, Tensor]:
    """Sums over the pixels of d and d * (x - pivot), each (N, C).

    d is the gradient before the activation where each pixel of the output has the gradient grad + squeeze.
    """
    d = before_blur(grad, squeeze_nc, x, affine, slope)
    return d.sum((2, 3)), (d * (wide(x) - per_map(affine.pivot_c))).sum((2, 3))


def blurred_gradients(
    grad: Tensor,
    squeeze_nc: Tensor | None,
    x: Tensor,
    affine: Affine,
    slopes: Slopes,
    slope: float | None,
) -> Tensor:
    """The gradient of x; arguments as of `blurred_sums`."""
    d = before_blur(grad, squeeze_nc, x, affine, slope)
    return sloped(d, wide(x) - per_map(affine.pivot_c), slopes).to(x.dtype)


def wide(t: Tensor) -> Tensor:
    """In the precision that sums are taken in."""
    return t if t.dtype == torch.float64 else t.float()


def per_map(numbers: Tensor) -> Tensor:
    """(C,) or (N, C), for all pixels of the maps."""
    return numbers[..., None, None]


def affine_sum(
    x: Tensor, affine: Affine, other: Tensor | None, other_affine: Affine | None
) -> Tensor:
    pivot_c, scale_nc, shift_nc = affine
    z = per_map(scale_nc) * (wide(x) - per_map(pivot_c)) + per_map(shift_nc)
    if other is None:
        return z
    return z + (
        wide(other) if other_affine is None else affine_sum(other, other_affine, None, None)
    )


def activated(z: Tensor, slope: float | None) -> Tensor:
    return z if slope is None else torch.where(z > 0, z, z * slope)


def act_slope(y: Tensor, slope: float | None) -> Tensor:
    """The activation's derivative, told by the sign of what came out of it."""
    ones = torch.ones_like(y)
    return ones if slope is None else torch.where(y > 0, ones, slope)


def before(grad: Tensor, y: Tensor, slope: float | None) -> Tensor:
    return wide(grad) * act_slope(wide(y), slope)


def recovered(y: Tensor, affine: Affine, slope: float | None) -> Tensor:
    """x - pivot from y = act(affine(x))."""
    z = wide(y) if slope is None else torch.where(wide(y) > 0, wide(y), wide(y) / slope)
    return (z - per_map(affine.shift_nc)) / per_map(affine.scale_nc)


def sloped(d: Tensor, centred: Tensor, slopes: Slopes) -> Tensor:
    return (
        per_map(slopes.scale_nc) * d
        + per_map(slopes.constant_nc)
        + per_map(slopes.linear_nc) * centred
    )


def blur(x: Tensor) -> Tensor:
    padded = F.pad(x, (1, 1, 1, 1), border(x))
    return F.conv2d(padded, binomial(x), stride=2, groups=x.shape[1])


def unblur(g: Tensor, x: Tensor) -> Tensor:
    """The transpose of `blur`: what each pixel of x gets of the gradient g of its blur."""
    h, w = x.shape[2:]
    spare = (
        1 - h % 2,
        1 - w % 2,
    )  # the last row and column of an even map's border are under no filter
    spread = F.conv_transpose2d(g, binomial(g), stride=2, output_padding=spare, groups=g.shape[1])
    step = 1 if border(x) == "reflect" else 0
    rows = spread[:, :, 1:-1].clone()
    rows[:, :, step] += spread[:, :, 0]
    rows[:, :, -1 - step] += spread[:, :, -1]
    columns = rows[..., 1:-1].clone()
    columns[..., step] += rows[..., 0]
    columns[..., -1 - step] += rows[..., -1]
    return columns


def binomial(x: Tensor) -> Tensor:
    line = torch.tensor([0.25, 0.5, 0.25], dtype=x.dtype, device=x.device)
    return torch.outer(line, line).expand(x.shape[1], 1, 3, 3)


def border(x: Tensor) -> str:
    """A side of one pixel has nothing to reflect."""
    return "reflect" if min(x.shape[2:]) > 1 else "replicate"


def before_blur(
    grad: Tensor, squeeze_nc: Tensor | None, x: Tensor, affine: Affine, slope: float | None
) -> Tensor:
    g = wide(grad) if squeeze_nc is None else wide(grad) + per_map(squeeze_nc)
    return unblur(g, x) * act_slope(affine_sum(x, affine, None, None), slope)
