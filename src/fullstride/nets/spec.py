"""Describes networks as frozen data, `NetSpec` and `TimmSpec`, and as JSON."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from torch import nn

from fullstride.io import records
from fullstride.io.records import Bounds, Count, check_bounds, check_range
from fullstride.nets.blocks import (
    SE,
    Basic,
    Block,
    Bottleneck,
    ConvStem,
    DeepConvStem,
    DeepStem,
    PoolStem,
    SpaceToDepthStem,
    Stem,
    Style,
    init_genet,
    init_resnet,
    init_resnet_rs,
    init_tresnet,
)

# The names that JSON may use. Renaming a class changes nothing on disk; changing a key here does.
NAMED: dict[str, Any] = {
    "Basic": Basic,
    "Bottleneck": Bottleneck,
    "ConvStem": ConvStem,
    "PoolStem": PoolStem,
    "DeepStem": DeepStem,
    "DeepConvStem": DeepConvStem,
    "SpaceToDepthStem": SpaceToDepthStem,
    "init.tresnet": init_tresnet,
    "init.resnet_rs": init_resnet_rs,
    "init.genet": init_genet,
    "init.resnet": init_resnet,
}
NAMES = {part: name for name, part in NAMED.items()}

# Limits for files from elsewhere. Published networks have at most 4096 channels and 144 blocks.
MOST_CHANNELS, MOST_BLOCKS, MOST_FRAMES = 65_536, 1_024, 1_024


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A sequence of equal blocks; the first changes width and resolution.

    Examples:
        >>> import fullstride
        >>> first = fullstride.zoo.spec("resnet50").stages[0]
        >>> first.block.__name__, first.depth, first.width, first.inner
        ('Bottleneck', 3, 256, 64)
    """

    block: type[Block]  # such as Basic or Bottleneck
    depth: int  # blocks
    width: int  # channels out of every block
    stride: int = 1  # of the first block: 1, or 2 to halve the map
    ratio: float = 1.0  # channels inside a block / width
    kernel: Annotated[int, Bounds(le=255)] = 3  # side of the k x k convolutions, an odd number
    # channels per group of a k x k convolution; 0: all, 1: depthwise
    group_width: Count = 0
    se: SE | None = None  # squeeze-and-excitation
    # frames in the first convolution of a block; 0: the network takes images
    time_kernel: Annotated[int, Bounds(ge=0, le=255)] = 0

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, most in (("depth", MOST_BLOCKS), ("width", MOST_CHANNELS)):
            check_range(name, getattr(self, name), most)
        if self.stride not in (1, 2):
            raise ValueError(f"stride {self.stride} of a stage: use 1 or 2")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel {self.kernel} of a stage: use an odd number, as 3 or 5")
        check_time_kernel(self.time_kernel, "stage")
        what = f"inner channels of width {self.width} x ratio {self.ratio:g}:"
        check_range(what, self.inner, MOST_CHANNELS)
        if self.group_width and self.inner % self.group_width:
            fits = nearest_width(self.width, 1, self.ratio, self.group_width)
            use = f"width={fits}, or another" if fits != self.width else "another"
            raise ValueError(
                f"{self.inner} inner channels do not divide into groups of {self.group_width}: "
                f"set {use} group_width"
            )

    @property
    def inner(self) -> int:
        return round(self.width * self.ratio)

    @property
    def groups(self) -> int:
        return self.inner // self.group_width if self.group_width else 1


def nearest_width(wanted: float, step: int = 8, ratio: float = 1.0, group_width: int = 0) -> int:
    """The multiple of `step` nearest to `wanted` whose inner channels divide into groups.

    Halves are rounded up. The nearest of all multiples if none up to `MOST_CHANNELS` has such inner
    channels.
    """
    nearest = max(half_up(wanted / step) * step, step)
    if group_width < 2 or wanted > MOST_CHANNELS:
        return nearest
    fitting = (
        width
        for width in range(step, MOST_CHANNELS + 1, step)
        if 0 < (inner := round(width * ratio)) <= MOST_CHANNELS and inner % group_width == 0
    )
    return min(fitting, key=lambda width: (abs(width - wanted), -width), default=nearest)


def doubled(first: Stage, *depths: int) -> tuple[Stage, ...]:
    """Stages of `depths` like `first`, each with twice the width and half the map side."""
    return tuple(
        replace(first, depth=depth, width=first.width * 2**i, stride=1 if i == 0 else 2)
        for i, depth in enumerate(depths)
    )


@dataclass(frozen=True, kw_only=True)
class NetSpec:
    """A whole network: stem, stages, head. `Network(spec)` builds it.

    Examples:
        >>> import fullstride
        >>> spec = fullstride.zoo.spec("resnet50")
        >>> spec.in_channels, spec.resolution, spec.classes, len(spec.stages)
        (3, 224, 1000, 4)
    """

    source: str  # where the numbers come from
    stem: type[Stem]  # the layers before the stages
    stem_width: int  # channels out of the stem
    stages: tuple[Stage, ...]  # in order
    # channels of a 1 x 1 convolution before the global average; 0: none
    head_width: Annotated[int, Bounds(ge=0, le=MOST_CHANNELS)] = 0
    style: Style = field(default_factory=Style)  # norms, activations and shortcuts of all blocks
    init: Callable[[nn.Module], None] = init_resnet  # sets the initial weights
    in_channels: int = 3  # of an image: 1 is gray, 3 is RGB
    classes: int = 1000  # K, the number of logits
    resolution: int = 224  # pixels a side; inputs of any size are accepted
    # frames of a clip, where inputs may have any number; 0: the network takes images
    frames: Annotated[int, Bounds(ge=0, le=MOST_FRAMES)] = 0

    def __repr__(self) -> str:
        """Shows widths and depths; `to_json` has every field."""
        parts = [f"{self.stem.__name__} {self.stem_width}"]
        parts += [f"{each.block.__name__} {each.depth} x {each.width}" for each in self.stages]
        return (
            f"NetSpec({', '.join(parts)}, head {self.head_width}; {input_text(self)}, "
            f"classes {self.classes:,}; {self.source})"
        )

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("stem_width", "in_channels", "classes", "resolution"):
            check_range(name, getattr(self, name), MOST_CHANNELS * 16)
        if not self.stages or sum(stage.depth for stage in self.stages) > MOST_BLOCKS:
            raise ValueError(f"a network has 1 to {MOST_BLOCKS} blocks in its stages")
        c_in = self.stem_width
        for stage in self.stages:
            if stage.block is Basic and (c_in % stage.groups or stage.width % stage.groups):
                raise ValueError(
                    f"{c_in} channels in and {stage.width} out do not divide into {stage.groups} "
                    "groups: set group_width=0, or widths that are multiples of the groups"
                )
            c_in = stage.width
        self._check_frames()

    def _check_frames(self) -> None:
        """Raise ValueError if some parts are for images and others for clips."""
        check_time_kernel(self.style.time_kernel, "stem")
        kernels = [self.style.time_kernel, *(stage.time_kernel for stage in self.stages)]
        if any((kernel > 0) != (self.frames > 0) for kernel in kernels):
            raise ValueError(
                f"frames {self.frames} with time kernels {', '.join(map(str, kernels))} of stem "
                "and stages: for clips use 1 or more everywhere, for images 0"
            )
        if self.frames and (self.style.blur or not self.stem.takes_clips):
            raise ValueError(
                f"{self.stem.__name__} with blur {self.style.blur} does not take clips: use "
                "PoolStem, DeepStem, DeepConvStem or ConvStem, and no blur"
            )

    def scaled(self, *, width: float = 1.0, depth: float = 1.0) -> "NetSpec":
        """The network with every width and every depth multiplied.

        Widths are rounded to multiples of 8 for tensor cores, in stages with groups to multiples
        whose inner channels divide into the groups; a multiplier of 1 changes nothing. The minimum
        is one block, and one such multiple. Halves are rounded up, as for widths in TResNet's code.
        """
        check_multiplier("width", width)
        check_multiplier("depth", depth)

        def wide(channels: int, ratio: float = 1.0, group_width: int = 0) -> int:
            return (
                nearest_width(channels * width, 8, ratio, group_width) if width != 1 else channels
            )

        stages = tuple(
            replace(
                stage,
                width=wide(stage.width, stage.ratio, stage.group_width),
                depth=max(half_up(stage.depth * depth), 1),
            )
            for stage in self.stages
        )
        head = wide(self.head_width) if self.head_width else 0
        return replace(self, stem_width=wide(self.stem_width), stages=stages, head_width=head)

    def to_json(self) -> str:
        return records.to_json(self, NAMES)

    @staticmethod
    def from_json(data: str | Mapping[str, Any], where: str = "network spec") -> "NetSpec":
        """Read text or parsed JSON. Raises ValueError, in one line that begins with `where`."""
        return records.from_json(NetSpec, data, where, NAMED)


def check_time_kernel(kernel: int, what: str) -> None:
    if kernel and kernel % 2 == 0:
        raise ValueError(f"time_kernel {kernel} of a {what}: use 0 for images, or an odd number")


def half_up(value: float) -> int:
    return math.floor(value + 0.5)


def check_multiplier(name: str, value: float) -> None:
    if not 0 < value <= 64:
        raise ValueError(f"{name} multiplier {value}: use a number above 0, up to 64")


# ---- networks of timm, and the input of either kind of network


Size = Annotated[int, Bounds(ge=1, le=65_536)]  # in files


@dataclass(frozen=True, kw_only=True)
class TimmSpec:
    """A network that timm defines, by timm's own name."""

    name: str
    in_channels: Size = 3
    classes: Size = 1000
    resolution: Size = 224  # pixels a side that the weights are meant for

    @property
    def source(self) -> str:
        return f"timm, {self.name}"

    @property
    def frames(self) -> int:
        """0: timm's networks take images."""
        return 0

    def to_json(self) -> str:
        return json.dumps({"timm": asdict(self)}, indent=1)


Spec = NetSpec | TimmSpec


def input_shape(spec: Spec, resolution: int | None = None) -> tuple[int, ...]:
    """The shape of one input: (C, H, W), or (C, T, H, W) for a network of clips.

    H and W are `resolution`, by default the network's own.
    """
    side = spec.resolution if resolution is None else resolution
    return (spec.in_channels, *pixel_sizes(spec.frames, side))


def pixel_sizes(frames: int, side: int) -> tuple[int, ...]:
    """(H, W), or (T, H, W) for clips with T = `frames`."""
    return (frames, side, side) if frames else (side, side)


def input_text(spec: Spec) -> str:
    """For example "images 3 x 224 x 224"."""
    what = "clips" if spec.frames else "images"
    return f"{what} {' x '.join(map(str, input_shape(spec)))}"
