"""Loads released weights: files of authors, timm, torchvision and TensorFlow 1.

Every function compares all names and shapes first and raises ValueError with the difference.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fullstride.nets.backbone import Backbone
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import WeightsKind
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import TimmNetwork, timm_spec
from fullstride.nets.weights.convert import Match, State, check, convert, find, fit, normalize
from fullstride.nets.weights.hub import ReleasedFile, by_name, by_shape, has_shape
from fullstride.nets.weights.reader import AVERAGED, Unwrapped, from_arrays, read, read_wrapped

__all__ = ["check", "convert", "from_official", "from_tf", "from_timm", "load", "read"]


class Loaded(NamedTuple):
    """The network in a file of weights, and facts about the file."""

    net: Backbone
    name: str  # of the network; "" where a spec was given
    release: ReleasedFile | None  # the released file with this name and these shapes
    notes: tuple[str, ...]  # the automatic choices, a line each


def load(path: str | Path, name: str | NetSpec | None = None) -> Network:
    """The network in a released file of any format; `name`: the network that it must hold.

    If a checkpoint has raw and averaged weights, the averaged weights are taken.
    """
    net = load_with_notes(path, name).net
    assert isinstance(net, Network)
    return net


def load_with_notes(
    path: str | Path, name: str | NetSpec | None = None, kind: WeightsKind = "averaged"
) -> Loaded:
    """`load` the averaged or the raw weights, with facts about the file."""
    weights = read_wrapped(path, kind)
    release = named = by_name(Path(path))
    try:
        if name is None and release is not None:
            with suppress(ValueError):  # the weights are of another network than the file's name
                find(normalize(weights.state, ema=None), release.network)
                name = release.network
        match, state = convert(weights.state, name, ema=kind == "averaged")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    net = Network(match.spec)
    net.load_state_dict(state)
    if release is None and match.format in ("official", "tf"):
        release = by_shape(match.name, match.spec.classes)
    if release and (release.network != match.name or not has_shape(release, match.spec)):
        release = None
    return Loaded(
        net=net,
        name="" if isinstance(name, NetSpec) else match.name,
        release=release,
        notes=tuple(notes(weights, match, named)),
    )


def load_timm(path: str | Path, name: str, kind: WeightsKind = "averaged") -> Loaded:
    """timm's network `name` with the weights and the classes of a file.

    Raises ValueError, with the differences, for weights of another network.
    """
    weights = read_wrapped(path, kind)
    net = timm_network(name, weights.state)
    try:
        net.net.load_state_dict(fit(net.net.state_dict(), weights.state))
    except ValueError as error:
        raise ValueError(f"{path}: not weights of timm/{name}: {error}") from None
    return Loaded(net, f"timm/{name}", None, tuple(wrapper_notes(weights)))


def timm_network(name: str, state: State) -> TimmNetwork:
    """timm's network `name` with as many classes as the classifier of `state`."""
    net = TimmNetwork(timm_spec(name))
    classifier = state.get(f"{net.classifier.removeprefix('net.')}.weight")
    if classifier is not None and len(classifier) != net.spec.classes:
        net = TimmNetwork(timm_spec(name, classes=len(classifier)))
    return net


def wrapper_notes(weights: Unwrapped) -> Iterator[str]:
    if weights.other:
        taken, other = (
            f"the {'averaged' if key in AVERAGED else 'raw'} weights ({key})"
            for key in (weights.key, weights.other)
        )
        yield f"{taken} are used, not {other}: --weights-kind chooses"


def notes(weights: Unwrapped, match: Match, named: ReleasedFile | None) -> Iterator[str]:
    yield from wrapper_notes(weights)
    if named and named.network != match.name:
        yield f"the weights are taken for {match.name}, by the name of the file {named.network}"
    elif match.others:
        names = " and ".join(match.others)
        yield f"the weights are taken for {match.name}, and fit {names}: --network chooses"


def from_timm(state: State, name: str | NetSpec) -> State:
    """Rename a state dict with timm's names, or torchvision's of a ResNet, to fullstride's names.

    A state dict with fullstride's names is returned unchanged.
    """
    return convert(state, name, ("timm", "fullstride"))[1]


def from_official(path: str | Path | State, name: str | NetSpec) -> State:
    """The authors' weights of TResNet or GENet; weights that timm converted stay unchanged."""
    state = read(path) if isinstance(path, str | Path) else path
    return convert(state, name, ("official", "timm", "fullstride"))[1]


def from_tf(
    path_or_arrays: str | Path | Mapping[str, np.ndarray | Tensor],
    name: str | NetSpec,
    *,
    ema: bool = True,
) -> State:
    """The weights of ResNet-RS from TensorFlow 1 variables by name, in an `.npz` file or a dict.

    `ema` selects the averaged copies of all variables, including the batch-norm statistics;
    `ema=False` selects the plain variables.
    """
    if isinstance(path_or_arrays, str | Path):
        state = read(path_or_arrays)
    else:
        state = from_arrays(path_or_arrays)
    return convert(state, name, ("tf",), ema=ema)[1]
