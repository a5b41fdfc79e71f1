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

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fullstride.io.writing import PAGE, PLOT, atomic_write, check_output
from fullstride.latency.network_times import estimates
from fullstride.latency.profiles import Profile
from fullstride.latency.spec_operators import operators_by_name
from fullstride.measure.operators import Operators
from fullstride.papers.block_study import BlockTime, block_figure, estimated, stacks, study
from fullstride.papers.suite import QUANTITIES, TRAINING, Bench, Timed, read_bench
from fullstride.report import plots
from fullstride.report.console_tables import three_digits
from fullstride.report.page import render_template, write
from fullstride.tables import Published, latencies, published, speeds
from fullstride.tables.names import PRINTED

How = Literal["published", "measured", "estimated"]
BATCH = 64  # images, of estimates: the batch of GENet's figures, which also fills a GPU in training
TRESNET, RESNET_RS, GENET = "arXiv:2003.13630", "arXiv:2103.07579", "arXiv:2006.14090"
GENET_PLACE = "V100 in fp16 at batch 64"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The contents of a figure."""

    title: str
    paper: str
    quantity: str  # of x, one of QUANTITIES
    x_label: str
    tables: tuple[str, ...] = ()  # of speed.csv; GENet's figures use latency_v100_fp16.csv
    y: Literal["top-1", "MACs"] = "top-1"
    note: str = ""


PLANS = {
    "tresnet-4": Plan(
        title="TResNet, Figure 4: top-1 against speed of training",
        paper=TRESNET,
        quantity="training images/s",
        tables=("TResNet 1", "TResNet 3"),
        x_label="training, images a second (to the right is better)",
    ),
    "tresnet-5": Plan(
        title="TResNet, Figure 5: top-1 against speed of inference",
        paper=TRESNET,
        quantity="inference images/s",
        tables=("TResNet 1", "TResNet 3"),
        x_label="inference, images a second (to the right is better)",
    ),
    "resnet-rs-4": Plan(
        title="ResNet-RS, Figure 4: top-1 against time of training",
        paper=RESNET_RS,
        quantity="seconds per 128 images",
        tables=("ResNet-RS 7",),
        x_label="training, seconds per 128 images (to the left is better)",
        note="Names end with depth and resolution. Times are those of the V100, not of the TPU.",
    ),
    "genet-2": Plan(
        title="GENet, Figure 2: multiply-adds are not time",
        paper=GENET,
        quantity="ms per image",
        x_label="inference, ms per image",
        y="MACs",
        note="Multiply-adds at each network's resolution, counted here. FLOPs are twice as many.",
    ),
    "genet-5": Plan(
        title="GENet, Figure 5: top-1 against time",
        paper=GENET,
        quantity="ms per image",
        x_label="inference, ms per image (to the left is better)",
        note="DNANet, DFNet, OFANet and MobileNetV2-0.25 are not available here: published only.",
    ),
}
BLOCKS = "genet-3"
BLOCKS_TITLE = "GENet, Figure 3: which block is fast at which width"
KEYS = ("tresnet-4", "tresnet-5", "resnet-rs-4", "genet-2", BLOCKS, "genet-5")


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One network in a figure."""

    name: str  # as its paper prints it
    resolution: int | None  # pixels a side; None: not printed
    x: float
    y: float
    how: How  # the origin of `x`
    place: str  # device and batch of `x`, for the legend
    source: str  # of `x`, complete
    y_source: str
    span: tuple[float, float] | None = None  # 90 % interval of an estimated `x`

    @property
    def family(self) -> str:
        match = re.match(r"(SE-)?\w+(-RS)?", self.name)
        assert match
        return match[0]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A network with its published time or throughput."""

    name: str
    zoo: str | None  # its name here; None: cannot be built
    resolution: int | None
    value: float
    top1: float  # per cent
    top1_source: str
    source: str
    place: str


@cache
def operators(name: str, resolution: int) -> Operators:
    return operators_by_name(name, resolution)[0]


def lines(plan: Plan) -> list[Line]:
    """All networks of a figure that the tables contain, in the papers' order."""
    if plan.paper == GENET:
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
    by_key: dict[tuple[str, int], Line] = {}
    scores = [*published(), *published("timm")]
    for row in speeds():
        if row.table in plan.tables and row.quantity == plan.quantity:
            score = scored(scores, PRINTED[row.line], row.resolution, plan.paper)
            name = (
                f"{row.line}-{row.resolution}"
                if plan.paper == RESNET_RS and "RS" in row.line
                else row.line
            )
            line = Line(
                name=name,
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


def networks() -> set[tuple[str | None, int | None]]:
    """The networks of all figures, with their resolutions."""
    return {(line.zoo, line.resolution) for plan in PLANS.values() for line in lines(plan)}


def scored(scores: Sequence[Published], zoo: str, resolution: int, paper: str) -> Published:
    """The accuracy that the same paper publishes."""
    return next(
        row
        for row in scores
        if (row.name, row.resolution) == (zoo, resolution) and row.source.startswith(paper)
    )


def dots(plan: Plan, profiles: Sequence[Profile], bench: Bench) -> Iterator[Dot]:
    """Published points, then measured ones, then estimates by the first profile that has them."""
    selected = lines(plan)
    if plan.y == "MACs":
        selected = [line for line in selected if line.zoo]

    def height(line: Line) -> dict[str, Any]:
        size = dict(name=line.name, resolution=line.resolution)
        if plan.y == "top-1":
            return dict(**size, y=line.top1, y_source=line.top1_source)
        assert line.zoo is not None
        assert line.resolution is not None
        macs = operators(line.zoo, line.resolution).total_macs
        return dict(**size, y=macs / 1e9, y_source="counted here")

    for line in selected:
        yield Dot(
            **height(line), x=line.value, how="published", place=line.place, source=line.source
        )
    rest: dict[Line, tuple[str, int]] = {}
    for line in selected:
        if timed := fastest(bench.times, line, plan.quantity):
            yield Dot(
                **height(line), x=timed.value, how="measured", place=timed.place, source=timed.way
            )
        elif line.zoo and line.resolution:
            rest[line] = line.zoo, line.resolution
    profile = first_with(profiles, plan.quantity)
    if not profile or not rest:
        return
    training, convert = plan.quantity in TRAINING, QUANTITIES[plan.quantity]
    results = estimates(
        [operators(*key) for key in rest.values()], profile, [BATCH] * len(rest), training=training
    )
    place = place_of(profile)
    for line, one in zip(rest, results, strict=True):
        low, high = sorted((convert(one.low), convert(one.high)))
        how: dict[str, Any] = dict(
            how="estimated", place=place, source=f"{place}, profile {profile.name}"
        )
        yield Dot(**height(line), x=convert(one.ms_per_image), span=(low, high), **how)


def place_of(profile: Profile) -> str:
    return f"{profile.device}, {profile.machine.runtime}, {profile.precision}, batch {BATCH}"


def first_with(profiles: Sequence[Profile], quantity: str) -> Profile | None:
    """The first profile that has times of this quantity."""
    return next(
        (profile for profile in profiles if profile.training or quantity not in TRAINING), None
    )


def fastest(times: Sequence[Timed], line: Line, quantity: str) -> Timed | None:
    """The fastest of the measurements of one network."""
    candidates = [
        t
        for t in times
        if (t.zoo, t.resolution, t.quantity) == (line.zoo, line.resolution, quantity)
    ]
    choose = max if "images/s" in quantity else min
    return choose(candidates, key=lambda timed: timed.value, default=None)


def blocks(profiles: Sequence[Profile], bench: Bench) -> tuple[list[BlockTime], How, str]:
    """GENet's block study, measured or else estimated by the first profile; origin and device."""
    if bench.blocks:
        return list(bench.blocks), "measured", bench.blocks_place
    if not profiles:
        raise ValueError(
            "no times of blocks: name a profile, or a blocks.json of `fullstride study blocks`"
        )
    rows = study(
        stacks(("XX", "BL", "DW"), (64, 128, 256, 512), (56, 28, 14, 7)),
        estimated(profiles[0], BATCH),
    )
    return list(rows), "estimated", f"{place_of(profiles[0])}, profile {profiles[0].name}"


# One plot each, and a page of all with tooltips.
#
# Filled circles are published numbers, diamonds measured ones, hollow circles estimates. Tooltips
# are CSS and need no script.


SHAPES: dict[How, str] = {"published": "o", "measured": "D", "estimated": "o"}
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
    measured = read_bench(bench, networks())
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder with --out")
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
        with atomic_write(path, PLOT) as beside:
            beside.write_bytes(png(drawn[-1]))
        yield path, ", ".join(f"{count} {how}" for how, count in counts.items())
    write(file, page(drawn))
    yield file, "all figures"


def scatter(plan: Plan, dots: Sequence[Dot]) -> Drawn:
    """Plot a figure. The points of one network share their height; the first one is labelled."""
    with plots.drawing(9.2, 6.0) as (figure, axes):
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
            look: Any = {"colour": colours[dot.family], "across": dot.span}
            is_filled = dot.how != "estimated"
            plots.Mark(at=(dot.x, dot.y), shape=SHAPES[dot.how], filled=is_filled, **look).draw(
                axes
            )
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


def draw_blocks(rows: Sequence[BlockTime], how: How, place: str) -> Drawn:
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
