"""Processes for tests to kill: forks of one that has imported the package, which takes seconds."""

import multiprocessing
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from short_times import shorten

CONTEXT = multiprocessing.get_context("forkserver")
# What a fit would import at its first training and its first file, in each process again.
TRAINING = ["fullstride.autofit.fit", "timm", "torch._dynamo", "scipy.optimize"]
CONTEXT.set_forkserver_preload(["forks", *TRAINING, "onnxruntime", "parsed_operators"])


class Fork:
    """A process that runs `work(say, *args)`, where `say` sends this one a line for each step."""

    def __init__(self, work: Callable[..., object], *args: Any):
        self.steps, say = CONTEXT.Pipe(duplex=False)
        self.process: BaseProcess = CONTEXT.Process(target=run, args=(work, say, args))
        self.process.start()
        say.close()  # so that the end of the other process ends the steps

    def said(self) -> Iterator[str]:
        while True:
            try:
                yield self.steps.recv()
            except EOFError:
                return

    def wait(self, most: int | None = None) -> int:
        """The number of steps until the process ended, or `most` of them."""
        return len([*islice(self.said(), most)])

    def kill(self) -> int:
        """End the process at once; the number of steps that were not waited for."""
        self.process.kill()
        return self.wait()

    def end(self) -> int:
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode


def run(work: Callable[..., object], say: Connection, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    shorten(pytest.MonkeyPatch())
    work(say.send, *args)
