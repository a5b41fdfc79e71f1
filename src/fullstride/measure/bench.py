"""How fast is it here? Throughput and latency by a named protocol, several networks in turn.

Networks are timed one after the other inside every round: when the machine slows down it does so for all,
and the ratio of two networks survives. Medians and spread, never the best.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fullstride.measure.environment import Environment, find_device
from fullstride.measure.memory.limits import (
    asked_bytes,
    available_bytes,
    check_fits,
    limit_memory,
    memory_errors,
    peak_mib,
    share_memory,
)
from fullstride.measure.memory.max_batch import (
    MULTIPLE,
    Probe,
    Trial,
    largest,
    predict,
    search,
)
from fullstride.measure.protocols import FILLED, THROUGHPUT, Measurement, Protocol
from fullstride.measure.timing import (
    cpu_threads,
    spread,
    timed_calls,
    timed_each,
    warm_up,
)
from fullstride.measure.workload import (
    Efficiency,
    Layout,
    Precision,
    Step,
    compiling,
    exact_float32,
    lean_form,
)


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
    found: Mapping[str, int] | None = None,
) -> list[Measurement]:
    """Measure each network on random images that are already on the device.

    The networks given are left as they are: copies are moved, converted and timed. float32 is true float32:
    TF32, which PyTorch allows in convolutions unless told otherwise, is off. `threads` of the CPU, None: as
    torch is set. On a machine that others use, take one: a thread that waits for a core holds up all others,
    and a small network then takes a hundred times as long.

    `efficiency`: how each network trains, by name; plain where not given. `reference` is the network that ratios are
    to, whatever its efficiency. `memory_gib` bounds what a GPU gives, or the CPU where the batch has to be found;
    `found` are the batches that `fitting` finds, None: they are looked for.
    """
    device = find_device(device)
    how: dict[str, Any] = dict(precision=precision, layout=layout, compiled=compiled)
    check_possible(protocol, device, precision, memory_gib)
    trains: dict[str, Efficiency] = {name: (efficiency or {}).get(name, "plain") for name in nets}
    for name in (name for name, way in trains.items() if way != "plain"):
        if protocol.work == "inference":
            raise ValueError(
                f"{name}, {trains[name]}: inference has no fused form, leave its efficiency out"
            )
        lean_form(nets[name], name)
    if reference is not None and reference not in nets:
        raise ValueError(f"reference {reference} is not measured: choose from {', '.join(nets)}")
    if protocol.fit != "given" and found is None:
        found = fitting(
            nets, protocol, device, in_channels, memory_gib=memory_gib, efficiency=trains, **how
        )
    steps: dict[str, Step] = {}
    peaks: dict[str, float | None] = {}
    side = protocol.resolution

    def step(name: str, batch: int) -> Step:
        return Step(
            nets[name],
            protocol.work,
            batch,
            side,
            device,
            in_channels,
            efficiency=trains[name],
            **how,
        )

    def ready(name: str, batch: int) -> Step:
        check_room(nets[name], protocol, batch, device, in_channels, precision, trains[name])
        watched = step(name, min(batch, protocol.memory_batch or batch))
        watched()  # compiles, picks algorithms, and shows whether the batch fits
        peaks[name] = peak_mib(watched.held(), watched, device)
        return watched if watched.shape[0] == batch else step(name, batch)

    compiles = compiled or "compiled" in trains.values()
    with exact_float32(), cpu_threads(threads), bounded(device, memory_gib), compiling(compiles):
        for name in nets:
            batch = batch_of(protocol, (found or {}).get(name))
            with lack_of_memory(batch, side):
                steps[name] = ready(name, batch)
                if alone(protocol):
                    steps[name].leave()
        with lack_of_memory(protocol.batch, side):
            measured = measure_all(steps, protocol, device, reference=reference, **how)
    return [
        replace(
            one,
            peak_memory_mib=peaks[one.name],
            runtime=getattr(nets[one.name], "runtime", ""),
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
    keys = ("precision", "layout", "compiled", "efficiency", "memory_gib")
    for protocol in protocols:
        check_possible(
            protocol, find_device(device), how.get("precision", "float32"), how.get("memory_gib")
        )
        if protocol.fit != "given" and found is None:
            asked = {key: how[key] for key in keys if key in how}
            found = fitting(nets, protocol, find_device(device), in_channels, **asked)
        yield bench(nets, protocol, device, in_channels, found=found, **how)


def check_possible(
    protocol: Protocol, device: torch.device, precision: Precision, memory_gib: float | None
) -> None:
    """ValueError for what cannot be measured here as it is asked for."""
    if device.type == "cpu" and precision == "float16":
        raise ValueError(
            f"{protocol.name} in float16 is for GPUs: on the CPU say --precision bf16 or fp32"
        )
    if (
        device.type == "cuda"
        and precision == "bfloat16"
        and not torch.cuda.is_bf16_supported(False)
    ):
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has no bfloat16: say --precision fp16 or fp32"
        )
    if device.type == "cpu" and protocol.fit == "filled" and memory_gib is None:
        raise ValueError(
            f"protocol {protocol.name} fills a GPU: on the CPU say with --memory-gib how much to fill"
        )
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
    efficiency: Mapping[str, Efficiency] | None = None,
    memory_gib: float | None = None,
) -> dict[str, int]:
    """The largest batch of each network that trains, or the first of `protocol.batch`, its half, ... that does."""
    room = asked_bytes(memory_gib, device)

    def find(name: str, net: nn.Module) -> int:
        size: dict[str, Any] = dict(
            resolution=protocol.resolution, in_channels=in_channels, precision=precision
        )
        size |= dict(compiled=compiled, efficiency=(efficiency or {}).get(name, "plain"))
        guess = predict(net, room, **size, device=device.type)  # pyright: ignore[reportArgumentType]
        place: dict[str, Any] = dict(
            device=str(device), memory_bytes=room, map_batch=guess.map_batch
        )
        trial = Trial(net=net, layout=layout, **place, **size)
        filled = protocol.fit == "filled"
        probes = (
            search(trial.probe, guess.batch) if filled else halving(trial.probe, protocol.batch)
        )
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
    net: nn.Module,
    protocol: Protocol,
    batch: int,
    device: torch.device,
    in_channels: int,
    precision: Precision,
    efficiency: Efficiency = "plain",
) -> None:
    """MemoryError where the CPU is not expected to have room; a GPU says so itself, and so do other engines."""
    if device.type == "cuda" or hasattr(net, "random_images"):
        return
    side = protocol.resolution
    if protocol.work == "training":
        # a compiled step keeps no more than the eager one, which is quick to count
        eager: Efficiency = "plain" if efficiency == "plain" else "lean"
        room = available_bytes()
        if (
            predict(net, room, side, precision, in_channels, device="cpu", efficiency=eager).batch
            < batch
        ):
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
        f"batch {batch} at {side} x {side}",
        f"try a smaller --{'batch' if batch > 1 else 'resolution'}",
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
    batches = {
        name: step.shape[0] if isinstance(step, Step) else protocol.batch
        for name, step in steps.items()
    }
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
            samples[name] += (
                [s * 1e3 for s in seconds] if protocol.waits else [images / s for s in seconds]
            )
            cpu_ms[name].append(cpu_s * 1e3 / images)

    def summary(name: str) -> Measurement:
        p50, p90, p99 = (float(p) for p in np.percentile(samples[name], (50, 90, 99)))
        online = protocol.name == "online"
        cut = round(protocol.trim * len(samples[name]))
        middle = sorted(samples[name])[cut : len(samples[name]) - cut]
        return Measurement(
            name=name,
            protocol=replace(protocol, batch=batches[name]),
            images_per_s=batches[name] * 1e3 / p50 if protocol.waits else p50,
            spread=spread(samples[name]),
            ms_p50=p50 if online else None,
            ms_p90=p90 if online else None,
            ms_p99=p99 if online else None,
            ms_per_image=float(np.mean(middle)) / batches[name]
            if protocol.name == "genet"
            else None,
            cpu_ms_per_image=float(np.median(cpu_ms[name])) if device.type == "cpu" else None,
            reference=reference,
            ratio=float(np.median(np.divide(rates[name], rates[reference]))) if reference else None,
            samples=tuple(samples[name]),
            precision=precision,
            layout=layout,
            compiled=step.is_compiled if isinstance(step := steps[name], Step) else compiled,
            efficiency=step.efficiency if isinstance(step, Step) else "plain",
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
