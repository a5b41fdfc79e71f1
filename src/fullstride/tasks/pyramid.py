"""Which maps do dense tasks look at? P3 to P7 of a feature pyramid over any network."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn

FROM_NETWORK = (8, 16, 32)  # strides of the maps of a network that P3 to P5 are made of


class Pyramid(nn.Module):
    """The maps of a network -> P3 to P7, (N, width, H / stride, W / stride) for each of `strides`.

    P6 is a 3 x 3 convolution of stride 2 on P5, and P7 one on the ReLU of P6. P6 and P7 round up.
    Source: arXiv:1612.03144; P6 and P7 of P5 as in FCOS (arXiv:1904.01355).

    Args:
        channels: Of the maps of the network.
        strides: Of the maps of the network. Those of 8, 16 and 32 are used.
        width: Channels of each level.
        norm: The layer after the convolutions of a level, of its channels, such as
            `nn.BatchNorm2d`; P6 is made of P5 before it, and P7 of P6. None: no layer.
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
        extra = LastLevelP6P7(width, width)  # of P5: other first numbers mean the network's map
        self.levels = FeaturePyramidNetwork([channels[i] for i in self.used], width, extra)
        self.norms = nn.ModuleList(
            norm(width) if norm else nn.Identity() for _ in range(len(self.strides))
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = self.levels(OrderedDict((str(i), maps[i]) for i in self.used))
        return [norm(level) for norm, level in zip(self.norms, levels.values(), strict=True)]
