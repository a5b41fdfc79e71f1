"""The commands of the latency model: estimates, profiles, and the best network in a budget."""

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

from fullstride.commands.flags import (
    NO_PROFILE,
    Device,
    Layout,
    Models,
    Profile,
    ProfileFlags,
    refuse_flags,
)
from fullstride.io.console import console, print_error
from fullstride.io.writing import PLOT, check_output
from fullstride.measure.budget import HERE

if TYPE_CHECKING:
    from fullstride.latency.calibrate import Plan, Timing
    from fullstride.latency.select import Selection
    from fullstride.measure.budget import Budget
    from fullstride.nets.zoo import NamedNetwork
    from fullstride.targets.target import Target


@dataclass(frozen=True, kw_only=True)
class EstimateFlags:
    """What is estimated."""

    # Images of a call. Times are those of a call divided by its images.
    call_batch: int = 1
    # Pixels a side; by default each network's own.
    resolution: int | None = None
    # Estimate the time of a training step, where the profile has it.
    train: bool = False
    # Print one JSON object instead of a table.
    json: bool = False
    # For names: with the head of this task, such as detect, segment or depth, and what it computes
    # of the network's maps. Runs and bundles have their own.
    task: str = ""
    # For names: outputs for so many classes; by default each network's own.
    classes: int | None = None
    # For names of networks of clips: so many frames; by default each one's own.
    frames: int | None = None

    def find(self, models: Sequence[str]) -> "Sequence[str | NamedNetwork]":
        """Names as they are where no option is given: most are estimated without PyTorch then."""
        if not self.task and self.classes is None and self.frames is None:
            return models
        from fullstride import tasks

        return [tasks.find_network(model, self.task, self.classes, self.frames) for model in models]


ESTIMATE = EstimateFlags()


def estimate(
    models: Models,
    profile: Profile = NO_PROFILE,
    options: Annotated[EstimateFlags, arg(name="")] = ESTIMATE,
) -> None:
    """Estimate the time of networks on a device that need not be present, the fastest first.

    Example: fullstride measure estimate tresnet_m timm/resnet50 --target rtx4090

    Args:
        models: Names that `fullstride zoo` lists, timm/NAME, runs or bundles.
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


@dataclass(frozen=True, kw_only=True)
class CalibrateFlags:
    """What is measured, and how long."""

    # Each has a profile of its own; by default eager, graph and compiled on a GPU, eager on the
    # CPU, and those of onnx and openvino that a --target has.
    runtimes: tuple[Literal["eager", "graph", "compiled", "onnx", "openvino"], ...] = ()
    # Images at a time; by default 1 8 64 256 on a GPU and 1 8 on the CPU.
    batches: tuple[int, ...] = ()
    # Pixels a side; by default 224 on a GPU and 128 on the CPU.
    resolution: int | None = None
    # fp32, bf16 or fp16; by default fp16 on a GPU and fp32 on the CPU.
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    layout: Layout = "nchw"  # Memory format.
    # Time after which no further network is measured; the fit takes some seconds more.
    minutes: float = 8.0


CALIBRATE = CalibrateFlags()


def calibrate(
    device: Device = "auto",
    target: str = HERE,
    out: Path = Path("profile.json"),
    name: str = "",
    options: Annotated[CalibrateFlags, arg(name="")] = CALIBRATE,
    times_out: Path | None = None,
) -> None:
    """Time microbenchmarks on this device and fit a profile for `measure estimate` and `choose`.

    Example: fullstride measure calibrate --out here.json

    Args:
        device: What to measure.
        target: Another machine, on which networks are timed as files: ssh://HOST, or a command
            that runs a Python there. See docs/guides/targets.md.
        out: The profile's file; of several runtimes each has one, such as profile-compiled.json.
        name: Of the profile; by default here, or that of the target.
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
        print(f"{words}: {len(rows)} times", flush=True)
        samples += rows
    peaks = files.peaks_by_runtime(plan, samples)
    if samples:
        print(files.noise_line(samples, plan))
    if times_out:
        files.save_times(times_out, samples, plan)
    for fitted in files.save_profiles(samples, plan, peaks, out, name):
        print(*fitted_profile_lines(fitted), sep="\n", flush=True)


def calibration(
    device: str, options: CalibrateFlags, target: "Target | None"
) -> "tuple[Plan, Iterable[tuple[str, list[Timing]]]]":
    """What is timed here or on another machine, and the times as they come."""
    from fullstride.latency import calibrate as files
    from fullstride.measure.environment import choose_device

    if target is None:
        plan = files.default_plan(choose_device(device), **vars(options))
        parts = files.measure_by_batch(plan)
        return plan, ((f"{runtime}, batch {batch}", rows) for runtime, batch, rows in parts)
    from fullstride.deploy.elsewhere import plan_there, timings_there

    own = {"device": device != "auto", "layout": options.layout != "nchw"}
    refuse_flags(own, f"with --target {target.where}: leave it out")
    plan = plan_there(target, **vars(options))
    groups = enumerate(timings_there(plan, target), start=1)
    return plan, ((f"{target.where}, group {number}", rows) for number, rows in groups)


@dataclass(frozen=True, kw_only=True)
class ChooseFlags:
    """Among which networks, and what is shown."""

    # ours, timm (ConvNets with released weights, and those in the tables of the papers),
    # genet_paper (Table 7 of GENet) or a CSV file with the columns model, img_size and top1, as
    # timm publishes; one or more.
    source: Annotated[tuple[str, ...], arg(name="from")] = ("ours", "timm")
    # With published, a time that GENet's authors printed for that device and batch has precedence
    # over the estimate; with estimated, never.
    times_from: Literal["published", "estimated"] = "published"
    # Print one JSON object instead of a table.
    json: bool = False
    # Times are those with the head of this task, such as detect, segment or depth; the accuracies
    # are still those of classification. Each network takes about a second.
    task: str = ""
    # Classes of the task; by default each network's own.
    classes: int | None = None
    # Times are those of images of so many pixels a side; by default of those that an accuracy is
    # published for. Heads need multiples of 32.
    resolution: int | None = None

    def heads(self) -> Any:
        """What makes networks with the head of a task of names; None without."""
        if not self.task:
            if self.classes:
                raise ValueError(f"--classes {self.classes} is for --task: leave it out")
            return None
        from fullstride import tasks

        tasks.find_task(self.task)
        return partial(tasks.find_network, task=self.task, classes=self.classes)

    def choose(self, profile: ProfileFlags, budget: "Budget") -> "Selection":
        """By estimates for a profile, or by times on another machine."""
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


CHOOSE = ChooseFlags()


def choose(
    profile: Profile = NO_PROFILE,
    budget_ms: float | None = None,
    images_per_s: float | None = None,
    call_batch: int = 1,
    options: Annotated[ChooseFlags, arg(name="")] = CHOOSE,
    out: Path | None = None,
) -> None:
    """Choose the most accurate network within a budget, at the resolution of its accuracy.

    Example: fullstride choose --target rtx4090 --budget-ms 6

    Args:
        budget_ms: At most this time: that of a call divided by its images.
        images_per_s: The budget as a rate instead.
        call_batch: Images of a call.
        out: A PNG file for a plot.
    """
    from fullstride.latency import select
    from fullstride.measure.budget import find_budget
    from fullstride.report import console_lines, console_tables

    check_output(out, PLOT)
    budget = find_budget(budget_ms, images_per_s, call_batch)
    if budget is None:
        raise ValueError("no budget: give --budget-ms or --images-per-s")
    selection = options.choose(profile, budget)
    device = selection.profile
    if selection.left_out:
        print_error(console_lines.left_out_line(selection))
    if out:
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
    """A bar on the standard error stream, where that is a terminal."""
    hidden = not sys.stderr.isatty()
    return track(networks, transient=True, disable=hidden, console=Console(stderr=True))
