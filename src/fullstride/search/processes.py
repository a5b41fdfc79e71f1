"""How does work that yields lines run in a process of its own, on one device?"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fullstride.measure.environment import cores

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
        threads = max(1, min(torch.get_num_threads(), cores() // processes))
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


def _run(
    sender: Connection,
    work: Callable[..., Lines],
    arguments: tuple[Any, ...],
    device: str,
    threads: int,
    processes: int,
) -> None:
    """The body of the process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)  # by which workers are chosen
    if device.startswith("cuda"):
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
