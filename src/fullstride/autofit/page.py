"""Writes the HTML page of a fit, with its choice, its numbers and its doubts."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fullstride.autofit.finalists import ShippedFile
from fullstride.autofit.halving import TRIALS
from fullstride.autofit.results import (
    PAGE,
    FitResults,
    Within,
    headline,
    interval,
    shares_of_budget,
    time_line,
    write_json,
)
from fullstride.data.dataset import DataSet
from fullstride.data.readers.decode import UnreadableImage
from fullstride.io.console import printable
from fullstride.nets.bundle import read_metadata
from fullstride.report import plots
from fullstride.report.gather import page_picture
from fullstride.report.page import (
    Prediction,
    card,
    class_values,
    data_title,
    interval_note,
    learning_values,
    render_template,
    write,
)
from fullstride.report.scatter import FilePoint, files_figure
from fullstride.train.run_folder import read_log

PICTURE = "files.png"  # the accuracy of files against their time
MAX_CURVES = 12  # candidates in the plot of learning curves, as colours and dashes repeat
MAX_CANDIDATES = 200  # rows
MAX_NAMES = 10  # of images with a problem


def write_results(folder: Path, data: DataSet, results: FitResults) -> Path:
    """Write fit.json, the page of a fit and its plot to its folder. Returns the page's path."""
    write_json(folder, results)
    write(folder / PAGE, render(folder, data, results))
    plots.save_png(figure(results), folder / PICTURE)
    return folder / PAGE


def render(folder: Path, data: DataSet, results: FitResults) -> str:
    """The page as HTML. `folder` has the runs, `data` the pictures of mistakes."""
    shipment, metric = results.shipment, results.metric
    files = [file_row(each, results) for each in sorted(shipment.files, key=time_of)]
    classes = tuple(map(printable, data.classes))
    split = shipment.test_split or "val"
    return render_template(
        "fit.html",
        title=printable(f"fullstride fit on {data_title(data)}"),
        results=results,
        shipment=shipment,
        headline=headline(results),
        time_line=time_line(results),
        files_plot=Markup(plots.svg(figure(results), description(results))),
        files=files,
        interval_note=interval_note(metric, [row["interval"] for row in files]),
        within=[within_row(each, results) for each in shares_of_budget(results)],
        candidates=candidate_rows(results)[:MAX_CANDIDATES],
        left_out=Counter(results.left_out.values()),
        **learning_values(learning_curves(folder, results), metric),
        split=split,
        **class_values(shipment.confusion, classes),
        cards=mistakes(folder, data, results),
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
    ships = file is shipment.file
    test = shipment.test if ships else {}
    assert file.ms is not None
    return FilePoint(
        network=printable(file.candidate),
        form=f"{file.format} {file.precision}",
        ms=file.ms,
        val=file.val[metric.name],
        measured=file.measured,
        ships=ships,
        test=test.get(metric.name),
        test_interval=interval(metric, test) if test else None,
    )


def description(results: FitResults) -> str:
    """Of the plot, for those who cannot see it."""
    return (
        f"{results.metric.label} on the validation split against the time of an image, of "
        f"{len(results.shipment.files)} files; {headline(results)}; {time_line(results)}"
    )


def time_of(file: ShippedFile) -> float:
    return float("inf") if file.ms is None else file.ms


def file_row(file: ShippedFile, results: FitResults) -> dict[str, Any]:
    metric = results.metric
    return dict(
        file=file,
        ships=file is results.shipment.file,
        score=file.val.get(metric.name),
        interval=interval(metric, file.val) if file.val else None,
    )


def within_row(within: Within, results: FitResults) -> dict[str, Any]:
    """Cells of what a share of the budget buys, each a line and a small line, or None."""
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
            f"validation {metric.text(score.scores[metric.name])} after {score.epochs} epochs, "
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
    """All candidates: finalists, then those that trained the longest, then the others by time."""
    last, fastest, finalists = results.last_scores, results.fastest, results.outcome.finalists
    rows = []
    for candidate in results.candidates:
        name = candidate.name
        score, time = last.get(name), fastest.get(name)
        rows.append(
            dict(
                candidate=candidate,
                time=time,
                score=score,
                interval=interval(results.metric, score.scores) if score else None,
                elimination_reason=elimination_reason(name, results),
            )
        )

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        name, score, time = row["candidate"].name, row["score"], row["time"]
        place = finalists.index(name) if name in finalists else len(finalists)
        rank = results.metric.rank(score.scores[results.metric.name]) if score else 0.0
        return place, -(score.epochs if score else 0), -rank, time.ms if time else float("inf")

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
        return f"out after rung {results.last_scores[name].rung}"
    if name in results.left_out:
        return results.left_out[name]
    if name not in results.fastest:
        failures = [each.failure for each in results.times if each.candidate == name]
        return next(filter(None, failures), "not timed")
    return "not within the budget"


def learning_curves(folder: Path, results: FitResults) -> dict[str, Sequence[plots.EpochRow]]:
    """The rows of the logs of the candidates that trained, those of finalists first."""
    names = [row["candidate"].name for row in candidate_rows(results) if row["score"]]
    logs = {name: read_log(folder / TRIALS / name, results.metric) for name in names[:MAX_CURVES]}
    return {printable(name): rows for name, rows in logs.items() if rows}


def mistakes(folder: Path, data: DataSet, results: FitResults) -> list[dict[str, Any]]:
    """The most confident wrong predictions with their pictures, of those that can be read."""
    shipment = results.shipment
    images = data.test if shipment.test_split else data.val
    index = {name: number for number, name in enumerate(images.names)}
    pre = read_metadata(folder / shipment.bundle).preprocessing
    cards = []
    for each in shipment.mistakes:
        if each.image not in index:
            continue
        try:
            pixels = page_picture(images, index[each.image], pre)
        except UnreadableImage:
            continue
        names = printable(each.truth), printable(each.predicted)
        shown = card(Prediction(pixels, *names, each.probability))
        cards.append(shown | {"name": printable(each.image)})
    return cards


def plan_rows(results: FitResults) -> list[tuple[str, float | None, float | None]]:
    """Stage, seconds by the plan and seconds that it took."""
    expected = {"training": results.plan.train_s, "shipping": results.plan.ship_s}
    stages = [*results.seconds, *(name for name in expected if name not in results.seconds)]
    rows = [(name, expected.get(name), results.seconds.get(name)) for name in stages]
    planned = [row[2] for row in rows if row[1] is not None and row[2] is not None]
    return [*rows, ("training and shipping", results.plan.total_s, sum(planned) or None)]


def data_facts(results: FitResults) -> dict[str, str]:
    report = results.data
    images = ", ".join(f"{number:,} {split}" for split, number in report.images.items())
    low, middle, high = report.sides
    return {
        "images": images,
        "classes": f"{report.classes:,}",
        "smallest class": f"{printable(report.smallest[0])}, {report.smallest[1]:,} for training",
        "largest class": f"{printable(report.largest[0])}, {report.largest[1]:,} for training",
        "shorter sides": f"{low} to {high} pixels, median {middle}",
        "channels": str(report.channels),
    }


def data_problems(results: FitResults) -> list[tuple[str, list[str]]]:
    """What may make a score wrong, with the names of the first images."""
    report = results.data
    kinds = [
        (
            "unreadable",
            "Unreadable images",
            [f"{name}: {why}" for name, why in report.unreadable.items()],
        ),
        (
            "across_splits",
            "Pairs of the same picture in two splits",
            [
                f"{each.names[0]} ({each.splits[0]}), {each.names[1]} ({each.splits[1]})"
                for each in report.across_splits
            ],
        ),
        (
            "across_classes",
            "Pairs of the same picture in two classes",
            [
                f"{each.names[0]} ({each.classes[0]}), {each.names[1]} ({each.classes[1]})"
                for each in report.across_classes
            ],
        ),
    ]
    return [
        (f"{title} ({report.totals.get(kind, len(names)):,})", [*map(printable, names[:MAX_NAMES])])
        for kind, title, names in kinds
        if names
    ]
