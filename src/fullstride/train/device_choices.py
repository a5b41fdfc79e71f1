"""What does a recipe leave to the machine? The precision and the memory format of its steps."""

from dataclasses import replace

import torch

from fullstride.measure.environment import has_bf16
from fullstride.train.recipe import Recipe


def on_device(recipe: Recipe, device: torch.device | str) -> Recipe:
    """The recipe with a precision in place of auto, and a memory format in place of None.

    bf16 on a GPU that computes in it, tf32 on other GPUs, and fp32 on a CPU. Channels last in
    memory, which is faster on both (docs/log.md), except for 16 bits on a CPU, where it is not
    reliable.
    """
    device = torch.device(device)
    precision, channels_last = recipe.precision, recipe.channels_last
    if precision == "auto" and device.type == "cuda":
        precision = "bf16" if has_bf16(device) else "tf32"
    elif precision == "auto":
        precision = "fp32"
    if channels_last is None:
        channels_last = device.type != "cpu" or precision not in ("bf16", "fp16")
    return replace(recipe, precision=precision, channels_last=channels_last)
