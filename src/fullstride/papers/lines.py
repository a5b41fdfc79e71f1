"""The networks that represent the lines of the papers' tables, and how each is measured.

Not represented:
- the lines `+JIT` and `+FastGAP` of TResNet's Table 5: space-to-depth and blur are never scripted
  here, and the global average is always one operator;
- DNANet, DFNet, OFANet and MobileNetV2-0.25 of GENet's Tables 3 and 7, which timm does not have;
- numbers of a TPU or a T4.

The lines of TResNet's Table 4 before `+AA` keep the other parts of TResNet-M, its average-pooled
shortcuts among them, and a fused network represents In-place ABN.
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
from fullstride.nets import fused_form
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
QUICK_LINES = (  # in order of importance: the time limit drops the last ones
    ("TResNet 3", "TResNet-M"),
    ("GENet 3", "GENet-large"),
    ("ResNet-RS 7", "ResNet-RS-50"),
    ("TResNet 3", "ResNet-50"),
)

Kind = Literal["reference", "timm", "plain", "fused"]
KINDS: tuple[Kind, ...] = ("timm", "plain", "fused")
TIMM = {ours: tagged.partition(".")[0] for ours, tagged in HUB.items()}

PROTOCOL_OF = {"TResNet": "tresnet", "GENet": "genet", "ResNet-RS": "resnet_rs"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One network of a contest."""

    kind: Kind
    name: str  # "timm/resnet50", "tresnet_m", "tresnet_m fused"
    spec: NetSpec | None = None  # None: timm's

    def build(self) -> nn.Module:
        if self.spec is None:
            return TimmNetwork(timm_spec(self.name.removeprefix("timm/")))
        net = Network(self.spec)
        return fused_form.fused(net) if self.kind == "fused" else net


@dataclass(frozen=True, kw_only=True)
class Line:
    """One printed line and the networks that represent it here."""

    table: str
    name: str
    protocol: str
    resolution: int
    entries: tuple[Entry, ...] = ()
    shown: tuple[Kind, ...] = KINDS  # the measured kinds that the page shows
    why_not: str = ""  # the reason where no network represents it


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
        """The name of its file, which depends on everything but the environment."""
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
    """Timm's, the plain and the fused network for `name`; `ours` replaces the spec."""
    base = ours or spec(name)
    if not isinstance(base, NetSpec):
        return (Entry(kind="timm", name=name),)
    theirs = (Entry(kind="timm", name=f"timm/{TIMM[name]}"),) if name in TIMM else ()
    return (
        *theirs,
        Entry(kind="plain", name=name, spec=base),
        Entry(kind="fused", name=f"{name} fused", spec=base),
    )


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
    steps, printed = refinements(), {}
    for speed in speeds():
        key = speed.table, speed.line, speed.resolution
        networks: dict[str, Any]
        if speed.table == "TResNet 5":
            networks = code_variant(speed.line)
        else:
            networks = {"entries": steps.get(speed.line) or entries_of(PRINTED[speed.line])}
        table, name, resolution = key
        protocol = PROTOCOL_OF[table.partition(" ")[0]]
        printed[key] = Line(
            table=table, name=name, protocol=protocol, resolution=resolution, **networks
        )
    return list(printed.values())


def code_variant(name: str) -> dict[str, Any]:
    """A line of TResNet's Table 5, in which the code changes and the network does not."""
    shown: dict[str, tuple[Kind, ...]] = {"none": ("timm", "plain"), "+Inplace": ("fused",)}
    if name in shown:
        return {"entries": entries_of("tresnet_m"), "shown": shown[name]}
    return {"why_not": "cannot be switched separately here"}


def lines_of(names: Sequence[str], resolution: int | None) -> list[Line]:
    """Every protocol for each network, instead of the papers' lines."""
    selected = []
    for protocol in PROTOCOL_OF.values():
        for name in names:
            entries, side = (
                entries_of(name),
                resolution or (224 if protocol == "tresnet" else spec(name).resolution),
            )
            selected.append(
                Line(table=protocol, name=name, protocol=protocol, resolution=side, entries=entries)
            )
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
    modes: list[tuple[Layout, bool]] = [
        ("nhwc", False),
        ("nhwc", True),
        ("nchw", False),
        ("nchw", True),
    ]
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
    gpu = device.type == "cuda"
    batch = min(64, QUICK_BATCH[device.type]) if part.name == "genet" else QUICK_BATCH[device.type]
    rounds = part.rounds if gpu and part.name == "genet" else 5
    short = (
        dict(warmup_s=0.3, round_s=min(part.round_s, 0.1))
        if gpu
        else dict(warmup_s=0.0, round_s=1e-3)
    )
    return replace(part, fit="given", batch=batch, memory_batch=None, rounds=rounds, **short)
