"""How is a picture resized inside a file as Pillow resizes it outside? By two products with matrices of weights."""

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


KERNELS = {
    "bilinear": (bilinear, 1),
    "bicubic": (bicubic, 2),
    "lanczos": (lanczos, 3),
}  # and half their widths


def test_views(pixels: Tensor, pre: Preprocessing) -> Tensor:
    """uint8 (N, H, W, C) of any one size -> float32 (N, resolution, resolution, C) with whole values from 0 to 255.

    What `data.views.augment.test_view` sees of each picture, but for a level of brightness here and there. Written
    with tensors only, also for the sizes, so that a graph of it holds for all of them. Pillow rounds after each of its
    two passes, and so does this. Rows come first, as in Pillow up to 12; later ones start with the columns where that
    is less work, which shows at hard edges of tall pictures that are bent to a square.
    """
    height, width = count(pixels, 1), count(pixels, 2)
    rows, columns = new_sizes(height, width, pre)
    x = pixels.float()
    x = (
        torch.einsum("sw,nhwc->nhsc", weights(width, columns, pixels.shape[2], pre), x)
        .round()
        .clamp(0, 255)
    )
    return (
        torch.einsum("sh,nhwc->nswc", weights(height, rows, pixels.shape[1], pre), x)
        .round()
        .clamp(0, 255)
    )


test_views.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]  # its name makes pytest take it for a test


def count(pixels: Tensor, dim: int) -> Tensor:
    """The size of a dimension as a float64 tensor."""
    return torch.arange(pixels.shape[dim], device=pixels.device)[-1].double() + 1


def new_sizes(height: Tensor, width: Tensor, pre: Preprocessing) -> tuple[Tensor, Tensor]:
    """Rows and columns of the whole picture after resizing, before the middle is cut out."""
    if pre.fit == "squish":
        side = torch.full_like(height, pre.resolution)
        return side, side
    shorter = math.floor(pre.resolution / pre.crop)
    least = torch.minimum(height, width)
    return (shorter * height / least).floor(), (shorter * width / least).floor()


def weights(size: Tensor, new_size: Tensor, length: int, pre: Preprocessing) -> Tensor:
    """(resolution, length) float32: what each pixel of the middle takes of each pixel of a side of `size`, `length`."""
    kernel, half = KERNELS[pre.kernel]
    first = ((new_size - pre.resolution) / 2).round()
    scale = size / new_size
    wide = scale.clamp(min=1)
    positions = torch.arange(pre.resolution, device=size.device).double()
    centres = (positions + first + 0.5) * scale
    pixels = torch.arange(length, device=size.device).double()
    # Pillow looks from the rounded start of the kernel to its rounded end and nowhere else.
    start = (centres - half * wide + 0.5).floor().clamp(min=0)
    end = torch.minimum((centres + half * wide + 0.5).floor(), size)
    seen = (pixels >= start[:, None]) & (pixels < end[:, None])
    value = torch.where(seen, kernel((pixels + 0.5 - centres[:, None]) / wide), 0.0)
    return (value / value.sum(1, keepdim=True)).float()
