"""Compares the times of the candidates of a fit with its budget."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from fullstride.autofit.candidates import Candidate, check_source, find_specs
from fullstride.autofit.settings import FitSettings
from fullstride.data.transforms.crop import check_sides
from fullstride.deploy.choose_form import Label, runnable, supported_by
from fullstride.deploy.export import why_not_int8
from fullstride.deploy.exported import InputKind, Precision
from fullstride.deploy.formats import FORMATS
from fullstride.io.console import count_of, printable, verb_of
from fullstride.latency.devices import load_profile
from fullstride.latency.profiles import Profile
from fullstride.measure.budget import UNLIMITED_MS, Budget, is_elsewhere
from fullstride.measure.protocols import BUSY
from fullstride.nets import zoo
from fullstride.report.console_tables import table, three_digits
from fullstride.report.scatter import BANDS, TimedCandidate
from fullstride.study.driver import StudyJob, saved_stage
from fullstride.targets.target import Target, check_same, connect
from fullstride.tasks import find_task
from fullstride.tasks.task import Metric, Task
from fullstride.train.batches import check_task
from fullstride.train.distill import read_pseudo_labels
from fullstride.train.recipes.choice import RunOptions, case_of

INPUT: InputKind = "pixels"  # of the files: uint8 pixels in, probabilities out
FRONT = "front"  # the stage that finds budgets if hours alone limit a fit


@dataclass(frozen=True, kw_only=True, eq=False)
class FitJob(StudyJob):
    """The job of a fit."""

    settings: FitSettings

    @cached_property
    def task(self) -> Task:
        """The task with the recipe's options and the statistics of the training images."""
        task = find_task(self.settings.task or "classify")
        options = task.read_options(self.recipe.changes.get("task_options", {}))
        return replace(task, **vars(options)).for_data(self.data)

    @property
    def variants(self) -> tuple[Mapping[str, Any], ...]:
        """The options of the task that are tried, without options that the user has set."""
        chosen = self.recipe.changes.get("task_options", {})
        return tuple(each for each in self.task.variants if not each.keys() & chosen) or ({},)

    @cached_property
    def metric(self) -> Metric:
        """The metric by which networks and files are compared."""
        source = self.recipe.resolve(case_of(self.data, task=self.task)).recipe
        return self.task.find_metric(source.score, len(self.data.classes))

    def options_of(self, candidate: Candidate, every_steps: int = 0) -> RunOptions:
        """How a candidate is trained; `every_steps` sets further checkpoints, unless it is 0."""
        return RunOptions(
            weights=candidate.weights,
            width=candidate.width,
            depth=candidate.depth,
            task=self.task.name,
            device=self.devices[0],
            workers=self.options.workers,
            checkpoint_every_steps=every_steps,
        )

    @cached_property
    def budgets(self) -> tuple[Budget, ...]:
        """The budgets, the largest first, by default the front's; each budget gets a file."""
        if budgets := self.settings.budgets():
            return budgets
        front = saved_stage(self.folder, FRONT, tuple[float, ...])
        return tuple(Budget(ms_per_image=ms) for ms in front)

    @property
    def budget(self) -> Budget:
        """The largest budget."""
        return self.budgets[0]

    @cached_property
    def profile(self) -> Profile | None:
        """The profile of the device that will run the files; None if files are measured."""
        return None if self.settings.is_measured else load_profile(self.settings.target)

    @cached_property
    def target(self) -> Target | None:
        """The other machine where files are measured; None: this machine.

        Raises ValueError, in one line, if it is not reachable, or not the machine of earlier calls
        for this fit.
        """
        if not is_elsewhere(self.settings.target):
            return None
        target = connect(self.settings.target)
        check_same(target, self.folder)
        return target

    @cached_property
    def labels(self) -> tuple[Label, ...]:
        """The formats and precisions that are timed. Raises ValueError if none is possible."""
        all_labels = runnable(self.settings.formats, self.settings.precisions)
        reasons = {
            label: why_not_int8(self.task, FORMATS[label[0]]) if label[1] == "int8" else ""
            for label in all_labels
        }
        labels = tuple(label for label, reason in reasons.items() if not reason)
        if not labels:
            raise ValueError(reasons[all_labels[0]])
        return labels if self.target is None else supported_by(self.target, labels)

    def check(self) -> None:
        """Raise ValueError, in one line, for invalid arguments, before any image is read."""
        for name in ("resolution", "fit"):
            if name in self.recipe.changes:
                raise ValueError(
                    f"recipe.{name} is set by each candidate: choose by --resolutions, or leave it "
                    "out"
                )
        super().check()
        settings = self.settings
        _ = settings.budgets(), self.profile, settings.limit_hours
        if find_task(settings.task or "classify").has_places:
            check_sides(settings.resolutions, "--resolutions")
        find_specs(settings.candidates)
        check_source(settings.source_of_weights)
        if settings.is_measured:
            _ = self.labels
        recipe = self.recipe.resolve(case_of(self.data, task=self.task)).recipe
        check_task(self.task, recipe)
        if recipe.teacher:
            zoo.load(recipe.teacher)
        if recipe.unlabelled:
            read_pseudo_labels(Path(recipe.unlabelled)).for_classes(self.data.classes)


# Another program may have made a measured time longer by this factor: phases of tens of seconds
# with 1.65 times the time were seen on a virtual machine. Files beyond a budget by less are
# measured again.
BUSY_FACTOR = 1.5
BUSY_LOAD = 1.5  # processes that want a core / cores: a measurement wants all cores itself


@dataclass(frozen=True, kw_only=True)
class CandidateTime:
    """The time of a candidate in one format and precision, at the batch of the budget."""

    candidate: str  # its name
    format: str  # "" if the time is an estimate for a device that is not here
    precision: Precision
    ms: float | None = None  # per image; None: it could not be exported or does not run
    low: float | None = None  # interval of nine in ten networks, or of nine in ten rounds
    high: float | None = None
    measured: bool = True
    failure: str = ""  # why there is no time, in one line
    left_out: str = ""  # why the candidate is not tried, see `shortlist`
    measurements: int = 1  # their number; the time is the shortest
    budget_ms: float = 0.0  # of the fit that measured it, see `times.has_all`; 0: no measurement
    first_s: float = 0.0  # seconds of the candidate's first measurement, in all forms


def limit_ms(time: CandidateTime, *, maybe: bool = False) -> float | None:
    """The time to compare with a budget; None without a time.

    A measured time, or the upper end of an estimate's interval, with `maybe` the estimate itself.
    """
    return time.ms if time.measured or maybe or time.ms is None else time.high


def within_budget(
    times: Iterable[CandidateTime], budget: Budget, *, maybe: bool = False
) -> tuple[CandidateTime, ...]:
    """The `times` within the budget by `limit_ms`, the fastest first."""
    limits = [(limit_ms(each, maybe=maybe), each) for each in times]
    inside = [(ms, each) for ms, each in limits if ms is not None and ms <= budget.ms_per_image]
    return tuple(each for _, each in sorted(inside, key=lambda pair: pair[0]))


def fastest_of(times: Iterable[CandidateTime]) -> dict[str, CandidateTime]:
    """The fastest format and precision of each candidate with a time, by name."""
    timed = [each for each in times if each.ms is not None]
    best: dict[str, CandidateTime] = {}
    for each in sorted(timed, key=lambda each: each.ms or 0.0):
        best.setdefault(each.candidate, each)
    return best


def fastest_ms(times: Iterable[CandidateTime]) -> dict[str, float]:
    """The shortest time of each candidate, by name."""
    return {name: each.ms for name, each in fastest_of(times).items() if each.ms is not None}


def why_busy(times: Iterable[CandidateTime]) -> str:
    """How other programs may have slowed the times measured just now on this machine, or ""."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    count = os.cpu_count() or 1
    if load > BUSY_LOAD * count:
        return f"the machine is busy (a load of {load:.1f} on {count_of(count, 'core')})"
    fastest = min(fastest_of(times).values(), key=lambda each: each.ms or math.inf, default=None)
    if fastest and fastest.low and fastest.high and fastest.high > (1 + BUSY) * fastest.low:
        rounds = f"{three_digits(fastest.low)} to {three_digits(fastest.high)} ms"
        return f"the machine is busy (the same call took {rounds})"
    return ""


def time_in_words(time: CandidateTime) -> str:
    assert time.ms is not None
    ms, where = three_digits(time.ms), " ".join(filter(None, (time.format, time.precision)))
    if time.measured:
        return f"{ms} ms an image ({where})"
    assert time.low is not None
    assert time.high is not None
    interval = f"{three_digits(time.low)} to {three_digits(time.high)}"
    return f"{ms} ms an image ({where}, estimated, {interval})"


def rounded_up(ms: float) -> str:
    """Two digits, at least `ms`: 0.1234 -> 0.13."""
    for digits in (f"{ms:.2g}", f"{ms * 1.1:.2g}"):
        if float(digits) >= ms:
            return f"{float(digits):g}"
    return f"{ms:g}"


@dataclass(frozen=True, kw_only=True)
class CandidateTimes:
    """Candidates, their times, and the budget."""

    candidates: tuple[Candidate, ...]
    times: tuple[CandidateTime, ...]
    budget: Budget
    maybe: bool = False  # see `limit_ms`
    busy: str = ""  # why measured times may be too long, see `why_busy`

    def within(self, share: float = 1.0) -> tuple[CandidateTime, ...]:
        """The times within a share of the budget, the shortest first."""
        limit = replace(self.budget, ms_per_image=share * self.budget.ms_per_image)
        return within_budget(self.times, limit, maybe=self.maybe)

    def of(self, budget: Budget) -> "CandidateTimes":
        """The same times, compared with another budget."""
        return replace(self, budget=budget)

    @cached_property
    def by_name(self) -> dict[str, Candidate]:
        return {each.name: each for each in self.candidates}

    @cached_property
    def ms(self) -> dict[str, float]:
        """The shortest time of each candidate within the budget, by name."""
        return fastest_ms(self.within())

    @cached_property
    def first_ms(self) -> dict[str, float]:
        """The time of each candidate in its first form, the same form for nearly all."""
        return {each.candidate: each.ms for each in reversed(self.times) if each.ms is not None}

    @cached_property
    def beyond(self) -> dict[str, float]:
        """The shortest time of each candidate beyond the budget, by name."""
        return {name: ms for name, ms in fastest_ms(self.times).items() if name not in self.ms}

    @cached_property
    def in_float(self) -> set[str]:
        """The names of candidates that are within the budget in a float precision."""
        return {each.candidate for each in self.within() if each.precision != "int8"}

    @cached_property
    def affordable(self) -> tuple[Candidate, ...]:
        """The candidates that are tried and fit in at least one format and precision.

        Raises ValueError, in one line with the fastest candidate and its time, if none fits.
        """
        if names := {each.candidate for each in self.within() if not each.left_out}:
            return tuple(each for each in self.candidates if each.name in names)
        timed = self.of(Budget(ms_per_image=UNLIMITED_MS)).within()
        if not timed:
            raise ValueError(
                f"none of {count_of(len(self.candidates), 'candidate')} has a time: choose others"
            )
        fastest, name = timed[0], timed[0].candidate
        needed_ms = limit_ms(fastest, maybe=self.maybe) or 0.0
        side = self.by_name[name].resolution
        again = f"{self.busy}, so run it again when it is quiet, or " if self.busy else ""
        raise ValueError(
            f"nothing fits {self.budget}: the fastest is {name} at {side} x {side} pixels with "
            f"{time_in_words(fastest)}; {again}use --budget-ms {rounded_up(needed_ms)} or more, "
            "smaller --resolutions or other --candidates"
        )


# Which forms of a network are worth a measurement.

COMPARED = 2  # least measured networks that give the ratio of two forms for a similar network
SIMILAR = 4.0  # largest ratio of the times of similar networks; small ones mostly wait
# Divisor of the smallest ratio of two forms, for another network. OpenVINO's int8 files took 0.84
# and 1.10 times as long as ONNX Runtime's for ResNet-RS-50 at 160 and 224 pixels.
MARGIN = 1.5
# A format is not tried for further networks if its fastest file took at least SLOW times as long as
# the fastest other file of similar networks: ncnn's took 1.4 to 3.4 times as long on an AMD EPYC.
SLOW = 1.5
ACCURACY: dict[Precision, int] = {"int8": 0, "bf16": 1, "fp16": 1, "fp32": 2}  # more is better

Rows = tuple[CandidateTime, ...]


def may_win(
    label: Label, own: Sequence[CandidateTime], others: Sequence[Rows], longest_ms: float
) -> bool:
    """Whether a form without a time may be the form that a fit would ship.

    `own` has the times of the network, and `others` the times of the same model with other widths,
    depths and resolutions. Each form with a time bounds the time of the new form from below: its
    fastest rounds, times the smallest ratio of the two forms in `COMPARED` or more of `others` with
    similar times, divided by `MARGIN`. Relative speeds depend on the kind of network and on its
    size, so other models do not count. The largest bound holds.

    The form cannot win if the bound is above `longest_ms`, or above the slowest rounds of a form of
    the network that is at least as accurate: fp32, then bf16 and fp16, then int8.
    """
    measured = [row for row in own if row.ms is not None]
    least_ms = 0.0
    for row in measured:
        similar = similar_networks(row, others)
        # networks that differ in the resize policy alone have the same times, and count once
        ratios = {ms[label] / ms[form(row)] for ms in similar if label in ms}
        if len(ratios) >= COMPARED:
            least_ms = max(least_ms, (row.low or row.ms or 0.0) * min(ratios) / MARGIN)
    if least_ms > longest_ms:
        return False
    as_accurate = [row for row in measured if ACCURACY[row.precision] >= ACCURACY[label[1]]]
    return all((row.high or row.ms or 0.0) >= least_ms for row in as_accurate)


def similar_networks(row: CandidateTime, networks: Iterable[Rows]) -> Iterator[dict[Label, float]]:
    """Form -> time, for each network whose time in the form of `row` is similar."""
    for rows in networks:
        ms = {form(each): each.ms for each in rows if each.ms}
        base = ms.get(form(row))
        if base and row.ms and 1 / SIMILAR <= base / row.ms <= SIMILAR:
            yield ms


def is_worth_timing(
    label: Label, own: Rows, model: str, by_model: Mapping[str, Sequence[Rows]], longest_ms: float
) -> bool:
    """Whether a form of a network may win, and another format than its first is not slow here."""
    networks = [rows for each in by_model.values() for rows in each]
    is_first = not own or own[0].format == label[0]
    return may_win(label, own, by_model.get(model, ()), longest_ms) and (
        is_first or not is_slow(label[0], own[0], networks)
    )


def is_slow(format: str, row: CandidateTime, networks: Iterable[Rows]) -> bool:
    """Whether the files of a format are slow for networks with times similar to `row`.

    In all of `networks` its fastest file took at least `SLOW` times as long as the fastest file of
    another format, and the product of these ratios is at least the least of `COMPARED` networks.
    """
    ratios = set[float]()
    for ms in similar_networks(row, networks):
        own = [value for label, value in ms.items() if label[0] == format]
        others = [value for label, value in ms.items() if label[0] != format]
        if own and others:
            ratios.add(min(own) / min(others))
    return math.prod(ratios) >= SLOW**COMPARED and min(ratios) >= SLOW


def form(time: CandidateTime) -> Label:
    return time.format, time.precision


def timed_in_first_form(rows: Sequence[CandidateTime]) -> bool:
    """Whether other forms of a candidate were not looked at."""
    return len(rows) == 1 and rows[0].first_s > 0 and not rows[0].budget_ms


# The candidates within the budget in a line, a table and a plot.

MOST_ROWS = 40  # of the table and the plot: the candidates nearest to the budget


def budget_note(candidate_times: CandidateTimes) -> str:
    """How many candidates fit, and how many would fit in half or twice the time.

    If all fit, the line says that the budget does not bind.
    """
    timed = fastest_of(candidate_times.times)

    def count(share: float) -> int:
        return len({each.candidate for each in candidate_times.within(share)})

    ms = candidate_times.budget.ms_per_image
    if count(1) == len(timed):
        slowest = max(timed.values(), key=lambda each: each.ms or 0.0)
        all_run = f"all {len(timed)} candidates run" if len(timed) > 1 else "the candidate runs"
        return (
            f"{all_run} within {ms:g} ms an image, the slowest is "
            f"{slowest.candidate} with {time_in_words(slowest)}: the budget does not bind"
        )
    return (
        f"{count(1)} of {len(timed)} candidates {verb_of(count(1), 'run')} within {ms:g} ms an "
        f"image; {count(1 / 2)} within half of it, {count(2)} within twice"
    )


def timed_candidates(candidate_times: CandidateTimes) -> list[TimedCandidate]:
    """The candidates with a time, at most the `MOST_ROWS` nearest the budget, the fastest first."""
    rows: list[TimedCandidate] = []
    fastest, others = fastest_of(candidate_times.times), dict[str, list[float]]()
    for each in candidate_times.times:
        if each.ms is not None and each is not fastest[each.candidate]:
            others.setdefault(each.candidate, []).append(each.ms)
    for candidate in candidate_times.candidates:
        best = fastest.get(candidate.name)
        if best is None or best.ms is None:
            continue
        rows.append(
            TimedCandidate(
                name=printable(candidate.name),
                form=" ".join(filter(None, (best.format, best.precision))),
                ms=best.ms,
                low=best.low or best.ms,
                high=best.high or best.ms,
                limit_ms=limit_ms(best, maybe=candidate_times.maybe) or best.ms,
                other_ms=tuple(others.get(candidate.name, ())),
                top1=candidate.top1,
            )
        )
    near = sorted(
        rows, key=lambda row: abs(math.log(row.limit_ms / candidate_times.budget.ms_per_image))
    )
    return sorted(near[:MOST_ROWS], key=lambda row: row.ms)


def budget_table(candidate_times: CandidateTimes) -> Table:
    """A row for each of `timed_candidates`: the fastest time, and the time in each precision."""
    rows, times = timed_candidates(candidate_times), candidate_times.times
    precisions = [each for each in get_args(Precision) if any(t.precision == each for t in times)]
    published = any(row.top1 for row in rows)
    columns = ["candidate", *(["published top-1 %"] if published else [])]
    columns += ["ms/image", "fastest as", "from", "to", *precisions, "within"]
    lines = []
    for row in rows:
        own = [each for each in times if printable(each.candidate) == row.name]
        by_precision = (
            min((t.ms for t in own if t.precision == each and t.ms is not None), default=None)
            for each in precisions
        )
        top1 = [f"{row.top1:.1f}" if row.top1 else ""] if published else []
        cells = [row.name, *top1, three_digits(row.ms), row.form]
        cells += [three_digits(row.low), three_digits(row.high)]
        cells += ["" if ms is None else three_digits(ms) for ms in by_precision]
        band = row.band(candidate_times.budget)
        lines.append([*cells, BANDS[band] if band < len(BANDS) - 1 else ""])
    return table(columns, lines)
