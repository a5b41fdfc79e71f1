"""How fast is it here? Throughput and latency by a named protocol, several networks in turn.

Networks are timed one after the other inside every round: when the machine slows down it does so for all,
and the ratio of two networks survives. Medians and spread, never the best.
"""

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fullstride.measure.environment import Environment, find_device
from fullstride.measure.memory import check_fits, memory_errors, peak_mib

Precision = Literal["float32", "bfloat16", "float16"]
Layout = Literal["nchw", "nhwc"]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How to time. Change a field and the numbers are no longer comparable."""

    name: Literal["throughput", "online"]  # queue calls and wait once a round, or wait after every call
    batch: int  # images a call
    resolution: int = 224  # pixels a side
    warmup_s: float = 1.0  # seconds, not iterations: clocks and autotuning settle in time
    rounds: int = 20
    round_s: float = 0.2  # of each network in each round; one call where that takes longer

    def __post_init__(self) -> None:
        for name in ("batch", "resolution", "rounds"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} {value!r}: use a whole number from 1")
        if self.warmup_s < 0 or self.round_s <= 0:
            raise ValueError(f"warmup_s {self.warmup_s:g}, round_s {self.round_s:g}: use seconds above 0")


# How many images a second when there is always a next batch: calls are queued, as in real use, and the
# device is waited for once a round; waiting after every call would add the launch gap to each one.
THROUGHPUT = Protocol(name="throughput", batch=64)

# How long one user waits for one image: every call is waited for. p99 needs some hundred calls to mean much.
ONLINE = Protocol(name="online", batch=1)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A result that can be believed later: what, how, where."""

    name: str  # of the network
    protocol: Protocol
    images_per_s: float  # at the median
    spread: float  # (p90 - p10) / median of the samples; above 0.05 the machine was not quiet
    ms_p50: float | None = None  # of a call, as the two below; online only
    ms_p90: float | None = None
    ms_p99: float | None = None
    cpu_ms_per_image: float | None = None  # of all threads, median over rounds: steadier than wall time; CPU only
    peak_memory_mib: float | None = None  # weights, input and what a call takes at most; GPU only
    samples: tuple[float, ...] = field(repr=False)  # throughput: images/s of every round; online: ms of every call
    precision: Precision
    layout: Layout
    compiled: bool
    environment: Environment

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Measurement":
        """Raises ValueError, in one line, for anything that `to_json` would not write."""
        try:
            data = dict(json.loads(text))
            data["protocol"] = Protocol(**data["protocol"])
            data["environment"] = Environment(**data["environment"])
            return cls(**{**data, "samples": tuple(data["samples"])})
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"this is not the JSON of a measurement: {type(error).__name__} {error}") from None


def bench(
    nets: Mapping[str, nn.Module],
    protocol: Protocol = THROUGHPUT,
    device: torch.device | str = "cpu",
    in_channels: int = 3,
    *,
    precision: Precision = "float32",
    layout: Layout = "nchw",
    compiled: bool = False,
    threads: int | None = None,
) -> list[Measurement]:
    """Measure inference of each network on random images that are already on the device.

    The networks given are left as they are: copies are moved, converted and timed. float32 is true float32:
    TF32, which PyTorch allows in convolutions unless told otherwise, is off. `threads` of the CPU, None: as
    torch is set. On a machine that others use, take one: a thread that waits for a core holds up all others,
    and a small network then takes a hundred times as long.
    """
    device = find_device(device)
    memory_format = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}[layout]
    dtype = getattr(torch, precision)
    batch, side = protocol.batch, protocol.resolution
    steps: dict[str, Callable[[], Tensor]] = {}
    peaks: dict[str, float | None] = {}

    def prepared(net: nn.Module) -> nn.Module:
        return copy.deepcopy(net).eval().to(device, dtype).to(memory_format=memory_format)

    def random_images(number: int) -> Tensor:
        images = torch.randn(number, in_channels, side, side, device=device, dtype=dtype)
        return images.contiguous(memory_format=memory_format)

    with (
        torch.inference_mode(),
        exact_float32(),
        cpu_threads(threads),
        memory_errors(f"batch {batch} at {side} x {side}", f"try a smaller --{'batch' if batch > 1 else 'resolution'}"),
    ):
        ready = {name: prepared(net) for name, net in nets.items()}
        for net in ready.values():
            check_fits(net, random_images(1), batch)
        images = random_images(batch)
        for name, net in ready.items():
            call = torch.compile(net) if compiled else net
            call(images)  # compiles, picks algorithms, and shows whether the batch fits
            peaks[name] = peak_mib(net, call, images)
            steps[name] = partial(call, images)
        found = measure_all(steps, protocol, device, precision=precision, layout=layout, compiled=compiled)
    return [replace(measurement, peak_memory_mib=peaks[measurement.name]) for measurement in found]


def measure_all(
    steps: Mapping[str, Callable[[], object]],
    protocol: Protocol,
    device: torch.device | str = "cpu",
    *,
    precision: Precision = "float32",
    layout: Layout = "nchw",
    compiled: bool = False,
) -> list[Measurement]:
    """Time each step, which processes one batch already on `device`, in turn inside every round."""
    device = find_device(device)
    timed = timed_calls if protocol.name == "throughput" else timed_each
    calls = {name: warm_up(step, protocol, device) for name, step in steps.items()}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    cpu_ms: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(protocol.rounds):
        for name, step in steps.items():
            seconds, cpu_s = timed(step, calls[name], device)
            images = calls[name] * protocol.batch
            samples[name] += [images / s for s in seconds] if timed is timed_calls else [s * 1e3 for s in seconds]
            cpu_ms[name].append(cpu_s * 1e3 / images)

    environment = Environment.here(device)

    def summary(name: str) -> Measurement:
        p10, p50, p90, p99 = (float(p) for p in np.percentile(samples[name], (10, 50, 90, 99)))
        online = protocol.name == "online"
        return Measurement(
            name=name,
            protocol=protocol,
            images_per_s=protocol.batch * 1e3 / p50 if online else p50,
            spread=(p90 - p10) / p50,
            ms_p50=p50 if online else None,
            ms_p90=p90 if online else None,
            ms_p99=p99 if online else None,
            cpu_ms_per_image=float(np.median(cpu_ms[name])) if device.type == "cpu" else None,
            samples=tuple(samples[name]),
            precision=precision,
            layout=layout,
            compiled=compiled,
            environment=environment,
        )

    return [summary(name) for name in steps]


def warm_up(step: Callable[[], object], protocol: Protocol, device: torch.device) -> int:
    """Run until the clocks have settled; returns how many calls fill a round."""
    calls, deadline = 1, time.perf_counter() + protocol.warmup_s
    while True:
        (seconds,), _ = timed_calls(step, calls, device)
        calls = max(1, round(calls * protocol.round_s / max(seconds, 1e-6)))
        if time.perf_counter() >= deadline:
            return calls


def timed_calls(step: Callable[[], object], calls: int, device: torch.device) -> tuple[list[float], float]:
    """Seconds of all calls together, and of CPU time."""
    cpu_start, start = time.process_time(), time.perf_counter()
    for _ in range(calls):
        step()
    wait(device)
    return [time.perf_counter() - start], time.process_time() - cpu_start


def timed_each(step: Callable[[], object], calls: int, device: torch.device) -> tuple[list[float], float]:
    """Seconds of every call, and of CPU time for all."""
    step()  # not counted: it finds in the caches what another network left there
    wait(device)
    seconds, cpu_start = [], time.process_time()
    for _ in range(calls):
        start = time.perf_counter()
        step()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return seconds, time.process_time() - cpu_start


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def exact_float32() -> Iterator[None]:
    """No TF32. Algorithms are chosen by trial, which pays because shapes do not change."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def cpu_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        yield
    finally:
        torch.set_num_threads(before)
