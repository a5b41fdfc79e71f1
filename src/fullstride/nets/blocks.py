"""Holds the stems of the networks, the residual blocks, and the initialisation of weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from fullstride.io.records import Bounds, check_bounds
from fullstride.nets.layers import (
    ConvNorm,
    SelfGate,
    SpaceToDepth,
    SqueezeExcite,
    average_pool,
    max_pool,
    named,
)


@dataclass(frozen=True, kw_only=True)
class Style:
    """The options that all blocks of one network share."""

    slope: float = 0.0  # negative slope of the activations inside a block; 0 is ReLU
    stem_slope: float = 0.0  # negative slope in the stem
    blur: bool = False  # downsample by a `BlurPool` after the convolution, not by its stride
    average_shortcut: bool = False  # downsample the shortcut by an average pool, not by a stride
    # Frames in the stem's first convolution; 0: images. For a block, its stage's `time_kernel`.
    time_kernel: Annotated[int, Bounds(ge=0, le=255)] = 0
    time_stride: Annotated[int, Bounds(ge=1, le=2)] = 1  # of the stem's first convolution
    self_gate: bool = False  # a `SelfGate` in the last block of each stage

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def clips(self) -> bool:
        return self.time_kernel > 0

    @property
    def within_frame(self) -> int:
        """The time kernel of convolutions within one frame: 1 for clips, 0 for images."""
        return int(self.clips)


@dataclass(frozen=True, kw_only=True)
class SE:
    """The position and the width of a block's squeeze-and-excitation."""

    # "inner": after the k x k convolution of a bottleneck; "out": at the end of the branch
    at: Literal["inner", "out"]
    ratio: Annotated[float, Bounds(gt=0, le=64)]  # reduced channels / gated channels
    least: Annotated[int, Bounds(ge=1, le=65_536)] = 1  # minimum of the reduced channels

    def __post_init__(self) -> None:
        check_bounds(self, "SE ")

    def build(self, channels: int, *, clips: bool = False) -> SqueezeExcite:
        return SqueezeExcite(channels, max(int(channels * self.ratio), self.least), clips=clips)


class Block(nn.Module):
    """y = relu(shortcut(x) + branch(x)): (N, C_in, H, W) -> (N, C_out, H/stride, W/stride).

    The shortcut is the identity, or a 1 x 1 convolution where the shape changes. `mask`,
    (N, 1, 1, 1), scales the branch of each image: stochastic depth (arXiv:1603.09382).

    In networks of clips, the kernel of the first convolution has `style.time_kernel` frames, all
    other kernels have one, and the number of frames stays.
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
        """The layers of the branch: (name, module), in order. `inner`: channels inside it."""
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        branch = self.branch(x)
        if mask is not None:
            branch.mul_(mask)  # in place, so that a map of 16 bits is not promoted to the mask's 32
        return self.act(branch.add_(self.shortcut(x)))


def shortcut(c_in: int, c_out: int, stride: int, style: Style) -> nn.Module:
    if stride == 1 and c_in == c_out:
        return nn.Identity()
    pooled = style.average_shortcut
    project = ConvNorm(
        c_in, c_out, 1, stride=1 if pooled else stride, time_kernel=style.within_frame
    )
    if pooled:
        return named(("pool", average_pool(stride, clips=style.clips)), ("project", project))
    return named(("project", project))


class Basic(Block):
    """k x k -> k x k: dense and wide, for the early stages. GENet's XX block, if without SE."""

    def parts(self, c_in, c_out, inner, kernel, stride, groups, se, style):
        down = partial(ConvNorm, stride=stride, groups=groups, slope=style.slope, blur=style.blur)
        frame = style.within_frame
        parts: list[tuple[str, nn.Module]] = [
            ("conv1", down(c_in, inner, kernel, time_kernel=style.time_kernel)),
            ("conv2", ConvNorm(inner, c_out, kernel, groups=groups, time_kernel=frame)),
        ]
        if style.self_gate:
            parts.append(("self_gate", SelfGate(c_out, clips=style.clips)))
        if se:
            parts.append(("se", se.build(c_out, clips=style.clips)))
        return parts


class Bottleneck(Block):
    """1 x 1 -> k x k -> 1 x 1: classic if narrow inside (GENet's BL), inverted if wide (its DW)."""

    def parts(self, c_in, c_out, inner, kernel, stride, groups, se, style):
        down = partial(ConvNorm, stride=stride, groups=groups, slope=style.slope, blur=style.blur)
        frame = style.within_frame
        parts: list[tuple[str, nn.Module]] = [
            ("conv1", ConvNorm(c_in, inner, 1, slope=style.slope, time_kernel=style.time_kernel)),
            ("conv2", down(inner, inner, kernel, time_kernel=frame)),
            ("conv3", ConvNorm(inner, c_out, 1, time_kernel=frame)),
        ]
        if style.self_gate:
            parts.append(("self_gate", SelfGate(c_out, clips=style.clips)))
        if se and se.at == "inner":
            parts.insert(2, ("se", se.build(inner, clips=style.clips)))
        elif se:
            parts.append(("se", se.build(c_out, clips=style.clips)))
        return parts


class Stem(nn.Module):
    """The first layers of a network: (N, in_channels, H, W) -> (N, width, H/stride, W/stride).

    For clips, the first convolution has `style.time_kernel` frames and `style.time_stride`.
    """

    stride: int
    takes_clips: ClassVar[bool] = True

    def __init__(self, in_channels: int, width: int, style: Style):
        super().__init__()


def first_convolution(in_channels: int, width: int, kernel: int, style: Style) -> ConvNorm:
    """The first convolution of a stem, of stride 2 in H and W."""
    stride, frames = (style.time_stride, 2), style.time_kernel
    return ConvNorm(
        in_channels, width, kernel, stride=stride, slope=style.stem_slope, time_kernel=frames
    )


class ConvStem(Stem):
    """One 3 x 3 convolution of stride 2. Source: GENet, arXiv:2006.14090."""

    stride = 2

    def __init__(self, in_channels: int, width: int, style: Style):
        super().__init__(in_channels, width, style)
        self.conv = first_convolution(in_channels, width, 3, style)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class PoolStem(Stem):
    """A 7 x 7 convolution and a max-pool, of stride 2. Source: ResNet, arXiv:1512.03385."""

    stride = 4

    def __init__(self, in_channels: int, width: int, style: Style):
        super().__init__(in_channels, width, style)
        self.conv = first_convolution(in_channels, width, 7, style)
        self.pool = max_pool(clips=style.clips)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(x))


class DeepStem(Stem):
    """Three 3 x 3 convolutions and a max-pool. Source: ResNet-D, arXiv:1812.01187."""

    stride = 4

    def __init__(self, in_channels: int, width: int, style: Style):
        super().__init__(in_channels, width, style)
        half, slope = max(width // 2, 1), style.stem_slope
        self.conv1 = first_convolution(in_channels, half, 3, style)
        self.conv2 = ConvNorm(half, half, 3, slope=slope, time_kernel=style.within_frame)
        self.conv3 = ConvNorm(half, width, 3, slope=slope, time_kernel=style.within_frame)
        self.pool = self.downsample(width, style)

    def downsample(self, width: int, style: Style) -> nn.Module:
        return max_pool(clips=style.clips)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv3(self.conv2(self.conv1(x))))


class DeepConvStem(DeepStem):
    """The deep stem with a fourth convolution, of stride 2, in place of the max-pool.

    Source: ResNet-RS, arXiv:2103.07579, as in its code (`replace_stem_max_pool`). Section 4.1 moves
    the stride into the first bottleneck; the code and the released weights do not.
    """

    def downsample(self, width: int, style: Style) -> nn.Module:
        return ConvNorm(
            width, width, 3, stride=2, slope=style.stem_slope, time_kernel=style.within_frame
        )


class SpaceToDepthStem(Stem):
    """`SpaceToDepth`, then one 3 x 3 convolution at a quarter of the resolution.

    Source: TResNet, arXiv:2003.13630; Table 2 prints a 1 x 1 convolution, the authors confirmed
    3 x 3 (Alibaba-MIIL/TResNet#22).
    """

    stride = SpaceToDepth.patch
    takes_clips: ClassVar[bool] = False

    def __init__(self, in_channels: int, width: int, style: Style):
        super().__init__(in_channels, width, style)
        self.fold = SpaceToDepth()
        self.conv = ConvNorm(in_channels * self.stride**2, width, 3, slope=style.stem_slope)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.fold(x))


# ---- initialisation by the rule of each paper or its code

CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)


def init_resnet(net: nn.Module) -> None:
    """Convolutions N(0, 2 / fan_out), everything else by PyTorch's default.

    Source: arXiv:1502.01852, with fan_out as in the authors' and in torchvision's code.
    """
    for layer in net.modules():
        if isinstance(layer, CONVOLUTIONS):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def init_tresnet(net: nn.Module) -> None:
    """Convolutions N(0, 2 / fan_out), classifier N(0, 0.01^2), last gain of every block zero.

    Biases (of squeeze-and-excitation and of the classifier) have PyTorch's uniform default.
    Source: the code of TResNet, Alibaba-MIIL/TResNet@aea5f0f.
    """
    init_resnet(net)
    init_ends(net)


def init_resnet_rs(net: nn.Module) -> None:
    """Convolutions truncated normal with variance 1 / fan_in, classifier N(0, 0.01^2).

    Biases and the last gain of every block are zero.

    Source: the TPU code of ResNet-RS, tensorflow/tpu@7dc921f.
    """
    for layer in net.modules():
        if isinstance(layer, CONVOLUTIONS):
            fan_in = layer.weight[0].numel()
            # TensorFlow truncates at two standard deviations and corrects the variance for it.
            std = fan_in**-0.5 / 0.87962566103423978
            nn.init.trunc_normal_(layer.weight, 0, std, -2 * std, 2 * std)
    init_ends(net)
    zero_biases(net)


def init_genet(net: nn.Module) -> None:
    """Convolutions and classifier N(0, 3.26^2 * 2 / (fan_in + fan_out)), biases zero.

    The paper (arXiv:2006.14090) names MSRA-PReLU, for which its repository has no code; the number
    is from the same authors' ZenNAS, idstcv/ZenNAS@d1d617e. All gains are one.
    """
    for layer in net.modules():
        if isinstance(layer, (*CONVOLUTIONS, nn.Linear)):
            nn.init.xavier_normal_(layer.weight, gain=3.26033)
    zero_biases(net)


def init_ends(net: nn.Module) -> None:
    """Classifier N(0, 0.01^2), last gain of every branch zero: blocks start as their shortcuts."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
        elif isinstance(module, Block):
            norms = [m for m in module.branch.modules() if isinstance(m, NORMS)]
            nn.init.zeros_(norms[-1].weight)


def zero_biases(net: nn.Module) -> None:
    for layer in net.modules():
        if isinstance(layer, (*CONVOLUTIONS, nn.Linear)) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


# ---- the form for shipping, where branches that only training needs are merged

METHODS = ("fuse", "reparameterize", "switch_to_deploy")  # timm's modules merge branches by these


def has_branches(net: nn.Module) -> bool:
    """Whether one of timm's modules has another form for inference, as MobileOne's modules do."""
    return any(
        type(module).__module__.startswith("timm.") and any(hasattr(module, m) for m in METHODS)
        for module in net.modules()
    )


@torch.no_grad()
def merge_branches(net: nn.Module) -> nn.Module:
    """Put the network in evaluation mode and merge branches in place; it computes the same.

    Parallel convolutions with their batch norms become one (RepVGG, arXiv:2101.03697), as do
    averaged classifiers of a distillation. Networks that are not timm's stay as they are.
    """
    net.eval()
    if not has_branches(net):
        return net
    from timm.utils.model import reparameterize_model

    with creating_like(next(net.parameters())):
        return reparameterize_model(net, inplace=True)


@contextmanager
def creating_like(weight: torch.Tensor) -> Iterator[None]:
    """Make the device and type of `weight` the defaults, which timm's merged layers have."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(weight.dtype)
    try:
        with torch.device(weight.device):
            yield
    finally:
        torch.set_default_dtype(before)
