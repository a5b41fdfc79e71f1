"""How long does a network take on a device? Its operators with the numbers of a profile."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import nn

from fullstride.latency.profiles import Fit, Profile
from fullstride.latency.roofline import prepare, prepare_rows, times, total_seconds
from fullstride.latency.spec_operators import Part, parts, rows_of
from fullstride.measure.cost.operators import COLUMNS, Operators, traced
from fullstride.nets.spec import MOST_CHANNELS, NetSpec, check_range

Bound = Literal["host launches", "device launches", "arithmetic", "memory"]
CHUNK = 1_000  # specs at once, which bounds the memory
MAX_CACHED = 200_000  # parts that an estimator caches: about 65 MB


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one network at one batch size. `low` and `high` enclose nine of ten such networks."""

    profile: str  # name
    work: Literal["inference", "training"]
    batch: int
    ms_per_image: float
    low: float  # ms per image
    high: float
    device_ms: float  # of a batch: time that the device is busy
    host_ms: float  # of a batch: time that the host is busy
    bound: Bound
    resolvable_ratio: float  # the order of two estimates with a smaller ratio is not reliable

    def __repr__(self) -> str:
        return (
            f"Estimate({self.profile}, {self.work}, batch {self.batch}: {self.ms_per_image:.3g} "
            f"ms/image, 90 % interval {self.low:.3g} to {self.high:.3g}, "
            f"{self.images_per_s:,.4g} images/s, bounded by {self.bound})"
        )

    @property
    def images_per_s(self) -> float:
        return 1e3 / self.ms_per_image


def estimate(
    net: nn.Module | Callable[[], nn.Module] | Operators,
    profile: Profile,
    batch: int,
    resolution: int = 224,
    *,
    training: bool = False,
    in_channels: int = 3,
) -> Estimate:
    """The time of a network: a module, a function that builds one, or its operators.

    `resolution` in pixels and `in_channels` describe the image; operators have theirs already.
    Raises ValueError for training steps where the profile has none, and for an unfit image.
    """
    operators = net if isinstance(net, Operators) else traced(net, resolution, in_channels)
    return estimates([operators], profile, [batch], training=training)[0]


def estimates(
    networks: Sequence[Operators],
    profile: Profile,
    batches: Sequence[int],
    *,
    training: bool = False,
) -> list[Estimate]:
    """The time of each network at its entry of `batches`."""
    fit = fit_of(profile, training)
    for batch in batches:
        check_range("batch", batch, MOST_CHANNELS)
    seconds = times(prepare(networks, batches, profile.machine, training=training), fit.numbers)
    causes: tuple[Bound, ...] = ("device launches", "arithmetic", "memory")
    rows = []
    for i, batch in enumerate(batches):
        ms = 1e3 * float(seconds.total_s[i]) / batch
        shares = (seconds.launch_s[i], seconds.arithmetic_s[i], seconds.memory_s[i])
        host_bound = seconds.host_s[i] > seconds.device_s[i]
        rows.append(
            Estimate(
                profile=profile.name,
                work="training" if training else "inference",
                batch=batch,
                ms_per_image=ms,
                low=ms * fit.low,
                high=ms * fit.high,
                device_ms=1e3 * float(seconds.device_s[i]),
                host_ms=1e3 * float(seconds.host_s[i]),
                bound="host launches" if host_bound else causes[int(np.argmax(shares))],
                resolvable_ratio=fit.resolvable_ratio,
            )
        )
    return rows


def fit_of(profile: Profile, training: bool) -> Fit:
    fit = profile.training if training else profile.inference
    if fit is None:
        raise ValueError(
            f"{profile.name} has no training steps: use rtx3090, or calibrate your own device"
        )
    return fit


def is_tie(a: Estimate, b: Estimate) -> bool:
    """Whether the ratio of two estimates by one profile is below the resolvable ratio."""
    if (a.profile, a.work) != (b.profile, b.work):
        raise ValueError(
            f"{a.profile} {a.work} and {b.profile} {b.work}: compare estimates of one profile"
        )
    resolvable = max(a.resolvable_ratio, b.resolvable_ratio)
    return abs(math.log(a.ms_per_image / b.ms_per_image)) < math.log(resolvable)


class Estimator:
    """Times of networks by one profile at one batch size, from specs: fast where they share blocks.

    Equal to `estimate` of the module, up to rounding. Raises ValueError for training steps where
    the profile has none.
    """

    def __init__(self, profile: Profile, batch: int, *, training: bool = False):
        fit = fit_of(profile, training)
        check_range("batch", batch, MOST_CHANNELS)
        self.machine, self.batch, self.training = profile.machine, batch, training
        start_us, image_us = (fit.numbers.get(name, 0.0) for name in ("start_us", "image_us"))
        self.fixed_s = 1e-6 * (start_us + batch * image_us)
        # The start and the copy of the image are those of a network, not of each part.
        self.numbers = {**fit.numbers, "start_us": 0.0, "image_us": 0.0}
        self.cache: dict[Part, tuple[float, float]] = {}  # seconds of device and host for a batch

    def __call__(self, spec: NetSpec, resolution: int | None = None) -> float:
        """ms per image."""
        return float(self.many([spec], resolution)[0])

    def many(self, specs: Sequence[NetSpec], resolution: int | None = None) -> np.ndarray:
        """ms per image of each, at `resolution` pixels, by default each spec's own."""
        busy_s = np.empty((2, len(specs)))  # device and host
        for i in range(0, len(specs), CHUNK):
            chunk = specs[i : i + CHUNK]
            if len(self.cache) > MAX_CACHED:
                self.cache.clear()
            every = (part for spec in chunk for part, _ in parts(spec, resolution))
            self.add(dict.fromkeys(part for part in every if part not in self.cache))
            for number, spec in enumerate(chunk, i):
                own = [(self.cache[part], count) for part, count in parts(spec, resolution)]
                busy_s[0, number] = sum(device_s * count for (device_s, _), count in own)
                busy_s[1, number] = sum(host_s * count for (_, host_s), count in own)
        device_s, host_s = busy_s
        return total_seconds(device_s + self.fixed_s, host_s) * 1e3 / self.batch

    def add(self, new: Iterable[Part]) -> None:
        """Time each part, as if it were a network."""
        groups: defaultdict[tuple, list[tuple]] = defaultdict(list)
        for walk, sizes in new:
            groups[walk].append(sizes)
        if not groups:
            return
        tables, lengths = [], []
        for walk, sizes in groups.items():
            rows = rows_of(walk, np.array(sizes, np.float64).T)
            table = np.empty((len(COLUMNS), len(sizes), len(rows)))
            for number, row in enumerate(rows):
                for column, values in zip(table, row, strict=True):
                    column[:, number] = values
            tables.append(table.reshape(len(COLUMNS), -1))
            lengths += [len(rows)] * len(sizes)
        rows = Operators.of_columns(np.concatenate(tables, axis=1))
        batches = np.full(len(lengths), self.batch)
        work = prepare_rows(rows, np.array(lengths), batches, self.machine, training=self.training)
        seconds = times(work, self.numbers)
        keys = ((walk, sizes) for walk, group in groups.items() for sizes in group)
        values = zip(seconds.device_s.tolist(), seconds.host_s.tolist(), strict=True)
        self.cache.update(zip(keys, values, strict=True))
