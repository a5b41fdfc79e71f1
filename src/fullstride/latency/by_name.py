"""Which operators does a name run? One that the zoo lists, `timm/NAME`, or the folder of a run or bundle."""

from functools import partial
from pathlib import Path

from fullstride.latency.spec_operators import operators_of
from fullstride.measure.cost.operators import Operators, traced
from fullstride.nets import zoo
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import TimmNetwork, TimmSpec


def named_operators(name: str, resolution: int | None = None) -> tuple[Operators, int]:
    """The operators, and pixels a side: the network's own where none are given. Raises ValueError in one line."""
    spec = zoo.load(name).net.spec if Path(name).exists() else zoo.spec(name)
    side = spec.resolution if resolution is None else resolution
    return spec_operators(spec, side), side


def spec_operators(spec: NetSpec | TimmSpec, resolution: int) -> Operators:
    if isinstance(spec, NetSpec):
        return operators_of(spec, resolution)
    return traced(partial(TimmNetwork, spec), resolution, spec.in_channels)
