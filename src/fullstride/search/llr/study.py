"""Which network is the best for my images and my budget? LLR-NAS, a search around a MasterNet.

Train a MasterNet, exchange one super-block at a time and tune it, regress the scores on what was
changed, and select the best predicted structure within the budget; then measure and train the best.

Source: GENet, arXiv:2006.14090, section 4, whose code was never released. What the paper leaves
open is described in `settings.Method` and docs/search.md.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from fullstride.data.dataset import DataSet, open_data
from fullstride.io.records import to_json
from fullstride.io.writing import atomic_write, json_output
from fullstride.latency.devices import load_profile
from fullstride.report.console_tables import table, three_digits
from fullstride.report.training_progress import duration
from fullstride.search.block_tuning import TunedScore
from fullstride.search.llr.plan import (
    SearchJob,
    find_master,
    find_space,
    find_variants,
    make_plan,
    time_networks,
)
from fullstride.search.llr.search_folder import (
    SEARCH,
    DeviceTimes,
    Finalist,
    Regression,
    SearchPlan,
    SearchResults,
    Tuning,
    Winner,
)
from fullstride.search.llr.times import find_label
from fullstride.search.llr.tunings import (
    best_of,
    bundle_path,
    go_on,
    measure_finalists,
    regress,
    run_design,
    run_whole,
    score_test,
    select_all,
    train_final,
    train_master,
    train_winners,
)
from fullstride.search.settings import SearchSettings
from fullstride.study.executors import find_executor
from fullstride.study.folder import (
    Event,
    check_images,
    open_study,
    read_seconds,
    run_stage,
    stage_events,
)
from fullstride.study.settings import ExecutorSettings
from fullstride.study.trials import local_devices
from fullstride.train.recipes.choice import RecipeChoice

RESULTS = "search.json"
LOCAL = ExecutorSettings()
OUTPUT = json_output("the results of a search", "best", "val", "test")


def search_network(
    data: str | Path | DataSet,
    out: str | Path,
    *,
    recipe: str = "",
    train_device: str = "auto",
    workers: int | None = None,
    dry_run: bool = False,
    executor: ExecutorSettings = LOCAL,
    **settings: Any,
) -> Iterator[Event]:
    """A network for `data` within a budget of time, searched around a MasterNet; yields events.

    The stages are the times of networks, a plan with the total cost, the training of the MasterNet,
    the tuning of exchanged blocks, the regression, further tunings of what it proposes, the
    selection, its measurement, the training of the winners, and the test, which is read once. After
    a stop, the same call goes on: a stage or a training that has ended is read from `out`.
    docs/search.md describes the files.

    Args:
        data: A folder with one subfolder of images per class, or what else `open_data` opens.
        out: The folder of the search.
        recipe: The name, run, bundle or JSON file of the recipe of the MasterNet and the winners;
            by default that of the case.
        train_device: Where networks train: cpu, cuda:1, cuda, or auto, for all GPUs if there are.
        workers: Processes that decode images; None: by the cores and the images.
        dry_run: End with the plan, before anything is trained.
        executor: Where trainings run: by default here, else on a cluster.
        **settings: The fields of `SearchSettings`, such as `budget_ms=0.3`.

    Raises ValueError, in one line, for arguments and data that do not fit, if `out` has another
    search, and if no structure is within the budget.
    """
    images = data if isinstance(data, DataSet) else open_data(str(data))
    images.check_one_class()
    how: dict[str, Any] = dict(train_device=train_device, workers=workers, dry_run=dry_run)
    how |= dict(executor=executor)
    chosen = SearchSettings(**settings)
    yield from search_events(images, Path(out), chosen, RecipeChoice(recipe), **how)


def search_events(
    data: DataSet,
    folder: Path,
    settings: SearchSettings,
    recipe: RecipeChoice,
    *,
    train_device: str = "auto",
    workers: int | None = None,
    dry_run: bool = False,
    executor: ExecutorSettings = LOCAL,
) -> Iterator[Event]:
    """`search_network` of open data. Trainings run where `executor` says, by default here."""
    check_input(data, settings, recipe)
    master = find_master(settings, data)
    job = SearchJob(
        folder=folder,
        data=replace(data, test=data.test.subset([])),  # what chooses cannot have seen them
        settings=settings,
        recipe=recipe,
        space=find_space(master, settings),
        variants=find_variants(master, settings),
        devices=local_devices(train_device),
        workers=workers,
        executor=None if dry_run else find_executor(executor, folder, train_device),
    )
    with open_study(SEARCH, folder, data, settings, recipe) as (config, note):
        if note:
            yield Event("times", line=note)
        best = yield from search_stages(job, dry_run)
        if best is None:
            return
        testing = run_stage(folder, "test", dict[str, float], score_test(job, data.test, best))
        test = yield from stage_events("test", testing)
        assert best.score is not None  # it was trained
        results = SearchResults(
            data_name=data.name,
            settings=config.to_dict(),
            best=best,
            bundle=str(bundle_path(job, best).relative_to(folder)),
            val=best.score,
            test=test,
            test_images=len(data.test),
            seconds=read_seconds(folder),
        )
        with atomic_write(folder / RESULTS, OUTPUT) as temporary:
            temporary.write_text(to_json(results))
        yield Event("results", result=results)


def search_stages(job: SearchJob, dry_run: bool) -> Generator[Event, None, Winner | None]:
    """The stages before the test; returns the network, or None after the plan of a dry run."""
    folder = job.folder

    def stage(name: str, kind: Any, work: Generator[str, None, Any]) -> Generator[Event, None, Any]:
        return stage_events(name, run_stage(folder, name, kind, work))

    times = yield from stage("times", DeviceTimes, time_networks(job))
    yield from stage("plan", SearchPlan, make_plan(job, times))
    if dry_run:
        return None
    master = yield from stage("master", TunedScore, train_master(job))
    scores = tuple[Tuning, ...]
    design = yield from stage("design", scores, run_design(job))
    yield from stage("regression", Regression, regress(job, master, design))
    whole = yield from stage("whole", scores, run_whole(job))
    further = yield from stage("sequential", scores, go_on(job, master, times, (*design, *whole)))
    tunings = (*design, *whole, *further)
    if len(tunings) > len(design):
        yield from stage("refitted", Regression, regress(job, master, tunings))
    rows = tuple[Finalist, ...]
    chosen = yield from stage("selection", rows, select_all(job, master, times, tunings))
    inside = yield from stage(
        "measured", rows, measure_finalists(job, master, times, tunings, chosen)
    )
    winners = yield from stage("winners", tuple[Winner, ...], train_winners(job, inside))
    return (yield from stage("final", Winner, train_final(job, best_of(winners))))


def check_input(data: DataSet, settings: SearchSettings, recipe: RecipeChoice) -> None:
    """Raises ValueError, in one line, for what no search can do, before anything is written."""
    settings.budget()
    if "resolution" in recipe.changes:
        raise ValueError("recipe.resolution is searched: choose by --resolutions, or leave it out")
    if "seed" in recipe.changes:
        raise ValueError("recipe.seed is that of each training: say it by --seed")
    if settings.whole and settings.method.regression == "paper":
        raise ValueError(
            f"--whole {settings.whole}: the paper's regression takes tunings only; leave it out, "
            "or give --regression bayesian"
        )
    check_images(data)
    if settings.is_here:
        find_label(settings.format)
    else:
        load_profile(settings.device)
        if settings.format:
            raise ValueError(
                f"--format {settings.format} is measured here: leave it out with --device "
                f"{settings.device}"
            )


# What does a user see of a search? Lines on the progress of each stage, and tables of results.


Shown = Sequence[str | Table]


def shown(event: Event, folder: Path) -> Shown:
    """The lines and tables that the command prints for an event of a search in `folder`."""
    if event.line:
        return [event.line]
    if event.stage == "results":
        return closing_lines(event.result, folder)
    return SHOWN[event.stage](event.result) if event.stage in SHOWN else []


def times_lines(times: DeviceTimes) -> Shown:
    profile = times.profile
    fit = profile.inference
    if not times.measured:
        return [f"times    estimates for {profile.device}, by the profile {profile.name}"]
    return [
        f"times    a profile of {profile.device}, fitted to {fit.networks} networks; of each "
        f"quarter of them the others' estimates are {fit.error:.0f} % off"
    ]


def plan_lines(plan: SearchPlan) -> Shown:
    """The cost of each stage, with the total."""
    lines = [f"space    {plan.structures:.3g} structures"]
    for name, ms in plan.master_ms.items():
        fastest = f"the fastest structure {three_digits(plan.fastest_ms[name])} ms"
        lines.append(f"{name:8} the MasterNet takes {three_digits(ms)} ms, {fastest}")
    rows = [[each.stage, str(each.trainings), duration(each.seconds)] for each in plan.trainings]
    at_once = f" on {plan.devices} devices" if plan.devices > 1 else ""
    return [
        *lines,
        table(["stage", "trainings", "time"], rows),
        f"time     about {duration(plan.total_s)} of training{at_once}",
    ]


def regression_lines(regression: Regression) -> Shown:
    """The pseudo-gradients with their standard errors."""
    rows = [
        [
            each.place,
            each.term,
            f"{each.value:+.2f}",
            "-" if each.standard_error is None else f"{each.standard_error:.2f}",
        ]
        for each in regression.slopes
    ]
    noise = "unknown" if regression.noise is None else f"{regression.noise:.2f} points"
    failed = f"; without a score: {len(regression.failures)}" if regression.failures else ""
    return [
        table(["place", "term", "points", "standard error"], rows),
        f"MasterNet {regression.reference:.2f} %, noise of a training {noise}{failed}",
    ]


def finalist_lines(finalists: Sequence[Finalist]) -> Shown:
    """The structures with predictions, times and the ends of ranges where they stand."""
    rows = [
        [
            each.variant.name,
            each.network,
            f"{each.predicted:.2f} ({each.low:.2f} to {each.high:.2f})",
            " ".join(map(three_digits, (each.ms, each.ms_low, each.ms_high))),
            "measured" if each.measured else each.bound,
        ]
        for each in finalists
    ]
    lines: list[str | Table] = [
        table(["", "network", "predicted % (95 %)", "ms, low, high", "time by"], rows)
    ]
    first: dict[str, Finalist] = {}
    for each in finalists:
        first.setdefault(each.variant.name, each)
    lines += [
        f"{name:8} at the end of a range: {', '.join(each.at_bounds)}"
        for name, each in first.items()
        if each.at_bounds
    ]
    return lines


def winner_lines(winners: Sequence[Winner]) -> Shown:
    rows = [
        [
            each.trial,
            each.finalist.network,
            f"{each.finalist.predicted:.2f}",
            each.failure if each.score is None else f"{each.score:.2f}",
        ]
        for each in winners
    ]
    return [table(["trial", "network", "predicted %", "validation %"], rows)]


def closing_lines(results: SearchResults, folder: Path) -> Shown:
    best = results.best.finalist
    how = "measured" if best.measured else "estimated"
    lines = [
        f"network  {best.network} at {best.resolution} pixels",
        f"time     {three_digits(best.ms)} ms an image, {how}",
        f"validation  {results.val:.2f} %, the best of several",
    ]
    if results.test:
        name, value = next(iter(results.test.items()))
        lines.append(f"test     {name} {value:.2f} % of {results.test_images:,} images, read once")
    lines.append(f"bundle   {folder / results.bundle}; everything is in {folder / RESULTS}")
    return lines


SHOWN: dict[str, Callable[[Any], Shown]] = {
    "times": times_lines,
    "plan": plan_lines,
    "regression": regression_lines,
    "refitted": regression_lines,
    "selection": finalist_lines,
    "measured": finalist_lines,
    "winners": winner_lines,
}
