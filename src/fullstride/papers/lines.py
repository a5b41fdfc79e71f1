"""The networks that represent the lines of the papers' tables, and their numbers as a page.

Not represented:
- the lines `+JIT` and `+FastGAP` of TResNet's Table 5: space-to-depth and blur are never scripted
  here, and the global average is always one operator;
- DNANet, DFNet, OFANet and MobileNetV2-0.25 of GENet's Tables 3 and 7, which timm does not have;
- numbers of a TPU or a T4.

The lines of TResNet's Table 4 before `+AA` keep the other parts of TResNet-M, its average-pooled
shortcuts among them. A compiled network saves for the backward pass what In-place ABN does, or
less, so the compiled contests represent it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fullstride.io.console import count_of
from fullstride.io.records import Positive, to_json
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import PROTOCOLS, Measurement, Protocol
from fullstride.measure.workload import Layout, Precision
from fullstride.nets.blocks import SpaceToDepthStem
from fullstride.nets.efficiency import short_precision
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import TimmNetwork, timm_spec
from fullstride.nets.weights.hub import HUB
from fullstride.nets.zoo import spec
from fullstride.report.model_card import markdown_table
from fullstride.tables import PRINTED, speeds

REFERENCE = "timm/resnet50"  # in every contest that is not quick
QUICK_BATCH = {"cuda": 128, "cpu": 8}
QUICK_LINES = (  # in order of importance: the time limit drops the last ones
    ("TResNet 3", "TResNet-M"),
    ("GENet 3", "GENet-large"),
    ("ResNet-RS 7", "ResNet-RS-50"),
    ("TResNet 3", "ResNet-50"),
)

Kind = Literal["reference", "timm", "plain"]
KINDS: tuple[Kind, ...] = ("timm", "plain")
TIMM = {ours: tagged.partition(".")[0] for ours, tagged in HUB.items()}

# Lines of TResNet's Table 5, in which the code changes and the network does not.
CODE_VARIANTS: dict[str, tuple[Kind, ...]] = {"none": KINDS, "+Inplace": ("plain",)}
PROTOCOL_OF = {"TResNet": "tresnet", "GENet": "genet", "ResNet-RS": "resnet_rs"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    kind: Kind
    name: str  # "timm/resnet50", "tresnet_m"
    spec: NetSpec | None = None  # None: timm's

    def build(self) -> nn.Module:
        if self.spec is None:
            return TimmNetwork(timm_spec(self.name.removeprefix("timm/")))
        return Network(self.spec)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One printed line and the networks that represent it here."""

    table: str
    name: str
    protocol: str
    resolution: int
    entries: tuple[Entry, ...] = ()
    shown: tuple[Kind, ...] = KINDS  # the measured kinds that the page shows
    why_not: str = ""  # the reason if no network represents the line


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Networks that are measured in the same rounds."""

    entries: tuple[Entry, ...]
    parts: tuple[Protocol, ...]
    precision: Precision
    layout: Layout
    compiled: bool
    memory_gib: float | None = None

    @property
    def file(self) -> str:
        """The name of the contest's file, which depends on everything but the environment."""
        specs = [entry.spec and entry.spec.to_json() for entry in self.entries]
        identity = json.dumps(
            [specs, *(asdict(replace(self, entries=())).values()), [e.name for e in self.entries]]
        )
        first, name = self.parts[0], self.entries[-1].name.partition(" ")[0].replace("/", "_")
        words = (first.name, name, first.resolution, self.layout, mode(self.compiled))
        digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
        return f"{'-'.join(map(str, words))}-{digest}.json"


def mode(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def entries_of(name: str, ours: NetSpec | None = None) -> tuple[Entry, ...]:
    """timm's network and ours for `name`, by the spec `ours` if given."""
    base = ours or spec(name)
    if not isinstance(base, NetSpec):
        return (Entry(kind="timm", name=name),)
    theirs = (Entry(kind="timm", name=f"timm/{TIMM[name]}"),) if name in TIMM else ()
    return (*theirs, Entry(kind="plain", name=name, spec=base))


def refinements() -> dict[str, tuple[Entry, ...]]:
    """TResNet's Table 4, from ResNet-50 to TResNet-M: each line adds one refinement."""
    resnet, tresnet = SPECS["resnet50"], SPECS["tresnet_m"]
    strided = replace(tresnet, style=replace(tresnet.style, blur=False))
    without_se = replace(strided, stages=tuple(replace(stage, se=None) for stage in strided.stages))
    relu = replace(without_se, style=replace(without_se.style, slope=0.0, stem_slope=0.0))
    steps = {
        "+SpaceToDepth": replace(resnet, stem=SpaceToDepthStem),
        "+BlockTypeSelection": relu,
        "+InplaceABN": without_se,
        "+OptimizedSE": strided,
    }
    return {
        **{name: entries_of(name, step) for name, step in steps.items()},
        "+AA": entries_of("tresnet_m"),
    }


def lines() -> list[Line]:
    """All printed lines, in the papers' order."""
    steps, printed = refinements(), dict[tuple[str, str, int], Line]()
    for speed in speeds():
        table, name, resolution = speed.table, speed.line, speed.resolution
        shown, why_not = KINDS, ""
        if table != "TResNet 5":
            entries = steps.get(name) or entries_of(PRINTED[name])
        elif name in CODE_VARIANTS:
            entries, shown = entries_of("tresnet_m"), CODE_VARIANTS[name]
        else:
            entries, why_not = (), "cannot be switched separately here"
        printed[table, name, resolution] = Line(
            table=table,
            name=name,
            protocol=PROTOCOL_OF[table.partition(" ")[0]],
            resolution=resolution,
            entries=entries,
            shown=shown,
            why_not=why_not,
        )
    return list(printed.values())


def lines_of(names: Sequence[str], resolution: int | None) -> list[Line]:
    """Every protocol for each network, in place of the papers' lines."""
    selected = []
    for protocol, name in product(PROTOCOL_OF.values(), names):
        own = 224 if protocol == "tresnet" else spec(name).resolution
        line = Line(
            table=protocol,
            name=name,
            protocol=protocol,
            resolution=resolution or own,
            entries=entries_of(name),
        )
        selected.append(line)
    return selected


def contests(
    line: Line,
    *,
    quick: bool,
    device: torch.device,
    precision: Precision | None,
    memory_gib: float | None,
) -> list[Contest]:
    """The measurements of a line in both layouts, eager and compiled.

    `quick`: compiled in NHWC only, and the refinements of Table 4 eager in NHWC only.
    """
    parts = PROTOCOLS[line.protocol]
    if line.protocol == "genet":
        parts = [part for part in parts if part.batch == 64]
    parts = tuple(replace(part, resolution=line.resolution) for part in parts)
    modes: list[tuple[Layout, bool]] = [*product(("nhwc", "nchw"), (False, True))]
    entries = line.entries
    if quick:
        parts = tuple(shortened(part, device) for part in parts)
        modes = modes[:1] if line.table == "TResNet 4" else [modes[0], modes[2], modes[1]]
    elif entries and entries[0].name != REFERENCE:
        entries = (Entry(kind="reference", name=REFERENCE), *entries)
    default: Precision = parts[0].precision if device.type == "cuda" else "float32"
    return [
        Contest(
            entries=entries,
            parts=parts,
            precision=precision or default,
            layout=layout,
            compiled=compiled,
            memory_gib=memory_gib,
        )
        for layout, compiled in modes
        if entries and not (compiled and device.type == "cpu" and quick)
    ]


def shortened(part: Protocol, device: torch.device) -> Protocol:
    """The protocol with a fixed batch instead of the largest one, and fewer, shorter rounds."""
    gpu, is_genet = device.type == "cuda", part.name == "genet"
    batch = QUICK_BATCH[device.type]
    return replace(
        part,
        fit="given",
        batch=min(64, batch) if is_genet else batch,
        memory_batch=None,
        rounds=part.rounds if gpu and is_genet else 5,
        warmup_s=0.3 if gpu else 0.0,
        round_s=min(part.round_s, 0.1) if gpu else 1e-3,
    )


# The measured lines of the tables, as Markdown and JSON.

# A finished row is valid in environments that share these fields.
TITLE = "The papers' tables, measured"
DECISIVE_FIELDS = ("device", "threads", "torch", "cuda", "cudnn", "driver", "timm", "triton")
DECISIVE_FIELDS += ("fullstride", "commit")


@dataclass(frozen=True, kw_only=True)
class Row:
    contest: Contest
    # one for each part that could be measured
    measured: Mapping[Kind, tuple[Measurement, ...]]
    failed: Mapping[str, str]  # network and work -> reason, in one line

    def find(self, kind: Kind, work: str) -> Measurement | None:
        return next((one for one in self.measured.get(kind, ()) if one.protocol.work == work), None)

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
        every = (one for each in self.measured.values() for one in each)
        rates = [f"{one.name} {one.images_per_s:,.1f} ({one.protocol.work})" for one in every]
        rates += [f"{what}: {reason}" for what, reason in self.failed.items()]
        how = f"{self.contest.parts[0].name}, {self.contest.layout}, {mode(self.contest.compiled)}"
        return f"{how}, images/s: {'; '.join(rates)}"


@dataclass(frozen=True)
class RowFile:
    alike: Mapping[str, Any]  # the environment's decisive fields; if they differ, measure again
    measured: Mapping[Kind, tuple[Measurement, ...]]
    failed: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Number:
    """A row of a suite's `results.json`: a number with its circumstances."""

    table: str
    line: str
    quantity: str
    network: str
    kind: str = ""
    measured: Positive
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
    "ms per image": ("genet", "inference", lambda one: one.ms_per_image or 1e3 / one.images_per_s),
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
    """A quantity of one network of a finished contest; None if it was not measured."""
    _, work, value_of = QUANTITIES[quantity]
    one = row.find(kind, work)
    if one is None or (value := value_of(one)) is None:
        return None
    key = line.table, line.name, line.resolution, quantity
    speed = next((s for s in speeds() if (s.table, s.line, s.resolution, s.quantity) == key), None)
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
    threads = count_of(here.threads, "thread")
    text = [f"# {TITLE}", "", f"{here.device}, {threads}, torch {here.torch},"]
    text += [f"driver {here.driver}, timm {here.timm}, triton {here.triton}, commit {here.commit},"]
    text += [f"{here.date}.", ""]
    if quick:
        text += ["Quick: fixed batches and few rounds, which are not the papers' protocols.", ""]
    text += ["Measured: the number, the batch, and the speed relative to timm's network.", ""]
    groups: dict[tuple[str, str], list[Number]] = {}
    for one in numbers(planned, rows):
        groups.setdefault((one.table, one.quantity), []).append(one)
    for (table, quantity), group in groups.items():
        precisions = ", ".join(dict.fromkeys(short_precision(one.precision) for one in group))
        text += [f"## {table}: {quantity} ({precisions})", "", group_table(group)]
        sources = dict.fromkeys(one.source for one in group if one.source)
        text += ["", *[f"Published: {source}." for source in sources], ""]
    if missing := failures(planned, rows):
        text += ["## Not measured", "", *(f"- {line}" for line in missing), ""]
    return "\n".join(text)


def group_table(group: list[Number]) -> str:
    """The table of one quantity: a column for each kind and mode, the published number last."""
    present = {(one.kind, one.made) for one in group}
    columns = [(k, m) for k in KINDS for m in ("eager", "compiled") if (k, m) in present]
    heads = [f"measured: {kind} {how}" for kind, how in columns]
    rows = []
    lines: dict[tuple[str, int, str], dict[tuple[str, str], Number]] = {}
    for one in group:
        lines.setdefault((one.line, one.resolution, one.layout), {})[one.kind, one.made] = one
    for (name, side, layout), line in lines.items():
        published = next(iter(line.values())).published
        printed = "" if published is None else f"{published:g}"
        rows.append([name, str(side), layout, *(cell(line.get(c)) for c in columns), printed])
    return markdown_table(["line", "pixels", "layout", *heads, "published"], rows)


def cell(one: Number | None) -> str:
    if one is None:
        return "-"
    number = f"{one.measured:,.0f}" if one.measured >= 100 else f"{one.measured:.3g}"
    if one.quantity == "largest batch":
        return number
    ratio = f", x{one.to_timm:.2f}" if one.to_timm else ""
    return f"{number} ({one.batch}{ratio})"
