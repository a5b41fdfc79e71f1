"""Counts the parameters, multiply-adds and bytes of a named network in total and by stage."""

from dataclasses import dataclass
from typing import Any

import torch

from fullstride.measure import tracer
from fullstride.measure.activation_bytes import ActivationBytes, activation_bytes, stages
from fullstride.measure.operators import OPERATOR_KINDS, PRODUCTS
from fullstride.measure.tracer import REST, Cost, LayerCost, Net
from fullstride.measure.workload import Precision, in_training_form
from fullstride.nets import zoo
from fullstride.nets.backbone import Backbone
from fullstride.nets.efficiency import PLAIN, TrainingForm, is_compiled


@dataclass(frozen=True)
class OperatorCost:
    """The cost of one image in one operator, as eager PyTorch runs it: nothing is fused."""

    stage: str  # a key of `activation_bytes.stages`
    module: str  # path of the innermost module that runs the operator
    kind: str  # one of `operators.OPERATOR_KINDS`
    macs: int  # multiply-adds
    activations: int  # output elements of a convolution or linear layer
    read_bytes: int  # activations
    written_bytes: int
    weight_bytes: int  # parameters and statistics, read once for all images of a batch


@dataclass(frozen=True)
class StageCost:
    """The cost of one image in one stage. The sum over stages is the `cost` of the network."""

    stage: str
    params: int  # a parameter that two stages share counts for the first
    macs: int  # multiply-adds
    activations: int  # output elements of convolutions and linear layers
    moved_bytes: int  # activations that its operators read and write


def stage_costs(
    net: Net, resolution: int, precision: Precision = "float16", in_channels: int = 3
) -> list[StageCost]:
    """Return one row per stage, in order. Runs on the meta device, so nothing is computed."""
    net = tracer.on_meta(net)
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
    net: Net, resolution: int, precision: Precision = "float16", in_channels: int = 3
) -> list[OperatorCost]:
    """Return one row per operator that touches memory, in order, with all tensors in `precision`.

    Raises ValueError for an image that the network does not accept.
    """
    size = getattr(torch, precision).itemsize
    run = tracer.trace(net, resolution, in_channels, stages)
    costs = []
    for row, place in zip(run.rows, run.places, strict=True):
        kind = OPERATOR_KINDS[row.kind]
        is_layer = isinstance(place.module, tracer.COUNTED) and kind in PRODUCTS
        moved = (int(elements) * size for elements in (row.read, row.written, row.weights))
        activations = int(row.written) if is_layer else 0
        costs.append(OperatorCost(*place[:2], kind, int(row.macs), activations, *moved))
    return costs


@dataclass(frozen=True, kw_only=True)
class NetworkCost:
    """The cost of one image or clip."""

    name: str
    source: str  # where the network's specification comes from
    frames: int  # of a clip; 0 for images
    resolution: int  # pixels a side
    precision: Precision
    whole: Cost
    stages: tuple[StageCost, ...]
    layers: tuple[LayerCost, ...]
    saved: ActivationBytes | None  # by a training step for its backward pass; None if not asked for
    other_bytes: dict[str, int]  # saved bytes per image of other forms of the step, by form

    @property
    def sum(self) -> StageCost:
        moved = sum(row.moved_bytes for row in self.stages)
        return StageCost("total", self.whole.params, self.whole.macs, self.whole.activations, moved)


def network_cost(
    network: str | zoo.NamedNetwork,
    resolution: int | None = None,
    precision: Precision = "bfloat16",
    *,
    training: bool = False,
    form: TrainingForm = PLAIN,
) -> NetworkCost:
    """Count the cost of a named network: from the zoo, `timm/NAME`, or a path for `zoo.load`.

    The head of a task counts, and layers that it does not use are left out.

    `resolution` defaults to the network's own. `training` adds the bytes of a training step on a
    GPU, eager, and in `form` if that is compiled. Nothing is computed. Raises ValueError for an
    unknown name or an impossible resolution.
    """
    if isinstance(network, str):
        network = zoo.NamedNetwork(network, zoo.find_spec(network))
    name, spec = network.name, network.spec
    side = spec.resolution if resolution is None else resolution
    if side < 1:
        raise ValueError(f"resolution {side}: use a whole number from 1")
    build: Any = network.build
    if network.head is not None:
        if training:
            raise ValueError(f"{name} has the head of a task: leave --train out")
        build = tracer.without_unused(build, side, spec.in_channels)
    stages = stage_costs(build, side, precision, spec.in_channels)

    def trained() -> Backbone:
        return in_training_form(build(), form, name)

    step = activation_bytes(trained, side, precision, spec.in_channels) if training else None
    others: dict[str, int] = {}
    if step is not None:
        names = {row.stage for row in stages}
        stages += [StageCost(stage, 0, 0, 0, 0) for stage in step.by_stage if stage not in names]
        if is_compiled(form.efficiency):
            from fullstride.measure.compiled_bytes import compiled_bytes

            others["compiled"] = compiled_bytes(trained(), side, precision, spec.in_channels)
    return NetworkCost(
        name=name,
        source=spec.source,
        frames=spec.frames,
        resolution=side,
        precision=precision,
        whole=tracer.cost(build, side, spec.in_channels),
        stages=tuple(stages),
        layers=tuple(tracer.layer_costs(build, side, spec.in_channels)),
        saved=step,
        other_bytes=others,
    )
