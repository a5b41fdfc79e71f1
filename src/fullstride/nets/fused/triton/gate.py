"""How is squeeze-and-excitation computed in Triton? `squeezed` and `gated` of `reference`."""

import triton
import triton.language as tl
from torch import Tensor, empty_like

from fullstride.nets.fused.reference import Affine, Slopes
from fullstride.nets.fused.triton.tiles import (
    SIZES,
    activated,
    affine_at,
    affine_of,
    inside,
    number,
    offsets,
    place,
    recovered,
    rows,
    save,
    slope_of,
    slopes_at,
    tiles_of,
    values,
)


def squeezed(x: Tensor, affine: Affine, slope: float | None) -> Tensor:
    tiles = tiles_of(x)
    (total,) = tiles.sums(squeezed_kernel, 1, tiles.lay(x), *affine_of(affine), slope_of(slope))
    return total / tiles.pixels


def gated(x: Tensor, affine: Affine, gate_nc: Tensor, slope: float | None) -> Tensor:
    tiles = tiles_of(x)
    x = tiles.lay(x)
    y = empty_like(x)
    tiles.launch(gated_kernel, y, x, *affine_of(affine), *rows(gate_nc), slope_of(slope))
    return y


def gated_sums(
    grad: Tensor, y: Tensor, affine: Affine, gate_nc: Tensor, slope: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tiles = tiles_of(y)
    maps = tiles.lay(grad), tiles.lay(y)
    sums = tiles.sums(
        gated_sums_kernel, 5, *maps, *affine_of(affine), *rows(gate_nc), slope_of(slope)
    )
    first, second, third, fourth, fifth = sums
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
    tiles = tiles_of(y)
    y = tiles.lay(y)
    grad_x = empty_like(y)
    numbers = *affine_of(affine), *rows(gate_nc), *rows(squeeze_nc), *rows(*slopes)
    tiles.launch(gated_gradients_kernel, grad_x, tiles.lay(grad), y, *numbers, slope_of(slope))
    return grad_x


@triton.jit(do_not_specialize=SIZES)
def squeezed_kernel(
    sums,
    x,
    pivot,
    scale,
    shift,
    row,
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
    total = tl.zeros([block_p, block_c], tl.float32)
    for step in range(steps):
        p = first + step * block_p
        at, mask = offsets(n, p, c, pixels, channels, nhwc), inside(p, c, pixels, channels)
        z = scale * (values(x, at, mask) - pivot) + shift
        total += tl.where(mask, activated(z, slope), 0.0)
    save(sums, total, c, channels, block_c)


@triton.jit(do_not_specialize=SIZES)
def gated_kernel(
    y,
    x,
    pivot,
    scale,
    shift,
    row,
    gate,
    gate_row,
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
    gate = number(gate, n, gate_row, c, channels)
    for step in range(steps):
        p = first + step * block_p
        at, mask = offsets(n, p, c, pixels, channels, nhwc), inside(p, c, pixels, channels)
        z = scale * (values(x, at, mask) - pivot) + shift
        tl.store(y + at, gate * activated(z, slope), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def gated_sums_kernel(
    first_sums,
    second_sums,
    third_sums,
    fourth_sums,
    fifth_sums,
    grad,
    y,
    pivot,
    scale,
    shift,
    row,
    gate,
    gate_row,
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
    gate = number(gate, n, gate_row, c, channels)
    first_sum = tl.zeros([block_p, block_c], tl.float32)
    second_sum = tl.zeros([block_p, block_c], tl.float32)
    third_sum = tl.zeros([block_p, block_c], tl.float32)
    fourth_sum = tl.zeros([block_p, block_c], tl.float32)
    fifth_sum = tl.zeros([block_p, block_c], tl.float32)
    for step in range(steps):
        p = first + step * block_p
        at, mask = offsets(n, p, c, pixels, channels, nhwc), inside(p, c, pixels, channels)
        s = values(y, at, mask) / gate
        g = values(grad, at, mask)
        steep = tl.where(mask, tl.where(s > 0, 1.0, slope), 0.0)
        centred = recovered(s, inverse_scale, shift, slope)
        first_sum += g * s
        second_sum += g * steep
        third_sum += g * steep * centred
        fourth_sum += steep
        fifth_sum += steep * centred
    save(first_sums, first_sum, c, channels, block_c)
    save(second_sums, second_sum, c, channels, block_c)
    save(third_sums, third_sum, c, channels, block_c)
    save(fourth_sums, fourth_sum, c, channels, block_c)
    save(fifth_sums, fifth_sum, c, channels, block_c)


@triton.jit(do_not_specialize=SIZES)
def gated_gradients_kernel(
    grad_x,
    grad,
    y,
    pivot,
    scale,
    shift,
    row,
    gate,
    gate_row,
    squeeze,
    squeeze_row,
    slopes_scale,
    slopes_constant,
    slopes_linear,
    slopes_row,
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
    gate = number(gate, n, gate_row, c, channels)
    squeeze = number(squeeze, n, squeeze_row, c, channels)
    steep, constant, linear = slopes_at(
        slopes_scale, slopes_constant, slopes_linear, n, slopes_row, c, channels
    )
    for step in range(steps):
        p = first + step * block_p
        at, mask = offsets(n, p, c, pixels, channels, nhwc), inside(p, c, pixels, channels)
        s = values(y, at, mask) / gate
        d = gate * values(grad, at, mask) + squeeze
        d = tl.where(s > 0, d, d * slope)
        gradient = steep * d + constant + linear * recovered(s, inverse_scale, shift, slope)
        tl.store(grad_x + at, gradient, mask=mask)
