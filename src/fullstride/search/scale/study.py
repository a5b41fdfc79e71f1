"""The stages of a scaling study, and its results: JSON, a CSV file, lines, a plot and a page."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table as RichTable

from fullstride.data.dataset import DataSet
from fullstride.io import writing
from fullstride.io.console import count_of, printable
from fullstride.io.records import to_json
from fullstride.report import plots
from fullstride.report.console_tables import table
from fullstride.report.page import render_template, write
from fullstride.report.scatter import ScalingPanel, scaling_figure
from fullstride.search.block_tuning import TRAINING, NetworkTraining, TunedScore, training_trial
from fullstride.search.scale import analysis, finished
from fullstride.search.scale.finished import Source, Training
from fullstride.search.scale.plan import (
    PlannedTraining,
    PointCost,
    ScaleJob,
    ScalePlan,
    band,
    make_plan,
    plan_lines,
    point_costs,
)
from fullstride.search.settings import ScaleSettings
from fullstride.study import driver
from fullstride.study.driver import PLAN, Event, Results, Stage, Study
from fullstride.study.trials import Failure, Trial, Work
from fullstride.train.recipes.choice import RecipeChoice

# The results, and their files and tables.

JSON, CSV, PICTURE, REPORT = "scale.json", "trainings.csv", "scale.png", "report.html"
OUTPUTS = {
    JSON: writing.json_output("the results of a scaling study", "trainings", "regimes"),
    CSV: writing.Output(
        "trainings of a scaling study",
        ".csv",
        writing.begins_with(",".join(finished.COLUMNS).encode()),
    ),
    PICTURE: writing.PLOT,
    REPORT: writing.PAGE,
}
Table = list[list[str]]


@dataclass(frozen=True, kw_only=True)
class ScaleResults:
    data_name: str
    device: str  # of the times
    budget_ms: float | None
    trainings: tuple[Training, ...]
    regimes: tuple[analysis.RegimeAnalysis, ...]  # the shortest first
    failures: Mapping[str, str] = field(default_factory=dict)  # training -> why


def check_outputs(folder: Path) -> None:
    """Raise ValueError if a file of something else would be replaced."""
    for name, output in OUTPUTS.items():
        writing.check_output(folder / name, output)


def write_results(folder: Path, results: ScaleResults) -> None:
    texts = {JSON: to_json(results), CSV: finished.write_trainings(results.trainings)}
    for name, text in texts.items():
        with writing.atomic_write(folder / name, OUTPUTS[name]) as temporary:
            temporary.write_text(text)
    plots.save_png(figure(results), folder / PICTURE)
    write(folder / REPORT, render(results))


def figure(results: ScaleResults) -> Figure:
    return scaling_figure([*map(panel, results.regimes)], results.budget_ms)


def panel(regime: analysis.RegimeAnalysis) -> ScalingPanel:
    points = {
        (p.name, p.size): plots.Point(printable(p.name), p.ms, p.error, (p.low, p.high))
        for p in regime.points
    }
    front = [points[each.name, each.size] for each in regime.front]
    law = regime.saturating
    return ScalingPanel(title_of(regime), [*points.values()], front, law and law.error_at)


def title_of(regime: analysis.RegimeAnalysis) -> str:
    own = regime.regime in ("", "recipe") or regime.regime.endswith("_epochs")
    return f"{regime.epochs:g} epochs" + (f" by {regime.regime}" if not own else "")


def headline(results: ScaleResults) -> str:
    """What to train next, by the longest regime."""
    *_, longest = results.regimes
    best = f"The best of {count_of(len(longest.points), 'network')} is {longest.best}"
    if longest.next is None:
        return f"{best}; no step with a predicted gain is left."
    return f"{best}; next: {step_line(longest.next)}."


def step_line(step: analysis.NextStep) -> str:
    change = f"+{step.extra_ms:.3g} ms" if step.extra_ms > 0 else f"{step.extra_ms:.3g} ms"
    return f"{step.name}, {change}, {step.gain:.2f} points less error{span(step.interval)}"


def span(interval: analysis.Interval) -> str:
    if interval is None or not math.isfinite(sum(interval)):
        return " (interval unknown)"
    return " ({:.2f} to {:.2f})".format(*interval)


def law_line(name: str, law: analysis.Law) -> str:
    half = ""
    if law.largest is not None:
        half = (
            f"; by the cheapest {law.half} of {law.points}, the largest network's error is "
            f"{law.largest:.2f} %{span(law.largest_interval)}"
        )
    return (
        f"{name}: {law.floor:.2f} % + c / ms^{law.exponent:.2f}, rmse {law.rmse:.2f} points{half}"
    )


def regime_lines(regime: analysis.RegimeAnalysis) -> Iterator[str]:
    if regime.seed_deviation is not None:
        yield f"deviation over seeds: {regime.seed_deviation:.2f} points"
    for gain in regime.gains:
        yield (
            f"{gain.axis}: {gain.points_per_doubling:.2f} points per doubling of the time"
            f"{span(gain.interval)}, {count_of(gain.pairs, 'pair')}"
        )
    if regime.saturating and regime.pure:
        yield law_line("law with a floor", regime.saturating)
        yield law_line("pure law", regime.pure)
    if regime.next:
        yield f"next (by {regime.law_by}): {step_line(regime.next)}"
    for warning in regime.warnings:
        yield f"warning: {warning}"


def points_table(regime: analysis.RegimeAnalysis) -> Table:
    """All networks, the fastest first; p tests a network of the front against the one before."""
    front = {(point.name, point.size): point for point in regime.front}
    rows = [["network", "ms/image", "error %", "95 % interval", "seeds", "front", "p"]]
    for point in regime.points:
        on_front = front.get((point.name, point.size))
        interval = f"{point.low:.2f} to {point.high:.2f}"
        row = [point.name, f"{point.ms:.3g}", f"{point.error:.2f}", interval, str(point.seeds)]
        p_value = on_front and on_front.p_value
        row += ["yes" if on_front else "", "" if p_value is None else f"{p_value:.2g}"]
        rows.append(row)
    return rows


def steps_table(steps: Sequence[analysis.NextStep]) -> Table:
    rows = [["network", "ms/image", "extra ms", "error %", "gain", "95 % interval"]]
    for step in steps:
        times, error = (f"{step.ms:.3g}", f"{step.extra_ms:.3g}"), f"{step.error:.2f}"
        interval = span(step.interval).strip(" ()")
        rows.append([step.name, *times, error, f"{step.gain:.2f}", interval])
    return rows


def render(results: ScaleResults) -> str:
    sections = []
    for regime in reversed(results.regimes):
        captions = {"p: McNemar's test against the row of the front before": points_table(regime)}
        if regime.steps:
            caption = "Networks to train next, the most gain for its time first"
            captions[caption] = steps_table(regime.steps)
        tables = [
            (caption, columns, [[(cell, "") for cell in row] for row in rows])
            for caption, (columns, *rows) in captions.items()
        ]
        sections.append((title_of(regime), [*regime_lines(regime)], tables))
    description = headline(results)
    return render_template(
        "times.html",
        title=printable(f"fullstride study scale on {results.data_name}"),
        headline=printable(description),
        heading="Error against time",
        plot=plots.svg(figure(results), description),
        caption="Error against the time of an image, both logarithmic. Filled points are on the "
        "front: no faster network has a smaller error. Bars are 95 % intervals of seeds and "
        "images; the line is a power law with a floor.",
        sections=sections,
        notes=[*map(printable, failure_lines(results))],
        environment={},
    )


def failure_lines(results: ScaleResults) -> list[str]:
    return [f"failed: {name}: {reason}" for name, reason in results.failures.items()]


def analyse_trainings(
    source: Source,
    *,
    budget_ms: float | None = None,
    target_epochs: float | None = None,
    candidates: Sequence[analysis.Candidate] | None = None,
) -> ScaleResults:
    """The results of finished trainings, which by default also give the candidates.

    Raises ValueError, in one line, without any; it has the reason if trainings have failed.
    """
    trainings = tuple(source.trainings)
    if source.failures and not trainings:
        name, reason = next(iter(source.failures.items()))
        raise ValueError(
            f"no training is finished, {count_of(len(source.failures), 'training')} failed; the "
            f"first, {name}: {reason}; delete its {TRIALS}/{name}/result.json to try again"
        )
    regimes = analysis.analyse(
        trainings,
        budget_ms=budget_ms,
        target_epochs=target_epochs,
        candidates=candidates,
        by_time=source.by_time,
    )
    return ScaleResults(
        data_name=source.name,
        device=source.device,
        budget_ms=budget_ms,
        trainings=trainings,
        regimes=regimes,
        failures=source.failures,
    )


def console_parts(results: ScaleResults) -> Iterator[str | RichTable]:
    """The lines and tables that a command prints, the longest regime last."""
    for regime in results.regimes:
        yield title_of(regime)
        head, *rows = points_table(regime)
        yield table(head, rows)
        if regime.steps:
            head, *rows = steps_table(regime.steps)
            yield table(head, rows)
        yield from regime_lines(regime)
    yield from failure_lines(results)
    yield headline(results)


TRIALS, COSTS = "trials", "costs"


def read_study(folder: Path) -> Source:
    """The finished and the failed trainings in the folder of a study.

    Errors are top-1 errors in per cent of the validation split. Raises ValueError without a study.
    """
    costs = driver.saved_stage(folder, COSTS, tuple[PointCost, ...])
    if costs is None:
        raise ValueError(
            f"{folder} has no study: give a folder that `fullstride study scale` wrote"
        )
    points, every = {cost.name: cost for cost in costs}, list[Training]()
    failures = dict[str, str]()
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
            if cost is None:  # the grid was larger before
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
    by_time = len({cost.point.model for cost in costs}) > 1
    return Source(str(folder), every, str(folder), by_time, failures)


def find_trainings(source: str) -> Source:
    """The trainings of a folder, a CSV file or a family of Table 7. Raises ValueError."""
    if source in ("resnet_rs", "efficientnet"):
        return Source(source, finished.table_7(source), finished.TABLE_7)
    path = Path(source)
    if path.is_dir():
        return read_study(path)
    if path.suffix == ".csv":
        return Source(source, finished.read_trainings(path), path.name)
    raise ValueError(
        f"no trainings in {source!r}: give a folder of `fullstride study scale`, a .csv file, or "
        "resnet_rs or efficientnet"
    )


def scale(
    data: str | Path | DataSet, out: str | Path, *, recipe: str = "", **arguments: Any
) -> Iterator[Event]:
    """Train a network at several widths, depths and resolutions, and say what to scale next.

    Yields events. After a stop, the same call resumes, with finished trainings from `out`.
    docs/reproduce/scale.md describes the stages.

    Args:
        data: A folder with one subfolder of images per class, or anything that `open_data` opens.
        out: The folder of the study.
        recipe: The name, run, bundle or JSON file of a recipe; by default the case's recipe.
        **arguments: The fields of `ScaleSettings`, such as `models=("genet_tiny",)`, of
            `StudyOptions`, such as `device="cpu"` and `dry_run=True`, and of the recipe.

    Raises ValueError, in one line, for arguments and data that do not fit, and if `out` has another
    study.

    Examples:
        >>> import fullstride
        >>> events = fullstride.scale("digits", "runs/scale", models=("genet_tiny",), dry_run=True)
        >>> for event in events:  # doctest: +SKIP
        ...     print(event.stage, event.line)
    """
    return driver.start_study(SCALE, data, out, recipe, arguments)


def cost_points(job: ScaleJob, done: Results) -> Work[list[PointCost]]:
    """The costs of all points; costs in the folder are not measured again."""
    kind = tuple[PointCost, ...]
    saved = {each.name: each for each in driver.saved_stage(job.folder, COSTS, kind) or ()}
    if missing := [point for point in job.points if point.name not in saved]:
        new = yield from point_costs(missing, job)
        saved |= {each.name: each for each in new}
        driver.write_stage(job.folder, COSTS, tuple(saved.values()))
    return [saved[point.name] for point in job.points]


def plan_trainings(job: ScaleJob, done: Results) -> Work[ScalePlan]:
    yield from ()
    return make_plan(job, done[COSTS])


def train(job: ScaleJob, plan: ScalePlan, trainings: Sequence[PlannedTraining]) -> Work[None]:
    points = {cost.name: cost.point for cost in plan.costs}
    trials = []
    for each in trainings:
        point = points[each.point]
        training = NetworkTraining(
            spec=point.spec(len(job.data.classes), job.data.channels),
            data=job.data,
            recipe=RecipeChoice(job.recipe_of(point, each.regime)),
            seed=each.seed,
            workers=job.options.workers,
        )
        folder = job.folder / TRIALS / each.regime / f"{each.point}-seed{each.seed}"
        trials.append(training_trial(folder, training))
    yield from job.run(TRAINING, trials)


def band_trainings(job: ScaleJob, plan: ScalePlan) -> list[PlannedTraining]:
    """Trainings near the front that the law of each regime predicts, within the hours.

    The law is fitted to the planned trainings alone, so that a resumed study makes the same choice.
    """
    chosen, left_s = [], plan.seconds_left
    if len(job.settings.models) > 1:
        return []
    begun = {each.point for each in plan.trainings}
    rest = [cost for cost in plan.costs if cost.name not in begun]
    ms = {cost.point.size: cost.ms for cost in plan.costs}
    trainings = read_study(job.folder).trainings
    for regime in job.regimes:
        own = [each for each in trainings if each.regime == regime and each.name in begun]
        points = finished.points_of(own)
        law = analysis.law_of_axes(points, finished.seed_deviation(points)) if points else None
        if law is None or not rest:
            continue
        sizes = [each.size for each in points]
        every = [*sizes, *(cost.point.size for cost in rest)]
        errors = {size: float(law.law.at(analysis.values_of(size, law.axes))) for size in every}
        near = band([cost.point for cost in rest], sizes, errors, ms, plan.band)
        for cost in (cost for cost in rest if cost.point in near):
            each = job.training(cost, regime)
            if each.seconds <= left_s:
                chosen.append(each)
                left_s -= each.seconds
    return chosen


def analyse_all(job: ScaleJob, done: Results) -> Work[ScaleResults]:
    """The analysis of all trainings in the folder; candidates are the points that fit."""
    plan, settings = done[PLAN], job.settings
    source = read_study(job.folder)
    names = {each.name for each in source.trainings}
    rest = (cost for cost in (*plan.costs, *plan.beyond) if cost.name not in names)
    candidates = [analysis.Candidate(cost.name, cost.point.size, cost.ms) for cost in rest]
    results = analyse_trainings(
        source._replace(name=job.data.name, device=settings.target),
        budget_ms=settings.limit_ms,
        target_epochs=settings.target_epochs,
        candidates=candidates,
    )
    write_results(job.folder, results)
    yield from ()
    return results


def closing_lines(results: ScaleResults, folder: Path) -> Iterator[str | RichTable]:
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
    # Other settings may change from call to call: a larger grid adds trainings.
    identity=("models", "slow_resolution", "target", "call_batch"),
)
