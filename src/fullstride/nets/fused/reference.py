"""Defines the passes over the maps between two convolutions, in PyTorch.

The Triton kernels have the same names and arguments. A pass reads or writes whole maps;
`ops` does the arithmetic on (N, C) numbers between two passes.

Maps are (N, C, H, W) of any floating type and memory format, and so are results. Numbers per image
and channel are (N, C), or (1, C) where all images share them, in float32, or in float64 for maps of
float64. Every sum is taken about a pivot near the channel's mean, which avoids cancellation.
`slope` is the activation's negative slope, None for no activation.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

INT8_MAX = 127  # the largest magnitude in int8, on either side of zero
MIN_POSITIVE = 2.0**-14  # the least value that float16 holds in full precision


class Affine(NamedTuple):
    """scale * (map - pivot) + shift."""

    pivot_c: Tensor  # (C,)
    scale_nc: Tensor
    shift_nc: Tensor

    def of_sums(self, ones: Tensor, centred: Tensor) -> Tensor:
        """The sum over pixels of scale * (map - pivot) + shift, from sums of 1 and map - pivot."""
        return self.scale_nc * centred + self.shift_nc * ones


class Slopes(NamedTuple):
    """The gradient of a batch norm's input: scale * d + constant + linear * (map - pivot).

    d is the gradient of the output. The last two terms are the gradient through the mean and the
    variance of the batch.
    """

    scale_nc: Tensor
    constant_nc: Tensor
    linear_nc: Tensor


class Term(NamedTuple):
    """A map in the sum at the end of a block, with the numbers of its batch norm, if any."""

    map: Tensor | None  # None: recovered from the result
    affine: Affine | None = None
    slopes: Slopes | None = None  # for gradients
    rate_c: Tensor | None = None  # int8 steps per unit, (C,)


def stats(x: Tensor, pivot_c: Tensor) -> tuple[Tensor, Tensor]:
    """Means over the pixels of x - pivot and of its square: twice (N, C)."""
    centred = wide(x) - per_map(pivot_c)
    return centred.mean((2, 3)), centred.square().mean((2, 3))


def bn_add_act(
    x: Term, other: Term | None, slope: float | None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y = act(affine(x) + other), or + other's affine: the end of a block, or a batch norm.

    `dtype` is the type of y, by default the type of x. If x is int8, y has the sign that x encodes.

    With rates, also x as int8: the number from -127 to 127 nearest to (x - pivot) * rate. Only odd
    numbers are used where y > 0, and only even numbers elsewhere, so that a recomputed result has
    the same sign. If `other` has a rate, also `other` as int8, odd or even.
    """
    assert x.map is not None
    z = normed(x.map, x.affine)
    if other is not None and other.map is not None:
        z = z + normed(other.map, other.affine)
    if x.map.dtype == torch.int8:
        z = torch.where(x.map % 2 == 1, z.clamp(min=MIN_POSITIVE), z.clamp(max=0))
    y = activated(z, slope).to(dtype or x.map.dtype)
    x_int8 = other_int8 = None
    if x.rate_c is not None:
        odd = (y > 0).to(torch.float32)
        halves = scaled(x).clamp(1 - INT8_MAX, INT8_MAX - 1) - odd
        x_int8 = (2 * torch.floor(halves / 2 + 0.5) + odd).to(torch.int8)
    if other is not None and other.rate_c is not None:
        others = torch.floor(scaled(other) + 0.5)
        other_int8 = others.clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return y, x_int8, other_int8


def bn_add_act_sums(
    grad: Tensor, y: Tensor, x: Term, other: Term | None, slope: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums over the pixels of d, d * (x - pivot), and d * (other - pivot) if `other` has an affine.

    Each is (N, C). Maps of x and `other` may be int8, with a pivot of 0.

    d = grad * act'(y) is the gradient before the activation. If x has no map, it is recomputed from
    y, which needs a slope above 0 and no `other`.
    """
    d = before(grad, y, slope)
    third = None
    if other is not None and other.affine is not None:
        third = (d * centred(other)).sum((2, 3))
    return d.sum((2, 3)), (d * centred(x, y, slope)).sum((2, 3)), third


def bn_add_act_gradients(
    grad: Tensor,
    y: Tensor,
    x: Term,
    other: Term | None,
    slope: float | None,
    squeeze_nc: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of `other`, which is d without an affine; see `bn_add_act_sums`.

    The gradient of y is grad, or grad + squeeze.
    """
    d = before(grad if squeeze_nc is None else wide(grad) + per_map(squeeze_nc), y, slope)
    grad_x = sloped(d, centred(x, y, slope), x.slopes).to(y.dtype)
    if other is None:
        return grad_x, None
    grad_other = d if other.affine is None else sloped(d, centred(other), other.slopes)
    return grad_x, grad_other.to(y.dtype)


def slope_means(x: Term, slope: float | None) -> tuple[Tensor, Tensor]:
    """Means over the pixels of act'(affine(x)) and act'(affine(x)) * (x - pivot): twice (N, C).

    As act(z) = act'(z) * z, they give the means of act(affine(x)), and the gradient of the means.
    """
    assert x.map is not None
    steep = act_slope(normed(x.map, x.affine), slope)
    return steep.mean((2, 3)), (steep * centred(x)).mean((2, 3))


def blurred(x: Term, slope: float | None) -> tuple[Tensor, Tensor]:
    """`layers.BlurPool` of act(affine(x)), and its means over the pixels.

    (N, C, H, W) -> (N, C, H/2, W/2), rounded up, and (N, C) in the precision of sums.
    """
    assert x.map is not None
    y = blur(activated(normed(x.map, x.affine), slope))
    return y.to(x.map.dtype), y.mean((2, 3))


def blurred_sums(
    grad: Tensor, squeeze_nc: Tensor, x: Term, slope: float | None
) -> tuple[Tensor, Tensor]:
    """Sums over the pixels of d and d * (x - pivot), each (N, C).

    d is the gradient before the activation, for the output gradient grad + squeeze.
    """
    d = before_blur(grad, squeeze_nc, x, slope)
    return d.sum((2, 3)), (d * centred(x)).sum((2, 3))


def blurred_gradients(grad: Tensor, squeeze_nc: Tensor, x: Term, slope: float | None) -> Tensor:
    """The gradient of x; arguments as in `blurred_sums`."""
    assert x.map is not None
    return sloped(before_blur(grad, squeeze_nc, x, slope), centred(x), x.slopes).to(x.map.dtype)


def wide(t: Tensor) -> Tensor:
    """`t` in the precision of sums."""
    return t if t.dtype == torch.float64 else t.float()


def per_map(numbers: Tensor) -> Tensor:
    """(C,) or (N, C), broadcast over the pixels of maps."""
    return numbers[..., None, None]


def normed(x: Tensor, affine: Affine | None) -> Tensor:
    """affine(x), or x without an affine."""
    if affine is None:
        return wide(x)
    pivot_c, scale_nc, shift_nc = affine
    return per_map(scale_nc) * (wide(x) - per_map(pivot_c)) + per_map(shift_nc)


def activated(z: Tensor, slope: float | None) -> Tensor:
    return z if slope is None else torch.where(z > 0, z, z * slope)


def act_slope(y: Tensor, slope: float | None) -> Tensor:
    """The activation's derivative, from the sign of its output."""
    ones = torch.ones_like(y)
    return ones if slope is None else torch.where(y > 0, ones, slope)


def before(grad: Tensor, y: Tensor, slope: float | None) -> Tensor:
    return wide(grad) * act_slope(wide(y), slope)


def recovered(y: Tensor, affine: Affine, slope: float | None) -> Tensor:
    """x - pivot from y = act(affine(x))."""
    z = wide(y) if slope is None else torch.where(wide(y) > 0, wide(y), wide(y) / slope)
    return (z - per_map(affine.shift_nc)) / per_map(affine.scale_nc)


def centred(term: Term, y: Tensor | None = None, slope: float | None = None) -> Tensor:
    """map - pivot, recovered from y = act(affine(map)) if there is no map."""
    assert term.affine is not None
    if term.map is None:
        assert y is not None
        return recovered(y, term.affine, slope)
    return wide(term.map) - per_map(term.affine.pivot_c)


def scaled(term: Term) -> Tensor:
    """(map - pivot) * rate, for int8."""
    assert term.rate_c is not None
    return centred(term) * per_map(term.rate_c)


def sloped(d: Tensor, centred: Tensor, slopes: Slopes | None) -> Tensor:
    assert slopes is not None
    scale, constant, linear = map(per_map, slopes)
    return scale * d + constant + linear * centred


def blur(x: Tensor) -> Tensor:
    padded = F.pad(x, (1, 1, 1, 1), border(x))
    return F.conv2d(padded, binomial(x), stride=2, groups=x.shape[1])


def unblur(g: Tensor, x: Tensor) -> Tensor:
    """The transpose of `blur`: the gradient of x from the gradient g of blur(x)."""
    h, w = x.shape[2:]
    spare = (1 - h % 2, 1 - w % 2)  # no filter reads the last row and column of an even map
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
    """The padding mode: a side of one pixel cannot be reflected."""
    return "reflect" if min(x.shape[2:]) > 1 else "replicate"


def before_blur(grad: Tensor, squeeze_nc: Tensor, x: Term, slope: float | None) -> Tensor:
    assert x.map is not None
    g = wide(grad) + per_map(squeeze_nc)
    return unblur(g, x.map) * act_slope(normed(x.map, x.affine), slope)
