"""Finds the network and format of a state dict, and converts it to fullstride's names.

Weights are matched by name, never by position. A difference is one line in the file's own names.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fullstride.io.console import count_of
from fullstride.nets import families
from fullstride.nets.blocks import SpaceToDepthStem
from fullstride.nets.families import SPECS
from fullstride.nets.spec import NetSpec
from fullstride.nets.weights import key_maps
from fullstride.nets.weights.reader import first_ten, one_line, unwrap


def inflated(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inflate the kernels of a network of images, `state`, to the shapes of a network of clips.

    A kernel (C_out, C_in, k, k) becomes (C_out, C_in, t, k, k), with zeros in all frames but the
    middle one, so each frame is seen alone at first. Values with other differences stay as they
    are. If both networks have the same layers, a clip of equal frames gives the output of the
    network of images. With a t-th of the kernel in each frame (I3D, arXiv:1705.07750) it would not,
    as the frames beyond the clip are zero.
    """
    result = dict(state)
    for name, value in state.items():
        shape = like[name].shape if name in like else ()
        if len(shape) == 5 and value.ndim == 4 and value.shape == (*shape[:2], *shape[3:]):
            result[name] = value.new_zeros(shape)
            result[name][:, :, shape[2] // 2] = value
    return result


# ---- variables of the TensorFlow 1 code of ResNet-RS

AVERAGE = "ExponentialMovingAverage"
VARIABLES = ("kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance")
NORM_VARIABLES = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
# (height, width, in, out) and (in, out) -> PyTorch's order
AXES = {4: (3, 2, 0, 1), 2: (1, 0)}


def variable_name(parameter: str) -> str:
    """`layer/variable` of a PyTorch parameter `path.leaf`."""
    path, _, leaf = parameter.rpartition(".")
    if path.endswith(".norm"):
        return NORM_VARIABLES.get(leaf, leaf)
    return leaf.replace("weight", "kernel")


def select_variables(state: dict[str, Tensor], ema: bool | None) -> dict[str, Tensor]:
    """Network variables by `layer/variable`, in PyTorch's layout, without optimizer state.

    `ema`: True selects the averaged copies, False the plain variables, None both, for their names.
    Raises ValueError if two variables have one name, or if averages are missing.
    """
    plain: dict[str, Tensor] = {}
    averages: dict[str, Tensor] = {}
    for name, value in state.items():
        scopes = name.removesuffix(":0").split("/")
        group = plain
        if scopes[-1] == AVERAGE:
            scopes, group = scopes[:-1], averages
        if len(scopes) < 2 or scopes[-1] not in VARIABLES:
            continue  # the global step and the optimizer's slots
        variable = "/".join(scopes[-2:])
        if variable in group:
            raise ValueError(
                f"two variables are called {one_line(variable)}: keep one network's variables"
            )
        axes = AXES.get(value.dim())
        group[variable] = value.permute(axes).contiguous() if axes else value
    if ema is None:
        return {**plain, **averages}
    if not ema:
        return plain
    if not averages:
        raise ValueError(
            f"the variables have no {AVERAGE} copies, and the plain batch-norm statistics of this "
            "code are from one batch: export the averages too, or take the plain variables, by "
            "--weights-kind raw (in Python ema=False), if they hold them"
        )
    missing = [variable for variable in plain if variable not in averages]
    if missing:
        raise ValueError(
            f"{count_of(len(missing), 'variable', 'have')} no {AVERAGE} copy: "
            f"{first_ten(missing)}: export all of them"
        )
    return averages


State = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

FORMATS: dict[str, Callable[[NetSpec], key_maps.Pairs]] = {
    "fullstride": key_maps.fullstride,
    "timm": key_maps.timm,
    "official": key_maps.official,
    "tf": key_maps.tf_resnet_rs,
}

# Released heads that are not built here, on bodies that are.
OTHER_HEADS = {
    "head.fc.embedding_generator.": "ASL's bottleneck head",
    "head.decoder.": "an ML-Decoder head",
}

# In-place activated batch norm scales by |w| + eps: mapillary/inplace_abn, issue 92.
MIN_GAIN = 1e-5


class Match(NamedTuple):
    """A state dict compared with one network in one format."""

    format: str
    name: str
    spec: NetSpec  # with the classes and image channels of the weights
    expected: Shapes  # by the format's names
    mismatches: int
    others: tuple[str, ...] = ()  # networks of the same shapes that compute another function


def convert(
    state: State,
    name: str | NetSpec | None = None,
    formats: tuple[str, ...] = tuple(FORMATS),
    *,
    ema: bool = True,
) -> tuple[Match, State]:
    """The network that the weights belong to, and the weights by fullstride's names.

    The weights determine the numbers of classes and image channels. `name`: the required network,
    None to find it; `formats`: the accepted formats; `ema`: see `from_tf`. Raises ValueError with
    the first ten differences if no network fits.

    If several networks have the same shapes, such as `tresnet_v2_l` and `tresnet_v2_l_cars`, the
    network with as many classes in the authors' own format is taken, else the first.
    """
    state = unwrap(state).state
    match = find(normalize(state, ema=None), name)
    if match.format not in formats:
        loader = "timm" if match.format == "fullstride" else match.format  # from_timm takes both
        raise ValueError(f"the weights have {match.format} names: use from_{loader}")
    return match, rename(normalize(state, ema=ema), match)


def check(expected: Shapes, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError, in one line, unless `state` has exactly the expected names and shapes."""
    if line := difference(expected, state):
        raise ValueError(f"the weights do not fit: {line}")


def fit(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> State:
    """The values of `state` for a network whose `state_dict()` is `expected`, on any device.

    Raises ValueError, in one line, unless names and shapes are equal, and every value has the right
    kind: finite floats, or integers for counters.
    """
    check({name: tuple(value.shape) for name, value in expected.items()}, state)
    return {
        name: finite_floats(name, state[name])
        if value.is_floating_point()
        else of_dtype_kind(name, state[name], value.dtype)
        for name, value in expected.items()
    }


def difference(expected: Shapes, state: Mapping[str, Tensor]) -> str:
    missing = [f"-{name}" for name in expected if name not in state]
    unexpected = [f"+{name}" for name in state if name not in expected]
    reshaped = [
        f"{name} {tuple(shape)} is {tuple(state[name].shape)}"
        for name, shape in expected.items()
        if name in state and tuple(state[name].shape) != tuple(shape)
    ]
    return "; ".join(first_ten(lines) for lines in (missing, unexpected, reshaped) if lines)


def normalize(state: State, ema: bool | None) -> State:
    """Weights in PyTorch's layout, without constants. `ema`: which TensorFlow variables."""
    for prefix, head in OTHER_HEADS.items():
        if any(name.startswith(prefix) for name in state):
            raise ValueError(
                f"the weights end in {head} ({prefix}*), which is not built here: use weights with "
                "a plain classifier (head.fc.weight), or replace the head by a classifier"
            )
    if any("/" in name for name in state):
        return select_variables(state, ema)
    blur_kernel = ".op.filt"
    return {name: value for name, value in state.items() if not name.endswith(blur_kernel)}


def find(state: State, name: str | NetSpec | None) -> Match:
    """The network and format that the weights fit; with `name`, that network and its format."""
    if name is None:
        candidates: Mapping[str, NetSpec] = SPECS
    elif isinstance(name, NetSpec):
        candidates = {"the given spec": name}
    else:
        candidates = {name: families.find(name)}
    match = closest(state, candidates)
    if match and not match.mismatches:
        return match
    if name is not None and (other := closest(state, SPECS)) and not other.mismatches:
        raise ValueError(
            f"the weights belong to {other.name} ({other.format} names) and not to "
            f"{next(iter(candidates))}: use {other.name}"
        )
    if match is None:
        raise ValueError(f"no network has weights of these names: {first_ten(list(state))}")
    verdict = "no network fits; the closest is" if name is None else "the weights do not fit"
    raise ValueError(
        f"{verdict} {match.name} ({match.format} names): {difference(match.expected, state)}"
    )


def closest(state: State, specs: Mapping[str, NetSpec]) -> Match | None:
    """The network with the fewest mismatches among the networks with the most similar layers."""
    layers = {name.replace("/", ".").rpartition(".")[0] for name in state}
    distances: dict[tuple[str, str], int] = {}
    for name in sorted(specs, key=lambda name: name.endswith("_tiny")):
        paths = set(key_maps.layer_paths(specs[name]))
        for form, key_map in FORMATS.items():
            mapped = dict(key_map(specs[name]))
            theirs = set(mapped.values())
            if mapped.keys() == paths and theirs & layers:
                distances[form, name] = len(theirs ^ layers)
    least = min(distances.values(), default=0)
    matches = [
        compare(state, form, name, specs[name])
        for (form, name), distance in distances.items()
        if distance == least
    ]
    if not matches:
        return None

    def rank(match: Match) -> tuple[int, bool]:
        own_classes = match.spec.classes == specs[match.name].classes
        return match.mismatches, not (match.format == "official" and own_classes)

    best = min(matches, key=rank)
    # networks with the same shapes that compute another function; timm's names mean only one
    others = [
        match.name
        for match in matches
        if best.format != "timm"
        and (match.mismatches, match.format) == (best.mismatches, best.format)
        and (match.spec.style, match.spec.stages) != (best.spec.style, best.spec.stages)
    ]
    return best._replace(others=tuple(others))


def compare(state: State, form: str, name: str, spec: NetSpec) -> Match:
    names = parameter_names(form, spec)
    bias, stem = state.get(names["head.fc.bias"]), state.get(next(iter(names.values())))
    if bias is not None and bias.dim() == 1:
        spec = replace(spec, classes=len(bias))
    folded = SpaceToDepthStem.stride**2 if spec.stem is SpaceToDepthStem else 1
    if stem is not None and stem.dim() in (4, 5) and stem.shape[1] % folded == 0:
        spec = replace(spec, in_channels=stem.shape[1] // folded)
    shapes = parameter_shapes(spec)
    # Some files count batches and some do not; nothing is computed from the count.
    expected = {
        names[key]: shape
        for key, shape in shapes.items()
        if names[key] in state or not is_counter(key)
    }
    reshaped = sum(key in state and state[key].shape != shape for key, shape in expected.items())
    return Match(form, name, spec, expected, reshaped + len(expected.keys() ^ state.keys()))


@lru_cache(maxsize=128)
def parameter_shapes(spec: NetSpec) -> dict[str, tuple[int, ...]]:
    state = key_maps.meta_network(spec).state_dict()
    return {key: tuple(value.shape) for key, value in state.items()}


def parameter_names(form: str, spec: NetSpec) -> dict[str, str]:
    """Fullstride's parameter names -> the format's, the stem's convolution first."""
    paths = dict(FORMATS[form](spec))
    names = {}
    for key in parameter_shapes(spec):
        path, _, leaf = key.rpartition(".")
        if form == "tf":
            names[key] = f"{paths[path]}/{variable_name(key)}"
        else:
            names[key] = f"{paths[path]}.{leaf}"
    return names


def is_counter(key: str) -> bool:
    return key.endswith(".num_batches_tracked")


def rename(state: State, match: Match) -> State:
    """The weights by fullstride's names, checked."""
    check(match.expected, state)
    gain_is_magnitude = match.format == "official" and match.spec.stem is SpaceToDepthStem
    renamed: State = {}
    for key, name in parameter_names(match.format, match.spec).items():
        if is_counter(key):
            count = state.get(name, torch.zeros((), dtype=torch.long))
            renamed[key] = of_dtype_kind(name, count, torch.long)
            continue
        value = finite_floats(name, state[name])
        is_gain = gain_is_magnitude and key.endswith(".norm.weight")
        renamed[key] = value.abs() + MIN_GAIN if is_gain else value
    return renamed


def finite_floats(name: str, value: Tensor) -> Tensor:
    """`value` as float32 or float64. Raises ValueError unless every number is finite."""
    if not value.is_floating_point():
        raise ValueError(
            f"{one_line(name)} is {value.dtype}: weights are float16, bfloat16, float32 or float64"
        )
    if value.element_size() < 4:
        value = value.float()
    if not value.isfinite().all():
        raise ValueError(
            f"{one_line(name)} holds a number that is not finite: the training run diverged"
        )
    return value


def of_dtype_kind(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers converted to `dtype`, or booleans. Raises ValueError for other kinds."""
    is_inexact = value.is_floating_point() or value.is_complex()
    if (value.dtype == torch.bool) != (dtype == torch.bool) or is_inexact:
        raise ValueError(f"{one_line(name)} is {value.dtype}: it is {dtype} in the network")
    return value.to(dtype)
