"""The shared parts of dense tasks: a feature pyramid, a head for pixels, maps and colours."""

import colorsys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.data.dataset import Images
from fullstride.data.readers.decode import Size
from fullstride.data.readers.masks import IGNORED
from fullstride.data.transforms.crop import (
    Augmentation,
    Decoder,
    Sides,
    check_decoder,
    view_geometry,
)
from fullstride.data.transforms.masks import MaskTestView, MaskTrainView, nearest
from fullstride.io.records import Bounds, PositiveInt
from fullstride.nets.preprocessing import Fit, Preprocessing
from fullstride.tasks.task import Task, full_precision

FROM_NETWORK = (8, 16, 32)  # strides of the network's maps that give P3 to P5
Factor = Annotated[float, Bounds(gt=0, le=4)]
HEAD_WIDTHS: tuple[Mapping[str, int], ...] = tuple({"head_width": each} for each in (64, 128, 256))
SMALLEST_VIEW, LARGEST_VIEW, SIDE_STEP = 64, 640, 32  # pixels a side, in multiples of the step


@dataclass(frozen=True)
class DenseOptions:
    """The options of all tasks of boxes and pixels."""

    # channels of the pyramid and of the head's convolutions
    head_width: PositiveInt = 256
    # in place of random resized crops: least and largest side of the whole picture, padded to a
    # square, / side of the view, which is a random crop of that square
    jitter: tuple[Factor, Factor] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if self.jitter[0] > self.jitter[1]:
            raise ValueError(f"jitter {self.jitter}: use two rising numbers up to 4")


class Pyramid(nn.Module):
    """The maps of a network -> P3 to P7, (N, width, H / stride, W / stride) for each of `strides`.

    P6 is a 3 x 3 convolution of stride 2 on P5, and P7 the same on the ReLU of P6. Their sizes are
    rounded up. Source: arXiv:1612.03144; P6 and P7 as in FCOS (arXiv:1904.01355).

    `channels` and `strides` are of the network's maps; 8, 16 and 32 are used. `norm` builds the
    layer after the convolutions of a level from its channels, such as `nn.BatchNorm2d`; P6 and P7
    take their input before this layer. None: no layer.
    """

    strides = (*FROM_NETWORK, 64, 128)

    def __init__(
        self,
        channels: Sequence[int],
        strides: Sequence[int],
        *,
        width: int = 256,
        norm: Callable[[int], nn.Module] | None = None,
    ):
        from torchvision.ops import FeaturePyramidNetwork  # takes seconds to import
        from torchvision.ops.feature_pyramid_network import LastLevelP6P7

        super().__init__()
        if missing := [stride for stride in FROM_NETWORK if stride not in strides]:
            raise ValueError(
                f"the network has maps of strides {', '.join(map(str, strides))}, none of "
                f"{missing[0]}: choose one with maps of 8, 16 and 32"
            )
        self.used = tuple(list(strides).index(stride) for stride in FROM_NETWORK)
        self.out_channels = width
        extra = LastLevelP6P7(width, width)  # from P5; unequal numbers mean the network's map
        self.levels = FeaturePyramidNetwork([channels[i] for i in self.used], width, extra)
        self.norms = nn.ModuleList(
            norm(width) if norm else nn.Identity() for _ in range(len(self.strides))
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = self.levels(OrderedDict((str(i), maps[i]) for i in self.used))
        return [norm(level) for norm, level in zip(self.norms, levels.values(), strict=True)]


def sides_around(side: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Sides of views near the given fractions of `side`, in pixels."""
    near = (SIDE_STEP * round(share * side / SIDE_STEP) for share in shares)
    return tuple(sorted({min(max(each, SMALLEST_VIEW), LARGEST_VIEW) for each in near}))


# The head for pixels: P3 to P7, summed at stride 4.

FINEST = 4  # stride of the grid where the levels are summed
CONVOLUTIONS = 3


class PixelHead(nn.Module):
    """The maps of a network -> (N, outputs, H, W), for the H x W pixels of the network's input.

    Every level of the pyramid, with a batch norm, is resized bilinearly to the grid of stride 4.
    The sum of the levels goes through three 3 x 3 convolutions, each with batch norm and ReLU, and
    a 1 x 1 convolution. The result in training is (N, outputs, H / 4, W / 4); in evaluation it is
    resized bilinearly to the input in float32, before `finish`.

    Source: the segmentation of arXiv:2006.06882, which arXiv:2103.07579 uses; numbers that the
    papers do not state are from the code of arXiv:2006.06882.

    `channels` and `strides` are of the network's maps, `outputs` the values of a pixel, and `width`
    the channels of the pyramid and of the convolutions. The initial outputs in training are near
    `start`.
    """

    class_rows: ClassVar[Mapping[str, int]] = {"output": 1}  # see `Backbone.class_rows`

    def __init__(
        self,
        channels: Sequence[int],
        strides: Sequence[int],
        outputs: int,
        *,
        width: int = 256,
        finish: Callable[[Tensor], Tensor] | None = None,
        start: float = 0.0,
    ):
        super().__init__()
        self.stride, self.finish = strides[0], finish
        self.pyramid = Pyramid(channels, strides, width=width, norm=nn.BatchNorm2d)
        self.convolutions = nn.Sequential(*(_convolution(width) for _ in range(CONVOLUTIONS)))
        self.output = nn.Conv2d(width, outputs, 1)
        nn.init.normal_(self.output.weight, std=0.01)
        assert self.output.bias is not None
        nn.init.constant_(self.output.bias, start)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        height, width = (side * self.stride for side in maps[0].shape[-2:])
        grid = (height // FINEST, width // FINEST)
        first, *others = self.pyramid(maps)
        total = resize(first, grid)
        for level in others:
            total = total + resize(level, grid)
        values = self.output(self.convolutions(total))
        if self.training:
            return values
        values = resize(full_precision(values), (height, width))
        return values if self.finish is None else self.finish(values)


def _convolution(width: int) -> nn.Sequential:
    convolution = nn.Conv2d(width, width, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU())


def resize(values: Tensor, size: Sequence[int]) -> Tensor:
    """(N, C, h, w) -> (N, C, *size), bilinearly, with `align_corners=False`."""
    return F.interpolate(values, size, mode="bilinear", align_corners=False)


class PixelTask(DenseOptions, Task):
    """A task whose targets and predictions are maps with a value for each pixel."""

    outside: ClassVar[float]  # target of pixels of the view outside the picture
    # whether values are divided by the factor by which training enlarges a picture
    divides: ClassVar[bool] = False

    default_recipe: ClassVar[str] = "dense"
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = HEAD_WIDTHS
    view_fit: ClassVar[Fit | None] = "pad"
    scoring_batch: ClassVar[int] = 16

    def view_sides(self, images: Images, longer: int) -> tuple[int, ...]:
        return sides_around(longer, (1 / 2, 3 / 4, 1))

    def train_view(
        self, pre: Preprocessing, augmentation: Augmentation, decoder: Decoder, sides: Sides
    ) -> MaskTrainView:
        check_decoder(decoder)
        return MaskTrainView(
            pre, augmentation, self.jitter, sides, outside=self.outside, divides=self.divides
        )

    def test_view(self, pre: Preprocessing) -> MaskTestView:
        return MaskTestView(pre, outside=self.outside)

    def collate(self, targets: list[Any]) -> Tensor:
        """Arrays (H, W) of N images -> (N, H, W); N may be 0."""
        return torch.from_numpy(np.stack(targets)) if targets else torch.empty(0)


def on_picture(values: np.ndarray, size: Size, pre: Preprocessing, outside: float) -> np.ndarray:
    """Map values of a view, (side, side), to the picture by nearest neighbours: (h, w).

    `outside` is the value of pixels that the view does not show.
    """
    geometry = view_geometry(size, pre)
    columns = (np.arange(size[0]) + 0.5) * geometry.scale_x - geometry.left
    rows = (np.arange(size[1]) + 0.5) * geometry.scale_y - geometry.top
    return nearest(values, rows, columns, outside)


# Colours of classes.

GOLDEN = 0.618034  # step of the hue, 0 to 1, from one class to the next


def class_colour(index: int, saturation: float, value: float) -> tuple[int, int, int]:
    """The red, green and blue of a class, 0 to 255, from a saturation and a value, 0 to 1."""
    red, green, blue = colorsys.hsv_to_rgb(index * GOLDEN % 1, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def class_colours() -> np.ndarray:
    """A colour for each class, uint8 (256, 3): black for class 0, white for `IGNORED`."""
    colours = [class_colour(k, 0.9 if k % 2 else 0.6, 0.9) for k in range(IGNORED)]
    return np.array([(0, 0, 0), *colours[1:], (255, 255, 255)], np.uint8)
