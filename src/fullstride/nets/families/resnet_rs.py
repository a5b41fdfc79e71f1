"""Revisiting ResNets: Improved Training and Scaling Strategies, arXiv:2103.07579.

ResNet-D with squeeze-and-excitation and no max-pool, scaled by depth and resolution.
Source of the numbers: the TPU code, tensorflow/tpu@7dc921f, whose weights were released.
"""

from dataclasses import replace

from fullstride.nets.blocks import (
    SE,
    Basic,
    Block,
    Bottleneck,
    DeepConvStem,
    DeepStem,
    PoolStem,
    Style,
    init_resnet_rs,
)
from fullstride.nets.spec import NetSpec, Stage, doubled

PAPER = "arXiv:2103.07579 Table 7 and tensorflow/tpu@7dc921f"
STUDY = "arXiv:2103.07579 section 5, the scaling study"


def resnet_rs(source: str, resolution: int, *depths: int) -> NetSpec:
    """Bottlenecks with squeeze-and-excitation; `resolution` is the smallest the paper trains at."""
    se = SE(at="out", ratio=1 / 4)
    first = Stage(block=Bottleneck, depth=1, width=256, ratio=1 / 4, se=se)
    return NetSpec(
        source=source,
        stem=DeepConvStem,
        stem_width=64,
        stages=doubled(first, *depths),
        style=Style(average_shortcut=True),
        init=init_resnet_rs,
        resolution=resolution,
    )


SPECS = {
    "resnet_rs_50": resnet_rs(PAPER, 160, 3, 4, 6, 3),
    "resnet_rs_101": resnet_rs(PAPER, 160, 3, 4, 23, 3),
    "resnet_rs_152": resnet_rs(PAPER, 192, 3, 8, 36, 3),
    "resnet_rs_200": resnet_rs(PAPER, 256, 3, 24, 36, 3),
    "resnet_rs_270": resnet_rs(PAPER, 256, 4, 29, 53, 4),
    "resnet_rs_300": resnet_rs(STUDY, 256, 4, 36, 54, 4),
    "resnet_rs_350": resnet_rs(PAPER, 256, 4, 36, 72, 4),
    "resnet_rs_400": resnet_rs(STUDY, 256, 6, 48, 72, 6),
    "resnet_rs_420": resnet_rs(PAPER, 320, 4, 44, 87, 4),
    "resnet_rs_tiny": replace(
        resnet_rs("ours: ResNet-RS made small, for tests and the demo", 32, 1, 1, 2, 1).scaled(
            width=1 / 8
        ),
        classes=10,
        resolution=32,
    ),
}

# The depths of the scaling study. 26 layers are two blocks a stage, as in timm's ResNet-26: the
# paper prints none. Names of 300 and 400 layers are rounded, see `SPECS`.
SCALED_LAYERS = (26, 50, 101, 152, 200, 270, 300, 350, 400, 420)


def of_layers(layers: int) -> NetSpec:
    """The ResNet-RS with `layers` layers, one of `SCALED_LAYERS`."""
    return resnet_rs(STUDY, 160, 2, 2, 2, 2) if layers == 26 else SPECS[f"resnet_rs_{layers}"]


# ResNet (arXiv:1512.03385) and ResNet-50-D (arXiv:1812.01187), the baselines of the three papers.
# The stride of a bottleneck is on its 3 x 3 convolution, as there and in torchvision.


def resnet(block: type[Block], *depths: int) -> NetSpec:
    expansion = 4 if block is Bottleneck else 1
    first = Stage(block=block, depth=1, width=64 * expansion, ratio=1 / expansion)
    return NetSpec(
        source="arXiv:1512.03385 Table 1",
        stem=PoolStem,
        stem_width=64,
        stages=doubled(first, *depths),
    )


BASELINES = {
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
