"""What do the papers' figures look like? One plot each, and a page of all with tooltips.

Filled circles are published numbers, diamonds measured ones, hollow circles estimates. Tooltips are
CSS and need no script.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fullstride.latency.profiles import Profile
from fullstride.outputs import PAGE, PLOT
from fullstride.papers import figures as paper_figures
from fullstride.papers.block_plot import block_figure
from fullstride.papers.block_study import BlockTime
from fullstride.papers.figures import BLOCKS_TITLE, GENET, Dot, How, Plan
from fullstride.papers.measured import read_bench
from fullstride.report import plots
from fullstride.report.format import three_digits
from fullstride.report.page import render_template, write
from fullstride.writing import atomic_write, check_output

MARKS: dict[How, dict[str, Any]] = {
    "published": dict(marker="o", ms=7),
    "measured": dict(marker="D", ms=7),
    "estimated": dict(marker="o", ms=7, mfc="none"),
}
COLOURS = (*plots.COLOURS, "#8a63b8", "#7d8471", "#b0703c")  # GENet's Table 7 has nine families
FULL_NAMES = 12  # up to so many networks are labelled in full; with more, the legend names families
PIXELS = 900  # width of a PNG


@dataclass(frozen=True)
class Spot:
    """The place of a tooltip, in data coordinates of `axes`."""

    figure: Figure
    axes: Axes
    x: float
    y: float
    words: tuple[str, ...]  # the lines of the tooltip


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure with its caption, tooltips and table."""

    title: str
    caption: str
    figure: Figure
    spots: Sequence[Spot]
    rows: Sequence[Sequence[str]]  # its numbers as a table, the first row its head


def write_figures(
    keys: Sequence[str], profiles: Sequence[Profile], bench: Sequence[Path], out: Path
) -> Iterator[tuple[Path, str]]:
    """Write the figures `keys`, all if empty, into the folder `out`, and at last a page with them.

    Yields each path with the number of its points by their source. `bench` are files with
    measurements. Raises ValueError where `out` is a file.
    """
    measured = read_bench(bench, paper_figures.networks())
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder with --out")
    keys, file = keys or paper_figures.KEYS, out / "figures.html"
    for path in (out / f"{key}.png" for key in keys):
        check_output(path, PLOT)
    check_output(file, PAGE)
    drawn = []
    for key in keys:
        if key == paper_figures.BLOCKS:
            rows, how, place = paper_figures.blocks(profiles, measured)
            drawn.append(blocks(rows, how, place))
            counts = {how: len(rows)}
        else:
            plan = paper_figures.PLANS[key]
            dots = list(paper_figures.dots(plan, profiles, measured))
            drawn.append(scatter(plan, dots))
            counts = Counter(dot.how for dot in dots)
        path = out / f"{key}.png"
        with atomic_write(path, PLOT) as beside:
            beside.write_bytes(png(drawn[-1]))
        yield path, ", ".join(f"{count} {how}" for how, count in counts.items())
    write(file, page(drawn))
    yield file, "all figures"


def scatter(plan: Plan, dots: Sequence[Dot]) -> Drawn:
    """Plot a figure. The points of one network share their height; the first one is labelled."""
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure((9.2, 6.0), layout="constrained")
        axes = figure.subplots()
        axes.set_title(plan.title, fontsize=10, parse_math=False)
        plots.scale_latency(axes, [end for dot in dots for end in dot.span or (dot.x,)])
        axes.set_xlabel(plan.x_label)
        colours = dict(zip(dict.fromkeys(dot.family for dot in dots), cycle(COLOURS), strict=False))
        names = labels(dots)
        first = {dot.name: dot for dot in reversed(dots)}
        points = [plots.Point(names[d.name] if d is first[d.name] else "", d.x, d.y) for d in dots]
        if plan.y == "top-1":
            plots.scale_accuracy(axes, points, strip=False)
            axes.set_ylabel("published top-1 on ImageNet (%)")
        else:
            scale_macs(axes)
        for family, colour in colours.items():
            line = [(d.x, d.y) for d in dots if d.family == family and d.how == "published"]
            axes.plot(*zip(*line, strict=True), color=colour, lw=1, alpha=0.35, zorder=1)
        for dot in dots:
            colour = colours[dot.family]
            if dot.span:
                axes.plot(dot.span, [dot.y] * 2, color=colour, lw=1.2, alpha=0.3, zorder=1)
            axes.plot(dot.x, dot.y, color=colour, ls="", **MARKS[dot.how])
        legends(axes, dots, colours if names.keys() != set(names.values()) else {})
        own = {point: colours[dot.family] for point, dot in zip(points, dots, strict=True)}
        plots.label(figure, axes, points, own)
    hows = dict.fromkeys(dot.how for dot in dots)
    caption = f"After {plan.title.partition(':')[0]}, {plan.paper}. {plan.note} ".replace("  ", " ")
    caption += "Nothing is estimated: the profiles have no such times." * (
        hows.keys() == {"published"}
    )
    spots = [Spot(figure, axes, dot.x, dot.y, words(dot, plan)) for dot in dots]
    return Drawn(
        title=plan.title, caption=caption, figure=figure, spots=spots, rows=table(dots, plan)
    )


def scale_macs(axes: Axes) -> None:
    axes.set_yscale("log")
    plots.plain_ticks(axes.yaxis)
    axes.set_ylabel("multiply-adds of one image (G)")


def labels(dots: Sequence[Dot]) -> dict[str, str]:
    """Name -> label. With many networks, the family is left out where it has several of them."""
    families = Counter(dot.family for dot in {dot.name: dot for dot in dots}.values())
    many = families.total() > FULL_NAMES
    return {
        d.name: d.name.removeprefix(f"{d.family}-") if many and families[d.family] > 1 else d.name
        for d in dots
    }


def legends(axes: Axes, dots: Sequence[Dot], colours: Mapping[str, str]) -> None:
    """A legend of origins below the axes, and one of families inside them if `colours` has any."""
    if colours:
        lines = [Line2D([], [], color=colour, marker="o", lw=1) for colour in colours.values()]
        look: Any = dict(loc="lower right", frameon=False, fontsize=9, labelcolor="linecolor")
        axes.add_artist(axes.legend(lines, [*colours], **look))
    hows: dict[str, How] = {
        f"{dot.how}: {dot.place}" + ", bar: 90 % interval" * bool(dot.span): dot.how for dot in dots
    }
    marks = [Line2D([], [], color=plots.INK, ls="", **MARKS[how]) for how in hows.values()]
    below = axes.legend(
        marks, [*hows], loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False, fontsize=9
    )
    for text in below.get_texts():
        text.set_parse_math(False)


def png(drawn: Drawn) -> bytes:
    return plots.png(drawn.figure, dpi=round(PIXELS / drawn.figure.get_figwidth()))


def words(dot: Dot, plan: Plan) -> tuple[str, ...]:
    at = f" at {dot.resolution} x {dot.resolution}" if dot.resolution else ""
    span = " (90 % interval {} to {})".format(*map(three_digits, dot.span)) if dot.span else ""
    height = (
        f"{three_digits(dot.y)} % top-1"
        if plan.y == "top-1"
        else f"{three_digits(dot.y)} G multiply-adds"
    )
    return (
        f"{dot.name}{at}",
        f"{dot.how}: {three_digits(dot.x)} {plan.quantity}{span}",
        dot.source,
        f"{height}: {dot.y_source}",
    )


def table(dots: Sequence[Dot], plan: Plan) -> list[list[str]]:
    """One row per network, with separate columns for published, measured and estimated numbers."""
    hows: list[How] = list(dict.fromkeys(dot.how for dot in dots))
    values: dict[tuple[str, str, str], dict[How, str]] = {}
    for dot in dots:
        span = " ({} to {})".format(*map(three_digits, dot.span)) if dot.span else ""
        key = dot.name, str(dot.resolution or ""), three_digits(dot.y)
        values.setdefault(key, {})[dot.how] = three_digits(dot.x) + span
    height = "top-1 %" if plan.y == "top-1" else "MACs G"
    head = ["network", "pixels", height, *(f"{how}: {plan.quantity}" for how in hows)]
    return [
        head,
        *([*key, *(numbers.get(how, "") for how in hows)] for key, numbers in values.items()),
    ]


def blocks(rows: Sequence[BlockTime], how: How, place: str) -> Drawn:
    """GENet's block study; tooltips and table have the times of the upper row."""
    figure = block_figure(rows, f"{BLOCKS_TITLE}: {how}, {place}")
    sides = sorted({row.resolution for row in rows}, reverse=True)
    kind = "10 to 90 % of rounds" if how == "measured" else "90 % interval"
    spots, table_rows = [], [["kind", "ratio", "width", "map", f"{how}: ms per image", kind]]
    for row in rows:
        ms, span = (
            three_digits(row.ms_per_image),
            f"{three_digits(row.ms_low)} to {three_digits(row.ms_high)}",
        )
        size = f"width {row.width}, {row.resolution} x {row.resolution}"
        lines = (
            f"{row.kind} ratio {row.ratio:g}, {size}",
            f"{how}: {ms} ms per image ({kind} {span})",
            place,
        )
        axes = figure.axes[sides.index(row.resolution)]
        spots.append(Spot(figure, axes, row.width, row.ms_per_image, lines))
        table_rows.append(
            [row.kind, f"{row.ratio:g}", str(row.width), str(row.resolution), ms, span]
        )
    caption = f"After GENet, Figure 3, {GENET}. Stacks of four blocks, {how}: {place}. "
    caption += "The paper does not print its times."
    return Drawn(title=BLOCKS_TITLE, caption=caption, figure=figure, spots=spots, rows=table_rows)


def page(figures: Sequence[Drawn]) -> str:
    """All figures as one HTML file that loads nothing."""
    return render_template(
        "figures.html", title="The papers' figures", figures=[section(drawn) for drawn in figures]
    )


def section(drawn: Drawn) -> dict[str, Any]:
    """The values that the template shows of one figure."""
    description = f"{drawn.title}. " + "; ".join(", ".join(spot.words[:2]) for spot in drawn.spots)
    svg = Markup(
        plots.svg(drawn.figure, description)
    )  # lays the figure out, which places the markers
    tooltips = []
    for spot in drawn.spots:
        left, top = where(spot)
        tooltips.append(dict(left=left, top=top, lines=spot.words))
    return dict(
        title=drawn.title, caption=drawn.caption, rows=drawn.rows, svg=svg, tooltips=tooltips
    )


def where(spot: Spot) -> tuple[float, float]:
    """Percent of the figure from its left and its upper end."""
    x, y = spot.axes.transData.transform((spot.x, spot.y))
    width, height = spot.figure.bbox.size
    return 100 * x / width, 100 * (1 - y / height)
