"""What is the largest batch that trains? Predicted from the bytes that a step keeps, then proven by real steps.

A proof is a few steps of the optimizer in a fresh process: in one that ran out of memory before, what is free lies
in pieces. `python -m fullstride.measure.memory.max_batch` is that process.
"""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from fullstride.measure.environment import choose_device, find_device
from fullstride.measure.memory.activation_bytes import saved
from fullstride.measure.memory.limits import (
    asked_bytes,
    check_gib,
    lacks_memory,
    limit_memory,
    peak_mib,
)
from fullstride.measure.workload import (
    Efficiency,
    Layout,
    Precision,
    Step,
    exact_float32,
    find_precision,
    lean_form,
)
from fullstride.nets.network import Network
from fullstride.nets.zoo import measurable

MULTIPLE = 8  # images: what the largest batch is rounded down to, unless it is smaller
STEPS = 3  # after the first one
FLOAT_BYTES = 4
USABLE = 0.97  # of a GPU's memory: the rest is between blocks
WORKSPACE_BYTES = 2**30  # of convolutions on a GPU
# glibc keeps freed maps below some size in a heap with holes that aligned ones of the same size do not fill again
UNPOOLED = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_ARENA_MAX": "1"}
MAP_LIMIT = 2**31  # elements: many GPU kernels count them in 32 bits


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a training step should take. A peak is everything that is kept for backward, beside weights and momentum."""

    bytes_per_image: int  # kept for backward, and the image
    largest_map: int  # elements per image of the largest tensor that an eager step keeps
    fixed_bytes: int  # weights, their momentum and casts, running statistics, workspace
    memory_bytes: float

    @property
    def batch(self) -> int:
        batch = max(0, int((self.memory_bytes - self.fixed_bytes) // self.bytes_per_image))
        return batch // MULTIPLE * MULTIPLE if batch > MULTIPLE else batch

    @property
    def map_batch(self) -> int:
        """The largest batch whose maps all have less than 2^31 elements."""
        return (MAP_LIMIT - 1) // max(1, self.largest_map)


def predict(
    net: nn.Module,
    memory_bytes: float,
    resolution: int,
    precision: Precision = "bfloat16",
    in_channels: int = 3,
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    compiled: bool = False,
    efficiency: Efficiency = "plain",
) -> Prediction:
    """For steps on a GPU, which need not be here, or on the CPU; for eager ones where another network is compiled."""
    if efficiency != "plain":
        net = lean_form(net)
    found = saved(net, resolution, precision, in_channels, device=device)
    kept = found.bytes_per_image
    if isinstance(net, Network) and (compiled or efficiency == "compiled"):
        from fullstride.measure.memory.compiled_bytes import (
            compiled_bytes,  # takes seconds to import
        )

        kept = compiled_bytes(net, resolution, precision, in_channels)
    gpu = device == "cuda"
    weights = sum(p.numel() for p in net.parameters()) * FLOAT_BYTES
    statistics = sum(b.numel() for b in net.buffers()) * FLOAT_BYTES
    # in float32 the first convolution keeps the image, which is then in the bytes already
    image = in_channels * resolution**2 * FLOAT_BYTES if precision != "float32" else 0
    return Prediction(
        bytes_per_image=kept + image,
        largest_map=found.largest_map,
        fixed_bytes=2 * weights + statistics + found.fixed_bytes + (WORKSPACE_BYTES if gpu else 0),
        memory_bytes=memory_bytes * (USABLE if gpu else 1),
    )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A few training steps at one batch."""

    batch: int
    outcome: Literal[
        "fits", "memory", "elements"
    ]  # elements: failed where a map has 2^31 elements or more
    peak_memory_mib: float | None = None  # GPU only
    why: str = ""

    @property
    def fits(self) -> bool:
        return self.outcome == "fits"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is tried in a fresh process, at any batch."""

    net: nn.Module
    resolution: int
    device: str
    memory_bytes: float
    precision: Precision = "bfloat16"
    layout: Layout = "nchw"
    compiled: bool = False
    efficiency: Efficiency = "plain"
    in_channels: int = 3
    map_batch: int = sys.maxsize  # above it a map has 2^31 elements or more

    def probe(self, batch: int) -> Probe:
        """Raises ValueError, in one line, for what fails and is no lack of memory."""
        command = [sys.executable, "-m", "fullstride.measure.memory.max_batch"]
        variables = {**os.environ, **UNPOOLED}
        done = subprocess.run(
            command, input=pickle.dumps((self, batch)), env=variables, capture_output=True
        )
        answer: dict[str, Any]
        try:
            answer = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
            answer = {"error": f"exit code {done.returncode}, {last}"}
        if "error" not in answer:
            return Probe(**answer)
        if batch > self.map_batch:
            return Probe(batch=batch, outcome="elements", why=answer["error"])
        raise ValueError(f"training steps at batch {batch} failed: {answer['error']}")

    def run(self, batch: int) -> Probe:
        """The steps, in this process, whose memory is limited from here on."""
        device = find_device(self.device)

        def step(images: int) -> Step:
            how: dict[str, Any] = {
                k: getattr(self, k) for k in ("precision", "layout", "compiled", "efficiency")
            }
            return Step(
                self.net, "training", images, self.resolution, device, self.in_channels, **how
            )

        with exact_float32():
            if device.type == "cpu":
                step(2)()  # what libraries take when they are first used is no matter of the batch
            limit_memory(self.memory_bytes, device)
            try:
                work = step(batch)
                work()  # tries algorithms of convolutions, which may ask for more workspace than there is, and need not
                before = retries(device)
                peak = peak_mib(work.held(), partial(repeat, work), device)
                if retries(device) > before:
                    return Probe(
                        batch=batch, outcome="memory", why="the allocator had to try again"
                    )
            except (MemoryError, RuntimeError) as error:
                # the step of two images could: oneDNN says no more when it gets no memory
                if not (
                    lacks_memory(error)
                    or device.type == "cpu"
                    and "could not create a" in str(error)
                ):
                    raise
                return Probe(batch=batch, outcome="memory", why=str(error).partition("\n")[0])
        return Probe(batch=batch, outcome="fits", peak_memory_mib=peak)


def repeat(work: Callable[[], object]) -> None:
    for _ in range(STEPS):
        work()


def retries(device: torch.device) -> int:
    return torch.cuda.memory_stats(device)["num_alloc_retries"] if device.type == "cuda" else 0


def search(probe: Callable[[int], Probe], start: int) -> Iterator[Probe]:
    """Grow or shrink from `start` until one batch fits and one does not, then halve what lies between to a multiple.

    The largest that fits is the answer. Below 8 every number counts.
    """
    low, high, unit = 0, None, MULTIPLE
    batch, stride = max(unit, start // unit * unit), max(unit, start // 32)
    while high is None or high - low > unit:
        tried = probe(batch)
        yield tried
        if tried.fits:
            low = batch
        else:
            high = batch
        if (low, high) == (0, MULTIPLE):
            unit = 1
        if high is None:
            batch, stride = low + stride, 2 * stride
        elif low == 0 and unit > 1:
            batch, stride = high - stride, 2 * stride
        else:
            batch = (low + high) // 2
        batch = max(low + unit, batch // unit * unit)


def largest(probes: Iterable[Probe], what: str) -> int:
    """The answer of a search. Raises ValueError where not even one image fits."""
    found = max((probe.batch for probe in probes if probe.fits), default=0)
    if not found:
        raise ValueError(
            f"{what} does not fit into memory at batch 1: use a smaller resolution or more memory"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the largest batch is wanted of, with its prediction."""

    trial: Trial
    prediction: Prediction

    @property
    def needs_large_maps(self) -> bool:
        """Whether the predicted batch has maps of 2^31 elements or more."""
        return self.prediction.batch > self.prediction.map_batch

    def search(self) -> Iterator[Probe]:
        """Prove the prediction by real steps, from the predicted batch on."""
        return search(self.trial.probe, self.prediction.batch)


def plan(
    model: str,
    resolution: int | None = None,
    *,
    device: str = "auto",
    precision: str = "bf16",
    layout: Layout = "nchw",
    compiled: bool = False,
    efficiency: Efficiency = "plain",
    memory_gib: float | None = None,
    predict_only: bool = False,
) -> Plan:
    """Predict the largest batch of a named network; see `fullstride capacity --help`.

    A prediction alone is for a GPU, which need not be here, unless `device` is cpu. Raises
    ValueError, in one line, where something is missing or does not fit together.
    """
    check_gib(memory_gib)
    absent = predict_only and device in ("auto", "cuda") and not torch.cuda.is_available()
    place = torch.device("cuda") if absent else choose_device(device)
    if memory_gib is None and (absent or place.type == "cpu"):
        raise ValueError(
            f"no GPU to ask for its memory, on {device}: say with --memory-gib how much to fill"
        )
    if place.type == "cpu" and precision in ("fp16", "float16"):
        raise ValueError("training in float16 is for GPUs: on the CPU say --precision bf16 or fp32")
    memory_bytes = (memory_gib or 0) * 2**30 if absent else asked_bytes(memory_gib, place)
    net = measurable([model])[model]
    if efficiency != "plain":
        if compiled:
            raise ValueError(
                f"--compiled with --efficiency {efficiency}: say --efficiency compiled, "
                "or leave one out"
            )
        lean_form(net, model)
    step: dict[str, Any] = dict(
        resolution=net.spec.resolution if resolution is None else resolution,
        precision=find_precision(precision),
        in_channels=net.spec.in_channels,
        compiled=compiled,
        efficiency=efficiency,
    )
    kind = "cpu" if place.type == "cpu" else "cuda"
    prediction = predict(net, memory_bytes, device=kind, **step)
    trial = Trial(
        net=net,
        layout=layout,
        device=str(place),
        memory_bytes=memory_bytes,
        map_batch=prediction.map_batch,
        **step,
    )
    return Plan(trial=trial, prediction=prediction)


def main() -> None:
    """Try what comes on standard input, from `Trial.probe`; the last line printed is the answer."""
    trial, batch = pickle.load(sys.stdin.buffer)
    try:
        answer = asdict(trial.run(batch))
    except Exception as error:  # whatever it is, it is told in one line
        answer = {"error": f"{type(error).__name__} {' '.join(str(error).split())}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
