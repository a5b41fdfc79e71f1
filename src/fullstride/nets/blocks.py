"""What stands between the maps? The stems that open a network and the residual blocks that fill its stages."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from torch import Tensor, nn

from fullstride.nets.fused import batch_norm
from fullstride.nets.layers import (
    ConvNorm,
    Lean,
    SpaceToDepth,
    SqueezeExcite,
    average_pool,
    chain,
    halves,
    named,
)
from fullstride.storage import Bounds, check_bounds


@dataclass(frozen=True, kw_only=True)
class Style:
    """What all blocks of one network have in common."""

    slope: float = 0.0  # of the activations inside a block for negative values; 0 is ReLU
    stem_slope: float = 0.0  # the same in the stem
    blur: bool = False  # halve by a blur after the convolution instead of by its stride
    average_shortcut: bool = (
        False  # halve the shortcut by a 2 x 2 average instead of by a strided 1 x 1
    )


@dataclass(frozen=True, kw_only=True)
class SE:
    """Where a block's squeeze-and-excitation stands and how narrow it is."""

    # after the k x k convolution of a bottleneck, or at the end of the branch
    at: Literal["inner", "out"]
    ratio: Annotated[float, Bounds(gt=0, le=64)]  # reduced channels / gated channels
    least: Annotated[int, Bounds(ge=1, le=65_536)] = 1  # reduced channels are never fewer

    def __post_init__(self) -> None:
        check_bounds(self, "SE ")

    def build(self, channels: int) -> SqueezeExcite:
        return SqueezeExcite(channels, max(int(channels * self.ratio), self.least))


class Block(nn.Module):
    """y = relu(shortcut(x) + branch(x)): (N, C_in, H, W) -> (N, C_out, H/stride, W/stride).

    The shortcut is the input itself, or a 1 x 1 convolution where the shape changes. `keep`, (N, 1, 1, 1),
    scales the branch of each image: stochastic depth (arXiv:1603.09382).
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        *,
        inner: int,
        kernel: int,
        stride: int,
        groups: int,
        se: SE | None,
        style: Style,
    ):
        super().__init__()
        self.shortcut = shortcut(c_in, c_out, stride, style)
        self.branch = named(*self.parts(c_in, c_out, inner, kernel, stride, groups, se, style))
        self.act = nn.ReLU(inplace=True)

    def parts(
        self, c_in, c_out, inner, kernel, stride, groups, se, style
    ) -> list[tuple[str, nn.Module]]:
        """The layers of the branch by name, in order. `inner`: channels between its convolutions."""
        raise NotImplementedError

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        how = self.learns_lean()
        if how is not None:
            return self.joined(x, keep, how)
        branch = self.branch(x) if keep is None else self.branch(x) * keep
        return self.act(branch.add_(self.shortcut(x)))

    def learns_lean(self) -> Lean | None:
        """How the norms at its end do, if all of them do and nothing stands there that could not be joined."""
        layers = [layer for layer in self.branch.children() if not isinstance(layer, SqueezeExcite)]
        ends = [layers[-1], *list(self.shortcut.children())[-1:]]
        convs = [layer for layer in ends if isinstance(layer, ConvNorm)]
        joinable = len(convs) == len(ends) and all(isinstance(layer, ConvNorm) for layer in layers)
        if (
            not joinable
            or convs[0].slope is not None
            or not all(conv.learns_lean() for conv in convs)
        ):
            return None
        return convs[0].learns_lean()

    def joined(self, x: Tensor, keep: Tensor | None, how: Lean) -> Tensor:
        """`forward`, where what follows the last convolution, and the one of the shortcut, is a single operator."""
        parts = list(self.branch.children())
        gates = [part if isinstance(part, SqueezeExcite) else None for part in (*parts[1:], None)]
        layers = [
            (part, se) for part, se in zip(parts, gates, strict=True) if isinstance(part, ConvNorm)
        ]
        last, se = layers[-1]
        weights, save = se.weights if se else (), "input" if how.save == "input" else "both"
        other, norm = x, None
        for pool, layer in pairwise((nn.Identity(), *self.shortcut.children())):
            if isinstance(layer, ConvNorm):
                other, norm = (
                    batch_norm.pool_conv(x, layer.conv) if halves(pool) else layer.conv(other),
                    layer.norm,
                )
            else:
                other = layer(other)
        x = chain(x, layers)
        return batch_norm.tail(
            x,
            last.norm,
            other,
            norm,
            se=weights,
            keep=keep,
            save=save,
            group=how.group,
            int8=how.int8,
        )


def shortcut(c_in: int, c_out: int, stride: int, style: Style) -> nn.Module:
    if stride == 1 and c_in == c_out:
        return nn.Identity()
    if style.average_shortcut:
        return named(("pool", average_pool(stride)), ("project", ConvNorm(c_in, c_out, 1)))
    return named(("project", ConvNorm(c_in, c_out, 1, stride=stride)))


class Basic(Block):
    """k x k -> k x k: dense and wide, for the early stages. GENet's XX block when without SE."""

    def parts(self, c_in, c_out, inner, kernel, stride, groups, se, style):
        parts: list[tuple[str, nn.Module]] = [
            (
                "conv1",
                ConvNorm(
                    c_in,
                    inner,
                    kernel,
                    stride=stride,
                    groups=groups,
                    slope=style.slope,
                    blur=style.blur,
                ),
            ),
            ("conv2", ConvNorm(inner, c_out, kernel, groups=groups)),
        ]
        if se:
            parts.append(("se", se.build(c_out)))
        return parts


class Bottleneck(Block):
    """1 x 1 -> k x k -> 1 x 1. Narrow inside: classic (BL in GENet). Wide inside and depthwise: inverted (DW)."""

    def parts(self, c_in, c_out, inner, kernel, stride, groups, se, style):
        parts: list[tuple[str, nn.Module]] = [
            ("conv1", ConvNorm(c_in, inner, 1, slope=style.slope)),
            (
                "conv2",
                ConvNorm(
                    inner,
                    inner,
                    kernel,
                    stride=stride,
                    groups=groups,
                    slope=style.slope,
                    blur=style.blur,
                ),
            ),
            ("conv3", ConvNorm(inner, c_out, 1)),
        ]
        if se and se.at == "inner":
            parts.insert(2, ("se", se.build(inner)))
        elif se:
            parts.append(("se", se.build(c_out)))
        return parts


class Stem(nn.Module):
    """The opening of a network: (N, in_channels, H, W) -> (N, width, H/stride, W/stride)."""

    stride: int

    def __init__(self, in_channels: int, width: int, style: Style):
        super().__init__()


class ConvStem(Stem):
    """One 3 x 3 convolution of stride 2. Source: GENet, arXiv:2006.14090."""

    stride = 2

    def __init__(self, in_channels: int, width: int, style: Style):
        super().__init__(in_channels, width, style)
        self.conv = ConvNorm(in_channels, width, 3, stride=2, slope=style.stem_slope)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class PoolStem(Stem):
    """7 x 7 convolution of stride 2 and a max-pool of stride 2. Source: ResNet, arXiv:1512.03385."""

    stride = 4

    def __init__(self, in_channels: int, width: int, style: Style):
        super().__init__(in_channels, width, style)
        self.conv = ConvNorm(in_channels, width, 7, stride=2, slope=style.stem_slope)
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(x))


class DeepStem(Stem):
    """Three 3 x 3 convolutions instead of one 7 x 7, then a max-pool. Source: ResNet-D, arXiv:1812.01187."""

    stride = 4

    def __init__(self, in_channels: int, width: int, style: Style):
        super().__init__(in_channels, width, style)
        half, slope = max(width // 2, 1), style.stem_slope
        self.conv1 = ConvNorm(in_channels, half, 3, stride=2, slope=slope)
        self.conv2 = ConvNorm(half, half, 3, slope=slope)
        self.conv3 = ConvNorm(half, width, 3, slope=slope)
        self.pool = self.halve(width, slope)

    def halve(self, width: int, slope: float) -> nn.Module:
        return nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.conv1.learns_lean() is None:
            return self.pool(self.conv3(self.conv2(self.conv1(x))))
        layers = [self.conv1, self.conv2, self.conv3]
        if isinstance(self.pool, ConvNorm):
            layers.append(self.pool)
        x = layers[-1].finish(chain(x, [(layer, None) for layer in layers]))
        return x if self.pool is layers[-1] else self.pool(x)


class DeepConvStem(DeepStem):
    """The deep stem with a fourth convolution, of stride 2, in the max-pool's place.

    Source: ResNet-RS, arXiv:2103.07579, as in its code (`replace_stem_max_pool`): the text of
    section 4.1 moves the stride into the first bottleneck, the code and the released weights do not.
    """

    def halve(self, width: int, slope: float) -> nn.Module:
        return ConvNorm(width, width, 3, stride=2, slope=slope)


class SpaceToDepthStem(Stem):
    """Fold 4 x 4 patches into channels, then one 3 x 3 convolution at a quarter of the resolution.

    Source: TResNet, arXiv:2003.13630; Table 2 prints a 1 x 1 convolution, the authors confirmed 3 x 3
    (Alibaba-MIIL/TResNet#22).
    """

    stride = SpaceToDepth.patch

    def __init__(self, in_channels: int, width: int, style: Style):
        super().__init__(in_channels, width, style)
        self.fold = SpaceToDepth()
        self.conv = ConvNorm(in_channels * self.stride**2, width, 3, slope=style.stem_slope)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.fold(x))
