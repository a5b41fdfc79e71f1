"""Renders what `choose` and `bench` print as HTML files, with a plot of the times."""

from collections.abc import Sequence
from dataclasses import asdict

from fullstride.io.console import count_of, printable
from fullstride.latency.select import Option, Selection, options_tie
from fullstride.measure.protocols import Measurement
from fullstride.report import plots
from fullstride.report.console_lines import left_out_line, selection_lines
from fullstride.report.console_tables import measurement_notes, ms, protocol_cells, three_digits
from fullstride.report.page import render_template
from fullstride.report.scatter import choice_figure, kind_of, measured_figure, name_of

Cell = tuple[str, str]  # a value, and what stands below it in small letters


def choice_page(selection: Selection) -> str:
    """The page of a choice: the plot, the front, the neighbours of the best, what to measure."""
    choice, profile = selection.choice, selection.profile
    where = f"{profile.name}, {choice.budget.conditions}"
    first, *lines = selection_lines(choice, profile, options_tie)
    headline = first.partition(": ")[2]
    if selection.left_out:
        lines.append(left_out_line(selection))
    best = choice.best.label
    columns = ["network", "published top-1", "one image", "within the budget"]
    budget_ms = choice.budget.ms_per_image
    rows = [
        option_cells(
            option,
            budget_ms,
            is_best=option.label == best,
            is_tied=bool(number) and options_tie(option, choice.front[number - 1]),
        )
        for number, option in enumerate(choice.front)
    ]
    return render_template(
        "times.html",
        title=f"The most accurate network within {ms(budget_ms)} an image",
        headline=printable(headline),
        heading="Published accuracy against time",
        plot=plots.svg(choice_figure(selection.options, choice, where), headline),
        caption="Up and to the left is better. No faster network is as accurate as one on the "
        "front. Hollow markers are estimates, with their 90 % interval on the front.",
        sections=[("The front, the fastest first", [], [("", columns, rows)])],
        notes=[*map(printable, lines)],
        environment={},
    )


def option_cells(option: Option, budget_ms: float, *, is_best: bool, is_tied: bool) -> list[Cell]:
    network, time = option.network, option.estimate
    about = [f"{network.resolution} pixels", network.source, network.note]
    about += ["the best"] * is_best + ["a tie with the row above"] * is_tied
    within = "yes" if option.ms <= budget_ms else "no"
    doubt, how = "", option.by
    if option.by == "estimated":
        how += f", {three_digits(time.low)} to {three_digits(time.high)}"
        doubt = f"with a probability of {100 * option.probability_within(budget_ms):.0f} %"
    return [
        (printable(network.name), printable(", ".join(filter(None, about)))),
        (f"{network.top1:g} %", ""),
        (ms(option.ms), how),
        (within, doubt),
    ]


def bench_page(rows: Sequence[Measurement], channels: int | None = None) -> str:
    """The page of measurements: the plot of all, a table for each protocol, and the conditions."""
    protocols = dict.fromkeys(row.protocol.name for row in rows)
    first = [row for row in rows if kind_of(row) == kind_of(rows[0])]
    fastest = max(first, key=lambda row: row.images_per_s)
    networks = count_of(len({row.name for row in rows}), "network")
    headline = (
        f"{name_of(fastest)} is the fastest of {networks}: {ms(1e3 / fastest.images_per_s)} an "
        f"image by the protocol {fastest.protocol.name}, on {fastest.environment.device}."
    )
    sections = []
    for protocol in protocols:
        same = [row for row in rows if row.protocol.name == protocol]
        (_, _, _, *columns), cells = protocol_cells([same])
        named = [
            [(name_of(row), about(row)), *((cell, "") for cell in line)]
            for row, (_, _, _, *line) in zip(same, cells, strict=True)
        ]
        sections.append((f"Protocol {protocol}", [], [("", ["network", *columns], named)]))
    return render_template(
        "times.html",
        title=printable(f"Times of {networks}"),
        headline=printable(headline),
        heading="The time of one image",
        plot=plots.svg(measured_figure(rows), headline),
        caption="To the left is better. A marker is the median, and its bar encloses 80 % of the "
        "calls (online, genet) or of the rounds (other protocols).",
        sections=sections,
        notes=[*map(printable, measurement_notes(rows, channels))],
        environment=asdict(rows[0].environment),
    )


def about(row: Measurement) -> str:
    parts = [row.protocol.work, f"batch {row.protocol.batch}", printable(row.runtime)]
    return ", ".join(filter(None, parts))
