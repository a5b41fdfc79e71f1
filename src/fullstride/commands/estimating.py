"""Holds the commands of the latency model: estimate, calibrate, choose."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.progress import track
from tyro.conf import arg

from fullstride.commands.flags import Device, Models, ProfileFlags
from fullstride.io.console import console, count_of, print_error
from fullstride.io.records import refuse_flags
from fullstride.io.writing import PLOT, check_page_or
from fullstride.measure.budget import HERE
from fullstride.measure.settings import CalibrateSettings

if TYPE_CHECKING:
    from fullstride.latency.calibrate import Plan, Timing
    from fullstride.latency.select import Selection
    from fullstride.measure.budget import Budget
    from fullstride.nets.zoo import NamedNetwork
    from fullstride.targets.target import Target


@dataclass(frozen=True, kw_only=True)
class EstimateFlags:
    """What to estimate."""

    # Images per call. Times are a call's, divided by its images.
    call_batch: int = 1
    # Pixels a side; by default each network's own.
    resolution: int | None = None
    # Estimate the time of a training step, if the profile has it.
    train: bool = False
    # Print one JSON object instead of a table.
    json: bool = False
    # For names: add the head of this task, such as detect, segment or depth, with its computation
    # on the network's maps. Runs and bundles have their own.
    task: str = ""
    # For names: number of classes; by default each network's own.
    classes: int | None = None
    # For names of networks of clips: number of frames; by default each network's own.
    frames: int | None = None

    def find(self, models: Sequence[str]) -> "Sequence[str | NamedNetwork]":
        """Find networks; without options names stay names, mostly estimated without PyTorch."""
        if not self.task and self.classes is None and self.frames is None:
            return models
        from fullstride import tasks

        return [tasks.find_network(model, self.task, self.classes, self.frames) for model in models]


def estimate(models: Models, profile: ProfileFlags, options: EstimateFlags) -> None:
    """Estimate the time of networks on a device that need not be present, the fastest first.

    Example: fullstride measure estimate tresnet_m timm/resnet50 --target rtx4090

    Args:
        models: Names listed by `fullstride zoo`, timm/NAME, runs or bundles.
    """
    from fullstride.latency.devices import estimate_by_name, estimates_json
    from fullstride.report import console_lines, console_tables

    if options.train:
        refuse_flags({"measured": profile.measured}, "has times of inference: leave out --train")
    device, networks = profile.load(), options.find(models)
    rows = estimate_by_name(
        networks, device, options.call_batch, options.resolution, training=options.train
    )
    if options.json:
        print(dumps(estimates_json(rows, device)))
        return
    if len(rows) > 1:
        console().print(console_tables.estimate_table(rows))
    print(*console_lines.estimate_lines(rows, device), sep="\n")
    print(console_lines.profile_line(device, options.train))


def calibrate(
    *,
    device: Device = "auto",
    target: str = HERE,
    out: Path = Path("profile.json"),
    name: str = "",
    options: CalibrateSettings,
    times_out: Path | None = None,
) -> None:
    """Time microbenchmarks on this device and fit a profile for `measure estimate` and `choose`.

    Example: fullstride measure calibrate --out here.json

    Args:
        device: What to measure.
        target: Another machine to time networks on as exported files: ssh://HOST, or a command
            that runs Python there. See docs/guides/targets.md.
        out: The profile's file; several runtimes have one each, such as profile-compiled.json.
        name: The name of the profile; by default here, or the target's.
        times_out: A JSON file for all measured times.
    """
    from fullstride.deploy.choose_form import find_target
    from fullstride.latency import calibrate as files
    from fullstride.report.console_lines import fitted_profile_lines

    machine = find_target(target)
    plan, parts = calibration(device, options, machine)
    name = name or (machine.name if machine else HERE)
    files.check_outputs(plan, name, out, times_out)
    samples = []
    for words, rows in parts:
        print(f"{words}: {count_of(len(rows), 'time')}", flush=True)
        samples += rows
    peaks = files.peaks_by_runtime(plan, samples)
    if samples:
        print(files.noise_line(samples, plan))
    if times_out:
        files.save_times(times_out, samples, plan)
    for fitted in files.save_profiles(samples, plan, peaks, out, name):
        print(*fitted_profile_lines(*fitted), sep="\n", flush=True)


def calibration(
    device: str, options: CalibrateSettings, target: "Target | None"
) -> "tuple[Plan, Iterable[tuple[str, list[Timing]]]]":
    """The plan of a calibration here or on another machine, and the times as they come."""
    from fullstride.latency import calibrate as files
    from fullstride.measure.environment import choose_device

    if target is None:
        plan = files.default_plan(choose_device(device), options)
        return plan, files.measure_by_batch(plan)
    from fullstride.deploy.elsewhere import plan_there, timings_there

    own = {"device": device != "auto", "layout": options.layout != "nchw"}
    refuse_flags(own, f"with --target {target.where}: leave it out")
    plan = plan_there(target, options)
    groups = enumerate(timings_there(plan, target), start=1)
    return plan, ((f"{target.where}, group {number}", rows) for number, rows in groups)


@dataclass(frozen=True, kw_only=True)
class ChooseFlags:
    """The networks to choose from, and the output."""

    # Sources, one or more: ours, timm (ConvNets with released weights or in the papers' tables),
    # genet_paper (Table 7 of GENet) or a CSV file with the columns model, img_size and top1, as
    # timm publishes.
    source: Annotated[tuple[str, ...], arg(name="from")] = ("ours", "timm")
    # With published, a time printed by GENet's authors for the device and batch replaces the
    # estimate; with estimated, never.
    times_from: Literal["published", "estimated"] = "published"
    # Print one JSON object instead of a table.
    json: bool = False
    # Include the head of this task, such as detect, segment or depth, in times; accuracies stay the
    # accuracies of classification. Each network takes about a second.
    task: str = ""
    # Classes of the task; by default each network's own.
    classes: int | None = None
    # Pixels a side of images for the times; by default the resolution of the published accuracy.
    # Heads need multiples of 32.
    resolution: int | None = None

    def heads(self) -> Any:
        """A function that builds a named network with the task's head; None without a task."""
        if not self.task:
            if self.classes:
                raise ValueError(f"--classes {self.classes} is for --task: leave it out")
            return None
        from fullstride import tasks

        tasks.find_task(self.task)
        return partial(tasks.find_network, task=self.task, classes=self.classes)

    def choose(self, profile: ProfileFlags, budget: "Budget") -> "Selection":
        """Choose by estimates for a profile, or by times on this or another machine."""
        from fullstride.latency import select

        choose = partial(
            select.select,
            sources=self.source,
            prefer_published=self.times_from == "published",
            with_head=self.heads(),
            resolution=self.resolution,
            watch=progress,
        )
        target = profile.find_target()
        if target is None:
            return choose(profile.load(), budget)
        from fullstride.deploy.elsewhere import choose_there

        what = {"task": self.task, "classes": self.classes}
        say = partial(print, file=sys.stderr, flush=True)
        return choose_there(target, budget, choose, **what, progress=say)


def choose(
    *,
    profile: ProfileFlags,
    budget_ms: float | None = None,
    images_per_s: float | None = None,
    call_batch: int = 1,
    options: ChooseFlags,
    out: Path | None = None,
) -> None:
    """Choose the most accurate network within a budget, at the resolution of its accuracy.

    Example: fullstride choose --target rtx4090 --budget-ms 6

    Args:
        budget_ms: The longest time allowed: a call's, divided by its images.
        images_per_s: The budget as a rate instead.
        call_batch: Images per call.
        out: A PNG file for a plot, or an .html file for a page with the plot and what is printed.
    """
    from fullstride.latency import select
    from fullstride.measure.budget import required_budget
    from fullstride.report import console_lines, console_tables

    is_page = check_page_or(out, PLOT)
    budget = required_budget(budget_ms, images_per_s, call_batch)
    selection = options.choose(profile, budget)
    device = selection.profile
    if selection.left_out:
        print_error(console_lines.left_out_line(selection))
    if out and is_page:
        from fullstride.report import page, times_page

        page.write(out, times_page.choice_page(selection))
    elif out:
        from fullstride.report.plots import save_png
        from fullstride.report.scatter import choice_figure

        title = f"{device.name}, {selection.choice.budget.conditions}"
        save_png(choice_figure(selection.options, selection.choice, title), out)
    if options.json:
        print(dumps(selection.to_json()))
        return
    console().print(console_tables.selection_table(selection.choice, select.options_tie))
    print(*console_lines.selection_lines(selection.choice, device, select.options_tie), sep="\n")
    if out:
        print(out)


def progress(networks: Sequence[Any]) -> Any:
    """Show a bar on the standard error stream, if that is a terminal."""
    hidden = not sys.stderr.isatty()
    return track(networks, transient=True, disable=hidden, console=Console(stderr=True))
