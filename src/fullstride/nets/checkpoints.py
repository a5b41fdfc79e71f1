"""How do released weights become ours? From the authors' files, from timm and torchvision, from TensorFlow 1.

Every load compares all names and shapes first, in the file's own names, and says the difference in one line.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fullstride.nets import families
from fullstride.nets.blocks import SpaceToDepthStem
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec
from fullstride.nets.weights import key_maps
from fullstride.nets.weights.reader import from_arrays, one_line, read, unwrap

__all__ = ["check", "convert", "from_official", "from_tf", "from_timm", "identify", "load", "read"]

State = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

FORMATS: dict[str, Callable[[NetSpec], key_maps.Pairs]] = {
    "fullstride": key_maps.ours,
    "timm": key_maps.timm,
    "official": key_maps.official,
    "tf": key_maps.tf_resnet_rs,
}
READERS = {
    "fullstride": "from_timm",
    "timm": "from_timm",
    "official": "from_official",
    "tf": "from_tf",
}

# Released with networks of ours as their body.
OTHER_HEADS = {
    "head.fc.embedding_generator.": "ASL's bottleneck head",
    "head.decoder.": "an ML-Decoder head",
}

GAIN_FLOOR = (
    1e-5  # in-place activated batch norm scales by |w| + eps: mapillary/inplace_abn, issue 92
)

TF_LEAVES = ("kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance")
TF_NORM = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
AVERAGE = "ExponentialMovingAverage"


def load(path: str | Path, name: str | NetSpec | None = None) -> Network:
    """The network in a released file of any format; `name` makes sure that it is this one."""
    state = read(path)
    try:
        spec, state = convert(state, name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    net = Network(spec)
    net.load_state_dict(state)
    return net


def convert(state: State, name: str | NetSpec | None = None) -> tuple[NetSpec, State]:
    """What the weights are, and the weights under our names. Classes and image channels are those of the weights.

    The V2 of the TResNet repository (Stanford Cars) has the shapes of `tresnet_v2_l` and other slopes:
    give its spec, as `fullstride.nets.families.tresnet` describes it.
    """
    return adopt(unwrap(state), name, tuple(FORMATS))


def from_timm(state: State, name: str | NetSpec) -> State:
    """timm's names, or torchvision's of a ResNet, to ours. Weights under our names stay as they are."""
    return adopt(unwrap(state), name, ("timm", "fullstride"))[1]


def from_official(path: str | Path | State, name: str | NetSpec) -> State:
    """The authors' files of TResNet and GENet. What timm has converted already is not converted again."""
    state = read(path) if isinstance(path, str | Path) else unwrap(path)
    return adopt(state, name, ("official", "timm", "fullstride"))[1]


def from_tf(
    path_or_arrays: str | Path | Mapping[str, np.ndarray | Tensor],
    name: str | NetSpec,
    *,
    ema: bool = True,
) -> State:
    """The TensorFlow 1 variables of ResNet-RS by name, in an `.npz` file or a dict.

    The averaged copies are used, also those of the batch-norm statistics; `ema=False` takes the plain variables.
    """
    state = (
        read(path_or_arrays)
        if isinstance(path_or_arrays, str | Path)
        else from_arrays(path_or_arrays)
    )
    return adopt(state, name, ("tf",), ema=ema)[1]


def identify(state: State) -> tuple[str, str]:
    """Format and network of the weights, by names and shapes; classes and image channels may be any."""
    fit = find(prepare(unwrap(state), ema=None), None)
    return fit.format, fit.name


def check(expected: Shapes, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError, in one line, unless `state` has exactly the expected names and shapes."""
    if line := difference(expected, state):
        raise ValueError(f"the weights do not fit: {line}")


def difference(expected: Shapes, state: Mapping[str, Tensor]) -> str:
    missing = [f"-{name}" for name in expected if name not in state]
    unexpected = [f"+{name}" for name in state if name not in expected]
    misshapen = [
        f"{name} {tuple(shape)} is {tuple(state[name].shape)}"
        for name, shape in expected.items()
        if name in state and tuple(state[name].shape) != tuple(shape)
    ]
    return "; ".join(first_ten(lines) for lines in (missing, unexpected, misshapen) if lines)


def first_ten(lines: list[str]) -> str:
    more = f" and {len(lines) - 10} more" if len(lines) > 10 else ""
    return ", ".join(one_line(line) for line in lines[:10]) + more


class Fit(NamedTuple):
    """One network in one format, held against some weights."""

    format: str
    name: str
    spec: NetSpec  # with the classes and image channels of the weights
    expected: Shapes  # in the names of the format
    faults: int


def adopt(
    state: State, name: str | NetSpec | None, formats: tuple[str, ...], ema: bool = True
) -> tuple[NetSpec, State]:
    """The weights under our names, provided that they come in one of `formats`."""
    fit = find(prepare(state, ema=None), name)
    if fit.format not in formats:
        raise ValueError(f"the weights have {fit.format} names: use {READERS[fit.format]}")
    return fit.spec, translate(prepare(state, ema=ema), fit)


def prepare(state: State, ema: bool | None) -> State:
    """Weights in PyTorch's layout and without constants. `ema`: which TensorFlow variables; None for any."""
    for start, head in OTHER_HEADS.items():
        if any(name.startswith(start) for name in state):
            raise ValueError(
                f"the weights end in {head} ({start}*), which is not built here: use weights with a plain "
                "classifier (head.fc.weight), or put one of your own in its place"
            )
    if any("/" in name for name in state):
        return tf_variables(state, ema)
    return {
        name: value for name, value in state.items() if not name.endswith(".op.filt")
    }  # a blur's constant


def tf_variables(state: State, ema: bool | None) -> State:
    plain: State = {}
    averages: State = {}
    for name, value in state.items():
        parts = name.removesuffix(":0").split("/")
        found = plain
        if parts[-1] == AVERAGE:
            parts, found = parts[:-1], averages
        if len(parts) < 2 or parts[-1] not in TF_LEAVES:
            continue  # the step counter and what the optimizer keeps
        variable = "/".join(parts[-2:])
        if variable in found:
            raise ValueError(
                f"two variables are called {one_line(variable)}: keep those of one network"
            )
        order = {4: (3, 2, 0, 1), 2: (1, 0)}.get(value.dim())  # height, width, in, out; and in, out
        found[variable] = value.permute(order).contiguous() if order else value
    if ema is None:
        return {**plain, **averages}
    if not ema:
        return plain
    if not averages:
        raise ValueError(
            f"the variables have no {AVERAGE} copies, and the plain batch-norm statistics of this code are those "
            "of one batch: export the averages too, or say ema=False if the plain variables hold them"
        )
    alone = [variable for variable in plain if variable not in averages]
    if alone:
        raise ValueError(
            f"{len(alone)} variables have no {AVERAGE} copy: {first_ten(alone)}: export all of them"
        )
    return averages


def find(state: State, name: str | NetSpec | None) -> Fit:
    """The network and format that the weights fit, or the network called `name` and its format."""
    wanted = (
        SPECS
        if name is None
        else {"the given spec": name}
        if isinstance(name, NetSpec)
        else {name: families.find(name)}
    )
    fit = closest(state, wanted)
    if fit and not fit.faults:
        return fit
    if name is not None and (other := closest(state, SPECS)) and not other.faults:
        raise ValueError(
            f"the weights are those of {other.name} ({other.format} names) and not of {next(iter(wanted))}: "
            f"give name={other.name!r}"
        )
    if fit is None:
        raise ValueError(f"no network has weights of these names: {first_ten(list(state))}")
    verdict = "no network fits; the closest is" if name is None else "the weights do not fit"
    raise ValueError(
        f"{verdict} {fit.name} ({fit.format} names): {difference(fit.expected, state)}"
    )


def closest(state: State, specs: Mapping[str, NetSpec]) -> Fit | None:
    """Of the networks whose layers have the most similar names, the one with the fewest faults."""
    layers = {name.replace("/", ".").rpartition(".")[0] for name in state}
    distance: dict[tuple[str, str], int] = {}
    for name in sorted(specs, key=lambda name: name.endswith("_tiny")):
        ours = {path for path, _ in key_maps.ours(specs[name])}
        for form, names in FORMATS.items():
            paths = dict(names(specs[name]))
            theirs = set(paths.values())
            if paths.keys() == ours and theirs & layers:
                distance[form, name] = len(theirs ^ layers)
    least = min(distance.values(), default=0)
    fits = [
        compare(state, form, name, specs[name])
        for (form, name), far in distance.items()
        if far == least
    ]
    return min(fits, key=lambda fit: fit.faults, default=None)


def compare(state: State, form: str, name: str, spec: NetSpec) -> Fit:
    words = vocabulary(form, spec)
    bias, stem = state.get(words["head.fc.bias"]), state.get(next(iter(words.values())))
    if bias is not None and bias.dim() == 1:
        spec = replace(spec, classes=len(bias))
    folded = SpaceToDepthStem.stride**2 if spec.stem is SpaceToDepthStem else 1
    if stem is not None and stem.dim() == 4 and stem.shape[1] % folded == 0:
        spec = replace(spec, in_channels=stem.shape[1] // folded)
    shapes = our_shapes(spec)
    # Files differ in whether they count batches; nothing is computed from it.
    expected = {words[key]: shapes[key] for key in shapes if words[key] in state or not counts(key)}
    wrong = sum(key in state and state[key].shape != shape for key, shape in expected.items())
    return Fit(form, name, spec, expected, wrong + len(expected.keys() ^ state.keys()))


@lru_cache(maxsize=128)
def our_shapes(spec: NetSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {key: tuple(value.shape) for key, value in Network(spec).state_dict().items()}


def vocabulary(form: str, spec: NetSpec) -> dict[str, str]:
    """Our tensor names to the format's, the stem's convolution first."""
    paths = dict(FORMATS[form](spec))
    words = {}
    for key in our_shapes(spec):
        path, _, leaf = key.rpartition(".")
        if form == "tf":
            leaf = (
                TF_NORM.get(leaf, leaf)
                if path.endswith(".norm")
                else leaf.replace("weight", "kernel")
            )
        words[key] = f"{paths[path]}{'/' if form == 'tf' else '.'}{leaf}"
    return words


def counts(key: str) -> bool:
    return key.endswith(".num_batches_tracked")


def translate(state: State, fit: Fit) -> State:
    check(fit.expected, state)
    gain_is_magnitude = fit.format == "official" and fit.spec.stem is SpaceToDepthStem
    ours: State = {}
    for key, theirs in vocabulary(fit.format, fit.spec).items():
        if counts(key):
            ours[key] = (
                state[theirs].long() if theirs in state else torch.zeros((), dtype=torch.long)
            )
            continue
        value = numbers(theirs, state[theirs])
        ours[key] = (
            value.abs() + GAIN_FLOOR
            if gain_is_magnitude and key.endswith(".norm.weight")
            else value
        )
    return ours


def numbers(name: str, value: Tensor) -> Tensor:
    """Float32 or float64, and every one finite."""
    if not value.is_floating_point():
        raise ValueError(
            f"{one_line(name)} is {value.dtype}: weights are float16, bfloat16, float32 or float64"
        )
    if value.element_size() < 4:
        value = value.float()
    if not value.isfinite().all():
        raise ValueError(
            f"{one_line(name)} holds a number that is not finite: the file is of a training that failed"
        )
    return value
