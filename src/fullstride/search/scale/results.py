"""The results of a scaling study: JSON with all numbers, a CSV file, lines, a plot and a page."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import rich.table
from markupsafe import Markup
from matplotlib.figure import Figure

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
from fullstride.search.scale.analysis import (
    AxisGain,
    Interval,
    Law,
    NextStep,
    RegimeAnalysis,
    analyse,
)
from fullstride.search.scale.finished import COLUMNS, Source, Training, write_trainings

JSON, CSV, PICTURE, REPORT = "scale.json", "trainings.csv", "scale.png", "report.html"
OUTPUTS = {
    JSON: json_output("the results of a scaling study", "trainings", "regimes"),
    CSV: Output("trainings of a scaling study", ".csv", begins_with(",".join(COLUMNS).encode())),
    PICTURE: PLOT,
    REPORT: PAGE,
}
Table = list[list[str]]


@dataclass(frozen=True, kw_only=True)
class ScaleResults:
    data_name: str
    device: str  # of the times
    budget_ms: float | None
    trainings: tuple[Training, ...]
    regimes: tuple[RegimeAnalysis, ...]  # the shortest first
    failures: Mapping[str, str] = field(default_factory=dict)  # training -> why


def check_outputs(folder: Path) -> None:
    """Raises ValueError where a file of something else would be replaced."""
    for name, output in OUTPUTS.items():
        check_output(folder / name, output)


def write_results(folder: Path, results: ScaleResults) -> None:
    texts = {JSON: to_json(results), CSV: write_trainings(results.trainings)}
    for name, text in texts.items():
        with atomic_write(folder / name, OUTPUTS[name]) as temporary:
            temporary.write_text(text)
    plots.save_png(figure(results), folder / PICTURE)
    write(folder / REPORT, render(results))


def figure(results: ScaleResults) -> Figure:
    return scaling_figure([*map(panel, results.regimes)], results.budget_ms)


def panel(regime: RegimeAnalysis) -> ScalingPanel:
    front = {point.name for point in regime.front}
    points = [
        ScalingPoint(printable(p.name), p.ms, p.error, p.low, p.high, p.name in front)
        for p in regime.points
    ]
    law = regime.saturating
    return ScalingPanel(title_of(regime), points, law.error_at if law else None)


def title_of(regime: RegimeAnalysis) -> str:
    own = regime.regime in ("", "recipe") or regime.regime.endswith("_epochs")
    return f"{regime.epochs:g} epochs" + (f" by {regime.regime}" if not own else "")


def headline(results: ScaleResults) -> str:
    """What to train next, by the longest regime."""
    *_, longest = results.regimes
    best = f"The best of {len(longest.points)} networks is {longest.best}"
    if longest.next is None:
        return f"{best}; no step with a predicted gain is left."
    return f"{best}; next: {step_line(longest.next)}."


def step_line(step: NextStep) -> str:
    change = f"+{step.extra_ms:.3g} ms" if step.extra_ms > 0 else f"{step.extra_ms:.3g} ms"
    return f"{step.name}, {change}, {step.gain:.2f} points less error{span(step.interval)}"


def span(interval: Interval) -> str:
    if interval is None or not math.isfinite(sum(interval)):
        return " (interval unknown)"
    return " ({:.2f} to {:.2f})".format(*interval)


def gain_line(gain: AxisGain) -> str:
    return (
        f"{gain.axis}: {gain.points_per_doubling:.2f} points per doubling of the time"
        f"{span(gain.interval)}, {gain.pairs} pairs"
    )


def law_line(name: str, law: Law) -> str:
    half = ""
    if law.largest is not None:
        half = (
            f"; by the cheapest {law.half} of {law.points}, the largest network's error is "
            f"{law.largest:.2f} %{span(law.largest_interval)}"
        )
    return (
        f"{name}: {law.floor:.2f} % + c / ms^{law.exponent:.2f}, rmse {law.rmse:.2f} points{half}"
    )


def regime_lines(regime: RegimeAnalysis) -> Iterator[str]:
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
        on_front, interval = front.get(point.name), f"{point.low:.2f} to {point.high:.2f}"
        row = [point.name, f"{point.ms:.3g}", f"{point.error:.2f}", interval, str(point.seeds)]
        p_value = on_front and on_front.p_value
        row += ["yes" if on_front else "", "" if p_value is None else f"{p_value:.2g}"]
        rows.append(row)
    return rows


def steps_table(steps: Sequence[NextStep]) -> Table:
    rows = [["network", "ms/image", "extra ms", "error %", "gain", "95 % interval"]]
    for step in steps:
        times, error = (f"{step.ms:.3g}", f"{step.extra_ms:.3g}"), f"{step.error:.2f}"
        interval = span(step.interval).strip(" ()")
        rows.append([step.name, *times, error, f"{step.gain:.2f}", interval])
    return rows


def render(results: ScaleResults) -> str:
    sections = []
    for regime in reversed(results.regimes):
        tables = {"p: McNemar's test against the row of the front before": points_table(regime)}
        if regime.steps:
            caption = "Networks to train next, the most gain for its time first"
            tables[caption] = steps_table(regime.steps)
        sections.append((title_of(regime), [*regime_lines(regime)], tables))
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
    trainings, by_time = tuple(source.trainings), source.by_time
    return ScaleResults(
        data_name=source.name,
        device=source.device,
        budget_ms=budget_ms,
        trainings=trainings,
        regimes=analyse(
            trainings, budget_ms=budget_ms, target_epochs=target_epochs, by_time=by_time
        ),
    )


def console_parts(results: ScaleResults) -> Iterator[str | rich.table.Table]:
    """The lines and tables that a command prints, the longest regime last."""
    for regime in results.regimes:
        yield title_of(regime)
        head, *rows = points_table(regime)
        yield table(head, rows)
        if regime.steps:
            head, *rows = steps_table(regime.steps)
            yield table(head, rows)
        yield from regime_lines(regime)
    for name, reason in results.failures.items():
        yield f"failed: {name}: {reason}"
    yield headline(results)
