"""For all tests: one thread each, because several processes share the cores and threads would wait
for each other."""

import ctypes
import functools
import gc
import itertools
import os
import signal
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace

import pytest
import torch
from absent_packages import skip_if_absent, watch_imports
from predicted_bytes import once_for_equal_networks
from prepared_graphs import once_for_equal_graphs, once_for_equal_operators
from short_times import shorten

from fullstride.data.dataset import DataSet, open_data
from fullstride.measure import max_batch

FILES = itertools.count(1)  # of tests, that have ended
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
# A shell starts background jobs with SIGINT ignored, which the processes would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


watch_imports()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    try:
        yield
    except Exception as error:
        skip_if_absent(error)
        raise


pytest_runtest_call = pytest_runtest_setup


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _measurements_are_short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        count = once_for_equal_networks(max_batch.activation_bytes)
        patch.setattr(max_batch, "activation_bytes", count)
        yield


def pytest_collection_finish() -> None:
    """Leave the million objects of the imported libraries out of all later collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _memory_is_given_back() -> Iterator[None]:
    """Free what the tests of a file left: compiled graphs, cycles, and the heap's empty pages.

    What is still there belongs mostly to libraries, such as caches, and is left out of collections
    but of each tenth.
    """
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    if next(FILES) % 10 == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True, scope="session")
def _operators_of_onnx_are_parsed_once() -> Iterator[None]:
    """PyTorch parses the sources of 500 of them in each export, half of its time."""
    from torch._export import utils
    from torch.onnx._internal.exporter import _core
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    parsed = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
    name = "_prepare_exported_program_for_export"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", parsed)
        patch.setattr(_core, name, once_for_equal_graphs(getattr(_core, name)))
        listed = once_for_equal_operators(utils._materialize_cpp_cia_ops)
        patch.setattr(utils, "_materialize_cpp_cia_ops", listed)
        yield


@pytest.fixture(scope="session")
def few_digits() -> DataSet:
    """64 images to train on and 20 each to choose by and to score on: a run of seconds."""
    data = open_data("digits")
    parts = {
        part: images.subset(range(count))
        for part, images, count in (
            ("train", data.train, 64),
            ("val", data.val, 20),
            ("test", data.test, 20),
        )
    }
    return replace(data, **parts)


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suppression in 4 rounds in place of 32, which are a third of the graph of a detector."""
    from fullstride.tasks.detect.fcos import suppress

    assert suppress.__kwdefaults__
    monkeypatch.setitem(suppress.__kwdefaults__, "rounds", 4)
