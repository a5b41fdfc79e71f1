"""Which networks and protocols does a benchmark by names compare?"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullstride.measure.bench import bench_all
from fullstride.measure.protocols import Measurement, Protocol, find_protocol
from fullstride.measure.timing import BUSY, spread_of_rounds
from fullstride.measure.workload import (
    Layout,
    Precision,
    find_precision,
    fused_copy,
)
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import no_head
from fullstride.nets.efficiency import Efficiency, is_fused
from fullstride.nets.zoo import measurable

DEFAULT_PROTOCOLS = ("online", "throughput")
DEFAULT_REFERENCE = "timm/resnet50"  # where a protocol is named
LABELS: dict[Efficiency, str] = {
    "fused": "fused",
    "plain_compiled": "compiled",
    "fused_compiled": "fused compiled",
}
TRESNET_RESOLUTION = 224  # pixels a side, as the paper measures all networks


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Networks that take the same input, in the order in which they are measured."""

    nets: Mapping[str, nn.Module]
    resolution: int  # pixels a side: the first model's own
    resolutions: Mapping[str, int]  # by name, of runs, bundles and files: their own
    in_channels: int
    efficiency: Mapping[str, Efficiency]  # by name; plain where a name is missing


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured, and how."""

    networks: Networks
    protocols: Mapping[str, Sequence[Protocol]]  # the parts of each, which are never compared
    device: torch.device | str
    precision: Precision | None  # None: each protocol's own
    options: Mapping[str, Any]  # of `bench`

    def run(self) -> Iterator[list[list[Measurement]]]:
        """Measure; yields the parts of each protocol.

        Where the rounds of a network spread by more than `BUSY`, a protocol is measured once more,
        and the quieter of the two is the result.
        """
        for parts in self.protocols.values():
            rows = self.measure(parts)
            yield min(rows, self.measure(parts), key=noise) if noise(rows) > BUSY else rows

    def measure(self, parts: Sequence[Protocol]) -> list[list[Measurement]]:
        nets, channels = self.networks.nets, self.networks.in_channels
        precision = self.precision or parts[0].precision
        return [*bench_all(nets, parts, self.device, channels, precision=precision, **self.options)]


def noise(parts: Sequence[Sequence[Measurement]]) -> float:
    return max(spread_of_rounds(row) for part in parts for row in part)


def plan(
    models: Sequence[str],
    *,
    protocols: Sequence[str] = (),
    files: Mapping[str, Any] | None = None,
    resolution: int | None = None,
    batch: int | None = None,
    rounds: int | None = None,
    device: torch.device | str = "cpu",
    precision: str | None = None,
    layout: Layout = "nchw",
    compiled: bool = False,
    efficiency: Efficiency = "plain",
    padded: bool = False,
    memory_gib: float | None = None,
    reference: str | None = None,
    head: Callable[[Any, Backbone], nn.Module | None] = no_head,
) -> Plan:
    """Find networks and protocols by name; see `fullstride bench --help` for the arguments.

    `files` are modules with a `preprocessing` that run exported files, by name, and `head` builds
    the heads of bundles, see `zoo.load`. Raises ValueError, in one line, for what cannot be
    measured.
    """
    files = files or {}
    if not models:
        raise ValueError("nothing to measure: name one or more networks or runs")
    parts = find_protocols(protocols, batch, efficiency, compiled)
    if reference is None and protocols:
        reference = DEFAULT_REFERENCE
    reference = None if reference == "none" else reference
    flags = dict(precision=precision, layout=layout != "nchw", compiled=compiled)
    names = {*models, *filter(None, [reference])}
    if names <= set(files) and (ignored := [f"--{name}" for name, value in flags.items() if value]):
        raise ValueError(f"{', '.join(ignored)}: a file computes as it was exported, leave it out")
    networks = find_networks(models, files, reference, efficiency, padded, head)

    def adapted(part: Protocol) -> Protocol:
        own = TRESNET_RESOLUTION if part.name == "tresnet" else networks.resolution
        changes = dict(rounds=rounds, batch=batch if part.name == "throughput" else None)
        changes = {key: value for key, value in changes.items() if value is not None}
        return replace(part, resolution=own if resolution is None else resolution, **changes)

    return Plan(
        networks=networks,
        protocols={name: [adapted(part) for part in each] for name, each in parts.items()},
        device=device,
        precision=find_precision(precision) if precision else None,
        options=dict(
            layout=layout,
            compiled=compiled,
            memory_gib=memory_gib,
            reference=reference,
            efficiency=networks.efficiency,
            resolutions=networks.resolutions if resolution is None else {},
        ),
    )


def find_protocols(
    names: Sequence[str], batch: int | None, efficiency: Efficiency, compiled: bool
) -> dict[str, list[Protocol]]:
    """The parts of each protocol; only those that train where `efficiency` is not plain."""
    parts = {name: list(find_protocol(name)) for name in names or DEFAULT_PROTOCOLS}
    if batch is not None and "throughput" not in parts:
        raise ValueError(f"--batch {batch} is for throughput: {', '.join(parts)} has its own")
    if efficiency == "plain":
        return parts
    if compiled:
        raise ValueError(
            f"--compiled with --efficiency {efficiency}: use --efficiency plain_compiled or "
            "fused_compiled, or leave one out"
        )
    training = {name: [p for p in each if p.work == "training"] for name, each in parts.items()}
    if not all(training.values()):
        raise ValueError(
            f"--efficiency {efficiency} is for training: use --protocol tresnet or resnet_rs"
        )
    return training


def find_networks(
    models: Sequence[str],
    files: Mapping[str, Any],
    reference: str | None,
    efficiency: Efficiency,
    padded: bool,
    head: Callable[[Any, Backbone], nn.Module | None] = no_head,
) -> Networks:
    """The reference as it is, and the models in the form in which they are to be measured."""
    names = list(dict.fromkeys([*filter(None, [reference]), *models]))
    sizes = {name: files[name].preprocessing for name in names if name in files}
    channels: dict[str, int] = {name: size.channels for name, size in sizes.items()}
    own = measurable([name for name in names if name not in files], channels, head)
    channels |= {name: net.spec.in_channels for name, net in own.items()}
    sides = {name: size.resolution for name, size in sizes.items()}
    sides |= {name: net.spec.resolution for name, net in own.items() if Path(name).exists()}
    first = sizes[models[0]] if models[0] in sizes else own[models[0]].spec
    forms: dict[str, nn.Module] = {name: own.get(name) or files[name] for name in models}
    if padded:
        from fullstride.nets import fused_form

        forms = {f"{name} padded": fused_form.padded(net, name) for name, net in forms.items()}
    if efficiency != "plain":
        forms = {
            f"{name} {LABELS[efficiency]}": fused_copy(net, name) if is_fused(efficiency) else net
            for name, net in forms.items()
        }
    labels = dict(zip(forms, dict.fromkeys(models), strict=True))
    unchanged: dict[str, nn.Module] = {}
    if reference is not None:
        unchanged[reference] = own.get(reference) or files[reference]
        labels[reference] = reference
    return Networks(
        nets=unchanged | forms,
        resolution=first.resolution,
        resolutions={label: sides[name] for label, name in labels.items() if name in sides},
        in_channels=channels[names[0]],
        efficiency={} if efficiency == "plain" else dict.fromkeys(forms, efficiency),
    )
