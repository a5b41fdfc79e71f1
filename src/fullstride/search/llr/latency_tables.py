"""How long do millions of structures take? As long as their parts, whose times stand in tables.

A super-block's time depends on its own choice and on the channels that it reads, which the place
before decides; device and host each add up over the places, and are then combined as the latency
model combines them for a whole network.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from fullstride.latency.estimator import Estimator
from fullstride.latency.profiles import Profile
from fullstride.latency.roofline import total_seconds
from fullstride.latency.spec_operators import Part, halved, parts, stage_parts
from fullstride.nets.spec import NetSpec, Stage
from fullstride.search.llr.settings import Clock
from fullstride.search.structures.net_space import NetSpace

Counted = list[tuple[Part, int]]


class LatencyTables:
    """(n, M) structures of `space` -> (n,) ms per image, by one profile at one batch size.

    Equal to `Estimator.many` of their specs, up to rounding. Raises ValueError for a network whose
    stem or blocks the latency model cannot walk.
    """

    def __init__(
        self,
        space: NetSpace,
        profile: Profile,
        batch: int = 1,
        resolution: int | None = None,
        clock: Clock = "both",
    ):
        self.clock, self.batch = clock, batch
        estimator = Estimator(profile, batch)
        self.fixed_s = estimator.fixed_s
        side = space.master.resolution if resolution is None else resolution
        places = list(place_parts(space, side))
        every = (part for _, rows in places for row in rows for own in row for part, _ in own)
        estimator.add(dict.fromkeys(every))
        # Of each place: the row of its table that each choice of the place before reads, and the
        # table of seconds of a batch, (device and host, channels that are read, choices).
        self.tables = [
            (before, np.array([[seconds(own, estimator) for own in row] for row in rows]))
            for before, rows in places
        ]
        self.tables = [(before, np.moveaxis(table, 2, 0)) for before, table in self.tables]

    def busy_s(self, structures: np.ndarray) -> np.ndarray:
        """(2, n): seconds in which device and host are busy with a batch."""
        busy = np.zeros((2, len(structures)))
        before = np.zeros(len(structures), int)
        for number, (row_of, table) in enumerate(self.tables):
            # What follows the last place, a head without choices, has a single column.
            single = number >= structures.shape[1]
            own = np.zeros(len(structures), int) if single else structures[:, number]
            busy += table.reshape(2, -1)[:, row_of[before] * table.shape[2] + own]
            before = own
        busy[0] += self.fixed_s
        return busy

    def __call__(self, structures: np.ndarray) -> np.ndarray:
        device_s, host_s = self.busy_s(structures)
        chosen = {"device": device_s, "host": host_s}
        total_s = chosen.get(self.clock)
        if total_s is None:
            total_s = total_seconds(device_s, host_s)
        return total_s * 1e3 / self.batch


def seconds(own: Counted, estimator: Estimator) -> tuple[float, float]:
    """Of the device and of the host."""
    device_s = sum(estimator.cache[part][0] * count for part, count in own)
    host_s = sum(estimator.cache[part][1] * count for part, count in own)
    return device_s, host_s


def place_parts(space: NetSpace, side: int) -> Iterator[tuple[np.ndarray, list[list[Counted]]]]:
    """Of stem, stages and head: which row each choice before it reads, and the parts of each row.

    A row is one number of channels that are read, with the parts of each choice.
    """
    master, structure = space.master, space.start
    *blocks, (head, sizes) = (part for part, _ in parts(master, side))
    if not blocks:
        raise ValueError(
            f"the times of a network with {master.stem.__name__} or its blocks do not add up: the "
            "latency model has no walk of them"
        )
    specs = [varied(space, place) for place in range(len(structure))]
    yield np.zeros(1, int), [[[first_part(spec, side)] for spec in specs[0]]]
    side = halved(side, master.stem.stride)
    widths = [spec.stem_width for spec in specs[0]]
    for number in range(len(master.stages)):
        stages: Sequence[Stage] = [spec.stages[number] for spec in specs[1 + number]]
        row_of, reads = rows_of_widths(widths)
        style = master.style
        yield row_of, [[[*stage_parts(each, c, side, style)] for each in stages] for c in reads]
        side = halved(side, master.stages[number].stride)
        widths = [stage.width for stage in stages]
    *_, classes, side = sizes
    row_of, reads = rows_of_widths(widths)
    wide = [spec.head_width for spec in specs[-1]] if master.head_width else [0]
    yield row_of, [[[((head, (c, width, classes, side)), 1)] for width in wide] for c in reads]


def varied(space: NetSpace, place: int) -> list[NetSpec]:
    """The MasterNet with each choice of one place."""
    rows = np.tile(space.start, (space.places[place].choices, 1))
    rows[:, place] = np.arange(len(rows))
    return [space.spec(row) for row in rows]


def first_part(spec: NetSpec, side: int) -> tuple[Part, int]:
    return next(parts(spec, side))


def rows_of_widths(widths: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """For each choice the number of its width among the distinct ones, and these."""
    reads, row_of = np.unique(widths, return_inverse=True)
    return row_of, reads.tolist()
