"""What is left to the machine? The precision and memory format of a recipe's steps, and workers."""

import os
from dataclasses import replace

import torch

from fullstride.cores import cores
from fullstride.data.dataset import Images
from fullstride.measure.environment import has_bf16
from fullstride.train.recipe import Recipe

MAX_WORKERS = 16  # each has some hundred MiB
MIN_IMAGES = 32  # of fewer, an epoch takes no longer than starting workers


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


def choose_workers(images: Images, batches: int, device: torch.device | str) -> int:
    """The workers that decode `images` in so many `batches` an epoch, where no number is given.

    One for each core of this process but the first beside a GPU. On a CPU, where training uses all
    cores too, one for every two. No more than there are batches, and none for images that are not
    decoded from files, as the digits. Processes of torchrun share the cores of their machine.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = cores() // processes
    if images.file is None or len(images) < MIN_IMAGES or batches < 2:
        return 0
    free = own // 2 if torch.device(device).type == "cpu" else own - 1
    return max(0, min(free, batches, MAX_WORKERS))
