"""Computes the passes of `BlurPool` by Triton, as gathers in both directions.

`border` is the index of the pixel that pads the first pixel, and counted from the end, of the pixel
that pads the last: 1 for reflection, 0 for replication if a side has one pixel.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (kernels are Triton, which only looks like Python)

from dataclasses import replace

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
    save,
    slope_of,
    three,
    tile,
    tiles_of,
    values,
    zeros,
)


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
