"""The package can be imported on systems without Unix's modules and functions."""

import subprocess
import sys

import pytest

from fullstride.measure import max_batch

# What others import for themselves is loaded before; their own care for systems is not ours.
SCRIPT = """
import builtins, importlib, os, pkgutil, signal
import jinja2, matplotlib.figure, numpy, PIL.Image, rich.progress, safetensors.torch, timm.optim
import torch._dynamo, torch._functorch.partitioners, torch._inductor.compile_fx, tyro

MODULES = "crypt fcntl grp posix pty pwd readline resource spwd syslog termios tty".split()
FUNCTIONS = {
    os: "fork getuid geteuid killpg mkfifo pread sched_getaffinity setsid statvfs sysconf "
    "O_NONBLOCK O_NOFOLLOW O_DIRECTORY",
    signal: "SIGALRM SIGHUP SIGKILL SIGPIPE SIGUSR1 alarm setitimer",
}
import_ = builtins.__import__

def without_unix(name, globals=None, locals=None, fromlist=(), level=0):
    if name in MODULES and str((globals or {}).get("__name__")).startswith("fullstride"):
        raise ModuleNotFoundError(name)
    return import_(name, globals, locals, fromlist, level)

builtins.__import__ = without_unix
for module, names in FUNCTIONS.items():
    for name in names.split():
        delattr(module, name)

import fullstride
count = 0
for module in pkgutil.walk_packages(fullstride.__path__, "fullstride."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        count += 1
print(count)
"""


@pytest.mark.slow
def test_every_module_can_be_imported_without_what_only_unix_has():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_memory_that_a_system_cannot_limit_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    with pytest.raises(ValueError, match="--predict") as refused:
        max_batch.limit_memory(2**30, max_batch.torch.device("cpu"))
    assert "\n" not in str(refused.value)
