"""Which batch does a protocol time? The one it names, or the largest that fits in memory."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from fullstride.measure.memory.limits import (
    available_bytes,
    budget_bytes,
    check_fits,
    limit_memory,
    memory_errors,
    set_memory_fraction,
)
from fullstride.measure.memory.max_batch import MULTIPLE, Probe, Trial, largest, predict, search
from fullstride.measure.protocols import FILLED, Protocol
from fullstride.measure.workload import Layout, Precision, Step
from fullstride.nets.efficiency import Efficiency, is_fused


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
