"""Which networks are there, what do they cost, how fast are they here? Commands that measure."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from tyro.conf import UseAppendAction

from fullstride.commands.flags import (
    Device,
    Efficiency,
    Layout,
    Model,
    Models,
    StepRecipe,
    refuse_flags,
)
from fullstride.io.console import console


def zoo() -> None:
    """List the networks: parameters, multiply-adds, published accuracy, and where weights are.

    Example: fullstride zoo
    """
    from fullstride.tables import networks, published

    line = "{:18} {:>9} {:>8} {:>6}  {:28} {}".format
    accuracies = published()
    print(line("network", "params M", "MACs G", "pixels", "published top-1 % (pixels)", "weights"))
    for row in networks():
        scores = (f"{p.top1:g} ({p.resolution})" for p in accuracies if p.name == row.name)
        weights = f"hub: {row.weights}" if row.weights else ""
        size = f"{row.params / 1e6:.2f}", f"{row.macs / 1e9:.3f}", row.size
        print(line(row.name, *size, ", ".join(scores), weights))
    print("Wherever these names are accepted, timm/NAME is any network of timm.")


def cost(
    model: Model,
    resolution: int | None = None,
    layers: bool = False,
    train: bool = False,
    precision: str | None = None,
    step_recipe: StepRecipe = "",
    task: str = "",
    classes: int | None = None,
    frames: int | None = None,
) -> None:
    """Print the cost of a network and of its stages: parameters, multiply-adds (MACs) and bytes.

    Example: fullstride measure cost tresnet_m

    FLOPs are twice the MACs.

    Args:
        model: A name that `fullstride zoo` lists, timm/NAME, a run, a bundle, or a file of weights.
        resolution: Pixels a side; by default the network's own.
        layers: Print a line for each convolution and linear layer too, and with --train for each
            layer that saves tensors.
        train: Print also the bytes that a training step on a GPU saves for its backward pass.
        precision: Of the tensors whose bytes are counted: fp32, bf16 or fp16; by default that of
            the recipe, or else bf16.
        task: Of a name: count the head of this task too, such as detect, segment or depth, with
            what it computes of the network's maps. Runs and bundles have their own.
        classes: Of a name: outputs for so many classes; by default the network's own.
        frames: Of the name of a network of clips: so many frames; by default its own.
    """
    from fullstride import tasks
    from fullstride.measure.cost import network_cost
    from fullstride.measure.workload import find_precision
    from fullstride.nets.efficiency import short_precision
    from fullstride.report import console_lines
    from fullstride.train.recipes.named import training_step

    if step_recipe and not train:
        raise ValueError(f"--recipe {step_recipe} is for --train: say --train too")
    step = training_step(step_recipe, resolution=resolution, precision=precision)
    counted = step["resolution"], find_precision(step["precision"])
    network = tasks.find_network(model, task, classes, frames)
    total = network_cost(network, *counted, training=train, form=step["form"])
    if layers:
        print(*console_lines.layer_lines(total), sep="\n")
    print(*console_lines.whole_lines(total), sep="\n")
    if train:
        print(*console_lines.saved_lines(total, by_layer=layers), sep="\n")
    print(*console_lines.stage_lines(total), sep="\n")
    print(
        "MB moved: activations of one image that operators read and write in "
        f"{short_precision(total.precision)}, without fusing any; weights are not included"
    )


def bench(
    models: Models,
    protocol: UseAppendAction[tuple[str, ...]] = (),
    resolution: int | None = None,
    batch: int | None = None,
    rounds: int | None = None,
    device: Device = "auto",
    precision: str | None = None,
    layout: Layout = "nchw",
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
    """Measure latency (p50, p90, p99) and throughput of networks in turn, or a paper's protocol.

    Example: fullstride bench genet_light timm/resnet18

    Args:
        models: Names that `fullstride zoo` lists, timm/NAME, runs, bundles, or exported files,
            which are run by their own runtimes on the CPU. All must take the same channels.
        protocol: online, throughput, tresnet, genet or resnet_rs (see docs/measuring.md); by
            default online and throughput in one table.
        resolution: Pixels a side, the same for all; by default runs, bundles and files have their
            own, and other networks that of the first one. For tresnet 224, for resnet_rs that of
            the first one.
        batch: Images at a time for throughput (64); the other protocols have their own.
        rounds: How often each network is timed; by default the protocol's own.
        device: Where to measure.
        precision: fp32, bf16 or fp16; by default the protocol's own.
        layout: Memory format.
        compiled: Measure the networks compiled by torch.compile.
        padded: Pad the channels of all networks but the reference to multiples of 8.
        memory_gib: Use at most this much of the GPU's memory.
        reference: The network that ratios are to, or none; by default timm/resnet50 where a
            protocol is named.
        suite: Measure the tables of the papers, in both layouts, eager and compiled, or all their
            protocols for the models named, and write a page. A stopped suite resumes.
        quick: Measure only the main lines of the suite, in less than 8 minutes on a GPU.
        out: A JSON file for all samples and the environment; for a suite a folder (suite).
        trust: Measure files of the formats pt2 and aoti too, which are programs.
    """
    if suite:
        ignored = dict(protocol=protocol, batch=batch, rounds=rounds, compiled=compiled)
        ignored |= dict(reference=reference, efficiency=efficiency != "plain", padded=padded)
        refuse_flags(ignored, f"with --suite {suite}: leave it out, the suite has its own")
        bench_suite(models, resolution, device, precision, memory_gib, quick, out or Path("suite"))
        return
    if quick:
        raise ValueError("--quick is for a suite: say --suite papers too")
    from fullstride import tasks
    from fullstride.deploy.formats import open_as_modules
    from fullstride.io.writing import check_output
    from fullstride.measure import bench_by_name
    from fullstride.measure.environment import choose_device
    from fullstride.measure.protocols import MEASUREMENTS, save_measurements
    from fullstride.report import console_tables

    check_output(out, MEASUREMENTS)
    files = open_as_modules([*models, *([reference] if reference else [])], trust=trust)
    settings: dict[str, Any] = dict(resolution=resolution, batch=batch, rounds=rounds)
    settings |= dict(precision=precision, layout=layout, compiled=compiled, padded=padded)
    settings |= dict(efficiency=efficiency, memory_gib=memory_gib, reference=reference)
    settings |= dict(files=files, protocols=protocol, device=choose_device(device))
    settings |= dict(head=tasks.build_head)
    plan = bench_by_name.plan(models, **settings)
    rows = print_tables(plan.run(), is_one_table=not protocol)
    print(*console_tables.measurement_notes(rows, plan.networks.in_channels), sep="\n")
    if out:
        save_measurements(rows, out)


def print_tables(runs: Iterable[Any], is_one_table: bool) -> list[Any]:
    """Print a table of the measurements of each protocol, or one of both; returns the rows."""
    from fullstride.report import console_tables

    results: list[Any] = []
    for parts in runs:
        results.append(parts)
        if not is_one_table:
            console().print(console_tables.protocol_table(parts))
    if is_one_table:
        console().print(console_tables.latency_and_throughput_table(results[0][0], results[1][0]))
    return [row for parts in results for part in parts for row in part]


def bench_suite(
    models: tuple[str, ...],
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

    rows = suite.run(
        out,
        device=choose_device(device),
        networks=models,
        resolution=resolution,
        precision=find_precision(precision) if precision else None,
        memory_gib=memory_gib,
        quick=quick,
    )
    for row in rows:
        print(row.summary(), flush=True)
    print(f"the page: {out / suite.PAGE}")
