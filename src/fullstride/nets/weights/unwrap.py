"""Which tensors of a checkpoint are the network's? Its wrappers and prefixes are removed."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fullstride.nets.load_options import WeightsKind
from fullstride.nets.weights.text import one_line

# Names that training programs give to the weights of the last step, and to their average. The last
# of each are those of our own checkpoint.pt.
RAW = ("state_dict", "model_state_dict", "model", "net")
AVERAGED = (
    "state_dict_ema",
    "model_ema_state_dict",
    "model_ema",
    "ema_state_dict",
    "ema_model",
    "ema",
    "average",
)
MAX_DEPTH = 4  # of wrappers in wrappers

# Of DistributedDataParallel and AveragedModel, Lightning, and timm's networks in ours.
PREFIXES = ("module.", "model.", "net.")
COMPILED = "_orig_mod."  # of torch.compile, at any module
COUNTER = "n_averaged"  # of torch.optim.swa_utils.AveragedModel


class Unwrapped(NamedTuple):
    """The named tensors of a file."""

    state: dict[str, Tensor]
    key: str  # the wrapper that they were in; "" for none
    other: str  # the wrapper with weights of the other kind, which were not taken; "" for none


def unwrap(data: Any, kind: WeightsKind = "averaged") -> Unwrapped:
    """The named tensors in `data`, without dicts and prefixes around them.

    Of raw and averaged weights those of `kind` are taken. Raises ValueError where there are no
    named tensors, and where `kind` is raw and only averaged ones are there.
    """
    key = other = ""
    for _ in range(MAX_DEPTH):
        raw, averaged = (present(data, keys) for keys in (RAW, AVERAGED))
        if not (raw or averaged):
            break
        if kind == "raw" and not raw:
            raise ValueError(f"holds averaged weights only, in {averaged}: leave out raw")
        key, unused = (averaged, raw) if averaged and kind == "averaged" else (raw, averaged)
        other = unused or other
        data = data[key]
    return Unwrapped(without_prefixes(named_tensors(data)), key, other)


def named_tensors(data: Any) -> dict[str, Tensor]:
    """The tensors of a mapping by their names. Raises ValueError if there are none."""
    if not isinstance(data, Mapping):
        raise ValueError(
            f"holds a {type(data).__name__} and not tensors by name: save a state_dict()"
        )
    state = {
        name: value.detach()
        for name, value in data.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    if not state:
        names = ", ".join(one_line(str(name)) for name in list(data)[:10])
        raise ValueError(f"holds no tensors by name, only: {names or 'nothing'}")
    return state


def present(data: Any, keys: tuple[str, ...]) -> str:
    """The first of `keys` under which `data` has tensors by name; "" if there is none."""
    if not isinstance(data, Mapping):
        return ""
    return next((key for key in keys if holds_tensors(data.get(key))), "")


def holds_tensors(data: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether `data` is a mapping with tensors, also in mappings in it."""
    return (
        isinstance(data, Mapping)
        and depth > 0
        and any(
            isinstance(value, Tensor) or holds_tensors(value, depth - 1) for value in data.values()
        )
    )


def without_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state without what wrappers of modules put before every name."""
    names = {name: name.replace(COMPILED, "") for name in state}
    if COUNTER in names and all(name.startswith("module.") for name in names if name != COUNTER):
        del names[COUNTER]
    for prefix in common_prefixes(list(names.values())):
        names = {name: short.removeprefix(prefix) for name, short in names.items()}
    if len(set(names.values())) < len(names):  # two tensors would have one name
        return state
    return {short: state[name] for name, short in names.items()}


def common_prefixes(names: list[str]) -> Iterator[str]:
    """Those of `PREFIXES` that all names begin with, the outermost first."""
    while names:
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in names)), "")
        if not prefix:
            return
        yield prefix
        names = [name.removeprefix(prefix) for name in names]
