"""How long would a network take elsewhere, and which is best in a budget? The latency model."""

import sys
from collections.abc import Sequence
from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.progress import track
from tyro.conf import arg

from fullstride.commands.flags import NO_PROFILE, Device, Layout, Models, Profile, refuse_flags
from fullstride.io.console import console, print_error


def estimate(
    models: Models,
    profile: Profile = NO_PROFILE,
    batch: int = 1,
    resolution: int | None = None,
    train: bool = False,
    json: bool = False,
    task: str = "",
    classes: int | None = None,
    frames: int | None = None,
) -> None:
    """Estimate the time of networks on a device that need not be present, the fastest first.

    Example: fullstride measure estimate tresnet_m timm/resnet50 --device rtx4090

    Args:
        models: Names that `fullstride zoo` lists, timm/NAME, runs or bundles.
        batch: Images of a call. Times are those of a call divided by its images.
        resolution: Pixels a side; by default each network's own.
        train: Estimate the time of a training step, where the profile has it.
        json: Print one JSON object instead of a table.
        task: Of names: with the head of this task, such as detect, segment or depth, and what it
            computes of the network's maps. Runs and bundles have their own.
        classes: Of names: outputs for so many classes; by default each network's own.
        frames: Of names of networks of clips: so many frames; by default each one's own.
    """
    from fullstride.latency.devices import estimate_by_name, estimates_json
    from fullstride.report import console_lines, console_tables

    if train:
        refuse_flags(dict(measured=profile.measured), "has times of inference: leave out --train")
    device = profile.load()
    networks = with_options(models, task, classes, frames)
    rows = estimate_by_name(networks, device, batch, resolution, training=train)
    if json:
        print(dumps(estimates_json(rows, device)))
        return
    if len(rows) > 1:
        console().print(console_tables.estimate_table(rows))
    print(*console_lines.estimate_lines(rows, device), sep="\n")
    print(console_lines.profile_line(device, train))


def with_options(
    models: Sequence[str], task: str, classes: int | None, frames: int | None
) -> Sequence[Any]:
    """Names as they are where no option is given: most are estimated without PyTorch then."""
    if not task and classes is None and frames is None:
        return models
    from fullstride import tasks

    return [tasks.find_network(model, task, classes, frames) for model in models]


def calibrate(
    device: Device = "auto",
    out: Path = Path("profile.json"),
    name: str = "here",
    runtimes: tuple[Literal["eager", "graph", "compiled"], ...] = (),
    batches: tuple[int, ...] = (),
    resolution: int | None = None,
    precision: str | None = None,
    layout: Layout = "nchw",
    minutes: float = 8.0,
    times: Path | None = None,
) -> None:
    """Time microbenchmarks on this device and fit a profile for `measure estimate` and `choose`.

    Example: fullstride measure calibrate --out here.json

    Args:
        device: What to measure.
        out: The profile's file; of several runtimes each has one, such as profile-compiled.json.
        name: Of the profile.
        runtimes: Each has a profile of its own; by default eager, graph and compiled on a GPU, and
            eager on the CPU.
        batches: Images at a time; by default 1 8 64 256 on a GPU and 1 8 on the CPU.
        resolution: Pixels a side; by default 224 on a GPU and 128 on the CPU.
        precision: fp32, bf16 or fp16; by default fp16 on a GPU and fp32 on the CPU.
        layout: Memory format.
        minutes: Time after which no further network is measured; the fit takes some seconds more.
        times: A JSON file for all measured times.
    """
    from fullstride.latency import calibrate as files
    from fullstride.latency.calibrate import median_spread
    from fullstride.measure.environment import choose_device
    from fullstride.report.console_lines import fitted_profile_lines

    settings: dict[str, Any] = dict(runtimes=runtimes, batches=batches, resolution=resolution)
    settings |= dict(precision=precision, layout=layout, minutes=minutes)
    plan = files.default_plan(choose_device(device), **settings)
    files.check_outputs(plan, name, out, times)
    peaks = files.peaks_by_runtime(plan)
    samples = []
    for runtime, batch, rows in files.measure_by_batch(plan):
        print(f"{runtime}, batch {batch}: {len(rows)} networks", flush=True)
        samples += rows
    if samples:
        noise = f"a network's rounds spread by {median_spread(samples):.0%}"
        quiet = f"{files.quiet_share(samples):.0%} of all rounds were quiet"
        print(f"{noise}, in the median: above 5 % the machine was not quiet; {quiet}")
    if times:
        files.save_times(times, samples, plan)
    for fitted in files.save_profiles(samples, plan, peaks, out, name):
        print(*fitted_profile_lines(fitted), sep="\n", flush=True)


def choose(
    profile: Profile = NO_PROFILE,
    budget_ms: float | None = None,
    images_per_s: float | None = None,
    batch: int = 1,
    source: Annotated[tuple[str, ...], arg(name="from")] = ("ours", "timm"),
    times: Literal["published", "estimated"] = "published",
    out: Path | None = None,
    json: bool = False,
    task: str = "",
    classes: int | None = None,
    resolution: int | None = None,
) -> None:
    """Choose the most accurate network within a budget, at the resolution of its accuracy.

    Example: fullstride choose --device rtx4090 --budget-ms 6

    Args:
        budget_ms: At most this time: that of a call divided by its images.
        images_per_s: The budget as a rate instead.
        batch: Images of a call.
        source: ours, timm (ConvNets with released weights, and those in the tables of the papers),
            genet_paper (Table 7 of GENet) or a CSV file with the columns model, img_size and top1,
            as timm publishes; one or more.
        times: With published, a time that GENet's authors printed for that device and batch has
            precedence over the estimate; with estimated, never.
        out: A PNG file for a plot.
        json: Print one JSON object instead of a table.
        task: Times are those with the head of this task, such as detect, segment or depth; the
            accuracies are still those of classification. Each network takes about a second.
        classes: Of the task; by default each network's own.
        resolution: Times are those of images of so many pixels a side; by default of those that an
            accuracy is published for. Heads need multiples of 32.
    """
    from fullstride.io.writing import PLOT, check_output
    from fullstride.latency import select
    from fullstride.measure.budget import find_budget
    from fullstride.report import console_lines, console_tables

    check_output(out, PLOT)
    device, budget = profile.load(), find_budget(budget_ms, images_per_s, batch)
    if budget is None:
        raise ValueError("no budget: give --budget-ms or --images-per-s")
    settings: dict[str, Any] = dict(sources=source, prefer_published=times == "published")
    settings |= dict(with_head=heads(task, classes), resolution=resolution)
    selection = select.select(device, budget, watch=progress, **settings)
    if selection.left_out:
        print_error(console_lines.left_out_line(selection))
    if out:
        from fullstride.report.plots import save_png
        from fullstride.report.scatter import choice_figure

        title = f"{device.name}, {selection.choice.budget.conditions}"
        save_png(choice_figure(selection.options, selection.choice, title), out)
    if json:
        print(dumps(selection.to_json()))
        return
    console().print(console_tables.selection_table(selection.choice, select.options_tie))
    print(*console_lines.selection_lines(selection.choice, device, select.options_tie), sep="\n")
    print(console_lines.profile_line(device))
    if out:
        print(out)


def heads(task: str, classes: int | None) -> Any:
    """What makes networks with the head of a task of names; None without."""
    if not task:
        if classes:
            raise ValueError(f"--classes {classes} is for --task: leave it out")
        return None
    from fullstride import tasks

    tasks.find_task(task)
    return partial(tasks.find_network, task=task, classes=classes)


def progress(networks: Sequence[Any]) -> Any:
    """A bar on the standard error stream, where that is a terminal."""
    hidden = not sys.stderr.isatty()
    return track(networks, transient=True, disable=hidden, console=Console(stderr=True))
