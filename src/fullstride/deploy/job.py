"""Builds the module to export: the folded network with preprocessing and softmax."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullstride.data.transforms.crop import to_input
from fullstride.deploy.exported import Metadata
from fullstride.deploy.settings import Backend
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import task_of


def bilinear(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def bicubic(x: Tensor) -> Tensor:
    x, a = x.abs(), -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), torch.zeros_like(x))


# Kernels with half their width.
KERNELS = {"bilinear": (bilinear, 1), "bicubic": (bicubic, 2), "lanczos": (lanczos, 3)}


def resize_and_crop(pixels: Tensor, pre: Preprocessing) -> Tensor:
    """uint8 (N, H, W, C) -> float32 (N, resolution, resolution, C) with integers from 0 to 255.

    The result equals `data.transforms.crop.test_view`, except for a few values off by one level of
    brightness. Only tensor operations are used, even for sizes, so that an exported graph works for
    all sizes. Values are rounded after each of the two passes, and rows come first, as in Pillow up
    to version 12; later versions start with the columns if that is less work, which is visible at
    hard edges of tall pictures that are squished to a square.
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
    """`data.transforms.crop.resized_size`, as rows and columns."""
    if pre.fit == "squish":
        side = torch.full_like(height, pre.resolution)
        return side, side
    if pre.fit == "pad":
        longest = torch.maximum(height, width)
        rows, columns = (pre.resolution * each / longest + 0.5 for each in (height, width))
        return rows.floor().clamp(min=1), columns.floor().clamp(min=1)
    shorter = math.floor(pre.resolution / pre.crop)
    least = torch.minimum(height, width)
    return (shorter * height / least).floor(), (shorter * width / least).floor()


def weights(size: Tensor, new_size: Tensor, length: int, pre: Preprocessing) -> Tensor:
    """The weights of input pixels in each pixel of the view: float32 (resolution, length).

    `size` and `length` are the same number of input pixels, `new_size` is the size before the crop.
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
    # Pillow evaluates the kernel only from its rounded start to its rounded end.
    start = (centres - half * wide + 0.5).floor().clamp(min=0)
    end = torch.minimum((centres + half * wide + 0.5).floor(), size)
    inside = (pixels >= start[:, None]) & (pixels < end[:, None])
    value = torch.where(inside, kernel((pixels + 0.5 - centres[:, None]) / wide), 0.0)
    # the sum may be 0 in the padding, which is filled later; elsewhere it is above 0.5
    return (value / value.sum(1, keepdim=True).clamp(min=0.1)).float()


STRIDE = 32  # pixels: a side of an image of any size is a multiple, at least twice this
# Sides of the images to trace a file for any size with. Maps of stride 128 then have several
# pixels; traced with one pixel, a graph has that size as a constant.
TRACED_SIDES = (5 * STRIDE, 9 * STRIDE)
MAX_SIDE = 16_384  # pixels a side of a picture that a file resizes


@dataclass(frozen=True)
class ExportJob:
    """The input of a format's writer."""

    # float32, in evaluation mode, batch norms folded: normalised images (N, C, H, W), or clips
    # (N, C, T, H, W) -> (N, K) logits
    net: nn.Module
    metadata: Metadata
    example: np.ndarray  # real inputs, which give the file's shapes except for the batch
    any_size: bool = False  # whether sides may be other multiples of STRIDE
    backend: Backend = "onnx"  # for triton-server
    calibration: Sequence[np.ndarray] = ()  # for int8: batches of real inputs
    per_channel: bool = True  # whether int8 weights in ONNX have a scale per output channel
    # Batch size to trace an ONNX graph with, see `onnx.with_any_batch`; None: a dynamic batch,
    # which suits all networks and takes up to twice the time.
    traced_batch: int | None = None
    # ONNX graphs of `net` by type, `any_size` and, in int8, the layers in float, for several files
    graphs: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False)
    progress: Callable[[str], None] = lambda line: None  # called with a writer's messages

    @property
    def dynamic_sides(self) -> tuple[int, ...]:
        """The dimensions of an image, height and width, whose size may differ from `example`."""
        if not self.any_size and self.metadata.input_kind != "pictures":
            return ()
        width = self.example.ndim - 2 if self.normalised else self.example.ndim - 3
        return (width - 1, width)

    @property
    def normalised(self) -> bool:
        return self.metadata.input_kind == "normalised"

    @property
    def output_name(self) -> str:
        """The name of the outputs in the file."""
        raw, activated = task_of(self.metadata).output_names
        return raw if self.normalised else activated

    def module(
        self, dtype: torch.dtype = torch.float32, *, channels_first: bool = False
    ) -> "ExportWrapper":
        """Build the module to export, which computes in `dtype`."""
        net = copy.deepcopy(self.net).to(self.metadata.device, dtype)
        return ExportWrapper(net, self.metadata, dtype, channels_first).eval()

    def program(
        self,
        dtype: torch.dtype = torch.float32,
        batch: int | None = None,
        *,
        channels_first: bool = False,
    ) -> torch.export.ExportedProgram:
        """The graph of `module` for batches of `batch` images; None: a dynamic batch."""
        # torch.export would treat a batch of 1 as a constant. A fresh array has plain strides.
        shape = list(self.example.shape[1:])
        if self.any_size:
            for dim, side in zip(self.dynamic_sides, TRACED_SIDES, strict=True):
                shape[dim] = side
        images = np.resize(self.example, (batch or 2, *shape))
        sizes: dict[int, Any] = {} if batch else {0: torch.export.Dim("batch")}
        for dim, name in zip(self.dynamic_sides, ("height", "width"), strict=False):
            if self.metadata.input_kind == "pictures":
                sizes[dim + 1] = torch.export.Dim(name, max=MAX_SIDE)
            else:
                sizes[dim + 1] = STRIDE * torch.export.Dim(name, min=2, max=MAX_SIDE // STRIDE)
        with torch.no_grad():
            example = torch.from_numpy(images).to(self.metadata.device)
            module = self.module(dtype, channels_first=channels_first)
            return torch.export.export(module, (example,), dynamic_shapes=(sizes,))


class ExportWrapper(nn.Module):
    """A network with the preprocessing and activation that `Metadata.input_kind` asks for.

    `channels_first` sets the memory order of the network's input; otherwise it follows the pixels.
    """

    def __init__(
        self, net: nn.Module, metadata: Metadata, dtype: torch.dtype, channels_first: bool = False
    ):
        super().__init__()
        self.channels_first = channels_first
        self.net, self.pre, self.dtype = net, metadata.preprocessing, dtype
        self.input_kind = metadata.input_kind
        self.task = task_of(metadata)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        if self.input_kind == "pictures":
            x = resize_and_crop(x, self.pre)
        if self.input_kind != "normalised":
            x = to_input(x, self.pre)
        x = x.to(self.dtype)
        outputs = self.net(x.contiguous() if self.channels_first else x).float()
        return outputs if self.input_kind == "normalised" else self.task.activate(outputs)
