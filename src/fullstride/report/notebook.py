"""Writes what the command line prints as HTML, for notebooks."""

from collections.abc import Iterable
from functools import singledispatch
from html import escape
from typing import Any

from rich.table import Table

from fullstride.latency.select import Choice, options_tie
from fullstride.measure.protocols import Measurement
from fullstride.nets.bundle import Bundle
from fullstride.report.console_tables import (
    measurement_notes,
    protocol_table,
    selection_table,
    table,
)
from fullstride.tasks import common_metric

Parts = Iterable[str | Table]


def html(shown: Any) -> str:
    """The lines and tables of an object; all text is escaped."""
    return "\n".join(
        table_html(part) if isinstance(part, Table) else f"<p>{escape(part)}</p>"
        for part in parts_of(shown)
    )


def table_html(source: Table) -> str:
    head = "".join(f"<th>{escape(str(column.header))}</th>" for column in source.columns)
    rows = zip(*(column.cells for column in source.columns), strict=True)
    body = (
        "".join(f"<td>{escape(str(cell))}</td>" for cell in row)
        for row in rows
        if any(map(str, row))
    )
    lines = "".join(f"<tr>{row}</tr>" for row in (head, *body))
    return f"<table>{lines}</table>"


@singledispatch
def parts_of(shown: Any) -> Parts:
    """The lines and tables that show an object: its own, as events of studies have them."""
    return shown.parts


@parts_of.register
def _(shown: Measurement) -> Parts:
    return [protocol_table([[shown]]), *measurement_notes([shown])]


@parts_of.register
def _(shown: Choice) -> Parts:
    return [f"within {shown.budget}: {shown.best.label}", selection_table(shown, options_tie)]


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
    return [table([shown.name, shown.task], rows)]
