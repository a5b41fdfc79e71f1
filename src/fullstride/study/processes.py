"""Runs work that yields lines in a process of its own, on one device."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from fullstride.io.writing import cores

Lines = Generator[str, None, Any]


@dataclass
class DeviceProcess:
    """A process that runs one piece of work, and ends with this one."""

    process: BaseProcess
    lines: Connection
    device: str
    error: BaseException | None = None  # that the work raised

    @classmethod
    def start(
        cls, work: Callable[..., Lines], arguments: Sequence[Any], device: str, processes: int
    ) -> "DeviceProcess":
        """Start `work`, a function of a module, as one of so many processes, which share the cores.

        The arguments are pickled.
        """
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        lines, sender = context.Pipe(duplex=False)
        torch = sys.modules.get("torch")  # it takes seconds to import, and need not be there
        limit = torch.get_num_threads() if torch else cores()
        threads = max(1, min(limit, cores() // processes))
        settings = (sender, work, tuple(arguments), device, threads, processes)
        process = context.Process(target=_run, args=settings)  # its loaders have processes too
        process.start()
        sender.close()
        return cls(process, lines, device)

    def read(self) -> Iterator[str]:
        """The lines that are there. The process may have been ended within one."""
        try:
            while self.lines.poll():
                message = self.lines.recv()
                if isinstance(message, BaseException):
                    self.error = message
                else:
                    yield message
        except (EOFError, OSError):
            self.process.join()


def wait_for(processes: Sequence[DeviceProcess], timeout_s: float) -> None:
    """Wait until one of the processes has a line or has ended."""
    wait(
        [*(each.process.sentinel for each in processes), *(each.lines for each in processes)],
        timeout_s,
    )


def share_cores(threads: int, processes: int) -> None:
    """Let this process compute with so many threads, as one of so many on its machine."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # if PyTorch is imported later
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)
    # By this the processes that decode images are chosen, as among those of torchrun.
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)


def _run(
    sender: Connection,
    work: Callable[..., Lines],
    arguments: tuple[Any, ...],
    device: str,
    threads: int,
    processes: int,
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    share_cores(threads, processes)
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_device(device)
    try:
        for line in work(*arguments):
            sender.send(line)
    except KeyboardInterrupt:
        os._exit(130)  # the parent got it too
    except Exception as error:
        sender.send(error)


def _end_with_parent() -> None:
    """End this process when its parent was killed: the next call would run the same work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
