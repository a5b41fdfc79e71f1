"""What does a named network cost, as a whole and by stage? Parameters, multiply-adds and bytes."""

from dataclasses import dataclass
from functools import partial

from fullstride.measure.cost.by_stage import StageCost, stage_costs
from fullstride.measure.cost.flops import Cost, LayerCost, cost, layer_costs
from fullstride.measure.memory.activation_bytes import ActivationBytes, activation_bytes
from fullstride.measure.workload import Precision
from fullstride.nets import zoo
from fullstride.nets.spec import NetSpec


@dataclass(frozen=True, kw_only=True)
class NetworkCost:
    """The cost of one image."""

    name: str
    source: str  # of the network's specification
    resolution: int  # pixels a side
    precision: Precision
    whole: Cost
    stages: tuple[StageCost, ...]
    layers: tuple[LayerCost, ...]
    saved: (
        ActivationBytes | None
    )  # tensors that a training step saves for backward; None if not asked for
    fused_bytes: dict[str, int]  # that the same step saves with fused modules, by their name

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
    name: str,
    resolution: int | None = None,
    precision: Precision = "bfloat16",
    *,
    training: bool = False,
) -> NetworkCost:
    """The cost of a network of the zoo or `timm/NAME`, by default at its own resolution.

    With `training` also the bytes of a training step on a GPU. Nothing is computed. Raises
    ValueError for a name or a resolution that is not possible.
    """
    spec = zoo.spec(name)
    side = spec.resolution if resolution is None else resolution
    if side < 1:
        raise ValueError(f"resolution {side}: use a whole number from 1")
    build = partial(zoo.create, name)
    stages = stage_costs(build, side, precision, spec.in_channels)
    step = activation_bytes(build, side, precision, spec.in_channels) if training else None
    fused: dict[str, int] = {}
    if step is not None:
        names = {row.stage for row in stages}
        stages += [StageCost(stage, 0, 0, 0, 0) for stage in step.by_stage if stage not in names]
        if isinstance(spec, NetSpec):
            for label, int8 in (("fused", False), ("fused with int8 activations", True)):
                fused_build = partial(zoo.create, name, efficiency="fused", int8=int8)
                fused[label] = activation_bytes(fused_build, side, precision).bytes_per_image
    return NetworkCost(
        name=name,
        source=spec.source,
        resolution=side,
        precision=precision,
        whole=cost(build, side, spec.in_channels),
        stages=tuple(stages),
        layers=tuple(layer_costs(build, side, spec.in_channels)),
        saved=step,
        fused_bytes=fused,
    )
