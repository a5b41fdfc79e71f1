"""Writes the measured lines of the papers' tables as Markdown and JSON."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import numpy as np

from fullstride.io.records import Bounds, to_json
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import Measurement
from fullstride.nets.efficiency import short_precision
from fullstride.papers.lines import KINDS, REFERENCE, Contest, Kind, Line, mode
from fullstride.tables import Speed, speeds

# A finished row is valid in environments that share these fields.
TITLE = "The papers' tables, measured"
DECISIVE_FIELDS = ("device", "threads", "torch", "cuda", "cudnn", "driver", "timm", "triton")
DECISIVE_FIELDS += ("fullstride", "commit")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A finished contest."""

    contest: Contest
    measured: dict[Kind, list[Measurement]]  # one for each part that could be measured
    failed: dict[str, str]  # network and work -> reason, in one line

    def find(self, kind: Kind, work: str) -> Measurement | None:
        return next((one for one in self.measured.get(kind, []) if one.protocol.work == work), None)

    def ratio(self, kind: Kind, to: Kind, work: str) -> float | None:
        """The speed relative to `to`, median over rounds; None if they share no rounds."""
        one, other = self.find(kind, work), self.find(to, work)
        rows = [each for each in (one, other) if each is not None and each.reference is not None]
        if one is other or len(rows) < 2:
            return None
        one, other = rows
        times = one.protocol.waits  # of calls; else images a second
        faster, slower = (other, one) if times else (one, other)
        return float(np.median(np.divide(faster.samples, slower.samples)))

    def summary(self) -> str:
        """One line of progress."""
        rates = [
            f"{one.name} {one.images_per_s:,.1f} ({one.protocol.work})"
            for m in self.measured.values()
            for one in m
        ]
        rates += [f"{what}: {reason}" for what, reason in self.failed.items()]
        how = self.contest
        return (
            f"{how.parts[0].name}, {how.layout}, {mode(how.compiled)}, images/s: {'; '.join(rates)}"
        )

    def to_json(self, environment: Environment) -> str:
        measured: dict[Kind, tuple[Measurement, ...]] = {
            kind: tuple(each) for kind, each in self.measured.items()
        }
        return to_json(RowFile(same_environment(environment), measured, self.failed))


@dataclass(frozen=True)
class RowFile:
    """The file of a finished contest."""

    alike: Mapping[str, Any]  # of the environment; a row of another one is measured again
    measured: Mapping[Kind, tuple[Measurement, ...]]
    failed: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Number:
    """A row of a suite's `results.json`: a number, and what it should not be read without."""

    table: str
    line: str
    quantity: str
    network: str
    kind: str = ""
    measured: Annotated[float, Bounds(gt=0)]
    published: float | None = None
    source: str | None = None
    spread: float | None = None
    to_timm: float | None = None
    to_reference: float | None = None
    batch: int
    resolution: int
    layout: str
    made: str
    precision: str
    memory_gib: float | None = None
    held_back_by: str | None = None


@dataclass(frozen=True)
class SuiteFile:
    """A suite's `results.json`."""

    environment: Environment
    numbers: tuple[Number, ...]
    not_measured: tuple[str, ...] = ()


def same_environment(environment: Environment) -> dict[str, Any]:
    return {key: getattr(environment, key) for key in DECISIVE_FIELDS}


# The quantities of the tables: title -> (protocol, work, value).
QUANTITIES: dict[str, tuple[str, str, Callable[[Measurement], float | None]]] = {
    "training images/s": ("tresnet", "training", lambda one: one.images_per_s),
    "inference images/s": ("tresnet", "inference", lambda one: one.images_per_s),
    "largest batch": ("tresnet", "training", lambda one: one.largest_batch),
    "ms per image": ("genet", "inference", lambda one: one.ms_per_image),
    "seconds per 128 images": ("resnet_rs", "training", lambda one: 128 / one.images_per_s),
}


def numbers(planned: dict[Line, list[Contest]], rows: dict[Contest, Row]) -> list[Number]:
    """Every measured number with its circumstances and the published one."""
    measured = [
        number_of(line, row, kind, quantity)
        for line, each in planned.items()
        for quantity, (protocol, _, _) in QUANTITIES.items()
        if protocol == line.protocol
        for row in filter(None, map(rows.get, each))
        for kind in line.shown
    ]
    return [number for number in measured if number]


def number_of(line: Line, row: Row, kind: Kind, quantity: str) -> Number | None:
    """A quantity of one network of a finished contest, None where it was not measured."""
    _, work, value_of = QUANTITIES[quantity]
    one = row.find(kind, work)
    if one is None or (value := value_of(one)) is None:
        return None
    key = line.table, line.name, line.resolution, quantity
    speed = printed_speeds().get(key)
    has_ratio = quantity != "largest batch"
    return Number(
        table=line.table,
        line=line.name,
        quantity=quantity,
        network=one.name,
        kind=kind,
        measured=value,
        published=speed.value if speed else None,
        source=speed.source if speed else None,
        spread=one.spread if has_ratio else None,
        to_timm=row.ratio(kind, "timm", work) if has_ratio else None,
        to_reference=one.ratio if has_ratio and one.reference == REFERENCE else None,
        batch=one.protocol.batch,
        resolution=line.resolution,
        layout=one.layout,
        made=mode(one.compiled),
        precision=one.precision,
        memory_gib=one.memory_gib,
        held_back_by=one.environment.held_back_by,
    )


@cache
def printed_speeds() -> dict[tuple[str, str, int, str], Speed]:
    return {(row.table, row.line, row.resolution, row.quantity): row for row in speeds()}


def failures(planned: dict[Line, list[Contest]], rows: dict[Contest, Row]) -> list[str]:
    """One line for each measurement that is missing, with the reason."""
    missing = [f"{line.table}, {line.name}: {line.why_not}" for line in planned if line.why_not]
    for line, each in planned.items():
        for contest in each:
            name = f"{line.table}, {line.name}, {contest.layout}, {mode(contest.compiled)}"
            pending = {"all": "not measured yet: run the command again"}
            reasons = rows[contest].failed if contest in rows else pending
            missing += [f"{name}, {what}: {reason}" for what, reason in reasons.items()]
    return missing


def data(planned: dict[Line, list[Contest]], rows: dict[Contest, Row], here: Environment) -> str:
    missing = tuple(failures(planned, rows))
    return to_json(SuiteFile(here, tuple(numbers(planned, rows)), missing))


def page(
    planned: dict[Line, list[Contest]], rows: dict[Contest, Row], here: Environment, quick: bool
) -> str:
    """A table for each quantity of each published table; measured and published columns differ."""
    text = [
        f"# {TITLE}",
        "",
        f"{here.device}, {here.threads} threads, torch {here.torch},",
        f"driver {here.driver}, timm {here.timm}, triton {here.triton}, commit {here.commit},",
        f"{here.date}.",
        "",
    ]
    if quick:
        text += ["Quick: fixed batches and few rounds, which are not the papers' protocols.", ""]
    text += ["Measured: the number, the batch, and the speed relative to timm's network.", ""]
    groups: dict[tuple[str, str], list[Number]] = {}
    for one in numbers(planned, rows):
        groups.setdefault((one.table, one.quantity), []).append(one)
    for (table, quantity), group in groups.items():
        precisions = ", ".join(dict.fromkeys(short_precision(one.precision) for one in group))
        text += [f"## {table}: {quantity} ({precisions})", "", *markdown_table(group)]
        sources = dict.fromkeys(one.source for one in group if one.source)
        text += ["", *[f"Published: {source}." for source in sources], ""]
    if missing := failures(planned, rows):
        text += ["## Not measured", "", *(f"- {line}" for line in missing), ""]
    return "\n".join(text)


def markdown_table(group: list[Number]) -> list[str]:
    """The table of one quantity: a column for each kind and mode, the published number last."""
    present = {(one.kind, one.made) for one in group}
    columns = [(k, m) for k in KINDS for m in ("eager", "compiled") if (k, m) in present]
    heads = (f"measured: {kind} {how}" for kind, how in columns)
    table = [["line", "pixels", "layout", *heads, "published"], ["---"] * (len(columns) + 4)]
    lines: dict[tuple[str, int, str], dict[tuple[str, str], Number]] = {}
    for one in group:
        lines.setdefault((one.line, one.resolution, one.layout), {})[one.kind, one.made] = one
    for (name, side, layout), line in lines.items():
        published = next(iter(line.values())).published
        printed = "" if published is None else f"{published:g}"
        table.append([name, str(side), layout, *(cell(line.get(c)) for c in columns), printed])
    return [f"| {' | '.join(row)} |" for row in table]


def cell(one: Number | None) -> str:
    if one is None:
        return "-"
    number = f"{one.measured:,.0f}" if one.measured >= 100 else f"{one.measured:.3g}"
    if one.quantity == "largest batch":
        return number
    ratio = f", x{one.to_timm:.2f}" if one.to_timm else ""
    return f"{number} ({one.batch}{ratio})"
