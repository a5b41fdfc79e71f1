"""How do networks fare by the papers' own tables here? Their lines measured, ours beside timm's, on one page.

A line is measured in contests: all that stands for it, timm's network, ours plain and ours lean (training only), has
its turn in every round, in one memory layout, eager or compiled. Whatever is finished is a file of its own, which is
not measured again in the same environment.

Not expressed by our specs: of TResNet's Table 5 `+JIT` and `+FastGAP` alone, as the fold and the blur are never
scripted and the global average is one operator always; Table 4's lines before `+AA` keep what TResNet-M has in the
end, its shortcuts by average among it, and a lean network stands for In-place ABN. Of GENet's Tables 3 and 7, DNANet,
DFNet, OFANet and MobileNetV2-0.25, which timm does not have, are left out; so is what a TPU or a T4 did.
"""

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from fullstride.measure.bench import PROTOCOLS, Measurement, Protocol, bench, fitting
from fullstride.measure.environment import Environment, find_device
from fullstride.measure.step import Layout, Precision
from fullstride.measure.tables import speeds
from fullstride.nets.blocks import SpaceToDepthStem
from fullstride.nets.disk import replacing
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_network import TimmNetwork, timm_spec
from fullstride.nets.zoo import HUB, spec

PAGE, DATA, ROWS = "results.md", "results.json", "rows"  # in the folder of a suite
REFERENCE = "timm/resnet50"  # in every contest that is not quick
QUICK_MINUTES = 6.5  # the last contest that begins may take more than a minute
QUICK_BATCH = {"cuda": 128, "cpu": 8}
QUICK_LINES = (  # the most telling first: what the time does not suffice for is left out
    ("TResNet 3", "TResNet-M"),
    ("GENet 3", "GENet-large"),
    ("ResNet-RS 7", "ResNet-RS-50"),
    ("TResNet 3", "ResNet-50"),
)
WHY_LONGEST = 240  # characters of a reason
# What must be the same for a finished row to count.
ALIKE = ("device", "threads", "torch", "cuda", "cudnn", "driver", "timm", "triton", "fullstride", "commit")

Kind = Literal["reference", "timm", "plain", "lean"]
KINDS: tuple[Kind, ...] = ("timm", "plain", "lean")
TIMM = {ours: tagged.partition(".")[0] for ours, tagged in HUB.items()}

# What the papers print -> ours where there is one, else timm's.
PRINTED = {
    **{f"ResNet-{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    "ResNet-50-D": "resnet50d",
    "ResNeXt-50": "timm/resnext50_32x4d",
    "SE-ResNeXt-50": "timm/seresnext50_32x4d",
    "MixNet-L": "timm/mixnet_l",
    **{f"EfficientNet-B{size}": f"timm/efficientnet_b{size}" for size in range(8)},
    **{f"RegNetY-{size}00MF": f"timm/regnety_00{size}" for size in (2, 4, 6, 8)},
    **{f"MobileNetV2-{width:g}": f"timm/mobilenetv2_{width * 100:03.0f}" for width in (0.5, 0.75, 1.4)},
    "MobileNetV2-1.0": "timm/mobilenetv2_100",
    "MnasNet-1.0": "timm/mnasnet_100",
    **{f"TResNet-{size}": f"tresnet_{size.lower()}" for size in ("M", "L", "XL")},
    **{f"GENet-{size}": f"genet_{size}" for size in ("light", "normal", "large")},
    **{f"ResNet-RS-{depth}": f"resnet_rs_{depth}" for depth in (50, 101, 152, 200, 270, 350, 420)},
}
PROTOCOL_OF = {"TResNet": "tresnet", "GENet": "genet", "ResNet-RS": "resnet_rs"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One network of a contest."""

    kind: Kind
    name: str  # "timm/resnet50", "tresnet_m", "tresnet_m lean"
    spec: NetSpec | None = None  # None: timm's

    def build(self) -> nn.Module:
        if self.spec is None:
            return TimmNetwork(timm_spec(self.name.removeprefix("timm/")))
        return Network(self.spec).lean(self.kind == "lean")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One printed line, and what stands for it here."""

    table: str
    name: str
    protocol: str
    resolution: int
    entries: tuple[Entry, ...] = ()
    shown: tuple[Kind, ...] = KINDS  # of what is measured
    why_not: str = ""  # where nothing stands for it


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What is measured together."""

    entries: tuple[Entry, ...]
    parts: tuple[Protocol, ...]
    precision: Precision
    layout: Layout
    compiled: bool
    memory_gib: float | None = None

    @property
    def file(self) -> str:
        """The name of its file: another one for whatever differs, the environment left out."""
        specs = [entry.spec and entry.spec.to_json() for entry in self.entries]
        told = json.dumps([specs, *(asdict(replace(self, entries=())).values()), [e.name for e in self.entries]])
        first, name = self.parts[0], self.entries[-1].name.partition(" ")[0].replace("/", "_")
        words = (first.name, name, first.resolution, self.layout, made(self.compiled))
        return f"{'-'.join(map(str, words))}-{hashlib.sha256(told.encode()).hexdigest()[:10]}.json"


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
        if one is None or other is None or one is other or one.reference is None or other.reference is None:
            return None
        times = one.protocol.waits  # of calls; else images a second
        faster, slower = (other, one) if times else (one, other)
        return float(np.median(np.divide(faster.samples, slower.samples)))

    def summary(self) -> str:
        """One line for who waits."""
        rates = [
            f"{one.name} {one.images_per_s:,.1f} ({one.protocol.work})" for m in self.measured.values() for one in m
        ]
        rates += [f"{what}: {reason}" for what, reason in self.failed.items()]
        how = self.contest
        return f"{how.parts[0].name}, {how.layout}, {made(how.compiled)}, images/s: {'; '.join(rates)}"

    def to_json(self, environment: Environment) -> str:
        measured = {kind: [asdict(one) for one in found] for kind, found in self.measured.items()}
        return json.dumps({"alike": alike(environment), "measured": measured, "failed": self.failed}, indent=1)


def made(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def alike(environment: Environment) -> dict[str, Any]:
    return {key: getattr(environment, key) for key in ALIKE}


def entries_of(name: str, ours: NetSpec | None = None) -> tuple[Entry, ...]:
    """What stands for a network of ours, or of timm's as timm/NAME; or for `ours`, of which timm has none."""
    what = ours or spec(name)
    if not isinstance(what, NetSpec):
        return (Entry(kind="timm", name=name),)
    theirs = (Entry(kind="timm", name=f"timm/{TIMM[name]}"),) if name in TIMM else ()
    return *theirs, Entry(kind="plain", name=name, spec=what), Entry(kind="lean", name=f"{name} lean", spec=what)


def refinements() -> dict[str, tuple[Entry, ...]]:
    """TResNet's Table 4, from ResNet-50 to TResNet-M: each line has what those above it have."""
    resnet, whole = SPECS["resnet50"], SPECS["tresnet_m"]
    strided = replace(whole, style=replace(whole.style, blur=False))
    ungated = replace(strided, stages=tuple(replace(stage, se=None) for stage in strided.stages))
    relu = replace(ungated, style=replace(ungated.style, slope=0.0, stem_slope=0.0))
    steps = {
        "+SpaceToDepth": replace(resnet, stem=SpaceToDepthStem),
        "+BlockTypeSelection": relu,
        "+InplaceABN": ungated,
        "+OptimizedSE": strided,
    }
    return {**{name: entries_of(name, step) for name, step in steps.items()}, "+AA": entries_of("tresnet_m")}


def lines() -> list[Line]:
    """All printed ones, in the papers' order."""
    steps, found = refinements(), {}
    for speed in speeds():
        key = speed.table, speed.line, speed.resolution
        made_of: dict[str, Any]
        if speed.table == "TResNet 5":
            made_of = code(speed.line)
        else:
            made_of = {"entries": steps.get(speed.line) or entries_of(PRINTED[speed.line])}
        table, name, resolution = key
        protocol = PROTOCOL_OF[table.partition(" ")[0]]
        found[key] = Line(table=table, name=name, protocol=protocol, resolution=resolution, **made_of)
    return list(found.values())


def code(name: str) -> dict[str, Any]:
    """A line of TResNet's Table 5, which has one network and other code from line to line."""
    shown: dict[str, tuple[Kind, ...]] = {"none": ("timm", "plain"), "+Inplace": ("lean",)}
    if name in shown:
        return {"entries": entries_of("tresnet_m"), "shown": shown[name]}
    return {"why_not": "cannot be switched by itself here"}


def lines_of(names: Sequence[str], resolution: int | None) -> list[Line]:
    """Every protocol for each network, in place of the papers' lines."""
    found = []
    for protocol in PROTOCOL_OF.values():
        for name in names:
            entries, side = entries_of(name), resolution or (224 if protocol == "tresnet" else spec(name).resolution)
            found.append(Line(table=protocol, name=name, protocol=protocol, resolution=side, entries=entries))
    return found


def contests(
    line: Line, *, quick: bool, device: torch.device, precision: Precision | None, memory_gib: float | None
) -> list[Contest]:
    """In both layouts, eager and compiled; quick: compiled in NHWC only, and refinements eager in NHWC only."""
    parts = PROTOCOLS[line.protocol]
    if line.protocol == "genet":
        parts = [part for part in parts if part.batch == 64]
    parts = tuple(replace(part, resolution=line.resolution) for part in parts)
    ways: list[tuple[Layout, bool]] = [("nhwc", False), ("nhwc", True), ("nchw", False), ("nchw", True)]
    entries = line.entries
    if quick:
        parts = tuple(hurried(part, device) for part in parts)
        ways = ways[:1] if line.table == "TResNet 4" else [ways[0], ways[2], ways[1]]
    elif entries and entries[0].name != REFERENCE:
        entries = (Entry(kind="reference", name=REFERENCE), *entries)
    took: Precision = precision or (parts[0].precision if device.type == "cuda" else "float32")
    return [
        Contest(entries=entries, parts=parts, precision=took, layout=layout, compiled=compiled, memory_gib=memory_gib)
        for layout, compiled in ways
        if entries and not (compiled and device.type == "cpu" and quick)
    ]


def hurried(part: Protocol, device: torch.device) -> Protocol:
    """A batch that is given, which no search comes before, and fewer, shorter rounds."""
    gpu = device.type == "cuda"
    batch = min(64, QUICK_BATCH[device.type]) if part.name == "genet" else QUICK_BATCH[device.type]
    rounds = part.rounds if gpu and part.name == "genet" else 5
    short = dict(warmup_s=0.3, round_s=min(part.round_s, 0.1)) if gpu else dict(warmup_s=0.0, round_s=1e-3)
    return replace(part, fit="given", batch=batch, memory_batch=None, rounds=rounds, **short)


def measure(contest: Contest, device: torch.device) -> Row:
    """Together; where that fails each network alone, so that one does not stop the others."""
    how: dict[str, Any] = dict(precision=contest.precision, layout=contest.layout, compiled=contest.compiled)
    how["memory_gib"] = contest.memory_gib
    kinds: dict[str, Kind] = {entry.name: entry.kind for entry in contest.entries}
    measured: dict[Kind, list[Measurement]] = {kind: [] for kind in get_args(Kind)}
    failed: dict[str, str] = {}

    def attempt(names: Sequence[str], what: str, work: Callable[[], Any]) -> Any:
        """What `work` gives; None, and the reason written down, where it fails."""
        try:
            return work()
        except Exception as error:  # whatever it is: the other contests go on
            if len(names) == 1:
                failed[f"{names[0]}, {what}"] = why(error)
            error.__traceback__ = None  # it holds tensors
        gc.collect()
        return None

    nets = {e.name: net for e in contest.entries if (net := attempt([e.name], "building", e.build)) is not None}
    found: dict[str, int] = {}
    if contest.parts[0].fit != "given":
        for name, net in nets.items():
            one = {name: net}
            found |= (
                attempt([name], "finding its batch", lambda one=one: fitting(one, contest.parts[0], device, **how))
                or {}
            )
        nets = {name: net for name, net in nets.items() if name in found}
    for part in contest.parts:
        # lean networks are plain ones where they do not train
        chosen = {name: net for name, net in nets.items() if part.work == "training" or kinds[name] != "lean"}
        how["found"] = found if found else None

        def timed(names: Sequence[str], reference: str | None, part: Protocol = part) -> list[Measurement]:
            some = {name: nets[name] for name in names}
            rows = attempt(names, part.work, lambda: bench(some, part, device, reference=reference, **how))
            return rows or []

        rows = timed([*chosen], [*chosen][0]) if chosen else []
        if not rows and len(chosen) > 1:
            rows = [row for name in chosen for row in timed([name], None)]
        for row in rows:
            measured[kinds[row.name]].append(row)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Row(contest=contest, measured={kind: rows for kind, rows in measured.items() if rows}, failed=failed)


def why(error: Exception) -> str:
    said = " ".join(str(error).split())
    told = said if isinstance(error, ValueError) else f"{type(error).__name__} {said}"
    return told if len(told) <= WHY_LONGEST else f"{told[:WHY_LONGEST]} ..."


def run(
    out: Path,
    *,
    device: torch.device | str = "cpu",
    quick: bool = False,
    networks: Sequence[str] = (),
    resolution: int | None = None,
    precision: Precision | None = None,
    memory_gib: float | None = None,
    minutes: float | None = None,
) -> Iterator[Row]:
    """Measure what is not measured yet; yields each row when it is done and `out` has the page of all so far.

    `networks` and `resolution` take the place of the papers' lines. After `minutes` no contest begins any more.
    """
    device = find_device(device)
    here = Environment.here(device)
    asked = lines_of(networks, resolution) if networks else lines()
    if quick and not networks:
        told = {name: [line for line in asked if (line.table, line.name) == name] for name in QUICK_LINES}
        asked = [*(line[0] for line in told.values()), *(line for line in asked if line.table == "TResNet 4")]
    how: dict[str, Any] = dict(quick=quick, device=device, precision=precision, memory_gib=memory_gib)
    planned = {line: contests(line, **how) for line in asked}
    # the same contest may stand in several tables; ways come one after the other, so that all lines have the first soon
    most = max((len(each) for each in planned.values()), default=0)
    todo = list(dict.fromkeys(each[i] for i in range(most) for each in planned.values() if i < len(each)))
    rows: dict[Contest, Row] = {}
    minutes = QUICK_MINUTES if quick and minutes is None else minutes
    deadline = time.monotonic() + 60 * minutes if minutes is not None else float("inf")

    def write() -> None:
        for name, text in (
            (PAGE, page(planned, rows, here, quick)),
            (DATA, data(planned, rows, here)),
        ):
            with replacing(out / name) as beside:
                beside.write_text(text)

    write()
    for contest in todo:
        file = out / ROWS / contest.file
        row = load(file, contest, here)
        if row is None:
            if time.monotonic() > deadline:
                continue
            row = measure(contest, device)
            with replacing(file) as beside:
                beside.write_text(row.to_json(here))
        rows[contest] = row
        write()
        yield row
        if row.failed:
            check_alive(device)


def load(file: Path, contest: Contest, here: Environment) -> Row | None:
    """A row of before; None where there is none of this environment."""
    try:
        told = json.loads(file.read_text())
        if told["alike"] != alike(here):
            return None
        measured = {kind: [Measurement.from_json(json.dumps(one)) for one in m] for kind, m in told["measured"].items()}
        return Row(contest=contest, measured=measured, failed=dict(told["failed"]))
    except (OSError, KeyError, TypeError, ValueError):
        return None


def check_alive(device: torch.device) -> None:
    """OSError where the GPU is lost to this process, as it is after a bad access: all that follows would fail."""
    try:
        torch.zeros(1, device=device).sum().item()
    except RuntimeError as error:
        raise OSError(f"{device} no longer answers: ask again, finished rows are kept ({why(error)})") from None


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
                            to_reference=one.ratio if plain and one.reference == REFERENCE else None,
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
            reasons = rows[contest].failed if contest in rows else {"all": "not measured yet: ask again"}
            told += [f"{where}, {what}: {reason}" for what, reason in reasons.items()]
    return told


def data(planned: dict[Line, list[Contest]], rows: dict[Contest, Row], here: Environment) -> str:
    told = dict(environment=asdict(here), numbers=numbers(planned, rows), not_measured=failures(planned, rows))
    return json.dumps(told, indent=1)


def page(planned: dict[Line, list[Contest]], rows: dict[Contest, Row], here: Environment, quick: bool) -> str:
    """One table for each quantity of each published table. Measured and published numbers never share a column."""
    found = numbers(planned, rows)
    told = ["# The papers' tables, measured", "", f"{here.device}, {here.threads} threads, torch {here.torch},"]
    told += [f"driver {here.driver}, timm {here.timm}, triton {here.triton}, commit {here.commit}, {here.date}.", ""]
    told += ["Quick: batches are given and rounds are few; not the papers' protocols.", ""] if quick else []
    told += ["Measured: the number, the batch, and how many times as fast as timm's in the same rounds.", ""]
    titles = dict.fromkeys((one["table"], one["quantity"]) for one in found)
    for table, quantity in titles:
        here_of = [one for one in found if (one["table"], one["quantity"]) == (table, quantity)]
        columns = [
            (k, m) for k in KINDS for m in ("eager", "compiled") if (k, m) in {(o["kind"], o["made"]) for o in here_of}
        ]
        heads = [f"measured: {kind} {how}" for kind, how in columns]
        precisions = ", ".join(dict.fromkeys(one["precision"] for one in here_of))
        told += [f"## {table}: {quantity} ({precisions})", ""]
        told += [f"| line | pixels | layout | {' | '.join(heads)} | published |", "|---" * (len(heads) + 4) + "|"]
        for name, side, layout in dict.fromkeys((o["line"], o["resolution"], o["layout"]) for o in here_of):
            mine = [o for o in here_of if (o["line"], o["resolution"], o["layout"]) == (name, side, layout)]
            cells = [cell(next((o for o in mine if (o["kind"], o["made"]) == column), None)) for column in columns]
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
