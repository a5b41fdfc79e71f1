"""Draws the papers' figures from published, measured and estimated points, each with its source.

A measured network is not estimated. No number is read off the papers' images.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fullstride.io.writing import PAGE, PLOT, check_output
from fullstride.latency.devices import named_work
from fullstride.latency.network_times import estimates
from fullstride.latency.profiles import Profile
from fullstride.measure.operators import Operators
from fullstride.papers import block_study
from fullstride.papers.lines import QUANTITIES
from fullstride.papers.suite import OF_MS, Bench, Timed, read_bench
from fullstride.report import plots
from fullstride.report.console_tables import three_digits
from fullstride.report.page import render_template, write
from fullstride.tables import PRINTED, Published, latencies, published, speeds

How = Literal["published", "measured", "estimated"]
BATCH = 64  # images, of estimates: the batch of GENet's figures, which also fills a GPU in training
TRESNET, RESNET_RS, GENET = "arXiv:2003.13630", "arXiv:2103.07579", "arXiv:2006.14090"
GENET_PLACE = "V100 in fp16 at batch 64"


@dataclass(frozen=True)
class FigurePlan:
    title: str
    paper: str
    quantity: str  # of x, one of OF_MS
    tables: tuple[str, ...] = ()  # of speed.csv; GENet's figures use latency_v100_fp16.csv
    y: Literal["top-1", "MACs"] = "top-1"
    note: str = ""


X_LABELS = {
    "training images/s": "training, images a second (to the right is better)",
    "inference images/s": "inference, images a second (to the right is better)",
    "seconds per 128 images": "training, seconds per 128 images (to the left is better)",
    "ms per image": "inference, ms per image (to the left is better)",
}
SPEED_TABLES = ("TResNet 1", "TResNet 3")
TPU = "Names end with depth and resolution. Times are of the V100, not of the TPU."
COUNTED = "Multiply-adds at each network's resolution, counted here. FLOPs are twice as many."
MISSING = "DNANet, DFNet, OFANet and MobileNetV2-0.25 are not available here: published only."
PLANS = {
    "tresnet-4": FigurePlan(
        "TResNet, Figure 4: top-1 against speed of training",
        TRESNET,
        "training images/s",
        SPEED_TABLES,
    ),
    "tresnet-5": FigurePlan(
        "TResNet, Figure 5: top-1 against speed of inference",
        TRESNET,
        "inference images/s",
        SPEED_TABLES,
    ),
    "resnet-rs-4": FigurePlan(
        "ResNet-RS, Figure 4: top-1 against time of training",
        RESNET_RS,
        "seconds per 128 images",
        ("ResNet-RS 7",),
        note=TPU,
    ),
    "genet-2": FigurePlan(
        "GENet, Figure 2: multiply-adds are not time", GENET, "ms per image", y="MACs", note=COUNTED
    ),
    "genet-5": FigurePlan(
        "GENet, Figure 5: top-1 against time", GENET, "ms per image", note=MISSING
    ),
}
BLOCKS = "genet-3"
BLOCKS_TITLE = "GENet, Figure 3: which block is fast at which width"
KEYS = ("tresnet-4", "tresnet-5", "resnet-rs-4", "genet-2", BLOCKS, "genet-5")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A network with its published time or throughput."""

    name: str  # as its paper prints it
    zoo: str | None  # its name here; None: cannot be built
    resolution: int | None  # pixels a side; None: not printed
    value: float
    top1: float  # per cent
    top1_source: str
    source: str
    place: str

    @property
    def family(self) -> str:
        match = re.match(r"(SE-)?\w+(-RS)?", self.name)
        assert match
        return match[0]


@dataclass(frozen=True)
class Dot:
    """One network in a figure."""

    line: Line
    y: float
    y_source: str
    x: float
    how: How  # the origin of `x`
    place: str  # device and batch of `x`, for the legend
    source: str  # of `x`, complete
    span: tuple[float, float] | None = None  # 90 % interval of an estimated `x`

    @property
    def name(self) -> str:
        return self.line.name

    @property
    def value_and_span(self) -> tuple[str, str]:
        """As text; without an interval the second is empty."""
        span = "{} to {}".format(*map(three_digits, self.span)) if self.span else ""
        return three_digits(self.x), span


@cache
def operators(name: str, resolution: int) -> Operators:
    return named_work(name, resolution).operators


def lines(plan: FigurePlan) -> list[Line]:
    """All networks of a figure that the tables contain, in the papers' order."""
    if plan.paper == GENET:
        return genet_lines()
    by_key: dict[tuple[str, int], Line] = {}
    scores = [*published(), *published("timm")]
    for row in speeds():
        if row.table in plan.tables and row.quantity == plan.quantity:
            has_sizes = plan.paper == RESNET_RS and "RS" in row.line
            score = scored(scores, PRINTED[row.line], row.resolution, plan.paper)
            line = Line(
                name=f"{row.line}-{row.resolution}" if has_sizes else row.line,
                zoo=PRINTED[row.line],
                resolution=row.resolution,
                value=row.value,
                top1=score.top1,
                top1_source=score.source,
                source=row.source,
                place=row.source.partition(", ")[2],
            )
            by_key.setdefault((row.line, row.resolution), line)
    return list(by_key.values())


def genet_lines() -> list[Line]:
    """The networks of GENet's Table 7; other tables have the resolutions of some."""
    sides = {row.line: row.resolution for row in speeds() if row.table.startswith("GENet")}
    return [
        Line(
            name=row.name,
            zoo=PRINTED[row.name] if row.name in sides else None,
            resolution=sides.get(row.name),
            value=row.ms_per_image,
            top1=row.top1,
            top1_source=f"{GENET} Table 7",
            source=f"{GENET} Table 7, {GENET_PLACE}",
            place=GENET_PLACE,
        )
        for row in latencies("v100_fp16")
        if row.batch == BATCH
    ]


def networks() -> set[tuple[str | None, int | None]]:
    return {(line.zoo, line.resolution) for plan in PLANS.values() for line in lines(plan)}


def scored(scores: Sequence[Published], zoo: str, resolution: int, paper: str) -> Published:
    """The accuracy that the same paper publishes."""
    own = (row for row in scores if row.source.startswith(paper))
    return next(row for row in own if (row.name, row.resolution) == (zoo, resolution))


def height(line: Line, plan: FigurePlan) -> tuple[float, str]:
    """The y value of a network, and the source."""
    if plan.y == "top-1":
        return line.top1, line.top1_source
    assert line.zoo is not None
    assert line.resolution is not None
    return operators(line.zoo, line.resolution).total_macs / 1e9, "counted here"


def dots(plan: FigurePlan, profiles: Sequence[Profile], bench: Bench) -> Iterator[Dot]:
    """Published points, then measured ones, then estimates by the first profile that has them."""
    selected = [line for line in lines(plan) if plan.y == "top-1" or line.zoo]
    heights = {line: height(line, plan) for line in selected}
    for line in selected:
        yield Dot(line, *heights[line], line.value, "published", line.place, line.source)
    rest: dict[Line, Operators] = {}
    for line in selected:
        if timed := fastest(bench.times, line, plan.quantity):
            yield Dot(line, *heights[line], timed.value, "measured", timed.place, timed.way)
        elif line.zoo and line.resolution:
            rest[line] = operators(line.zoo, line.resolution)
    training, convert = QUANTITIES[plan.quantity][1] == "training", OF_MS[plan.quantity]
    able = (profile for profile in profiles if profile.training or not training)
    profile = next(able, None)
    if not profile or not rest:
        return
    place, batches = place_of(profile), [BATCH] * len(rest)
    results = estimates([*rest.values()], profile, batches, training=training)
    for line, one in zip(rest, results, strict=True):
        low, high = sorted((convert(one.low), convert(one.high)))
        x, source = convert(one.ms_per_image), f"{place}, profile {profile.name}"
        yield Dot(line, *heights[line], x, "estimated", place, source, (low, high))


def place_of(profile: Profile) -> str:
    return f"{profile.device}, {profile.machine.runtime}, {profile.precision}, batch {BATCH}"


def fastest(times: Sequence[Timed], line: Line, quantity: str) -> Timed | None:
    key = line.zoo, line.resolution, quantity
    candidates = [t for t in times if (t.zoo, t.resolution, t.quantity) == key]
    choose = max if "images/s" in quantity else min
    return choose(candidates, key=lambda timed: timed.value, default=None)


def blocks(
    profiles: Sequence[Profile], bench: Bench
) -> tuple[list[block_study.BlockTime], How, str]:
    """GENet's block study, measured or else estimated by the first profile; origin and device."""
    if bench.blocks:
        return list(bench.blocks), "measured", bench.place
    if not profiles:
        raise ValueError(
            "no times of blocks: name a profile, or a blocks.json of `fullstride study blocks`"
        )
    rows = block_study.study(
        block_study.stacks(("XX", "BL", "DW"), (64, 128, 256, 512), (56, 28, 14, 7)),
        block_study.estimated(profiles[0], BATCH),
    )
    return list(rows), "estimated", f"{place_of(profiles[0])}, profile {profiles[0].name}"


# One plot each, and a page of all. Filled circles are published numbers, diamonds measured ones,
# hollow circles estimates. Tooltips are CSS and need no script.

SHAPES: dict[How, str] = {"published": "o", "measured": "D", "estimated": "o"}
COLOURS = (*plots.COLOURS, "#8a63b8", "#7d8471", "#b0703c")  # GENet's Table 7 has nine families
FULL_NAMES = 12  # up to so many networks are labelled in full; with more, the legend names families
PIXELS = 900  # width of a PNG


@dataclass(frozen=True)
class Spot:
    """The place of a tooltip, in data coordinates of `axes`."""

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
    """Write the figures `keys`, by default all, into the folder `out`, and then a page with them.

    Yields each path with the number of points by source. `bench` are files with measurements.
    Raises ValueError if `out` is a file.
    """
    measured = read_bench(bench, networks())
    keys, file = keys or KEYS, out / "figures.html"
    for path in (out / f"{key}.png" for key in keys):
        check_output(path, PLOT)
    check_output(file, PAGE)
    drawn = []
    for key in keys:
        if key == BLOCKS:
            rows, how, place = blocks(profiles, measured)
            drawn.append(draw_blocks(rows, how, place))
            counts = {how: len(rows)}
        else:
            plan = PLANS[key]
            shown = list(dots(plan, profiles, measured))
            drawn.append(scatter(plan, shown))
            counts = Counter(dot.how for dot in shown)
        path = out / f"{key}.png"
        figure = drawn[-1].figure
        plots.save_png(figure, path, dpi=round(PIXELS / figure.get_figwidth()))
        yield path, ", ".join(f"{count} {how}" for how, count in counts.items())
    write(file, page(drawn))
    yield file, "all figures"


def scatter(plan: FigurePlan, dots: Sequence[Dot]) -> Drawn:
    """Plot a figure. The points of one network share their height; the first one is labelled."""
    families = dict.fromkeys(dot.line.family for dot in dots)
    colours = dict(zip(families, cycle(COLOURS), strict=False))
    with plots.drawing(9.2, 6.0) as (figure, axes):
        axes.set_title(plan.title, fontsize=10, parse_math=False)
        plots.scale_latency(axes, [end for dot in dots for end in dot.span or (dot.x,)])
        axes.set_xlabel(X_LABELS[plan.quantity])
        names = labels(dots)
        first = {dot.name: dot for dot in reversed(dots)}
        points = [
            plots.Point(names[d.name] if d is first[d.name] else "", d.x, d.y, span=d.span)
            for d in dots
        ]
        if plan.y == "top-1":
            plots.scale_accuracy(axes, points, strip=False)
            axes.set_ylabel("published top-1 on ImageNet (%)")
        else:
            axes.set_yscale("log")
            plots.plain_ticks(axes.yaxis)
            axes.set_ylabel("multiply-adds of one image (G)")
        for family, colour in colours.items():
            line = [(d.x, d.y) for d in dots if d.line.family == family and d.how == "published"]
            axes.plot(*zip(*line, strict=True), color=colour, lw=1, alpha=0.35, zorder=1)
        for dot in dots:
            look: Any = {"colour": colours[dot.line.family], "filled": dot.how != "estimated"}
            mark = plots.Mark(at=(dot.x, dot.y), shape=SHAPES[dot.how], across=dot.span, **look)
            mark.draw(axes)
        legends(axes, dots, colours if names.keys() != set(names.values()) else {})
        own = {point: colours[dot.line.family] for point, dot in zip(points, dots, strict=True)}
        plots.label(figure, axes, points, own)
    caption = f"After {plan.title.partition(':')[0]}, {plan.paper}. {plan.note} ".replace("  ", " ")
    if {dot.how for dot in dots} == {"published"}:
        caption += "Nothing is estimated: the profiles have no such times."
    spots = [Spot(axes, dot.x, dot.y, words(dot, plan)) for dot in dots]
    rows = table(dots, plan)
    return Drawn(title=plan.title, caption=caption, figure=figure, spots=spots, rows=rows)


def labels(dots: Sequence[Dot]) -> dict[str, str]:
    """Name -> label; with many networks, without the family if it has several."""
    family = {dot.name: dot.line.family for dot in dots}
    count = Counter(family.values())
    if count.total() <= FULL_NAMES:
        return {name: name for name in family}
    return {
        name: name.removeprefix(f"{f}-") if count[f] > 1 else name for name, f in family.items()
    }


def legends(axes: Axes, dots: Sequence[Dot], colours: Mapping[str, str]) -> None:
    """A legend of origins below the axes, and a legend of families inside for `colours`."""
    if colours:
        lines = [Line2D([], [], color=colour, marker="o", lw=1) for colour in colours.values()]
        look: Any = {"loc": "lower right", "frameon": False, "fontsize": 9}
        axes.add_artist(axes.legend(lines, [*colours], labelcolor="linecolor", **look))
    hows: dict[str, How] = {
        f"{dot.how}: {dot.place}" + ", bar: 90 % interval" * bool(dot.span): dot.how for dot in dots
    }
    marks = []
    for how in hows.values():
        look: Any = {"marker": SHAPES[how], "ms": 7, "color": plots.INK, "ls": ""}
        marks.append(Line2D([], [], fillstyle="none" if how == "estimated" else "full", **look))
    plots.draw_legend(axes, marks, [*hows], loc="upper center", bbox_to_anchor=(0.5, -0.1))


def words(dot: Dot, plan: FigurePlan) -> tuple[str, ...]:
    side, (x, span) = dot.line.resolution, dot.value_and_span
    unit = "% top-1" if plan.y == "top-1" else "G multiply-adds"
    return (
        dot.name + (f" at {side} x {side}" if side else ""),
        f"{dot.how}: {x} {plan.quantity}" + (f" (90 % interval {span})" if span else ""),
        dot.source,
        f"{three_digits(dot.y)} {unit}: {dot.y_source}",
    )


def table(dots: Sequence[Dot], plan: FigurePlan) -> list[list[str]]:
    """One row per network, with separate columns for published, measured and estimated numbers."""
    hows: list[How] = list(dict.fromkeys(dot.how for dot in dots))
    values: dict[tuple[str, str, str], dict[How, str]] = {}
    for dot in dots:
        x, span = dot.value_and_span
        key = dot.name, str(dot.line.resolution or ""), three_digits(dot.y)
        values.setdefault(key, {})[dot.how] = f"{x} ({span})" if span else x
    height = "top-1 %" if plan.y == "top-1" else "MACs G"
    head = ["network", "pixels", height, *(f"{how}: {plan.quantity}" for how in hows)]
    rows = ([*key, *(numbers.get(how, "") for how in hows)] for key, numbers in values.items())
    return [head, *rows]


def draw_blocks(rows: Sequence[block_study.BlockTime], how: How, place: str) -> Drawn:
    """GENet's block study; tooltips and table have the times of the upper row."""
    figure = block_study.block_figure(rows, f"{BLOCKS_TITLE}: {how}, {place}")
    sides = sorted({row.resolution for row in rows}, reverse=True)
    kind = block_study.INTERVALS[how]
    spots, table_rows = [], [["kind", "ratio", "width", "map", f"{how}: ms per image", kind]]
    for row in rows:
        ms, low, high = map(three_digits, (row.ms_per_image, row.ms_low, row.ms_high))
        size = f"width {row.width}, {row.resolution} x {row.resolution}"
        lines = (
            f"{row.kind} ratio {row.ratio:g}, {size}",
            f"{how}: {ms} ms per image ({kind} {low} to {high})",
            place,
        )
        axes = figure.axes[sides.index(row.resolution)]
        spots.append(Spot(axes, row.width, row.ms_per_image, lines))
        shape = [row.kind, f"{row.ratio:g}", str(row.width), str(row.resolution)]
        table_rows.append([*shape, ms, f"{low} to {high}"])
    caption = f"After GENet, Figure 3, {GENET}. Stacks of four blocks, {how}: {place}. "
    caption += "The paper does not print its times."
    return Drawn(title=BLOCKS_TITLE, caption=caption, figure=figure, spots=spots, rows=table_rows)


def page(figures: Sequence[Drawn]) -> str:
    sections = [section(drawn) for drawn in figures]
    return render_template("figures.html", title="The papers' figures", figures=sections)


def section(drawn: Drawn) -> tuple[Drawn, str, list[tuple[float, float, tuple[str, ...]]]]:
    """A figure with its SVG, and each tooltip's place in percent and lines."""
    description = f"{drawn.title}. " + "; ".join(", ".join(spot.words[:2]) for spot in drawn.spots)
    svg = plots.svg(drawn.figure, description)  # places the markers too
    tooltips = [(*where(spot), spot.words) for spot in drawn.spots]
    return drawn, svg, tooltips


def where(spot: Spot) -> tuple[float, float]:
    """Percent of the figure from the left and from the top."""
    assert spot.axes.figure
    x, y = spot.axes.transData.transform((spot.x, spot.y))
    width, height = spot.axes.figure.bbox.size
    return 100 * x / width, 100 * (1 - y / height)
