"""Counts the bytes that a compiled training step would save for its backward pass."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

from fullstride.measure.workload import Precision, compiling
from fullstride.nets.backbone import Backbone, batch_shape
from fullstride.nets.compile import RecomputePartitioner

# Images. A tensor whose first dimension has this size counts as a tensor of the batch.
BATCH = 7


class Counted(Exception):  # noqa: N818
    """Ends a compilation once its saved tensors are counted."""


class CountingPartitioner(RecomputePartitioner):
    """Counts the bytes saved between the two passes, then ends the compilation."""

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
        convolution = torch.ops.aten.convolution.default
        recomputed = [node for node in backward.graph.nodes if node.target is convolution]
        assert not recomputed, f"computed twice: {recomputed}"
        raise Counted

    def uuid(self) -> None:
        """None disables the compilation cache."""


def size_bytes(node: Node) -> int:
    """The size of a tensor that grows with the batch; 0 for any other value."""
    value = node.meta["val"]
    of_batch = isinstance(value, Tensor) and value.dim() > 0 and len(value) == BATCH
    return value.numel() * value.element_size() if of_batch else 0


def compiled_bytes(
    net: nn.Module,
    resolution: int,
    precision: Precision = "bfloat16",
    in_channels: int = 3,
    *,
    recompute: bool = True,
) -> int:
    """Count the bytes per image that a compiled training step saves, with the image, not weights.

    `recompute`: as in training; otherwise PyTorch's default partitioner cuts the graph. The graph
    is the CPU's, with parameters in `precision`; a large network takes half a minute. Temporary
    tensors within either pass are not counted.
    """
    dtype = getattr(torch, precision)
    net = copy.deepcopy(net).to("cpu", dtype).train()
    partitioner = CountingPartitioner(recompute)
    masks = (net.draw(BATCH),) if isinstance(net, Backbone) else ()
    with compiling(True):
        call = torch.compile(
            net, fullgraph=True, dynamic=False, options={"custom_partitioner_fn": partitioner}
        )
        try:
            shape = batch_shape(net, BATCH, in_channels, resolution)
            call(torch.empty(shape, dtype=dtype), *masks)
        except RuntimeError:  # torch wraps `Counted`
            if partitioner.bytes_per_image is None:
                raise
    assert partitioner.bytes_per_image is not None
    return partitioner.bytes_per_image
