"""Writes the command line's output as HTML for notebooks, and shows progress in them."""

import io
from collections.abc import Iterable, Mapping
from functools import singledispatch
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

from fullstride.io.console import UNLIMITED_WIDTH, print_parts, printable
from fullstride.latency.select import Choice, options_tie
from fullstride.measure.protocols import Measurement
from fullstride.nets.bundle import Bundle
from fullstride.report import console_tables
from fullstride.report.training_progress import epoch_line
from fullstride.tasks import TASKS, common_metric, find_task

Parts = Iterable[str | Table]


class Progress:
    """Shows the events of a study or the epochs of a training, one per call.

    In a notebook they share one display: a bar, the results so far, and the last line. Elsewhere
    everything is printed, as by the command.

    Examples:
        >>> import fullstride
        >>> progress = fullstride.Progress()
        >>> for event in fullstride.fit("digits", "runs/fit", budget_ms=1):  # doctest: +SKIP
        ...     progress(event)
        >>> bundle = fullstride.train_network(
        ...     "digits", "genet_tiny", "runs/few", steps=2, on_epoch=fullstride.Progress()
        ... )  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.results: list[str | Table] = []
        self.screen: Any = None  # IPython's handle of the display

    def __call__(self, news: Any) -> None:
        parts = list(parts_of(news))
        if not Console().is_jupyter:
            print_parts(parts)
            return
        from IPython.display import display

        shown = [*self.results, *parts]
        if isinstance(news, Mapping):
            done = news["epoch"] / news["epochs"]
        else:
            done = news.done
            self.results = self.results if news.line else shown
        bar = f'<progress value="{done:.3f}" style="width: 100%"></progress>'
        data = {"text/plain": text(shown), "text/html": f"{bar}\n{parts_html(shown)}"}
        if self.screen is None:
            self.screen = display(data, raw=True, display_id=True)
        else:
            self.screen.update(data, raw=True)


def html(shown: Any) -> str:
    """The lines and tables of an object as HTML, with escaped text."""
    return parts_html(parts_of(shown))


def parts_html(parts: Parts) -> str:
    return "\n".join(
        table_html(part) if isinstance(part, Table) else f"<p>{escape(part)}</p>" for part in parts
    )


def pretty(shown: Any, printer: Any, cycle: bool) -> None:
    """Print an object with IPython's `printer`."""
    printer.text(text(parts_of(shown)))


def text(parts: Parts) -> str:
    lines = (printable(part) if isinstance(part, str) else part for part in parts)
    look: Any = {"width": UNLIMITED_WIDTH, "color_system": None, "force_jupyter": False}
    with io.StringIO() as file:
        Console(file=file, emoji=False, **look).print(*lines, sep="\n", markup=False)
        return file.getvalue().rstrip()


def table_html(source: Table) -> str:
    head = "".join(f"<th>{escape(str(column.header))}</th>" for column in source.columns)
    rows = zip(*(column.cells for column in source.columns), strict=True)
    full = (row for row in rows if any(map(str, row)))
    body = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in full)
    lines = "".join(f"<tr>{row}</tr>" for row in (head, *body))
    return f"<table>{lines}</table>"


@singledispatch
def parts_of(shown: Any) -> Parts:
    """The lines and tables that show an object; by default its `parts`, as in a study's events."""
    return shown.parts


@parts_of.register
def _(shown: Mapping) -> Parts:
    """The row of an epoch, with the score of the task that it has."""
    metrics = (find_task(name).metric for name in TASKS)
    metric = next((m for m in metrics if f"val/{m.name}" in shown), find_task().metric)
    return [epoch_line(shown, metric)]


@parts_of.register
def _(shown: Measurement) -> Parts:
    return [console_tables.protocol_table([[shown]]), *console_tables.measurement_notes([shown])]


@parts_of.register
def _(shown: Choice) -> Parts:
    table = console_tables.selection_table(shown, options_tie)
    return [f"within {shown.budget}: {shown.best.label}", table]


@parts_of.register
def _(shown: Bundle) -> Parts:
    metric = common_metric([shown])
    scores = {split: values[metric.name] for split, values in shown.scores.items() if values}
    rows = [
        ("network", repr(shown.net)),
        ("classes", f"{len(shown.classes):,}: {', '.join(shown.classes[:5])}"),
        ("images", str(shown.preprocessing)),
        *((split, metric.text(value)) for split, value in scores.items()),
        ("weights", shown.source),
        ("licence", shown.licence or "unknown"),
    ]
    return [console_tables.table([shown.name, shown.task], rows)]
