"""What networks are there, what do they cost, how fast are they here? Commands that measure."""

from dataclasses import replace
from functools import partial
from json import dumps, loads
from pathlib import Path

from tyro.conf import Positional

from fullstride.commands.flags import Device
from fullstride.terminal import console


def zoo() -> None:
    """List the networks: parameters, multiply-adds, published accuracy, and where weights are."""
    from fullstride.measure.cost import cost
    from fullstride.measure.tables import published
    from fullstride.nets.families import SPECS
    from fullstride.nets.network import Network
    from fullstride.nets.zoo import HUB

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


def cost(model: Positional[str], resolution: int | None = None, layers: bool = False) -> None:
    """Print parameters, multiply-adds (MACs; FLOPs are twice this) and activations of a network.

    Args:
        model: A name that `fullstride zoo` lists, or timm/NAME.
        resolution: Pixels a side; the network's own where not given.
        layers: One line for each convolution and linear layer.
    """
    from fullstride.measure import cost as measuring
    from fullstride.nets import zoo

    spec = zoo.spec(model)
    side = spec.resolution if resolution is None else resolution

    def build():
        return zoo.create(model)

    if layers:
        for row in measuring.layer_costs(build, side):
            print(f"{row.name:48} {row.shape_in!s:>18} -> {row.shape_out!s:18} {row.params:>12,} {row.macs:>16,}")
    price = measuring.cost(build, side)
    print(f"{model} at {side} x {side} pixels, from {spec.source}")
    print(f"{price.params:,} parameters, {price.macs:,} MACs, {price.activations:,} activations")


def bench(
    models: Positional[tuple[str, ...]],
    resolution: int | None = None,
    batch: int = 64,
    rounds: int = 20,
    device: Device = "auto",
    out: Path | None = None,
) -> None:
    """Measure latency of one image (p50, p90, p99) and throughput of a batch, the networks in turn.

    Args:
        models: Names that `fullstride zoo` lists, timm/NAME, runs or bundles.
        resolution: Pixels a side, the same for all; the first network's own where not given.
        batch: Images at a time for throughput; latency is always of one image.
        rounds: How often each network has its turn.
        device: Where to measure.
        out: A JSON file for all samples and the environment.
    """
    from rich.table import Table

    from fullstride.measure import bench as benching
    from fullstride.measure.environment import choose_device
    from fullstride.nets.disk import replacing
    from fullstride.nets.zoo import measurable

    if not models:
        raise ValueError("nothing to measure: name one or more networks or runs")
    nets = measurable(models)
    first = next(iter(nets.values())).spec
    asked = dict(resolution=first.resolution if resolution is None else resolution, rounds=rounds)
    protocols = replace(benching.ONLINE, **asked), replace(benching.THROUGHPUT, **asked, batch=batch)
    found = [benching.bench(nets, each, choose_device(device), first.in_channels) for each in protocols]
    table = Table("network", "ms p50", "p90", "p99", f"images/s at {batch}", "spread", box=None, header_style="bold")
    for online, throughput in zip(*found, strict=True):
        times = (f"{ms:.3f}" for ms in (online.ms_p50, online.ms_p90, online.ms_p99))
        table.add_row(online.name, *times, f"{throughput.images_per_s:,.1f}", f"{throughput.spread:.2f}")
    console().print(table)
    here = found[0][0].environment
    side = asked["resolution"]
    print(f"{side} x {side} x {first.in_channels}, float32, {here.device}, {here.threads} threads, torch {here.torch}")
    if out:
        with replacing(out) as beside:
            beside.write_text(dumps([loads(m.to_json()) for part in found for m in part], indent=1))
