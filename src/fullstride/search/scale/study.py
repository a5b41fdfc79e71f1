"""Where does more time pay: in width, depth or resolution? `scale` trains points, and analyses."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from fullstride.data.dataset import DataSet, open_data
from fullstride.measure.environment import choose_device
from fullstride.measure.max_batch import budget_bytes
from fullstride.search.block_tuning import TRAINING, train_trial
from fullstride.search.scale.analysis import Candidate, analyse, law_of_axes
from fullstride.search.scale.finished import (
    TABLE_7,
    Training,
    points_of,
    read_trainings,
    seed_deviation,
    table_7,
)
from fullstride.search.scale.grid import HERE, PointCost, ScalePoint, band, grid, point_costs
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
from fullstride.study.executors import find_executor
from fullstride.study.folder import (
    Event,
    StudyConfig,
    StudyKind,
    check_images,
    open_study,
    saved_stage,
    stage_events,
    write_stage,
)
from fullstride.study.settings import ExecutorSettings
from fullstride.study.trials import Executor, Failure, Trial, run_trials
from fullstride.train.recipes.choice import RecipeChoice

# Which trainings of a study are in its folder, and which failed?


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


class Source(NamedTuple):
    """Finished trainings."""

    trainings: list[Training]
    device: str  # where their times are from
    by_time: bool = False  # whether they are not one network scaled


def find_trainings(source: str) -> Source:
    """Trainings of a folder, a CSV file or a family of Table 7. Raises ValueError for others."""
    if source in ("resnet_rs", "efficientnet"):
        return Source(table_7(source), TABLE_7)
    path = Path(source)
    if path.is_dir():
        trainings, _ = read_study(path)
        costs = saved_stage(path, COSTS, tuple[PointCost, ...])
        return Source(trainings, str(path), len({cost.point.model for cost in costs}) > 1)
    if path.suffix == ".csv":
        return Source(read_trainings(path), path.name)
    raise ValueError(
        f"no trainings in {source!r}: give a folder of `fullstride study scale`, a .csv file, or "
        "resnet_rs or efficientnet"
    )


@dataclass(frozen=True, kw_only=True)
class ScaleConfig(StudyConfig):
    settings: ScaleSettings


LOCAL = ExecutorSettings()
# What a study is for. All else may change from call to call: a larger grid adds trainings.
IDENTITY = ("models", "slow_resolution", "device", "batch")
KIND = StudyKind(
    noun="scale",
    config=ScaleConfig,
    trained=(TRIALS,),
    changed_by={},
    changed=(f"{COSTS}.json",),
)


def scale(
    data: str | Path | DataSet,
    out: str | Path,
    *,
    recipe: str = "",
    train_device: str = "auto",
    workers: int | None = None,
    dry_run: bool = False,
    **settings: Any,
) -> Iterator[Event]:
    """Train a network at several widths, depths and resolutions, and say what to scale next.

    Yields events. The stages are the costs of all points, a plan, the trainings of a cross through
    the middle of the grid, those of points near the front that these predict, and the analysis.
    After a stop, the same call goes on: a training that has ended is read from `out`.

    Args:
        data: A folder with one subfolder of images per class, or what else `open_data` opens.
        out: The folder of the study.
        recipe: The name, run, bundle or JSON file of a recipe; by default that of the case.
        train_device: Where networks train: cpu, cuda:1, cuda, or auto, for all GPUs if there are.
        workers: Processes that decode images; None: by the cores and the images.
        dry_run: End with the plan, before anything is trained.
        **settings: The fields of `ScaleSettings`, such as `models=("genet_tiny",)`.

    Raises ValueError, in one line, for arguments and data that do not fit, and if `out` has another
    study.
    """
    images = data if isinstance(data, DataSet) else open_data(str(data))
    images.check_one_class()
    how: dict[str, Any] = dict(train_device=train_device, workers=workers, dry_run=dry_run)
    yield from scale_data(images, Path(out), ScaleSettings(**settings), RecipeChoice(recipe), **how)


def scale_data(
    data: DataSet,
    folder: Path,
    settings: ScaleSettings,
    recipe: RecipeChoice,
    executor: ExecutorSettings = LOCAL,
    *,
    train_device: str = "auto",
    workers: int | None = None,
    dry_run: bool = False,
) -> Iterator[Event]:
    """`scale` of an open data set, where `executor` says. Raises ValueError, in one line."""
    check_input(data, recipe)
    regimes, points = regimes_of(settings, recipe), grid(settings)
    recipes = [recipe_of(points[0], regime, data, settings) for regime in regimes]
    device = str(choose_device(train_device))
    on_gpu = settings.device != HERE or device.startswith("cuda")
    identity = {name: getattr(settings, name) for name in IDENTITY}
    with open_study(KIND, folder, data, ScaleSettings(**identity), recipe):
        cost: dict[str, Any] = dict(settings=settings, batch=recipes[0].batch_size, device=device)
        cost |= dict(classes=len(data.classes), channels=data.channels)
        costs = yield from stage_events("costs", costs_of(folder, points, cost))
        memory_bytes = None
        if settings.memory_gib is not None:
            memory_bytes = settings.memory_gib * 2**30
        elif settings.device == HERE:
            memory_bytes = budget_bytes(None, choose_device(train_device))
        memory: dict[str, Any] = dict(memory_bytes=memory_bytes, on_gpu=on_gpu)
        plan = make_plan(costs, regimes, data, settings, **memory)
        yield Event("plan", result=plan)
        if dry_run:
            return
        how: dict[str, Any] = dict(data=data, settings=settings, workers=workers)
        where = find_executor(executor, folder, train_device=train_device)
        how |= dict(regimes=regimes, executor=where)
        yield from stage_events("training", train(folder, plan, plan.trainings, **how))
        if more := following(folder, plan, regimes, data, settings):
            yield from stage_events("training", train(folder, plan, more, **how))
        results = study_results(folder, data.name, settings, plan)
        write_results(folder, results)
        yield Event("analysis", result=results)


def costs_of(
    folder: Path, points: Sequence[ScalePoint], how: Mapping[str, Any]
) -> Generator[str, None, list[PointCost]]:
    """The costs of `points`, of which those in the folder are not measured again."""
    kind = tuple[PointCost, ...]
    saved = {each.name: each for each in saved_stage(folder, COSTS, kind) or ()}
    if missing := [point for point in points if point.name not in saved]:
        new = yield from point_costs(missing, **how)
        saved |= {each.name: each for each in new}
        write_stage(folder, COSTS, tuple(saved.values()))
    return [saved[point.name] for point in points]


def check_input(data: DataSet, recipe: RecipeChoice) -> None:
    """Raise ValueError, in one line, for what no point can train on or by."""
    if "resolution" in recipe.changes:
        raise ValueError("recipe.resolution is that of each point: choose by --resolutions")
    check_images(data)


def train(
    folder: Path,
    plan: ScalePlan,
    trainings: Sequence[PlannedTraining],
    *,
    regimes: Sequence[Regime],
    executor: Executor,
    data: DataSet,
    settings: ScaleSettings,
    workers: int | None,
) -> Generator[str, None, None]:
    """Run the trainings that have no result."""
    points = {cost.name: cost.point for cost in plan.costs}
    by_name = {regime.name: regime for regime in regimes}
    trials = [
        train_trial(
            trial_folder(folder, each),
            spec=points[each.point].spec(len(data.classes), data.channels),
            data=data,
            recipe=RecipeChoice(
                recipe_of(points[each.point], by_name[each.regime], data, settings)
            ),
            seed=each.seed,
            workers=workers,
        )
        for each in trainings
    ]
    yield from run_trials(TRAINING, trials, executor=executor)


def following(
    folder: Path,
    plan: ScalePlan,
    regimes: Sequence[Regime],
    data: DataSet,
    settings: ScaleSettings,
) -> list[PlannedTraining]:
    """Trainings near the front that the law of each regime predicts, within the hours.

    The law is that of the planned trainings alone, so that a resumed study chooses the same.
    """
    chosen, left_s = [], plan.seconds_left
    if len(settings.models) > 1:
        return []
    begun = {each.point for each in plan.trainings}
    rest = [cost for cost in plan.costs if cost.name not in begun]
    trainings, _ = read_study(folder)
    for regime in regimes:
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
            each = training(cost, regime, 0, data, settings)
            if each.seconds <= left_s:
                chosen.append(each)
                left_s -= each.seconds
    return chosen


def study_results(
    folder: Path, data_name: str, settings: ScaleSettings, plan: ScalePlan
) -> ScaleResults:
    """The analysis of all trainings in the folder; candidates are the points that fit."""
    trainings, failures = read_study(folder)
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
    return ScaleResults(
        data_name=data_name,
        device=settings.device,
        budget_ms=settings.budget_ms,
        trainings=tuple(trainings),
        failures=failures,
        regimes=regimes,
    )


def shown(event: Event, folder: Path) -> Iterator[str | Table]:
    """The lines and tables that the command prints for an event of a study in `folder`."""
    if event.line:
        yield event.line
    elif event.stage == "plan":
        yield from plan_lines(event.result)
    elif event.stage == "analysis":
        yield from console_parts(event.result)
        yield str(folder / REPORT)
