"""What asks a GPU, tried on a machine without one: `torch.cuda` and nvidia-smi are replaced."""

import importlib
import inspect
import io
import json
import pickle
import re
import sys
import threading
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import nn

from fullstride.measure import bench, environment, max_batch, protocols
from fullstride.measure.environment import find_device, gpu_state
from fullstride.measure.max_batch import Trial
from fullstride.measure.workload import StepOptions
from fullstride.papers import suite

GPU, MIB = torch.device("cuda"), 2**20
PAGE = Path(__file__).parents[2] / "docs/internals/tests.md"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 1 GiB, of which nothing is allocated. Returns the limits that are set."""
    fractions: list[float] = []
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "mem_get_info": lambda _=None: (2**29, 2**30),
        "memory_allocated": lambda _=None: 10 * MIB,
        "max_memory_allocated": lambda _=None: 70 * MIB,
        "reset_peak_memory_stats": lambda _=None: None,
        "set_per_process_memory_fraction": lambda fraction, _index: fractions.append(fraction),
        "synchronize": lambda _=None: None,
        "empty_cache": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return fractions


@pytest.fixture
def smi(monkeypatch):
    """Answers of nvidia-smi, by a word of the question."""
    answers: dict[str, str] = {}

    def output(*command: str, folder=None) -> str:
        return next((text for word, text in answers.items() if word in " ".join(command)), "")

    monkeypatch.setattr(environment, "output", output)
    return answers


@pytest.mark.usefixtures("gpu")
def test_a_second_gpu_is_the_last_of_two(monkeypatch):
    assert find_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="cuda:2 is not here: use cuda:0 to cuda:1"):
        find_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="cuda:99 is not here: use cuda:0$"):
        find_device("cuda:99")


def test_the_state_of_a_gpu_is_what_nvidia_smi_says(smi):
    smi["clocks_throttle_reasons"] = "1410, 1980, [N/A], 350.00, 41, 0x0000000000000024"
    state = gpu_state("0000")
    assert (state["clock_mhz"], state["memory_clock_mhz"]) == (1410, None)
    assert state["held_back_by"] == "power cap, heat (software)"
    smi["clocks_event_reasons"] = "1, 2, 3, 4, 5, [Not Supported]"
    assert gpu_state("GPU-0000")["held_back_by"] == "[Not Supported]"
    smi["driver_version"] = "580.95.05\n580.95.05"
    environment.driver.cache_clear()
    try:
        assert environment.driver() == "580.95.05"
    finally:
        environment.driver.cache_clear()


def test_without_the_files_and_commands_of_a_system_its_environment_is_less_detailed(
    monkeypatch, tmp_path
):
    assert environment.output("no-such-command-of-any-system") == ""
    assert environment.version("no-such-package-of-ours") is None
    package = tmp_path / "src" / "fullstride"
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").write_bytes(b"\xff")
    assert environment.commit(package) is None
    monkeypatch.setattr(environment.Path, "read_text", missing_file)
    assert environment.cpu_name.__wrapped__() == (
        environment.platform.processor() or environment.platform.machine()
    )
    assert max_batch.available_bytes() == float("inf")


def missing_file(*_) -> str:
    raise FileNotFoundError


@pytest.mark.usefixtures("gpu")
def test_the_peak_of_a_gpu_is_of_its_call_with_what_stays_there():
    resident = [torch.empty(MIB, dtype=torch.uint8), torch.empty(MIB, dtype=torch.float32)]
    assert max_batch.peak_mib(resident, lambda: None, GPU) == 5 + 60


def test_the_memory_of_a_gpu_is_limited_as_long_as_it_is_measured(gpu):
    with bench.bounded(GPU, 0.25):
        assert gpu == [0.25]
    assert gpu == [0.25, 1.0]
    with pytest.raises(ValueError, match="has 0.5 GiB free"):
        max_batch.budget_bytes(0.75, GPU)


@pytest.mark.usefixtures("gpu")
def test_the_environment_of_a_gpu_is_asked_for_while_it_computes(monkeypatch):
    computed = threading.Event()

    def here(_device):
        assert computed.wait(60)
        return "under load"

    monkeypatch.setattr(bench.Environment, "here", staticmethod(here))
    assert bench.environment_under_load(computed.set, 1, GPU) == "under load"


def test_a_clock_waits_for_the_gpu(monkeypatch):
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    protocols.wait(GPU)
    protocols.wait(torch.device("cpu"))
    assert waits == [GPU]


def test_a_gpu_without_bf16_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(ValueError, match="Tesla T4 has no bf16: say --precision fp16"):
        bench.check_possible(
            {}, protocols.THROUGHPUT, GPU, bench.BenchOptions(precision="bfloat16")
        )


def test_a_suite_ends_where_the_gpu_does_not_answer(monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch, "zeros", lost)
    with pytest.raises(OSError, match="illegal memory access"):
        suite.check_alive(torch.device("cpu"))


def small() -> Trial:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Trial(net=net, resolution=8, device="cpu", memory_bytes=2**30, options=StepOptions())


def test_the_process_of_a_trial_answers_in_json(monkeypatch, capsys):
    monkeypatch.setattr(max_batch, "limit_memory", lambda *_: None)

    def answer(trial: Trial) -> dict:
        stdin = io.TextIOWrapper(io.BytesIO(pickle.dumps((trial, 2))))
        monkeypatch.setattr(sys, "stdin", stdin)
        max_batch.main()
        return json.loads(capsys.readouterr().out)

    assert answer(small()) == dict(batch=2, outcome="fits", peak_memory_mib=None, why="")
    assert answer(replace(small(), in_channels=4))["error"].startswith("RuntimeError ")


def test_a_batch_for_which_the_allocator_retries_does_not_fit(monkeypatch):
    counts = iter((3, 4))
    monkeypatch.setattr(max_batch, "limit_memory", lambda *_: None)
    monkeypatch.setattr(max_batch, "retries", lambda _: next(counts))
    assert small().run(2).outcome == "memory"


def test_retries_are_those_of_the_allocator_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": 7})
    assert max_batch.retries(GPU) == 7
    assert max_batch.retries(torch.device("cpu")) == 0


def listed(heading: str) -> list[str]:
    """The names in the first column of a table of the page on tests; `.b` after `a.c` is `a.b`."""
    names: list[str] = []
    for row in PAGE.read_text().partition(heading)[2].split("\n\n")[1].splitlines()[2:]:
        for name in re.findall("`(.*?)`", row.split("|")[1]):
            names.append(names[-1].rpartition(".")[0] + name if name[0] == "." else name)
    return names


def source(name: str) -> str:
    """The source of a module of the package, or of a function or method in it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(["fullstride", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        return inspect.getsource(reduce(getattr, parts[length:], module))
    raise AssertionError(name)


def test_what_only_a_gpu_reaches_is_listed_by_names_that_exist():
    of_gpu, of_processes = listed("What runs on one alone"), listed("in processes of their own")
    assert "measure.workload.Step.leave" in of_gpu
    for name in of_gpu:
        assert "cuda" in source(name), name
    for name in set(of_processes) - {"__main__"}:  # which would run a command
        assert source(name), name
