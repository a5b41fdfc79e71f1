"""How are released weights loaded? From the authors' files, timm, torchvision and TensorFlow 1.

Every function compares all names and shapes first and raises ValueError with the difference.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec
from fullstride.nets.weights.convert import State, check, convert, identify
from fullstride.nets.weights.reader import from_arrays, read

__all__ = ["check", "convert", "from_official", "from_tf", "from_timm", "identify", "load", "read"]


def load(path: str | Path, name: str | NetSpec | None = None) -> Network:
    """The network in a released file of any format; `name`: the network that it must hold."""
    state = read(path)
    try:
        spec, state = convert(state, name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    net = Network(spec)
    net.load_state_dict(state)
    return net


def from_timm(state: State, name: str | NetSpec) -> State:
    """A state dict by timm's names, or by torchvision's of a ResNet, renamed to fullstride's.

    A state dict by fullstride's names is returned unchanged.
    """
    return convert(state, name, ("timm", "fullstride"))[1]


def from_official(path: str | Path | State, name: str | NetSpec) -> State:
    """The authors' weights of TResNet or GENet. Those that timm has converted are not changed."""
    state = read(path) if isinstance(path, str | Path) else path
    return convert(state, name, ("official", "timm", "fullstride"))[1]


def from_tf(
    path_or_arrays: str | Path | Mapping[str, np.ndarray | Tensor],
    name: str | NetSpec,
    *,
    ema: bool = True,
) -> State:
    """The TensorFlow 1 variables of ResNet-RS by name, in an `.npz` file or a dict.

    `ema` selects the averaged copies of all variables, those of the batch-norm statistics
    included; `ema=False` selects the plain variables.
    """
    if isinstance(path_or_arrays, str | Path):
        state = read(path_or_arrays)
    else:
        state = from_arrays(path_or_arrays)
    return convert(state, name, ("tf",), ema=ema)[1]
