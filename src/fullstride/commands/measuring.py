"""Holds the commands that list networks and measure their cost, memory and speed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from fullstride.commands.flags import Device, Layout, Model, Models
from fullstride.io.console import console
from fullstride.io.records import refuse_flags
from fullstride.measure.settings import BenchSettings


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


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """The training step to count."""

    # Pixels a side; by default the recipe's, or else the network's own.
    resolution: int | None = None
    # Precision of the tensors; by default the recipe's, or else bf16.
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    # Count the step of this recipe: its regularisation, precision, layout and efficiency. A name,
    # or a run, a bundle or a JSON file; finetune and scratch are for 1,000 images.
    step_recipe: Annotated[str, arg(name="recipe", metavar="NAME")] = ""


def cost(
    model: Model,
    step: StepFlags,
    layers: bool = False,
    train: bool = False,
    task: str = "",
    classes: int | None = None,
    frames: int | None = None,
) -> None:
    """Print the cost of a network and of its stages: parameters, multiply-adds (MACs) and bytes.

    Example: fullstride measure cost tresnet_m

    FLOPs are twice the MACs.

    Args:
        model: A name listed by `fullstride zoo`, timm/NAME, a run, a bundle, or a file of weights.
        layers: Also print a line for each convolution and linear layer, and with --train for each
            layer that saves tensors.
        train: Also print the bytes that a training step on a GPU saves for its backward pass.
        task: For a name: also count the head of this task, such as detect, segment or depth, with
            its computation on the network's maps. Runs and bundles have their own.
        classes: For a name: number of classes; by default the network's own.
        frames: For the name of a network of clips: number of frames; by default its own.
    """
    from fullstride import tasks
    from fullstride.measure.cost import network_cost
    from fullstride.measure.workload import find_precision
    from fullstride.nets.efficiency import short_precision
    from fullstride.report import console_lines
    from fullstride.train.recipes.named import training_step

    if step.step_recipe and not train:
        raise ValueError(f"--recipe {step.step_recipe} is for --train: say --train too")
    how = training_step(step.step_recipe, resolution=step.resolution, precision=step.precision)
    network = tasks.find_network(model, task, classes, frames)
    precision = find_precision(how.precision)
    total = network_cost(network, how.resolution, precision, training=train, form=how.form)
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


def capacity(
    model: Model,
    step: StepFlags,
    layout: Layout | None = None,
    efficiency: Literal["plain", "plain_compiled"] | None = None,
    device: Device = "auto",
    compiled: bool = False,
    memory_gib: float | None = None,
    predict: bool = False,
) -> None:
    """Predict the largest batch that trains, then prove it by real steps in fresh processes.

    Example: fullstride measure capacity tresnet_m --memory-gib 24 --predict

    The result is a multiple of 8, or less than 8.

    Args:
        model: A name listed by `fullstride zoo`, timm/NAME, a run or a bundle.
        layout: Memory format; by default the recipe's, or else nchw.
        efficiency: How the step is computed, as in a recipe: plain (eager), or compiled with
            recomputation; by default as the recipe says, or else plain.
        device: Where to train. With --predict, a GPU, which need not be present, unless this is
            cpu.
        compiled: Compile the network with torch.compile; for networks of timm, the prediction is
            for eager steps.
        memory_gib: Memory limit, such as 16 for a card of 16 GB; by default all free memory.
        predict: Only predict.
    """
    from fullstride.measure import max_batch
    from fullstride.report.console_lines import capacity_lines, probe_line, proven_line
    from fullstride.train.recipes.named import training_step

    how = training_step(
        step.step_recipe,
        resolution=step.resolution,
        precision=step.precision,
        layout=layout,
        efficiency=efficiency,
        device=device,
    )
    trial = max_batch.plan(
        model, how, device=device, compiled=compiled, memory_gib=memory_gib, predict_only=predict
    )
    print(*capacity_lines(model, trial), sep="\n", flush=True)
    if predict:
        return
    probes = []
    for probe in trial.search():
        print(probe_line(probe), flush=True)
        probes.append(probe)
    print(proven_line(probes, model, trial))


def bench(
    models: Models,
    settings: BenchSettings,
    suite: Literal["papers"] | None = None,
    quick: bool = False,
    out: Path | None = None,
    trust: bool = False,
) -> None:
    """Measure latency (p50, p90, p99) and throughput of networks in turn, or a paper's protocol.

    Example: fullstride bench genet_light timm/resnet18

    Args:
        models: Names listed by `fullstride zoo`, timm/NAME, runs, bundles, or exported files, which
            run in their own runtimes on the CPU. All must take the same number of channels.
        suite: Measure the tables of the papers, in both layouts, eager and compiled, or all their
            protocols for the given models, and write a page. A stopped suite resumes.
        quick: Measure only the main lines of the suite, in less than 8 minutes on a GPU.
        out: A JSON file for all samples and the environment, or an .html file for a page with a
            plot and tables; for a suite a folder (suite).
        trust: Also measure files of the formats pt2 and aoti, which are programs.
    """
    if suite:
        bench_suite(models, settings, quick, out or Path("suite"))
        return
    if quick:
        raise ValueError("--quick is for a suite: say --suite papers too")
    from fullstride.io.writing import check_page_or
    from fullstride.measure.protocols import MEASUREMENTS, save_measurements
    from fullstride.report import console_tables

    is_page = check_page_or(out, MEASUREMENTS.output)
    with bench_plan(models, settings, trust) as plan:
        rows = print_tables(plan.run(), is_one_table=not settings.protocol)
    print(*console_tables.measurement_notes(rows, plan.options.in_channels), sep="\n")
    if out and is_page:
        from fullstride.report import page, times_page

        page.write(out, times_page.bench_page(rows, plan.options.in_channels))
        print(out)
    elif out:
        save_measurements(rows, out)


@contextmanager
def bench_plan(models: tuple[str, ...], settings: BenchSettings, trust: bool) -> Iterator[Any]:
    """Yield the plan of a benchmark here or on another machine."""
    from fullstride import tasks
    from fullstride.deploy.choose_form import find_target
    from fullstride.deploy.elsewhere import bench_there
    from fullstride.deploy.formats import open_as_modules
    from fullstride.measure import bench_by_name

    if (machine := find_target(settings.target)) is not None:
        with bench_there(models, settings, machine, trust=trust) as plan:
            yield plan
        return
    files = open_as_modules([*models, *filter(None, [settings.reference])], trust=trust)
    yield bench_by_name.plan(models, settings, files, tasks.build_head)


def target(where: Annotated[Positional[str], arg(metavar="TARGET")]) -> None:
    """Describe another machine: processor, runtimes, missing runtimes, and noise.

    Example: fullstride measure target ssh://pi@raspberrypi

    Args:
        where: ssh://[USER@]HOST[:PORT][/PATH/OF/PYTHON], or a command that runs Python there, with
            NumPy and a runtime, or here. --target of other commands takes the same values.
    """
    from fullstride.targets.target import Target, report

    with Target(where) as machine:
        print(*report(machine.describe(), machine.noise()), sep="\n")


def print_tables(runs: Iterable[Any], is_one_table: bool) -> list[Any]:
    """Print a table for each protocol, or one table of both protocols; return the rows."""
    from fullstride.report import console_tables

    results: list[Any] = []
    for parts in runs:
        results.append(parts)
        if not is_one_table:
            console().print(console_tables.protocol_table(parts))
    if is_one_table:
        console().print(console_tables.latency_and_throughput_table(results[0][0], results[1][0]))
    return [row for parts in results for part in parts for row in part]


def bench_suite(models: tuple[str, ...], settings: BenchSettings, quick: bool, out: Path) -> None:
    own = ("resolution", "device", "precision", "memory_gib")
    others = (each for each in fields(settings) if each.name not in own)
    changed = {each.name: getattr(settings, each.name) != each.default for each in others}
    refuse_flags(changed, "with --suite papers: leave it out, the suite has its own")
    from fullstride.measure.environment import choose_device
    from fullstride.measure.workload import find_precision
    from fullstride.papers import suite

    rows = suite.run(
        out,
        device=choose_device(settings.device),
        networks=models,
        resolution=settings.resolution,
        precision=find_precision(settings.precision) if settings.precision else None,
        memory_gib=settings.memory_gib,
        quick=quick,
    )
    for row in rows:
        print(row.summary(), flush=True)
    print(f"the page: {out / suite.PAGE}")
