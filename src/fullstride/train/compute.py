"""How does a device compute steps: fast or exactly, and what if its memory is too small?"""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fullstride.storage import OutOfMemoryError, lacks_memory
from fullstride.train.distributed import DistributedContext
from fullstride.train.recipe import Recipe


def share_batch_statistics(net: nn.Module, device: torch.device) -> None:
    """Let the batch norms of `net` use the statistics of all processes, in place.

    Raises ValueError where PyTorch's layer for it does not run.
    """
    if device.type != "cuda":
        raise ValueError(
            "recipe.sync_bn of plain modules is for GPUs: use recipe.efficiency fused, or leave it "
            "out"
        )
    from timm.layers.norm_act import convert_sync_batchnorm  # keeps the activations of its norms

    convert_sync_batchnorm(net)


# Parameters of glibc's mallopt, from its malloc.h: the size from which memory is mapped, and the
# free memory from which some is given back. Afterwards: the most that glibc itself would choose.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
IN_TRAINING = {MMAP_THRESHOLD: 1 << 30, TRIM_THRESHOLD: (1 << 31) - 1}
AFTERWARDS = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20}


@contextmanager
def keep_freed_memory(device: torch.device) -> Iterator[None]:
    """Within the block, let this process keep the memory that it frees, and use it again.

    By default glibc takes the activations of every training step from the system and gives them
    back, each time filled with zeros: 6 to 20 % of the CPU time of a step (docs/log.md). With
    another C library, or on another device than a CPU, nothing changes.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    try:
        for parameter, value in IN_TRAINING.items():
            libc.mallopt(parameter, value)
        yield
    finally:
        for parameter, value in AFTERWARDS.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)


@contextmanager
def numerics(*, tf32: bool, benchmark: bool, deterministic: bool) -> Iterator[None]:
    """How a GPU computes within the block.

    Args:
        tf32: Of products and convolutions in float32; convolutions use it by default.
        benchmark: Time the algorithms of convolutions once for each shape, and use the fastest.
        deterministic: Use reproducible algorithms only.
    """
    products, before = torch.backends.cuda.matmul, torch.are_deterministic_algorithms_enabled()
    allowed = products.allow_tf32
    changes = deterministic and not before  # the call imports a compiler for seconds
    if changes:
        torch.use_deterministic_algorithms(True)
    products.allow_tf32 = tf32
    try:
        with torch.backends.cudnn.flags(
            True, benchmark, deterministic=deterministic, allow_tf32=tf32
        ):
            yield
    finally:
        products.allow_tf32 = allowed
        if changes:
            torch.use_deterministic_algorithms(before)


@contextmanager
def memory_advice(
    recipe: Recipe, device: torch.device, context: DistributedContext
) -> Iterator[None]:
    """Raise OutOfMemoryError, with the batch and what would fit, where a step lacks memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        own, passes = recipe.batch // context.world_size, recipe.grad_accum_steps
        more = next((n for n in range(passes + 1, own + 1) if own % n == 0), None)
        by_itself = ", or 0 for as many as it needs" if device.type == "cuda" else ""
        advice = f"set recipe.grad_accum_steps {more}{by_itself}, or " if more else ""
        raise OutOfMemoryError(
            f"out of memory on {device} in a step of {own} images in {passes} "
            f"{'pass' if passes == 1 else 'passes'}: {advice}lower recipe.batch "
            f"({recipe.batch}) or recipe.resolution"
        ) from None
