"""How are maps divided into tiles for Triton?

A program processes one image, a block of its channels and `steps` blocks of its pixels in sequence.
Maps in memory are contiguous rows: the channels of a pixel (NHWC) or the pixels of a channel
(NCHW).
The length of a row is `units` * `unit`, so that the compiler knows a divisor of it and loads 128
bits at once; an image has `outer` rows.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullstride.nets.fused.reference import INT8_MAX, MIN_POSITIVE, Affine

# Block sizes, not yet tuned on a GPU: with 4 warps a thread has 16 or 8 values of each map.
ROW_BLOCKS = (128, 64, 32)  # along a row; the one with the least padding is chosen
BLOCK = 2048  # values of one map
GATHERED_BLOCK = 1024  # the same, where each value depends on several
STEPS = 8  # at most; more make fewer partial sums, but also fewer programs
UNITS = (8, 4, 1)  # 128 bits hold 8 values in bf16, 4 in float32
# Multiply-adds are fused explicitly, as Triton is to change its default.
OPTIONS = dict(num_warps=4, enable_fp_fusion=True)

LARGEST, LEAST = tl.constexpr(float(INT8_MAX)), tl.constexpr(MIN_POSITIVE)

# Kernels are not specialised on the values of these.
SIZES = ("outer", "units", "height", "width", "border")
SIZES += ("row", "other_row", "slopes_row", "other_slopes_row", "gate_row", "squeeze_row")


@dataclass(frozen=True)
class Tiles:
    """The tiles of maps of (images, channels, pixels)."""

    images: int
    channels: int
    pixels: int
    nhwc: bool
    block: int

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """The last arguments of every kernel."""
        inner, outer = (self.channels, self.pixels) if self.nhwc else (self.pixels, self.channels)
        unit = next(unit for unit in UNITS if inner % unit == 0)
        along = min(ROW_BLOCKS, key=lambda block: -inner % block)
        across = min(self.block // along, triton.next_power_of_2(outer))
        block_p, block_c = (across, along) if self.nhwc else (along, across)
        steps = min(STEPS, triton.next_power_of_2(triton.cdiv(self.pixels, block_p)))
        rows = dict(outer=outer, units=inner // unit, nhwc=self.nhwc, unit=unit)
        return rows | dict(block_p=block_p, block_c=block_c, steps=steps)

    @property
    def format(self) -> torch.memory_format:
        return torch.channels_last if self.nhwc else torch.contiguous_format

    def lay(self, maps: Any) -> Any:
        """The maps, or None, in the memory format of the tiles."""
        return None if maps is None else maps.contiguous(memory_format=self.format)

    @cached_property
    def spans(self) -> int:
        """The number of programs that share the pixels of an image and a block of channels."""
        return triton.cdiv(self.pixels, self.sizes["block_p"] * self.sizes["steps"])

    def launch(self, kernel: Any, *arguments: Tensor | float | None) -> None:
        programs = self.images * self.spans * triton.cdiv(self.channels, self.sizes["block_c"])
        run(kernel, programs, arguments, self.sizes)

    def sums(self, kernel: Any, count: int, *arguments: Tensor | float | None) -> list[Tensor]:
        """Sums over the pixels, each (N, C): a kernel writes each span's to its first arguments."""
        shape = self.images, self.spans, self.channels
        device = next(each.device for each in arguments if isinstance(each, Tensor))
        partial = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(count)]
        self.launch(kernel, *partial, *arguments)
        return [each[:, 0] if self.spans == 1 else each.sum(1) for each in partial]


def tiles_of(x: Tensor, block: int = BLOCK) -> Tiles:
    """Tiles in the memory format of x, or in the closest one."""
    n, c, h, w = x.shape
    return Tiles(n, c, h * w, c > 1 and x.stride(1) <= x.stride(3), block)


def run(
    kernel: Any, programs: int, arguments: tuple[Tensor | float | None, ...], sizes: dict[str, Any]
) -> None:
    if programs:
        with torch.cuda.device_of(next(each for each in arguments if isinstance(each, Tensor))):
            kernel[(programs,)](*arguments, **sizes, **OPTIONS)


def affine_of(affine: Affine | None) -> tuple[Any, ...]:
    """As arguments of a kernel: pivot, scale, shift, and the stride of `rows`."""
    if affine is None:
        return None, None, None, 0
    return numbers_of(affine.pivot_c), *rows(affine.scale_nc, affine.shift_nc)


def numbers_of(numbers_c: Tensor | None) -> Tensor | None:
    return None if numbers_c is None else numbers_c.float().contiguous()


def rows(*numbers_nc: Tensor) -> tuple[Any, ...]:
    """Numbers per image and channel as arguments of a kernel, and their stride over images or 0."""
    alike = [each.float().contiguous() for each in torch.broadcast_tensors(*numbers_nc)]
    return *alike, 0 if len(alike[0]) == 1 else alike[0].shape[1]


def slope_of(slope: float | None) -> float | None:
    """A float: for an integer the kernel would be compiled again."""
    return None if slope is None else float(slope)


@triton.jit
def place(
    outer,
    units,
    nhwc: tl.constexpr,
    unit: tl.constexpr,
    block_p: tl.constexpr,
    block_c: tl.constexpr,
    steps: tl.constexpr,
):
    """This program's image, first pixels and channels; then the numbers of pixels and channels."""
    inner = units * unit
    pixels = outer if nhwc else inner
    channels = inner if nhwc else outer
    blocks = tl.cdiv(channels, block_c)
    spans = tl.cdiv(pixels, block_p * steps)
    program = tl.program_id(0)
    c = program % blocks * block_c + tl.arange(0, block_c)
    p = program // blocks % spans * (block_p * steps) + tl.arange(0, block_p)
    n = program // (blocks * spans)
    return n.to(tl.int64), p, c, pixels, channels


@triton.jit
def offsets(n, p, c, pixels, channels, nhwc: tl.constexpr):
    """Offsets of pixels and channels, (block_p, block_c), in 64 bits: maps can have 2^31 values."""
    if nhwc:
        at = (n * pixels + p)[:, None] * channels + c[None, :]
    else:
        at = (n * channels + c)[None, :] * pixels + p[:, None]
    return at


@triton.jit
def inside(p, c, pixels, channels):
    return (p < pixels)[:, None] & (c < channels)[None, :]


@triton.jit
def values(maps, at, mask):
    return tl.load(maps + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def number(numbers, n, row, c, channels):
    """Numbers of an image's channels, (1, block_c); 1 outside, a safe divisor."""
    return tl.load(numbers + n * row + c, mask=c < channels, other=1.0)[None, :]


@triton.jit
def affine_at(pivot, scale, shift, n, row, c, channels):
    return (
        number(pivot, n, 0, c, channels),
        number(scale, n, row, c, channels),
        number(shift, n, row, c, channels),
    )


@triton.jit
def slopes_at(scale, constant, linear, n, row, c, channels):
    return (
        number(scale, n, row, c, channels),
        number(constant, n, row, c, channels),
        number(linear, n, row, c, channels),
    )


@triton.jit
def save(sums, total, c, channels, block_c: tl.constexpr):
    """The sums over this program's pixels, into (N, spans, C)."""
    n_and_span = tl.program_id(0) // tl.cdiv(channels, block_c)
    tl.store(sums + n_and_span * channels + c, tl.sum(total, 0), mask=c < channels)


@triton.jit
def activated(z, slope):
    if slope is not None:
        z = tl.where(z > 0, z, z * slope)
    return z


@triton.jit
def to_int8(centred, rate):
    """The nearest int8 values."""
    return tl.clamp(tl.floor(centred * rate + 0.5), -LARGEST, LARGEST).to(tl.int8)


@triton.jit
def to_int8_with_sign(centred, rate, z):
    """The nearest int8 values that are odd where z > 0, and even elsewhere."""
    odd = tl.where(z > 0, 1.0, 0.0)
    halves = tl.clamp(centred * rate, 1.0 - LARGEST, LARGEST - 1.0) - odd
    return (2.0 * tl.floor(halves * 0.5 + 0.5) + odd).to(tl.int8)


@triton.jit
def with_sign_of(z, x_int8):
    """z with the sign that the int8 values encode."""
    odd = x_int8 - 2.0 * tl.floor(x_int8 * 0.5) > 0.5
    return tl.where(odd, tl.maximum(z, LEAST), tl.minimum(z, 0.0))


@triton.jit
def recovered(y, inverse_scale, shift, slope):
    """x - pivot from y = act(scale * (x - pivot) + shift)."""
    if slope is not None:
        y = tl.where(y > 0, y, y * (1.0 / slope))
    return (y - shift) * inverse_scale
