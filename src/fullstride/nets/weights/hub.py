"""Finds released weights by name: authors' files, and timm's weights on the hub."""

import re
import socket
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, urlopen

from fullstride.nets import families
from fullstride.nets.families import SPECS
from fullstride.nets.preprocessing import Fit, Preprocessing
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import pretrained_config

HASH = re.compile(r"-[0-9a-f]{8}$")  # at the end of a name, as in PyTorch's hub
COPY = re.compile(r" ?\(\d+\)$")  # browsers mark repeated downloads so

# GENet's authors resize the shorter side to ceil(resolution / 0.875), and this package to
# floor(resolution / crop): 220 pixels for 192, and 293 for 256.
GENET_CROP = {192: 192 / 220, 256: 256 / 293}


@dataclass(frozen=True)
class ReleasedFile:
    """A released file, and its authors' preprocessing of images."""

    pattern: str  # a regular expression of the name without suffix, in lower case
    network: str
    classes: int
    resolution: int  # pixels a side
    fit: Fit
    crop: float
    source: str


TRESNET, IMAGENET_21K = "Alibaba-MIIL/TResNet@aea5f0f", "Alibaba-MIIL/ImageNet21K"
GENET, RESNET_RS = "idstcv/GPU-Efficient-Networks@392ebb3", "tensorflow/tpu@7dc921f"
SIDES = {50: (160,), 101: (160, 192), 152: (192, 224, 256), 200: (256,), 270: (256,)}
SIDES |= {350: (256, 320), 420: (320,)}
# Names of TResNet with numbers belong to timm's copies of the authors' files. Weights pretrained on
# ImageNet-21K, fine-tuned or not, are evaluated with a square resize.
ROWS: list[tuple[str, str, int, int, Fit, float, str]] = [
    ("tresnet_m(_80_8)?", "tresnet_m", 1000, 224, "crop", 0.875, TRESNET),
    ("tresnet_m_448", "tresnet_m", 1000, 448, "squish", 0.875, TRESNET),
    ("tresnet_l(_81_5)?", "tresnet_l", 1000, 224, "crop", 0.875, TRESNET),
    ("tresnet_l_448", "tresnet_l", 1000, 448, "squish", 0.875, TRESNET),
    ("tresnet_xl(_82_0)?", "tresnet_xl", 1000, 224, "crop", 0.875, TRESNET),
    ("tresnet_xl_448", "tresnet_xl", 1000, 448, "squish", 0.875, TRESNET),
    ("tresnet_m_miil_(in)?21k", "tresnet_m", 11_221, 224, "squish", 0.875, IMAGENET_21K),
    ("tresnet_m_1k_miil_83_1", "tresnet_m", 1000, 224, "squish", 0.875, IMAGENET_21K),
    ("tresnet_l_v2_miil_(in)?21k", "tresnet_v2_l", 11_221, 224, "squish", 0.875, IMAGENET_21K),
    ("tresnet_l_v2_83_9", "tresnet_v2_l", 1000, 224, "squish", 0.875, IMAGENET_21K),
    (
        *("stanford_cars_tresnet-l-v2(_96_27)?", "tresnet_v2_l_cars", 196),
        *(368, "squish", 0.875, "Alibaba-MIIL/TResNet#42"),
    ),
    ("genet_small", "genet_light", 1000, 192, "crop", GENET_CROP[192], GENET),
    ("genet_normal", "genet_normal", 1000, 192, "crop", GENET_CROP[192], GENET),
    ("genet_large", "genet_large", 1000, 256, "crop", GENET_CROP[256], GENET),
    *(
        (f"resnet-rs-{n}-i{side}", f"resnet_rs_{n}", 1000, side, "crop", 0.875, RESNET_RS)
        for n, sides in SIDES.items()
        for side in sides
    ),
]
RELEASED = tuple(ReleasedFile(*row) for row in ROWS)


def by_name(path: Path) -> ReleasedFile | None:
    """The released file with this name, apart from suffix and hash; None if there is none."""
    stem = HASH.sub("", COPY.sub("", path.stem.lower()))
    return next((each for each in RELEASED if re.fullmatch(each.pattern, stem)), None)


def by_shape(network: str, classes: int) -> ReleasedFile | None:
    """The only released file of a network with `classes` classes; None for none or several."""
    files = [each for each in RELEASED if (each.network, each.classes) == (network, classes)]
    return files[0] if len(files) == 1 else None


def has_shape(release: ReleasedFile, spec: NetSpec) -> bool:
    """Whether weights of `spec` have the same shapes as the released file."""
    expected = replace(SPECS[release.network], classes=release.classes)
    return replace(spec, resolution=expected.resolution, style=expected.style) == expected


# Name -> model of the Hugging Face hub under `timm/`. TResNet-M and TResNet-V2-L have the most
# accurate weights, pretrained on ImageNet-21K; a name with a tag selects others.
HUB = {
    "tresnet_m": "tresnet_m.miil_in21k_ft_in1k",
    "tresnet_l": "tresnet_l.miil_in1k",
    "tresnet_xl": "tresnet_xl.miil_in1k",
    "tresnet_v2_l": "tresnet_v2_l.miil_in21k_ft_in1k",
    **{
        f"resnet_rs_{depth}": f"resnetrs{depth}.tf_in1k"
        for depth in (50, 101, 152, 200, 270, 350, 420)
    },
    "genet_light": "gernet_s.idstcv_in1k",
    "genet_normal": "gernet_m.idstcv_in1k",
    "genet_large": "gernet_l.idstcv_in1k",
    "resnet18": "resnet18.a1_in1k",
    "resnet34": "resnet34.a1_in1k",
    "resnet50": "resnet50.a1_in1k",
    "resnet101": "resnet101.a1h_in1k",
    "resnet152": "resnet152.a1h_in1k",
    "resnet50d": "resnet50d.ra2_in1k",
}

WEIGHTS = "model.safetensors"  # in every repository of the hub

# timm's weights that timm evaluates in another way than their authors -> the authors' files.
AUTHORS_FILES = {
    "gernet_s.idstcv_in1k": "GENet_small.pth",
    "gernet_m.idstcv_in1k": "GENet_normal.pth",
    "gernet_l.idstcv_in1k": "GENet_large.pth",
}


def timm_name(name: str) -> str:
    """timm's name for the weights of a name in `HUB`, of `NAME.TAG`, or of `timm/NAME`.

    Raises ValueError for a name without weights.
    """
    families.refuse_path(name)
    if name.startswith("timm/"):
        return name.removeprefix("timm/")
    own_name, _, tag = name.partition(".")
    families.find(own_name)
    if own_name not in HUB:
        raise ValueError(
            f"no released weights for {own_name}: train it, or choose from {', '.join(HUB)}"
        )
    model = HUB[own_name]
    return f"{model.partition('.')[0]}.{tag}" if tag else model


def hub_config(model: str) -> Any:
    """timm's `PretrainedCfg` of a model and tag. Raises ValueError with the tags that exist."""
    import timm

    config = pretrained_config(model)
    if config is None or not config.hf_hub_id:
        tags = timm.list_pretrained(f"{model.partition('.')[0]}.*")
        hint = f"choose from {', '.join(tags)}" if tags else "it has none"
        raise ValueError(f"timm knows no released weights {model!r}: {hint}")
    return config


def is_offline() -> bool:
    """Whether the hub's host name cannot be resolved; always False behind a proxy."""
    from huggingface_hub.constants import ENDPOINT

    try:
        return not getproxies() and not socket.getaddrinfo(urlsplit(ENDPOINT).hostname, 443)
    except OSError:
        return True


def is_reachable(seconds: float = 5.0) -> bool:
    """Whether the hub answers within `seconds`, also through a proxy."""
    from huggingface_hub.constants import ENDPOINT, is_offline_mode

    if is_offline_mode() or is_offline():
        return False
    try:
        with urlopen(f"{ENDPOINT}/api/models/timm/resnet18.a1_in1k", timeout=seconds):
            return True
    except (OSError, HTTPException):
        return False


def is_cached(name: str) -> bool:
    """Whether the weights of a name, as for `timm_name`, are in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    repository = str(hub_config(timm_name(name)).hf_hub_id)
    return isinstance(try_to_load_from_cache(repository, WEIGHTS), str)


def hub_preprocessing(model: str, config: Any) -> Preprocessing:
    return Preprocessing(
        resolution=config.input_size[1],
        mean=config.mean,
        std=config.std,
        kernel=config.interpolation,
        # The authors resize to 448 x 448 without keeping the aspect ratio: Alibaba-MIIL/TResNet#6.
        fit="squish" if model.startswith("tresnet") and model.endswith("_448") else "crop",
        crop=config.crop_pct,
    )


def authors_preprocessing(model: str, config: Any) -> Preprocessing:
    """The authors' preprocessing, where timm's configuration differs from it."""
    pre = hub_preprocessing(model, config)
    if model not in AUTHORS_FILES:
        return pre
    release = by_name(Path(AUTHORS_FILES[model]))
    assert release
    return replace(pre, resolution=release.resolution, fit=release.fit, crop=release.crop)
