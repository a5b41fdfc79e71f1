"""How do maps of a network become a value for each pixel? P3 to P7, summed at stride 4."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.tasks.pyramid import Pyramid
from fullstride.tasks.task import full_precision

FINEST = 4  # stride of the grid that the levels are summed on
CONVOLUTIONS = 3


class PixelHead(nn.Module):
    """The maps of a network -> (N, outputs, H, W), for the H x W pixels of the network's input.

    Every level of the pyramid, whose convolutions a batch norm follows, is resized bilinearly to
    the grid of stride 4. Their sum goes through three 3 x 3 convolutions, each with batch norm and
    ReLU, and a 1 x 1 convolution. In training that is the result, (N, outputs, H / 4, W / 4); in
    evaluation it is resized bilinearly to the input in float32, and `finish` applied to it.

    Source: the segmentation of arXiv:2006.06882, which arXiv:2103.07579 uses; numbers that the
    papers do not state are those of its code.

    Args:
        channels: Of the maps of the network.
        strides: Of the maps of the network; 8, 16 and 32 are needed.
        outputs: Values of a pixel.
        width: Channels of the pyramid and of the convolutions.
        finish: What is applied to the result in evaluation.
        start: The result of training begins near it.
    """

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


def resize(values: Tensor, size: tuple[int, int]) -> Tensor:
    """(N, C, h, w) -> (N, C, *size), bilinearly; corners of pixels stay corners."""
    return F.interpolate(values, size, mode="bilinear", align_corners=False)
