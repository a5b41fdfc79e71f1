"""Chooses a network for a latency budget by published accuracies and estimated times.

A time that GENet's authors published for the same device and batch stands beside the estimate under
its own label, and may decide in its place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from fullstride import tables
from fullstride.io.console import count_of
from fullstride.io.records import read_rows
from fullstride.latency.devices import NamedWork, find_operators, named_work
from fullstride.latency.network_times import Estimate, estimates, is_tie
from fullstride.latency.profiles import Profile
from fullstride.measure.budget import Budget, pareto_front, within
from fullstride.measure.budget import best as best_of
from fullstride.tables import PRINTED, Published, genet_paper, latencies, published, timm_published

if TYPE_CHECKING:
    from fullstride.nets.zoo import NamedNetwork

# Profile -> the table of GENet that it was fitted to.
GENET_TABLES: dict[str, Literal["v100_fp16", "t4_fp16", "t4_int8"]] = {
    "v100-fp16": "v100_fp16",
    "t4-fp16": "t4_fp16",
    "t4-int8": "t4_int8",
}
SAFE = 0.9  # probability to stay within a budget
# The most accurate of many networks that seem to fit often has too short an estimate. So a choice
# stays below MARGIN times the budget with a probability of at least LIKELY. On six of timm's tables
# it then exceeds 0 to 2 of 30 budgets by more than 5 %, and 0 to 3 without this rule.
MARGIN, LIKELY = 1.05, 0.6
WithHead = Callable[[str], "NamedNetwork"]
Place = tuple[str, int]  # a network and a resolution
# Measured ms per image, or the reason why there are none.
MeasuredTimes = Mapping[Place, float | str]
MEASURED = 3  # the most networks worth measuring
MAX_BYTES = 10_000_000  # for a CSV file; timm's table of 1,300 networks has 0.1 million


@dataclass(frozen=True, kw_only=True)
class Option:
    """A network at one resolution, with its time."""

    network: Published
    estimate: Estimate
    published_ms: float | None  # per image, published for this device and batch
    by: Literal["estimated", "published", "measured"]  # which time decides
    measured_ms: float | None = None  # per image, on the device

    @property
    def place(self) -> Place:
        """The key of the time, shared by options that differ only in their weights."""
        name = self.network.name
        is_timm = name.startswith("timm/")
        return name.partition(".")[0] if is_timm else name, self.network.resolution

    @property
    def ms(self) -> float:
        """The deciding time per image."""
        times = {"published": self.published_ms, "measured": self.measured_ms}
        return times.get(self.by) or self.estimate.ms_per_image

    def probability_within(self, ms_per_image: float) -> float:
        """The probability that the deciding time is at most `ms_per_image`."""
        if self.by != "estimated":
            return float(self.ms <= ms_per_image)
        return self.estimate.probability_within(ms_per_image)

    @property
    def label(self) -> str:
        return f"{self.network.name} at {self.network.resolution} x {self.network.resolution}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The most accurate network within a budget, and its neighbours."""

    budget: Budget
    best: Option
    runner_up: Option | None  # the most accurate other network, or resolution, within the budget
    next: Option | None  # the next point on the front: the gain of a larger budget
    # More accurate than the best, and above the budget by less than the resolvable ratio, or within
    # it with too low a probability to be the best.
    near: tuple[Option, ...]
    front: tuple[Option, ...]  # the Pareto front of time and accuracy; the fastest first
    safe: Option | None  # the most accurate with a probability of SAFE to stay within the budget

    @property
    def to_measure(self) -> tuple[Option, ...]:
        """Up to MEASURED options whose measured times would decide, the most accurate first.

        They are the best option, the near options with the highest expected gain of accuracy, and
        the safe option or else the runner-up. Empty if no doubt is left.
        """
        budget_ms, best = self.budget.ms_per_image, self.best

        def promise(option: Option) -> float:
            gain = option.network.top1 - best.network.top1
            return option.probability_within(budget_ms) * gain

        if not self.near and best.probability_within(budget_ms) >= SAFE:
            return ()
        fallback = self.safe or self.runner_up
        safe = [fallback] if fallback and fallback.label != best.label else []
        room = MEASURED - 1 - len(safe)
        near = sorted(self.near, key=promise, reverse=True)[:room]
        own = {o.label: o for o in (*near, best, *safe) if o.by == "estimated"}
        return tuple(sorted(own.values(), key=lambda option: -option.network.top1))


time_of, accuracy_of = attrgetter("ms"), attrgetter("network.top1")
SOURCES: dict[str, Callable[[], list[Published]]] = {
    "ours": published,
    "timm": timm_published,
    "genet_paper": genet_paper,
}


def find_source(name: str) -> Callable[[], list[Published]]:
    """Find one of `SOURCES`, or `from_file` for a CSV file."""
    if name in SOURCES:
        return SOURCES[name]
    if Path(name).suffix == ".csv":
        return partial(from_file, Path(name))
    raise ValueError(
        f"no source of accuracies named {name!r}: choose from {', '.join(SOURCES)}, or give a "
        ".csv file"
    )


def from_file(path: Path) -> list[Published]:
    """Read accuracies from a CSV file with the columns model, img_size and top1 (%), as timm's.

    Names are the zoo's or else timm's, with or without the tag of the weights.
    """
    own = {row.name for row in tables.networks()}

    def published_of(row: Mapping[str, str]) -> Published:
        name, side, top1 = row["model"], int(row["img_size"]), float(row["top1"])
        if not (name and side > 0 and 0 <= top1 <= 100):
            raise ValueError(f"{name!r}, {side}, {top1}")
        is_full = name in own or name.startswith("timm/")
        return Published(name if is_full else f"timm/{name}", side, top1, path.name, "")

    return read_rows(path, published_of, "model, img_size (pixels) and top1 (percent)", MAX_BYTES)


def published_times(profile: Profile, batch: int) -> dict[tuple[str, int], float]:
    """Milliseconds per image by name and resolution in GENet's table for the device, if any."""
    if profile.name not in GENET_TABLES:
        return {}
    sides = {row.name: row.resolution for row in genet_paper()}
    times = {
        PRINTED.get(row.name): row.ms_per_image
        for row in latencies(GENET_TABLES[profile.name])
        if row.batch == batch
    }
    return {(name, sides[name]): ms for name, ms in times.items() if name in sides}


def options_with_times(
    networks: Iterable[Published],
    profile: Profile,
    batch: int,
    prefer_published: bool,
    left_out: dict[str, str],
    with_head: WithHead | None = None,
) -> Iterator[Option]:
    """Yield each network with its time at its own resolution.

    `prefer_published`: published times decide where they exist. `left_out` receives networks that
    cannot be built or do not accept the image, with the reason. Networks of `with_head` are traced,
    and have no published times.
    """
    work: dict[tuple[str, int], NamedWork] = {}
    options = []
    for network in networks:
        key, label = (network.name, network.resolution), f"{network.name} at {network.resolution}"
        try:
            if key not in work and label not in left_out:
                work[key] = work_of_option(*key, with_head)
        except ValueError as error:
            left_out[label] = str(error)
        if key in work:
            options.append(network)
    keys = [(network.name, network.resolution) for network in options]
    times = {} if with_head else published_times(profile, batch)
    operators, ran = [work[key].operators for key in keys], [work[key].ran for key in keys]
    rows = estimates(operators, profile, [batch] * len(keys), names=ran) if keys else []
    for network, key, row in zip(options, keys, rows, strict=True):
        by = "published" if prefer_published and key in times else "estimated"
        yield Option(network=network, estimate=row, published_ms=times.get(key), by=by)


def work_of_option(name: str, resolution: int, with_head: WithHead | None) -> NamedWork:
    if with_head is None and (operators := find_operators(name, resolution)):
        return NamedWork(name, resolution, operators, frozenset())
    return named_work(with_head(name) if with_head else name, resolution)  # needs PyTorch


def options_tie(a: Option, b: Option) -> bool:
    """Whether the order of two times is uncertain.

    A published or measured time ties with an estimate if it lies in the estimate's interval.
    """
    if a.by == b.by == "estimated":
        return is_tie(a.estimate, b.estimate)
    if "estimated" not in (a.by, b.by):
        return a.ms == b.ms
    exact, estimate = (b, a.estimate) if a.by == "estimated" else (a, b.estimate)
    return estimate.low <= exact.ms <= estimate.high


def choose(options: Sequence[Option], budget: Budget) -> Choice:
    """Choose the most accurate network within `budget`, with its neighbours.

    `options` have times at the batch size of the budget.
    """
    budget_ms = budget.ms_per_image
    if not options:
        raise ValueError("no networks to choose from: name a source")
    front = pareto_front(options, time_of, accuracy_of)
    inside = within(options, time_of, budget_ms)
    likely = [o for o in inside if o.probability_within(MARGIN * budget_ms) >= LIKELY]
    inside = likely or inside
    best = best_of(inside, time_of, accuracy_of)
    if best is None:
        raise ValueError(
            f"nothing fits {budget}: the fastest is {front[0].label} with {front[0].ms:.3g} ms an "
            "image; with a larger --call-batch an image takes less"
        )
    others = [option for option in inside if option.label != best.label]
    safe = [option for option in inside if option.probability_within(budget_ms) >= SAFE]
    near = [
        option
        for option in options
        if option.network.top1 > best.network.top1 and may_fit(option, budget_ms)
    ]
    return Choice(
        budget=budget,
        best=best,
        runner_up=best_of(others, time_of, accuracy_of),
        next=next((option for option in front if option.ms > budget_ms), None),
        near=tuple(sorted(near, key=lambda option: -option.network.top1)),
        front=tuple(front),
        safe=best_of(safe, time_of, accuracy_of),
    )


def may_fit(option: Option, budget_ms: float) -> bool:
    """Whether an estimate exceeds the budget by less than the resolvable ratio."""
    return option.by == "estimated" and option.ms < budget_ms * option.estimate.resolvable_ratio


def with_measured(
    options: Iterable[Option], measured: MeasuredTimes
) -> tuple[tuple[Option, ...], dict[str, str]]:
    """The options with their measured times; and by label, why other options do not run."""
    running, failures = list[Option](), dict[str, str]()
    for option in options:
        time = measured.get(option.place)
        if isinstance(time, str):
            failures[option.label] = time
        elif time is None:
            running.append(option)
        else:
            running.append(replace(option, by="measured", measured_ms=time))
    return tuple(running), failures


@dataclass(frozen=True, kw_only=True)
class Selection:
    """All options, and the choice among them."""

    profile: Profile
    options: tuple[Option, ...]
    left_out: dict[str, str]  # why networks cannot be built or do not accept the image
    choice: Choice

    def to_json(self) -> dict[str, Any]:
        choice = self.choice
        json_of = partial(option_json, budget_ms=choice.budget.ms_per_image)
        several = {
            "near": choice.near,
            "measure": choice.to_measure,
            "front": choice.front,
            "options": self.options,
        }
        return {
            "profile": self.profile.to_dict(),
            **choice.budget.to_dict(),
            "best": json_of(choice.best),
            "runner_up": choice.runner_up and json_of(choice.runner_up),
            "next": choice.next and json_of(choice.next),
            "safe": choice.safe and json_of(choice.safe),
            **{key: [json_of(option) for option in options] for key, options in several.items()},
            "left_out": self.left_out,
        }


def option_json(option: Option, budget_ms: float) -> dict[str, Any]:
    time = option.estimate
    return {
        **asdict(option.network),
        "ms_per_image": option.ms,
        "time": option.by,
        "estimated_ms": time.ms_per_image,
        "low": time.low,
        "high": time.high,
        "published_ms": option.published_ms,
        "measured_ms": option.measured_ms,
        "probability": round(option.probability_within(budget_ms), 4),
        "bound": time.bound,
        "not_fitted_on": time.unfitted,
    }


def select(
    profile: Profile,
    budget: Budget,
    *,
    sources: Sequence[str] = ("ours", "timm"),
    prefer_published: bool = True,
    with_head: WithHead | None = None,
    resolution: int | None = None,
    measured: MeasuredTimes = MappingProxyType({}),
    watch: Callable[[Sequence[Published]], Iterable[Published]] = lambda networks: networks,
) -> Selection:
    """Select the most accurate network of `sources` within `budget` on the device of `profile`.

    A source is one of `SOURCES` or a CSV file. `prefer_published`: published times decide where
    they exist. `with_head` builds a network with the head of a task by name. `resolution` sets the
    pixels a side for all times, and a network then has its highest accuracy published at any.
    `measured` times on the device decide, and networks that do not run there are left out. `watch`
    may wrap the networks, to show progress. Raises ValueError if nothing fits.
    """
    networks = [network for name in sources for network in find_source(name)()]
    if resolution is not None:
        rising = sorted(networks, key=lambda network: network.top1)
        best = {network.name: network for network in rising}
        networks = [replace(network, resolution=resolution) for network in best.values()]
    budget = budget.on(profile.device, profile.precision)
    left_out: dict[str, str] = {}
    options = tuple(
        options_with_times(
            watch(networks), profile, budget.batch, prefer_published, left_out, with_head
        )
    )
    options, failures = with_measured(options, measured)
    left_out |= failures
    if left_out and not options:
        name, why = next(iter(left_out.items()))
        none = f"none of {count_of(len(left_out), 'network')} has a time"
        raise ValueError(f"{none}; the first, {name}: {why}")
    return Selection(
        profile=profile, options=options, left_out=left_out, choice=choose(options, budget)
    )
