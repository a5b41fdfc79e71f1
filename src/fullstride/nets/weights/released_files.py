"""How are the images of a released file prepared? As its authors evaluate it, by name and shape."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from fullstride.nets.families import SPECS
from fullstride.nets.preprocessing import Fit
from fullstride.nets.spec import NetSpec

HASH = re.compile(r"-[0-9a-f]{8}$")  # at the end of a name, as PyTorch's hub has it
COPY = re.compile(r" ?\(\d+\)$")  # of a file that was downloaded once more

# GENet's authors resize the shorter side to ceil(resolution / 0.875), and this package to
# floor(resolution / crop): 220 pixels for 192, and 293 for 256.
GENET_CROP = {192: 192 / 220, 256: 256 / 293}


@dataclass(frozen=True, kw_only=True)
class ReleasedFile:
    """A released file, and how its authors prepare images for it."""

    pattern: str  # a regular expression of the name without suffix, in lower case
    network: str
    classes: int = 1000
    resolution: int  # pixels a side
    fit: Fit = "crop"
    crop: float = 0.875
    source: str


def tresnet_files() -> list[ReleasedFile]:
    zoo = "Alibaba-MIIL/TResNet@aea5f0f"
    pretrained = "Alibaba-MIIL/ImageNet21K"
    mirrored = {"m": "80_8", "l": "81_5", "xl": "82_0"}  # timm's copies of the authors' files
    files = []
    for size, top1 in mirrored.items():
        network = f"tresnet_{size}"
        small = f"{network}(_{top1})?"
        large = f"{network}_448"
        files += [
            ReleasedFile(pattern=small, network=network, resolution=224, source=zoo),
            ReleasedFile(pattern=large, network=network, resolution=448, fit="squish", source=zoo),
        ]
    # The pretraining evaluates by a square resize, and so does what was tuned from it.
    for network, pattern, classes in (
        ("tresnet_m", "tresnet_m_miil_(in)?21k", 11_221),
        ("tresnet_m", "tresnet_m_1k_miil_83_1", 1000),
        ("tresnet_v2_l", "tresnet_l_v2_miil_(in)?21k", 11_221),
        ("tresnet_v2_l", "tresnet_l_v2_83_9", 1000),
    ):
        files.append(
            ReleasedFile(
                pattern=pattern,
                network=network,
                classes=classes,
                resolution=224,
                fit="squish",
                source=pretrained,
            )
        )
    cars = ReleasedFile(
        pattern=r"stanford_cars_tresnet-l-v2(_96_27)?",
        network="tresnet_v2_l_cars",
        classes=196,
        resolution=368,
        fit="squish",
        source="Alibaba-MIIL/TResNet#42",
    )
    return [*files, cars]


def genet_files() -> list[ReleasedFile]:
    return [
        ReleasedFile(
            pattern=f"genet_{size}",
            network=network,
            resolution=side,
            crop=GENET_CROP[side],
            source="idstcv/GPU-Efficient-Networks@392ebb3",
        )
        for size, network, side in (
            ("small", "genet_light", 192),
            ("normal", "genet_normal", 192),
            ("large", "genet_large", 256),
        )
    ]


def resnet_rs_files() -> list[ReleasedFile]:
    sides_of = {50: [160], 101: [160, 192], 152: [192, 224, 256], 200: [256], 270: [256]}
    sides_of |= {350: [256, 320], 420: [320]}
    return [
        ReleasedFile(
            pattern=f"resnet-rs-{depth}-i{side}",
            network=f"resnet_rs_{depth}",
            resolution=side,
            source="tensorflow/tpu@7dc921f",
        )
        for depth, sides in sides_of.items()
        for side in sides
    ]


RELEASED = (*tresnet_files(), *genet_files(), *resnet_rs_files())


def by_name(path: Path) -> ReleasedFile | None:
    """The released file of that name, without its suffix and a hash; None for any other."""
    stem = HASH.sub("", COPY.sub("", path.stem.lower()))
    return next((each for each in RELEASED if re.fullmatch(each.pattern, stem)), None)


def by_shape(network: str, classes: int) -> ReleasedFile | None:
    """The only released file of a network with so many classes; None for none or several."""
    files = [each for each in RELEASED if (each.network, each.classes) == (network, classes)]
    return files[0] if len(files) == 1 else None


def has_shape(release: ReleasedFile, spec: NetSpec) -> bool:
    """Whether the weights of a network `spec` have the shapes of the released file."""
    expected = replace(SPECS[release.network], classes=release.classes)
    return replace(spec, resolution=expected.resolution, style=expected.style) == expected
