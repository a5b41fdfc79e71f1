"""Processes of a distributed run, and how a device computes: precision, memory, workers."""

import ctypes
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullstride.data.dataset import Images
from fullstride.io.console import REPORTED_ELSEWHERE
from fullstride.io.writing import OutOfMemoryError, cores, lacks_memory
from fullstride.measure.environment import has_bf16
from fullstride.train.recipes.recipe import Recipe

TIMEOUT_S = 50.0  # of a process that waits for another one


@dataclass(frozen=True)
class DistributedContext:
    """One of `world_size` processes. In a single process every collective is the identity."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes, in place."""
        if self.is_distributed:
            dist.all_reduce(value)
            value /= self.world_size
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, ordered by rank, in every process."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def on_rank_zero(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the process of rank 0.

        All processes wait for it. Its ValueError or OSError is raised in every process.
        """
        failure = None
        if self.is_rank_zero:
            try:
                function(*args)
            except (ValueError, OSError) as error:
                failure = error
        if failure := self.gather(failure)[0]:
            raise failure

    @torch.no_grad()
    def sync_buffers(self, net: nn.Module) -> None:
        """Average the batch statistics, which each process computes on its own images."""
        if self.is_distributed:
            for buffer in net.buffers():
                if buffer.is_floating_point():
                    self.mean(buffer)


SINGLE_PROCESS = DistributedContext()


@contextmanager
def init_distributed(
    device: torch.device, timeout_s: float = TIMEOUT_S
) -> Iterator[tuple[DistributedContext, torch.device]]:
    """The context and the device of this process; `SINGLE_PROCESS` if torchrun did not start it.

    A process that waits longer than `timeout_s` seconds for another one fails.
    The process group ends with the `with` block. An exception that several processes raise alike
    is marked as reported in all but one of them.
    """
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"ddp_timeout_s {timeout_s:g}: use a number of seconds above 0")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield SINGLE_PROCESS, device
        return
    # Gradients of 1 x 1 convolutions have other strides than DDP's buckets, but the same memory.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    # Buffers are not broadcast here, which becomes DDP's only behavior.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield DistributedContext(dist.get_rank(), world_size), device
    except Exception as error:
        time.sleep(0.5 if dist.get_rank() else 0)  # rank 0 reports first
        store = dist.distributed_c10d._get_default_store()
        is_reported = store.add(f"{type(error).__name__}: {error}", 1) > 1
        error.add_note(REPORTED_ELSEWHERE if is_reported else f"rank {dist.get_rank()}")
        raise
    finally:
        dist.destroy_process_group()


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
        own, passes = recipe.batch_size // context.world_size, recipe.grad_accum_steps
        more = next((n for n in range(passes + 1, own + 1) if own % n == 0), None)
        by_itself = ", or 0 for as many as it needs" if device.type == "cuda" else ""
        advice = f"set recipe.grad_accum_steps {more}{by_itself}, or " if more else ""
        raise OutOfMemoryError(
            f"out of memory on {device} in a step of {own} images in {passes} "
            f"{'pass' if passes == 1 else 'passes'}: {advice}lower recipe.batch_size "
            f"({recipe.batch_size}) or recipe.resolution"
        ) from None


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
