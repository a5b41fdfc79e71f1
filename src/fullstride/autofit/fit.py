"""Which network is the most accurate within my budget? `fit` tries, trains, measures and ships."""

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from matplotlib.figure import Figure
from rich.table import Table

from fullstride.autofit.candidates import (
    Candidate,
    CandidateTime,
    affordable,
    check_source,
    fastest_ms,
    fastest_of,
    find_specs,
    limit_ms,
    list_candidates,
    time_in_words,
    within_budget,
)
from fullstride.autofit.data_report import DataReport, look_at, report_lines, without_duplicates
from fullstride.autofit.halving import (
    Outcome,
    Teaching,
    delete_losers,
    run_halving,
    teach,
    with_student,
)
from fullstride.autofit.page import write_results
from fullstride.autofit.plan import FitPlan, make_plan, plan_lines
from fullstride.autofit.results import FitResults, closing_lines
from fullstride.autofit.settings import FitSettings
from fullstride.autofit.ship import Shipment, ship
from fullstride.autofit.times import time_candidates
from fullstride.data.dataset import DataSet, open_data
from fullstride.deploy.choose_form import runnable
from fullstride.deploy.exported import InputKind, Precision
from fullstride.io.console import printable
from fullstride.latency.devices import load_profile
from fullstride.measure.budget import Budget
from fullstride.report import scatter
from fullstride.report.console_tables import table, three_digits
from fullstride.report.plots import save_png
from fullstride.report.scatter import BANDS, TimedCandidate
from fullstride.study.folder import (
    Event,
    StudyConfig,
    StudyKind,
    check_images,
    open_study,
    read_seconds,
    run_stage,
    stage_events,
)
from fullstride.study.trials import local_devices
from fullstride.train.recipes.choice import RecipeChoice

# The results that an argument changes; others than these change all but the look at the data.
PLAN = ("plan.json",)
BUDGET = ("times.json", *PLAN)  # the times of each candidate stay
LIST = ("candidates.json", *BUDGET, "times/*.json", "training_times/*.json")
CHANGED_BY = {"hours": PLAN, "minutes": PLAN, "maybe": PLAN}
CHANGED_BY |= {"budget_ms": BUDGET, "images_per_s": BUDGET, "data": ("data.json", *LIST)}


@dataclass(frozen=True, kw_only=True)
class FitConfig(StudyConfig):
    """What a fit folder is for."""

    settings: FitSettings


FIT = StudyKind(
    noun="fit",
    config=FitConfig,
    trained=("trials", "rungs"),
    changed_by=CHANGED_BY,
    changed=LIST,
)


# What does the budget buy? The candidates that stay in it, in a table and a picture.


MOST_ROWS = 40  # of the table and the picture; of more candidates those near the budget


@dataclass(frozen=True, kw_only=True)
class WhatFits:
    """Candidates, their times, and the budget with which these are compared."""

    candidates: tuple[Candidate, ...]
    times: tuple[CandidateTime, ...]
    budget: Budget
    maybe: bool = False  # of estimates the middle must fit, not the upper end


def budget_note(fits: WhatFits) -> str:
    """How many candidates fit, and how many would with half the time and with twice of it.

    Where all fit, the line says that the budget does not bind.
    """
    timed = fastest_of(fits.times)

    def count(ms: float) -> int:
        limit = replace(fits.budget, ms_per_image=ms)
        return len({each.candidate for each in within_budget(fits.times, limit, maybe=fits.maybe)})

    ms = fits.budget.ms_per_image
    if count(ms) == len(timed):
        slowest = max(timed.values(), key=lambda each: each.ms or 0.0)
        return (
            f"all {len(timed)} candidates run within {ms:g} ms an image, the slowest is "
            f"{slowest.candidate} with {time_in_words(slowest)}: the budget does not bind"
        )
    return (
        f"{count(ms)} of {len(timed)} candidates run within {ms:g} ms an image; {count(ms / 2)} "
        f"within half of it, {count(2 * ms)} within twice"
    )


def timed_candidates(fits: WhatFits) -> list[TimedCandidate]:
    """Those with a time, the fastest first; of many the `MOST_ROWS` that are near the budget."""
    rows: list[TimedCandidate] = []
    fastest, others = fastest_of(fits.times), dict[str, list[float]]()
    for each in fits.times:
        if each.ms is not None and each is not fastest[each.candidate]:
            others.setdefault(each.candidate, []).append(each.ms)
    for candidate in fits.candidates:
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
                limit_ms=limit_ms(best, maybe=fits.maybe) or best.ms,
                other_ms=tuple(others.get(candidate.name, ())),
                top1=candidate.top1,
            )
        )
    near = sorted(rows, key=lambda row: abs(math.log(row.limit_ms / fits.budget.ms_per_image)))
    return sorted(near[:MOST_ROWS], key=lambda row: row.ms)


def budget_table(fits: WhatFits) -> Table:
    """A line for each of `timed_candidates`: its fastest time, and that of each precision."""
    rows, times = timed_candidates(fits), fits.times
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
        band = row.band(fits.budget)
        lines.append([*cells, BANDS[band] if band < len(BANDS) - 1 else ""])
    return table(columns, lines)


def budget_figure(fits: WhatFits) -> Figure:
    """The picture of `budget_table`, see `report.budget_plot`; `budget_note` describes it."""
    return scatter.budget_figure(timed_candidates(fits), fits.budget)


Stage = Literal[
    "data",
    "candidates",
    "times",
    "budget",
    "plan",
    "training",
    "teaching",
    "shipping",
    "results",
]
BOUGHT = "budget.png"  # what the budget buys, before anything is trained
BEFORE_PLAN = ("data", "candidates", "times")
BEFORE_TRAINING = (*BEFORE_PLAN, "plan")
INPUT: InputKind = "pixels"  # of the files: uint8 pixels in, probabilities out


def fit(
    data: str | Path | DataSet,
    out: str | Path,
    *,
    recipe: str = "",
    train_device: str = "auto",
    workers: int | None = None,
    dry_run: bool = False,
    **settings: Any,
) -> Iterator[Event]:
    """The most accurate network for `data` within a budget, as a file that ships; yields events.

    The stages are a look at the data, the candidates, their times as the files that would ship, a
    plan, successive halving, with `hours` a teacher, and the exports; of these the best one that is
    within the budget when measured last is scored once on the test images. After a stop, the same
    call goes on: a stage, a training or an export that has ended is read from `out`. docs/fit.md
    describes the files.

    Args:
        data: A folder with one subfolder of images per class, or what else `open_data` opens.
        out: The folder of the fit.
        recipe: The name, run, bundle or JSON file of a recipe; by default that of the case.
        train_device: Where networks train: cpu, cuda:1, cuda, or auto, for all GPUs if there are.
        workers: Processes that decode images; None: by the cores and the images.
        dry_run: End with the plan, before anything is trained.
        **settings: The fields of `FitSettings`, such as `budget_ms=5`.

    Raises ValueError, in one line, for arguments and data that do not fit, if `out` has another
    fit, and if no candidate is within the budget.
    """
    images = data if isinstance(data, DataSet) else open_data(str(data))
    images.check_one_class()
    how: dict[str, Any] = dict(train_device=train_device, workers=workers, dry_run=dry_run)
    yield from fit_data(images, Path(out), FitSettings(**settings), RecipeChoice(recipe), **how)


def fit_data(
    data: DataSet,
    folder: Path,
    settings: FitSettings,
    recipe: RecipeChoice,
    *,
    train_device: str = "auto",
    workers: int | None = None,
    dry_run: bool = False,
) -> Iterator[Event]:
    """`fit` of an open data set. Fields of the recipe may be changed, but not those of candidates.

    Raises ValueError, in one line.
    """
    check_input(data, recipe)
    budget, devices = settings.budget(), local_devices(train_device, cores_per_trial=None)
    profile = None if settings.is_here else load_profile(settings.device)
    check_settings(settings)
    with open_study(FIT, folder, data, settings, recipe) as (config, note):
        if note:
            yield Event("data", line=note)
        files: dict[str, Any] = dict(formats=settings.formats, precisions=settings.precisions)
        files |= dict(percentile=settings.percentile, profile=profile, maybe=settings.maybe)
        files |= dict(input_kind=INPUT)
        training: dict[str, Any] = dict(recipe=recipe, devices=devices, workers=workers)

        def stage(
            name: Stage, kind: Any, work: Generator[str, None, Any]
        ) -> Generator[Event, None, Any]:
            return stage_events(name, run_stage(folder, name, kind, work))

        report: DataReport = yield from stage("data", DataReport, look_at(data, workers))
        if settings.drop_duplicates:
            data = without_duplicates(data, report)
        size: dict[str, Any] = dict(classes=len(data.classes), channels=data.channels)
        listing = list_candidates(
            side=report.sides[1],
            aspect=report.aspect,
            weights=settings.source_of_weights,
            names=settings.candidates,
            licence=settings.licence,
            resolutions=settings.resolutions,
            **size,
        )
        candidates = yield from stage("candidates", tuple[Candidate, ...], listing)
        timing = time_candidates(candidates, budget, folder=folder, **size, **files)
        times = yield from stage("times", tuple[CandidateTime, ...], timing)
        fitting = affordable(candidates, times, budget, maybe=settings.maybe)
        forms = within_budget(times, budget, maybe=settings.maybe)
        bought = WhatFits(candidates=candidates, times=times, budget=budget, maybe=settings.maybe)
        save_png(budget_figure(bought), folder / BOUGHT)
        yield Event("budget", result=bought)

        ms = fastest_ms(forms)
        in_float = {each.candidate for each in forms if each.precision != "int8"}
        # What chooses has no test images, so that it cannot have seen them.
        unseen = replace(data, test=data.test.subset([]))
        limits = dict(hours=settings.limit_hours, spent_s=spent_s(folder, BEFORE_PLAN))
        planning = make_plan(folder, fitting, ms, unseen, in_float=in_float, **limits, **training)
        plan: FitPlan = yield from stage("plan", FitPlan, planning)
        if dry_run:
            return
        halving = run_halving(folder, plan, fitting, ms, unseen, in_float=in_float, **training)
        outcome = yield from stage("training", Outcome, halving)
        if hours := settings.limit_hours:
            left_s = 3600 * hours - spent_s(folder, BEFORE_TRAINING) - plan.total_s
            beyond = {name: time for name, time in fastest_ms(times).items() if name not in ms}
            teaching = yield from stage(
                "teaching",
                Teaching,
                teach(folder, plan, outcome, candidates, beyond, unseen, left_s=left_s, **training),
            )
            outcome, candidates, times = with_student(teaching, outcome, candidates, times)
        shipping = ship(
            folder, outcome, candidates, times, budget, data, device=devices[0], **files
        )
        shipment = yield from stage("shipping", Shipment, shipping)
        results = FitResults(
            data_name=data.name,
            budget=budget,
            percentile=settings.percentile,
            settings=config.to_dict(),
            data=report,
            candidates=candidates,
            times=times,
            plan=plan,
            outcome=outcome,
            shipment=shipment,
            seconds=read_seconds(folder),
        )
        write_results(folder, data, results)
        if size_mib := delete_losers(folder, outcome) / 2**20:
            yield Event(
                "results", f"deleted {size_mib:,.0f} MiB: checkpoints of those that do not ship"
            )
        yield Event("results", result=results)


def check_input(data: DataSet, recipe: RecipeChoice) -> None:
    """Raise ValueError, in one line, for what no candidate can train on or by."""
    for name in ("resolution", "fit"):
        if name in recipe.changes:
            raise ValueError(
                f"recipe.{name} is that of each candidate: choose by --resolutions, or leave it out"
            )
    check_images(data)


def check_settings(settings: FitSettings) -> None:
    """Raises ValueError, in one line, for names that no later stage would take.

    So that a typing error is no surprise after a look at many images.
    """
    find_specs(settings.candidates)
    check_source(settings.source_of_weights)
    if settings.is_here:
        runnable(settings.formats, settings.precisions)


def spent_s(folder: Path, stages: Iterable[str]) -> float:
    """Seconds that stages took which have ended, which no later call changes."""
    seconds = read_seconds(folder)
    return sum(seconds.get(name, 0.0) for name in stages)


# What does a user see of a fit? Lines on the progress of each stage, and tables of its results.


def shown(event: Event, folder: Path) -> Sequence[str | Table]:
    """The lines and tables that the command prints for an event of a fit in `folder`."""
    if event.line:
        return [event.line]
    result = event.result
    if event.stage == "data":
        return report_lines(result)
    if event.stage == "candidates":
        return [candidates_line(result)]
    if event.stage == "budget":
        return [budget_table(result), budget_note(result)]
    if event.stage == "plan":
        return [*plan_lines(result)]
    if event.stage == "teaching":
        return [teaching_line(result)]
    if event.stage == "results":
        return closing_lines(result, folder)
    return []


def candidates_line(candidates: Sequence[Candidate]) -> str:
    """How many there are, of how many networks and families."""
    networks = {(each.model, each.width, each.depth) for each in candidates}
    families = sorted({each.family for each in candidates})
    sides = ", ".join(map(str, sorted({each.resolution for each in candidates})))
    return (
        f"{len(candidates)} candidates: {len(networks)} networks of {', '.join(families)} at "
        f"{sides} pixels"
    )


def teaching_line(teaching: Teaching) -> str:
    if teaching.student and teaching.is_better:
        return f"{teaching.student.name} is better by its teacher {teaching.teacher}"
    return f"no student of a larger network: {teaching.reason}"
