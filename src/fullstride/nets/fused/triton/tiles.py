"""Divides maps into tiles for Triton, and holds the functions that kernels share.

A program processes one image, a block of its channels and `steps` blocks of its pixels in sequence.
Maps in memory are contiguous rows: the channels of a pixel (NHWC) or the pixels of a channel
(NCHW). The length of a row is `units` * `unit`, so that the compiler knows a divisor of the length
and loads 128 bits at once; an image has `outer` rows.

Kernels take the named tuples of `reference` with `Numbers` in place of tensors (N, C), and last
`outer`, `units` and a `Cut`. Inside, `here` is the result of `place`.
"""

# pyright: reportAttributeAccessIssue=false
# (kernels are Triton, which only looks like Python)

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullstride.nets.fused.reference import INT8_MAX, MIN_POSITIVE, Affine, Slopes, Term

# Block sizes, not yet tuned on a GPU: with 4 warps a thread has 16 or 8 values of each map.
ROW_BLOCKS = (128, 64, 32)  # along a row; the block with the least padding is chosen
BLOCK = 2048  # values of one map
GATHERED_BLOCK = 1024  # values of one map, if each value depends on several
STEPS = 8  # at most; more make fewer partial sums, but also fewer programs
UNITS = (8, 4, 1)  # 128 bits hold 8 values in bf16, 4 in float32
# Multiply-adds are fused explicitly, as Triton is to change its default.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}

LARGEST, LEAST = tl.constexpr(float(INT8_MAX)), tl.constexpr(MIN_POSITIVE)

# Kernels are not specialised on the values of these.
SIZES = ("outer", "units", "height", "width", "border")


class Cut(NamedTuple):
    """How maps are divided: constants of the compiler."""

    nhwc: bool
    unit: int
    block_p: int  # pixels of a block
    block_c: int  # channels of a block
    steps: int  # blocks of pixels that a program processes in sequence


class Numbers(NamedTuple):
    """Numbers per channel as an argument of a kernel."""

    data: Tensor
    stride: int  # from an image to the next: C for (N, C), 0 for numbers that all images share


@dataclass(frozen=True)
class Tiles:
    """The tiles of maps of (images, channels, pixels)."""

    images: int
    channels: int
    pixels: int
    nhwc: bool
    block: int
    device: torch.device

    @cached_property
    def sizes(self) -> tuple[int, int, Cut]:
        """The last arguments of every kernel."""
        inner, outer = (self.channels, self.pixels) if self.nhwc else (self.pixels, self.channels)
        unit = next(unit for unit in UNITS if inner % unit == 0)
        along = min(ROW_BLOCKS, key=lambda block: -inner % block)
        across = min(self.block // along, triton.next_power_of_2(outer))
        block_p, block_c = (across, along) if self.nhwc else (along, across)
        steps = min(STEPS, triton.next_power_of_2(triton.cdiv(self.pixels, block_p)))
        return outer, inner // unit, Cut(self.nhwc, unit, block_p, block_c, steps)

    @property
    def format(self) -> torch.memory_format:
        return torch.channels_last if self.nhwc else torch.contiguous_format

    def lay(self, maps: Any) -> Any:
        """The maps, or None, in the memory format of the tiles."""
        return None if maps is None else maps.contiguous(memory_format=self.format)

    def term(self, term: Term | None) -> Any:
        """A term as an argument of a kernel, without a map if there is none."""
        return Term(self.lay(term.map), *map(numbers_of, term[1:])) if term else Term(None)

    @cached_property
    def spans(self) -> int:
        """The number of programs that share the pixels of an image and a block of channels."""
        cut = self.sizes[2]
        return triton.cdiv(self.pixels, cut.block_p * cut.steps)

    def launch(self, kernel: Any, *arguments: Any) -> None:
        programs = self.images * self.spans * triton.cdiv(self.channels, self.sizes[2].block_c)
        if programs:
            index = self.device.index if self.device.type == "cuda" else -1  # -1: as it is
            with torch.cuda.device(index):
                kernel[(programs,)](*arguments, *self.sizes, **OPTIONS)

    def sums(self, kernel: Any, count: int, *arguments: Any) -> list[Tensor]:
        """Sums over the pixels, each (N, C); `kernel` writes sums by span to its first argument."""
        shape = self.images, self.spans, self.channels
        options = {"dtype": torch.float32, "device": self.device}
        partial = tuple(torch.empty(shape, **options) for _ in range(count))
        self.launch(kernel, partial, *arguments)
        return [each[:, 0] if self.spans == 1 else each.sum(1) for each in partial]


def tiles_of(x: Tensor, block: int = BLOCK) -> Tiles:
    """Tiles in the memory format of x, or in the closest one."""
    n, c, h, w = x.shape
    return Tiles(n, c, h * w, c > 1 and x.stride(1) <= x.stride(3), block, x.device)


def numbers_of(numbers: Tensor | Affine | Slopes | None) -> Any:
    """Numbers per channel, (C,), or per image and channel, (N, C), as arguments of a kernel."""
    if isinstance(numbers, Affine | Slopes):
        return type(numbers)(*map(numbers_of, numbers))
    if numbers is None:
        return None
    stride = numbers.shape[1] if numbers.ndim == 2 and len(numbers) > 1 else 0
    return Numbers(numbers.float().contiguous(), stride)


def slope_of(slope: float | None) -> float | None:
    """`slope` as a float: for an integer the kernel would be compiled again."""
    return None if slope is None else float(slope)


@triton.jit
def place(outer, units, cut: tl.constexpr):
    """This program's image, first pixels and channels; and the counts of pixels and channels."""
    inner = units * cut.unit
    pixels = outer if cut.nhwc else inner
    channels = inner if cut.nhwc else outer
    blocks = tl.cdiv(channels, cut.block_c)
    spans = tl.cdiv(pixels, cut.block_p * cut.steps)
    program = tl.program_id(0)
    c = program % blocks * cut.block_c + tl.arange(0, cut.block_c)
    p = program // blocks % spans * (cut.block_p * cut.steps) + tl.arange(0, cut.block_p)
    n = program // (blocks * spans)
    return n.to(tl.int64), p, c, pixels, channels


@triton.jit
def tile(here, step, cut: tl.constexpr):
    """The pixels of a step, the offsets of the values, and whether each is inside the map."""
    n, first, c, pixels, channels = here
    p = first + step * cut.block_p
    return p, offsets(here, p, pixels, cut), (p < pixels)[:, None] & (c < channels)[None, :]


@triton.jit
def offsets(here, p, pixels, cut: tl.constexpr):
    """Offsets of pixels and channels, (block_p, block_c), in 64 bits: maps can have 2^31 values."""
    n, _, c, _, channels = here
    if cut.nhwc:
        at = (n * pixels + p)[:, None] * channels + c[None, :]
    else:
        at = (n * channels + c)[None, :] * pixels + p[:, None]
    return at


@triton.jit
def values(maps, at, mask):
    return tl.load(maps + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def number(numbers, here):
    """Numbers of an image's channels, (1, block_c); 1 outside, a safe divisor."""
    n, _, c, _, channels = here
    at = n * numbers.stride + c
    return tl.load(numbers.data + at, mask=c < channels, other=1.0)[None, :]


@triton.jit
def three(numbers, here):
    """The numbers of an `Affine` or of `Slopes`."""
    return number(numbers[0], here), number(numbers[1], here), number(numbers[2], here)


@triton.jit
def zeros(cut: tl.constexpr):
    return tl.full([cut.block_p, cut.block_c], 0.0, tl.float32)


@triton.jit
def save(sums, total, here, cut: tl.constexpr):
    """The sums over this program's pixels, into (N, spans, C)."""
    _, _, c, _, channels = here
    n_and_span = tl.program_id(0) // tl.cdiv(channels, cut.block_c)
    tl.store(sums + n_and_span * channels + c, tl.sum(total, 0), mask=c < channels)


@triton.jit
def activated(z, slope):
    if slope is not None:
        z = tl.where(z > 0, z, z * slope)
    return z


@triton.jit
def before(d, y, slope):
    """The gradient before the activation, from the sign of its output or input."""
    if slope is not None:
        d = tl.where(y > 0, d, d * slope)
    return d


@triton.jit
def recovered(y, inverse_scale, shift, slope):
    """x - pivot from y = act(scale * (x - pivot) + shift)."""
    if slope is not None:
        y = tl.where(y > 0, y, y * (1.0 / slope))
    return (y - shift) * inverse_scale


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
