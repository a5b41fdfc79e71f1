"""Measures networks on another machine as exported files.

For a benchmark, a choice by measured times, or a calibration of the machine's profile.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from fullstride import tasks
from fullstride.deploy import choose_form
from fullstride.deploy.exported import ExportedModel, ExportedModule, InputKind
from fullstride.deploy.formats import detect_format, open_as_modules
from fullstride.deploy.formats.base import last_line
from fullstride.io.console import count_of, print_note
from fullstride.io.records import refuse_flags
from fullstride.io.writing import remove, scratch_folder
from fullstride.latency.calibrate import FILES, GROUP, Elsewhere, Plan, Timing, default_plan
from fullstride.latency.device_sheets import MeasuredTime, corrected
from fullstride.latency.devices import CPU
from fullstride.latency.microbenchmarks import OUTPUTS, Microbenchmark, all_microbenchmarks
from fullstride.latency.profiles import Profile
from fullstride.latency.roofline import Runtime
from fullstride.latency.select import MeasuredTimes, Option, Place, Selection
from fullstride.measure import bench_by_name
from fullstride.measure.bench_by_name import noise, quieter
from fullstride.measure.budget import UNLIMITED_MS, Budget
from fullstride.measure.protocols import MEDIANS, Measurement, Protocol, call_time, spread_of_rounds
from fullstride.measure.settings import BenchSettings, CalibrateSettings
from fullstride.measure.tracer import traced
from fullstride.nets import zoo
from fullstride.nets.backbone import Backbone
from fullstride.nets.efficiency import short_precision
from fullstride.nets.preprocessing import Preprocessing
from fullstride.targets.target import StoredTimes, Target
from fullstride.tasks.task import Task

INPUT: InputKind = "pixels"  # as in the files that `fit` ships
Files = Mapping[choose_form.Label, ExportedModel]
Rows = dict[choose_form.Label, Measurement]


@dataclass(frozen=True, kw_only=True)
class FilesThere:
    """Writes networks with random weights to files for another machine, and stores their times.

    Files stay in `folder` until they are timed.
    """

    target: Target
    store: StoredTimes
    labels: Sequence[choose_form.Label]  # forms of each network
    folder: Path
    batch: int = 1

    def write(
        self, net: nn.Module, name: str, pre: Preprocessing, classes: int, task: Task | None = None
    ) -> Files:
        """Write the forms of a network that run there. Raises ValueError if there are none."""
        reason, models = "", dict[choose_form.Label, ExportedModel]()
        try:
            files = choose_form.untrained_files(net, name, pre, classes, INPUT, task)
            for label in self.labels:
                try:
                    model = files.open(*label, self.folder, batch=self.batch)
                    choose_form.run_there(self.target, model, self.batch)
                except (ValueError, MemoryError) as error:
                    reason = reason or last_line(error)
                else:
                    models[label] = model
        except OSError:  # such as a lost connection, not the network's fault
            raise
        except Exception as error:  # third-party networks may raise anything
            reason = last_line(error)
        if not models:
            raise ValueError(f"{name} does not run on {self.target.where}: {reason}")
        return models

    def write_named(
        self, name: str, resolution: int, task: str = "", classes: int | None = None
    ) -> Files:
        """`write` a network by its name or path, with the head of its task."""
        named = tasks.find_network(name, task, classes)
        kind = tasks.find_task(task or "classify")
        if zoo.names_weights(name):
            kind = tasks.task_of(tasks.load(name))
        pre = replace(zoo.family_preprocessing(named.spec), resolution=resolution)
        names = [*map(str, range(named.spec.classes))]
        return self.write(named.build(), name, pre, len(names), kind.for_classes(names))

    def stored(self, network: str, resolution: int) -> Rows:
        """The times of a network from earlier calls, by form."""
        place = network, resolution, self.batch
        times = {label: self.store.find(*place, *label) for label in self.labels}
        return {label: row for label, row in times.items() if row is not None}

    def measure(self, networks: Mapping[str, Files], protocol: Protocol) -> dict[str, Rows]:
        """Measure all files in turn; return the times by network and form."""
        keys = [(name, label) for name, own in networks.items() for label in own]
        models = {label_of(name, label): networks[name][label] for name, label in keys}
        times: dict[str, Rows] = {name: {} for name in networks}
        rows = choose_form.measure_files(models, protocol, target=self.target)
        for (name, label), row in zip(keys, rows, strict=True):
            times[name][label] = row
        return times

    def save(self, times: Mapping[str, Rows]) -> None:
        """Store latencies, except of files, runs and bundles, whose content may change."""
        for name, rows in times.items():
            for label, row in rows.items():
                if row.protocol.name == "online" and not zoo.has_own_spec(name):
                    self.store.save(name, *label, row)

    def clear(self) -> None:
        for path in self.folder.iterdir():
            remove(path)
        self.target.clear()


def label_of(name: str, label: choose_form.Label) -> str:
    return " ".join(filter(None, (name, *label)))


@contextmanager
def files_there(target: Target, precision: str = "fp32", batch: int = 1) -> Iterator[FilesThere]:
    """`FilesThere` for each format that is written here and runs there, in one precision."""
    labels = choose_form.supported_by(target, choose_form.runnable((), (precision,)))
    store = StoredTimes(target)
    with scratch_folder(store.checked / "files") as folder:
        files = FilesThere(target=target, store=store, labels=labels, folder=folder, batch=batch)
        yield files
        files.clear()


# ---- a benchmark


@dataclass(frozen=True, kw_only=True)
class PlanThere(bench_by_name.BenchPlan):
    """The networks to measure on another machine, in each form."""

    files: FilesThere
    networks: Mapping[str, Files]

    def measure(self, parts: Sequence[Protocol]) -> list[list[Measurement]]:
        times = [self.files.measure(self.networks, part) for part in parts]
        for part, each in zip(parts, times, strict=True):
            if part.rounds >= MEDIANS.rounds:  # `choose` decides by them
                self.files.save(each)
        return [[row for rows in each.values() for row in rows.values()] for each in times]


@contextmanager
def bench_there(
    models: Sequence[str], settings: BenchSettings, target: Target, *, trust: bool = False
) -> Iterator[PlanThere]:
    """Plan a benchmark by names on another machine, which keeps the files until the block ends.

    Networks become files with random weights in each format that runs there; exported files are
    measured as they are. Raises ValueError, in one line, for anything not measurable there.
    """
    check_flags(settings)
    exported, there = open_as_modules(models, trust=trust), target.describe().machine.runtimes
    for name, module in exported.items():
        if (kind := detect_format(module.model.path)) not in there:
            raise ValueError(f"{name} is {kind}, which {target.where} does not run: leave it out")
    precision = None if {*models} - {*exported} else settings.precision  # of files: refused
    own = replace(settings, precision=precision, reference="none")
    plan = bench_by_name.plan(models, own, exported, tasks.build_head)
    first, networks = next(iter(plan.protocols.values()))[0], dict[str, Files]()
    with files_there(target, settings.precision or "fp32") as files:
        for name in plan.nets:
            if name in exported:
                model = with_side(exported[name], settings.resolution)
                networks[name] = {("", model.metadata.precision): model}
            else:
                side = plan.options.resolutions.get(name, first.resolution)
                networks[name] = files.write_named(name, side)
        yield PlanThere(**vars(plan), files=files, networks=networks)


def with_side(module: ExportedModule, side: int | None) -> ExportedModel:
    """The file to measure at other pixels a side. Raises ValueError if it does not take them."""
    model = module.model
    if side is None:
        return model
    module(module.random_images(1, side))
    pre = replace(model.preprocessing, resolution=side)
    return replace(model, metadata=replace(model.metadata, preprocessing=pre))


def check_flags(settings: BenchSettings) -> None:
    """Raise ValueError, in one line, for a flag that does not apply to files on a target."""
    names = ("device", "layout", "compiled", "efficiency", "padded", "memory_gib", "reference")
    own = {each: getattr(settings, each) != getattr(BenchSettings(), each) for each in names}
    refuse_flags(own, f"with --target {settings.target}: leave it out")
    if others := sorted({*settings.protocol} - {*bench_by_name.DEFAULT_PROTOCOLS}):
        raise ValueError(f"--protocol {others[0]} is for networks here: use online or throughput")


# ---- a choice


MOST = 12  # networks measured for a choice
QUANTILES = (0.25, 0.5)  # of the estimated front: networks whose times correct all estimates
Choose = Callable[..., Selection]  # `latency.select.select` of a profile and a budget


@dataclass(frozen=True, kw_only=True)
class TimesThere:
    """The times of networks in a choice: each the shortest of its forms."""

    files: FilesThere
    task: str = ""
    classes: int | None = None
    ms: dict[Place, float | str] = field(default_factory=dict)  # a text: why there is no time

    def name(self, place: Place) -> str:
        return " ".join(map(str, filter(None, (place[0], self.task, self.classes))))

    def find(self, place: Place) -> None:
        """Take the time from earlier calls, if stored."""
        if place not in self.ms and (rows := self.files.stored(self.name(place), place[1])):
            self.ms[place] = fastest_ms(rows)

    def measure(self, place: Place) -> str:
        """Measure a network; return a line with the times, or the reason why there are none."""
        name = self.name(place)
        try:
            models = self.files.write_named(*place, self.task, self.classes)
            rows = quieter(lambda: self.files.measure({name: models}, MEDIANS)[name], noise_of)
        except ValueError as error:
            self.ms[place] = words = last_line(error)
            return words
        self.files.save({name: rows})
        self.ms[place] = fastest_ms(rows)
        times = (f"{label_of('', label)} {call_time(row).ms:.3g} ms" for label, row in rows.items())
        return f"{name} at {place[1]} x {place[1]}: {', '.join(times)}"


def choose_there(
    target: Target,
    budget: Budget,
    choose: Choose,
    *,
    task: str = "",
    classes: int | None = None,
    progress: choose_form.Progress = lambda line: None,
) -> Selection:
    """Choose the most accurate network within the budget, by times on the target.

    Measured networks correct rough estimates. Networks whose times would decide are measured, and
    the choice is made again, until no doubt is left or `MOST` are measured. Times are stored at
    once for later calls.
    """
    there = target.describe().machine
    rough = replace(  # relative times on processors
        CPU,
        name=target.name,
        device=f"{there.processor}, {count_of(there.cores, 'thread')}",
        machine=replace(CPU.machine, runtime="onnx"),
    )
    everything = choose(rough, replace(budget, ms_per_image=UNLIMITED_MS))
    with files_there(target, batch=budget.batch) as files:
        times = TimesThere(files=files, task=task, classes=classes)
        for option in everything.options:
            times.find(option.place)
        front, left = everything.choice.front, MOST
        due = [] if times.ms else [front[int(share * len(front))] for share in QUANTILES]
        if times.ms:
            networks = count_of(len(times.ms), "network", "were")
            progress(f"{networks} measured before: {times.files.store.folder}")
        while True:
            for place in [*dict.fromkeys(option.place for option in due)][:left]:
                progress(times.measure(place))
                files.clear()
                left -= 1
            profile = corrected_by(rough, everything.options, times.ms, budget.batch)
            selection = choose(profile, budget, measured=times.ms)
            due = selection.choice.to_measure
            if not due or not left:
                return selection


def corrected_by(
    rough: Profile, options: Sequence[Option], ms: MeasuredTimes, batch: int
) -> Profile:
    """The profile with its times corrected by the measured times."""
    estimates = {option.place: option.estimate for option in options}
    rows = [
        MeasuredTime(network=name, resolution=side, batch=batch, ms_per_image=time)
        for (name, side), time in ms.items()
        if not isinstance(time, str)
    ]
    own = [estimates[row.network, row.resolution] for row in rows]
    return corrected(rough, rows, own, most_off=math.inf) if rows else rough


def fastest_ms(rows: Rows) -> float:
    return min(call_time(row).ms for row in rows.values())


def noise_of(rows: Rows) -> float:
    return noise([[*rows.values()]])


# ---- a profile


def plan_there(target: Target, options: CalibrateSettings) -> Plan:
    """`calibrate.default_plan` for another machine."""
    runtimes = target.describe().machine.runtimes
    versions = {name: runtimes[name] for name in FILES if name in runtimes}
    there = Elsewhere(environment=target.environment, versions=versions)
    return default_plan(torch.device("cpu"), options, there)


def timings_there(plan: Plan, target: Target) -> Iterator[list[Timing]]:
    """Yield the times of the microbenchmarks as files, in groups that mix all families.

    Stored times are not measured again. No group begins after the plan's minutes. Networks
    that cannot be exported are left out.
    """
    networks, end = all_microbenchmarks(), time.monotonic() + 60 * plan.minutes
    count = -(-len(networks) // GROUP)
    precision = short_precision(plan.precision)
    with files_there(target, precision) as files:
        labels = [label for label in files.labels if label[0] in plan.runtimes]
        files = replace(files, labels=labels)
        for number in range(count):
            if time.monotonic() >= end:
                return
            yield [*timings_of_group(networks[number::count], plan, files)]
            files.clear()


def timings_of_group(
    group: Sequence[Microbenchmark], plan: Plan, files: FilesThere
) -> Iterator[Timing]:
    """Export each network once, and measure the whole group in turn at each batch size."""
    side, exported = plan.resolution, dict[str, Files]()
    protocol = replace(plan.protocol, name="online", resolution=side)
    operators = {each.name: traced(each.build, side) for each in group}
    for batch in plan.batches:
        own = replace(files, batch=batch)
        times = {each.name: own.stored(each.name, side) for each in group}
        for each in group:
            if len(times[each.name]) < len(files.labels) and each.name not in exported:
                exported[each.name] = written(each, side, own)
        due = {name: exported[name] for name in times if exported.get(name)}
        if due:
            measured = own.measure(due, replace(protocol, batch=batch))
            own.save(measured)
            times |= measured
        for each in group:
            for label, row in times[each.name].items():
                seconds = row.protocol.batch * call_time(row).ms / 1e3
                yield Timing(
                    network=each.name,
                    family=each.family,
                    operators=operators[each.name],
                    runtime=cast(Runtime, label[0]),
                    batch=batch,
                    seconds=seconds,
                    wall_s=seconds,
                    cpu_s=seconds,
                    spread=spread_of_rounds(row),
                )


def written(network: Microbenchmark, resolution: int, files: FilesThere) -> Files:
    """The files of a microbenchmark; none if it cannot be exported."""
    net = network.build()
    classes = net.spec.classes if isinstance(net, Backbone) else OUTPUTS
    try:
        return files.write(net, network.name, Preprocessing(resolution=resolution), classes)
    except ValueError as error:
        print_note(f"left out: {error}")
        return {}
