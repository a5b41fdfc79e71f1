"""The results of a fit: all numbers as JSON, the last lines of the command, and the HTML page."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from fullstride import tasks
from fullstride.autofit.budget import CandidateTime, fastest_of, within_budget
from fullstride.autofit.candidates import Candidate
from fullstride.autofit.data_report import DataReport
from fullstride.autofit.finalists import ShippedFile
from fullstride.autofit.halving import TRIALS, Outcome, RungScore
from fullstride.autofit.plan import FitPlan
from fullstride.autofit.ship import BudgetFile, Shipment
from fullstride.data.dataset import DataSet
from fullstride.data.readers.decode import UnreadableImage
from fullstride.data.transforms.crop import test_view
from fullstride.deploy.formats import FORMATS, open_file
from fullstride.deploy.predict import predict
from fullstride.io.console import count_of, printable
from fullstride.io.records import write_json
from fullstride.io.writing import json_output
from fullstride.measure.budget import Budget
from fullstride.report import page, plots
from fullstride.report.console_tables import ms as ms_text
from fullstride.report.console_tables import score_interval, three_digits
from fullstride.report.gather import explained, page_picture
from fullstride.report.scatter import FilePoint, files_figure
from fullstride.tasks import find_task, task_of
from fullstride.tasks.task import Metric
from fullstride.train.run_folder import read_log

RESULTS = "fit.json"
PAGE = "report.html"
OUTPUT = json_output("the results of a fit", "budget", "shipment", "seconds")


@dataclass(frozen=True, kw_only=True)
class FitResults:
    """The results of all stages of a fit."""

    data_name: str
    task: str
    budget: Budget
    percentile: float  # of the times of calls that the budget bounds
    settings: Mapping[str, Any]  # the arguments of the fit, as JSON
    data: DataReport
    candidates: tuple[Candidate, ...]
    times: tuple[CandidateTime, ...]  # before training
    plan: FitPlan
    outcome: Outcome
    shipment: Shipment
    seconds: Mapping[str, float]  # of each stage

    @property
    def metric(self) -> Metric:
        """The metric by which networks and files are compared."""
        return find_task(self.task).find_metric(self.shipment.metric)

    @property
    def last_scores(self) -> dict[str, RungScore]:
        """The score of each candidate at the end of its last rung."""
        return {
            each.candidate: each for each in sorted(self.outcome.scores, key=attrgetter("rung"))
        }

    @cached_property
    def fastest(self) -> dict[str, CandidateTime]:
        """The shortest time of each candidate before training, in any format and precision."""
        return fastest_of(self.times)

    @property
    def left_out(self) -> dict[str, str]:
        """Name -> why a candidate that may be within the budget was not tried."""
        before = {each.candidate: each.left_out for each in self.times if each.left_out}
        return before | dict(self.plan.left_out)


class Within(NamedTuple):
    """The best results within a share of the budget; None: nothing was tried."""

    share: float
    ms: float
    file: int | None  # index of the file with the best validation score
    trained: str | None  # the best of the candidates that trained the longest
    published: str | None  # the untrained candidate with the best published top-1


def shares_of_budget(results: FitResults) -> list[Within]:
    """The best files and candidates within half, the whole and twice the budget.

    Candidates count by their shortest time before training, and estimates by the upper end.
    """
    metric, last, files = results.metric, results.last_scores, results.shipment.files

    def file_rank(number: int) -> tuple[float, float]:
        file = files[number]  # of files with equal scores, the fastest
        return metric.rank(file.val[metric.name]), -(file.ms or 0.0)

    def trained_rank(name: str) -> tuple[float, float]:
        score = last[name]
        return score.epochs, metric.rank(score.scores[metric.name])

    rows, limits = [], [math.inf if each.upper_ms is None else each.upper_ms for each in files]
    published = {each.name: each.top1 for each in results.candidates if each.top1 is not None}
    for share in (0.5, 1.0, 2.0):
        ms = share * results.budget.ms_per_image
        ready = [number for number, limit in enumerate(limits) if limit <= ms]
        within = within_budget(results.times, replace(results.budget, ms_per_image=ms))
        names = dict.fromkeys(each.candidate for each in within)
        trained = (name for name in names if name in last)
        untrained = (name for name in names if name in published and name not in last)
        rows.append(
            Within(
                share,
                ms,
                file=max(ready, key=file_rank, default=None),
                trained=max(trained, key=trained_rank, default=None),
                published=max(untrained, key=published.__getitem__, default=None),
            )
        )
    return rows


def fit_json(results: FitResults) -> dict[str, Any]:
    """All numbers of a fit, for JSON. Results per image are in the files of the rungs."""
    rungs = [asdict(each) for each in results.outcome.scores]
    for each in rungs:
        del each["correct"], each["resampled"], each["cross_validated"]
    return {
        "data_name": results.data_name,
        "task": results.task,
        "budget": results.budget.to_dict() | {"percentile": results.percentile},
        "settings": results.settings,
        "data": results.data,
        "candidates": [asdict(each) | {"name": each.name} for each in results.candidates],
        "times": results.times,
        "left_out": results.left_out,
        "plan": asdict(results.plan) | {"total_s": results.plan.total_s},
        "outcome": asdict(results.outcome) | {"scores": rungs},
        "shipment": results.shipment,
        "within": [each._asdict() for each in shares_of_budget(results)],
        "seconds": results.seconds,
    }


def headline(results: FitResults) -> str:
    """The network, its form and its accuracy on the images of the final scoring."""
    shipment, metric = results.shipment, results.metric
    file = shipment.file
    scores = shipment.test or file.val
    bounds = score_interval(metric, scores)
    between = f" (95 % interval {bounds[0]:.1f} to {bounds[1]:.1f})" if bounds else ""
    chosen = "" if shipment.test else ", by which it was chosen: expect less of new images"
    return (
        f"{file.title}: {shipment.split} {metric.text(scores[metric.name])}{between} on "
        f"{count_of(int(scores['images']), 'image')}{chosen}"
    )


def other_scores(results: FitResults) -> str:
    """The further scores of the file that ships, on the images of the headline."""
    scores = results.shipment.test or results.shipment.file.val
    metrics = find_task(results.task).metrics(results.metric)[1:]
    return ", ".join(shown(each, scores[each.name]) for each in metrics if each.name in scores)


def shown(metric: Metric, value: float) -> str:
    """A value with its unit and one digit, or with four digits if it has no unit."""
    return metric.text(value, 1 if metric.unit else 4)


def baseline(results: FitResults) -> str:
    """What predictions that ignore the images would score on the images of the headline, or ""."""
    scores = results.shipment.test or results.shipment.file.val
    return find_task(results.task).baseline_note(scores)


def time_line(results: FitResults) -> str:
    """The time of the file that ships, the conditions of the time, and the budget."""
    shipment, budget = results.shipment, results.budget
    file = shipment.file
    where = f"batch {budget.batch}, {shipment.environment.get('device', '')}"
    limit = f"the budget is {budget.ms_per_image:g} ms"
    if file.ms is None:
        return f"no estimate of its time ({where}); {limit}"
    if file.measured:
        return f"{ms_text(file.ms)} an image, p{results.percentile:g} of calls ({where}); {limit}"
    span = ""
    if file.low is not None and file.high is not None:
        span = f", 90 % interval {three_digits(file.low)} to {ms_text(file.high)}"
    return f"{ms_text(file.ms)} an image, estimated{span} ({where}); {limit}"


def smaller_line(ships: BudgetFile, results: FitResults, folder: Path) -> str:
    """The file of another budget, its score and its time."""
    file, metric = results.shipment.files[ships.best], results.metric
    scores, split = (ships.test, "test") if ships.test else (file.val, "val")
    time = "no estimate of its time" if file.ms is None else f"{ms_text(file.ms)} an image"
    return (
        f"within {ships.budget_ms:g} ms: {file.title}, "
        f"{split} {metric.text(scores[metric.name])}, {time}: {folder / ships.model}"
    )


def closing_lines(results: FitResults, folder: Path) -> list[str]:
    """The last lines of the command: the network, its accuracy and time, the file and its use."""
    shipment = results.shipment
    model = folder / shipment.model
    trust = " --trust" if FORMATS[shipment.file.format].runs_code else ""
    return [
        headline(results),
        *filter(None, [baseline(results)]),
        time_line(results),
        *(smaller_line(each, results, folder) for each in shipment.smaller),
        *shipment.notes,
        f"{model}: {shipment.file.size_mib:.1f} MiB; all numbers and pictures: {folder / PAGE}",
        f"{folder / shipment.bundle}: its network, for fullstride export and validate",
        f"fullstride predict {shlex.quote(str(model))} PICTURES{trust}",
    ]


# The page of a fit.

PICTURE = "files.png"  # the accuracy of files against their time
MAX_CURVES = 12  # candidates in the plot of learning curves, as colours and dashes repeat
MAX_CANDIDATES = 200  # rows
MAX_NAMES = 10  # of images with a problem
MAX_WORST = 12  # images with the worst scores


def write_results(folder: Path, data: DataSet, results: FitResults) -> Path:
    """Write fit.json, the page of a fit and its plot to its folder. Returns the page's path."""
    write_json(folder / RESULTS, OUTPUT, fit_json(results))
    page.write(folder / PAGE, render(folder, data, results))
    plots.save_png(figure(results), folder / PICTURE)
    return folder / PAGE


def render(folder: Path, data: DataSet, results: FitResults) -> str:
    """The page as HTML. `folder` has the runs, `data` the pictures of mistakes."""
    shipment, metric = results.shipment, results.metric
    by_time = sorted(shipment.files, key=lambda file: math.inf if file.ms is None else file.ms)
    files = [file_row(each, results) for each in by_time]
    classes = tuple(map(printable, data.classes))
    return page.render_template(
        "fit.html",
        title=printable(f"fullstride fit on {page.data_title(data)}"),
        results=results,
        shipment=shipment,
        headline=headline(results),
        other_scores=other_scores(results),
        baseline=baseline(results),
        smaller=[smaller_line(each, results, Path()) for each in shipment.smaller],
        time_line=time_line(results),
        files_plot=plots.svg(figure(results), description(results)),
        files=files,
        interval_note=page.interval_note(metric, [row["interval"] for row in files]),
        within=[within_row(each, results) for each in shares_of_budget(results)],
        candidates=candidate_rows(results)[:MAX_CANDIDATES],
        left_out=Counter(results.left_out.values()),
        **page.learning_values(learning_curves(folder, results), metric),
        split=shipment.split,
        **page.class_values(shipment.confusion, classes, shipment.class_table),
        **page.calibration_values(shipment.calibration),
        cards=mistakes(folder, data, results),
        worst=worst_images(folder, data, results),
        metric_alone=find_task(results.task).metric_alone,
        plan_rows=plan_rows(results),
        facts=data_facts(results),
        problems=data_problems(results),
    )


def figure(results: FitResults) -> Any:
    return files_figure(
        [point(each, results) for each in results.shipment.files if each.ms is not None],
        results.metric,
        results.budget,
        results.percentile,
    )


def point(file: ShippedFile, results: FitResults) -> FilePoint:
    shipment, metric = results.shipment, results.metric
    ships = shipment.tests.get(shipment.files.index(file))
    test = ships or {}
    assert file.ms is not None
    return FilePoint(
        network=printable(file.candidate),
        form=f"{file.format} {file.precision}",
        ms=file.ms,
        val=file.val[metric.name],
        measured=file.measured,
        ships=ships is not None,
        test=test.get(metric.name),
        test_interval=score_interval(metric, test) if test else None,
    )


def description(results: FitResults) -> str:
    """The plot's text alternative, for people who cannot see it."""
    files = count_of(len(results.shipment.files), "file")
    return (
        f"{results.metric.label} on the validation split against the time of an image, of "
        f"{files}; {headline(results)}; {time_line(results)}"
    )


def file_row(file: ShippedFile, results: FitResults) -> dict[str, Any]:
    metric = results.metric
    return dict(
        file=file,
        ships=results.shipment.files.index(file) in results.shipment.tests,
        score=file.val.get(metric.name),
        interval=score_interval(metric, file.val) if file.val else None,
    )


def within_row(within: Within, results: FitResults) -> dict[str, Any]:
    """The cells of a share of the budget, each a line and a small line, or None."""
    metric, times, last = results.metric, results.fastest, results.last_scores
    row: dict[str, Any] = dict(share=within.share, ms=within.ms)
    row |= dict(file=None, trained=None, published=None)
    if within.file is not None:
        file = results.shipment.files[within.file]
        row["file"] = (
            f"{file.candidate}, {file.format} {file.precision}",
            f"validation {metric.text(file.val[metric.name])}, {file.ms:.3g} ms",
        )
    if within.trained is not None:
        score = last[within.trained]
        row["trained"] = (
            within.trained,
            f"validation {metric.text(score.scores[metric.name])} after "
            f"{count_of(score.epochs, 'epoch')}, "
            f"{times[within.trained].ms:.3g} ms",
        )
    if within.published is not None:
        top1 = next(each.top1 for each in results.candidates if each.name == within.published)
        row["published"] = (
            within.published,
            f"published ImageNet top-1 {top1:.1f} %, {times[within.published].ms:.3g} ms",
        )
    return row


def candidate_rows(results: FitResults) -> list[dict[str, Any]]:
    """All candidates: finalists, then by falling epochs of training, then by time."""
    last, fastest, finalists = results.last_scores, results.fastest, results.outcome.finalists
    rows = []
    for candidate in results.candidates:
        name = candidate.name
        score, time = last.get(name), fastest.get(name)
        interval = score_interval(results.metric, score.scores) if score else None
        row = dict(candidate=candidate, time=time, score=score, interval=interval)
        rows.append(row | {"elimination_reason": elimination_reason(name, results)})

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        name, score, time = row["candidate"].name, row["score"], row["time"]
        place = finalists.index(name) if name in finalists else len(finalists)
        rank = results.metric.rank(score.scores[results.metric.name]) if score else 0.0
        return place, -(score.epochs if score else 0), -rank, time.ms if time else math.inf

    return sorted(rows, key=order)


def elimination_reason(name: str, results: FitResults) -> str:
    """Why a candidate does not ship, or its place among the finalists, in a few words."""
    if name in results.outcome.finalists:
        place = results.outcome.finalists.index(name) + 1
        return f"finalist {place} of {len(results.outcome.finalists)}"
    if name in results.outcome.failures:
        return results.outcome.failures[name]
    if name in results.last_scores and name not in results.plan.candidates:
        return "beyond the budget, trained as a teacher"
    if name in results.last_scores:
        score = results.last_scores[name]
        return f"out after rung {score.rung}{score.with_cross_validation(results.metric)}"
    if name in results.left_out:
        return results.left_out[name]
    if name not in results.fastest:
        failures = [each.failure for each in results.times if each.candidate == name]
        return next(filter(None, failures), "not timed")
    return "not within the budget"


def learning_curves(folder: Path, results: FitResults) -> dict[str, Sequence[plots.EpochRow]]:
    """The rows of the logs of the trained candidates, the finalists first."""
    names = [row["candidate"].name for row in candidate_rows(results) if row["score"]]
    logs = {name: read_log(folder / TRIALS / name, results.metric) for name in names[:MAX_CURVES]}
    return {printable(name): rows for name, rows in logs.items() if rows}


def mistakes(folder: Path, data: DataSet, results: FitResults) -> list[dict[str, Any]]:
    """The most confident wrong predictions with their pictures, if these can be read.

    Beside each picture is a saliency map of the class, by the network before its export. A clip is
    shown by one frame, without such a map.
    """
    shipment = results.shipment
    images = getattr(data, shipment.split)
    index = {name: number for number, name in enumerate(images.names)}
    if not shipment.mistakes:
        return []
    bundle = tasks.load(folder / shipment.bundle)
    pre, predictions, views = bundle.preprocessing, {}, {}
    for each in shipment.mistakes:
        if each.image not in index:
            continue
        number = index[each.image]
        try:
            pixels = page_picture(images, number, pre)
            if not pre.frames:
                views[each] = test_view(images.over(pre.background).source(number), pre)
        except UnreadableImage:
            continue
        names = printable(each.truth), printable(each.predicted)
        predictions[each] = page.Prediction(pixels, *names, each.probability)
    guesses = [bundle.classes.index(each.predicted) for each in views]
    heated = explained(bundle, [*views.values()], guesses)
    for each, picture in zip(views, heated, strict=True):
        predictions[each] = replace(predictions[each], explained=picture)
    return [
        page.card(prediction) | {"name": printable(each.image)}
        for each, prediction in predictions.items()
    ]


def worst_images(folder: Path, data: DataSet, results: FitResults) -> list[dict[str, Any]]:
    """The images with the worst scores: the truth and the prediction, drawn or as words."""
    shipment = results.shipment
    if not shipment.worst:
        return []
    images = getattr(data, shipment.split)
    index = {name: number for number, name in enumerate(images.names)}
    model = open_file(folder / shipment.model, trust=True)
    task, cards = task_of(model), []
    for each in shipment.worst[:MAX_WORST]:
        try:
            picture = images.picture(index[each.image])
            truth = task.truth(images.targets[index[each.image]], model.classes)
        except (KeyError, UnreadableImage):
            continue
        (prediction,) = predict(model, picture)
        both = truth, prediction.guesses
        drawn = [task.draw(picture, guesses, model.classes) for guesses in both]
        is_drawn = None not in drawn
        words = [", ".join(map(printable, map(str, guesses))) or "nothing" for guesses in both]
        cards.append(
            {
                "pictures": [page.shown_picture(each or picture) for each in drawn[: 1 + is_drawn]],
                "words": [] if is_drawn else words,
                "score": shown(task.metric_alone, each.score),
                "name": printable(each.image),
            }
        )
    return cards


def plan_rows(results: FitResults) -> list[tuple[str, float | None, float | None]]:
    """Stage, planned seconds and actual seconds."""
    expected = {"training": results.plan.train_s, "shipping": results.plan.ship_s}
    stages = [*results.seconds, *(name for name in expected if name not in results.seconds)]
    rows = [(name, expected.get(name), results.seconds.get(name)) for name in stages]
    planned = [row[2] for row in rows if row[1] is not None and row[2] is not None]
    return [*rows, ("training and shipping", results.plan.total_s, sum(planned) or None)]


def data_facts(results: FitResults) -> dict[str, str]:
    report = results.data
    images = ", ".join(f"{number:,} {split}" for split, number in report.images.items())
    low, middle, high = report.sides
    extremes = {"smallest class": report.smallest, "largest class": report.largest}
    return {
        "images": images,
        "classes": f"{report.classes:,}",
        **{
            what: f"{printable(name)}, {count:,} for training"
            for what, (name, count) in extremes.items()
            if report.largest[1]  # 0: targets are not classes
        },
        "shorter sides": f"{low} to {high} pixels, median {middle}",
        "channels": str(report.channels),
    }


def data_problems(results: FitResults) -> list[tuple[str, list[str]]]:
    """Problems that may make a score wrong, with the names of the first images."""
    report = results.data
    unreadable = [f"{name}: {why}" for name, why in report.unreadable.items()]
    problems = {"unreadable": ("Unreadable images", unreadable)}
    for kind in ("splits", "classes"):
        names = [
            ", ".join(
                f"{name} ({of})" for name, of in zip(pair.names, getattr(pair, kind), strict=True)
            )
            for pair in getattr(report, f"across_{kind}")
        ]
        problems[f"across_{kind}"] = f"Pairs of the same picture in two {kind}", names
    return [
        (f"{title} ({report.totals.get(kind, len(names)):,})", [*map(printable, names[:MAX_NAMES])])
        for kind, (title, names) in problems.items()
        if names
    ]
