"""Sets up processes of a distributed run, and a device's precision, memory and workers."""

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
from fullstride.io.console import REPORTED_ELSEWHERE, count_of
from fullstride.io.writing import OutOfMemoryError, cores, lacks_memory
from fullstride.measure.environment import has_bf16
from fullstride.train.recipes.recipe import Recipe

TIMEOUT_S = 50.0  # for a process that waits for another one


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
        """Average over all processes, in place."""
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
        """Call a function in the process of rank 0, while all processes wait.

        A ValueError or OSError from the call is raised in every process.
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
    """Yield the context and device of this process; `SINGLE_PROCESS` without torchrun.

    A process that waits longer than `timeout_s` seconds for another one fails. The process group
    ends with the block. If several processes raise equal exceptions, all but one are marked as
    reported.
    """
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"ddp_timeout_s {timeout_s:g}: use a number of seconds above 0")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield SINGLE_PROCESS, device
        return
    # Gradients of 1 x 1 convolutions have other strides than DDP's buckets, but the same memory.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    # Buffers are not broadcast here, which will be DDP's only behavior.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Imported later, by DDP, its default arguments would keep the group and the threads of it. One
    # that still works while the interpreter ends aborts the process.
    from torch.distributed.nn import functional  # noqa: F401

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
    """Let the batch norms of `net` use statistics over all processes, in place.

    Raises ValueError if PyTorch's layer does not run on `device`.
    """
    if device.type != "cuda":
        raise ValueError("recipe.sync_bn is for GPUs: leave it out")
    from timm.layers.norm_act import convert_sync_batchnorm  # keeps the activations of timm's norms

    convert_sync_batchnorm(net)


# Parameters of glibc's mallopt, from malloc.h: the size above which memory is mapped, and the free
# memory above which some is returned. AFTERWARDS: the largest values that glibc chooses itself.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
IN_TRAINING = {MMAP_THRESHOLD: 1 << 30, TRIM_THRESHOLD: (1 << 31) - 1}
AFTERWARDS = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20}


@contextmanager
def keep_freed_memory(device: torch.device) -> Iterator[None]:
    """Let this process keep and reuse freed memory within the block.

    By default glibc gets the memory of activations from the system in every training step and
    returns it, filled with zeros each time: 6 to 20 % of a step's CPU time (docs/log.md). Nothing
    changes with another C library, or on a GPU.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        yield
        return
    # a generator that is left unfinished ends when the interpreter has cleared the globals
    libc, afterwards = ctypes.CDLL(None), AFTERWARDS
    try:
        for parameter, value in IN_TRAINING.items():
            libc.mallopt(parameter, value)
        yield
    finally:
        for parameter, value in afterwards.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)


@contextmanager
def numerics(*, tf32: bool, benchmark: bool, deterministic: bool) -> Iterator[None]:
    """Set how a GPU computes within the block.

    `tf32` is for products and convolutions in float32, and PyTorch's default for convolutions.
    `benchmark` times the convolution algorithms once for each shape, and uses the fastest.
    """
    products, before = torch.backends.cuda.matmul, torch.are_deterministic_algorithms_enabled()
    allowed = products.allow_tf32
    changes = deterministic and not before  # the call imports a compiler, which takes seconds
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
def step_advice(
    recipe: Recipe, device: torch.device, context: DistributedContext
) -> Iterator[None]:
    """Raise OutOfMemoryError, with the batch and an advice, if a step lacks memory.

    Raises ValueError, with the fields, for a pass of one image that a batch norm cannot take.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        own, passes = recipe.batch_size // context.world_size, recipe.grad_accum_steps
        if "more than 1 value per channel" in str(error):  # a compiler adds other lines
            fewer = f"lower recipe.grad_accum_steps ({passes}), " if passes > 1 else ""
            raise ValueError(
                "a pass of one image leaves one value of each channel, which batch normalisation "
                f"cannot train on: {fewer}raise recipe.batch_size ({recipe.batch_size}) or "
                "recipe.resolution, or use more images"
            ) from None
        if not lacks_memory(error):
            raise
        more = next((n for n in range(passes + 1, own + 1) if own % n == 0), None)
        by_itself = ", or 0 for as many as it needs" if device.type == "cuda" else ""
        advice = f"set recipe.grad_accum_steps {more}{by_itself}, or " if more else ""
        raise OutOfMemoryError(
            f"out of memory on {device} in a step of {count_of(own, 'image')} in "
            f"{count_of(passes, 'pass')}: {advice}lower recipe.batch_size "
            f"({recipe.batch_size}) or recipe.resolution"
        ) from None


MAX_WORKERS = 16  # each takes some hundred MiB
MIN_IMAGES = 32  # with fewer, starting workers takes longer than an epoch


def on_device(recipe: Recipe, device: torch.device | str) -> Recipe:
    """Replace the precision auto and the memory format None by the device's.

    bf16 on a GPU with bf16, tf32 on other GPUs, and fp32 on a CPU. Channels last in memory, which
    is faster on both (docs/log.md), except for 16 bits on a CPU, where it is not reliable.
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
    """The default number of workers to decode `images`, with `batches` per epoch.

    Beside a GPU, one for each core of this process except the first; on a CPU, where training uses
    all cores, one for every two. At most one per batch, and none for images that are not decoded
    from files, such as the digits. Processes of torchrun share the cores of their machine.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = cores() // processes
    if images.file is None or len(images) < MIN_IMAGES or batches < 2:
        return 0
    free = own // 2 if torch.device(device).type == "cpu" else own - 1
    return max(0, min(free, batches, MAX_WORKERS))
