"""Measures a few networks on this machine, and fits a profile to them.

The profile is for networks like the measured ones, so it needs a dozen times and no
microbenchmarks; its estimates follow the runtime's behaviour on these very blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import sleep

import numpy as np
import torch

from fullstride.deploy import choose_form
from fullstride.deploy.exported import ExportedModel
from fullstride.io.console import count_of, verb_of
from fullstride.io.writing import scratch_folder
from fullstride.latency import fitting
from fullstride.latency.calibrate import names_for
from fullstride.latency.devices import profile_here
from fullstride.latency.estimator import Estimator, Part, halved, operators_of, parts, stage_parts
from fullstride.latency.profiles import Fit, Profile
from fullstride.latency.roofline import Machine, Runtime, prepare, total_seconds
from fullstride.measure.bench import BenchOptions, bench
from fullstride.measure.environment import Environment, choose_device
from fullstride.measure.protocols import MEDIANS, CallTime, Measurement, quiet_times, shortest
from fullstride.nets import zoo
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec, Stage
from fullstride.search.settings import Clock
from fullstride.search.structures.space import NetSpace
from fullstride.study.trials import Work

MODULE = "module"  # PyTorch's eager modules, in place of files of a format
GROUP = 8  # networks that are measured in turn
PASSES = 3  # over all networks
PAUSE_S = 2.0  # between passes
FOLDS = 4  # of the cross-validation
# Prior medians of a fit come from a rough profile of such machines, within a factor of e**SPREAD.
SPREAD = {"launch_us": 1.0, "host_us": 1.0, "start_us": 1.5}
OTHER_SPREAD = 0.5


def find_label(format: str = "") -> choose_form.Label | None:
    """The format and precision that are measured here; None for modules.

    By default the first format that can be written here, or modules without the extra `export`.
    Raises ValueError for a format that does not run here.
    """
    if format == MODULE:
        return None
    if format:
        return choose_form.probe_label(choose_form.runnable((format,)))
    try:
        return choose_form.probe_label(choose_form.runnable())
    except ValueError:
        return None


def measure_specs(
    specs: Sequence[NetSpec], batch: int, label: choose_form.Label | None, scratch: Path
) -> Work[list[CallTime]]:
    """The times of untrained networks at their resolutions; weights do not change the time.

    Groups of up to eight networks are measured in turn inside every round, by `quiet_times`. There
    are several passes, as a machine may be slow for some seconds, and each network keeps its
    shortest time. `scratch` is a path for a temporary folder.
    """
    form = " ".join(label) if label else "modules"
    times: dict[str, CallTime] = {}
    with scratch_folder(scratch) as folder:
        groups: list[Callable[[], list[Measurement]]] = []
        for begin in range(0, len(specs), GROUP):
            group = {str(begin + i): spec for i, spec in enumerate(specs[begin : begin + GROUP])}
            groups.append(prepared(group, batch, label, folder))
            done = begin + len(group)
            yield f"{done} of {len(specs)} networks {verb_of(done, 'are')} ready as {form}"
        for number in range(PASSES):
            sleep(PAUSE_S if number else 0)
            yield f"measuring {count_of(len(specs), 'network')}, pass {number + 1} of {PASSES}"
            for measure in groups:
                times = shortest(times, quiet_times(measure))
    return [times[str(number)] for number in range(len(specs))]


def prepared(
    specs: Mapping[str, NetSpec], batch: int, label: choose_form.Label | None, folder: Path
) -> Callable[[], list[Measurement]]:
    """A function without arguments that measures all of `specs`, by name."""
    protocol = replace(MEDIANS, batch=batch)
    if label is None:
        nets = {name: Network(spec).eval() for name, spec in specs.items()}
        sides = {name: spec.resolution for name, spec in specs.items()}
        where, channels = choose_device("auto"), next(iter(specs.values())).in_channels
        options = BenchOptions(in_channels=channels, resolutions=sides)
        return lambda: bench(nets, protocol, where, options)
    models: dict[str, ExportedModel] = {}
    for name, spec in specs.items():
        files = choose_form.untrained_files(
            Network(spec), name, zoo.family_preprocessing(spec), spec.classes, "normalised"
        )
        models[name] = files.open(*label, folder, batch=batch)
    return lambda: choose_form.measure_files(models, protocol)


def fit_profile(
    specs: Sequence[NetSpec], ms: Sequence[float], batch: int, label: choose_form.Label | None
) -> Profile:
    """Fit a profile to the measured ms per image of more than four networks.

    The interval is by cross-validation: each quarter is estimated by the other three.
    """
    device = choose_device("auto") if label is None else torch.device("cpu")
    machine, rough = machine_here(label, device)
    priors = dict(fitting.PRIORS) | {"start_us": (20.0, SPREAD["start_us"])}
    for name, value in rough.inference.numbers.items():
        priors[name] = (value, SPREAD.get(name, OTHER_SPREAD))
    work = prepare([operators_of(spec) for spec in specs], [batch] * len(specs), machine)
    seconds = np.array(ms) * batch / 1e3
    parameters = fitting.Parameters(names_for(machine.runtime, device), priors)
    numbers = fitting.fit(work, seconds, parameters)
    folds = np.arange(len(specs)) % FOLDS
    estimated = fitting.left_out(work, seconds, folds, parameters)
    low, high = fitting.interval(estimated, seconds, folds)
    here = Environment.here(device)
    return Profile(
        name="here",
        device=here.device,
        layout="",
        precision=label[1] if label else "fp32",
        machine=machine,
        sheet="of a rough profile of such machines",
        inference=Fit(
            numbers=numbers,
            error=max(fitting.error(estimated, seconds), 1e-3),
            low=low,
            high=high,
            resolvable_ratio=fitting.resolvable_ratio(estimated, seconds),
            networks=len(specs),
            source=f"study search: networks of the space, {' '.join(label or (MODULE,))}",
            software=f"torch {here.torch}",
            date=here.date[:10],
        ),
    )


def machine_here(label: choose_form.Label | None, device: torch.device) -> tuple[Machine, Profile]:
    """How the runtime executes operators, and a profile of similar machines.

    Peaks scale the fitted numbers, so a rough profile's peaks are good enough, up to the bounds of
    these numbers: a CPU with many threads has the peak of as many cores.
    """
    rough = profile_here()
    machine = rough.machine
    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        machine = replace(machine, peak_tflops=machine.peak_tflops * threads)
    runtime: Runtime = "eager" if label is None else machine.runtime
    if label and label[0] == "tensorrt":
        runtime = "tensorrt"
    return replace(machine, runtime=runtime, folded=label is not None), rough


# Tables of the times of parts give the times of millions of structures. A super-block's time
# depends on its choice and on its input channels, which the place before decides; device and host
# times each add up over the places, and are then combined as the latency model combines them for a
# whole network.

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

        # For each place: the row of the table for each choice of the place before, and the table of
        # seconds of a batch, (device and host, input channels, choices).
        def seconds(rows: list[list[Counted]], of: int) -> list[list[float]]:
            cache = estimator.cache
            return [[sum(cache[p][of] * n for p, n in own) for own in row] for row in rows]

        self.tables = [
            (before, np.array([seconds(rows, of) for of in (0, 1)])) for before, rows in places
        ]

    def busy_s(self, structures: np.ndarray) -> np.ndarray:
        """(2, n): busy seconds of device and host for a batch."""
        busy = np.zeros((2, len(structures)))
        before = none = np.zeros(len(structures), int)
        columns = [*structures.T, none]  # the part after the last place has no choice
        for own, (row_of, table) in zip(columns, self.tables, strict=False):
            busy += table.reshape(2, -1)[:, row_of[before] * table.shape[2] + own]
            before = own
        busy[0] += self.fixed_s
        return busy

    def __call__(self, structures: np.ndarray) -> np.ndarray:
        device_s, host_s = self.busy_s(structures)
        if self.clock == "both":
            total_s = total_seconds(device_s, host_s)
        else:
            total_s = device_s if self.clock == "device" else host_s
        return total_s * 1e3 / self.batch


def place_parts(space: NetSpace, side: int) -> Iterator[tuple[np.ndarray, list[list[Counted]]]]:
    """For stem, stages and head: the row for each choice of the place before, and each row's parts.

    A row is for one number of input channels, with the parts of each choice.
    """
    master, structure = space.master, space.start
    *blocks, (head, sizes) = (part for part, _ in parts(master, side))
    if not blocks:
        raise ValueError(
            f"the times of a network with {master.stem.__name__} or its blocks do not add up: the "
            "latency model has no walk of them"
        )
    specs = [varied(space, place) for place in range(len(structure))]
    yield np.zeros(1, int), [[[next(parts(spec, side))] for spec in specs[0]]]
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


def rows_of_widths(widths: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """For each choice the index of its width in the distinct widths, and the distinct widths."""
    reads, row_of = np.unique(widths, return_inverse=True)
    return row_of, reads.tolist()
