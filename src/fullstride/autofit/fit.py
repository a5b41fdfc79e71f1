"""Which network is the most accurate within my budget? `fit` tries, trains, measures and ships."""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fullstride.autofit.fit_folder import FIT
from fullstride.autofit.inspection.data_report import DataReport, look_at, without_duplicates
from fullstride.autofit.listing.candidates import (
    Candidate,
    check_source,
    find_specs,
    list_candidates,
)
from fullstride.autofit.page import write_results
from fullstride.autofit.results import FitResults
from fullstride.autofit.settings import FitSettings
from fullstride.autofit.shipping.ship import Shipment, ship
from fullstride.autofit.timing.budget_rule import (
    CandidateTime,
    affordable,
    fastest_ms,
    within_budget,
)
from fullstride.autofit.timing.budget_table import WhatFits, budget_figure
from fullstride.autofit.timing.candidate_times import time_candidates
from fullstride.autofit.training.halving import Outcome, delete_losers, run_halving
from fullstride.autofit.training.plan import FitPlan, make_plan
from fullstride.autofit.training.teaching import Teaching, teach, with_student
from fullstride.data.dataset import DataSet, open_data
from fullstride.deploy.exported import InputKind
from fullstride.deploy.select import runnable
from fullstride.latency.devices import load_profile
from fullstride.report.plots import save_png
from fullstride.search.study_folder import (
    Event,
    check_images,
    open_study,
    read_seconds,
    run_stage,
    stage_events,
)
from fullstride.search.trials import local_devices
from fullstride.train.recipes.choice import RecipeChoice

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
