"""How is a network timed, and what is kept of it? Named protocols, and what a measurement tells beside its number."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

from fullstride import storage
from fullstride.measure.environment import Environment
from fullstride.measure.memory.max_batch import MULTIPLE
from fullstride.measure.workload import Efficiency, Layout, Precision, Work


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
    fit: Literal["given", "halved", "filled"] = (
        "given"  # halved until it trains, or FILLED of the largest that trains
    )
    trim: float = 0.0  # share of the samples that is left out of `ms_per_image` at either end
    memory_batch: int | None = None  # images at which memory is looked at; None: those of a call

    def __post_init__(self) -> None:
        for name in ("batch", "resolution", "rounds"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} {value!r}: use a whole number from 1")
        if self.warmup_s < 0 or self.round_s <= 0:
            raise ValueError(
                f"warmup_s {self.warmup_s:g}, round_s {self.round_s:g}: use seconds above 0"
            )

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
        hint = (
            f"did you mean {' or '.join(close)}?"
            if close
            else f"choose from {', '.join(PROTOCOLS)}"
        )
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
    cpu_ms_per_image: float | None = (
        None  # of all threads, median over rounds: steadier than wall time; CPU only
    )
    peak_memory_mib: float | None = None  # weights, input and what a call takes at most; GPU only
    largest_batch: int | None = None  # that trains; tresnet only
    memory_gib: float | None = None  # of the device that could be used, where that was bounded
    reference: str | None = None  # the network that `ratio` is to
    ratio: float | None = (
        None  # of images_per_s to the reference's, in the same round, median over rounds
    )
    samples: tuple[float, ...] = field(
        repr=False
    )  # online and genet: ms of every call; else images/s of every round
    precision: Precision
    layout: Layout
    compiled: bool
    efficiency: Efficiency = "plain"  # of training; what only answers has no fused form
    runtime: str = ""  # what runs an exported file, and the precision of that; "" is PyTorch
    environment: Environment

    def to_json(self) -> str:
        return storage.to_json(self)

    @classmethod
    def from_json(
        cls, data: str | Mapping[str, Any], where: str = "JSON of a measurement"
    ) -> "Measurement":
        """Read text or parsed JSON. Raises ValueError, in one line that begins with `where`."""
        return storage.from_json(cls, data, where)


def compare(one: Measurement, other: Measurement) -> float:
    """How many times as fast `one` is as `other`. Raises ValueError for two that were not measured alike."""

    def how(row: Measurement) -> dict[str, Any]:
        # a batch that was found belongs to the network
        protocol = row.protocol if row.protocol.fit == "given" else replace(row.protocol, batch=1)
        here = {
            key: getattr(row.environment, key) for key in ("device", "threads", "torch", "driver")
        }
        keys = ("precision", "layout", "compiled", "efficiency", "memory_gib", "runtime")
        return {**asdict(protocol), **{key: getattr(row, key) for key in keys}, **here}

    ways = how(one), how(other)
    unlike = [
        f"{key} {ways[0][key]} and {ways[1][key]}"
        for key in ways[0]
        if ways[0][key] != ways[1][key]
    ]
    if unlike:
        raise ValueError(
            f"{one.name} and {other.name} were not measured alike ({'; '.join(unlike)}): measure both again"
        )
    return one.images_per_s / other.images_per_s
