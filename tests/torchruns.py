"""Commands in two processes."""

import subprocess
import sys

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    """Two processes that succeed, or the test fails with what they wrote."""
    run = subprocess.run([*TORCHRUN, *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run


def run_two(*words: str) -> tuple[int, str]:
    """Exit status and errors of `python -m fullstride` in two processes."""
    command = [*TORCHRUN, "-m", "fullstride", *words]
    run = subprocess.run(command, capture_output=True, text=True)
    return run.returncode, run.stderr


def messages(errors: str) -> list[str]:
    """The error lines of the command; torchrun writes others."""
    assert "[rank1]: Traceback" not in errors
    return [line for line in errors.splitlines() if "fullstride: " in line]
