"""How are the passes over maps computed in Triton? Each pass of `reference`, on a GPU.

Names, arguments and numbers are the same. Maps with strides other than NHWC or NCHW, and those in
another format than the first, are copied. Sums are in float32, in two stages without atomics, so
results are deterministic and do not depend on the batch.
"""

# pyright: reportPossiblyUnboundVariable=false
# (kernels are Triton, which only looks like Python)

import torch
import triton
import triton.language as tl
from torch import Tensor, empty_like

from fullstride.nets.fused.reference import Affine, Slopes
from fullstride.nets.fused.triton.blur import blurred, blurred_gradients, blurred_sums
from fullstride.nets.fused.triton.gate import (
    gated,
    gated_gradients,
    gated_sums,
    squeezed,
)
from fullstride.nets.fused.triton.tiles import (
    SIZES,
    activated,
    affine_at,
    affine_of,
    inside,
    number,
    numbers_of,
    offsets,
    place,
    recovered,
    rows,
    save,
    slope_of,
    slopes_at,
    tiles_of,
    to_int8,
    to_int8_with_sign,
    values,
    with_sign_of,
)

__all__ = [
    "blurred",
    "blurred_gradients",
    "blurred_sums",
    "gated",
    "gated_gradients",
    "gated_sums",
]
__all__ += [
    "bn_add_act",
    "bn_add_act_int8",
    "bn_add_act_gradients",
    "bn_add_act_sums",
    "squeezed",
    "stats",
]


def stats(x: Tensor, pivot_c: Tensor) -> tuple[Tensor, Tensor]:
    tiles = tiles_of(x)
    first, second = tiles.sums(stats_kernel, 2, tiles.lay(x), pivot_c.float().contiguous())
    return first / tiles.pixels, second / tiles.pixels


def bn_add_act(
    x: Tensor,
    affine: Affine,
    other: Tensor | None,
    other_affine: Affine | None,
    slope: float | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    tiles = tiles_of(x)
    x = tiles.lay(x)
    y = empty_like(x, dtype=dtype or x.dtype)
    theirs = tiles.lay(other), *affine_of(other_affine), None
    tiles.launch(
        bn_add_act_kernel, y, None, None, x, *affine_of(affine), None, *theirs, slope_of(slope)
    )
    return y


def bn_add_act_int8(
    x: Tensor,
    affine: Affine,
    other: Tensor | None,
    other_affine: Affine | None,
    slope: float | None,
    rate_c: Tensor,
    other_rate_c: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    tiles = tiles_of(x)
    x = tiles.lay(x)
    y, x_int8 = empty_like(x), empty_like(x, dtype=torch.int8)
    other_int8 = None if other_rate_c is None else empty_like(x_int8)
    ours = x, *affine_of(affine), numbers_of(rate_c)
    theirs = tiles.lay(other), *affine_of(other_affine), numbers_of(other_rate_c)
    tiles.launch(bn_add_act_kernel, y, x_int8, other_int8, *ours, *theirs, slope_of(slope))
    return y, x_int8, other_int8


def bn_add_act_sums(
    grad: Tensor,
    y: Tensor,
    x: Tensor | None,
    affine: Affine,
    other: Tensor | None,
    other_affine: Affine | None,
    slope: float | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    tiles = tiles_of(y)
    ours = *(tiles.lay(each) for each in (grad, y, x)), *affine_of(affine)
    if other is None or other_affine is None:
        first, second = tiles.sums(
            bn_add_act_sums_kernel, 2, None, *ours, None, None, slope_of(slope)
        )
        return first, second, None
    theirs = tiles.lay(other), other_affine.pivot_c.float().contiguous()
    first, second, third = tiles.sums(bn_add_act_sums_kernel, 3, *ours, *theirs, slope_of(slope))
    return first, second, third


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
    tiles = tiles_of(y)
    grad, y, x = (tiles.lay(each) for each in (grad, y, x))
    grad_x = empty_like(y)
    grad_other = None if other is None else empty_like(y)
    theirs = None, None, None, None, None, 0
    if other is not None and other_affine is not None and other_slopes is not None:
        theirs = tiles.lay(other), other_affine.pivot_c.float().contiguous(), *rows(*other_slopes)
    ours = grad, y, x, *affine_of(affine), *rows(*slopes)
    tiles.launch(bn_add_act_gradients_kernel, grad_x, grad_other, *ours, *theirs, slope_of(slope))
    return grad_x, grad_other


@triton.jit(do_not_specialize=SIZES)
def stats_kernel(
    first_sums,
    second_sums,
    x,
    pivot,
    outer,
    units,
    nhwc: tl.constexpr,
    unit: tl.constexpr,
    block_p: tl.constexpr,
    block_c: tl.constexpr,
    steps: tl.constexpr,
):
    n, first, c, pixels, channels = place(outer, units, nhwc, unit, block_p, block_c, steps)
    pivot = number(pivot, n, 0, c, channels)
    first_sum = tl.zeros([block_p, block_c], tl.float32)
    second_sum = tl.zeros([block_p, block_c], tl.float32)
    for step in range(steps):
        p = first + step * block_p
        at, mask = offsets(n, p, c, pixels, channels, nhwc), inside(p, c, pixels, channels)
        centred = tl.where(mask, values(x, at, mask) - pivot, 0.0)
        first_sum += centred
        second_sum += centred * centred
    save(first_sums, first_sum, c, channels, block_c)
    save(second_sums, second_sum, c, channels, block_c)


@triton.jit(do_not_specialize=SIZES)
def bn_add_act_kernel(
    y,
    x_int8,
    other_int8,
    x,
    pivot,
    scale,
    shift,
    row,
    rate,
    other,
    other_pivot,
    other_scale,
    other_shift,
    other_row,
    other_rate,
    slope,
    outer,
    units,
    nhwc: tl.constexpr,
    unit: tl.constexpr,
    block_p: tl.constexpr,
    block_c: tl.constexpr,
    steps: tl.constexpr,
):
    n, first, c, pixels, channels = place(outer, units, nhwc, unit, block_p, block_c, steps)
    pivot, scale, shift = affine_at(pivot, scale, shift, n, row, c, channels)
    if other_pivot is not None:
        other_pivot, other_scale, other_shift = affine_at(
            other_pivot, other_scale, other_shift, n, other_row, c, channels
        )
    if x_int8 is not None:
        rate = number(rate, n, 0, c, channels)
    if other_int8 is not None:
        other_rate = number(other_rate, n, 0, c, channels)
    for step in range(steps):
        p = first + step * block_p
        at, mask = offsets(n, p, c, pixels, channels, nhwc), inside(p, c, pixels, channels)
        value = values(x, at, mask)
        centred = value - pivot
        z = scale * centred + shift
        if other is not None:
            more = values(other, at, mask)
            if other_pivot is not None:
                more -= other_pivot
                if other_int8 is not None:
                    tl.store(other_int8 + at, to_int8(more, other_rate), mask=mask)
                more = other_scale * more + other_shift
            z += more
        if x.dtype.element_ty == tl.int8:
            z = with_sign_of(z, value)
        tl.store(y + at, activated(z, slope), mask=mask)
        if x_int8 is not None:
            tl.store(x_int8 + at, to_int8_with_sign(centred, rate, z), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def bn_add_act_sums_kernel(
    first_sums,
    second_sums,
    third_sums,
    grad,
    y,
    x,
    pivot,
    scale,
    shift,
    row,
    other,
    other_pivot,
    slope,
    outer,
    units,
    nhwc: tl.constexpr,
    unit: tl.constexpr,
    block_p: tl.constexpr,
    block_c: tl.constexpr,
    steps: tl.constexpr,
):
    n, first, c, pixels, channels = place(outer, units, nhwc, unit, block_p, block_c, steps)
    pivot, scale, shift = affine_at(pivot, scale, shift, n, row, c, channels)
    inverse_scale = 1.0 / scale
    first_sum = tl.zeros([block_p, block_c], tl.float32)
    second_sum = tl.zeros([block_p, block_c], tl.float32)
    third_sum = tl.zeros([block_p, block_c], tl.float32)
    if other is not None:
        other_pivot = number(other_pivot, n, 0, c, channels)
    for step in range(steps):
        p = first + step * block_p
        at, mask = offsets(n, p, c, pixels, channels, nhwc), inside(p, c, pixels, channels)
        out = values(y, at, mask)
        d = before(grad, out, slope, at, mask)
        centred = (
            recovered(out, inverse_scale, shift, slope)
            if x is None
            else values(x, at, mask) - pivot
        )
        first_sum += d
        second_sum += d * centred
        if other is not None:
            third_sum += d * (values(other, at, mask) - other_pivot)
    save(first_sums, first_sum, c, channels, block_c)
    save(second_sums, second_sum, c, channels, block_c)
    if other is not None:
        save(third_sums, third_sum, c, channels, block_c)


@triton.jit(do_not_specialize=SIZES)
def bn_add_act_gradients_kernel(
    grad_x,
    grad_other,
    grad,
    y,
    x,
    pivot,
    scale,
    shift,
    row,
    slopes_scale,
    slopes_constant,
    slopes_linear,
    slopes_row,
    other,
    other_pivot,
    other_slopes_scale,
    other_slopes_constant,
    other_slopes_linear,
    other_slopes_row,
    slope,
    outer,
    units,
    nhwc: tl.constexpr,
    unit: tl.constexpr,
    block_p: tl.constexpr,
    block_c: tl.constexpr,
    steps: tl.constexpr,
):
    n, first, c, pixels, channels = place(outer, units, nhwc, unit, block_p, block_c, steps)
    pivot, scale, shift = affine_at(pivot, scale, shift, n, row, c, channels)
    inverse_scale = 1.0 / scale
    steep, constant, linear = slopes_at(
        slopes_scale, slopes_constant, slopes_linear, n, slopes_row, c, channels
    )
    if other is not None:
        other_pivot = number(other_pivot, n, 0, c, channels)
        other_steep, other_constant, other_linear = slopes_at(
            other_slopes_scale,
            other_slopes_constant,
            other_slopes_linear,
            n,
            other_slopes_row,
            c,
            channels,
        )
    for step in range(steps):
        p = first + step * block_p
        at, mask = offsets(n, p, c, pixels, channels, nhwc), inside(p, c, pixels, channels)
        out = values(y, at, mask)
        d = before(grad, out, slope, at, mask)
        centred = (
            recovered(out, inverse_scale, shift, slope)
            if x is None
            else values(x, at, mask) - pivot
        )
        tl.store(grad_x + at, steep * d + constant + linear * centred, mask=mask)
        if other is not None:
            more = other_linear * (values(other, at, mask) - other_pivot)
            tl.store(grad_other + at, other_steep * d + other_constant + more, mask=mask)
        elif grad_other is not None:
            tl.store(grad_other + at, d, mask=mask)


@triton.jit
def before(grad, y, slope, at, mask):
    """The gradient before the activation."""
    g = values(grad, at, mask)
    if slope is not None:
        g = tl.where(y > 0, g, g * slope)
    return g
