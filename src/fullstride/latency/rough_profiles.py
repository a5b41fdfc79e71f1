"""How long do networks take relative to each other here? Roughly, before anything is measured."""

import torch

from fullstride.latency.devices import load_profile
from fullstride.latency.profiles import Fit, Profile
from fullstride.latency.roofline import Machine

# Relative times on a processor: one thread of a Xeon by `fullstride calibrate`, docs/latency.md. Of
# 15 ONNX files in fp32 from 0.1 to 50 ms the rank correlation of times and estimates was 0.99.
CPU = Profile(
    name="cpu",
    device="a processor",
    layout="",
    precision="fp32",
    machine=Machine(
        runtime="compiled",
        peak_tflops=0.15,
        bandwidth_gb_s=27,
        bytes_per_element=4,
        folded=True,
    ),
    sheet="a large product and a copy in fp32",
    inference=Fit(
        numbers={
            "dense": 0.7,
            "1x1": 0.8,
            "depthwise": 0.15,
            "group_channels": 8,
            "convolution": 0.6,
            "launch_us": 1,
        },
        error=30,
        low=0.5,
        high=2,
        resolvable_ratio=1.5,
        networks=40,
        source="fullstride calibrate",
        software="PyTorch",
        date="2026-11-22",
    ),
)
GPU = "rtx4090-compiled"  # for relative times on any GPU


def profile_here() -> Profile:
    """A profile whose relative times are roughly those of this machine."""
    return load_profile(GPU) if torch.cuda.is_available() else CPU
