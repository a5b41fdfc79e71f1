"""What networks are there, what do they cost, how fast are they here? Commands that measure."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional, UseAppendAction

from fullstride.commands.flags import Device, Efficiency
from fullstride.console import console

if TYPE_CHECKING:
    from torch import nn

    from fullstride.measure.protocols import Measurement

SIDE_BY_SIDE = ("online", "throughput")  # what is measured where no protocol is named
REFERENCE = "timm/resnet50"


def zoo() -> None:
    """List the networks: parameters, multiply-adds, published accuracy, and where weights are."""
    from fullstride.measure.cost.flops import cost
    from fullstride.nets.families import SPECS
    from fullstride.nets.network import Network
    from fullstride.nets.weights.hub import HUB
    from fullstride.tables import published

    line = "{:18} {:>9} {:>8} {:>6}  {:28} {}".format
    scored = published()
    print(line("network", "params M", "MACs G", "pixels", "published top-1 % (pixels)", "weights"))
    for name, spec in SPECS.items():
        price = cost(partial(Network, spec), spec.resolution)
        scores = ", ".join(f"{p.top1:g} ({p.resolution})" for p in scored if p.name == name)
        weights = f"hub: timm/{HUB[name]}" if name in HUB else ""
        size = f"{price.params / 1e6:.2f}", f"{price.macs / 1e9:.3f}", spec.resolution
        print(line(name, *size, scores, weights), flush=True)
    print("Any network of timm goes by timm/NAME wherever these go.")


def cost(
    model: Positional[str],
    resolution: int | None = None,
    layers: bool = False,
    train: bool = False,
    precision: str = "bf16",
) -> None:
    """Print what a network asks for, whole and by stage: parameters, multiply-adds (MACs; FLOPs are twice this), bytes.

    Args:
        model: A name that `fullstride zoo` lists, or timm/NAME.
        resolution: Pixels a side; the network's own where not given.
        layers: One line for each convolution and linear layer, and with --train for each layer that keeps something.
        train: Also the bytes that a training step on a GPU keeps for its backward pass.
        precision: That bytes are counted in: fp32, bf16 or fp16.
    """
    from fullstride.measure.cost import flops as measuring
    from fullstride.measure.cost.by_stage import StageCost, stage_costs
    from fullstride.measure.memory.activation_bytes import saved
    from fullstride.measure.workload import find_precision
    from fullstride.nets import zoo
    from fullstride.nets.spec import NetSpec

    spec, half = zoo.spec(model), find_precision(precision)
    side = spec.resolution if resolution is None else resolution
    if side < 1:
        raise ValueError(f"resolution {side}: use a whole number from 1")

    def build():
        return zoo.create(model)

    if layers:
        for row in measuring.layer_costs(build, side, spec.in_channels):
            print(
                f"{row.name:48} {row.shape_in!s:>18} -> {row.shape_out!s:18} {row.params:>12,} {row.macs:>16,}"
            )
    price = measuring.cost(build, side, spec.in_channels)
    rows = stage_costs(build, side, half, spec.in_channels)
    print(f"{model} at {side} x {side} pixels, from {spec.source}")
    print(f"{price.params:,} parameters, {price.macs:,} MACs, {price.activations:,} activations")
    print(f"MACs are multiply-adds; FLOPs are 2 x MACs: {2 * price.macs:,}")
    kept: dict[str, int] = {}
    if train:
        held = saved(build, side, half, spec.in_channels)
        kept = {**held.by_stage, "total": held.bytes_per_image}
        for name, size in held.by_layer.items() if layers else ():
            print(f"{name or 'loss':48} {size:>14,} bytes kept")
        print(
            f"{kept['total']:,} bytes an image are kept for backward in {half}: {kept['total'] / 1e6:.1f} MB"
        )
        for way, int8 in (
            (("lean", False), ("lean with int8 maps", True)) if isinstance(spec, NetSpec) else ()
        ):
            least = saved(
                lambda int8=int8: zoo.create(model, efficiency="lean", int8=int8), side, half
            ).bytes_per_image
            print(f"{least:,} bytes where it trains {way}: {least / 1e6:.1f} MB")
        rows += [
            StageCost(stage, 0, 0, 0, 0)
            for stage in held.by_stage
            if stage not in {row.stage for row in rows}
        ]
    moved = sum(row.moved_bytes for row in rows)
    rows.append(StageCost("total", price.params, price.macs, price.activations, moved))
    line = "{:20} {:>13} {:>16} {:>13} {:>9}" + " {:>9}" * train
    print(line.format("stage", "parameters", "MACs", "activations", "MB moved", "MB kept"))
    for row in rows:
        megabytes = f"{row.moved_bytes / 1e6:.2f}", f"{kept.get(row.stage, 0) / 1e6:.2f}"
        print(
            line.format(
                row.stage, f"{row.params:,}", f"{row.macs:,}", f"{row.activations:,}", *megabytes
            )
        )
    print(
        f"MB moved: maps of one image that operators read and write in {half}, each by itself; weights are not in"
    )


def bench(
    models: Positional[tuple[str, ...]],
    protocol: UseAppendAction[tuple[str, ...]] = (),
    resolution: int | None = None,
    batch: int | None = None,
    rounds: int | None = None,
    device: Device = "auto",
    precision: str | None = None,
    layout: Literal["nchw", "nhwc"] = "nchw",
    compiled: bool = False,
    efficiency: Efficiency = "plain",
    padded: bool = False,
    memory_gib: float | None = None,
    reference: str | None = None,
    suite: Literal["papers"] | None = None,
    quick: bool = False,
    out: Path | None = None,
    trust: bool = False,
) -> None:
    """Measure latency of one image (p50, p90, p99) and throughput of a batch, or by a paper's protocol, in turn.

    Args:
        models: Names that `fullstride zoo` lists, timm/NAME, runs, bundles, or what `fullstride export` wrote: files
            of the same input are run by their own engines, on the CPU.
        protocol: online, throughput, tresnet, genet, resnet_rs (see docs/measuring.md); online and throughput
            in one table where not given.
        resolution: Pixels a side, the same for all; the first network's own where not given, 224 for tresnet.
        batch: Images at a time for throughput (64); the other protocols have their own.
        rounds: How often each network has its turn; the protocol's own where not given.
        device: Where to measure.
        precision: fp32, bf16 or fp16; the protocol's own where not given.
        layout: Order of channels in memory.
        compiled: Measure what torch.compile makes of the networks.
        padded: Give the networks, but not the reference, channels of zeros up to multiples of 8.
        memory_gib: Use no more of the GPU's memory.
        reference: The network that ratios are to, or none; timm/resnet50 where a protocol is named.
        suite: The tables of the papers on one page, in both layouts, eager and compiled, or all their protocols for
            the models named. Started again, it goes on.
        quick: Of the suite the few lines that say most, with given batches and short rounds: under 8 minutes on a GPU.
        out: A JSON file for all samples and the environment; for a suite a folder, suite where not given.
        trust: Measure files of the formats pt2 and aoti, which are programs, too.
    """
    if suite:
        own = dict(
            protocol=protocol, batch=batch, rounds=rounds, compiled=compiled, reference=reference
        )
        own |= dict(efficiency=efficiency != "plain", padded=padded)
        if given := [f"--{name}" for name, value in own.items() if value]:
            raise ValueError(
                f"{', '.join(given)} with --suite {suite}: leave it out, the suite has its own"
            )
        run_suite(models, resolution, device, precision, memory_gib, quick, out or Path("suite"))
        return
    if quick:
        raise ValueError("--quick is for a suite: say --suite papers too")
    from fullstride.deploy.exported import ExportedModule
    from fullstride.measure.bench import bench_all
    from fullstride.measure.environment import choose_device
    from fullstride.measure.protocols import find_protocol
    from fullstride.measure.workload import find_precision
    from fullstride.nets import fused_form
    from fullstride.storage import atomic_write

    if not models:
        raise ValueError("nothing to measure: name one or more networks or runs")
    names = protocol or SIDE_BY_SIDE
    parts = {name: find_protocol(name) for name in names}
    if batch is not None and "throughput" not in parts:
        raise ValueError(f"--batch {batch} is for throughput: {', '.join(parts)} has its own")
    if efficiency != "plain":
        if compiled:
            raise ValueError(
                f"--compiled with --efficiency {efficiency}: say --efficiency compiled, or leave one out"
            )
        parts = {
            name: [part for part in each if part.work == "training"] for name, each in parts.items()
        }
        if not all(parts.values()):
            raise ValueError(
                f"--efficiency {efficiency}: inference has no fused form, use --protocol tresnet or resnet_rs"
            )
    if reference is None and protocol:
        reference = REFERENCE
    reference = None if reference == "none" else reference
    nets, own_side, channels = entrants(
        [*dict.fromkeys(models if reference is None else (reference, *models))], trust
    )
    own = dict(precision=precision, layout=layout != "nchw", compiled=compiled)
    if given := [
        f"--{name}"
        for name, value in own.items()
        if value and all(isinstance(net, ExportedModule) for net in nets.values())
    ]:
        raise ValueError(f"{', '.join(given)}: a file computes as it was exported, leave it out")
    if padded:
        own_side |= {f"{name} padded": own_side[name] for name in models}
        wide = {f"{name} padded": fused_form.padded(nets[name], name) for name in models}
        nets, models = (
            {**({} if reference is None else {reference: nets[reference]}), **wide},
            tuple(wide),
        )
    place = choose_device(device)
    how: dict[str, Any] = dict(
        layout=layout, compiled=compiled, memory_gib=memory_gib, reference=reference
    )
    if efficiency != "plain":
        nets, how["efficiency"] = entered(nets, models, efficiency, reference)

    found: dict[str, list[list[Measurement]]] = {}
    for name, each in parts.items():
        side = (
            resolution
            if resolution is not None
            else 224
            if name == "tresnet"
            else own_side[models[0]]
        )
        changes = dict(
            resolution=side, rounds=rounds, batch=batch if name == "throughput" else None
        )
        changes = {key: value for key, value in changes.items() if value is not None}
        asked = [replace(part, **changes) for part in each]
        took = find_precision(precision) if precision else each[0].precision
        found[name] = list(bench_all(nets, asked, place, channels, precision=took, **how))
        if protocol:
            show(found[name])
    if not protocol:
        show_side_by_side(*(rows for name in SIDE_BY_SIDE for rows in found[name]))
    rows = [row for parts in found.values() for part in parts for row in part]
    here = rows[-1].environment
    sizes = " and ".join(
        dict.fromkeys(f"{r.protocol.resolution} x {r.protocol.resolution}" for r in rows)
    )
    made = ", ".join(dict.fromkeys(row.precision for row in rows))
    ways = " and ".join(dict.fromkeys("compiled" if row.compiled else "eager" for row in rows))
    where = f"{here.device}, {here.threads} threads, torch {here.torch}"
    print(f"{sizes} x {channels}, {made}, {layout}, {ways}, {where}")
    if efficiency != "plain" and "tresnet" in parts:
        print("inference has no fused form: measure it without --efficiency")
    for told in dict.fromkeys(f"{row.name}: {row.runtime}" for row in rows if row.runtime):
        print(told)
    if out:
        with atomic_write(out) as beside:
            beside.write_text(dumps([loads(row.to_json()) for row in rows], indent=1))


def entrants(
    names: "Sequence[str]", trust: bool
) -> "tuple[dict[str, nn.Module], dict[str, int], int]":
    """What is to be measured on the same input, networks and files by name; the resolution of each; the channels."""
    from fullstride.deploy.exported import ExportedModule
    from fullstride.deploy.formats import is_exported_path, open_file
    from fullstride.nets.zoo import measurable

    files = {name: open_file(name, trust=trust) for name in names if is_exported_path(name)}
    channels = {name: each.preprocessing.channels for name, each in files.items()}
    nets = measurable([name for name in names if name not in files], channels)
    channels |= {name: net.spec.in_channels for name, net in nets.items()}
    sides = {name: each.preprocessing.resolution for name, each in files.items()}
    sides |= {name: net.spec.resolution for name, net in nets.items()}
    return (
        {name: nets.get(name) or ExportedModule(files[name]) for name in names},
        sides,
        channels[names[0]],
    )


def entered(
    nets: "dict[str, nn.Module]",
    models: "Sequence[str]",
    efficiency: Efficiency,
    reference: str | None,
) -> "tuple[dict[str, nn.Module], dict[str, Efficiency]]":
    """The reference as it is and the models by a name that says how they train; and that, by name."""
    from fullstride.measure.workload import lean_form

    word = {"lean": "lean", "compiled": "lean compiled"}[efficiency]
    lean = {f"{name} {word}": lean_form(nets[name], name) for name in models}
    return {**({} if reference is None else {reference: nets[reference]}), **lean}, dict.fromkeys(
        lean, efficiency
    )


def run_suite(
    models: "Sequence[str]",
    resolution: int | None,
    device: str,
    precision: str | None,
    memory_gib: float | None,
    quick: bool,
    out: Path,
) -> None:
    from fullstride.measure.environment import choose_device
    from fullstride.measure.workload import find_precision
    from fullstride.papers import suite

    took = find_precision(precision) if precision else None
    how: dict[str, Any] = dict(
        resolution=resolution, precision=took, memory_gib=memory_gib, quick=quick
    )
    for row in suite.run(out, device=choose_device(device), networks=models, **how):
        print(row.summary(), flush=True)
    print(f"the page: {out / suite.PAGE}")


def show_side_by_side(online: "Sequence[Measurement]", throughput: "Sequence[Measurement]") -> None:
    """A table of two protocols, each with columns of its own."""
    from rich.table import Table

    batch, reference = throughput[0].protocol.batch, throughput[0].reference
    columns = ["network", "ms p50", "p90", "p99", f"images/s at {batch}", "spread"]
    table = Table(
        *columns, *([f"to {reference}"] if reference else []), box=None, header_style="bold"
    )
    for one, many in zip(online, throughput, strict=True):
        times = (f"{ms:.3f}" for ms in (one.ms_p50, one.ms_p90, one.ms_p99))
        ratio = [] if many.ratio is None else [f"{many.ratio:.2f}"]
        table.add_row(one.name, *times, f"{many.images_per_s:,.1f}", f"{many.spread:.2f}", *ratio)
    console().print(table)


def show(parts: "Sequence[Sequence[Measurement]]") -> None:
    """A table of one protocol; its parts stand apart, and ratios are within one."""
    from rich.table import Table

    one = parts[0][0]
    columns = columns_of(one)
    named = [f"to {one.reference}"] if one.reference else []
    table = Table(
        one.protocol.name,
        "work",
        "batch",
        *columns,
        "spread",
        *named,
        box=None,
        header_style="bold",
    )
    for rows in parts:
        for row in rows:
            ratio = [] if row.ratio is None else [f"{row.ratio:.2f}"]
            told = (say(row) for say in columns.values())
            table.add_row(
                row.name,
                row.protocol.work,
                str(row.protocol.batch),
                *told,
                f"{row.spread:.2f}",
                *ratio,
            )
        table.add_row()
    console().print(table)


def columns_of(one: "Measurement") -> dict[str, Any]:
    """What a protocol tells beside the network, the batch, the spread and the ratio."""
    found: dict[str, Any] = {
        "online": {
            f"ms p{p}": lambda row, p=p: f"{getattr(row, f'ms_p{p}'):.3f}" for p in (50, 90, 99)
        },
        "genet": {"ms/image": lambda row: f"{row.ms_per_image:.3f}"},
        "resnet_rs": {"s/128 images": lambda row: f"{128 / row.images_per_s:.3f}"},
    }.get(one.protocol.name, {"images/s": lambda row: f"{row.images_per_s:,.1f}"})
    if one.largest_batch:
        found["largest batch"] = lambda row: str(row.largest_batch)
    if one.peak_memory_mib:
        images = f" at {one.protocol.memory_batch}" if one.protocol.memory_batch else ""
        found[f"peak MiB{images}"] = lambda row: f"{row.peak_memory_mib:,.0f}"
    if one.cpu_ms_per_image:
        found["CPU ms/image"] = lambda row: f"{row.cpu_ms_per_image:.3f}"
    return found
