"""Holds the commands that study kernels, blocks and the published figures."""

from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Literal

from fullstride.commands.flags import Device, Layout, Model
from fullstride.io.console import console

Figure = Literal["tresnet-4", "tresnet-5", "resnet-rs-4", "genet-2", "genet-3", "genet-5"]


def rank(
    model: Model,
    threshold: float = 0.5,
    pretrained: bool = False,
    layers: bool = False,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Print the rank of a network's kernels: singular values above a threshold, and by chance.

    Example: fullstride study rank resnet18 --pretrained

    Args:
        model: A run, a bundle, a file of weights, a name listed by `fullstride zoo`, or timm/NAME.
        threshold: The smallest singular value that counts, as a share of the largest.
        pretrained: Use a name's released weights instead of random weights.
        layers: Print one line for each convolution.
        out: A PNG file for the curves.
        json: Print one JSON object with all values instead of the table.
    """
    from fullstride.io.writing import PLOT, check_output
    from fullstride.papers import kernel_rank
    from fullstride.report.console_tables import table
    from fullstride.report.plots import save_png

    check_output(out, PLOT)
    net, weights = kernel_rank.find_network(model, pretrained=pretrained)
    rows = kernel_rank.ranks(net, threshold)
    if out:
        title = f"{model}, weights: {weights.partition(',')[0]}; threshold {threshold:g}"
        save_png(kernel_rank.rank_figure(rows, title), out)
    if json:
        values = [{**asdict(row), "kind": row.kind} for row in rows]
        about = {"model": model, "weights": weights, "threshold": threshold}
        print(dumps({**about, "layers": values}))
        return
    columns = kernel_rank.LAYER_COLUMNS if layers else kernel_rank.STAGE_COLUMNS
    lines = rows if layers else kernel_rank.by_stage(rows)
    console().print(table(columns, [line.cells() for line in lines]))
    print(f"{model}, weights: {weights}")
    print(
        f"rank: share of the singular values above {threshold:g} of the largest; chance: "
        "the share in Gaussian matrices of the same shape"
    )
    linear = sum(type(module).__name__ == "Linear" for module in net.modules())
    if linear > len(rows):
        print(f"{linear} linear layers, more than there are convolutions, are not included")
    if out:
        print(out)


@dataclass(frozen=True, kw_only=True)
class StackFlags:
    """The stacks of blocks to time."""

    # XX: two k x k convolutions; BL: a bottleneck; DW: an inverted bottleneck with a depthwise
    # convolution.
    kinds: tuple[Literal["XX", "BL", "DW"], ...] = ("XX", "BL", "DW")
    # Input and output channels of every block.
    width: tuple[int, ...] = (64, 128, 256, 512)
    # Inner channels / width, for every kind; by default XX 1, BL 0.25 0.5, DW 3 6 9.
    ratio: tuple[float, ...] = ()
    # Pixels a side of the activations.
    resolution: tuple[int, ...] = (56, 28, 14, 7)
    # Blocks per stack.
    depth: int = 4
    # Side k of the k x k convolutions.
    kernel: int = 3


@dataclass(frozen=True, kw_only=True)
class MethodFlags:
    """How stacks get their times."""

    device: Device = "auto"
    # A profile such as v100-fp16, or a profile's file, to estimate times instead of measuring.
    target: str = ""
    # Images per call; by default 64, and 1 on the CPU.
    call_batch: int | None = None
    # How often each stack is timed; by default 20.
    rounds: int | None = None
    # By default fp16 on a GPU and fp32 on the CPU.
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    # Memory format; by default nchw.
    layout: Layout | None = None


def bench_blocks(of: StackFlags, how: MethodFlags, out: Path | None = None) -> None:
    """Measure, or estimate, stacks of one kind of block over width, ratio and resolution.

    Example: fullstride study blocks

    Stacks of the same width and resolution are timed in turn.

    Args:
        out: A folder for blocks.json, which is complete after every line, and blocks.png.
    """
    from fullstride.papers import block_study
    from fullstride.report.plots import save_png

    if out:
        block_study.check_outputs(out)
    sizes = of.kinds, of.width, of.resolution, of.ratio
    stacks = block_study.stacks(*sizes, depth=of.depth, kernel=of.kernel)
    method = block_study.find_method(**vars(how))
    title = f"stacks of {of.depth} blocks, "
    rows: list[block_study.BlockTime] = []
    for row in block_study.study(stacks, method.time):
        if not rows:  # only now is it certain that the device can run the stacks
            print(f"{title}{of.kernel} x {of.kernel}, {method.description}")
            print(method.heading)
        print(row.line(), flush=True)
        rows.append(row)
        if out:
            method.save(out / block_study.TIMES, rows)
    if out:
        figure = block_study.block_figure(rows, title + method.description)
        save_png(figure, out / block_study.PLOT_NAME)


def figures(
    target: tuple[str, ...] = ("v100-fp16", "rtx3090"),
    bench: tuple[Path, ...] = (),
    only: tuple[Figure, ...] = (),
    out: Path = Path("figures"),
) -> None:
    """Draw the papers' figures from published, measured and estimated numbers, each marked as such.

    Example: fullstride study figures --out figures

    Args:
        target: Profiles, or their files: a figure uses the first with its kind of times. Few
            profiles have times of training steps.
        bench: Files of `bench --out`, results.json of `bench --suite papers`, and blocks.json of
            `study blocks --out`.
        only: The figures to draw; by default all.
        out: A folder for a PNG of each figure, and for figures.html with all.
    """
    from fullstride.latency.devices import load_profile
    from fullstride.papers.figures import write_figures

    profiles = [load_profile(name) for name in target]
    for path, content in write_figures(only, profiles, bench, out):
        print(f"{path}: {content}", flush=True)
