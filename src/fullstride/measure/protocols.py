"""Defines how calls are timed: named protocols, timed calls and the result, `Measurement`."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fullstride.io import records
from fullstride.io.records import NonNegative, Positive
from fullstride.measure.environment import Environment
from fullstride.measure.workload import Layout, Precision, Work
from fullstride.nets.efficiency import Efficiency, short_precision

MULTIPLE = 8  # images: a larger batch is rounded down to a multiple
BUSY = 0.2  # spread of rounds above which a measurement is repeated and reported
MAX_RESOLUTION = 16_384  # pixels a side; activations of larger images fit nowhere


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How to time calls. Numbers are comparable if all fields are equal."""

    name: Literal["throughput", "online", "tresnet", "genet", "resnet_rs"]
    batch: int  # images per call; if `fit` is not "given", each network has its own
    resolution: int = 224  # pixels a side
    warmup_s: float = 1.0  # seconds, not iterations: clocks and autotuning settle in time
    rounds: int = 20
    round_s: float = 0.2  # per network and round; a round has at least one call
    work: Work = "inference"
    # "halved": halve the batch until it trains; "filled": FILLED x the largest batch that trains
    fit: Literal["given", "halved", "filled"] = "given"
    trim: float = 0.0  # fraction of samples that `ms_per_image` omits at either end
    memory_batch: int | None = None  # images when memory is measured; None: `batch`

    def __post_init__(self) -> None:
        for name in ("batch", "resolution", "rounds"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                name = "call batch" if name == "batch" else name  # the flag's name
                raise ValueError(f"{name} {value!r}: use a whole number from 1")
        if self.resolution > MAX_RESOLUTION:
            raise ValueError(f"resolution {self.resolution}: use at most {MAX_RESOLUTION} pixels")
        if self.warmup_s < 0 or self.round_s <= 0:
            raise ValueError(
                f"warmup_s {self.warmup_s:g}, round_s {self.round_s:g}: use seconds above 0"
            )

    @property
    def waits(self) -> bool:
        """Whether to wait for the device after every call, not once per round of queued calls."""
        return self.name in ("online", "genet")

    @property
    def precision(self) -> Precision:
        """The paper's precision; float32 if it states none."""
        return "float16" if self.name in ("tresnet", "genet") else "float32"


# Images per second when batches queue up: calls are queued, with one wait per round; a wait after
# every call would add the launch gap to each.
THROUGHPUT = Protocol(name="throughput", batch=64)

# Latency of one image for one user: a wait after every call. p99 needs hundreds of calls.
ONLINE = Protocol(name="online", batch=1)

# Tables 1, 3, 4 and 5 of TResNet, arXiv:2003.13630: a GPU as full as in training.
FILLED = 0.9
TRESNET = Protocol(name="tresnet", batch=MULTIPLE, fit="filled")

# Table 3 of GENet, arXiv:2006.14090: one call per round, with a wait after each.
GENET = Protocol(name="genet", batch=1, rounds=30, round_s=1e-6, trim=0.1)

# Table 7 of ResNet-RS, arXiv:2103.07579.
RESNET_RS = Protocol(name="resnet_rs", batch=128, work="training", fit="halved", memory_batch=32)

# The parts of a protocol are timed one after the other and never compared with each other.
PROTOCOLS: dict[str, tuple[Protocol, ...]] = {
    "online": (ONLINE,),
    "throughput": (THROUGHPUT,),
    "tresnet": (replace(TRESNET, work="training"), TRESNET),
    "genet": tuple(replace(GENET, batch=2**power) for power in range(8)),
    "resnet_rs": (RESNET_RS,),
}


def warm_up(step: Callable[[], object], protocol: Protocol, device: torch.device) -> int:
    """Run for `warmup_s`, so that clocks settle; return the number of calls that fill a round."""
    calls, deadline = 1, time.perf_counter() + protocol.warmup_s
    while True:
        (seconds,), _ = timed_calls(step, calls, device)
        calls = max(1, round(calls * protocol.round_s / max(seconds, 1e-6)))
        if time.perf_counter() >= deadline:
            return calls


def timed_calls(
    step: Callable[[], object], calls: int, device: torch.device
) -> tuple[list[float], float]:
    """Run all calls with one wait; return a list of their total seconds, and CPU seconds."""
    cpu_start, start = time.process_time(), time.perf_counter()
    for _ in range(calls):
        step()
    wait(device)
    return [time.perf_counter() - start], time.process_time() - cpu_start


def timed_each(
    step: Callable[[], object], calls: int, device: torch.device
) -> tuple[list[float], float]:
    """Run all calls with a wait after each; return the seconds of each, and total CPU seconds."""
    step()  # not counted: caches hold the data of another network
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


def spread(samples: Sequence[float]) -> float:
    """(p90 - p10) / median; above 0.05 the machine was busy."""
    p10, p50, p90 = np.percentile(samples, (10, 50, 90))
    return float((p90 - p10) / p50)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A result with its conditions: network, protocol and environment."""

    name: str  # the network's
    protocol: Protocol  # how it was timed
    images_per_s: Positive  # at the median
    spread: NonNegative  # (p90 - p10) / median of the samples; above 0.05 the machine was busy
    ms_p50: Positive | None = None  # per call; online only
    ms_p90: Positive | None = None  # per call
    ms_p99: Positive | None = None  # per call
    ms_per_image: Positive | None = None  # trimmed mean; genet only
    # sum of all threads, median over rounds: steadier than wall time; CPU only
    cpu_ms_per_image: NonNegative | None = None
    peak_memory_mib: Positive | None = None  # weights, input and the peak of a call; GPU only
    largest_batch: int | None = None  # images per training step; tresnet only
    memory_gib: Positive | None = None  # limit of the device memory, if any
    reference: str | None = None  # the network that `ratio` is relative to
    # images_per_s / the reference's in the same round, median over rounds
    ratio: Positive | None = None
    # online and genet: ms of every call; else images/s of every round
    samples: tuple[float, ...] = field(repr=False)
    precision: Precision  # of weights and activations
    layout: Layout  # memory format: nchw, or nhwc for channels last
    compiled: bool  # with torch.compile
    efficiency: Efficiency = "plain"  # modules of a training step
    runtime: str = ""  # an exported file's runtime and precision; "" is PyTorch
    environment: Environment  # device, versions and commit

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError("samples is empty: a measurement has at least one")

    def __repr__(self) -> str:
        latency = f"p50 {self.ms_p50:.4g} ms, " if self.ms_p50 is not None else ""
        mode = self.runtime or ("compiled" if self.compiled else "eager")
        protocol, side = self.protocol, self.protocol.resolution
        return (
            f"Measurement({self.name!r}, {protocol.name}, {protocol.work}: {latency}"
            f"{self.images_per_s:,.4g} images/s, spread {self.spread:.1%}; batch {protocol.batch}, "
            f"{side} x {side}, {short_precision(self.precision)}, {self.layout}, {mode}, "
            f"{self.environment.device})"
        )

    @property
    def ms_per_image_samples(self) -> tuple[float, ...]:
        """The time of an image in ms, by each call (online, genet) or each round."""
        if self.protocol.waits:
            return tuple(ms / self.protocol.batch for ms in self.samples)
        return tuple(1e3 / rate for rate in self.samples)

    def to_json(self) -> str:
        return records.to_json(self)

    @classmethod
    def from_json(
        cls, data: str | Mapping[str, Any], where: str = "JSON of a measurement"
    ) -> "Measurement":
        """Read text or parsed JSON. Raises ValueError, in one line that begins with `where`."""
        return records.from_json(cls, data, where)


MEASUREMENTS = records.Record(
    tuple[Measurement, ...], "a file of measurements", ("protocol", "images_per_s", "environment")
)


def spread_of_rounds(row: Measurement) -> float:
    """The `spread` of the rounds' medians, which a single delayed call does not change."""
    samples = np.array(row.samples)
    if len(samples) % row.protocol.rounds:
        return row.spread
    return spread(np.median(samples.reshape(row.protocol.rounds, -1), 1).tolist())


ATTEMPTS = 3  # measurements at most while the machine is busy
MEDIANS = replace(ONLINE, rounds=8, warmup_s=0.1, round_s=0.05)  # enough calls for a median


@dataclass(frozen=True, kw_only=True)
class CallTime:
    """The time of a call divided by its images, in ms."""

    ms: float  # a percentile of all calls
    low: float  # nine in ten rounds have a percentile from `low` to `high`, as `ms` is
    high: float


def call_time(row: Measurement, percentile: float = 50) -> CallTime:
    """The call time in a measurement by the online protocol."""
    rounds = np.array_split(np.array(row.samples), row.protocol.rounds)
    low, high = np.percentile([np.percentile(each, percentile) for each in rounds], (5, 95))
    ms, images = np.percentile(row.samples, percentile), row.protocol.batch
    # percentiles of few rounds are interpolated between them, so that `ms` may lie outside
    low, high = min(low, ms), max(high, ms)
    return CallTime(ms=float(ms / images), low=float(low / images), high=float(high / images))


def shortest(earlier: Mapping[str, CallTime], later: Mapping[str, CallTime]) -> dict[str, CallTime]:
    """The shorter time of each name, because disturbances only lengthen calls."""
    times = {**earlier}
    for name, own in later.items():
        times[name] = min(times.get(name, own), own, key=lambda each: each.ms)
    return times


def quiet_times(
    measure: Callable[[], Sequence[Measurement]], percentile: float = 50
) -> dict[str, CallTime]:
    """Call `measure` until the machine is quiet; return the shortest time of each name.

    All networks are measured again, up to `ATTEMPTS` times, while the rounds of the fastest spread
    by more than `BUSY`.
    """
    times: dict[str, CallTime] = {}
    for _ in range(ATTEMPTS):
        rows = measure()
        times = shortest(times, {row.name: call_time(row, percentile) for row in rows})
        if spread_of_rounds(max(rows, key=lambda row: row.images_per_s)) <= BUSY:
            break
    return times


def save_measurements(rows: Sequence[Measurement], path: Path) -> None:
    """Save the measurements, with their samples, as a JSON list."""
    records.write_json(path, MEASUREMENTS.output, rows)


def read_measurements(path: Path) -> list[Measurement]:
    """Read a file of `save_measurements`. Raises ValueError, in one line, for any other file."""
    rows = records.read_json(path)
    if not isinstance(rows, list):
        raise ValueError(f"{path} is not what `fullstride bench --out` writes")
    return [Measurement.from_json(row, str(path)) for row in rows]


def by_network(rows: Sequence[Measurement]) -> dict[str, dict[str, Measurement]]:
    """Network -> protocol -> row. The key of a file or folder is its `location`."""
    networks: dict[str, dict[str, Measurement]] = {}
    for row in rows:
        networks.setdefault(location(row.name), {})[row.protocol.name] = row
    return networks


def location(word: str) -> str:
    """The absolute path of an existing file or folder; any other name is unchanged."""
    return str(Path(word).resolve()) if Path(word).exists() else word
