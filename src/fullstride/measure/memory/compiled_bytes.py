"""What does a compiled training step keep for its backward pass? Bytes per image, and nothing is run."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

from fullstride.measure.workload import Precision, compiling
from fullstride.nets.backbone import Backbone
from fullstride.nets.fused.compile import KeepLittle

BATCH = 7  # images: what is no map and has a first side of 7 is counted too, but is small
CONVOLUTIONS = ("aten::convolution", "fullstride::conv", "fullstride::pool")


class Told(Exception):  # noqa: N818
    """Ends a compilation of which all is known."""


class Watch(KeepLittle):
    """Cuts the passes, as `KeepLittle` or as PyTorch by itself, counts what goes between them, and ends there."""

    def __init__(self, recompute: bool):
        self.recompute = recompute
        self.bytes_per_image: int | None = None

    def __call__(
        self, gm: GraphModule, joint_inputs, **settings
    ) -> tuple[GraphModule, GraphModule]:
        cut = super().__call__ if self.recompute else min_cut_rematerialization_partition
        forward, backward = cut(gm, joint_inputs, **settings)
        outputs: Any = forward.graph.output_node().args[0]
        self.bytes_per_image = sum(map(size_bytes, outputs[settings["num_fwd_outputs"] :])) // BATCH
        again = [node for node in backward.graph.nodes if convolution(node)]
        assert not again, f"computed twice: {again}"
        raise Told

    def uuid(self) -> None:
        """None: nothing of this is kept for other compilations, nor taken from them."""


def size_bytes(node: Node) -> int:
    """Of what there is for each image."""
    value = node.meta["val"]
    of_batch = isinstance(value, Tensor) and value.dim() > 0 and len(value) == BATCH
    return value.numel() * value.element_size() if of_batch else 0


def convolution(node: Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in CONVOLUTIONS
    )


def compiled_bytes(
    net: nn.Module,
    resolution: int,
    precision: Precision = "bfloat16",
    in_channels: int = 3,
    *,
    recompute: bool = True,
) -> int:
    """What a training step of `net`, lean or not, keeps for an image under torch.compile: the image too, no parameters.

    Recomputing as recipes train, or as PyTorch does by itself. As the passes are cut for the CPU, of a network whose
    parameters have the precision too; takes half a minute for a large one. What either pass makes and needs for a
    moment is not in.
    """
    kind = getattr(torch, precision)
    net = copy.deepcopy(net).to("cpu", kind).train()
    watch = Watch(recompute)
    masks = (net.draw(BATCH),) if isinstance(net, Backbone) else ()
    with compiling(True):
        call = torch.compile(
            net, fullgraph=True, dynamic=False, options={"custom_partitioner_fn": watch}
        )
        try:
            call(torch.empty(BATCH, in_channels, resolution, resolution, dtype=kind), *masks)
        except RuntimeError:  # torch wraps what ended it
            if watch.bytes_per_image is None:
                raise
    assert watch.bytes_per_image is not None
    return watch.bytes_per_image
