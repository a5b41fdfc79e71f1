"""Which process of a distributed run is this? torchrun starts one process for each GPU."""

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullstride.console import REPORTED_ELSEWHERE

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
