"""Which network for a budget of time? Published accuracies beside times on one device: the front, the best, and ties.

Times are estimates. Where GENet's authors printed one for that very device and batch, it stands beside the estimate
under its own label, and may decide in its place.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fullstride.measure.latency.of_name import spec_operators
from fullstride.measure.latency.operators import Operators
from fullstride.measure.latency.profiles import Estimate, Profile, estimates, tie
from fullstride.measure.papers import PRINTED
from fullstride.measure.tables import Published, latencies, published, speeds
from fullstride.nets import zoo

# Profiles that were fitted to one of GENet's tables -> that table.
TIMED: dict[str, Literal["v100_fp16", "t4_fp16", "t4_int8"]] = {
    "v100-fp16": "v100_fp16",
    "t4-fp16": "t4_fp16",
    "t4-int8": "t4_int8",
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """A network at one resolution with its time."""

    network: Published
    estimate: Estimate
    published_ms: float | None  # per image, printed for this device and batch
    by: Literal["estimated", "published"]  # which of the two times decides

    @property
    def ms(self) -> float:
        """Per image."""
        return self.published_ms if self.by == "published" and self.published_ms else self.estimate.ms_per_image

    @property
    def says(self) -> str:
        return f"{self.network.name} at {self.network.resolution} x {self.network.resolution}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    budget_ms: float  # per image
    best: Option
    runner_up: Option | None  # the most accurate other network, or resolution, within the budget
    next: Option | None  # the next point on the front: what a looser budget would buy
    near: tuple[Option, ...]  # more accurate than the best, and slower than the budget by less than can be told
    front: tuple[Option, ...]  # nothing is both as fast and more accurate; the fastest first


def genet_paper() -> list[Published]:
    """Networks of GENet's Table 7 that can be built here, with its accuracies; of 34 it has 21."""
    sides = {row.line: row.resolution for row in speeds() if row.table.startswith("GENet")}
    return [
        Published(PRINTED[row.name], sides[row.name], row.top1, "arXiv:2006.14090 Table 7", "")
        for row in latencies("v100_fp16")
        if row.batch == 1 and row.name in sides
    ]


SOURCES: dict[str, Callable[[], list[Published]]] = {
    "ours": published,
    "timm": lambda: [*published("timm"), *(row for row in genet_paper() if row.name.startswith("timm/"))],
    "genet_paper": genet_paper,
}


def find_source(name: str) -> Callable[[], list[Published]]:
    if name not in SOURCES:
        raise ValueError(f"no source of accuracies named {name!r}: choose from {', '.join(SOURCES)}")
    return SOURCES[name]


def published_times(profile: Profile, batch: int) -> dict[tuple[str, int], float]:
    """Milliseconds per image by name and resolution, as GENet's authors printed them for that device; {} for others."""
    if profile.name not in TIMED:
        return {}
    sides = {row.name: row.resolution for row in genet_paper()}
    times = {PRINTED.get(row.name): row.ms_per_image for row in latencies(TIMED[profile.name]) if row.batch == batch}
    return {(name, sides[name]): ms for name, ms in times.items() if name in sides}


def price(networks: Sequence[Published], profile: Profile, batch: int, printed: bool = False) -> Iterator[Option]:
    """The time of each network at its own resolution. `printed`: published times decide where there are any."""
    known: dict[tuple[str, int], Operators] = {}
    times = published_times(profile, batch)
    for network in networks:
        key = network.name, network.resolution
        if key not in known:
            known[key] = spec_operators(zoo.spec(network.name), network.resolution)
        (estimate,) = estimates([known[key]], profile, [batch])
        by = "published" if printed and key in times else "estimated"
        yield Option(network=network, estimate=estimate, published_ms=times.get(key), by=by)


def tied(a: Option, b: Option) -> bool:
    """Whether it cannot be told which of the two is faster."""
    if a.by == b.by == "estimated":
        return tie(a.estimate, b.estimate)
    if a.by == b.by:
        return a.ms == b.ms
    known, guess = (a, b.estimate) if a.by == "published" else (b, a.estimate)
    return guess.low <= known.ms <= guess.high


def front(options: Sequence[Option]) -> list[Option]:
    found: list[Option] = []
    for option in sorted(options, key=lambda option: (option.ms, -option.network.top1)):
        if not found or option.network.top1 > found[-1].network.top1:
            found.append(option)
    return found


def choose(options: Sequence[Option], budget_ms: float) -> Choice:
    """The most accurate network within `budget_ms` per image, and what stands around it."""
    check_budget(budget_ms)
    if not options:
        raise ValueError("no networks to choose from: name a source")
    line = front(options)
    inside = [option for option in options if option.ms <= budget_ms]
    if not inside:
        raise ValueError(
            f"nothing fits {budget_ms:g} ms an image: the fastest is {line[0].says} with {line[0].ms:.3g} ms"
        )
    inside.sort(key=lambda option: (-option.network.top1, option.ms))
    best = inside[0]
    place = best.network.name, best.network.resolution
    others = (option for option in inside if (option.network.name, option.network.resolution) != place)
    slower = [option for option in line if option.ms > budget_ms]
    near = (o for o in options if o.ms > budget_ms and o.network.top1 > best.network.top1 and within(o, budget_ms))
    return Choice(
        budget_ms=budget_ms,
        best=best,
        runner_up=next(others, None),
        next=slower[0] if slower else None,
        near=tuple(sorted(near, key=lambda option: -option.network.top1)),
        front=tuple(line),
    )


def check_budget(budget_ms: float) -> None:
    if not 0 < budget_ms < math.inf:
        raise ValueError(f"a budget of {budget_ms:g} ms an image: give a time above 0")


def within(option: Option, budget_ms: float) -> bool:
    """Whether it cannot be told that the time is above the budget."""
    return option.by == "estimated" and option.ms / budget_ms < option.estimate.apart
