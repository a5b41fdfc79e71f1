"""3D ResNet-50 and 3D ResNet-RS: networks of clips, arXiv:2103.07579 section 6.4 and Table 6.

The stem halves the number of frames; in the last two stages, the first convolution of each residual
block looks across frames. Source of the numbers, which the paper does not print: the code of both
networks in tensorflow/models, official/projects/video_ssl (CVRL, arXiv:2008.03800) and
official/vision (resnet_3d and resnet_3d_rs), with the recipe k400_resnet3drs_50_tpu.yaml.
"""

from dataclasses import replace

from fullstride.nets.blocks import SE, DeepStem, PoolStem, Stem, Style, init_resnet_rs
from fullstride.nets.families import resnet_rs
from fullstride.nets.spec import NetSpec

CODE = "arXiv:2103.07579 Table 6 and tensorflow/models, official/vision resnet_3d"
TIME_KERNELS = (1, 1, 3, 3)  # frames of the first convolution of each block, by stage
STYLE = Style(time_kernel=5, time_stride=2)
FRAMES, RESOLUTION, CLASSES = 32, 224, 400  # of Kinetics-400


def video(
    base: NetSpec,
    *,
    source: str = CODE,
    stem: type[Stem] = PoolStem,
    se_ratio: float = 0.0,
    style: Style = STYLE,
) -> NetSpec:
    """The network of clips with the depths and widths of `base`, a network of images.

    The stem is `PoolStem` (7 x 7) or `DeepStem` (ResNet-D's); both end in a max-pool. `se_ratio` is
    of squeeze-and-excitation at the end of each branch, 0: none; 1/4 in the recipe's file, 1/5 in
    the code without a recipe. `style.self_gate` is the code's default for ResNet-RS; the paper does
    not mention it. Table 6 names ResNet-D, but the code has only its stem, no `average_shortcut`.
    """
    se = SE(at="out", ratio=se_ratio) if se_ratio else None
    stages = tuple(
        replace(stage, time_kernel=time_kernel, se=se)
        for stage, time_kernel in zip(base.stages, TIME_KERNELS, strict=True)
    )
    return replace(
        base,
        source=source,
        stem=stem,
        stages=stages,
        style=style,
        init=init_resnet_rs,
        classes=CLASSES,
        resolution=RESOLUTION,
        frames=FRAMES,
    )


def video_rs(base: NetSpec) -> NetSpec:
    """ResNet-RS of clips, as in the recipe's file: 78.2 % on Kinetics-400 with 50 layers."""
    return video(base, stem=DeepStem, se_ratio=1 / 4, style=replace(STYLE, self_gate=True))


SPECS = {
    "resnet3d_50": video(resnet_rs.BASELINES["resnet50"]),
    "resnet3d_se_50": video(resnet_rs.BASELINES["resnet50"], se_ratio=1 / 4),
    **{
        f"resnet3d_rs_{layers}": video_rs(resnet_rs.of_layers(layers))
        for layers in (50, 101, 152, 200, 270, 300, 350)
    },
    "resnet3d_rs_tiny": replace(
        video(
            resnet_rs.SPECS["resnet_rs_tiny"],
            source="ours: 3D ResNet-RS made small, for tests and the demo",
            stem=DeepStem,
            se_ratio=1 / 4,
            style=Style(time_kernel=3),
        ),
        classes=10,
        resolution=32,
        frames=8,
    ),
}
