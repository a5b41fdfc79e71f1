"""Commands and functions in two processes: by torchrun, or in forks with torchrun's variables."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forks import Fork

from fullstride import cli

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
GRACE_S = 20  # for a process to say why it ends too, after the other one has failed


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    """Two processes that succeed, or the test fails with what they wrote."""
    run = subprocess.run([*TORCHRUN, *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run


def run_two(*words: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a command in two forks, which import nothing again."""
    return in_two(command, words)


def main_in_two(main: Callable[[str], object], out: Path) -> None:
    """Run `main` in two forks that succeed, or the test fails with what they wrote."""
    status, _, errors = in_two(main, str(out))
    assert status == 0, errors


def in_two(work: Callable[..., object], *args: Any) -> tuple[int, str, str]:
    """Exit status, output and errors of `work(*args)` in two forks."""
    with socket.socket() as unused, TemporaryDirectory() as name:
        unused.bind(("127.0.0.1", 0))
        port, folder = unused.getsockname()[1], Path(name)
        unused.close()
        forks = [Fork(as_rank, rank, port, folder, work, args) for rank in range(2)]
        wait([fork.process.sentinel for fork in forks])
        for fork in sorted(forks, key=lambda fork: fork.process.exitcode is None):
            fork.process.join(GRACE_S if any(each.process.exitcode for each in forks) else None)
            fork.process.kill()
        status = max(abs(fork.end()) for fork in forks)
        outputs, errors = (
            "".join((folder / f"{kind}{rank}").read_text() for rank in range(2))
            for kind in ("output", "errors")
        )
        return status, outputs, errors


def command(words: tuple[str, ...]) -> None:
    sys.exit(cli.run(words))


def as_rank(_, rank: int, port: int, folder: Path, work: Callable[..., object], args: Any) -> None:
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for stream, kind in ((sys.stdout, "output"), (sys.stderr, "errors")):
        os.dup2(os.open(folder / f"{kind}{rank}", os.O_WRONLY | os.O_CREAT), stream.fileno())
    work(*args)


def messages(errors: str) -> list[str]:
    """The error lines of the command."""
    assert "Traceback" not in errors
    return [line for line in errors.splitlines() if "fullstride: " in line]
