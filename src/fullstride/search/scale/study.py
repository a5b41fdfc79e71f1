"""The stages of a scaling study: trainings of networks of several sizes, and their analysis."""

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fullstride.data.dataset import DataSet
from fullstride.search.block_tuning import TRAINING, NetworkTraining, TunedScore, training_trial
from fullstride.search.scale.analysis import Candidate, analyse, law_of_axes
from fullstride.search.scale.finished import (
    TABLE_7,
    Source,
    Training,
    points_of,
    read_trainings,
    seed_deviation,
    table_7,
)
from fullstride.search.scale.grid import PointCost, band, point_costs
from fullstride.search.scale.plan import PlannedTraining, ScaleJob, ScalePlan, make_plan, plan_lines
from fullstride.search.scale.results import REPORT, ScaleResults, console_parts, write_results
from fullstride.search.settings import ScaleSettings
from fullstride.study.driver import (
    PLAN,
    Event,
    Results,
    Stage,
    Study,
    saved_stage,
    start_study,
    write_stage,
)
from fullstride.study.trials import Failure, Trial
from fullstride.train.recipes.choice import RecipeChoice

TRIALS, COSTS = "trials", "costs"


def read_study(folder: Path) -> tuple[list[Training], dict[str, str]]:
    """The finished trainings in the folder of a study, and why others failed, by their folder.

    The error is that of the first choice, in per cent of the validation split. Raises ValueError
    where there is no study.
    """
    costs = saved_stage(folder, COSTS, tuple[PointCost, ...])
    if costs is None:
        raise ValueError(
            f"{folder} has no study: give a folder that `fullstride study scale` wrote"
        )
    points, every, failures = (
        {cost.name: cost for cost in costs},
        list[Training](),
        dict[str, str](),
    )
    for regime in sorted((folder / TRIALS).glob("*")):
        scores = dict[str, TunedScore]()
        for path in sorted(regime.glob("*/result.json")):
            result = TRAINING.read(Trial(folder=path.parent, result=path))
            if isinstance(result, Failure):
                failures[f"{regime.name}/{path.parent.name}"] = result.failure
            else:
                scores[path.parent.name] = result
        epochs = max((each.epochs for each in scores.values()), default=0)
        for name, score in scores.items():
            cost = points.get(name.rpartition("-seed")[0])
            if cost is None:  # of a grid that was larger
                continue
            images = len(score.correct)
            training = Training(
                name=cost.name,
                **cost.point.size._asdict(),
                epochs=epochs,
                seed=score.seed,
                error=100 * score.correct.count("0") / images,
                ms=cost.ms,
                images=images,
                correct=score.correct,
                regime=regime.name,
            )
            every.append(training)
    return every, failures


def find_trainings(source: str) -> Source:
    """Trainings of a folder, a CSV file or a family of Table 7. Raises ValueError for others."""
    if source in ("resnet_rs", "efficientnet"):
        return Source(source, table_7(source), TABLE_7)
    path = Path(source)
    if path.is_dir():
        trainings, _ = read_study(path)
        costs = saved_stage(path, COSTS, tuple[PointCost, ...])
        by_time = len({cost.point.model for cost in costs}) > 1
        return Source(source, trainings, source, by_time)
    if path.suffix == ".csv":
        return Source(source, read_trainings(path), path.name)
    raise ValueError(
        f"no trainings in {source!r}: give a folder of `fullstride study scale`, a .csv file, or "
        "resnet_rs or efficientnet"
    )


def scale(
    data: str | Path | DataSet, out: str | Path, *, recipe: str = "", **arguments: Any
) -> Iterator[Event]:
    """Train a network at several widths, depths and resolutions, and say what to scale next.

    Yields events. The stages are the costs of all points, a plan, the trainings of a cross through
    the middle of the grid, those of points near the front that these predict, and the analysis.
    After a stop, the same call goes on: a training that has ended is read from `out`.

    Args:
        data: A folder with one subfolder of images per class, or what else `open_data` opens.
        out: The folder of the study.
        recipe: The name, run, bundle or JSON file of a recipe; by default that of the case.
        **arguments: The fields of `ScaleSettings`, such as `models=("genet_tiny",)`, and of
            `StudyOptions`, such as `device="cpu"` and `dry_run=True`.

    Raises ValueError, in one line, for arguments and data that do not fit, and if `out` has another
    study.
    """
    return start_study(SCALE, data, out, recipe, arguments)


# The stages. Each gets the job and the results of those before it.


def cost_points(job: ScaleJob, done: Results) -> Generator[str, None, list[PointCost]]:
    """The costs of all points, of which those in the folder are not measured again."""
    kind = tuple[PointCost, ...]
    saved = {each.name: each for each in saved_stage(job.folder, COSTS, kind) or ()}
    if missing := [point for point in job.points if point.name not in saved]:
        new = yield from point_costs(
            missing,
            job.settings,
            classes=len(job.data.classes),
            channels=job.data.channels,
            batch=job.batch,
            device=job.devices[0],
        )
        saved |= {each.name: each for each in new}
        write_stage(job.folder, COSTS, tuple(saved.values()))
    return [saved[point.name] for point in job.points]


def plan_trainings(job: ScaleJob, done: Results) -> Generator[str, None, ScalePlan]:
    yield from ()
    return make_plan(job, done[COSTS])


def train(
    job: ScaleJob, plan: ScalePlan, trainings: Sequence[PlannedTraining]
) -> Generator[str, None, None]:
    points = {cost.name: cost.point for cost in plan.costs}
    trials = []
    for each in trainings:
        point = points[each.point]
        training = NetworkTraining(
            spec=point.spec(len(job.data.classes), job.data.channels),
            data=job.data,
            recipe=RecipeChoice(job.recipe_of(point, each.regime)),
            seed=each.seed,
            workers=job.workers,
        )
        folder = job.folder / TRIALS / each.regime / f"{each.point}-seed{each.seed}"
        trials.append(training_trial(folder, training))
    yield from job.run(TRAINING, trials)


def band_trainings(job: ScaleJob, plan: ScalePlan) -> list[PlannedTraining]:
    """Trainings near the front that the law of each regime predicts, within the hours.

    The law is that of the planned trainings alone, so that a resumed study chooses the same.
    """
    chosen, left_s = [], plan.seconds_left
    if len(job.settings.models) > 1:
        return []
    begun = {each.point for each in plan.trainings}
    rest = [cost for cost in plan.costs if cost.name not in begun]
    ms = {cost.point.size: cost.ms for cost in plan.costs}
    trainings, _ = read_study(job.folder)
    for regime in job.regimes:
        own = [each for each in trainings if each.regime == regime and each.name in begun]
        finished = points_of(own)
        law = law_of_axes(finished, seed_deviation(finished)) if finished else None
        if law is None or not rest:
            continue
        sizes = [each.size for each in finished]
        every = [*sizes, *(cost.point.size for cost in rest)]
        errors = {size: float(law.law.at(law.sizes(size))) for size in every}
        near = band([cost.point for cost in rest], sizes, errors, ms, plan.band)
        for cost in (cost for cost in rest if cost.point in near):
            each = job.training(cost, regime)
            if each.seconds <= left_s:
                chosen.append(each)
                left_s -= each.seconds
    return chosen


def analyse_all(job: ScaleJob, done: Results) -> Generator[str, None, ScaleResults]:
    """The analysis of all trainings in the folder; candidates are the points that fit."""
    plan, settings = done[PLAN], job.settings
    trainings, failures = read_study(job.folder)
    names = {each.name for each in trainings}
    candidates = [
        Candidate(cost.name, cost.point.size, cost.ms)
        for cost in (*plan.costs, *plan.beyond)
        if cost.name not in names
    ]
    regimes = analyse(
        trainings,
        budget_ms=settings.limit_ms,
        target_epochs=settings.target_epochs,
        candidates=candidates,
        by_time=len(settings.models) > 1,
    )
    results = ScaleResults(
        data_name=job.data.name,
        device=settings.target,
        budget_ms=settings.limit_ms,
        trainings=tuple(trainings),
        failures=failures,
        regimes=regimes,
    )
    write_results(job.folder, results)
    yield from ()
    return results


def closing_lines(results: ScaleResults, folder: Path) -> Iterator[str | Table]:
    yield from console_parts(results)
    yield str(folder / REPORT)


SCALE = Study(
    noun="scale",
    job=ScaleJob,
    settings=ScaleSettings,
    stages=(
        Stage(COSTS, cost_points),
        Stage(PLAN, plan_trainings, render=plan_lines),
        Stage("training", lambda job, done: train(job, done[PLAN], done[PLAN].trainings)),
        Stage("band", lambda job, done: train(job, done[PLAN], band_trainings(job, done[PLAN]))),
        Stage("analysis", analyse_all),
    ),
    closing=closing_lines,
    trained=(TRIALS,),
    changed=(f"{COSTS}.json",),
    # All else may change from call to call: a larger grid adds trainings.
    identity=("models", "slow_resolution", "target", "call_batch"),
)
