"""What is the peak memory of a compiled training step of TResNet-M? MB per image, on a CPU.

    python benchmarks/peak.py --out benchmarks/peak.json

At 224 pixels, with weights and activations in bf16, channels last, compiled with recomputation: the
peak of the allocator in a step of 6 images less that of 2, divided by 4. Takes minutes and needs a
C++ compiler.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fullstride.measure.environment import Environment
from fullstride.measure.workload import compiling
from fullstride.nets import zoo
from fullstride.nets.compile import compile_for_training, why_not_recompute

FEW, MORE, SIDE = 2, 6, 224


def peak_bytes(batch: int) -> int:
    """The peak of the second step, above what was allocated before it."""
    net = zoo.create("tresnet_m").to(torch.bfloat16).train()
    net = net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.randn(batch, 3, SIDE, SIDE, dtype=torch.bfloat16)
    images = images.contiguous(memory_format=torch.channels_last)
    with compiling(True):
        compiled = compile_for_training(net, dynamic=False)
        assert not (reason := why_not_recompute(torch.device("cpu"))), reason

        def step() -> None:
            compiled(images, net.draw(batch)).float().sum().backward()
            net.zero_grad()

        step()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            step()
    profiler: Any = profile.profiler  # the public API has no list of allocations
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    out = parser.parse_args().out
    peak = (peak_bytes(MORE) - peak_bytes(FEW)) // (MORE - FEW)
    print(f"tresnet_m plain compiled {peak / 1e6:6.1f} MB")
    if out:
        protocol = dict(resolution=SIDE, precision="bfloat16", unit="bytes per image")
        environment = asdict(Environment.here())
        data = dict(environment=environment, network="tresnet_m", **protocol)
        data |= dict(peak={"plain compiled": peak})
        out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
