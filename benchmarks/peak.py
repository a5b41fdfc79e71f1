"""What does the allocator reach in a compiled training step of TResNet-M? MB per image, on this CPU.

    python benchmarks/peak.py --out benchmarks/peak.json

At 224 pixels, weights and maps in bf16, channels last, torch.compile recomputing: the most that is allocated in a step
of 6 images, less that of 2, by 4; what every batch needs falls out. Our passes over maps are replaced by ones that
allocate what they return and compute nothing, as on a GPU their Triton forms have no maps of their own in between;
PyTorch's arithmetic, which is their form on a CPU, has some in float32. Takes minutes, and wants a C++ compiler.
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
from fullstride.nets.network import Network

FEW, MORE, SIDE = 2, 6, 224
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lean": {"efficiency": "lean"},
    "lean, int8 maps": {"efficiency": "lean", "int8": True},
}


def numbers(x: Tensor) -> Tensor:
    return torch.ones(x.shape[:2])


def codes(x: Tensor) -> Tensor:
    return empty_like(x, dtype=torch.int8)


def halved(x: Tensor) -> Tensor:
    sides = (-(-side // 2) for side in x.shape[2:])
    return x.new_empty(*x.shape[:2], *sides).contiguous(memory_format=torch.channels_last)


ALLOCATING: dict[str, Callable[..., Any]] = {  # by the names of `plain`
    "stats": lambda x, *_: (numbers(x), numbers(x)),
    "bn_add_act": lambda x, affine, other, other_affine, slope, dtype=None: empty_like(
        x, dtype=dtype or x.dtype
    ),
    "bn_add_act_int8": lambda x, affine, other, other_affine, *_: (
        empty_like(x),
        codes(x),
        None if other_affine is None else codes(other),
    ),
    "bn_add_act_sums": lambda grad, y, x, affine, other, other_affine, *_: (
        numbers(y),
        numbers(y),
        None if other_affine is None else numbers(y),
    ),
    "bn_add_act_gradients": lambda grad, y, x, affine, slopes, other, *_: (
        empty_like(y),
        None if other is None else empty_like(y),
    ),
    "squeezed": lambda x, *_: numbers(x),
    "gated": lambda x, *_: empty_like(x),
    "gated_sums": lambda grad, y, *_: (numbers(y),) * 5,
    "gated_gradients": lambda grad, y, *_: empty_like(y),
    "blurred": lambda x, *_: (halved(x), numbers(x)),
    "blurred_sums": lambda grad, squeeze, x, *_: (numbers(x), numbers(x)),
    "blurred_gradients": lambda grad, squeeze, x, *_: empty_like(x),
}


def peak_bytes(form: dict[str, Any], batch: int) -> int:
    """The most that a second step has at once, beside what was there before it."""
    net = (
        zoo.create("tresnet_m", **form)
        .to(torch.bfloat16)
        .to(memory_format=torch.channels_last)
        .train()
    )
    assert isinstance(net, Network)
    images = torch.randn(batch, 3, SIDE, SIDE, dtype=torch.bfloat16).contiguous(
        memory_format=torch.channels_last
    )
    with compiling(True):
        made = compile_for_training(net, dynamic=False, operators=net.custom_operators)
        assert made.mode == "recompute", made.reason

        def step() -> None:
            made.call(images, net.draw(batch)).float().sum().backward()
            net.zero_grad()

        step()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as seen:
            step()
    profiler: Any = seen.profiler  # its events of memory are in no public list
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    out = parser.parse_args().out
    for name, function in ALLOCATING.items():
        assert hasattr(reference, name)
        setattr(reference, name, function)
    found = {}
    for name, form in FORMS.items():
        found[name] = (peak_bytes(form, MORE) - peak_bytes(form, FEW)) // (MORE - FEW)
        print(f"tresnet_m {name:18}{found[name] / 1e6:6.1f} MB", flush=True)
    if out:
        told = dict(
            network="tresnet_m",
            resolution=SIDE,
            precision="bfloat16",
            unit="bytes per image",
            compiled=True,
        )
        out.write_text(
            json.dumps(dict(environment=asdict(Environment.here()), **told, peak=found), indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
