"""Which networks have a name? One file per family; `SPECS` holds them all."""

from difflib import get_close_matches

from fullstride.nets.families import genet, resnet, resnet_rs, tresnet
from fullstride.nets.spec import NetSpec

SPECS = {**tresnet.SPECS, **resnet_rs.SPECS, **genet.SPECS, **resnet.SPECS}


def find(name: str) -> NetSpec:
    """The spec of a name. Raises ValueError with near misses."""
    if name in SPECS:
        return SPECS[name]
    if name in (f"masternet_{row}" for row in range(1, 21)):
        raise ValueError(
            f"no network named {name!r}: of arXiv:2006.14090 Table 6 only masternet_1 and "
            "masternet_6 are built in"
        )
    close = get_close_matches(name, SPECS, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"choose from {', '.join(SPECS)}, or timm/NAME"
    )
    raise ValueError(f"no network named {name!r}: {hint}")
