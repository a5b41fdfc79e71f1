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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, empty_like, nn

from fullstride.measure.environment import Environment
from fullstride.measure.workload import compiling
from fullstride.nets import fused_form, zoo
from fullstride.nets.compile import compile_for_training
from fullstride.nets.fused import reference
from fullstride.nets.fused.reference import Term

FEW, MORE, SIDE = 2, 6, 224
FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "plain compiled": fused_form.to_plain,
    "fused compiled": fused_form.to_fused,
    "fused compiled, int8": partial(fused_form.to_fused, int8=True),
}


def per_map(x: Tensor) -> Tensor:
    return torch.ones(x.shape[:2])


def halved(x: Tensor) -> Tensor:
    sides = (-(-side // 2) for side in x.shape[2:])
    return x.new_empty(*x.shape[:2], *sides).contiguous(memory_format=torch.channels_last)


def result(x: Term, other: Term | None, slope: float | None, dtype: Any = None) -> tuple[Any, ...]:
    """The result, and the int8 maps of terms with rates."""
    assert x.map is not None
    y = empty_like(x.map, dtype=dtype or x.map.dtype)
    rates = (each.rate_c if each else None for each in (x, other))
    return y, *(None if rate is None else empty_like(y, dtype=torch.int8) for rate in rates)


ALLOCATING: dict[str, Callable[..., Any]] = {  # by name of `reference`
    "stats": lambda x, *_: (per_map(x), per_map(x)),
    "bn_add_act": result,
    "bn_add_act_sums": lambda grad, y, x, other, *_: (
        per_map(y),
        per_map(y),
        per_map(y) if other and other.affine else None,
    ),
    "bn_add_act_gradients": lambda grad, y, x, other, *_: (
        empty_like(y),
        empty_like(y) if other else None,
    ),
    "slope_means": lambda x, *_: (per_map(x.map), per_map(x.map)),
    "blurred": lambda x, *_: (halved(x.map), per_map(x.map)),
    "blurred_sums": lambda grad, squeeze, x, *_: (per_map(x.map), per_map(x.map)),
    "blurred_gradients": lambda grad, squeeze, x, *_: empty_like(x.map),
}


def peak_bytes(form: Callable[[nn.Module], Any], batch: int) -> int:
    """The peak of the second step, above what was allocated before it."""
    net = form(zoo.create("tresnet_m").to(torch.bfloat16)).train()
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
