"""How does data become a module? The one builder: `Network(spec)`."""

from torch import Tensor, nn

from fullstride.nets.layers import Head
from fullstride.nets.spec import NetSpec, Stage


class Network(nn.Module):
    """Stem, stages, head, as `spec` says: (N, in_channels, H, W) -> (N, K) logits. Any H and W.

    `channels` and `strides` describe what `features` returns.
    """

    classifier = "head.fc"

    def __init__(self, spec: NetSpec):
        super().__init__()
        self.spec = spec
        self.stem = spec.stem(spec.in_channels, spec.stem_width, spec.style)
        width, stride = spec.stem_width, spec.stem.stride
        ends = {stride: width}
        stages = []
        for stage in spec.stages:
            stages.append(blocks(width, stage, spec))
            width, stride = stage.width, stride * stage.stride
            ends[stride] = width
        self.stages = nn.Sequential(*stages)
        self.head = Head(width, spec.head_width, spec.classes)
        self.strides: tuple[int, ...] = tuple(ends)
        self.channels: tuple[int, ...] = tuple(ends.values())
        spec.init(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))

    def features(self, x: Tensor) -> tuple[Tensor, ...]:
        """The pyramid: the last map at every stride, each (N, channels[i], H / strides[i], W / strides[i]) rounded up.

        The head's 1 x 1 convolution, where there is one, belongs to the classifier and not to the pyramid.
        """
        maps = {}
        x = self.stem(x)
        stride = self.strides[0]
        maps[stride] = x
        for module, stage in zip(self.stages, self.spec.stages, strict=True):
            x = module(x)
            stride *= stage.stride
            maps[stride] = x
        return tuple(maps.values())


def blocks(c_in: int, stage: Stage, spec: NetSpec) -> nn.Sequential:
    def block(number: int) -> nn.Module:
        return stage.block(
            c_in if number == 0 else stage.width,
            stage.width,
            inner=stage.inner,
            kernel=stage.kernel,
            stride=stage.stride if number == 0 else 1,
            groups=stage.groups,
            se=stage.se,
            style=spec.style,
        )

    return nn.Sequential(*(block(number) for number in range(stage.depth)))
