"""ResNet (arXiv:1512.03385) and ResNet-50-D (arXiv:1812.01187): the baselines of the three papers.

The stride of a bottleneck is on its 3 x 3 convolution, as in all three papers' baselines and in
torchvision.
"""

from dataclasses import replace

from fullstride.nets.blocks import Basic, Block, Bottleneck, DeepStem, PoolStem, Style
from fullstride.nets.spec import NetSpec, Stage, doubled


def resnet(block: type[Block], *depths: int) -> NetSpec:
    expansion = 4 if block is Bottleneck else 1
    first = Stage(block=block, depth=1, width=64 * expansion, ratio=1 / expansion)
    return NetSpec(
        source="arXiv:1512.03385 Table 1",
        stem=PoolStem,
        stem_width=64,
        stages=doubled(first, *depths),
    )


SPECS = {
    "resnet18": resnet(Basic, 2, 2, 2, 2),
    "resnet34": resnet(Basic, 3, 4, 6, 3),
    "resnet50": resnet(Bottleneck, 3, 4, 6, 3),
    "resnet101": resnet(Bottleneck, 3, 4, 23, 3),
    "resnet152": resnet(Bottleneck, 3, 8, 36, 3),
    "resnet50d": replace(
        resnet(Bottleneck, 3, 4, 6, 3),
        source="arXiv:1812.01187 section 4",
        stem=DeepStem,
        style=Style(average_shortcut=True),
    ),
}
