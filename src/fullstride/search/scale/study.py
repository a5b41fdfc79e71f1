"""The stages of a scaling study: trainings of networks of several sizes, and their analysis."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from fullstride.data.dataset import DataSet
from fullstride.measure.budget import HERE
from fullstride.measure.environment import choose_device
from fullstride.measure.max_batch import budget_bytes
from fullstride.search.block_tuning import TRAINING, NetworkTraining, training_trial
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
from fullstride.search.scale.grid import PointCost, ScalePoint, band, grid, point_costs
from fullstride.search.scale.plan import (
    PlannedTraining,
    Regime,
    ScalePlan,
    make_plan,
    plan_lines,
    recipe_of,
    regimes_of,
    training,
)
from fullstride.search.scale.results import REPORT, ScaleResults, console_parts, write_results
from fullstride.search.settings import ScaleSettings
from fullstride.study.driver import (
    PLAN,
    Event,
    Results,
    Stage,
    Study,
    StudyJob,
    saved_stage,
    start_study,
    write_stage,
)
from fullstride.study.trials import Failure, Trial
from fullstride.train.recipes.choice import RecipeChoice

TRIALS, COSTS = "trials", "costs"


def trial_folder(folder: Path, planned: PlannedTraining) -> Path:
    return folder / TRIALS / planned.regime / f"{planned.point}-seed{planned.seed}"


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
    by_name = {cost.name: cost for cost in costs}
    trainings: list[Training] = []
    failures: dict[str, str] = {}
    for regime in sorted((folder / TRIALS).glob("*")):
        results = {
            path.parent: TRAINING.read(Trial(folder=path.parent, result=path))
            for path in sorted(regime.glob("*/result.json"))
        }
        scores = {at: each for at, each in results.items() if not isinstance(each, Failure)}
        failed = {at: each for at, each in results.items() if isinstance(each, Failure)}
        failures |= {f"{at.parent.name}/{at.name}": each.failure for at, each in failed.items()}
        epochs = max((each.epochs for each in scores.values()), default=0)
        for at, score in scores.items():
            cost = by_name.get(at.name.rpartition("-seed")[0])
            if cost is None:  # of a grid that was larger
                continue
            point, images = cost.point, len(score.correct)
            training = Training(
                name=point.name,
                width=point.width,
                depth=point.depth,
                resolution=point.resolution,
                epochs=epochs,
                seed=score.seed,
                error=100 * score.correct.count("0") / images,
                ms=cost.ms,
                images=images,
                correct=score.correct,
                regime=regime.name,
            )
            trainings.append(training)
    return trainings, failures


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


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaleJob(StudyJob):
    """The arguments of a scaling study and its means."""

    settings: ScaleSettings

    @cached_property
    def regimes(self) -> tuple[Regime, ...]:
        return regimes_of(self.settings, self.recipe)

    @cached_property
    def points(self) -> list[ScalePoint]:
        return grid(self.settings)

    @property
    def batch(self) -> int:
        """Images of a training step."""
        return recipe_of(self.points[0], self.regimes[0], self.data, self.settings).batch_size

    def check(self) -> None:
        """Raise ValueError, in one line, for what no point can train on or by."""
        if "resolution" in self.recipe.changes:
            raise ValueError("recipe.resolution is that of each point: choose by --resolutions")
        super().check()
        for regime in self.regimes:
            recipe_of(self.points[0], regime, self.data, self.settings)


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
    settings, is_here = job.settings, job.settings.target == HERE
    memory_bytes = None
    if settings.memory_gib is not None:
        memory_bytes = settings.memory_gib * 2**30
    elif is_here:
        memory_bytes = budget_bytes(None, choose_device(job.options.device))
    on_gpu = not is_here or job.devices[0].startswith("cuda")
    yield from ()
    return make_plan(
        done[COSTS], job.regimes, job.data, settings, memory_bytes=memory_bytes, on_gpu=on_gpu
    )


def train(
    job: ScaleJob, plan: ScalePlan, trainings: Sequence[PlannedTraining]
) -> Generator[str, None, None]:
    """Run the trainings that have no result."""
    points = {cost.name: cost.point for cost in plan.costs}
    regimes = {regime.name: regime for regime in job.regimes}
    trials = []
    for each in trainings:
        point, regime = points[each.point], regimes[each.regime]
        trials.append(
            training_trial(
                trial_folder(job.folder, each),
                NetworkTraining(
                    spec=point.spec(len(job.data.classes), job.data.channels),
                    data=job.data,
                    recipe=RecipeChoice(recipe_of(point, regime, job.data, job.settings)),
                    seed=each.seed,
                    workers=job.workers,
                ),
            )
        )
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
    trainings, _ = read_study(job.folder)
    for regime in job.regimes:
        own = [each for each in trainings if each.regime == regime.name and each.name in begun]
        finished = points_of(own)
        law = law_of_axes(finished, seed_deviation(finished)) if finished else None
        if law is None or not rest:
            continue
        sizes = [each.size for each in finished]
        ms = {cost.point.size: cost.ms for cost in plan.costs}
        errors = {
            size: float(law.law.at(law.sizes(size)))
            for size in (*sizes, *(cost.point.size for cost in rest))
        }
        near = band([cost.point for cost in rest], sizes, errors, ms, plan.band)
        for cost in (cost for cost in rest if cost.point in near):
            each = training(cost, regime, 0, job.data, job.settings)
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
        budget_ms=settings.budget_ms,
        target_epochs=settings.target_epochs,
        candidates=candidates,
        by_time=len(settings.models) > 1,
    )
    results = ScaleResults(
        data_name=job.data.name,
        device=settings.target,
        budget_ms=settings.budget_ms,
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
