"""TResNet: High Performance GPU-Dedicated Architecture, arXiv:2003.13630.

All pixels are folded into channels at the start; basic blocks early and bottlenecks late,
squeeze-and-excitation where maps are small, anti-aliased strides.

Source of the numbers: the authors' code, Alibaba-MIIL/TResNet@aea5f0f. Where the paper differs,
the code and the released weights count: the stem is 3 x 3 and TResNet-XL starts with
int(64 * 1.3) = 83 channels, not 84.
"""

from dataclasses import replace

from fullstride.nets.blocks import SE, Basic, Bottleneck, SpaceToDepthStem, Style, init_tresnet
from fullstride.nets.spec import NetSpec, Stage, doubled

# Slopes of the leaky ReLUs: 1e-2 in the stem, 1e-3 elsewhere, and ReLU after each block.
STYLE = Style(slope=1e-3, stem_slope=1e-2, blur=True, average_shortcut=True)


def network(source: str, width: int, stages: tuple[Stage, ...]) -> NetSpec:
    return NetSpec(
        source=source,
        stem=SpaceToDepthStem,
        stem_width=width,
        stages=stages,
        style=STYLE,
        init=init_tresnet,
    )


def tresnet(source: str, width: int, d1: int, d2: int, d3: int, d4: int) -> NetSpec:
    """Two stages of basic blocks, two of bottlenecks; squeeze-and-excitation in the first three."""
    basic = Stage(block=Basic, depth=d1, width=width, se=SE(at="out", ratio=1 / 4, least=64))
    narrow = Stage(block=Bottleneck, depth=d3, width=16 * width, stride=2, ratio=1 / 4)
    stages = (
        basic,
        replace(basic, depth=d2, width=2 * width, stride=2),
        replace(narrow, se=SE(at="inner", ratio=1 / 2, least=64)),
        replace(narrow, depth=d4, width=32 * width),
    )
    return network(source, width, stages)


def tresnet_v2(source: str, width: int, *depths: int) -> NetSpec:
    """Bottlenecks in all stages. ImageNet-21K Pretraining for the Masses, arXiv:2104.10972.

    Slopes as in that paper's repository and weights. The TResNet repository has its own V2, with
    weights for Stanford Cars and slopes of 1e-6 everywhere.
    """
    se = SE(at="inner", ratio=1 / 2, least=64)
    first = Stage(block=Bottleneck, depth=1, width=4 * width, ratio=1 / 4, se=se)
    *stages, last = doubled(first, *depths)
    return network(source, width, (*stages, replace(last, se=None)))


def tiny() -> NetSpec:
    """TResNet-M with few, narrow blocks, for tests and the demo."""
    spec = tresnet("ours: TResNet-M made small, for tests and the demo", 12, 1, 2, 2, 1)
    stages = tuple(
        replace(stage, se=replace(stage.se, least=8)) if stage.se else stage
        for stage in spec.stages
    )
    return replace(spec, stages=stages, classes=10, resolution=32)


V2_L = tresnet_v2("arXiv:2104.10972, Alibaba-MIIL/ImageNet21K", 64, 3, 4, 23, 3)
PAPER = "arXiv:2003.13630 Table 2 and Alibaba-MIIL/TResNet@aea5f0f"

SPECS = {
    "tresnet_m": tresnet(PAPER, 64, 3, 4, 11, 3),
    "tresnet_l": tresnet(PAPER, int(64 * 1.2), 4, 5, 18, 3),
    "tresnet_xl": tresnet(PAPER, int(64 * 1.3), 4, 5, 24, 3),
    "tresnet_v2_l": V2_L,
    # The V2 of the TResNet repository, with the classes and the resolution of the weights.
    "tresnet_v2_l_cars": replace(
        V2_L,
        source="arXiv:2003.13630 and Alibaba-MIIL/TResNet@aea5f0f, tresnet_l_v2",
        style=replace(STYLE, slope=1e-6, stem_slope=1e-6),
        classes=196,
        resolution=368,
    ),
    "tresnet_tiny": tiny(),
}
