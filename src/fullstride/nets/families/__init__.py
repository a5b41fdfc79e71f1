"""Names all networks: one file per family, and `SPECS` for all of them."""

from difflib import get_close_matches
from pathlib import Path

from fullstride.io.writing import looks_like_path
from fullstride.nets.families import genet, resnet_rs, tresnet, video
from fullstride.nets.spec import NetSpec
from fullstride.tables import pretrained_networks

SPECS = {**tresnet.SPECS, **resnet_rs.SPECS, **genet.SPECS, **resnet_rs.BASELINES, **video.SPECS}


def find(name: str) -> NetSpec:
    """The spec of a name. Raises ValueError with near misses, and for a path."""
    if name in SPECS:
        return SPECS[name]
    refuse_path(name)
    names = dict.fromkeys([*SPECS, *(row.name for row in pretrained_networks())])
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"choose from {', '.join(SPECS)}, or timm/NAME"
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    raise ValueError(f"no network named {name!r}: {hint}")


def refuse_path(word: str) -> None:
    """Raise ValueError if `word`, which is no network's name, was meant to be a path."""
    if Path(word).exists():
        raise ValueError(f"{word} is a path: give the name of a network here")
    if not word.startswith("timm/") and looks_like_path(word):
        raise ValueError(f"no such file or folder: {word}")
