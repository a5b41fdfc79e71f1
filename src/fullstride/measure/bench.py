"""How fast is it here? Throughput and latency by a named protocol, several networks in turn.

Networks are timed one after the other inside every round: when the machine slows down it does so for all,
and the ratio of two networks survives. Medians and spread, never the best.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fullstride.measure.capacity import MULTIPLE, Probe, Trial, largest, predict, search
from fullstride.measure.environment import Environment, find_device
from fullstride.measure.memory import (
    asked_bytes,
    available_bytes,
    check_fits,
    limit_memory,
    memory_errors,
    peak_mib,
    share_memory,
)
from fullstride.measure.step import Layout, Precision, Step, Work, compiling, exact_float32


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How to time. Change a field and the numbers are no longer comparable."""

    name: Literal["throughput", "online", "tresnet", "genet", "resnet_rs"]
    batch: int  # images a call; where `fit` is not given, what is found for each network takes its place
    resolution: int = 224  # pixels a side
    warmup_s: float = 1.0  # seconds, not iterations: clocks and autotuning settle in time
    rounds: int = 20
    round_s: float = 0.2  # of each network in each round; one call where that takes longer
    work: Work = "inference"
    fit: Literal["given", "halved", "filled"] = "given"  # halved until it trains, or FILLED of the largest that trains
    trim: float = 0.0  # share of the samples that is left out of `ms_per_image` at either end
    memory_batch: int | None = None  # images at which memory is looked at; None: those of a call

    def __post_init__(self) -> None:
        for name in ("batch", "resolution", "rounds"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} {value!r}: use a whole number from 1")
        if self.warmup_s < 0 or self.round_s <= 0:
            raise ValueError(f"warmup_s {self.warmup_s:g}, round_s {self.round_s:g}: use seconds above 0")

    @property
    def waits(self) -> bool:
        """Wait after every call, or queue calls and wait once a round."""
        return self.name in ("online", "genet")

    @property
    def precision(self) -> Precision:
        """That of the paper; float32 where there is none."""
        return "float16" if self.name in ("tresnet", "genet") else "float32"


# How many images a second when there is always a next batch: calls are queued, as in real use, and the
# device is waited for once a round; waiting after every call would add the launch gap to each one.
THROUGHPUT = Protocol(name="throughput", batch=64)

# How long one user waits for one image: every call is waited for. p99 needs some hundred calls to mean much.
ONLINE = Protocol(name="online", batch=1)

# Tables 1, 3, 4 and 5 of TResNet, arXiv:2003.13630: how much a GPU does when it is as full as training gets it.
FILLED = 0.9
TRESNET = Protocol(name="tresnet", batch=MULTIPLE, fit="filled")

# Table 3 of GENet, arXiv:2006.14090: one call a round, each waited for.
GENET = Protocol(name="genet", batch=1, rounds=30, round_s=1e-6, trim=0.1)

# Table 7 of ResNet-RS, arXiv:2103.07579.
RESNET_RS = Protocol(name="resnet_rs", batch=128, work="training", fit="halved", memory_batch=32)

# What each name stands for: its parts are timed one after the other and never compared with each other.
PROTOCOLS: dict[str, tuple[Protocol, ...]] = {
    "online": (ONLINE,),
    "throughput": (THROUGHPUT,),
    "tresnet": (replace(TRESNET, work="training"), TRESNET),
    "genet": tuple(replace(GENET, batch=2**power) for power in range(8)),
    "resnet_rs": (RESNET_RS,),
}


def find_protocol(name: str) -> tuple[Protocol, ...]:
    if name not in PROTOCOLS:
        close = get_close_matches(name, PROTOCOLS, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(PROTOCOLS)}"
        raise ValueError(f"no protocol named {name!r}: {hint}")
    return PROTOCOLS[name]


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
    ms_per_image: float | None = None  # mean of what `trim` leaves; genet only
    cpu_ms_per_image: float | None = None  # of all threads, median over rounds: steadier than wall time; CPU only
    peak_memory_mib: float | None = None  # weights, input and what a call takes at most; GPU only
    largest_batch: int | None = None  # that trains; tresnet only
    memory_gib: float | None = None  # of the device that could be used, where that was bounded
    reference: str | None = None  # the network that `ratio` is to
    ratio: float | None = None  # of images_per_s to the reference's, in the same round, median over rounds
    samples: tuple[float, ...] = field(repr=False)  # online and genet: ms of every call; else images/s of every round
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
    reference: str | None = None,
    memory_gib: float | None = None,
    found: Mapping[str, int] | None = None,
) -> list[Measurement]:
    """Measure each network on random images that are already on the device.

    The networks given are left as they are: copies are moved, converted and timed. float32 is true float32:
    TF32, which PyTorch allows in convolutions unless told otherwise, is off. `threads` of the CPU, None: as
    torch is set. On a machine that others use, take one: a thread that waits for a core holds up all others,
    and a small network then takes a hundred times as long.

    `reference` is the network that ratios are to. `memory_gib` bounds what a GPU gives, or the CPU where the batch
    has to be found; `found` are the batches that `fitting` finds, None: they are looked for.
    """
    device = find_device(device)
    how: dict[str, Any] = dict(precision=precision, layout=layout, compiled=compiled)
    check_possible(protocol, device, precision, memory_gib)
    if reference is not None and reference not in nets:
        raise ValueError(f"reference {reference} is not measured: choose from {', '.join(nets)}")
    if protocol.fit != "given" and found is None:
        found = fitting(nets, protocol, device, in_channels, memory_gib=memory_gib, **how)
    steps: dict[str, Step] = {}
    peaks: dict[str, float | None] = {}
    side = protocol.resolution

    def step(net: nn.Module, batch: int) -> Step:
        return Step(net, protocol.work, batch, side, device, in_channels, **how)

    def ready(name: str, net: nn.Module, batch: int) -> Step:
        check_room(net, protocol, batch, device, in_channels, precision)
        watched = step(net, min(batch, protocol.memory_batch or batch))
        watched()  # compiles, picks algorithms, and shows whether the batch fits
        peaks[name] = peak_mib(watched.held(), watched, device)
        return watched if watched.shape[0] == batch else step(net, batch)

    with exact_float32(), cpu_threads(threads), bounded(device, memory_gib), compiling(compiled):
        for name, net in nets.items():
            batch = batch_of(protocol, (found or {}).get(name))
            with lack_of_memory(batch, side):
                steps[name] = ready(name, net, batch)
                if alone(protocol):
                    steps[name].leave()
        with lack_of_memory(protocol.batch, side):
            measured = measure_all(steps, protocol, device, reference=reference, **how)
    return [
        replace(
            one,
            peak_memory_mib=peaks[one.name],
            largest_batch=(found or {}).get(one.name) if protocol.fit == "filled" else None,
            memory_gib=memory_gib,
        )
        for one in measured
    ]


def bench_all(
    nets: Mapping[str, nn.Module],
    protocols: Sequence[Protocol],
    device: torch.device | str = "cpu",
    in_channels: int = 3,
    **how: Any,
) -> Iterator[list[Measurement]]:
    """The parts of one named protocol: what `bench` gives for each; batches that have to be found are found once."""
    found = None
    keys = ("precision", "layout", "compiled", "memory_gib")
    for protocol in protocols:
        check_possible(protocol, find_device(device), how.get("precision", "float32"), how.get("memory_gib"))
        if protocol.fit != "given" and found is None:
            asked = {key: how[key] for key in keys if key in how}
            found = fitting(nets, protocol, find_device(device), in_channels, **asked)
        yield bench(nets, protocol, device, in_channels, found=found, **how)


def check_possible(protocol: Protocol, device: torch.device, precision: Precision, memory_gib: float | None) -> None:
    """ValueError for what cannot be measured here as it is asked for."""
    if device.type == "cpu" and precision == "float16":
        raise ValueError(f"{protocol.name} in float16 is for GPUs: on the CPU say --precision bf16 or fp32")
    if device.type == "cuda" and precision == "bfloat16" and not torch.cuda.is_bf16_supported(False):
        raise ValueError(f"{torch.cuda.get_device_name(device)} has no bfloat16: say --precision fp16 or fp32")
    if device.type == "cpu" and protocol.fit == "filled" and memory_gib is None:
        raise ValueError(f"protocol {protocol.name} fills a GPU: on the CPU say with --memory-gib how much to fill")
    asked_bytes(memory_gib, device)


def fitting(
    nets: Mapping[str, nn.Module],
    protocol: Protocol,
    device: torch.device,
    in_channels: int = 3,
    *,
    precision: Precision = "float32",
    layout: Layout = "nchw",
    compiled: bool = False,
    memory_gib: float | None = None,
) -> dict[str, int]:
    """The largest batch of each network that trains, or the first of `protocol.batch`, its half, ... that does."""
    room = asked_bytes(memory_gib, device)

    def find(name: str, net: nn.Module) -> int:
        size: dict[str, Any] = dict(resolution=protocol.resolution, in_channels=in_channels, precision=precision)
        guess = predict(net, room, **size, device=device.type)  # pyright: ignore[reportArgumentType]
        how: dict[str, Any] = dict(layout=layout, compiled=compiled, map_batch=guess.map_batch)
        trial = Trial(net=net, device=str(device), memory_bytes=room, **size, **how)
        filled = protocol.fit == "filled"
        probes = search(trial.probe, guess.batch) if filled else halving(trial.probe, protocol.batch)
        return largest(probes, f"{name} at {protocol.resolution} x {protocol.resolution}")

    return {name: find(name, net) for name, net in nets.items()}


def halving(probe: Callable[[int], Probe], batch: int) -> Iterator[Probe]:
    while batch:
        tried = probe(batch)
        yield tried
        batch = 0 if tried.fits else batch // 2


def batch_of(protocol: Protocol, found: int | None) -> int:
    """The batch to time, of what `fitting` found; a multiple of 8 where it is 8 or more."""
    if protocol.fit == "given" or found is None:
        return protocol.batch
    batch = max(1, int(FILLED * found)) if protocol.fit == "filled" else found
    return batch // MULTIPLE * MULTIPLE if protocol.fit == "filled" and batch > MULTIPLE else batch


def check_room(
    net: nn.Module, protocol: Protocol, batch: int, device: torch.device, in_channels: int, precision: Precision
) -> None:
    """MemoryError where the CPU is not expected to have room; a GPU says so itself."""
    if device.type == "cuda":
        return
    side = protocol.resolution
    if protocol.work == "training":
        if predict(net, available_bytes(), side, precision, in_channels, device="cpu").batch < batch:
            raise MemoryError
        return
    one = Step(net, "inference", 1, side, device, in_channels, precision=precision)
    assert one.images is not None
    with torch.inference_mode():
        check_fits(one.net, one.images, batch)


def alone(protocol: Protocol) -> bool:
    """Whether each network is on the GPU only while it is timed: a batch that fills it leaves no room for others."""
    return protocol.fit != "given"


def lack_of_memory(batch: int, side: int):
    return memory_errors(
        f"batch {batch} at {side} x {side}", f"try a smaller --{'batch' if batch > 1 else 'resolution'}"
    )


@contextmanager
def bounded(device: torch.device, memory_gib: float | None) -> Iterator[None]:
    """No more than this of a GPU; the CPU is bounded in the processes that look for a batch only."""
    if device.type == "cpu" or memory_gib is None:
        yield
        return
    limit_memory(asked_bytes(memory_gib, device), device)
    try:
        yield
    finally:
        share_memory(1.0, device)


def measure_all(
    steps: Mapping[str, Callable[[], object]],
    protocol: Protocol,
    device: torch.device | str = "cpu",
    *,
    precision: Precision = "float32",
    layout: Layout = "nchw",
    compiled: bool = False,
    reference: str | None = None,
) -> list[Measurement]:
    """Time each step, which processes one batch already on `device`, in turn inside every round."""
    device = find_device(device)
    timed = timed_each if protocol.waits else timed_calls
    batches = {name: step.shape[0] if isinstance(step, Step) else protocol.batch for name, step in steps.items()}
    calls: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    rates: dict[str, list[float]] = {name: [] for name in steps}
    cpu_ms: dict[str, list[float]] = {name: [] for name in steps}
    environments: dict[str, Environment] = {}

    def turn(step: Callable[[], object]):
        return step.turn() if isinstance(step, Step) and alone(protocol) else nullcontext()

    for name, step in steps.items():
        with turn(step):
            calls[name] = warm_up(step, protocol, device)
    for number in range(protocol.rounds):
        for name, step in steps.items():
            with turn(step):
                seconds, cpu_s = timed(step, calls[name], device)
                if number == protocol.rounds - 1:
                    environments[name] = at_work(step, calls[name], device)
            images = calls[name] * batches[name]
            rates[name].append(images / sum(seconds))
            samples[name] += [s * 1e3 for s in seconds] if protocol.waits else [images / s for s in seconds]
            cpu_ms[name].append(cpu_s * 1e3 / images)

    def summary(name: str) -> Measurement:
        p10, p50, p90, p99 = (float(p) for p in np.percentile(samples[name], (10, 50, 90, 99)))
        online = protocol.name == "online"
        cut = round(protocol.trim * len(samples[name]))
        middle = sorted(samples[name])[cut : len(samples[name]) - cut]
        return Measurement(
            name=name,
            protocol=replace(protocol, batch=batches[name]),
            images_per_s=batches[name] * 1e3 / p50 if protocol.waits else p50,
            spread=(p90 - p10) / p50,
            ms_p50=p50 if online else None,
            ms_p90=p90 if online else None,
            ms_p99=p99 if online else None,
            ms_per_image=float(np.mean(middle)) / batches[name] if protocol.name == "genet" else None,
            cpu_ms_per_image=float(np.median(cpu_ms[name])) if device.type == "cpu" else None,
            reference=reference,
            ratio=float(np.median(np.divide(rates[name], rates[reference]))) if reference else None,
            samples=tuple(samples[name]),
            precision=precision,
            layout=layout,
            compiled=compiled,
            environment=environments[name],
        )

    return [summary(name) for name in steps]


def at_work(step: Callable[[], object], calls: int, device: torch.device) -> Environment:
    """Where this is; of a GPU while it works, because clocks and what holds them back are others when it rests."""
    if device.type == "cpu":
        return Environment.here(device)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(Environment.here, device)
        while not told.done():
            timed_calls(step, calls, device)
        return told.result()


def compare(one: Measurement, other: Measurement) -> float:
    """How many times as fast `one` is as `other`. Raises ValueError for two that were not measured alike."""

    def how(row: Measurement) -> dict[str, Any]:
        # a batch that was found belongs to the network
        protocol = row.protocol if row.protocol.fit == "given" else replace(row.protocol, batch=1)
        here = {key: getattr(row.environment, key) for key in ("device", "threads", "torch", "driver")}
        told = {key: getattr(row, key) for key in ("precision", "layout", "compiled", "memory_gib")}
        return {**asdict(protocol), **told, **here}

    ways = how(one), how(other)
    unlike = [f"{key} {ways[0][key]} and {ways[1][key]}" for key in ways[0] if ways[0][key] != ways[1][key]]
    if unlike:
        raise ValueError(
            f"{one.name} and {other.name} were not measured alike ({'; '.join(unlike)}): measure both again"
        )
    return one.images_per_s / other.images_per_s


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
def cpu_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        yield
    finally:
        torch.set_num_threads(before)
