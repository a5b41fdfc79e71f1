"""Computes each pass of `reference` by Triton on a GPU, with the same names, arguments and numbers.

Maps with strides other than NHWC or NCHW, and maps in another format than the first, are copied.
Sums are in float32, in two stages without atomics, so results are deterministic and do not depend
on the batch.
"""

# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
# (kernels are Triton, which only looks like Python)

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor, empty, empty_like

from fullstride.nets.fused.reference import Term
from fullstride.nets.fused.triton.tiles import (
    GATHERED_BLOCK,
    SIZES,
    activated,
    before,
    number,
    numbers_of,
    offsets,
    place,
    recovered,
    save,
    slope_of,
    three,
    tile,
    tiles_of,
    to_int8,
    to_int8_with_sign,
    values,
    with_sign_of,
    zeros,
)


def stats(x: Tensor, pivot_c: Tensor) -> tuple[Tensor, Tensor]:
    tiles = tiles_of(x)
    first, second = tiles.sums(stats_kernel, 2, tiles.lay(x), numbers_of(pivot_c))
    return first / tiles.pixels, second / tiles.pixels


def bn_add_act(
    x: Term, other: Term | None, slope: float | None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    assert x.map is not None
    tiles = tiles_of(x.map)
    ours, theirs = tiles.term(x), tiles.term(other)
    y = empty_like(ours.map, dtype=dtype or x.map.dtype)
    x_int8, other_int8 = (
        empty_like(y, dtype=torch.int8) if term and term.rate_c is not None else None
        for term in (x, other)
    )
    tiles.launch(bn_add_act_kernel, y, x_int8, other_int8, ours, theirs, slope_of(slope))
    return y, x_int8, other_int8


def bn_add_act_sums(
    grad: Tensor, y: Tensor, x: Term, other: Term | None, slope: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    tiles = tiles_of(y)
    if other and not other.affine:
        other = None
    arguments = tiles.lay(grad), tiles.lay(y), tiles.term(x), tiles.term(other), slope_of(slope)
    first, second, *third = tiles.sums(bn_add_act_sums_kernel, 3 if other else 2, *arguments)
    return first, second, third[0] if third else None


def bn_add_act_gradients(
    grad: Tensor,
    y: Tensor,
    x: Term,
    other: Term | None,
    slope: float | None,
    squeeze_nc: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    tiles = tiles_of(y)
    y = tiles.lay(y)
    grad_x, grad_other = empty_like(y), empty_like(y) if other else None
    theirs = tiles.term(other if other and other.affine else None)
    inputs = tiles.lay(grad), numbers_of(squeeze_nc), y, tiles.term(x), theirs, slope_of(slope)
    tiles.launch(bn_add_act_gradients_kernel, grad_x, grad_other, *inputs)
    return grad_x, grad_other


def slope_means(x: Term, slope: float | None) -> tuple[Tensor, Tensor]:
    assert x.map is not None
    tiles = tiles_of(x.map)
    first, second = tiles.sums(slope_means_kernel, 2, tiles.term(x), slope_of(slope))
    return first / tiles.pixels, second / tiles.pixels


@triton.jit(do_not_specialize=SIZES)
def stats_kernel(sums, x, pivot, outer, units, cut: tl.constexpr):
    here = place(outer, units, cut)
    pivot = number(pivot, here)
    first_sum, second_sum = zeros(cut), zeros(cut)
    for step in range(cut.steps):
        _, at, mask = tile(here, step, cut)
        centred = tl.where(mask, values(x, at, mask) - pivot, 0.0)
        first_sum += centred
        second_sum += centred * centred
    save(sums[0], first_sum, here, cut)
    save(sums[1], second_sum, here, cut)


@triton.jit(do_not_specialize=SIZES)
def bn_add_act_kernel(y, x_int8, other_int8, x, other, slope, outer, units, cut: tl.constexpr):
    here = place(outer, units, cut)
    pivot, scale, shift = three(x.affine, here)
    if x_int8 is not None:
        rate = number(x.rate_c, here)
    if other.affine is not None:
        other_pivot, other_scale, other_shift = three(other.affine, here)
    if other_int8 is not None:
        other_rate = number(other.rate_c, here)
    for step in range(cut.steps):
        _, at, mask = tile(here, step, cut)
        value = values(x.map, at, mask)
        centred = value - pivot
        z = scale * centred + shift
        if other.map is not None:
            more = values(other.map, at, mask)
            if other.affine is not None:
                more -= other_pivot
                if other_int8 is not None:
                    tl.store(other_int8 + at, to_int8(more, other_rate), mask=mask)
                more = other_scale * more + other_shift
            z += more
        if x.map.dtype.element_ty == tl.int8:
            z = with_sign_of(z, value)
        tl.store(y + at, activated(z, slope), mask=mask)
        if x_int8 is not None:
            tl.store(x_int8 + at, to_int8_with_sign(centred, rate, z), mask=mask)


@triton.jit
def d_and_centred(grad, squeeze, y, x, numbers, slope, at, mask):
    """The gradient before the activation, and x - pivot, which y gives if there is no x."""
    pivot, inverse_scale, shift = numbers
    out = values(y, at, mask)
    d = values(grad, at, mask)
    if squeeze is not None:
        d += squeeze
    d = before(d, out, slope)
    if x is None:
        centred = recovered(out, inverse_scale, shift, slope)
    else:
        centred = values(x, at, mask) - pivot
    return d, centred


@triton.jit(do_not_specialize=SIZES)
def bn_add_act_sums_kernel(sums, grad, y, x, other, slope, outer, units, cut: tl.constexpr):
    here = place(outer, units, cut)
    pivot, scale, shift = three(x.affine, here)
    numbers = pivot, 1.0 / scale, shift
    first_sum, second_sum, third_sum = zeros(cut), zeros(cut), zeros(cut)
    if other.map is not None:
        other_pivot = number(other.affine.pivot_c, here)
    for step in range(cut.steps):
        _, at, mask = tile(here, step, cut)
        d, centred = d_and_centred(grad, None, y, x.map, numbers, slope, at, mask)
        first_sum += d
        second_sum += d * centred
        if other.map is not None:
            third_sum += d * (values(other.map, at, mask) - other_pivot)
    save(sums[0], first_sum, here, cut)
    save(sums[1], second_sum, here, cut)
    if other.map is not None:
        save(sums[2], third_sum, here, cut)


@triton.jit(do_not_specialize=SIZES)
def bn_add_act_gradients_kernel(
    grad_x, grad_other, grad, squeeze, y, x, other, slope, outer, units, cut: tl.constexpr
):
    here = place(outer, units, cut)
    pivot, scale, shift = three(x.affine, here)
    numbers = pivot, 1.0 / scale, shift
    steep, constant, linear = three(x.slopes, here)
    if squeeze is not None:
        squeeze = number(squeeze, here)
    if other.map is not None:
        other_pivot = number(other.affine.pivot_c, here)
        other_steep, other_constant, other_linear = three(other.slopes, here)
    for step in range(cut.steps):
        _, at, mask = tile(here, step, cut)
        d, centred = d_and_centred(grad, squeeze, y, x.map, numbers, slope, at, mask)
        tl.store(grad_x + at, steep * d + constant + linear * centred, mask=mask)
        if other.map is not None:
            more = other_linear * (values(other.map, at, mask) - other_pivot)
            tl.store(grad_other + at, other_steep * d + other_constant + more, mask=mask)
        elif grad_other is not None:
            tl.store(grad_other + at, d, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def slope_means_kernel(sums, x, slope, outer, units, cut: tl.constexpr):
    here = place(outer, units, cut)
    pivot, scale, shift = three(x.affine, here)
    first_sum, second_sum = zeros(cut), zeros(cut)
    for step in range(cut.steps):
        _, at, mask = tile(here, step, cut)
        centred = values(x.map, at, mask) - pivot
        steep = tl.where(mask, before(1.0, scale * centred + shift, slope), 0.0)
        first_sum += steep
        second_sum += steep * centred
    save(sums[0], first_sum, here, cut)
    save(sums[1], second_sum, here, cut)


# The passes of `BlurPool`, as gathers in both directions.
#
# `border` is the index of the pixel that pads the first pixel, and counted from the end, of the
# pixel that pads the last: 1 for reflection, 0 for replication if a side has one pixel.


def blurred(x: Term, slope: float | None) -> tuple[Tensor, Tensor]:
    assert x.map is not None
    n, c, h, w = x.map.shape
    of_x = tiles_of(x.map)
    shape, format = (n, c, (h + 1) // 2, (w + 1) // 2), of_x.format
    y = empty(shape, dtype=x.map.dtype, device=x.map.device, memory_format=format)
    tiles = replace(of_x, pixels=y.shape[2] * y.shape[3], block=GATHERED_BLOCK)
    (total,) = tiles.sums(blurred_kernel, 1, y, tiles.term(x), slope_of(slope), *sides(x.map))
    return y, total / tiles.pixels


def blurred_sums(
    grad: Tensor, squeeze_nc: Tensor, x: Term, slope: float | None
) -> tuple[Tensor, Tensor]:
    assert x.map is not None
    tiles = tiles_of(x.map, GATHERED_BLOCK)
    arguments = tiles.lay(grad), numbers_of(squeeze_nc), tiles.term(x), slope_of(slope)
    first, second = tiles.sums(blurred_sums_kernel, 2, *arguments, *sides(x.map))
    return first, second


def blurred_gradients(grad: Tensor, squeeze_nc: Tensor, x: Term, slope: float | None) -> Tensor:
    assert x.map is not None
    tiles = tiles_of(x.map, GATHERED_BLOCK)
    ours = tiles.term(x)
    grad_x = empty_like(ours.map)
    arguments = grad_x, tiles.lay(grad), numbers_of(squeeze_nc), ours, slope_of(slope)
    tiles.launch(blurred_gradients_kernel, *arguments, *sides(x.map))
    return grad_x


def sides(x: Tensor) -> tuple[int, int, int]:
    h, w = x.shape[2:]
    return h, w, 1 if min(h, w) > 1 else 0


@triton.jit(do_not_specialize=SIZES)
def blurred_kernel(sums, y, x, slope, height, width, border, outer, units, cut: tl.constexpr):
    here = place(outer, units, cut)
    pivot, scale, shift = three(x.affine, here)
    columns = (width + 1) // 2
    total = zeros(cut)
    for step in range(cut.steps):
        p, at, mask = tile(here, step, cut)
        blurred_values = zeros(cut)
        for dy in tl.static_range(-1, 2):
            i = reflected(p // columns * 2 + dy, height, border)
            for dx in tl.static_range(-1, 2):
                j = reflected(p % columns * 2 + dx, width, border)
                from_x = offsets(here, i * width + j, height * width, cut)
                z = scale * (values(x.map, from_x, mask) - pivot) + shift
                blurred_values += ((2 - dy * dy) * (2 - dx * dx) / 16) * activated(z, slope)
        tl.store(y + at, blurred_values, mask=mask)
        total += tl.where(mask, blurred_values, 0.0)
    save(sums[0], total, here, cut)


@triton.jit(do_not_specialize=SIZES)
def blurred_sums_kernel(
    sums, grad, squeeze, x, slope, height, width, border, outer, units, cut: tl.constexpr
):
    here = place(outer, units, cut)
    pivot, scale, shift = three(x.affine, here)
    squeeze = number(squeeze, here)
    first_sum, second_sum = zeros(cut), zeros(cut)
    for step in range(cut.steps):
        p, at, mask = tile(here, step, cut)
        centred = values(x.map, at, mask) - pivot
        d = unblurred(grad, squeeze, here, p, mask, (height, width, border), cut)
        d = tl.where(mask, before(d, scale * centred + shift, slope), 0.0)
        first_sum += d
        second_sum += d * centred
    save(sums[0], first_sum, here, cut)
    save(sums[1], second_sum, here, cut)


@triton.jit(do_not_specialize=SIZES)
def blurred_gradients_kernel(
    grad_x, grad, squeeze, x, slope, height, width, border, outer, units, cut: tl.constexpr
):
    here = place(outer, units, cut)
    pivot, scale, shift = three(x.affine, here)
    squeeze = number(squeeze, here)
    steep, constant, linear = three(x.slopes, here)
    for step in range(cut.steps):
        p, at, mask = tile(here, step, cut)
        centred = values(x.map, at, mask) - pivot
        d = unblurred(grad, squeeze, here, p, mask, (height, width, border), cut)
        d = before(d, scale * centred + shift, slope)
        tl.store(grad_x + at, steep * d + constant + linear * centred, mask=mask)


@triton.jit
def reflected(i, size, border):
    """The index of pixel i, which may be one pixel outside of the map."""
    i = tl.where(i < 0, border, i)
    return tl.where(i < size, i, size - 1 - border)


@triton.jit
def unblurred(grad, squeeze, here, p, mask, sides, cut: tl.constexpr):
    """The gradient of pixels p, from one output in even rows or columns, from two in odd ones."""
    height, width, border = sides
    lines, columns = (height + 1) // 2, (width + 1) // 2
    d = zeros(cut)
    for second_line in tl.static_range(2):
        i = (p // width + second_line) // 2
        for second_column in tl.static_range(2):
            j = (p % width + second_column) // 2
            weight = share(i, p // width, height, border, second_line) * share(
                j, p % width, width, border, second_column
            )
            at = offsets(here, i * columns + j, lines * columns, cut)
            g = values(grad, at, mask & (weight > 0)[:, None]) + squeeze
            d += weight[:, None] * g
    return d


@triton.jit
def share(output, pixel, size, border, second: tl.constexpr):
    """The filter's weight of a pixel for an output, along one side."""
    weight = tl.where(output * 2 == pixel, 0.5, 0.25)
    weight += tl.where((output == 0) & (pixel == border), 0.25, 0.0)
    weight += tl.where((output * 2 + 1 == size) & (pixel == size - 1 - border), 0.25, 0.0)
    if second:  # for an even pixel, the second output equals the first
        weight = tl.where(pixel % 2 == 0, 0.0, weight)
    return tl.where(output * 2 < size, weight, 0.0)
