"""What does a named network cost, as a whole and by stage? Parameters, multiply-adds and bytes."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fullstride.measure.cost.by_stage import StageCost, stage_costs
from fullstride.measure.cost.flops import Cost, LayerCost, cost, layer_costs, without_unused
from fullstride.measure.memory.activation_bytes import ActivationBytes, activation_bytes
from fullstride.measure.workload import Precision, in_training_form
from fullstride.nets import zoo
from fullstride.nets.backbone import Backbone
from fullstride.nets.efficiency import PLAIN, TrainingForm, is_compiled
from fullstride.nets.spec import NetSpec


@dataclass(frozen=True, kw_only=True)
class NetworkCost:
    """The cost of one image, or clip."""

    name: str
    source: str  # of the network's specification
    frames: int  # of a clip; 0: of images
    resolution: int  # pixels a side
    precision: Precision
    whole: Cost
    stages: tuple[StageCost, ...]
    layers: tuple[LayerCost, ...]
    saved: (
        ActivationBytes | None
    )  # tensors that a training step saves for backward; None if not asked for
    other_bytes: dict[str, int]  # that the same step saves per image in other forms, by their name

    @property
    def sum(self) -> StageCost:
        moved = sum(row.moved_bytes for row in self.stages)
        return StageCost("total", self.whole.params, self.whole.macs, self.whole.activations, moved)

    @property
    def saved_by_stage(self) -> dict[str, int]:
        """Bytes; {} where they were not asked for."""
        if self.saved is None:
            return {}
        return {**self.saved.by_stage, self.sum.stage: self.saved.bytes_per_image}


def network_cost(
    network: str | zoo.NamedNetwork,
    resolution: int | None = None,
    precision: Precision = "bfloat16",
    *,
    training: bool = False,
    form: TrainingForm = PLAIN,
) -> NetworkCost:
    """The cost of a network of the zoo, `timm/NAME`, what `zoo.load` opens at a path, or another.

    With the head of a task, that is counted with what it computes of the maps, and layers that are
    not used then are left out.

    `resolution` is by default the network's own. With `training` also the bytes of a training step
    on a GPU: of the network with plain and with fused modules, and in `form` if that is a compiled
    one. Nothing is computed. Raises ValueError for a name or a resolution that is not possible.
    """
    network = zoo.find_network(network) if isinstance(network, str) else network
    name, spec = network.name, network.spec
    side = spec.resolution if resolution is None else resolution
    if side < 1:
        raise ValueError(f"resolution {side}: use a whole number from 1")
    build: Any = network.build
    if network.head is not None:
        if training:
            raise ValueError(f"{name} has the head of a task: leave --train out")
        build = without_unused(build, side, spec.in_channels)
    stages = stage_costs(build, side, precision, spec.in_channels)

    def trained(**changes: Any) -> Backbone:
        return in_training_form(build(), replace(form, **changes), name)

    def saved(**changes: Any) -> ActivationBytes:
        return activation_bytes(partial(trained, **changes), side, precision, spec.in_channels)

    step = saved(efficiency="plain", int8=False) if training else None
    others: dict[str, int] = {}
    if step is not None:
        names = {row.stage for row in stages}
        stages += [StageCost(stage, 0, 0, 0, 0) for stage in step.by_stage if stage not in names]
        if isinstance(spec, NetSpec) and not spec.frames:
            for label, int8 in (("fused", False), ("fused with int8 activations", True)):
                others[label] = saved(efficiency="fused", int8=int8).bytes_per_image
        if is_compiled(form.efficiency):
            from fullstride.measure.memory.compiled_bytes import compiled_bytes  # for seconds

            label = form.efficiency.replace("_", " and ") + " with int8 activations" * form.int8
            others[label] = compiled_bytes(trained(), side, precision, spec.in_channels)
    return NetworkCost(
        name=name,
        source=spec.source,
        frames=spec.frames,
        resolution=side,
        precision=precision,
        whole=cost(build, side, spec.in_channels),
        stages=tuple(stages),
        layers=tuple(layer_costs(build, side, spec.in_channels)),
        saved=step,
        other_bytes=others,
    )
