"""How is `BlurPool` computed in Triton? The passes of `reference`, as gathers in both directions.

`border` is the index of the pixel that pads the first one, and the distance from the end of the one
that pads the last: 1 for reflection, 0 for replication where a side has one pixel.
"""

# pyright: reportGeneralTypeIssues=false
# (kernels are Triton, which only looks like Python)

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor, empty, empty_like

from fullstride.nets.fused.reference import Affine, Slopes
from fullstride.nets.fused.triton.tiles import (
    GATHERED_BLOCK,
    SIZES,
    activated,
    affine_at,
    affine_of,
    inside,
    number,
    offsets,
    place,
    rows,
    save,
    slope_of,
    slopes_at,
    tiles_of,
    values,
)


def blurred(x: Tensor, affine: Affine, slope: float | None) -> tuple[Tensor, Tensor]:
    n, c, h, w = x.shape
    grad_x = tiles_of(x)
    y = empty(
        (n, c, (h + 1) // 2, (w + 1) // 2),
        dtype=x.dtype,
        device=x.device,
        memory_format=grad_x.format,
    )
    tiles = replace(grad_x, pixels=y.shape[2] * y.shape[3], block=GATHERED_BLOCK)
    (total,) = tiles.sums(
        blurred_kernel, 1, y, tiles.lay(x), *affine_of(affine), slope_of(slope), *sides(x)
    )
    return y, total / tiles.pixels


def blurred_sums(
    grad: Tensor, squeeze_nc: Tensor | None, x: Tensor, affine: Affine, slope: float | None
) -> tuple[Tensor, Tensor]:
    tiles = tiles_of(x, GATHERED_BLOCK)
    maps = tiles.lay(grad), *squeeze_of(squeeze_nc), tiles.lay(x)
    first, second = tiles.sums(
        blurred_sums_kernel, 2, *maps, *affine_of(affine), slope_of(slope), *sides(x)
    )
    return first, second


def blurred_gradients(
    grad: Tensor,
    squeeze_nc: Tensor | None,
    x: Tensor,
    affine: Affine,
    slopes: Slopes,
    slope: float | None,
) -> Tensor:
    tiles = tiles_of(x, GATHERED_BLOCK)
    x = tiles.lay(x)
    grad_x = empty_like(x)
    maps = grad_x, tiles.lay(grad), *squeeze_of(squeeze_nc), x
    numbers = *affine_of(affine), *rows(*slopes), slope_of(slope), *sides(x)
    tiles.launch(blurred_gradients_kernel, *maps, *numbers)
    return grad_x


def squeeze_of(squeeze_nc: Tensor | None) -> tuple[Tensor | None, int]:
    return (None, 0) if squeeze_nc is None else rows(squeeze_nc)


def sides(x: Tensor) -> tuple[int, int, int]:
    h, w = x.shape[2:]
    return h, w, 1 if min(h, w) > 1 else 0


@triton.jit(do_not_specialize=SIZES)
def blurred_kernel(
    sums,
    y,
    x,
    pivot,
    scale,
    shift,
    row,
    slope,
    height,
    width,
    border,
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
    columns = (width + 1) // 2
    total = tl.zeros([block_p, block_c], tl.float32)
    for step in range(steps):
        p = first + step * block_p
        at, mask = offsets(n, p, c, pixels, channels, nhwc), inside(p, c, pixels, channels)
        blurred_values = tl.zeros([block_p, block_c], tl.float32)
        for dy in tl.static_range(-1, 2):
            i = reflected(p // columns * 2 + dy, height, border)
            for dx in tl.static_range(-1, 2):
                j = reflected(p % columns * 2 + dx, width, border)
                from_x = offsets(n, i * width + j, c, height * width, channels, nhwc)
                z = scale * (values(x, from_x, mask) - pivot) + shift
                blurred_values += ((2 - dy * dy) * (2 - dx * dx) / 16) * activated(z, slope)
        tl.store(y + at, blurred_values, mask=mask)
        total += tl.where(mask, blurred_values, 0.0)
    save(sums, total, c, channels, block_c)


@triton.jit(do_not_specialize=SIZES)
def blurred_sums_kernel(
    first_sums,
    second_sums,
    grad,
    squeeze,
    squeeze_row,
    x,
    pivot,
    scale,
    shift,
    row,
    slope,
    height,
    width,
    border,
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
    if squeeze is not None:
        squeeze = number(squeeze, n, squeeze_row, c, channels)
    first_sum = tl.zeros([block_p, block_c], tl.float32)
    second_sum = tl.zeros([block_p, block_c], tl.float32)
    for step in range(steps):
        p = first + step * block_p
        at, mask = offsets(n, p, c, pixels, channels, nhwc), inside(p, c, pixels, channels)
        centred = values(x, at, mask) - pivot
        d = unblurred(grad, squeeze, n, p, c, mask, height, width, border, channels, nhwc)
        d = tl.where(mask, before(d, scale * centred + shift, slope), 0.0)
        first_sum += d
        second_sum += d * centred
    save(first_sums, first_sum, c, channels, block_c)
    save(second_sums, second_sum, c, channels, block_c)


@triton.jit(do_not_specialize=SIZES)
def blurred_gradients_kernel(
    grad_x,
    grad,
    squeeze,
    squeeze_row,
    x,
    pivot,
    scale,
    shift,
    row,
    slopes_scale,
    slopes_constant,
    slopes_linear,
    slopes_row,
    slope,
    height,
    width,
    border,
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
    if squeeze is not None:
        squeeze = number(squeeze, n, squeeze_row, c, channels)
    steep, constant, linear = slopes_at(
        slopes_scale, slopes_constant, slopes_linear, n, slopes_row, c, channels
    )
    for step in range(steps):
        p = first + step * block_p
        at, mask = offsets(n, p, c, pixels, channels, nhwc), inside(p, c, pixels, channels)
        centred = values(x, at, mask) - pivot
        d = unblurred(grad, squeeze, n, p, c, mask, height, width, border, channels, nhwc)
        d = before(d, scale * centred + shift, slope)
        tl.store(grad_x + at, steep * d + constant + linear * centred, mask=mask)


@triton.jit
def reflected(i, size, border):
    """The index of pixel i, which may be one outside of the map."""
    i = tl.where(i < 0, border, i)
    return tl.where(i < size, i, size - 1 - border)


@triton.jit
def unblurred(grad, squeeze, n, p, c, mask, height, width, border, channels, nhwc: tl.constexpr):
    """The gradient of pixels p: of one output in an even row or column, of two in an odd one."""
    lines = (height + 1) // 2
    columns = (width + 1) // 2
    d = tl.zeros(mask.shape, tl.float32)
    for second_line in tl.static_range(2):
        i = (p // width + second_line) // 2
        for second_column in tl.static_range(2):
            j = (p % width + second_column) // 2
            weight = share(i, p // width, height, border, second_line) * share(
                j, p % width, width, border, second_column
            )
            at = offsets(n, i * columns + j, c, lines * columns, channels, nhwc)
            g = values(grad, at, mask & (weight > 0)[:, None])
            if squeeze is not None:
                g += squeeze
            d += weight[:, None] * g
    return d


@triton.jit
def share(output, pixel, size, border, second: tl.constexpr):
    """The filter's weight of a pixel for an output, along one side."""
    weight = tl.where(output * 2 == pixel, 0.5, 0.25)
    weight += tl.where((output == 0) & (pixel == border), 0.25, 0.0)
    weight += tl.where((output * 2 + 1 == size) & (pixel == size - 1 - border), 0.25, 0.0)
    if second:  # for an even pixel it equals the first
        weight = tl.where(pixel % 2 == 0, 0.0, weight)
    return tl.where(output * 2 < size, weight, 0.0)


@triton.jit
def before(d, z, slope):
    """The gradient before the activation."""
    if slope is not None:
        d = tl.where(z > 0, d, d * slope)
    return d
