"""What stands here for the lines that the papers print, and how is it measured?

Not expressed by our specs: of TResNet's Table 5 `+JIT` and `+FastGAP` alone, as the fold and the blur are never
scripted and the global average is one operator always; Table 4's lines before `+AA` keep what TResNet-M has in the
end, its shortcuts by average among it, and a lean network stands for In-place ABN. Of GENet's Tables 3 and 7, DNANet,
DFNet, OFANet and MobileNetV2-0.25, which timm does not have, are left out; so is what a TPU or a T4 did.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from fullstride.measure.protocols import PROTOCOLS, Protocol
from fullstride.measure.workload import Layout, Precision
from fullstride.nets.blocks import SpaceToDepthStem
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import TimmNetwork, timm_spec
from fullstride.nets.weights.hub import HUB
from fullstride.nets.zoo import spec
from fullstride.tables import speeds
from fullstride.tables.names import PRINTED

REFERENCE = "timm/resnet50"  # in every contest that is not quick
QUICK_BATCH = {"cuda": 128, "cpu": 8}
QUICK_LINES = (  # the most telling first: what the time does not suffice for is left out
    ("TResNet 3", "TResNet-M"),
    ("GENet 3", "GENet-large"),
    ("ResNet-RS 7", "ResNet-RS-50"),
    ("TResNet 3", "ResNet-50"),
)

Kind = Literal["reference", "timm", "plain", "lean"]
KINDS: tuple[Kind, ...] = ("timm", "plain", "lean")
TIMM = {ours: tagged.partition(".")[0] for ours, tagged in HUB.items()}

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
        told = json.dumps(
            [specs, *(asdict(replace(self, entries=())).values()), [e.name for e in self.entries]]
        )
        first, name = self.parts[0], self.entries[-1].name.partition(" ")[0].replace("/", "_")
        words = (first.name, name, first.resolution, self.layout, made(self.compiled))
        return f"{'-'.join(map(str, words))}-{hashlib.sha256(told.encode()).hexdigest()[:10]}.json"


def made(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def entries_of(name: str, ours: NetSpec | None = None) -> tuple[Entry, ...]:
    """What stands for a network of ours, or of timm's as timm/NAME; or for `ours`, of which timm has none."""
    what = ours or spec(name)
    if not isinstance(what, NetSpec):
        return (Entry(kind="timm", name=name),)
    theirs = (Entry(kind="timm", name=f"timm/{TIMM[name]}"),) if name in TIMM else ()
    return (
        *theirs,
        Entry(kind="plain", name=name, spec=what),
        Entry(kind="lean", name=f"{name} lean", spec=what),
    )


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
    return {
        **{name: entries_of(name, step) for name, step in steps.items()},
        "+AA": entries_of("tresnet_m"),
    }


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
        found[key] = Line(
            table=table, name=name, protocol=protocol, resolution=resolution, **made_of
        )
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
            entries, side = (
                entries_of(name),
                resolution or (224 if protocol == "tresnet" else spec(name).resolution),
            )
            found.append(
                Line(table=protocol, name=name, protocol=protocol, resolution=side, entries=entries)
            )
    return found


def contests(
    line: Line,
    *,
    quick: bool,
    device: torch.device,
    precision: Precision | None,
    memory_gib: float | None,
) -> list[Contest]:
    """In both layouts, eager and compiled; quick: compiled in NHWC only, and refinements eager in NHWC only."""
    parts = PROTOCOLS[line.protocol]
    if line.protocol == "genet":
        parts = [part for part in parts if part.batch == 64]
    parts = tuple(replace(part, resolution=line.resolution) for part in parts)
    ways: list[tuple[Layout, bool]] = [
        ("nhwc", False),
        ("nhwc", True),
        ("nchw", False),
        ("nchw", True),
    ]
    entries = line.entries
    if quick:
        parts = tuple(hurried(part, device) for part in parts)
        ways = ways[:1] if line.table == "TResNet 4" else [ways[0], ways[2], ways[1]]
    elif entries and entries[0].name != REFERENCE:
        entries = (Entry(kind="reference", name=REFERENCE), *entries)
    took: Precision = precision or (parts[0].precision if device.type == "cuda" else "float32")
    return [
        Contest(
            entries=entries,
            parts=parts,
            precision=took,
            layout=layout,
            compiled=compiled,
            memory_gib=memory_gib,
        )
        for layout, compiled in ways
        if entries and not (compiled and device.type == "cpu" and quick)
    ]


def hurried(part: Protocol, device: torch.device) -> Protocol:
    """A batch that is given, which no search comes before, and fewer, shorter rounds."""
    gpu = device.type == "cuda"
    batch = min(64, QUICK_BATCH[device.type]) if part.name == "genet" else QUICK_BATCH[device.type]
    rounds = part.rounds if gpu and part.name == "genet" else 5
    short = (
        dict(warmup_s=0.3, round_s=min(part.round_s, 0.1))
        if gpu
        else dict(warmup_s=0.0, round_s=1e-3)
    )
    return replace(part, fit="given", batch=batch, memory_batch=None, rounds=rounds, **short)
