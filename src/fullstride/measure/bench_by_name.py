"""Finds the networks and protocols of a benchmark by their names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from fullstride.measure import protocols
from fullstride.measure.bench import BenchOptions, bench_all
from fullstride.measure.environment import choose_device
from fullstride.measure.max_batch import check_not_compiled_twice
from fullstride.measure.protocols import BUSY, Measurement, Protocol
from fullstride.measure.settings import BenchSettings
from fullstride.measure.workload import Precision, find_precision
from fullstride.nets import padding
from fullstride.nets.backbone import Backbone
from fullstride.nets.bundle import no_head
from fullstride.nets.zoo import has_own_spec, measurable
from fullstride.tables import check_name

DEFAULT_PROTOCOLS = ("online", "throughput")
DEFAULT_REFERENCE = "timm/resnet50"  # where a protocol is named
TRESNET_RESOLUTION = 224  # pixels a side, as the paper measures all networks
BENCH = BenchSettings()
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """The networks to measure, and how."""

    nets: Mapping[str, nn.Module]  # in the order of measuring
    protocols: Mapping[str, Sequence[Protocol]]  # parts by name; parts are never compared
    device: torch.device
    precision: Precision | None  # None: each protocol's own
    options: BenchOptions

    def run(self) -> Iterator[list[list[Measurement]]]:
        """Measure, and yield the parts of each protocol.

        If the rounds of a network spread by more than `BUSY`, the protocol is measured once more,
        and the quieter measurement is the result.
        """
        for parts in self.protocols.values():
            yield quieter(partial(self.measure, parts), noise)

    def measure(self, parts: Sequence[Protocol]) -> list[list[Measurement]]:
        options = replace(self.options, precision=self.precision or parts[0].precision)
        return [*bench_all(self.nets, parts, self.device, options)]


def quieter(measure: Callable[[], T], noise: Callable[[T], float]) -> T:
    """Measure; if the machine was busy, measure once more and return the quieter rows."""
    rows = measure()
    return min(rows, measure(), key=noise) if noise(rows) > BUSY else rows


def noise(parts: Sequence[Sequence[Measurement]]) -> float:
    return max(protocols.spread_of_rounds(row) for part in parts for row in part)


def plan(
    models: Sequence[str],
    settings: BenchSettings = BENCH,
    files: Mapping[str, Any] | None = None,
    head: Callable[[Any, Backbone], nn.Module | None] = no_head,
) -> BenchPlan:
    """Find networks and protocols by name.

    `files` are modules with a `preprocessing` that run exported files, by name, and `head` builds
    the heads of bundles, see `zoo.load`. Raises ValueError, in one line, for what cannot be
    measured.
    """
    files = files or {}
    if not models:
        raise ValueError("nothing to measure: name one or more networks or runs")
    parts = find_protocols(settings)
    reference = settings.reference or (DEFAULT_REFERENCE if settings.protocol else None)
    reference = None if reference == "none" else reference
    flags = {name: getattr(settings, name) for name in ("precision", "compiled")}
    flags["layout"] = settings.layout != "nchw"
    names = {*models, *filter(None, [reference])}
    if names <= set(files) and (ignored := [f"--{name}" for name, value in flags.items() if value]):
        raise ValueError(f"{', '.join(ignored)}: a file computes as it was exported, leave it out")
    nets, first_side, options = find_networks(models, files, reference, settings, head)

    def adapted(part: Protocol) -> Protocol:
        side = TRESNET_RESOLUTION if part.name == "tresnet" else first_side
        batch = settings.call_batch if part.name == "throughput" else None
        return replace(
            part,
            rounds=part.rounds if settings.rounds is None else settings.rounds,
            batch=part.batch if batch is None else batch,
            resolution=side if settings.resolution is None else settings.resolution,
        )

    return BenchPlan(
        nets=nets,
        protocols={name: [adapted(part) for part in each] for name, each in parts.items()},
        device=choose_device(settings.device),
        precision=find_precision(settings.precision) if settings.precision else None,
        options=options,
    )


def find_protocols(settings: BenchSettings) -> dict[str, list[Protocol]]:
    """The parts of each protocol; only training parts where the efficiency is not plain."""
    efficiency, names = settings.efficiency, settings.protocol or DEFAULT_PROTOCOLS
    for name in names:
        check_name("protocol", name, protocols.PROTOCOLS)
    parts = {name: list(protocols.PROTOCOLS[name]) for name in names}
    if settings.call_batch is not None and "throughput" not in parts:
        raise ValueError(
            f"--call-batch {settings.call_batch} is for throughput: {', '.join(parts)} has its own"
        )
    if efficiency == "plain":
        return parts
    if settings.compiled:
        check_not_compiled_twice(efficiency)
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
    settings: BenchSettings,
    head: Callable[[Any, Backbone], nn.Module | None],
) -> tuple[dict[str, nn.Module], int, BenchOptions]:
    """Find the reference, unchanged, and the models in the form to measure.

    Returns the networks in the order of measuring, the resolution of the first model, and the
    options.
    """
    efficiency = settings.efficiency
    names = list(dict.fromkeys([*filter(None, [reference]), *models]))
    sizes = {name: files[name].preprocessing for name in names if name in files}
    channels: dict[str, int] = {name: size.channels for name, size in sizes.items()}
    own = measurable([name for name in names if name not in files], channels, head)
    channels |= {name: net.spec.in_channels for name, net in own.items()}
    sides = {name: size.resolution for name, size in sizes.items()}
    sides |= {name: net.spec.resolution for name, net in own.items() if has_own_spec(name)}
    first = sizes[models[0]] if models[0] in sizes else own[models[0]].spec
    nets: dict[str, nn.Module] = {name: own.get(name) or files[name] for name in models}
    if settings.padded:
        nets = {f"{name} padded": padding.to_padded(net, name) for name, net in nets.items()}
    if efficiency != "plain":
        nets = {f"{name} compiled": net for name, net in nets.items()}
    compiled_names = [] if efficiency == "plain" else [*nets]  # without an added reference
    labels = dict(zip(nets, dict.fromkeys(models), strict=True))
    if reference is not None:
        nets = {reference: own.get(reference) or files[reference]} | nets
        labels[reference] = reference
    resolutions = {label: sides[name] for label, name in labels.items() if name in sides}
    options = BenchOptions(
        in_channels=channels[names[0]],
        layout=settings.layout,
        compiled=settings.compiled,
        efficiency=dict.fromkeys(compiled_names, efficiency),
        resolutions=resolutions if settings.resolution is None else {},
        reference=reference,
        memory_gib=settings.memory_gib,
    )
    return nets, first.resolution, options
