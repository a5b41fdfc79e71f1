"""What are the networks made of? Convolution with batch norm, squeeze-and-excitation, ways to shrink a map.

Letters of the shapes, here and in every docstring: N images, C channels, H x W pixels, K classes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.nets.fused import batch_norm

Save = Literal["both", "input", "output"]


class Lean(NamedTuple):
    """How a layer trains by the operators of `abn`."""

    save: Save  # what its batch norm keeps for the gradient
    group: str = ""  # processes that take their batch statistics together
    int8: bool = False  # whether the end of a block keeps codes of what only its norms need


def activation(slope: float | None) -> nn.Module:
    """ReLU for slope 0, leaky ReLU for a slope above 0, nothing for None."""
    if slope is None:
        return nn.Identity()
    return nn.LeakyReLU(slope, inplace=True) if slope else nn.ReLU(inplace=True)


class ConvNorm(nn.Module):
    """Convolution without bias, batch norm, activation: (N, C_in, H, W) -> (N, C_out, H/stride, W/stride).

    With `blur`, the convolution keeps the size and a blur after the activation halves it: the
    anti-aliased downsampling of TResNet (arXiv:2003.13630), after arXiv:1904.11486.
    """

    lean: Lean | None = None  # None: train by PyTorch's modules

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        slope: float | None = None,
        blur: bool = False,
    ):
        super().__init__()
        conv_stride = 1 if blur else stride
        self.conv = nn.Conv2d(
            c_in, c_out, kernel, conv_stride, kernel // 2, groups=groups, bias=False
        )
        self.norm = nn.BatchNorm2d(c_out)
        self.act = activation(slope)
        self.slope = slope
        self.blur = BlurPool(c_out) if blur and stride == 2 else nn.Identity()

    def forward(self, x: Tensor, se: "SqueezeExcite | None" = None) -> Tensor:
        """`se` scales what comes out."""
        return self.finish(self.conv(x), se)

    def finish(self, x: Tensor, se: "SqueezeExcite | None" = None) -> Tensor:
        """What follows the convolution."""
        how = self.learns_lean()
        if how is None:
            y = self.blur(self.act(self.norm(x)))
        elif isinstance(self.blur, BlurPool):
            y, means = batch_norm.abn_blur(x, self.norm, self.slope, group=how.group)
            return y if se is None else se(y, means)
        elif se is not None and self.slope and how.save == "output":
            return batch_norm.abn_se(x, self.norm, se.weights, self.slope, group=how.group)
        else:
            y = batch_norm.abn(x, self.norm, self.slope, save=how.save, group=how.group)
        return y if se is None else se(y)

    def learns_lean(self) -> Lean | None:
        """`lean`, if the batch norm takes its statistics from the batch: it may be frozen while others train."""
        return self.lean if self.norm.training else None


def chain(x: Tensor, layers: Sequence[tuple[ConvNorm, "SqueezeExcite | None"]]) -> Tensor:
    """Each layer with its gate in turn, up to what follows the last convolution, which is the caller's to `finish`.

    Between two lean layers, the second one's convolution makes its input again rather than keep it, unless the
    first one's norm keeps its result alone.
    """
    x = layers[0][0].conv(x)
    for (layer, se), (behind, _) in pairwise(layers):
        how = layer.learns_lean()
        if how and how.save != "output" and se is None and not isinstance(layer.blur, BlurPool):
            x = batch_norm.abn_conv(x, layer.norm, layer.slope, behind.conv, group=how.group)
        else:
            x = behind.conv(layer.finish(x, se))
    return x


class SqueezeExcite(nn.Module):
    """Scale each channel by a gate that sees the mean of all channels: (N, C, H, W) -> (N, C, H, W).

    Costs almost no arithmetic but reads the map twice, so on a GPU it belongs where maps are small.
    Source: arXiv:1709.01507; with biases, as in the code of TResNet and ResNet-RS.
    """

    def __init__(self, channels: int, reduced: int):
        super().__init__()
        self.reduce = nn.Conv2d(channels, reduced, 1)
        self.act = nn.ReLU(inplace=True)
        self.expand = nn.Conv2d(reduced, channels, 1)

    def forward(self, x: Tensor, means: Tensor | None = None) -> Tensor:
        """`means`: of x over its pixels, (N, C), where they are known."""
        seen = x.mean((2, 3), keepdim=True) if means is None else means[..., None, None].to(x.dtype)
        gate = self.expand(self.act(self.reduce(seen)))
        return x * gate.sigmoid()

    @property
    def weights(self) -> tuple[Tensor, ...]:
        assert self.reduce.bias is not None
        assert self.expand.bias is not None
        return self.reduce.weight, self.reduce.bias, self.expand.weight, self.expand.bias


class BlurPool(nn.Module):
    """Blur by the binomial filter [1 2 1] / 4 each way, keep every second pixel: (N, C, H, W) -> (N, C, H/2, W/2).

    Odd sides round up. The border is reflected; a side of one pixel has nothing to reflect and is repeated.
    Source: arXiv:1904.11486 with the filter and padding of TResNet's code.
    """

    filter: Tensor

    def __init__(self, channels: int):
        super().__init__()
        line = torch.tensor([1.0, 2.0, 1.0]) / 4
        # Not saved: it is a constant, and the released weights do not hold it.
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
    """Fold each 4 x 4 patch of pixels into channels: (N, C, H, W) -> (N, 16C, H/4, W/4).

    A stem that keeps every pixel and starts the network at a quarter of the resolution, where
    convolutions use the GPU well. Sides that do not divide by 4 are padded with zeros at the
    bottom and the right.

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


def average_pool(stride: int) -> nn.Module:
    """The 2 x 2 average before a projection; odd sides round up and the pixels outside do not count.

    Source: ResNet-D, arXiv:1812.01187, in the form that TResNet and ResNet-RS use.
    """
    return (
        nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False)
        if stride > 1
        else nn.Identity()
    )


def halves(layer: nn.Module) -> bool:
    """Whether it is an `average_pool` of stride 2."""
    if not isinstance(layer, nn.AvgPool2d):
        return False
    return (layer.kernel_size, layer.stride, layer.ceil_mode, layer.count_include_pad) == (
        2,
        2,
        True,
        False,
    )


class Head(nn.Module):
    """Optional 1 x 1 convolution, global average, linear classifier: (N, C, H, W) -> (N, K).

    `keep`, (N, channels of the average), scales what the classifier sees: dropout.
    """

    def __init__(self, c_in: int, width: int, classes: int):
        super().__init__()
        self.conv = ConvNorm(c_in, width, 1, slope=0.0) if width else nn.Identity()
        self.fc = nn.Linear(width or c_in, classes)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        return self.classify(self.embed(x), keep)

    def embed(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3))

    def classify(self, pooled: Tensor, keep: Tensor | None = None) -> Tensor:
        return self.fc(pooled if keep is None else pooled * keep)


def named(*parts: tuple[str, nn.Module]) -> nn.Sequential:
    """A sequence whose parts keep their names in parameter paths."""
    return nn.Sequential(OrderedDict(parts))
