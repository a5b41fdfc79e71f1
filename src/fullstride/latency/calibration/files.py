"""Which files does a calibration write, and what are its defaults? Times and profiles as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch

from fullstride.latency.calibration.calibrate import Calibration, Plan, Timing, fit_profile, measure
from fullstride.latency.calibration.machine_peaks import machine
from fullstride.latency.devices import profile_names
from fullstride.latency.profiles import OUTPUT, Fit, save_profile
from fullstride.latency.roofline import Machine, Runtime
from fullstride.measure.environment import Environment
from fullstride.measure.workload import Layout, find_precision
from fullstride.outputs import json_output
from fullstride.writing import atomic_write, check_output

TIMES = json_output("the times of a calibration", "environment", "times")
MAX_BIAS = 1.1  # between a profile's estimates and the nearer end of their interval
RUNTIME_OF_WORD: dict[str, Runtime] = {
    "eager": "eager",
    "graph": "cuda graph",
    "compiled": "compiled",
}


@dataclass(frozen=True, kw_only=True)
class FittedProfile:
    """A profile that was written to `path`."""

    path: Path
    machine: Machine
    sheet: str  # source of the peaks
    calibration: Calibration


def default_plan(
    device: torch.device,
    *,
    runtimes: Sequence[str] = (),
    batches: Sequence[int] = (),
    resolution: int | None = None,
    precision: str | None = None,
    layout: Layout = "nchw",
    minutes: float = 8.0,
) -> Plan:
    """A plan with the defaults of a GPU or a CPU for empty arguments."""
    gpu = device.type == "cuda"
    names = tuple(dict.fromkeys(runtimes)) or (tuple(RUNTIME_OF_WORD) if gpu else ("eager",))
    return Plan(
        device=device,
        runtimes=tuple(RUNTIME_OF_WORD[name] for name in names),
        batches=tuple(dict.fromkeys(batches)) or ((1, 8, 64, 256) if gpu else (1, 8)),
        resolution=(224 if gpu else 128) if resolution is None else resolution,
        precision=find_precision(precision or ("fp16" if gpu else "fp32")),
        layout=layout,
        minutes=minutes,
    )


def profile_paths(plan: Plan, out: Path) -> dict[Runtime, Path]:
    """The file of each runtime's profile: `out` or, of several, with the runtime in its name."""
    if len(plan.runtimes) == 1:
        return {plan.runtimes[0]: out}
    return {each: out.with_stem(out.stem + name_suffix(plan, each)) for each in plan.runtimes}


def name_suffix(plan: Plan, runtime: Runtime) -> str:
    return "" if len(plan.runtimes) == 1 else f"-{runtime.replace(' ', '-')}"


def check_outputs(plan: Plan, name: str, out: Path, times: Path | None) -> None:
    """Raise ValueError or PermissionError, before measuring, if a result cannot be written."""
    if name in profile_names():
        raise ValueError(
            f"{name} is a profile that comes with fullstride: give yours another --name"
        )
    if not name.isprintable():
        raise ValueError(f"--name {name!r}: use one line of text")
    paths = profile_paths(plan, out).values()
    for path in paths:
        check_output(path, OUTPUT)
    if times in paths:
        raise ValueError(f"--times {times} is the file of a profile: give another name")
    check_output(times, TIMES)


def peaks_by_runtime(plan: Plan) -> dict[Runtime, tuple[Machine, str]]:
    """The device's peaks and their source for each runtime."""
    return {each: machine(plan.device, plan.precision, each) for each in plan.runtimes}


def measure_by_batch(plan: Plan) -> Iterator[tuple[str, int, list[Timing]]]:
    """Yields runtime, batch size and times as soon as that batch size is done."""
    for (runtime, batch), rows in groupby(measure(plan), lambda row: (row.runtime, row.batch)):
        yield runtime, batch, list(rows)


def quiet_share(samples: Sequence[Timing]) -> float:
    """Of the rounds of all networks."""
    return sum(sample.quiet for sample in samples) / len(samples)


def save_times(path: Path, samples: Sequence[Timing], plan: Plan) -> None:
    """All measured times and the environment as JSON."""
    keys = ("runtime", "network", "family", "batch", "seconds", "spread", "quiet", "clock")
    keys += ("wall_s", "cpu_s")
    rows = [{key: getattr(sample, key) for key in keys} for sample in samples]
    settings = {key: getattr(plan, key) for key in ("resolution", "precision", "layout")}
    environment = asdict(Environment.here(plan.device))
    with atomic_write(path, TIMES) as temporary:
        temporary.write_text(
            json.dumps({"environment": environment, **settings, "times": rows}, indent=1)
        )


def check_interval(fit: Fit) -> None:
    """Raise ValueError if nine of ten measured times are longer, or shorter, by MAX_BIAS or more.

    Then the fitted and the tested times were not taken under the same conditions.
    """
    if fit.low > MAX_BIAS or fit.high < 1 / MAX_BIAS:
        raise ValueError(
            f"whole networks take {fit.low:g} to {fit.high:g} times their estimates, an interval "
            "without the estimate itself: measure again when the machine is quiet"
        )


def save_profiles(
    samples: Sequence[Timing],
    plan: Plan,
    peaks: Mapping[Runtime, tuple[Machine, str]],
    out: Path,
    name: str,
) -> Iterator[FittedProfile]:
    """Fit and write a profile for each runtime; of several each has its own name and path.

    Raises ValueError at the end if there were too few times for one of them, or if measured times
    lie all on one side of the estimates.
    """
    failures, paths = [], profile_paths(plan, out)
    for runtime, (peak, sheet) in peaks.items():
        rows = [sample for sample in samples if sample.runtime == runtime]
        own_name = name + name_suffix(plan, runtime)
        try:
            calibration = fit_profile(rows, plan, peak, sheet, own_name)
            check_interval(calibration.profile.inference)
        except ValueError as error:  # the other runtimes' times are still good
            failures.append(f"no profile for {runtime}: {error}")
            continue
        save_profile(calibration.profile, paths[runtime])
        yield FittedProfile(path=paths[runtime], machine=peak, sheet=sheet, calibration=calibration)
    if failures:
        raise ValueError("; ".join(failures))
