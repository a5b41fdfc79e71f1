"""For all tests: one thread each, because several processes share the cores and threads would wait for each other."""

import os
import signal

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background, where they would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
