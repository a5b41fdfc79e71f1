"""Which network for a budget of time? Published accuracies beside times on one device: the front, the best, and ties.

Times are estimates. Where GENet's authors printed one for that very device and batch, it stands beside the estimate
under its own label, and may decide in its place.
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from fullstride.latency.by_name import spec_operators
from fullstride.latency.profiles import Estimate, Profile, estimates, tie
from fullstride.measure.cost.operators import Operators
from fullstride.nets import families, zoo
from fullstride.tables import Published, latencies, published, speeds
from fullstride.tables.names import PRINTED

# Profiles that were fitted to one of GENet's tables -> that table.
TIMED: dict[str, Literal["v100_fp16", "t4_fp16", "t4_int8"]] = {
    "v100-fp16": "v100_fp16",
    "t4-fp16": "t4_fp16",
    "t4-int8": "t4_int8",
}
LARGEST_FILE = 10_000_000  # bytes; timm's table of 1,300 networks has 0.1 million


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
        return (
            self.published_ms
            if self.by == "published" and self.published_ms
            else self.estimate.ms_per_image
        )

    @property
    def says(self) -> str:
        return f"{self.network.name} at {self.network.resolution} x {self.network.resolution}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    budget_ms: float  # per image
    best: Option
    runner_up: Option | None  # the most accurate other network, or resolution, within the budget
    next: Option | None  # the next point on the front: what a looser budget would buy
    near: tuple[
        Option, ...
    ]  # more accurate than the best, and slower than the budget by less than can be told
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
    "timm": lambda: [
        *published("timm"),
        *(row for row in genet_paper() if row.name.startswith("timm/")),
    ],
    "genet_paper": genet_paper,
}


def find_source(name: str) -> Callable[[], list[Published]]:
    """One of `SOURCES`, or a CSV file as `from_file` reads it."""
    if name in SOURCES:
        return SOURCES[name]
    if Path(name).suffix == ".csv":
        return partial(from_file, Path(name))
    raise ValueError(
        f"no source of accuracies named {name!r}: choose from {', '.join(SOURCES)}, or give a .csv file"
    )


def from_file(path: Path) -> list[Published]:
    """Accuracies from a CSV file with the columns model, img_size and top1 (%), as timm publishes its own.

    Names are those of the zoo, else timm's, with or without the tag of the weights.
    """
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has more than {LARGEST_FILE:,} bytes: give a table of accuracies")
    found: list[Published] = []
    try:
        for row in csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()):
            name, side, top1 = row["model"], int(row["img_size"]), float(row["top1"])
            if not (name and side > 0 and 0 <= top1 <= 100):
                raise ValueError(f"{name!r}, {side}, {top1}")
            whole = name if name in families.SPECS or name.startswith("timm/") else f"timm/{name}"
            found.append(Published(whole, side, top1, path.name, ""))
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path}, line {len(found) + 2}: {error}: give columns model, img_size (pixels) and top1 (percent)"
        ) from None
    return found


def published_times(profile: Profile, batch: int) -> dict[tuple[str, int], float]:
    """Milliseconds per image by name and resolution, as GENet's authors printed them for that device; {} for others."""
    if profile.name not in TIMED:
        return {}
    sides = {row.name: row.resolution for row in genet_paper()}
    times = {
        PRINTED.get(row.name): row.ms_per_image
        for row in latencies(TIMED[profile.name])
        if row.batch == batch
    }
    return {(name, sides[name]): ms for name, ms in times.items() if name in sides}


def price(
    networks: Iterable[Published],
    profile: Profile,
    batch: int,
    printed: bool = False,
    left_out: dict[str, str] | None = None,
) -> Iterator[Option]:
    """The time of each network at its own resolution. `printed`: published times decide where there are any.

    With `left_out`, those that cannot be built or take no such image are put there with the reason, else it is raised.
    """
    known: dict[tuple[str, int], Operators] = {}
    times = published_times(profile, batch)
    for network in networks:
        key = network.name, network.resolution
        if key not in known:
            try:
                known[key] = spec_operators(zoo.spec(network.name), network.resolution)
            except ValueError as error:
                if left_out is None:
                    raise
                left_out[f"{network.name} at {network.resolution}"] = str(error)
                continue
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
    others = (
        option for option in inside if (option.network.name, option.network.resolution) != place
    )
    slower = [option for option in line if option.ms > budget_ms]
    near = (
        o
        for o in options
        if o.ms > budget_ms and o.network.top1 > best.network.top1 and within(o, budget_ms)
    )
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
