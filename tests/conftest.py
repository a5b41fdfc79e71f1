"""For all tests: one thread each, because several processes share the cores and threads would wait for each other."""

import os

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
