"""What is the peak memory of a compiled training step of TResNet-M? MB per image, on a CPU.

    python benchmarks/peak.py --out benchmarks/peak.json

At 224 pixels, with weights and activations in bf16, channels last, compiled with recomputation: the
peak of the allocator in a step of 6 images less that of 2, divided by 4. Fused passes are replaced
by functions that allocate their results and compute nothing, because their Triton kernels on a GPU
have no temporary maps, while their reference implementation on a CPU has some in float32. Takes
minutes and needs a C++ compiler.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, empty_like

from fullstride.measure.environment import Environment
from fullstride.measure.workload import compiling
from fullstride.nets import zoo
from fullstride.nets.compile import compile_for_training
from fullstride.nets.fused import reference

FEW, MORE, SIDE = 2, 6, 224
FORMS: dict[str, dict[str, Any]] = {
    "plain compiled": {},
    "fused compiled": {"efficiency": "fused"},
    "fused compiled, int8": {"efficiency": "fused", "int8": True},
}


def per_map(x: Tensor) -> Tensor:
    return torch.ones(x.shape[:2])


def int8(x: Tensor) -> Tensor:
    return empty_like(x, dtype=torch.int8)


def halved(x: Tensor) -> Tensor:
    sides = (-(-side // 2) for side in x.shape[2:])
    return x.new_empty(*x.shape[:2], *sides).contiguous(memory_format=torch.channels_last)


ALLOCATING: dict[str, Callable[..., Any]] = {  # by name of `reference`
    "stats": lambda x, *_: (per_map(x), per_map(x)),
    "bn_add_act": lambda x, affine, other, other_affine, slope, dtype=None: empty_like(
        x, dtype=dtype or x.dtype
    ),
    "bn_add_act_int8": lambda x, affine, other, other_affine, *_: (
        empty_like(x),
        int8(x),
        None if other_affine is None else int8(other),
    ),
    "bn_add_act_sums": lambda grad, y, x, affine, other, other_affine, *_: (
        per_map(y),
        per_map(y),
        None if other_affine is None else per_map(y),
    ),
    "bn_add_act_gradients": lambda grad, y, x, affine, slopes, other, *_: (
        empty_like(y),
        None if other is None else empty_like(y),
    ),
    "squeezed": lambda x, *_: per_map(x),
    "gated": lambda x, *_: empty_like(x),
    "gated_sums": lambda grad, y, *_: (per_map(y),) * 5,
    "gated_gradients": lambda grad, y, *_: empty_like(y),
    "blurred": lambda x, *_: (halved(x), per_map(x)),
    "blurred_sums": lambda grad, squeeze, x, *_: (per_map(x), per_map(x)),
    "blurred_gradients": lambda grad, squeeze, x, *_: empty_like(x),
}


def peak_bytes(form: dict[str, Any], batch: int) -> int:
    """The peak of the second step, above what was allocated before it."""
    net = zoo.create("tresnet_m", **form).to(torch.bfloat16).train()
    net = net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.randn(batch, 3, SIDE, SIDE, dtype=torch.bfloat16)
    images = images.contiguous(memory_format=torch.channels_last)
    with compiling(True):
        compiled = compile_for_training(net, dynamic=False, operators=net.custom_operators)
        assert compiled.mode == "recompute", compiled.reason

        def step() -> None:
            compiled.call(images, net.draw(batch)).float().sum().backward()
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
    for name, function in ALLOCATING.items():
        assert hasattr(reference, name)
        setattr(reference, name, function)
    peaks = {}
    for name, form in FORMS.items():
        peaks[name] = (peak_bytes(form, MORE) - peak_bytes(form, FEW)) // (MORE - FEW)
        print(f"tresnet_m {name:24}{peaks[name] / 1e6:6.1f} MB", flush=True)
    if out:
        protocol = dict(resolution=SIDE, precision="bfloat16", unit="bytes per image")
        environment = asdict(Environment.here())
        data = dict(environment=environment, network="tresnet_m", **protocol, peak=peaks)
        out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
