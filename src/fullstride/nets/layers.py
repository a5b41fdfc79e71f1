"""Layers of the networks: convolution with batch norm, squeeze-and-excitation, downsampling.

Letters of the shapes, here and in every docstring: N images, C channels, H x W pixels, K classes,
and N clips of T frames. Layers for clips have the same paths and shapes as layers for images, with
T before H and W.
"""

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def activation(slope: float | None) -> nn.Module:
    """ReLU for slope 0, leaky ReLU for a slope above 0, nothing for None."""
    if slope is None:
        return nn.Identity()
    return nn.LeakyReLU(slope, inplace=True) if slope else nn.ReLU(inplace=True)


class ConvNorm(nn.Module):
    """Convolution without bias, batch norm, activation.

    (N, C_in, H, W) -> (N, C_out, H/stride, W/stride). With `blur`, the convolution has stride 1 and
    a `BlurPool` after the activation does the downsampling: TResNet's anti-aliasing
    (arXiv:2003.13630), after arXiv:1904.11486.

    With `time_kernel`, the frames in a kernel, it takes clips:
    (N, C_in, T, H, W) -> (N, C_out, T/time_stride, H/stride, W/stride); `stride` may be
    (time_stride, stride).
    """

    # Conv3d and BatchNorm3d for clips
    conv: nn.Conv2d
    norm: nn.BatchNorm2d

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel: int,
        *,
        stride: int | tuple[int, int] = 1,
        groups: int = 1,
        slope: float | None = None,
        blur: bool = False,
        time_kernel: int = 0,
    ):
        super().__init__()
        time_stride, stride = stride if isinstance(stride, tuple) else (1, stride)
        step = 1 if blur else stride
        conv: Any = nn.Conv2d
        norm: Any = nn.BatchNorm2d
        kernels, strides = (kernel, kernel), (step, step)
        if time_kernel:
            conv, norm = nn.Conv3d, nn.BatchNorm3d
            kernels, strides = (time_kernel, *kernels), (time_stride, *strides)
        padding = tuple(size // 2 for size in kernels)
        self.conv = conv(c_in, c_out, kernels, strides, padding, groups=groups, bias=False)
        self.norm = norm(c_out)
        self.act = activation(slope)
        self.slope = slope
        self.blur = BlurPool(c_out) if blur and stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.blur(self.act(self.norm(self.conv(x))))


class SqueezeExcite(nn.Module):
    """Squeeze-and-excitation, a gate on each channel: (N, C, H, W) -> (N, C, H, W).

    The gate costs little arithmetic but reads the map twice, so on a GPU it suits small maps.
    Source: arXiv:1709.01507; with biases, as in the code of TResNet and ResNet-RS.
    """

    def __init__(self, channels: int, reduced: int, *, clips: bool = False):
        super().__init__()
        conv = nn.Conv3d if clips else nn.Conv2d
        self.reduce = conv(channels, reduced, 1)
        self.act = nn.ReLU(inplace=True)
        self.expand = conv(reduced, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean(pixel_dims(x), keepdim=True))

    def gate(self, means: Tensor) -> Tensor:
        """The factor of each channel, from the means over the pixels: both (N, C, 1, 1)."""
        return self.expand(self.act(self.reduce(means))).sigmoid()


class SelfGate(nn.Module):
    """A gate on each channel, without a narrower layer: (N, C, T, H, W) -> (N, C, T, H, W).

    Source: arXiv:1712.04851, as in the code of the 3D ResNets of arXiv:2008.03800.
    """

    def __init__(self, channels: int, *, clips: bool):
        super().__init__()
        self.expand = (nn.Conv3d if clips else nn.Conv2d)(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(x.mean(pixel_dims(x), keepdim=True)).sigmoid()


class BlurPool(nn.Module):
    """Anti-aliased downsampling by 2: (N, C, H, W) -> (N, C, H/2, W/2), rounded up.

    The filter is [1 2 1] / 4 in each direction. Padding is by reflection, and by replication where
    a side has one pixel.
    Source: arXiv:1904.11486 with the filter and padding of TResNet's code.
    """

    filter: Tensor

    def __init__(self, channels: int):
        super().__init__()
        line = torch.tensor([1.0, 2.0, 1.0]) / 4
        # A constant, which the released weights lack: not in the state dict.
        self.register_buffer(
            "filter", torch.outer(line, line).expand(channels, 1, 3, 3).clone(), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.padded(x), self.filter, stride=2, groups=x.shape[1])

    def padded(self, x: Tensor) -> Tensor:
        if min(x.shape[2:]) == 1:
            return F.pad(x, (1, 1, 1, 1), "replicate")
        if not torch.are_deterministic_algorithms_enabled():
            return F.pad(x, (1, 1, 1, 1), "reflect")
        # The gradient of PyTorch's own reflection is not reproducible on a GPU.
        x = torch.cat([x[:, :, 1:2], x, x[:, :, -2:-1]], 2)
        return torch.cat([x[..., 1:2], x, x[..., -2:-1]], 3)


class SpaceToDepth(nn.Module):
    """Move each 4 x 4 patch of pixels into channels: (N, C, H, W) -> (N, 16C, H/4, W/4).

    The network starts at a quarter of the resolution, where convolutions use the GPU well, and no
    pixel is lost. Sides that do not divide by 4 are padded with zeros at the bottom and the right.

    Source: TResNet, arXiv:2003.13630. Channels are ordered (row, column, C), as in the released
    weights; `F.pixel_unshuffle` orders them (C, row, column).
    """

    patch = 4

    def forward(self, x: Tensor) -> Tensor:
        p = self.patch
        n, c, h, w = x.shape
        if h % p or w % p:
            x = F.pad(x, (0, -w % p, 0, -h % p))
            h, w = x.shape[2:]
        x = x.view(n, c, h // p, p, w // p, p)
        return x.permute(0, 3, 5, 1, 2, 4).reshape(n, c * p * p, h // p, w // p)


def average_pool(stride: int, *, clips: bool = False) -> nn.Module:
    """The 2 x 2 average before a projection: odd sides round up, padding is not counted.

    Frames of clips are pooled separately.
    Source: ResNet-D, arXiv:1812.01187, in the form that TResNet and ResNet-RS use.
    """
    if stride == 1:
        return nn.Identity()
    if clips:
        return nn.AvgPool3d((1, 2, 2), (1, stride, stride), ceil_mode=True, count_include_pad=False)
    return nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False)


def max_pool(*, clips: bool) -> nn.Module:
    """A stem's 3 x 3 maximum of stride 2. Frames of clips are pooled separately."""
    return nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)) if clips else nn.MaxPool2d(3, 2, 1)


def pixel_dims(x: Tensor) -> tuple[int, ...]:
    """The dimensions after N and C: H and W, or T, H and W."""
    return (2, 3) if x.ndim == 4 else (2, 3, 4)


class Head(nn.Module):
    """Optional 1 x 1 convolution, global average, linear classifier: (N, C, H, W) -> (N, K).

    `mask`, (N, channels of the average), scales the classifier's input: dropout.
    """

    def __init__(self, c_in: int, width: int, classes: int, *, clips: bool = False):
        super().__init__()
        self.conv = (
            ConvNorm(c_in, width, 1, slope=0.0, time_kernel=int(clips)) if width else nn.Identity()
        )
        self.fc = nn.Linear(width or c_in, classes)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.classify(self.embed(x), mask)

    def embed(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x.mean(pixel_dims(x))

    def classify(self, pooled: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.fc(pooled if mask is None else pooled * mask)


def named(*parts: tuple[str, nn.Module]) -> nn.Sequential:
    """A sequence whose layers have names in parameter paths."""
    return nn.Sequential(OrderedDict(parts))


# Input channels in a block of oneDNN's kernels with AVX-512; 8 with AVX2.
ONEDNN_BLOCK = 16


class SubsampledConv2d(nn.Conv2d):
    """A 1 x 1 convolution with a stride, computed without a stride on every `stride`-th pixel.

    (N, C_in, H, W) -> (N, C_out, H/stride, W/stride), the same function as `nn.Conv2d`.
    """

    def forward(self, input: Tensor) -> Tensor:
        rows, columns = self.stride
        x = input[:, :, ::rows, ::columns]
        return F.conv2d(x, self.weight, self.bias, groups=self.groups)


def avoid_strided_pointwise(net: nn.Module) -> None:
    """Let the 1 x 1 convolutions of `net` that have a stride and few channels train on a CPU.

    In place, with the same weights. With channels-last maps, oneDNN's gradient of such a weight
    writes beyond its memory if there are fewer input channels than `ONEDNN_BLOCK`
    (github.com/uxlfoundation/oneDNN/issues/6035): GENet-light, whose stem has 13 channels, ends
    with a segmentation fault from 160 pixels on.
    """
    for module in net.modules():
        if (
            type(module) is nn.Conv2d
            and module.kernel_size == (1, 1)
            and module.stride != (1, 1)
            and module.padding == (0, 0)
            and module.in_channels // module.groups < ONEDNN_BLOCK
        ):
            module.__class__ = SubsampledConv2d
