"""What do the papers' figures show? Published, measured and estimated points, each with its source.

A measured network is not estimated. No number is read off the papers' images.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from fullstride.latency.network_times import estimates
from fullstride.latency.profiles import Profile
from fullstride.latency.spec_operators import operators_by_name
from fullstride.measure.cost.operators import Operators
from fullstride.papers.block_study import BlockTime, estimated, stacks, study
from fullstride.papers.measured import QUANTITIES, TRAINING, Bench, Timed
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
            "no times of blocks: name a profile, or a blocks.json of `fullstride bench-blocks`"
        )
    rows = study(
        stacks(("XX", "BL", "DW"), (64, 128, 256, 512), (56, 28, 14, 7)),
        estimated(profiles[0], BATCH),
    )
    return list(rows), "estimated", f"{place_of(profiles[0])}, profile {profiles[0].name}"
