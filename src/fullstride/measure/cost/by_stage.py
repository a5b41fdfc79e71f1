"""What does each operator and each stage of a network ask for? Parameters, multiply-adds, activations and bytes.

MACs are multiply-adds, FLOPs are 2 x MACs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fullstride.measure.cost.flops import COUNTED, on_meta
from fullstride.measure.cost.operators import KINDS, PRODUCTS, Tracer
from fullstride.measure.memory.activation_bytes import stages
from fullstride.measure.workload import Precision
from fullstride.nets.spec import MOST_CHANNELS, check_range

REST = "between stages"  # what no stage holds, as in `saved`


@dataclass(frozen=True)
class OperatorCost:
    """Of one image through one operator, each by itself as an eager engine runs it: nothing is fused."""

    stage: str  # of `saved.stages`
    module: str  # path of the innermost module that runs it
    kind: str  # of `operators.KINDS`
    macs: int  # multiply-adds
    activations: int  # elements that a convolution or linear layer puts out
    read_bytes: int  # of activations
    written_bytes: int
    weight_bytes: int  # parameters and statistics, read once for all images of a batch


@dataclass(frozen=True)
class StageCost:
    """Of one image through one stage. The rows of all stages add up to `cost` of the network."""

    stage: str
    params: int  # a parameter that two stages share is of the first
    macs: int  # multiply-adds
    activations: int  # elements put out by convolutions and linear layers
    moved_bytes: int  # activations that its operators read and write


def stage_costs(
    net: nn.Module | Callable[[], nn.Module],
    resolution: int,
    precision: Precision = "float16",
    in_channels: int = 3,
) -> list[StageCost]:
    """One row per stage, in the order of the network. Nothing is computed: it runs on the meta device."""
    net = on_meta(net)
    params, seen = {}, set()
    for stage, modules in [*stages(net).items(), (REST, [net])]:
        own = {
            id(p): p.numel() for module in modules for p in module.parameters() if id(p) not in seen
        }
        params[stage] = sum(own.values())
        seen |= own.keys()
    found = {stage: [0, 0, 0] for stage in params}
    for row in operator_costs(net, resolution, precision, in_channels):
        for i, value in enumerate((row.macs, row.activations, row.read_bytes + row.written_bytes)):
            found[row.stage][i] += value
    return [StageCost(s, size, *found[s]) for s, size in params.items() if size or any(found[s])]


def operator_costs(
    net: nn.Module | Callable[[], nn.Module],
    resolution: int,
    precision: Precision = "float16",
    in_channels: int = 3,
) -> list[OperatorCost]:
    """One row per operator that touches memory, in the order they run. All tensors are taken to be of `precision`.

    Raises ValueError for images that the network does not take.
    """
    check_range("resolution", resolution, MOST_CHANNELS)
    net, size = on_meta(net), getattr(torch, precision).itemsize
    stage_of = {id(module): stage for stage, modules in stages(net).items() for module in modules}
    image = torch.empty(1, in_channels, resolution, resolution, device="meta")
    tracer = Tracer(image)
    where, places = [(REST, "", net)], []

    def mark() -> None:
        places.extend(where[-1:] * (len(tracer.rows) - len(places)))

    def enter(path: str, module: nn.Module, _: object) -> None:
        mark()
        where.append((stage_of.get(id(module), where[-1][0]), path, module))

    def leave(*_: object) -> None:
        mark()
        where.pop()

    for path, module in net.named_modules():
        module.register_forward_pre_hook(partial(enter, path))
        module.register_forward_hook(leave)
    try:
        with torch.no_grad(), tracer:
            net(image)
    except (RuntimeError, AssertionError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the network takes no {in_channels} x {resolution} x {resolution} image: {why}"
        ) from None
    found = []
    for row, (stage, path, module) in zip(tracer.rows, places, strict=True):
        counted = isinstance(module, COUNTED) and KINDS[row.kind] in PRODUCTS
        moved = (int(elements) * size for elements in (row.read, row.written, row.weights))
        made = int(row.written) if counted else 0
        found.append(OperatorCost(stage, path, KINDS[row.kind], int(row.macs), made, *moved))
    return found
