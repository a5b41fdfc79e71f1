"""How fast is it here? Throughput and latency by a named protocol, several networks in turn.

Networks are timed one after the other inside every round: a machine that slows down does so for all
of them, and the ratio of two networks stays reliable. Results are medians with a spread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fullstride.measure.batch_sizes import (
    bounded,
    check_room,
    find_batches,
    lack_of_memory,
    timed_batch,
)
from fullstride.measure.environment import Environment, find_device, has_bf16
from fullstride.measure.memory.limits import budget_bytes, peak_mib
from fullstride.measure.protocols import THROUGHPUT, Measurement, Protocol
from fullstride.measure.timing import cpu_threads, spread, timed_calls, timed_each, warm_up
from fullstride.measure.workload import (
    Layout,
    Precision,
    Step,
    compiling,
    exact_float32,
    fused_copy,
)
from fullstride.nets.efficiency import Efficiency, is_compiled, is_fused


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
