"""How fast could the device at hand be? Its peaks, by its data sheet or measured."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fullstride.latency.calibration.quiet_rounds import timed_round
from fullstride.latency.devices import load_profile, profile_names
from fullstride.latency.profiles import Profile
from fullstride.latency.roofline import Machine, Runtime
from fullstride.measure.environment import Environment
from fullstride.measure.workload import Precision, exact_float32
from fullstride.nets.precision import short_precision

# GPUs with these words have a data sheet of their own.
VARIANT = re.compile(r"\b(PCIE|NVL|TI|SUPER|LAPTOP|SXM2)\b", re.IGNORECASE)
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def machine(device: torch.device, precision: Precision, runtime: Runtime) -> tuple[Machine, str]:
    """Peaks of the device and their source: its data sheet in a profile, else a measurement."""
    profile = None
    if BYTES[precision] == 2 and device.type == "cuda":
        profile = by_sheet(Environment.here(device).device)
    if profile:
        tflops, gb_s = profile.machine.peak_tflops, profile.machine.bandwidth_gb_s
        source = profile.sheet
    else:
        tflops, gb_s = peaks(device, precision)
        kind = short_precision(precision)
        source = f"measured: a large product or convolution in {kind}, and a copy"
    return Machine(
        runtime=runtime,
        peak_tflops=float(f"{tflops:.4g}"),
        bandwidth_gb_s=float(f"{gb_s:.4g}"),
        bytes_per_element=BYTES[precision],
        vector_tflops=profile.machine.vector_tflops if profile else None,
    ), source


def by_sheet(name: str) -> Profile | None:
    """A profile in 16 bits of the GPU that torch calls `name`."""
    if VARIANT.search(name):
        return None
    for profile in map(load_profile, profile_names()):
        model = re.match(r"NVIDIA ((RTX )?\w+)", profile.device)
        is_16_bit = profile.machine.bytes_per_element == 2
        if model and is_16_bit and re.search(rf"\b{model[1]}\b", name):
            return profile
    return None


def peaks(device: torch.device, precision: Precision) -> tuple[float, float]:
    """TFLOPS of a large matrix product or convolution, and GB/s, read and written, of a copy.

    Each is that of the fastest call, since a peak is a bound. On the CPU, maps that fit in its
    caches are copied as well.
    """
    gpu = device.type == "cuda"
    side, images, sizes = (8192, 64, (2**28,)) if gpu else (2048, 1, (2**20, 2**24))
    kind: Any = dict(device=device, dtype=getattr(torch, precision))
    a, b = torch.randn(side, side, **kind), torch.randn(side, side, **kind)
    maps, kernel = torch.randn(images, 256, 64, 64, **kind), torch.randn(256, 256, 3, 3, **kind)
    macs = images * 256 * 256 * 9 * 62 * 62  # without padding
    buffers = {n: torch.zeros(2, n, **kind) for n in sizes}

    def seconds(call: Callable[[], object]) -> float:
        call()
        return min(timed_round(call, 3, device).seconds for _ in range(5))

    with exact_float32(), torch.inference_mode():
        product, convolution = seconds(lambda: a @ b), seconds(lambda: F.conv2d(maps, kernel))
        rates = [
            2 * n * pair.element_size() / seconds(lambda pair=pair: pair[1].copy_(pair[0]))
            for n, pair in buffers.items()
        ]
    return 2e-12 * max(side**3 / product, macs / convolution), 1e-9 * max(rates)
