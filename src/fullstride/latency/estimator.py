"""Estimates times of modules and of many specs by a profile."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from torch import nn

from fullstride.io.records import check_range
from fullstride.latency.network_times import Estimate, estimates, fit_of
from fullstride.latency.profiles import Profile
from fullstride.latency.roofline import prepare_rows, times, total_seconds
from fullstride.latency.spec_operators import Part, in_form, parts, rows_of
from fullstride.measure.budget import MOST_IMAGES
from fullstride.measure.operators import COLUMNS, Operators
from fullstride.measure.tracer import on_meta, traced
from fullstride.nets.spec import NetSpec

CHUNK = 1_000  # specs at once, to bound memory
MAX_CACHED = 200_000  # parts in an estimator's cache: about 65 MB


def estimate(
    net: nn.Module | Callable[[], nn.Module] | Operators,
    profile: Profile,
    batch: int,
    resolution: int = 224,
    *,
    training: bool = False,
    in_channels: int = 3,
) -> Estimate:
    """Estimate the time of a network: a module, a function that builds one, or its operators.

    `resolution` in pixels and `in_channels` describe the image, and are ignored for operators.
    Inference means the network as it ships, with branches merged (`nets.merged_branches`). Raises
    ValueError for training steps if the profile has none, and for an unfit image.

    Examples:
        >>> import fullstride
        >>> net, profile = fullstride.zoo.create("resnet50"), fullstride.load_profile("rtx4090")
        >>> time = fullstride.estimate(net, profile, batch=64)
        >>> time.low < time.ms_per_image < time.high
        True
    """
    if not isinstance(net, Operators):
        form = partial(in_form, partial(on_meta, net), training)
        net = traced(form, resolution, in_channels)
    return estimates([net], profile, [batch], training=training)[0]


class Estimator:
    """Estimates times of specs by one profile at one batch size, fast for specs that share blocks.

    Equal to `estimate` of the module, up to rounding. Raises ValueError for training steps if
    the profile has none.
    """

    def __init__(self, profile: Profile, batch: int, *, training: bool = False):
        fit = fit_of(profile, training)
        check_range("batch", batch, MOST_IMAGES)
        self.machine, self.batch, self.training = profile.machine, batch, training
        start_us, image_us = (fit.numbers.get(name, 0.0) for name in ("start_us", "image_us"))
        self.fixed_s = 1e-6 * (start_us + batch * image_us)
        # A network starts and copies its image once, not once per part.
        self.numbers = {**fit.numbers, "start_us": 0.0, "image_us": 0.0}
        self.cache: dict[Part, tuple[float, float]] = {}  # seconds of device and host for a batch

    def __call__(self, spec: NetSpec, resolution: int | None = None) -> float:
        """Estimate ms per image."""
        return float(self.many([spec], resolution)[0])

    def many(self, specs: Sequence[NetSpec], resolution: int | None = None) -> np.ndarray:
        """Estimate ms per image of each spec at `resolution` pixels, by default its own."""
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
        """Cache the time of each part, estimated like a network."""
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
