"""What does each operator and each stage cost? Parameters, multiply-adds, activations and bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fullstride.measure.cost.flops import COUNTED, on_meta, unfit_image
from fullstride.measure.cost.operators import OPERATOR_KINDS, PRODUCTS
from fullstride.measure.cost.stages import stages
from fullstride.measure.cost.tracer import Tracer
from fullstride.measure.workload import Precision
from fullstride.nets.backbone import batch_shape
from fullstride.nets.spec import MOST_CHANNELS
from fullstride.strict_json import check_range

REST = "between stages"  # operators outside of all stages


@dataclass(frozen=True)
class OperatorCost:
    """Of one image through one operator, as eager PyTorch runs it: nothing is fused."""

    stage: str  # of `stages.stages`
    module: str  # path of the innermost module that runs it
    kind: str  # of `operators.OPERATOR_KINDS`
    macs: int  # multiply-adds
    activations: int  # output elements of a convolution or linear layer
    read_bytes: int  # of activations
    written_bytes: int
    weight_bytes: int  # parameters and statistics, read once for all images of a batch


@dataclass(frozen=True)
class StageCost:
    """Of one image through one stage. The stages add up to `cost` of the network."""

    stage: str
    params: int  # a parameter that two stages share counts for the first
    macs: int  # multiply-adds
    activations: int  # output elements of convolutions and linear layers
    moved_bytes: int  # activations that its operators read and write


def stage_costs(
    net: nn.Module | Callable[[], nn.Module],
    resolution: int,
    precision: Precision = "float16",
    in_channels: int = 3,
) -> list[StageCost]:
    """One row per stage, in order. It runs on the meta device, so that nothing is computed."""
    net = on_meta(net)
    params: dict[str, int] = {}
    counted: set[int] = set()
    for stage, modules in [*stages(net).items(), (REST, [net])]:
        sizes = {id(p): p.numel() for module in modules for p in module.parameters()}
        params[stage] = sum(size for key, size in sizes.items() if key not in counted)
        counted |= sizes.keys()
    sums = {stage: [0, 0, 0] for stage in params}
    for row in operator_costs(net, resolution, precision, in_channels):
        for i, value in enumerate((row.macs, row.activations, row.read_bytes + row.written_bytes)):
            sums[row.stage][i] += value
    return [StageCost(s, size, *sums[s]) for s, size in params.items() if size or any(sums[s])]


def operator_costs(
    net: nn.Module | Callable[[], nn.Module],
    resolution: int,
    precision: Precision = "float16",
    in_channels: int = 3,
) -> list[OperatorCost]:
    """One row per operator that touches memory, in order, as if all tensors were of `precision`.

    Raises ValueError for an image that the network does not take.
    """
    check_range("resolution", resolution, MOST_CHANNELS)
    net, size = on_meta(net), getattr(torch, precision).itemsize
    stage_of = {id(module): stage for stage, modules in stages(net).items() for module in modules}
    image = torch.empty(batch_shape(net, 1, in_channels, resolution), device="meta")
    tracer = Tracer(image)
    active, positions = [(REST, "", net)], []  # (stage, path, module): the stack, and of each row

    def assign_rows() -> None:
        positions.extend(active[-1:] * (len(tracer.rows) - len(positions)))

    def enter(path: str, module: nn.Module, _: object) -> None:
        assign_rows()
        active.append((stage_of.get(id(module), active[-1][0]), path, module))

    def leave(*_: object) -> None:
        assign_rows()
        active.pop()

    for path, module in net.named_modules():
        module.register_forward_pre_hook(partial(enter, path))
        module.register_forward_hook(leave)
    with unfit_image(image), torch.no_grad(), tracer:
        net(image)
    costs = []
    for row, (stage, path, module) in zip(tracer.rows, positions, strict=True):
        kind = OPERATOR_KINDS[row.kind]
        is_layer = isinstance(module, COUNTED) and kind in PRODUCTS
        moved = (int(elements) * size for elements in (row.read, row.written, row.weights))
        activations = int(row.written) if is_layer else 0
        costs.append(OperatorCost(stage, path, kind, int(row.macs), activations, *moved))
    return costs
