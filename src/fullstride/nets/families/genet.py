"""GENet: Neural Architecture Design for GPU-Efficient Networks, arXiv:2006.14090.

Few channels early, where plain convolutions keep the GPU busy; many late, where bottlenecks and
depthwise blocks lose little by their low rank.
"""

from dataclasses import replace

from fullstride.nets.blocks import Basic, Bottleneck, ConvStem, init_genet
from fullstride.nets.spec import NetSpec, Stage

PAPER = "arXiv:2006.14090 Table 2"


def genet(
    resolution: int, stem: int, head: int, *sizes: tuple[int, int], source: str = PAPER
) -> NetSpec:
    """The five stages that the paper's search found; `sizes` are (depth, width) of each."""
    (d1, w1), (d2, w2), (d3, w3), (d4, w4), (d5, w5) = sizes
    return NetSpec(
        source=source,
        stem=ConvStem,
        stem_width=stem,
        stages=(
            Stage(block=Basic, depth=d1, width=w1, stride=2),
            Stage(block=Basic, depth=d2, width=w2, stride=2),
            Stage(block=Bottleneck, depth=d3, width=w3, stride=2, ratio=1 / 4),
            Stage(block=Bottleneck, depth=d4, width=w4, stride=2, ratio=3, group_width=1),
            Stage(block=Bottleneck, depth=d5, width=w5, ratio=3, group_width=1),
        ),
        head_width=head,
        init=init_genet,
        resolution=resolution,
    )


SPECS = {
    "genet_light": genet(192, 13, 1920, (1, 48), (3, 48), (7, 384), (2, 560), (1, 256)),
    "genet_normal": genet(192, 32, 2560, (1, 128), (2, 192), (6, 640), (4, 640), (1, 640)),
    "genet_large": genet(256, 32, 2560, (1, 128), (2, 192), (6, 640), (5, 640), (4, 640)),
    "genet_tiny": replace(
        genet(
            32,
            16,
            256,
            *((1, 48), (3, 64), (1, 128), (1, 96), (1, 64)),
            source="ours: GENet-normal made small, for tests and the demo",
        ),
        classes=10,
    ),
}

SPECS["profilingnet_132"] = NetSpec(
    source="arXiv:2006.14090 Table 5 as printed, which has 92 convolutions and not 132",
    stem=ConvStem,
    stem_width=16,
    stages=tuple(
        Stage(block=Basic, depth=depth, width=width, stride=stride)
        for depth, width, stride in (
            (3, 32, 2),
            (3, 48, 2),
            (3, 72, 2),
            (6, 128, 1),
            (6, 256, 2),
            (8, 512, 1),
            (8, 1024, 1),
            (4, 2048, 1),
        )
    ),
    head_width=4096,
    init=init_genet,
)

# The super-blocks X, B and D of Table 6, with inferred kernels and ratios.
MASTERNET_STAGES = {
    "X": Stage(block=Basic, depth=1, width=1, kernel=5),
    "B": Stage(block=Bottleneck, depth=1, width=4, kernel=5, ratio=1 / 4),
    "D": Stage(block=Bottleneck, depth=1, width=1, kernel=5, ratio=6, group_width=1),
}


def masternet(row: int, letters: str, *sizes: tuple[int, int, int]) -> NetSpec:
    """A network that the authors designed by hand before their search.

    `sizes` are (depth, width, stride) of the super-blocks. The paper prints neither kernels nor
    ratios. Inferred: 5 x 5 inside, a 3 x 3 stem and a 1 x 1 head, ratio 1/4 in bottlenecks and 6
    in depthwise blocks.
    """
    stages = tuple(
        replace(MASTERNET_STAGES[letter], depth=depth, width=width, stride=stride)
        for letter, (depth, width, stride) in zip(letters, sizes, strict=True)
    )
    return NetSpec(
        source=f"arXiv:2006.14090 Table 6, row Net{row}; kernels and ratios inferred",
        stem=ConvStem,
        stem_width=32,
        stages=stages,
        head_width=1280,
        init=init_genet,
    )


# Table 6 in its order, by top-1. Eight networks are printed twice, with super-blocks divided
# differently: rows 1 and 6, 2 and 3, 5 and 7, 8 and 10, 9 and 11, 12 and 13, 15 and 19, 18 and 20.
# Their accuracies differ by 0.1 to 0.6 points, which is the noise of training.
MASTERNETS = (
    masternet(1, "XXBDD", (1, 64, 2), (4, 96, 2), (8, 512, 2), (4, 320, 2), (2, 320, 1)),
    masternet(2, "XXDDD", (1, 48, 2), (4, 64, 2), (8, 160, 2), (4, 320, 2), (2, 320, 1)),
    masternet(3, "XXDD", (1, 48, 2), (4, 64, 2), (8, 160, 2), (6, 320, 2)),
    masternet(4, "XBBD", (1, 64, 2), (4, 256, 2), (8, 512, 2), (6, 320, 2)),
    masternet(5, "XBDDD", (1, 32, 2), (4, 256, 2), (8, 144, 2), (4, 288, 2), (2, 288, 1)),
    masternet(6, "XXBD", (1, 64, 2), (4, 96, 2), (8, 512, 2), (6, 320, 2)),
    masternet(7, "XBDD", (1, 32, 2), (4, 256, 2), (8, 144, 2), (6, 288, 2)),
    masternet(8, "DDDDD", (1, 24, 2), (4, 64, 2), (8, 128, 2), (4, 256, 2), (2, 256, 1)),
    masternet(9, "XXDDD", (1, 48, 2), (4, 64, 2), (4, 160, 2), (4, 160, 1), (4, 320, 2)),
    masternet(10, "DDDD", (1, 24, 2), (4, 64, 2), (8, 128, 2), (6, 256, 2)),
    masternet(11, "XXDDD", (1, 48, 2), (4, 64, 2), (6, 160, 2), (2, 160, 1), (4, 320, 2)),
    masternet(12, "XXBBD", (1, 64, 2), (4, 96, 2), (6, 512, 2), (2, 512, 1), (4, 320, 2)),
    masternet(13, "XXBBD", (1, 64, 2), (4, 96, 2), (4, 512, 2), (4, 512, 1), (4, 320, 2)),
    masternet(14, "XBDDD", (1, 32, 2), (4, 256, 2), (6, 144, 2), (2, 144, 1), (4, 288, 2)),
    masternet(15, "XXBBB", (1, 64, 2), (4, 96, 2), (8, 512, 2), (4, 1024, 2), (2, 1024, 1)),
    masternet(16, "DDDDD", (1, 24, 2), (4, 64, 2), (6, 128, 2), (2, 128, 1), (4, 256, 2)),
    masternet(17, "XBBB", (1, 64, 2), (4, 256, 2), (8, 512, 2), (6, 1024, 2)),
    masternet(18, "XXBBB", (1, 64, 2), (4, 96, 2), (6, 512, 2), (2, 512, 1), (4, 1024, 2)),
    masternet(19, "XXBB", (1, 64, 2), (4, 96, 2), (8, 512, 2), (6, 1024, 2)),
    masternet(20, "XXBBB", (1, 64, 2), (4, 96, 2), (4, 512, 2), (4, 512, 1), (4, 1024, 2)),
)

SPECS |= {f"masternet_{row}": spec for row, spec in enumerate(MASTERNETS, start=1)}
