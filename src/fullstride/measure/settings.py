"""Holds the options of benchmarks and calibrations, without importing PyTorch."""

from dataclasses import dataclass
from typing import Literal

from tyro.conf import UseAppendAction

from fullstride.measure.budget import HERE
from fullstride.nets.efficiency import Efficiency


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """How named networks are benchmarked."""

    # How networks are timed (see docs/guides/measuring.md); repeatable. By default online and
    # throughput in one table.
    protocol: UseAppendAction[
        tuple[Literal["online", "throughput", "tresnet", "genet", "resnet_rs"], ...]
    ] = ()
    # Pixels a side, the same for all. By default runs, bundles and files have their own, and other
    # networks the first network's; tresnet has 224, and resnet_rs the first network's for all.
    resolution: int | None = None
    # Images per call for throughput (64); the other protocols have their own.
    call_batch: int | None = None
    # Rounds, in each of which every network is timed; by default the protocol's own.
    rounds: int | None = None
    # cpu, cuda, cuda:1, or auto: cuda where there is one.
    device: str = "auto"
    # Another machine to measure networks on as exported files: ssh://HOST, or a command that runs
    # Python there. See docs/guides/targets.md.
    target: str = HERE
    # By default the protocol's own; int8 is for a --target.
    precision: Literal["fp32", "bf16", "fp16", "int8"] | None = None
    # Memory format.
    layout: Literal["nchw", "nhwc"] = "nchw"
    # Compile the networks with torch.compile.
    compiled: bool = False
    # How a training step is computed, as in a recipe: plain (eager), or compiled with
    # recomputation.
    efficiency: Efficiency = "plain"
    # Pad the channels of all networks except the reference to multiples of 8.
    padded: bool = False
    # Limit of the GPU's memory.
    memory_gib: float | None = None
    # The network that ratios are relative to, or none; by default timm/resnet50 if a protocol is
    # named.
    reference: str | None = None


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    """What to measure, and how long."""

    # Runtimes, with a profile for each; by default eager, graph and compiled on a GPU, eager on the
    # CPU, and onnx and openvino on a --target that has them.
    runtimes: tuple[Literal["eager", "graph", "compiled", "onnx", "openvino"], ...] = ()
    # Images per call; by default 1 8 64 256 on a GPU and 1 8 on the CPU.
    batches: tuple[int, ...] = ()
    # Pixels a side; by default 224 on a GPU and 128 on the CPU.
    resolution: int | None = None
    # fp32, bf16 or fp16; by default fp16 on a GPU and fp32 on the CPU.
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    layout: Literal["nchw", "nhwc"] = "nchw"  # Memory format.
    # Minutes after which no further network is measured; the fit takes some seconds more.
    minutes: float = 8.0
