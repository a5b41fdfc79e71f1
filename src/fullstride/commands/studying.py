"""Why are networks built as they are? Commands that look into kernels and blocks."""

from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from fullstride.console import console

if TYPE_CHECKING:
    from fullstride.measure.workload import Layout
    from fullstride.papers.block_study import BlockTime, Timer


def rank(
    model: Positional[str],
    threshold: float = 0.5,
    pretrained: bool = False,
    layers: bool = False,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Print how much of its kernels a network uses: singular values above a threshold, beside those of chance.

    Args:
        model: A run, a bundle, a file of weights, a name that `fullstride zoo` lists, or timm/NAME.
        threshold: Which singular values count, as a share of the largest.
        pretrained: Of a name take the released weights instead of fresh ones.
        layers: One line for each convolution.
        out: A PNG file for the curves.
        json: One JSON object with all values instead of the table.
    """
    from fullstride.nets import zoo
    from fullstride.papers.kernel_rank import by_stage, ranks
    from fullstride.storage import atomic_write

    if pretrained or Path(model).exists():
        bundle = zoo.load(model)
        net, weights = bundle.net, bundle.source or model
    else:
        net, weights = zoo.create(model), "fresh ones, which tell of chance alone"
    rows = ranks(net, threshold)
    if out:
        from fullstride.papers.rank_plot import rank_figure
        from fullstride.report.plots import png

        with atomic_write(out) as beside:
            beside.write_bytes(
                png(
                    rank_figure(
                        rows,
                        f"{model}, weights: {weights.partition(',')[0]}; threshold {threshold:g}",
                    )
                )
            )
    if json:
        told = [{**asdict(row), "kind": row.kind} for row in rows]
        print(dumps(dict(model=model, weights=weights, threshold=threshold, layers=told)))
        return
    from rich.table import Table

    if layers:
        table = Table(
            "layer",
            "kernel",
            "stride",
            "kind",
            "rank",
            "chance",
            "relative",
            box=None,
            header_style="bold",
        )
        for row in rows:
            numbers = (f"{value:.2f}" for value in (row.rank, row.random_rank, row.relative))
            table.add_row(
                row.name, " x ".join(map(str, row.shape)), str(row.stride), row.kind, *numbers
            )
    else:
        columns = (
            "stage",
            "kind",
            "layers",
            "rank",
            "chance",
            "relative",
            "lowest",
            "its relative",
        )
        table = Table(*columns, box=None, header_style="bold")
        for stage in by_stage(rows):
            numbers = (f"{value:.2f}" for value in (stage.rank, stage.random_rank, stage.relative))
            lowest = stage.lowest.name, f"{stage.lowest.relative:.2f}"
            table.add_row(stage.stage, stage.kind, str(stage.layers), *numbers, *lowest)
    console().print(table)
    print(f"{model}, weights: {weights}")
    print(
        f"rank: share of the singular values above {threshold:g} of the largest; chance: Gaussian, same shape"
    )
    linear = sum(type(part).__name__ == "Linear" for part in net.modules())
    if linear > len(rows):
        print(
            f"{linear} linear layers are not in, of which there are more than convolutions: this tells little here"
        )
    if out:
        print(out)


def bench_blocks(
    kinds: tuple[str, ...] = ("XX", "BL", "DW"),
    width: tuple[int, ...] = (64, 128, 256, 512),
    ratio: tuple[float, ...] = (),
    resolution: tuple[int, ...] = (56, 28, 14, 7),
    depth: int = 4,
    kernel: int = 3,
    batch: int | None = None,
    rounds: int | None = None,
    device: str = "auto",
    precision: str | None = None,
    layout: Literal["nchw", "nhwc"] | None = None,
    out: Path | None = None,
) -> None:
    """Measure, or estimate, stacks of one kind of block over width, ratio and resolution, those of one size in turn.

    Args:
        kinds: XX two k x k convolutions, BL a bottleneck, DW an inverted one with a depthwise convolution.
        width: Channels in and out of every block.
        ratio: Channels inside / width, of every kind; where not given XX 1, BL 0.25 0.5, DW 3 6 9.
        resolution: Of the map, pixels a side.
        depth: Blocks in a stack.
        kernel: Pixels a side of the k x k convolutions.
        batch: Images at a time; 64, but 1 on the CPU, where not given.
        rounds: How often each stack has its turn; 20 where not given.
        device: cpu, cuda, cuda:1 or auto to measure; a profile, or its file, to estimate without the device.
        precision: fp32, bf16 or fp16; fp16 on a GPU, fp32 on the CPU where not given.
        layout: Order of channels in memory; nchw where not given.
        out: A folder for blocks.json, which is whole after every line, and at the end blocks.png.
    """
    from fullstride.papers.block_study import stacks, study
    from fullstride.storage import atomic_write

    if out and out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder with --out")
    asked = stacks(kinds, width, resolution, ratio, depth=depth, kernel=kernel)
    if device in ("auto", "cpu") or device.startswith("cuda"):
        time, how, told = measuring(device, batch, rounds, precision, layout)
    else:
        own = dict(rounds=rounds, precision=precision, layout=layout)
        if given := [f"--{name}" for name, value in own.items() if value is not None]:
            raise ValueError(
                f"{', '.join(given)} with --device {device}: leave it out, the profile has its own"
            )
        time, how, told = estimating(device, 64 if batch is None else batch)
    span_name = "10 to 90 % of rounds" if told["how"] == "measured" else "90 % interval"
    line = "{:4} {:>6} {:>6} {:>6} {:>10} {:>10} {:>10}  {:21} {:>9}".format
    columns = (
        "kind",
        "ratio",
        "width",
        "map",
        "params M",
        "MACs M",
        "ms/image",
        span_name,
        "GMACs/s",
    )
    rows: list[BlockTime] = []
    for row in study(asked, time):
        if not rows:  # only now is it sure that this can be measured
            print(f"stacks of {depth} blocks, {kernel} x {kernel}, {how}")
            print(line(*columns))
        ms, span = f"{row.ms_per_image:.4g}", f"{row.ms_low:.4g} to {row.ms_high:.4g}"
        size = f"{row.params / 1e6:.3f}", f"{row.macs / 1e6:.1f}"
        speed = f"{row.macs / row.ms_per_image / 1e6:,.1f}"
        print(
            line(row.kind, f"{row.ratio:g}", row.width, row.resolution, *size, ms, span, speed),
            flush=True,
        )
        rows.append(row)
        if out:
            with atomic_write(out / "blocks.json") as beside:
                beside.write_text(dumps({**told, "rows": [asdict(row) for row in rows]}, indent=1))
    if out:
        from fullstride.papers.block_plot import block_figure
        from fullstride.report.plots import png

        with atomic_write(out / "blocks.png") as beside:
            beside.write_bytes(png(block_figure(rows, f"stacks of {depth} blocks, {how}")))


def measuring(
    device: str,
    batch: int | None,
    rounds: int | None,
    precision: str | None,
    layout: "Layout | None",
) -> "tuple[Timer, str, dict[str, Any]]":
    """What times stacks here, how in words, and how for the file."""
    from fullstride.measure.environment import Environment, choose_device
    from fullstride.measure.protocols import THROUGHPUT
    from fullstride.measure.workload import find_precision
    from fullstride.papers.block_study import measured

    place = choose_device(device)
    gpu = place.type == "cuda"
    half, order = find_precision(precision or ("fp16" if gpu else "fp32")), layout or "nchw"
    images = (64 if gpu else 1) if batch is None else batch
    protocol = replace(
        THROUGHPUT, batch=images, rounds=THROUGHPUT.rounds if rounds is None else rounds
    )
    here = Environment.here(place)
    how = f"measured on {here.device}, {here.threads} threads, torch {here.torch}, {half}, {order}, batch {images}"
    told = dict(
        how="measured",
        protocol=asdict(protocol),
        precision=half,
        layout=order,
        environment=asdict(here),
    )
    return measured(place, protocol, precision=half, layout=order), how, told


def estimating(device: str, batch: int) -> "tuple[Timer, str, dict[str, Any]]":
    """The same for a device that need not be here."""
    from fullstride.latency.profiles import load_profile
    from fullstride.papers.block_study import estimated

    profile = load_profile(device)
    how = f"estimated for {profile.device} by the profile {profile.name}, {profile.precision}, batch {batch}"
    return (
        estimated(profile, batch),
        how,
        dict(how="estimated", batch=batch, profile=asdict(profile)),
    )
