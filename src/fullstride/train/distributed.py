"""Which of several processes is this one, and what do they know together? torchrun makes one for each GPU."""

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

from fullstride.console import TOLD

PATIENCE = timedelta(seconds=50)  # until a process that waits for a dead one gives up


@dataclass(frozen=True)
class DistributedContext:
    """One process of `world`. Alone, everything here hands back what it was given."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes, the same in each."""
        if self.is_distributed:
            dist.all_reduce(value)
            value /= self.world_size
        return value

    def gather(self, value: Any) -> list[Any]:
        """What each process gave, in their order, in every process."""
        if not self.is_distributed:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def on_rank_zero(self, work: Callable[..., None], *args: Any) -> None:
        """Work that one process does for all. What goes wrong is raised in every one, so that none waits in vain."""
        failed = None
        if self.is_rank_zero:
            try:
                work(*args)
            except (ValueError, OSError) as error:
                failed = error
        if failed := self.gather(failed)[0]:
            raise failed

    @torch.no_grad()
    def sync_buffers(self, net: nn.Module) -> None:
        """Average the batch-norm statistics, which each process took of its own images."""
        if self.is_distributed:
            for buffer in net.buffers():
                if buffer.is_floating_point():
                    self.mean(buffer)

    def barrier(self) -> None:
        if self.is_distributed:
            dist.barrier()


SINGLE_PROCESS = DistributedContext()


@contextmanager
def init_distributed(device: torch.device) -> Iterator[tuple[DistributedContext, torch.device]]:
    """This process among those that torchrun started, and its device; alone where it started none."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield SINGLE_PROCESS, device
        return
    # DDP says that the gradients of 1 x 1 convolutions have other strides; their memory is the same.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    # It is to broadcast them no longer at all, which is what we ask for; today it does unless asked.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield DistributedContext(dist.get_rank(), world), device
    except Exception as error:
        # What goes wrong in every process alike is told once, by the first of them if it has the same to say.
        time.sleep(0.5 if dist.get_rank() else 0)
        told = (
            dist.distributed_c10d._get_default_store().add(f"{type(error).__name__}: {error}", 1)
            > 1
        )
        error.add_note(TOLD if told else f"rank {dist.get_rank()}")
        raise
    finally:
        dist.destroy_process_group()
