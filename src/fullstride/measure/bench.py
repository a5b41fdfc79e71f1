"""Measures throughput and latency of several networks in turn by a named protocol.

Every round times all networks one after the other, so that a slower machine slows all of them and
the ratio of two networks stays reliable. Results are medians with a spread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from fullstride.measure import max_batch, protocols, workload
from fullstride.measure.environment import Environment, find_device, has_bf16
from fullstride.measure.protocols import (
    THROUGHPUT,
    Measurement,
    Protocol,
    timed_calls,
    timed_each,
    warm_up,
)
from fullstride.measure.workload import Layout, Precision, Step, StepOptions
from fullstride.nets.backbone import Backbone, EmbeddingHead
from fullstride.nets.efficiency import Efficiency, is_compiled


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """How networks are measured, by any protocol. The keys of mappings are network names."""

    in_channels: int = 3
    precision: Precision = "float32"  # true float32: TF32, PyTorch's default, is off
    layout: Layout = "nchw"
    compiled: bool = False
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)  # training only; else plain
    # Pixels a side where they differ from the protocol's; only for protocols with a given batch.
    resolutions: Mapping[str, int] = field(default_factory=dict)
    # CPU threads; None: torch's setting. On a shared machine use one: a thread that waits for a
    # core delays all others, and a small network can take a hundred times as long.
    threads: int | None = None
    reference: str | None = None  # the network that ratios are relative to
    memory_gib: float | None = None  # limit of a GPU, or of the CPU in the search for a batch

    def step(self, name: str) -> StepOptions:
        return StepOptions(
            precision=self.precision,
            layout=self.layout,
            compiled=self.compiled,
            efficiency=self.efficiency.get(name, "plain"),
        )


DEFAULTS = BenchOptions()


def find_batches(
    nets: Mapping[str, nn.Module],
    protocol: Protocol,
    device: torch.device,
    options: BenchOptions = DEFAULTS,
) -> dict[str, int]:
    """Find each network's batch for a protocol that fits the batch to memory.

    "filled": the largest batch that trains; "halved": the first of `protocol.batch`, its half, ...
    that trains.
    """
    room = max_batch.budget_bytes(options.memory_gib, device)

    def find(name: str, net: nn.Module) -> int:
        side = protocol.resolution
        trial = max_batch.Trial(
            net=net,
            resolution=side,
            device=str(device),
            memory_bytes=room,
            options=options.step(name),
            in_channels=options.in_channels,
        )
        fills = protocol.fit == "filled"
        probes = trial.search() if fills else halving(trial.probe, protocol.batch)
        return max_batch.largest(probes, f"{name} at {side} x {side}")

    return {name: find(name, net) for name, net in nets.items()}


def halving(probe: Callable[[int], max_batch.Probe], batch: int) -> Iterator[max_batch.Probe]:
    while batch:
        result = probe(batch)
        yield result
        batch = 0 if result.fits else batch // 2


def timed_batch(protocol: Protocol, largest: int | None) -> int:
    """The batch to time: the protocol's, or FILLED x `largest`, the largest batch that trains.

    The latter is rounded down to a multiple of 8.
    """
    if protocol.fit == "given" or largest is None:
        return protocol.batch
    if protocol.fit == "halved":
        return largest
    batch, multiple = max(1, int(protocols.FILLED * largest)), protocols.MULTIPLE
    return batch // multiple * multiple if batch > multiple else batch


def check_room(
    net: nn.Module, protocol: Protocol, device: torch.device, in_channels: int, options: StepOptions
) -> None:
    """Raise MemoryError if the CPU is not expected to have room for the batch of `protocol`.

    GPUs and the runtimes of exported files raise their own error.
    """
    if device.type == "cuda" or hasattr(net, "random_images"):
        return
    side, batch = protocol.resolution, protocol.batch
    if protocol.work == "training":
        # A compiled step saves no more than the eager one, which is quick to count.
        size = max_batch.available_bytes(), side, options.precision, in_channels
        if max_batch.predict(net, *size, device="cpu").batch < batch:
            raise MemoryError
        return
    one = Step(net, "inference", 1, side, device, in_channels, replace(options, compiled=False))
    assert one.images is not None
    with torch.inference_mode():
        max_batch.check_fits(one.net, one.images, batch)


def lack_of_memory(protocol: Protocol) -> AbstractContextManager[None]:
    batch, side = protocol.batch, protocol.resolution
    is_fixed = batch == 1 or protocol.name in protocols.PROTOCOLS.keys() - {"online", "throughput"}
    return max_batch.memory_errors(
        f"batch {batch} at {side} x {side}",
        f"try a smaller --{'resolution' if is_fixed else 'call-batch'}",
    )


@contextmanager
def bounded(device: torch.device, memory_gib: float | None) -> Iterator[None]:
    """Limit the memory of a GPU; CPU memory is limited only in processes that search a batch."""
    if device.type == "cpu" or memory_gib is None:
        yield
        return
    max_batch.limit_memory(max_batch.budget_bytes(memory_gib, device), device)
    try:
        yield
    finally:
        max_batch.set_memory_fraction(1.0, device)


def bench(
    nets: Mapping[str, nn.Module],
    protocol: Protocol = THROUGHPUT,
    device: torch.device | str = "cpu",
    options: BenchOptions = DEFAULTS,
    batches: Mapping[str, int] | None = None,
) -> list[Measurement]:
    """Measure each network on random images that are already on the device.

    The networks are not changed: copies are moved, converted and timed. `batches`: the result of
    `find_batches` for protocols that fit the batch to memory; by default it is computed here.

    Examples:
        >>> import fullstride
        >>> from dataclasses import replace
        >>> from fullstride.measure.protocols import ONLINE
        >>> quick = replace(ONLINE, resolution=32, warmup_s=0, rounds=3, round_s=0.01)
        >>> (row,) = fullstride.bench({"tiny": fullstride.zoo.create("genet_tiny")}, quick)
        >>> row.name, row.precision, row.images_per_s > 0
        ('tiny', 'float32', True)
    """
    device = find_device(device)
    check_possible(nets, protocol, device, options)
    if protocol.fit != "given" and batches is None:
        batches = find_batches(nets, protocol, device, options)
    batches = batches or {}
    sides = options.resolutions if protocol.fit == "given" else {}
    steps: dict[str, Step] = {}
    peaks: dict[str, float | None] = {}
    compiles = options.compiled or any(is_compiled(options.step(name).efficiency) for name in nets)
    with (
        workload.exact_float32(),
        protocols.cpu_threads(options.threads),
        bounded(device, options.memory_gib),
        workload.compiling(compiles),
    ):
        for name, net in nets.items():
            batch, side = timed_batch(protocol, batches.get(name)), sides.get(name)
            own = replace(protocol, batch=batch, resolution=side or protocol.resolution)
            with lack_of_memory(own):
                how = options.in_channels, options.step(name)
                check_room(net, own, device, *how)
                steps[name], peaks[name] = prepare(net, own, device, *how)
                if protocol.fit != "given":
                    steps[name].leave()  # see `measure_all`
        with lack_of_memory(protocol):
            rows = measure_all(steps, protocol, device, options)
    is_limited = device.type != "cpu" or protocol.fit != "given"
    return [
        replace(
            row,
            peak_memory_mib=peaks[row.name],
            runtime=getattr(nets[row.name], "runtime", ""),
            largest_batch=batches.get(row.name) if protocol.fit == "filled" else None,
            memory_gib=options.memory_gib if is_limited else None,
        )
        for row in rows
    ]


def prepare(
    net: nn.Module, protocol: Protocol, device: torch.device, in_channels: int, options: StepOptions
) -> tuple[Step, float | None]:
    """Run a step of the network once; return the step and its peak memory in MiB on a GPU."""

    def step(images: int) -> Step:
        size = images, protocol.resolution, device, in_channels
        return Step(net, protocol.work, *size, options)

    first = step(min(protocol.batch, protocol.memory_batch or protocol.batch))
    first()  # compiles, picks algorithms, and shows whether the batch fits
    peak = max_batch.peak_mib(first.resident(), first, device)
    return first if first.shape[0] == protocol.batch else step(protocol.batch), peak


def bench_all(
    nets: Mapping[str, nn.Module],
    parts: Sequence[Protocol],
    device: torch.device | str = "cpu",
    options: BenchOptions = DEFAULTS,
) -> Iterator[list[Measurement]]:
    """Yield `bench` of each part of a named protocol, with one search for the batches."""
    device, batches = find_device(device), None
    for protocol in parts:
        check_possible(nets, protocol, device, options)
        if protocol.fit != "given" and batches is None:
            batches = find_batches(nets, protocol, device, options)
        yield bench(nets, protocol, device, options, batches)


def check_possible(
    nets: Mapping[str, nn.Module], protocol: Protocol, device: torch.device, options: BenchOptions
) -> None:
    """Raise ValueError for a combination that cannot be measured here.

    Also for an efficiency in inference, for heads that give no logits in training, and for a
    missing reference.
    """
    if device.type == "cpu" and options.precision == "float16":
        raise ValueError(
            f"{protocol.name} in fp16 is for GPUs: on the CPU say --precision bf16 or fp32"
        )
    if device.type == "cuda" and options.precision == "bfloat16" and not has_bf16(device):
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has no bf16: say --precision fp16 or fp32"
        )
    if device.type == "cpu" and protocol.fit == "filled" and options.memory_gib is None:
        raise ValueError(
            f"protocol {protocol.name} fills a GPU: on the CPU say with --memory-gib how much to "
            "fill"
        )
    max_batch.budget_bytes(options.memory_gib, device)
    for name, net in nets.items():
        form = options.step(name).efficiency
        if form != "plain" and protocol.work == "inference":
            raise ValueError(
                f"{name}, {form}: an efficiency is for training, leave it out for inference"
            )
        head = net.task_head if isinstance(net, Backbone) else None
        if protocol.work == "training" and not isinstance(head, EmbeddingHead | None):
            raise ValueError(
                f"{name} has the head of a task, and {protocol.name} trains classifiers: use "
                "--protocol online or throughput"
            )
    if options.reference is not None and options.reference not in nets:
        raise ValueError(
            f"reference {options.reference} is not measured: choose from {', '.join(nets)}"
        )


@dataclass
class Series:
    """The rounds of one network."""

    step: Callable[[], object]  # processes one batch that is on the device
    batch: int
    calls: int = 1  # per round
    samples: list[float] = field(default_factory=list)  # see `Measurement`
    images_per_s: list[float] = field(default_factory=list)  # of each round
    cpu_ms: list[float] = field(default_factory=list)  # per image, of each round
    environment: Environment | None = None  # during the last round

    def add(self, seconds: Sequence[float], cpu_s: float, waits: bool) -> None:
        images = self.calls * self.batch
        self.samples += [s * 1e3 for s in seconds] if waits else [images / s for s in seconds]
        self.images_per_s.append(images / sum(seconds))
        self.cpu_ms.append(cpu_s * 1e3 / images)


def measure_all(
    steps: Mapping[str, Callable[[], object]],
    protocol: Protocol,
    device: torch.device | str = "cpu",
    options: BenchOptions = DEFAULTS,
) -> list[Measurement]:
    """Time all steps in turn in every round; a step processes one batch already on `device`."""
    device = find_device(device)
    timed = timed_each if protocol.waits else timed_calls
    all_series = {
        name: Series(step, step.shape[0] if isinstance(step, Step) else protocol.batch)
        for name, step in steps.items()
    }

    def on_device(step: Callable[[], object]) -> AbstractContextManager[None]:
        # a GPU that a protocol fills has room for one network, only while it is timed
        if protocol.fit != "given" and isinstance(step, Step):
            return step.on_device()
        return nullcontext()

    for each in all_series.values():
        with on_device(each.step):
            each.calls = warm_up(each.step, protocol, device)
    for number in range(protocol.rounds):
        for each in all_series.values():
            with on_device(each.step):
                seconds, cpu_s = timed(each.step, each.calls, device)
                if number == protocol.rounds - 1:
                    each.environment = environment_under_load(each.step, each.calls, device)
            each.add(seconds, cpu_s, protocol.waits)
    reference = all_series[options.reference].images_per_s if options.reference else None
    rows = []
    for name, each in all_series.items():
        row = measurement(name, each, protocol, options)
        if device.type == "cpu":
            row = replace(row, cpu_ms_per_image=float(np.median(each.cpu_ms)))
        if reference:
            row = replace(row, ratio=float(np.median(np.divide(each.images_per_s, reference))))
        rows.append(row)
    return rows


def measurement(
    name: str, series: Series, protocol: Protocol, options: BenchOptions
) -> Measurement:
    samples, batch, step = series.samples, series.batch, series.step
    own = step if isinstance(step, Step) else None
    p50, p90, p99 = (float(p) for p in np.percentile(samples, (50, 90, 99)))
    online = protocol.name == "online"
    trim = round(protocol.trim * len(samples))
    trimmed = sorted(samples)[trim : len(samples) - trim]
    assert series.environment is not None
    side = own.shape[-1] if own else protocol.resolution
    return Measurement(
        name=name,
        protocol=replace(protocol, batch=batch, resolution=side),
        images_per_s=batch * 1e3 / p50 if protocol.waits else p50,
        spread=protocols.spread(samples),
        ms_p50=p50 if online else None,
        ms_p90=p90 if online else None,
        ms_p99=p99 if online else None,
        ms_per_image=float(np.mean(trimmed)) / batch if protocol.name == "genet" else None,
        reference=options.reference,
        samples=tuple(samples),
        precision=options.precision,
        layout=options.layout,
        compiled=own.is_compiled if own else options.compiled,
        efficiency=own.efficiency if own else "plain",
        environment=series.environment,
    )


def environment_under_load(
    step: Callable[[], object], calls: int, device: torch.device
) -> Environment:
    """The environment; a GPU is read while it computes, since an idle GPU has other clocks."""
    if device.type == "cpu":
        return Environment.here(device)
    with ThreadPoolExecutor(1) as pool:
        environment = pool.submit(Environment.here, device)
        while not environment.done():
            timed_calls(step, calls, device)
        return environment.result()
