"""Holds what a user asks of `fullstride bench`, without the imports of PyTorch."""

from dataclasses import dataclass
from typing import Literal

from tyro.conf import UseAppendAction

from fullstride.measure.budget import HERE
from fullstride.nets.efficiency import Efficiency


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What a benchmark of named networks measures, and how."""

    # How networks are timed (see docs/guides/measuring.md), once for each protocol; by default
    # online and throughput in one table.
    protocol: UseAppendAction[
        tuple[Literal["online", "throughput", "tresnet", "genet", "resnet_rs"], ...]
    ] = ()
    # Pixels a side, the same for all; by default runs, bundles and files have their own, and other
    # networks that of the first one. For tresnet 224, for resnet_rs that of the first one.
    resolution: int | None = None
    # Images of a call for throughput (64); the other protocols have their own.
    call_batch: int | None = None
    # How often each network is timed; by default the protocol's own.
    rounds: int | None = None
    # cpu, cuda, cuda:1, or auto: cuda where there is one.
    device: str = "auto"
    # Another machine, on which networks are measured as files: ssh://HOST, or a command that runs a
    # Python there. See docs/guides/targets.md.
    target: str = HERE
    # By default the protocol's own; int8 is for a --target.
    precision: Literal["fp32", "bf16", "fp16", "int8"] | None = None
    # Memory format.
    layout: Literal["nchw", "nhwc"] = "nchw"
    # Measure the networks compiled by torch.compile.
    compiled: bool = False
    # Modules of a training step, as in a recipe: PyTorch's or fused ones, eager or compiled with
    # recomputation.
    efficiency: Efficiency = "plain"
    # Pad the channels of all networks but the reference to multiples of 8.
    padded: bool = False
    # Use at most this much of the GPU's memory.
    memory_gib: float | None = None
    # The network that ratios are to, or none; by default timm/resnet50 where a protocol is named.
    reference: str | None = None
