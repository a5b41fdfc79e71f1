"""The stages of LLR-NAS, the search of the best network around a MasterNet within a budget.

Train a MasterNet, exchange one super-block at a time and tune it, regress the scores on the
changes, and select the best predicted structures within the budget; then measure and train them.

Source: GENet, arXiv:2006.14090, section 4, whose code was never released.
docs/reproduce/search.md describes our choices where the paper leaves some open.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fullstride.data.dataset import DataSet
from fullstride.io.console import count_of
from fullstride.io.records import Record, read_json
from fullstride.report.console_tables import table, three_digits
from fullstride.report.training_progress import duration
from fullstride.search.block_tuning import TunedScore
from fullstride.search.llr import tunings
from fullstride.search.llr.plan import (
    TRIALS,
    DeviceTimes,
    Finalist,
    Regression,
    SearchJob,
    SearchPlan,
    SearchResults,
    Tuning,
    Winner,
    make_plan,
    time_networks,
)
from fullstride.search.settings import SearchSettings
from fullstride.study import driver
from fullstride.study.driver import Event, Parts, Results, Stage, Study, Work

RESULTS = "search.json"
RECORD = Record(SearchResults, "the results of a search", ("best", "val", "test"))
PLAN = ("plan.json",)
# Arguments that change the plan, but no time of a network.
COUNTED = (
    "budget_ms", "images_per_s", "clock", "preset", "regression", "baseline", "design", "next",
    "winners", "tuning", "final", "samples", "trainings", "whole", "tune", "tune_epochs",
    "final_epochs", "count", "finalists",
)  # fmt: skip


def search_network(
    data: str | Path | DataSet, out: str | Path, *, recipe: str = "", **arguments: Any
) -> Iterator[Event]:
    """Search a network for `data` within a budget of time, around a MasterNet; yields events.

    After a stop, the same call resumes, with finished stages and trainings from `out`.
    docs/reproduce/search.md describes the stages and the files.

    Args:
        data: A folder with one subfolder of images per class, or anything that `open_data` opens.
        out: The folder of the search.
        recipe: The name, run, bundle or JSON file of the recipe of the MasterNet and the winners;
            by default the case's recipe.
        **arguments: The fields of `SearchSettings`, such as `budget_ms=0.3`, of `StudyOptions`,
            such as `device="cpu"` and `executor="ray"`, and of the recipe.

    Raises ValueError, in one line, for arguments and data that do not fit, if `out` has another
    search, and if no structure is within the budget.

    Examples:
        >>> import fullstride
        >>> arguments = dict(budget_ms=0.3, master="genet_tiny", dry_run=True)
        >>> events = fullstride.search_network("digits", "runs/search", **arguments)
        >>> for event in events:  # doctest: +SKIP
        ...     print(event.stage, event.line)
    """
    return driver.start_study(SEARCH, data, out, recipe, arguments)


def has_further_tunings(job: SearchJob, done: Results) -> bool:
    return len(tunings.tunings_of(done)) > len(done["design"])


def end_search(job: SearchJob, done: Results) -> Work[SearchResults]:
    best = done["final"]
    assert best.score is not None  # it was trained
    results = SearchResults(
        data_name=job.data.name,
        settings=read_json(job.folder / SEARCH.file),
        best=best,
        bundle=str(tunings.bundle_path(job, best).relative_to(job.folder)),
        val=best.score,
        test=done["test"],
        test_images=len(job.data.test),
        seconds=driver.read_seconds(job.folder),
    )
    yield from ()
    return RECORD.save(job.folder / RESULTS, results)


def times_lines(times: DeviceTimes) -> Parts:
    profile = times.profile
    fit = profile.inference
    if not times.measured:
        return [f"times    estimates for {profile.device}, by the profile {profile.name}"]
    return [
        f"times    a profile of {profile.device}, fitted to {fit.networks} networks; estimates of "
        f"each quarter by the other networks are {fit.error:.0f} % off"
    ]


def plan_lines(plan: SearchPlan) -> Parts:
    yield f"space    {plan.structures:.3g} structures"
    for name, ms in plan.master_ms.items():
        fastest = f"the fastest structure {three_digits(plan.fastest_ms[name])} ms"
        yield f"{name:8} the MasterNet takes {three_digits(ms)} ms, {fastest}"
    rows = [[each.stage, str(each.trainings), duration(each.seconds)] for each in plan.trainings]
    yield table(["stage", "trainings", "time"], rows)
    at_once = f" on {plan.devices} devices" if plan.devices > 1 else ""
    yield f"time     about {duration(plan.total_s)} of training{at_once}"


def regression_lines(regression: Regression) -> Parts:
    rows = []
    for each in regression.slopes:
        error = "-" if each.standard_error is None else f"{each.standard_error:.2f}"
        rows.append([each.place, each.term, f"{each.value:+.2f}", error])
    yield table(["place", "term", "points", "standard error"], rows)
    noise = "unknown" if regression.noise is None else f"{regression.noise:.2f} points"
    failed = f"; without a score: {len(regression.failures)}" if regression.failures else ""
    yield f"MasterNet {regression.reference:.2f} %, noise of a training {noise}{failed}"


def finalist_lines(finalists: Sequence[Finalist]) -> Parts:
    rows, first = [], dict[str, Finalist]()
    for each in finalists:
        first.setdefault(each.variant.name, each)
        predicted = f"{each.predicted:.2f} ({each.low:.2f} to {each.high:.2f})"
        ms = " ".join(map(three_digits, (each.ms, each.ms_low, each.ms_high)))
        by = "measured" if each.measured else each.bound
        rows.append([each.variant.name, each.network, predicted, ms, by])
    yield table(["", "network", "predicted % (95 %)", "ms, low, high", "time by"], rows)
    for name, each in first.items():
        if each.at_bounds:
            yield f"{name:8} at the end of a range: {', '.join(each.at_bounds)}"


def winner_lines(winners: Sequence[Winner]) -> Parts:
    rows = []
    for each in winners:
        score = each.failure if each.score is None else f"{each.score:.2f}"
        rows.append([each.trial, each.finalist.network, f"{each.finalist.predicted:.2f}", score])
    yield table(["trial", "network", "predicted %", "validation %"], rows)


def closing_lines(results: SearchResults, folder: Path) -> Parts:
    best = results.best.finalist
    how = "measured" if best.measured else "estimated"
    yield f"network  {best.network} at {best.variant.resolution} pixels"
    yield f"time     {three_digits(best.ms)} ms an image, {how}"
    yield f"validation  {results.val:.2f} %, the best of several"
    if results.test:
        name, value = next(iter(results.test.items()))
        images = count_of(results.test_images, "image")
        yield f"test     {name} {value:.2f} % of {images}, read once"
    yield f"bundle   {folder / results.bundle}; everything is in {folder / RESULTS}"


SCORES, FINALISTS = tuple[Tuning, ...], tuple[Finalist, ...]
SEARCH = Study(
    noun="search",
    job=SearchJob,
    settings=SearchSettings,
    stages=(
        Stage("times", time_networks, DeviceTimes, times_lines),
        Stage("plan", make_plan, SearchPlan, plan_lines),
        Stage("master", tunings.train_master, TunedScore),
        Stage("design", tunings.run_design, SCORES),
        Stage("regression", tunings.regress, Regression, regression_lines),
        Stage("whole", tunings.run_whole, SCORES),
        Stage("sequential", tunings.tune_further, SCORES),
        Stage("refitted", tunings.regress, Regression, regression_lines, when=has_further_tunings),
        Stage("selection", tunings.select_all, FINALISTS, finalist_lines),
        Stage("measured", tunings.measure_finalists, FINALISTS, finalist_lines),
        Stage("winners", tunings.train_winners, tuple[Winner, ...], winner_lines),
        Stage("final", tunings.train_final, Winner),
        Stage("test", tunings.score_test, dict[str, float]),
        Stage("results", end_search),
    ),
    closing=closing_lines,
    trained=(TRIALS,),
    changed_by=dict.fromkeys(COUNTED, PLAN),
    changed=("times.json", *PLAN),
)
