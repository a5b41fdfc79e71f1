"""How long would it take there, and which network is right for a budget? Commands that need no measurement, but one."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.progress import track
from tyro.conf import Positional, arg

from fullstride.commands.flags import Device
from fullstride.console import complain, console

if TYPE_CHECKING:
    from fullstride.latency import Estimate, Profile
    from fullstride.latency.calibrate import Plan, Timing
    from fullstride.latency.select import Choice, Option

Place = Annotated[
    str,
    arg(name="device", help="A profile, as v100-fp16, or the file of one that `calibrate` wrote."),
]


def estimate(
    models: Positional[tuple[str, ...]],
    profile: Place,
    batch: int = 64,
    resolution: int | None = None,
    train: bool = False,
    json: bool = False,
) -> None:
    """Estimate the time of networks on a device that need not be here, the fastest first, with ties.

    Args:
        models: Names that `fullstride zoo` lists, timm/NAME, runs or bundles.
        batch: Images at a time.
        resolution: Pixels a side; each network's own where not given.
        train: The time of a training step instead, where the profile knows it.
        json: One JSON object instead of words.
    """
    from fullstride.latency import estimates, is_tie, load_profile
    from fullstride.latency.roofline import unfitted
    from fullstride.latency.spec_operators import operators_by_name

    known = load_profile(profile)
    if not models:
        raise ValueError("nothing to estimate: name one or more networks or runs")
    networks = [operators_by_name(name, resolution) for name in models]
    found = estimates(
        [operators for operators, _ in networks], known, [batch] * len(models), training=train
    )
    fit = known.training if train and known.training else known.inference
    designed = fit.source.startswith("fullstride calibrate")
    strange = {
        name: unfitted(operators, fit.numbers, microbenchmarks=designed)
        for name, (operators, _) in zip(models, networks, strict=True)
    }
    sides = (side for _, side in networks)
    rows = sorted(zip(models, sides, found, strict=True), key=lambda row: row[2].ms_per_image)
    ties = [[i for i, (_, _, other) in enumerate(rows) if is_tie(row[2], other)] for row in rows]
    if json:
        told = [
            dict(
                network=name,
                resolution=side,
                images_per_s=one.images_per_s,
                **asdict(one),
                ties=[rows[i][0] for i in near if i != number],
                not_fitted_on=strange[name],
            )
            for number, ((name, side, one), near) in enumerate(zip(rows, ties, strict=True))
        ]
        print(dumps(dict(profile=known.to_dict(), estimates=told)))
        return
    if len(rows) == 1:
        ((name, side, one),) = rows
        print(f"{name} at {side} x {side}, batch {batch}, {one.work}")
        print(
            f"{digits(one.ms_per_image)} ms/image, {one.images_per_s:,.0f} images/s; 90 % interval {interval(one)} ms"
        )
        busy = f"{digits(one.device_ms)} ms on the device, {digits(one.host_ms)} ms on the host"
        print(f"a batch is {busy}; bounded by {one.bound}")
    else:
        table = new_table(
            "", "network", "pixels", "ms/image", "90 % interval", "images/s", "device ms", "host ms"
        )
        table.add_column("bounded by")
        table.add_column("ties")
        for number, ((name, side, one), near) in enumerate(zip(rows, ties, strict=True), start=1):
            speed = digits(one.ms_per_image), interval(one), f"{one.images_per_s:,.0f}"
            busy = digits(one.device_ms), digits(one.host_ms), one.bound
            tied = f"{near[0] + 1} to {near[-1] + 1}" if len(near) > 1 else ""
            table.add_row(str(number), name, str(side), *speed, *busy, tied)
        console().print(table)
        print(
            f"batch {batch}, {rows[0][2].work}; device and host ms are of a batch; ties are lines closer than a ratio"
        )
        print(
            f"of {rows[0][2].resolvable_ratio:g}, from which on the order of two networks is right in eight cases of ten"
        )
    for name, kinds in strange.items():
        if kinds:
            print(
                f"{name} runs what this profile was not fitted on, so its interval says little: {', '.join(kinds)}"
            )
    print(about(known, train))


def about(profile: "Profile", train: bool = False) -> str:
    """Where a profile is from and how wrong it was, in one line."""
    fit = profile.training if train and profile.training else profile.inference
    place = ", ".join(
        filter(None, (profile.device, profile.machine.runtime, profile.layout, profile.precision))
    )
    made = f"{fit.networks} networks of {fit.source}; {fit.software}; fitted {fit.date}"
    note = f"; {profile.note}" if profile.note else ""
    return f"{profile.name} ({place}): {fit.error:g} % off where not fitted; {made}{note}"


def calibrate(
    device: Device = "auto",
    out: Path = Path("profile.json"),
    name: str = "here",
    engines: tuple[Literal["eager", "graph", "compiled"], ...] = (),
    batches: tuple[int, ...] = (),
    resolution: int | None = None,
    precision: str | None = None,
    layout: Literal["nchw", "nhwc"] = "nchw",
    minutes: float = 8.0,
    times: Path | None = None,
) -> None:
    """Measure designed networks on the device at hand and fit a profile to them, for `estimate` and `choose`.

    Args:
        device: What to measure.
        out: The profile's file; of several engines each has its own, as profile-compiled.json.
        name: Of the profile.
        engines: Each becomes a profile; eager, graph and compiled on a GPU and eager on the CPU where not given.
        batches: Images at a time; 1 8 64 256 on a GPU and 1 8 on the CPU where not given.
        resolution: Pixels a side; 224 on a GPU and 128 on the CPU where not given.
        precision: fp32, bf16 or fp16; fp16 on a GPU and fp32 on the CPU where not given.
        layout: Order of channels in memory.
        minutes: After which nothing more is measured; the fit takes some seconds beyond.
        times: A JSON file for all measured times.
    """
    from fullstride.latency import calibrate as calibrating
    from fullstride.latency import profile_names, save_profile
    from fullstride.measure.environment import Environment, choose_device
    from fullstride.measure.workload import find_precision
    from fullstride.storage import atomic_write

    if name in profile_names():
        raise ValueError(
            f"{name} is a profile that comes with fullstride: give yours another --name"
        )
    for path in filter(None, (out, times)):
        check_writable(path)
    place = choose_device(device)
    gpu = place.type == "cuda"
    chosen: Any = tuple(dict.fromkeys(engines)) or (
        ("eager", "graph", "compiled") if gpu else ("eager",)
    )
    plan = calibrating.Plan(
        device=place,
        runtimes=tuple("cuda graph" if engine == "graph" else engine for engine in chosen),
        batches=tuple(dict.fromkeys(batches)) or ((1, 8, 64, 256) if gpu else (1, 8)),
        resolution=(224 if gpu else 128) if resolution is None else resolution,
        precision=find_precision(precision or ("fp16" if gpu else "fp32")),
        layout=layout,
        minutes=minutes,
    )
    here = Environment.here(place)
    peaks = {engine: calibrating.machine(place, plan.precision, engine) for engine in plan.runtimes}
    samples = watched(plan)
    if samples:
        unrest = sorted(sample.spread for sample in samples)[len(samples) // 2]
        print(
            f"a network's rounds spread by {unrest:.0%}, in the median: above 5 % the machine was not quiet"
        )
    if times:
        keys = ("network", "family", "batch", "seconds", "spread")
        rows = [
            {"engine": sample.runtime, **{key: getattr(sample, key) for key in keys}}
            for sample in samples
        ]
        told = dict(
            environment=asdict(here),
            resolution=plan.resolution,
            precision=plan.precision,
            layout=layout,
        )
        with atomic_write(times) as beside:
            beside.write_text(dumps({**told, "times": rows}, indent=1))
    failures = []
    for engine, (machine, sheet) in peaks.items():
        own = [sample for sample in samples if sample.runtime == engine]
        suffix = "" if len(peaks) == 1 else f"-{engine.replace(' ', '-')}"
        path = out.with_stem(out.stem + suffix)
        try:
            report = calibrating.fit_profile(own, plan, machine, sheet, name + suffix)
        except ValueError as error:  # the other engines' times are still good
            failures.append(f"no profile for {engine}: {error}")
            continue
        save_profile(report.profile, path)
        print(f"{path}: {machine.peak_tflops:g} TFLOPS, {machine.bandwidth_gb_s:g} GB/s, {sheet}")
        families = ", ".join(f"{family} {error:g}" for family, error in report.by_family.items())
        print(
            f"  {report.times} times fitted; {report.left_out:g} % off for designed networks of a family left out:"
        )
        print(f"  {families}")
        if report.whole:
            print("  estimated / measured of whole networks, which are never fitted:")
            print(
                "  "
                + ", ".join(f"{network} {ratio:.2f}" for network, ratio in report.whole.items())
            )
        print(about(report.profile))
    if failures:
        raise ValueError("; ".join(failures))


def check_writable(path: Path) -> None:
    """Raises now, and not when all is measured, where a file cannot be written."""
    from tempfile import TemporaryFile

    from fullstride.storage import make_parent_folders

    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file")
    make_parent_folders(path)
    with TemporaryFile(dir=path.parent):
        pass


def watched(plan: "Plan") -> "Sequence[Timing]":
    """All times, with a line for each engine and batch size as it is done."""
    from itertools import groupby

    from fullstride.latency.calibrate import measure

    found: list[Timing] = []
    for (engine, batch), rows in groupby(
        measure(plan), key=lambda sample: (sample.runtime, sample.batch)
    ):
        before = len(found)
        found.extend(rows)
        print(f"{engine}, batch {batch}: {len(found) - before} networks", flush=True)
    return found


def choose(
    profile: Place,
    budget_ms: float,
    batch: int = 64,
    source: Annotated[tuple[str, ...], arg(name="from")] = ("ours", "timm"),
    times: Literal["published", "estimated"] = "published",
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Choose the most accurate network within a budget of time, each at the resolution its accuracy is published for.

    Args:
        budget_ms: Milliseconds an image at most.
        batch: Images at a time.
        source: ours, timm (those that our papers print), genet_paper (Table 7 of GENet) or a CSV file with the columns
            model, img_size and top1, as timm publishes; one or more.
        times: published: where GENet's authors printed a time for that device and batch, it decides; estimated: never.
        out: A PNG file for the picture.
        json: One JSON object instead of words.
    """
    from fullstride.latency import load_profile
    from fullstride.latency import select as choosing

    known = load_profile(profile)
    networks = [network for name in source for network in choosing.find_source(name)()]
    choosing.check_budget(budget_ms)
    left_out: dict[str, str] = {}
    shown = track(
        networks, transient=True, disable=not sys.stderr.isatty(), console=Console(stderr=True)
    )
    options = list(choosing.price(shown, known, batch, times == "published", left_out))
    if left_out:
        name, why = next(iter(left_out.items()))
        complain(
            f"left out {len(left_out)} of {len(networks)} networks; the first, {name}: {why}", 0
        )
    found = choosing.choose(options, budget_ms)
    if out:
        from fullstride.report.plots import png
        from fullstride.report.selection_plot import choice_figure
        from fullstride.storage import atomic_write

        with atomic_write(out) as beside:
            beside.write_bytes(png(choice_figure(options, found, f"{known.name}, batch {batch}")))
    if json:
        single = {key: told(getattr(found, key)) for key in ("best", "runner_up", "next")}
        several = {
            key: [told(option) for option in getattr(found, key)] for key in ("near", "front")
        }
        rows = [told(option) for option in options]
        print(
            dumps(
                dict(
                    profile=known.to_dict(),
                    batch=batch,
                    budget_ms=budget_ms,
                    **single,
                    **several,
                    options=rows,
                )
            )
        )
        return
    show(found, choosing.options_tie)
    print(about(known))
    if out:
        print(out)


def told(option: "Option | None") -> dict[str, Any] | None:
    if option is None:
        return None
    one = option.estimate
    times = dict(
        estimated_ms=one.ms_per_image, low=one.low, high=one.high, published_ms=option.published_ms
    )
    return dict(
        **asdict(option.network), ms_per_image=option.ms, time=option.by, **times, bound=one.bound
    )


def show(found: "Choice", tied: Any) -> None:
    """The front as a table, and what there is to say of the budget."""
    from fullstride.latency.select import Option

    printed = any(option.published_ms is not None for option in found.front)
    table = new_table(
        "on the front", "pixels", "top-1 %", "ms/image", "time", "estimate, 90 % interval"
    )
    for title in (*(["published"] if printed else []), "tie", "accuracy from", "note"):
        table.add_column(title)
    for number, option in enumerate(found.front):
        one, row = option.estimate, option.network
        estimated = f"{digits(one.ms_per_image)}, {interval(one)}"
        published = (
            ["" if option.published_ms is None else f"{option.published_ms:g}"] if printed else []
        )
        tie = "with the above" if number and tied(option, found.front[number - 1]) else ""
        numbers = str(row.resolution), f"{row.top1:g}", digits(option.ms), option.by, estimated
        table.add_row(row.name, *numbers, *published, tie, row.source, row.note)
    console().print(table)

    def say(option: Option) -> str:
        return f"{option.label}, {option.network.top1:g} %, {digits(option.ms)} ms ({option.by})"

    best = found.best
    print(f"best within {found.budget_ms:g} ms an image: {say(best)}")
    if best.by == "estimated" and best.estimate.high > found.budget_ms:
        print(
            f"  its 90 % interval reaches {digits(best.estimate.high)} ms, beyond the budget: measure it there"
        )
    if found.runner_up:
        tie = "; which of the two is faster cannot be told" if tied(best, found.runner_up) else ""
        print(f"runner-up: {say(found.runner_up)}{tie}")
    for option in found.near:
        print(f"may fit as well, the model cannot tell: {say(option)}")
    if found.next:
        gain, more = found.next.network.top1 - best.network.top1, found.next.ms - best.ms
        price = f"{gain:.1f} points more for {digits(more)} ms more, {found.next.ms / best.ms:.2f} times the time"
        print(f"a looser budget buys {say(found.next)}: {price}")


def new_table(*columns: str) -> Any:
    from rich.table import Table

    return Table(*columns, box=None, header_style="bold")


def interval(one: "Estimate") -> str:
    return f"{digits(one.low)} to {digits(one.high)}"


def digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
