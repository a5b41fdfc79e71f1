"""What is told of the papers' lines that are measured? A page of tables, and the numbers behind it."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fullstride.measure.environment import Environment
from fullstride.measure.protocols import Measurement
from fullstride.papers.lines import KINDS, REFERENCE, Contest, Kind, Line, made
from fullstride.tables import speeds

# What must be the same for a finished row to count.
ALIKE = (
    "device",
    "threads",
    "torch",
    "cuda",
    "cudnn",
    "driver",
    "timm",
    "triton",
    "fullstride",
    "commit",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A finished contest."""

    contest: Contest
    measured: dict[Kind, list[Measurement]]  # those of the parts that could be measured
    failed: dict[str, str]  # network and work -> why, in one line

    def find(self, kind: Kind, work: str) -> Measurement | None:
        return next((one for one in self.measured.get(kind, []) if one.protocol.work == work), None)

    def ratio(self, kind: Kind, to: Kind, work: str) -> float | None:
        """How many times as fast, median over rounds; None where the two were not measured in the same ones."""
        one, other = self.find(kind, work), self.find(to, work)
        if (
            one is None
            or other is None
            or one is other
            or one.reference is None
            or other.reference is None
        ):
            return None
        times = one.protocol.waits  # of calls; else images a second
        faster, slower = (other, one) if times else (one, other)
        return float(np.median(np.divide(faster.samples, slower.samples)))

    def summary(self) -> str:
        """One line for who waits."""
        rates = [
            f"{one.name} {one.images_per_s:,.1f} ({one.protocol.work})"
            for m in self.measured.values()
            for one in m
        ]
        rates += [f"{what}: {reason}" for what, reason in self.failed.items()]
        how = self.contest
        return (
            f"{how.parts[0].name}, {how.layout}, {made(how.compiled)}, images/s: {'; '.join(rates)}"
        )

    def to_json(self, environment: Environment) -> str:
        measured = {kind: [asdict(one) for one in found] for kind, found in self.measured.items()}
        return json.dumps(
            {"alike": alike(environment), "measured": measured, "failed": self.failed}, indent=1
        )


def alike(environment: Environment) -> dict[str, Any]:
    return {key: getattr(environment, key) for key in ALIKE}


# What a table tells of a measurement: title -> (protocol, work, number).
QUANTITIES: dict[str, tuple[str, str, Callable[[Measurement], float | None]]] = {
    "training images/s": ("tresnet", "training", lambda one: one.images_per_s),
    "inference images/s": ("tresnet", "inference", lambda one: one.images_per_s),
    "largest batch": ("tresnet", "training", lambda one: one.largest_batch),
    "ms per image": ("genet", "inference", lambda one: one.ms_per_image),
    "seconds per 128 images": ("resnet_rs", "training", lambda one: 128 / one.images_per_s),
}


def numbers(planned: dict[Line, list[Contest]], rows: dict[Contest, Row]) -> list[dict[str, Any]]:
    """Every number there is, with all that it should not be read without."""
    printed = {(s.table, s.line, s.resolution, s.quantity): s for s in speeds()}
    found = []
    for line, each in planned.items():
        for quantity, (protocol, work, number) in QUANTITIES.items():
            if protocol != line.protocol:
                continue
            speed = printed.get((line.table, line.name, line.resolution, quantity))
            for contest in each:
                row = rows.get(contest)
                for kind in line.shown if row else ():
                    assert row is not None
                    one = row.find(kind, work)
                    if one is None or (value := number(one)) is None:
                        continue
                    plain = quantity != "largest batch"
                    found.append(
                        dict(
                            table=line.table,
                            line=line.name,
                            quantity=quantity,
                            network=one.name,
                            kind=kind,
                            measured=value,
                            published=speed.value if speed else None,
                            source=speed.source if speed else None,
                            spread=one.spread if plain else None,
                            to_timm=row.ratio(kind, "timm", work) if plain else None,
                            to_reference=one.ratio
                            if plain and one.reference == REFERENCE
                            else None,
                            batch=one.protocol.batch,
                            resolution=line.resolution,
                            layout=one.layout,
                            made=made(one.compiled),
                            precision=one.precision,
                            memory_gib=one.memory_gib,
                            held_back_by=one.environment.held_back_by,
                        )
                    )
    return found


def failures(planned: dict[Line, list[Contest]], rows: dict[Contest, Row]) -> list[str]:
    """What could not be measured, each with its reason, and what is not measured yet."""
    told = [f"{line.table}, {line.name}: {line.why_not}" for line in planned if line.why_not]
    for line, each in planned.items():
        for contest in each:
            where = f"{line.table}, {line.name}, {contest.layout}, {made(contest.compiled)}"
            reasons = (
                rows[contest].failed if contest in rows else {"all": "not measured yet: ask again"}
            )
            told += [f"{where}, {what}: {reason}" for what, reason in reasons.items()]
    return told


def data(planned: dict[Line, list[Contest]], rows: dict[Contest, Row], here: Environment) -> str:
    told = dict(
        environment=asdict(here),
        numbers=numbers(planned, rows),
        not_measured=failures(planned, rows),
    )
    return json.dumps(told, indent=1)


def page(
    planned: dict[Line, list[Contest]], rows: dict[Contest, Row], here: Environment, quick: bool
) -> str:
    """One table for each quantity of each published table. Measured and published numbers never share a column."""
    found = numbers(planned, rows)
    told = [
        "# The papers' tables, measured",
        "",
        f"{here.device}, {here.threads} threads, torch {here.torch},",
    ]
    told += [
        f"driver {here.driver}, timm {here.timm}, triton {here.triton}, commit {here.commit}, {here.date}.",
        "",
    ]
    told += (
        ["Quick: batches are given and rounds are few; not the papers' protocols.", ""]
        if quick
        else []
    )
    told += [
        "Measured: the number, the batch, and how many times as fast as timm's in the same rounds.",
        "",
    ]
    titles = dict.fromkeys((one["table"], one["quantity"]) for one in found)
    for table, quantity in titles:
        here_of = [one for one in found if (one["table"], one["quantity"]) == (table, quantity)]
        columns = [
            (k, m)
            for k in KINDS
            for m in ("eager", "compiled")
            if (k, m) in {(o["kind"], o["made"]) for o in here_of}
        ]
        heads = [f"measured: {kind} {how}" for kind, how in columns]
        precisions = ", ".join(dict.fromkeys(one["precision"] for one in here_of))
        told += [f"## {table}: {quantity} ({precisions})", ""]
        told += [
            f"| line | pixels | layout | {' | '.join(heads)} | published |",
            "|---" * (len(heads) + 4) + "|",
        ]
        for name, side, layout in dict.fromkeys(
            (o["line"], o["resolution"], o["layout"]) for o in here_of
        ):
            mine = [
                o
                for o in here_of
                if (o["line"], o["resolution"], o["layout"]) == (name, side, layout)
            ]
            cells = [
                cell(next((o for o in mine if (o["kind"], o["made"]) == column), None))
                for column in columns
            ]
            printed = "" if mine[0]["published"] is None else f"{mine[0]['published']:g}"
            told.append(f"| {name} | {side} | {layout} | {' | '.join(cells)} | {printed} |")
        sources = dict.fromkeys(one["source"] for one in here_of if one["source"])
        told += ["", *[f"Published: {source}." for source in sources], ""]
    missing = failures(planned, rows)
    told += ["## Not measured", "", *(f"- {line}" for line in missing), ""] if missing else []
    return "\n".join(told)


def cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return "-"
    value = one["measured"]
    told = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    if one["quantity"] == "largest batch":
        return told
    ratio = f", x{one['to_timm']:.2f}" if one["to_timm"] else ""
    return f"{told} ({one['batch']}{ratio})"
