"""How fast is it here? Throughput and latency by a named protocol, several networks in turn.

Networks are timed one after the other inside every round: a machine that slows down does so for all
of them, and the ratio of two networks stays reliable. Results are medians with a spread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fullstride.measure.environment import Environment, find_device, has_bf16
from fullstride.measure.max_batch import (
    MULTIPLE,
    Probe,
    Trial,
    available_bytes,
    budget_bytes,
    check_fits,
    largest,
    limit_memory,
    memory_errors,
    peak_mib,
    predict,
    search,
    set_memory_fraction,
)
from fullstride.measure.protocols import FILLED, ONLINE, THROUGHPUT, Measurement, Protocol
from fullstride.measure.timing import (
    BUSY,
    cpu_threads,
    spread,
    spread_of_rounds,
    timed_calls,
    timed_each,
    warm_up,
)
from fullstride.measure.workload import (
    Layout,
    Precision,
    Step,
    compiling,
    exact_float32,
    fused_copy,
)
from fullstride.nets.efficiency import Efficiency, is_compiled, is_fused

# Which batch does a protocol time? The one it names, or the largest that fits in memory.


def find_batches(
    nets: Mapping[str, nn.Module],
    protocol: Protocol,
    device: torch.device,
    in_channels: int = 3,
    *,
    precision: Precision = "float32",
    layout: Layout = "nchw",
    compiled: bool = False,
    efficiency: Mapping[str, Efficiency] | None = None,
    memory_gib: float | None = None,
) -> dict[str, int]:
    """The batch of each network for a protocol that fits it to memory.

    "filled": the largest batch that trains; "halved": the first of `protocol.batch`, its half, ...
    that trains.
    """
    room = budget_bytes(memory_gib, device)

    def find(name: str, net: nn.Module) -> int:
        size: dict[str, Any] = dict(
            resolution=protocol.resolution, in_channels=in_channels, precision=precision
        )
        size |= dict(compiled=compiled, efficiency=(efficiency or {}).get(name, "plain"))
        options: dict[str, Any] = dict(size, device=device.type)
        guess = predict(net, room, **options)
        limits: dict[str, Any] = dict(
            device=str(device), memory_bytes=room, map_batch=guess.map_batch
        )
        trial = Trial(net=net, layout=layout, **limits, **size)
        if protocol.fit == "filled":
            probes = search(trial.probe, guess.batch)
        else:
            probes = halving(trial.probe, protocol.batch)
        return largest(probes, f"{name} at {protocol.resolution} x {protocol.resolution}")

    return {name: find(name, net) for name, net in nets.items()}


def halving(probe: Callable[[int], Probe], batch: int) -> Iterator[Probe]:
    while batch:
        result = probe(batch)
        yield result
        batch = 0 if result.fits else batch // 2


def timed_batch(protocol: Protocol, largest: int | None) -> int:
    """The batch to time: the protocol's, or FILLED of the `largest` that trains, in eights."""
    if protocol.fit == "given" or largest is None:
        return protocol.batch
    batch = max(1, int(FILLED * largest)) if protocol.fit == "filled" else largest
    return batch // MULTIPLE * MULTIPLE if protocol.fit == "filled" and batch > MULTIPLE else batch


def check_room(
    net: nn.Module,
    protocol: Protocol,
    batch: int,
    device: torch.device,
    in_channels: int,
    precision: Precision,
    efficiency: Efficiency = "plain",
) -> None:
    """Raise MemoryError if the CPU is not expected to have room.

    GPUs and the runtimes of exported files raise their own error.
    """
    if device.type == "cuda" or hasattr(net, "random_images"):
        return
    side = protocol.resolution
    if protocol.work == "training":
        # A compiled step saves no more than the eager one, which is quick to count.
        eager: Efficiency = "fused" if is_fused(efficiency) else "plain"
        options: dict[str, Any] = dict(device="cpu", efficiency=eager)
        room = available_bytes()
        if predict(net, room, side, precision, in_channels, **options).batch < batch:
            raise MemoryError
        return
    one = Step(net, "inference", 1, side, device, in_channels, precision=precision)
    assert one.images is not None
    with torch.inference_mode():
        check_fits(one.net, one.images, batch)


def lack_of_memory(batch: int, side: int) -> AbstractContextManager[None]:
    return memory_errors(
        f"batch {batch} at {side} x {side}",
        f"try a smaller --{'batch' if batch > 1 else 'resolution'}",
    )


@contextmanager
def bounded(device: torch.device, memory_gib: float | None) -> Iterator[None]:
    """Limit the memory of a GPU. The CPU's is limited in the processes that search a batch only."""
    if device.type == "cpu" or memory_gib is None:
        yield
        return
    limit_memory(budget_bytes(memory_gib, device), device)
    try:
        yield
    finally:
        set_memory_fraction(1.0, device)


def bench(
    nets: Mapping[str, nn.Module],
    protocol: Protocol = THROUGHPUT,
    device: torch.device | str = "cpu",
    in_channels: int = 3,
    *,
    precision: Precision = "float32",
    layout: Layout = "nchw",
    compiled: bool = False,
    efficiency: Mapping[str, Efficiency] | None = None,
    threads: int | None = None,
    reference: str | None = None,
    memory_gib: float | None = None,
    batches: Mapping[str, int] | None = None,
    resolutions: Mapping[str, int] | None = None,
) -> list[Measurement]:
    """Measure each network on random images that are already on the device.

    The networks are not changed: copies are moved, converted and timed. float32 is true float32:
    TF32, PyTorch's default in convolutions, is off. `threads`: of the CPU, by default torch's
    setting. On a shared machine use one: a thread that waits for a core delays all others, and a
    small network can take a hundred times as long.

    `efficiency`: how each network trains, by name; missing ones are plain. `reference`: the network
    that ratios are relative to, whatever its efficiency. `memory_gib` bounds the memory of a GPU,
    or of the CPU in the search for a batch. `batches`: the result of `find_batches` for protocols
    that fit the batch to memory; by default it is computed here. `resolutions`: the networks that
    are measured at another resolution than the protocol's, where the batch is given.
    """
    device = find_device(device)
    options: dict[str, Any] = dict(precision=precision, layout=layout, compiled=compiled)
    check_possible(protocol, device, precision, memory_gib)
    forms: dict[str, Efficiency] = {name: (efficiency or {}).get(name, "plain") for name in nets}
    for name in (name for name, form in forms.items() if form != "plain"):
        if protocol.work == "inference":
            raise ValueError(
                f"{name}, {forms[name]}: an efficiency is for training, leave it out for inference"
            )
        if is_fused(forms[name]):
            fused_copy(nets[name], name)
    if reference is not None and reference not in nets:
        raise ValueError(f"reference {reference} is not measured: choose from {', '.join(nets)}")
    if protocol.fit != "given" and batches is None:
        limits: dict[str, Any] = dict(memory_gib=memory_gib, efficiency=forms)
        batches = find_batches(nets, protocol, device, in_channels, **limits, **options)
    batches = batches or {}
    steps: dict[str, Step] = {}
    peaks: dict[str, float | None] = {}
    own = (resolutions or {}) if protocol.fit == "given" else {}
    sides = {name: own.get(name, protocol.resolution) for name in nets}
    adapted = {name: replace(protocol, resolution=side) for name, side in sides.items()}

    def step(name: str, batch: int) -> Step:
        form, side = forms[name], sides[name]
        return Step(
            nets[name], protocol.work, batch, side, device, in_channels, efficiency=form, **options
        )

    def prepare(name: str, batch: int) -> Step:
        check_room(nets[name], adapted[name], batch, device, in_channels, precision, forms[name])
        first = step(name, min(batch, protocol.memory_batch or batch))
        first()  # compiles, picks algorithms, and shows whether the batch fits
        peaks[name] = peak_mib(first.resident(), first, device)
        return first if first.shape[0] == batch else step(name, batch)

    compiles = compiled or any(map(is_compiled, forms.values()))
    with exact_float32(), cpu_threads(threads), bounded(device, memory_gib), compiling(compiles):
        for name in nets:
            batch = timed_batch(protocol, batches.get(name))
            with lack_of_memory(batch, sides[name]):
                steps[name] = prepare(name, batch)
                if is_alone(protocol):
                    steps[name].leave()
        with lack_of_memory(protocol.batch, protocol.resolution):
            rows = measure_all(steps, protocol, device, reference=reference, **options)
    return [
        replace(
            row,
            peak_memory_mib=peaks[row.name],
            runtime=getattr(nets[row.name], "runtime", ""),
            largest_batch=batches.get(row.name) if protocol.fit == "filled" else None,
            memory_gib=memory_gib,
        )
        for row in rows
    ]


def bench_all(
    nets: Mapping[str, nn.Module],
    protocols: Sequence[Protocol],
    device: torch.device | str = "cpu",
    in_channels: int = 3,
    **options: Any,
) -> Iterator[list[Measurement]]:
    """`bench` for each part of a named protocol, with one search for the batches."""
    batches = None
    keys = ("precision", "layout", "compiled", "efficiency", "memory_gib")
    shared = {key: options[key] for key in keys if key in options}
    precision, memory_gib = options.get("precision", "float32"), options.get("memory_gib")
    for protocol in protocols:
        check_possible(protocol, find_device(device), precision, memory_gib)
        if protocol.fit != "given" and batches is None:
            batches = find_batches(nets, protocol, find_device(device), in_channels, **shared)
        yield bench(nets, protocol, device, in_channels, batches=batches, **options)


def check_possible(
    protocol: Protocol, device: torch.device, precision: Precision, memory_gib: float | None
) -> None:
    """Raise ValueError for a combination that cannot be measured here."""
    if device.type == "cpu" and precision == "float16":
        raise ValueError(
            f"{protocol.name} in fp16 is for GPUs: on the CPU say --precision bf16 or fp32"
        )
    if device.type == "cuda" and precision == "bfloat16" and not has_bf16(device):
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has no bf16: say --precision fp16 or fp32"
        )
    if device.type == "cpu" and protocol.fit == "filled" and memory_gib is None:
        raise ValueError(
            f"protocol {protocol.name} fills a GPU: on the CPU say with --memory-gib how much to "
            "fill"
        )
    budget_bytes(memory_gib, device)


def is_alone(protocol: Protocol) -> bool:
    """Whether networks are on the GPU only while they are timed: a full GPU has room for one."""
    return protocol.fit != "given"


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
    batches = {
        name: step.shape[0] if isinstance(step, Step) else protocol.batch
        for name, step in steps.items()
    }
    calls: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    rates: dict[str, list[float]] = {name: [] for name in steps}
    cpu_ms: dict[str, list[float]] = {name: [] for name in steps}
    environments: dict[str, Environment] = {}

    def on_device(step: Callable[[], object]) -> AbstractContextManager[None]:
        return step.on_device() if isinstance(step, Step) and is_alone(protocol) else nullcontext()

    for name, step in steps.items():
        with on_device(step):
            calls[name] = warm_up(step, protocol, device)
    for number in range(protocol.rounds):
        for name, step in steps.items():
            with on_device(step):
                seconds, cpu_s = timed(step, calls[name], device)
                if number == protocol.rounds - 1:
                    environments[name] = environment_under_load(step, calls[name], device)
            images = calls[name] * batches[name]
            rates[name].append(images / sum(seconds))
            samples[name] += (
                [s * 1e3 for s in seconds] if protocol.waits else [images / s for s in seconds]
            )
            cpu_ms[name].append(cpu_s * 1e3 / images)

    def summary(name: str) -> Measurement:
        step = steps[name]
        side = step.shape[-1] if isinstance(step, Step) else protocol.resolution
        p50, p90, p99 = (float(p) for p in np.percentile(samples[name], (50, 90, 99)))
        online = protocol.name == "online"
        trim = round(protocol.trim * len(samples[name]))
        trimmed = sorted(samples[name])[trim : len(samples[name]) - trim]
        is_genet = protocol.name == "genet"
        return Measurement(
            name=name,
            protocol=replace(protocol, batch=batches[name], resolution=side),
            images_per_s=batches[name] * 1e3 / p50 if protocol.waits else p50,
            spread=spread(samples[name]),
            ms_p50=p50 if online else None,
            ms_p90=p90 if online else None,
            ms_p99=p99 if online else None,
            ms_per_image=float(np.mean(trimmed)) / batches[name] if is_genet else None,
            cpu_ms_per_image=float(np.median(cpu_ms[name])) if device.type == "cpu" else None,
            reference=reference,
            ratio=float(np.median(np.divide(rates[name], rates[reference]))) if reference else None,
            samples=tuple(samples[name]),
            precision=precision,
            layout=layout,
            compiled=step.is_compiled if isinstance(step, Step) else compiled,
            efficiency=step.efficiency if isinstance(step, Step) else "plain",
            environment=environments[name],
        )

    return [summary(name) for name in steps]


def environment_under_load(
    step: Callable[[], object], calls: int, device: torch.device
) -> Environment:
    """The environment; of a GPU while it computes, since an idle one has other clocks."""
    if device.type == "cpu":
        return Environment.here(device)
    with ThreadPoolExecutor(1) as pool:
        environment = pool.submit(Environment.here, device)
        while not environment.done():
            timed_calls(step, calls, device)
        return environment.result()


# How long does an image take by a measurement, and by several that other programs disturb?


ATTEMPTS = 3  # measurements at most while the machine is busy
MEDIANS = replace(ONLINE, rounds=8, warmup_s=0.1, round_s=0.05)  # enough calls for a median


@dataclass(frozen=True, kw_only=True)
class CallTime:
    """The time of a call / its images, in ms."""

    ms: float  # a percentile of all calls
    low: float  # that of nine in ten rounds is between these
    high: float


def call_time(row: Measurement, percentile: float = 50) -> CallTime:
    """The time by a measurement of the online protocol."""
    rounds = np.array_split(np.array(row.samples), row.protocol.rounds)
    low, high = np.percentile([np.percentile(each, percentile) for each in rounds], (5, 95))
    ms, images = np.percentile(row.samples, percentile), row.protocol.batch
    return CallTime(ms=float(ms / images), low=float(low / images), high=float(high / images))


def quiet_times(
    measure: Callable[[], Sequence[Measurement]], percentile: float = 50
) -> dict[str, CallTime]:
    """The times of what `measure` measures in turn, by name.

    Where the rounds of the fastest spread by more than `BUSY`, all are measured again, up to
    `ATTEMPTS` times. Each keeps its shortest time, as what disturbs a measurement makes it longer.
    """
    times: dict[str, CallTime] = {}
    for _ in range(ATTEMPTS):
        rows = measure()
        for row in rows:
            time = call_time(row, percentile)
            times[row.name] = min(times.get(row.name, time), time, key=lambda each: each.ms)
        if spread_of_rounds(max(rows, key=lambda row: row.images_per_s)) <= BUSY:
            break
    return times
