"""How does a file resize pictures as Pillow does? By two products with matrices of weights."""

import math

import torch
from torch import Tensor

from fullstride.nets.preprocessing import Preprocessing


def bilinear(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def bicubic(x: Tensor) -> Tensor:
    x, a = x.abs(), -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), torch.zeros_like(x))


# Each kernel with half its width.
KERNELS = {"bilinear": (bilinear, 1), "bicubic": (bicubic, 2), "lanczos": (lanczos, 3)}


def resize_and_crop(pixels: Tensor, pre: Preprocessing) -> Tensor:
    """uint8 (N, H, W, C) -> float32 (N, resolution, resolution, C) with integers from 0 to 255.

    The result is that of `data.transforms.crop.test_view`, except that a few values differ by one
    level of brightness. Only tensor operations are used, also for sizes, so that an exported graph
    holds for all of them. Values are rounded after each of the two passes, and rows come first, as
    in Pillow up to version 12; later versions start with the columns where that is less work, which
    is visible at hard edges of tall pictures that are squished to a square.
    """
    height, width = count(pixels, 1), count(pixels, 2)
    rows, columns = new_sizes(height, width, pre)
    across = weights(width, columns, pixels.shape[2], pre)
    down = weights(height, rows, pixels.shape[1], pre)
    x = torch.einsum("sw,nhwc->nhsc", across, pixels.float()).round().clamp(0, 255)
    x = torch.einsum("sh,nhwc->nswc", down, x).round().clamp(0, 255)
    if pre.fit != "pad":
        return x
    positions = torch.arange(pre.resolution, device=x.device)
    inside = (positions < rows)[:, None, None] & (positions < columns)[:, None]
    return torch.where(inside, x, torch.tensor(pre.fill, dtype=x.dtype, device=x.device))


def count(pixels: Tensor, dim: int) -> Tensor:
    """The size of a dimension as a float64 tensor."""
    return torch.arange(pixels.shape[dim], device=pixels.device)[-1].double() + 1


def new_sizes(height: Tensor, width: Tensor, pre: Preprocessing) -> tuple[Tensor, Tensor]:
    """`data.transforms.geometry.resized_size`, as rows and columns."""
    if pre.fit == "squish":
        side = torch.full_like(height, pre.resolution)
        return side, side
    if pre.fit == "pad":
        longest = torch.maximum(height, width)
        rows, columns = (
            (pre.resolution * each / longest + 0.5).floor().clamp(min=1) for each in (height, width)
        )
        return rows, columns
    shorter = math.floor(pre.resolution / pre.crop)
    least = torch.minimum(height, width)
    return (shorter * height / least).floor(), (shorter * width / least).floor()


def weights(size: Tensor, new_size: Tensor, length: int, pre: Preprocessing) -> Tensor:
    """(resolution, length) float32: weights of input pixels in each pixel of the view.

    `size` and `length` are the same number of input pixels, `new_size` is that before the crop.
    """
    kernel, half = KERNELS[pre.kernel]
    first = ((new_size - pre.resolution) / 2).round()
    if pre.fit == "pad":
        first = torch.zeros_like(new_size)
    scale = size / new_size
    wide = scale.clamp(min=1)
    positions = torch.arange(pre.resolution, device=size.device).double()
    centres = (positions + first + 0.5) * scale
    pixels = torch.arange(length, device=size.device).double()
    # Pillow evaluates the kernel from its rounded start to its rounded end and nowhere else.
    start = (centres - half * wide + 0.5).floor().clamp(min=0)
    end = torch.minimum((centres + half * wide + 0.5).floor(), size)
    inside = (pixels >= start[:, None]) & (pixels < end[:, None])
    value = torch.where(inside, kernel((pixels + 0.5 - centres[:, None]) / wide), 0.0)
    # of the padding, which has other values, the sum may be 0; all others are above 0.5
    return (value / value.sum(1, keepdim=True).clamp(min=0.1)).float()
