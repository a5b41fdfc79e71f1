"""Renders a training result as a self-contained HTML file."""

import base64
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from PIL import Image

from fullstride.data.dataset import DataSet
from fullstride.io.console import count_of, printable
from fullstride.io.writing import PAGE, atomic_write
from fullstride.report import console_tables, plots
from fullstride.report.plots import EpochRow, Point
from fullstride.tasks.task import Calibration, ClassScore, ConfusionMatrix, Metric

TINY = 96  # pixels a side; a smaller picture is enlarged with sharp pixels
MAX_CLASS_ROWS = 50
DATA_FILES = (".json", ".csv", ".tsv", ".parquet")  # suffixes of files that are whole data sets
ClassTable = tuple[tuple[str, ...], ...]  # the header, and a row of cells for each class
THUMBNAIL = 256  # the most pixels a side of a picture, to keep the page small


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One network on the page. None: not trained, or not measured."""

    name: str
    data: str  # the data set of training and test
    metric: Metric  # the task's, equal for all entries of a page
    resolution: int  # pixels a side
    scores: Mapping[str, Any] = field(default_factory=dict)  # on the images of `split`
    params: int | None = None  # None for an exported file, which is not counted
    macs: int | None = None  # multiply-adds of one image
    ms_p50: float | None = None  # one image at a time
    ms_p99: float | None = None
    images_per_s: float | None = None  # in batches
    batch: int | None = None
    log: Sequence[EpochRow] = ()
    note: str = ""
    split: str = "test"  # val if the data have no test

    @property
    def score(self) -> float | None:
        """The score by `metric`."""
        return self.scores.get(self.metric.name)

    @property
    def interval(self) -> tuple[float, float] | None:
        return console_tables.score_interval(self.metric, self.scores) if self.scores else None


@dataclass(frozen=True)
class Prediction:
    """One test image with its true and predicted class."""

    picture: np.ndarray  # uint8, (H, W) or (H, W, C)
    truth: str
    predicted: str
    probability: float  # of the predicted class
    explained: np.ndarray | None = None  # `gather.explained` of the predicted class


@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a page."""

    title: str
    entries: Sequence[Entry]
    predictions: Sequence[Prediction]
    environment: Mapping[str, Any]
    notes: Sequence[str] = ()
    confusion: ConfusionMatrix | None = None  # of the best network, for `classes`
    classes: tuple[str, ...] = ()
    calibration: Calibration | None = None  # of the best network
    by_class: Sequence[ClassScore] = ()  # of the best network; (): computed from `confusion`


def render(content: Content) -> str:
    """Render the page as HTML.

    Speeds are relative to the first network without accuracy, or to the first if all have one.
    """
    if not content.entries:
        raise ValueError("nothing to report: give at least one network")
    entries = with_distinct_names(content.entries)
    trained = [entry for entry in entries if entry.score is not None]
    metric = entries[0].metric
    best = most_accurate(trained) if trained else None
    points, data = plot_points(entries)
    confusion = content.confusion
    rows = content.by_class or (confusion.by_class(content.classes) if confusion else ())
    curves = {entry.name: entry.log for entry in entries if entry.log}
    return render_template(
        "results.html",
        title=content.title,
        entries=entries,
        best=best,
        reference=next((entry for entry in entries if entry.score is None), entries[0]),
        rivals=[
            e.name for e in trained if e is not best and overlap(e.interval, best and best.interval)
        ],
        interval_note=interval_note(metric, [entry.interval for entry in entries]),
        latency_plot=plots.score_latency(points, metric, data) if points else "",
        **learning_values(curves, metric),
        **class_values(content.confusion, content.classes, worst_classes(rows)),
        **calibration_values(content.calibration),
        cards=[card(prediction) for prediction in content.predictions],
        environment=content.environment,
        notes=content.notes,
    )


def interval_note(metric: Metric, intervals: Iterable[tuple[float, float] | None]) -> str:
    """Say how the intervals of a table were computed; "" without intervals."""
    if not any(intervals):
        return ""
    kind = "Wilson's" if metric.percent_of_images else "by resampling the images (bootstrap)"
    return f"Intervals are {kind}, at 95 %. "


def data_title(data: DataSet) -> str:
    """The data's title on a page: their name, or for a file the name of the data set's folder.

    A file of annotations in COCO's format is in a folder `annotations` of the data set.
    """
    place = Path(data.where.partition("?")[0])
    if place.suffix not in DATA_FILES:
        return data.name
    folders = [folder for folder in place.parents if folder.name != "annotations"]
    return folders[0].name or data.name


def learning_values(curves: Mapping[str, Sequence[EpochRow]], metric: Metric) -> dict[str, Any]:
    """Template values for the metric and the learning curves."""
    plot = plots.learning_curves(curves, metric) if curves else ""
    return {"metric": metric, "curves_plot": plot}


def class_values(
    confusion: ConfusionMatrix | None, classes: tuple[str, ...], worst: ClassTable
) -> dict[str, Any]:
    """Template values for classes: the confusion, and the table of the worst classes."""
    plot = ""
    if confusion and len(classes) <= plots.MAX_CLASSES:
        plot = plots.heat_map(confusion, classes)
    return {"confusion_plot": plot, "class_table": worst, "classes": classes}


def calibration_values(calibration: Calibration | None) -> dict[str, Any]:
    """Template values for the calibration of probabilities."""
    plot = plots.reliability(calibration) if calibration else ""
    return {"reliability_plot": plot, "calibration": calibration}


def worst_classes(rows: Sequence[ClassScore]) -> ClassTable:
    """At most `MAX_CLASS_ROWS` of the occurring classes, the lowest F1 first; () without any."""
    worst = sorted((row for row in rows if row.f1 is not None), key=lambda row: row.f1 or 0.0)
    if not worst:
        return ()
    cells = (map(printable, console_tables.class_cells(row)) for row in worst[:MAX_CLASS_ROWS])
    return tuple(console_tables.class_columns(worst)), *map(tuple, cells)


@cache
def templates() -> Environment:
    """Jinja2 over `templates/`, which escapes every value and raises an error for a missing one."""
    environment = Environment(
        loader=PackageLoader("fullstride.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = console_tables.count, console_tables.ms, console_tables.percent
    filters = (code, count_of, times, console_tables.three_digits, *numbers)
    environment.filters |= {each.__name__: each for each in filters}
    return environment


def code(text: str) -> Markup:
    """Escape `text`, and mark the code in it, which is between backticks as in Markdown."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def render_template(name: str, **values: Any) -> str:
    """Render a template as an HTML file that loads nothing."""
    return templates().get_template(name).render(values)


def write(path: str | Path, html: str) -> None:
    """Write the page atomically, replace an earlier page, and create its parent folders."""
    with atomic_write(Path(path), PAGE) as beside:
        beside.write_bytes(html.encode("utf-8", "xmlcharrefreplace"))


def picture(entries: Sequence[Entry]) -> Figure:
    """The plot of accuracy against latency, for a README."""
    points, data = plot_points(entries)
    return plots.score_latency_figure(points, entries[0].metric, data)


def with_distinct_names(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, with a number after a name that an earlier entry has."""
    uses: Counter[str] = Counter()
    renamed = []
    for entry in entries:
        uses[entry.name] += 1
        number = uses[entry.name]
        renamed.append(replace(entry, name=f"{entry.name} ({number})") if number > 1 else entry)
    return renamed


def most_accurate(trained: Sequence[Entry]) -> Entry:
    """The entry with the best score; of ties the fastest, if all were measured."""
    ranks = [entry.metric.rank(entry.score or 0.0) for entry in trained]
    ties = [entry for entry, rank in zip(trained, ranks, strict=True) if rank == max(ranks)]
    if any(entry.ms_p50 is None for entry in ties):
        return ties[0]
    return min(ties, key=lambda entry: entry.ms_p50 or 0.0)


def overlap(a: tuple[float, float] | None, b: tuple[float, float] | None) -> bool:
    return a is not None and b is not None and a[1] >= b[0] and b[1] >= a[0]


def plot_points(entries: Sequence[Entry]) -> tuple[list[Point], str]:
    """The points of the latency plot, and the name of the data set if all networks share it."""
    points = [Point(e.name, e.ms_p50, e.score, e.interval) for e in entries if e.ms_p50 is not None]
    data = {e.data for e in entries if e.score is not None}
    return points, data.pop() if len(data) == 1 else ""


def times(ratio: float) -> str:
    return f"{ratio:.2f} ×" if ratio < 10 else f"{ratio:.0f} ×"


def shown_picture(image: Image.Image) -> dict[str, Any]:
    """Template values of an image: reduced, as a data URI."""
    pixelated, small, out = max(image.size) < TINY, image.copy(), io.BytesIO()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(out, "png")
    uri = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return {"uri": uri, "pixelated": pixelated}


def card(prediction: Prediction) -> dict[str, Any]:
    """Template values of one prediction, with its pictures as data URIs."""
    both = (prediction.picture, prediction.explained)
    shown = [Image.fromarray(np.squeeze(each)) for each in both if each is not None]
    return {
        "pictures": [*map(shown_picture, shown)],
        "truth": prediction.truth,
        "predicted": prediction.predicted,
        "probability": prediction.probability,
        "correct": prediction.truth == prediction.predicted,
    }
