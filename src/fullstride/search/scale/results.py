"""The results of a scaling study: JSON with all numbers, a CSV file, lines, a plot and a page."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import rich.table
from markupsafe import Markup

from fullstride.io.console import printable
from fullstride.io.records import to_json
from fullstride.io.writing import (
    PAGE,
    PLOT,
    Output,
    atomic_write,
    begins_with,
    check_output,
    json_output,
)
from fullstride.report import plots
from fullstride.report.console_tables import table
from fullstride.report.page import render_template, write
from fullstride.report.scatter import ScalingPanel, ScalingPoint, scaling_figure
from fullstride.search.scale.analysis import AxisGain, Law, NextStep, RegimeAnalysis, analyse
from fullstride.search.scale.finished import COLUMNS, Source, Training, write_trainings

JSON, CSV, PICTURE, REPORT = "scale.json", "trainings.csv", "scale.png", "report.html"
JSON_OUTPUT = json_output("the results of a scaling study", "trainings", "regimes")
CSV_OUTPUT = Output("trainings of a scaling study", ".csv", begins_with(",".join(COLUMNS).encode()))
Table = list[list[str]]


@dataclass(frozen=True, kw_only=True)
class ScaleResults:
    """All numbers of a study."""

    data_name: str
    device: str  # of the times
    budget_ms: float | None
    trainings: tuple[Training, ...]
    regimes: tuple[RegimeAnalysis, ...]  # the shortest first
    failures: Mapping[str, str] = field(default_factory=dict)  # training -> why


def check_outputs(folder: Path) -> None:
    """Raises ValueError where a file of something else would be replaced."""
    outputs = {JSON: JSON_OUTPUT, CSV: CSV_OUTPUT, PICTURE: PLOT, REPORT: PAGE}
    for name, output in outputs.items():
        check_output(folder / name, output)


def write_results(folder: Path, results: ScaleResults) -> None:
    """Write the JSON, the CSV file, the plot and the page to `folder`."""
    with atomic_write(folder / JSON, JSON_OUTPUT) as temporary:
        temporary.write_text(to_json(results))
    with atomic_write(folder / CSV, CSV_OUTPUT) as temporary:
        temporary.write_text(write_trainings(results.trainings))
    plots.save_png(figure(results), folder / PICTURE)
    write(folder / REPORT, render(results))


def figure(results: ScaleResults) -> Any:
    panels = [panel(regime) for regime in results.regimes]
    return scaling_figure(panels, results.budget_ms)


def panel(regime: RegimeAnalysis) -> ScalingPanel:
    front = {point.name for point in regime.front}
    points = [
        ScalingPoint(
            printable(each.name), each.ms, each.error, each.low, each.high, each.name in front
        )
        for each in regime.points
    ]
    return ScalingPanel(title_of(regime), points, curve(regime.saturating))


def curve(law: Law | None) -> Any:
    if law is None:
        return None
    return lambda ms: law.floor + np.exp(law.constant - law.exponent * np.log(ms))


def title_of(regime: RegimeAnalysis) -> str:
    own = regime.regime in ("", "recipe") or regime.regime.endswith("_epochs")
    return f"{regime.epochs:g} epochs" + (f" by {regime.regime}" if not own else "")


def headline(results: ScaleResults) -> str:
    """What to train next, by the longest regime."""
    longest = results.regimes[-1]
    step = longest.next
    best = f"The best of {len(longest.points)} networks is {longest.best}"
    if step is None:
        return f"{best}; no step with a predicted gain is left."
    return f"{best}; next: {step_line(step)}."


def step_line(step: NextStep) -> str:
    change = f"+{step.extra_ms:.3g} ms" if step.extra_ms > 0 else f"{step.extra_ms:.3g} ms"
    return f"{step.name}, {change}, {step.gain:.2f} points less error{span(step.low, step.high)}"


def span(low: float | None, high: float | None) -> str:
    if low is None or high is None or not math.isfinite(low + high):
        return " (interval unknown)"
    return f" ({low:.2f} to {high:.2f})"


def gain_line(gain: AxisGain) -> str:
    return (
        f"{gain.axis}: {gain.points_per_doubling:.2f} points per doubling of the time"
        f"{span(gain.low, gain.high)}, {gain.pairs} pairs"
    )


def law_line(name: str, law: Law) -> str:
    half = ""
    if law.largest is not None:
        half = (
            f"; by the cheapest {law.half} of {law.points}, the largest network's error is "
            f"{law.largest:.2f} %"
            f"{span(law.largest_low, law.largest_high)}"
        )
    return (
        f"{name}: {law.floor:.2f} % + c / ms^{law.exponent:.2f}, rmse {law.rmse:.2f} points{half}"
    )


def regime_lines(regime: RegimeAnalysis) -> Iterator[str]:
    """What the trainings of one length say, for people."""
    if regime.seed_deviation is not None:
        yield f"deviation over seeds: {regime.seed_deviation:.2f} points"
    yield from map(gain_line, regime.gains)
    if regime.saturating and regime.pure:
        yield law_line("law with a floor", regime.saturating)
        yield law_line("pure law", regime.pure)
    if regime.next:
        yield f"next (by {regime.law_by}): {step_line(regime.next)}"
    for warning in regime.warnings:
        yield f"warning: {warning}"


def points_table(regime: RegimeAnalysis) -> Table:
    """All networks, the fastest first; of the front with the test against the one before."""
    front = {point.name: point for point in regime.front}
    rows = [["network", "ms/image", "error %", "95 % interval", "seeds", "front", "p"]]
    for point in regime.points:
        p_value = front[point.name].p_value if point.name in front else None
        rows.append(
            [
                point.name,
                f"{point.ms:.3g}",
                f"{point.error:.2f}",
                f"{point.low:.2f} to {point.high:.2f}",
                str(point.seeds),
                "yes" if point.name in front else "",
                "" if p_value is None else f"{p_value:.2g}",
            ]
        )
    return rows


def steps_table(steps: Sequence[NextStep]) -> Table:
    rows = [["network", "ms/image", "extra ms", "error %", "gain", "95 % interval"]]
    for step in steps:
        interval = span(step.low, step.high).strip(" ()")
        numbers = (f"{step.ms:.3g}", f"{step.extra_ms:.3g}", f"{step.error:.2f}")
        rows.append([step.name, *numbers, f"{step.gain:.2f}", interval])
    return rows


def render(results: ScaleResults) -> str:
    """The page as HTML."""
    sections = []
    for regime in reversed(results.regimes):
        tables = [dict(caption="p: McNemar's test against the row of the front before", rows=[])]
        tables[0]["rows"] = points_table(regime)
        if regime.steps:
            caption = "Networks to train next, the most gain for its time first"
            tables.append(dict(caption=caption, rows=steps_table(regime.steps)))
        sections.append(
            dict(title=title_of(regime), lines=list(regime_lines(regime)), tables=tables)
        )
    description = headline(results)
    return render_template(
        "scale.html",
        title=printable(f"fullstride study scale on {results.data_name}"),
        headline=printable(description),
        plot=Markup(plots.svg(figure(results), description)),
        sections=sections,
        failures=results.failures,
    )


def analyse_trainings(
    source: Source, *, budget_ms: float | None = None, target_epochs: float | None = None
) -> ScaleResults:
    """The results of finished trainings alone; candidates follow from them."""
    return ScaleResults(
        data_name=source.name,
        device=source.device,
        budget_ms=budget_ms,
        trainings=tuple(source.trainings),
        regimes=analyse(
            source.trainings,
            budget_ms=budget_ms,
            target_epochs=target_epochs,
            by_time=source.by_time,
        ),
    )


def console_parts(results: ScaleResults) -> Iterator[str | rich.table.Table]:
    """The lines and tables that a command prints, the longest regime last."""
    for regime in results.regimes:
        yield title_of(regime)
        yield table(*split(points_table(regime)))
        if regime.steps:
            yield table(*split(steps_table(regime.steps)))
        yield from regime_lines(regime)
    for name, reason in results.failures.items():
        yield f"failed: {name}: {reason}"
    yield headline(results)


def split(rows: Table) -> tuple[list[str], Table]:
    return rows[0], rows[1:]
