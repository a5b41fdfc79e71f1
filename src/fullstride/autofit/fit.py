"""The stages of a fit, from images and a budget to the most accurate network as a file."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullstride.autofit import halving
from fullstride.autofit.budget import (
    FRONT,
    CandidateTime,
    CandidateTimes,
    FitJob,
    budget_note,
    budget_table,
    timed_candidates,
    why_busy,
)
from fullstride.autofit.candidates import Candidate, Pictures, fits_of, list_candidates
from fullstride.autofit.data_report import DataReport, inspect, report_lines, without_duplicates
from fullstride.autofit.plan import FitPlan, find_front, make_plan, plan_lines
from fullstride.autofit.results import FitResults, closing_lines, write_results
from fullstride.autofit.settings import FitSettings
from fullstride.autofit.ship import Shipment, ship
from fullstride.autofit.times import time_candidates
from fullstride.data.dataset import DataSet
from fullstride.io.console import count_of
from fullstride.io.records import read_json
from fullstride.report.plots import save_png
from fullstride.report.scatter import budget_figure
from fullstride.study import driver
from fullstride.study.driver import Event, Results, Stage, Study, Work
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.run import task_for

BOUGHT = "budget.png"  # the plot of times and the budget, before anything is trained
SHIPPING = "shipping"
BEFORE_PLAN = ("data", "candidates", FRONT, "times")
# The results that an argument changes; other arguments change all but the report of the data.
PLAN = ("plan.json",)
BUDGET = ("front.json", "times.json", *PLAN)  # the times of each candidate stay
LIST = ("candidates.json", *BUDGET, "times/*.json", "training_times/*.json")
CHANGED_BY = dict.fromkeys(("hours", "minutes", "budget_ms", "images_per_s"), BUDGET)
CHANGED_BY |= {"maybe": PLAN, "recipe.background": ("data.json", *PLAN)}
CHANGED_BY |= dict.fromkeys(("data", "recipe"), ("data.json", *LIST))


def fit(
    data: str | Path | DataSet, out: str | Path, *, recipe: str = "", **arguments: Any
) -> Iterator[Event]:
    """Find the most accurate network for `data` within a budget, and ship a file; yields events.

    The stages are a report of the data, the candidates, their times as the files that would ship, a
    plan, successive halving, with `hours` a teacher, and the exports. The best export within the
    budget by the last measurement is scored once on the test images. After a stop, the same call
    resumes, with finished stages, trainings and exports from `out`. docs/guides/fit.md describes
    the files.

    The task is `task` among the arguments, by default the task of the files in `data`, or
    classification for a `DataSet`.

    Args:
        data: As for `train`: a folder with one subfolder of images per class, boxes in COCO's
            format, or a `DataSet`.
        out: The folder of the fit.
        recipe: The name, run, bundle or JSON file of a recipe; by default the case's recipe.
        **arguments: The fields of `FitSettings`, such as `budget_ms=5` and `target="rtx4090"`, of
            `StudyOptions`, such as `device="cpu"` and `dry_run=True`, and of the recipe, such as
            `epochs=3`.

    Raises ValueError, in one line, for arguments and data that do not fit, if `out` has another
    fit, and if no candidate is within the budget.

    Examples:
        >>> import fullstride
        >>> events = fullstride.fit("digits", "runs/fit", budget_ms=1, weights="none", dry_run=True)
        >>> next(events).stage
        'data'
    """
    if not isinstance(data, DataSet):
        task = task_for(str(data), RunOptions(task=arguments.get("task", "")), arguments)
        data, arguments = task.open_data(str(data)), {**arguments, "task": task.name}
    return driver.start_study(FIT, data, out, recipe, arguments)


# The stages. Each gets the job and the results of earlier stages.


def chosen_images(job: FitJob, done: Results) -> FitJob:
    """The job without duplicate images, if the settings drop them."""
    if not job.settings.drop_duplicates:
        return job
    return replace(job, data=without_duplicates(job.data, done["data"]))


def list_networks(job: FitJob, done: Results) -> Work:
    settings, report, task = job.settings, done["data"], job.task
    side = report.sides[1]
    pictures = Pictures(
        classes=len(job.data.classes),
        channels=job.data.channels,
        side=side,
        fits=fits_of(report.aspect, task.view_fit),
        sides=tuple(sorted({*settings.resolutions}))
        or task.view_sides(job.data.train, round(side * report.aspect)),
        chosen=bool(settings.resolutions),
        variants=job.variants,
        takes_clips=task.takes_clips,
    )
    return list_candidates(
        pictures,
        weights=settings.source_of_weights,
        names=settings.candidates,
        licence=settings.licence,
    )


def compare_with_budget(job: FitJob, done: Results) -> Work[CandidateTimes]:
    """The candidates with their times, and a plot of these, as in `budget_table`.

    Raises ValueError if none fits. If the machine is busy, the next call measures again.
    """
    is_here = job.profile is None and job.target is None
    candidate_times = CandidateTimes(
        candidates=done["candidates"],
        times=done["times"],
        budget=job.budget,
        maybe=job.settings.maybe,
        busy=why_busy(done["times"]) if is_here else "",
    )
    try:
        for budget in reversed(job.budgets):  # an error names what would do for all of them
            assert candidate_times.of(budget).affordable
    except ValueError:
        if candidate_times.busy:
            driver.discard(job.folder, ("times/*.json", "times.json"))
        raise
    save_png(budget_figure(timed_candidates(candidate_times), job.budget), job.folder / BOUGHT)
    yield from ()
    return candidate_times


def plan_trainings(job: FitJob, done: Results) -> Work:
    spent_s = seconds_of(job.folder, BEFORE_PLAN)
    return make_plan(chosen_images(job, done), done["budget"], spent_s)


def teach_best(job: FitJob, done: Results) -> Work:
    plan, hours = done["plan"], job.settings.limit_hours
    assert hours is not None
    spent_s = seconds_of(job.folder, (*BEFORE_PLAN, "plan", "training"))
    ship_s = plan.ship_s * (1 + 1 / len(done["training"].finalists))  # a student ships too
    left_s = 3600 * hours - spent_s - ship_s
    return halving.teach(chosen_images(job, done), plan, done["training"], done["budget"], left_s)


def after_teaching(done: Results) -> tuple[halving.Outcome, CandidateTimes]:
    if "teaching" in done:
        return halving.with_student(done["teaching"], done["training"], done["budget"])
    return done["training"], done["budget"]


def ship_finalists(job: FitJob, done: Results) -> Work[Shipment]:
    """Ship, and once more if a file of an earlier call is gone."""
    saved: Shipment | None = driver.saved_stage(job.folder, SHIPPING, Shipment)
    if saved and not all((job.folder / path).exists() for path in saved.paths):
        driver.discard(job.folder, (f"{SHIPPING}.json",))
    return ship(chosen_images(job, done), *after_teaching(done))


def end_fit(job: FitJob, done: Results) -> Work[FitResults]:
    """Write the results and the page, and delete the checkpoints of losers."""
    outcome, candidate_times = after_teaching(done)
    job = chosen_images(job, done)
    results = FitResults(
        data_name=job.data.name,
        task=job.task.name,
        budget=job.budget,
        percentile=job.settings.percentile,
        settings=read_json(job.folder / FIT.file),
        data=done["data"],
        candidates=candidate_times.candidates,
        times=candidate_times.times,
        plan=done["plan"],
        outcome=outcome,
        shipment=done["shipping"],
        seconds=driver.read_seconds(job.folder),
    )
    write_results(job.folder, job.data, results)
    if size_mib := halving.delete_losers(job.folder, outcome) / 2**20:
        yield f"deleted {size_mib:,.0f} MiB: checkpoints of those that do not ship"
    return results


def seconds_of(folder: Path, stages: Iterable[str]) -> float:
    """The seconds of finished stages, which no later call changes."""
    seconds = driver.read_seconds(folder)
    return sum(seconds.get(name, 0.0) for name in stages)


def candidates_line(candidates: Sequence[Candidate]) -> list[str]:
    """The numbers of candidates and networks, and the families."""
    networks = {(each.model, each.width, each.depth) for each in candidates}
    families = sorted({each.family for each in candidates})
    sides = ", ".join(map(str, sorted({each.resolution for each in candidates})))
    return [
        f"{count_of(len(candidates), 'candidate')}: {count_of(len(networks), 'network')} of "
        f"{', '.join(families)} at {sides} pixels"
    ]


def teaching_line(teaching: halving.Teaching) -> list[str]:
    if teaching.student and teaching.is_better:
        return [f"{teaching.student.name} is better by its teacher {teaching.teacher}"]
    return [f"no student of a larger network: {teaching.reason}"]


FIT = Study(
    noun="fit",
    job=FitJob,
    settings=FitSettings,
    stages=(
        Stage(
            "data",
            lambda job, done: inspect(job.data.over(job.recipe.background), job.options.workers),
            DataReport,
            report_lines,
        ),
        Stage("candidates", list_networks, tuple[Candidate, ...], candidates_line),
        Stage(
            FRONT,
            lambda job, done: find_front(job, done["candidates"]),
            tuple[float, ...],
            lambda limits: [f"budgets  {', '.join(f'{ms:g}' for ms in limits)} ms an image"],
            when=lambda job, done: not job.settings.budgets(),
        ),
        Stage(
            "times",
            lambda job, done: time_candidates(job, done["candidates"]),
            tuple[CandidateTime, ...],
        ),
        Stage(
            "budget",
            compare_with_budget,
            render=lambda candidate_times: [
                budget_table(candidate_times),
                budget_note(candidate_times),
            ],
        ),
        Stage("plan", plan_trainings, FitPlan, plan_lines),
        Stage(
            "training",
            lambda job, done: halving.run_halving(
                chosen_images(job, done), done["plan"], done["budget"]
            ),
            halving.Outcome,
        ),
        Stage(
            "teaching",
            teach_best,
            halving.Teaching,
            teaching_line,
            when=lambda job, done: job.settings.limit_hours is not None,
        ),
        Stage(SHIPPING, ship_finalists, Shipment),
        Stage("results", end_fit),
    ),
    closing=closing_lines,
    trained=("trials", "rungs"),
    changed_by=CHANGED_BY,
    changed=LIST,
    cores_per_trial=None,
)
