"""Fits a profile of the device at hand to timed microbenchmarks."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, get_args

import numpy as np
import torch

from fullstride.io.console import count_of
from fullstride.io.records import write_json
from fullstride.io.writing import check_output, json_output, lacks_memory
from fullstride.latency import fitting, microbenchmarks
from fullstride.latency.devices import profile_names
from fullstride.latency.fitting import PRIORS
from fullstride.latency.microbenchmarks import WHOLE, Microbenchmark, Round, all_microbenchmarks
from fullstride.latency.profiles import CALIBRATED, PROFILE, Clocks, Fit, Profile
from fullstride.latency.roofline import NORMAL_95, NUMBERS, Machine, Runtime, prepare, times
from fullstride.measure import workload
from fullstride.measure.environment import Environment
from fullstride.measure.operators import Operators
from fullstride.measure.protocols import Protocol, timed_calls, warm_up
from fullstride.measure.settings import CalibrateSettings
from fullstride.measure.tracer import traced

# TensorRT is not measured, and files are on other machines only.
FILES: tuple[Runtime, ...] = ("onnx", "openvino")
RUNTIMES = tuple(each for each in get_args(Runtime) if each not in ("tensorrt", *FILES))
GROUP = 8  # networks on the device at once, timed in turn
MAX_CALL_S = 2.0  # a network with a longer call is left out
MIN_TIMES = 24  # for a fit
MORE_ROUNDS = 3
SHORT = Protocol(name="throughput", batch=1, warmup_s=0.05, rounds=7, round_s=0.02)
# Images are already on the device, so starting a batch costs little.
CALIBRATION_PRIORS = {**PRIORS, "start_us": (20.0, 1.0)}


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Another machine that times the networks as exported files."""

    environment: Environment
    versions: Mapping[str, str]  # by runtime


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The times to measure, and how."""

    device: torch.device
    runtimes: tuple[Runtime, ...]
    batches: tuple[int, ...]
    resolution: int  # pixels a side
    precision: workload.Precision
    layout: workload.Layout = "nchw"
    minutes: float = 8.0  # no network begins later
    protocol: Protocol = SHORT
    there: Elsewhere | None = None

    @property
    def environment(self) -> Environment:
        return self.there.environment if self.there else Environment.here(self.device)

    def __post_init__(self) -> None:
        runtimes = [*self.there.versions] if self.there else RUNTIMES
        for runtime in self.runtimes:
            if runtime not in runtimes:
                names = ", ".join(each.removeprefix("cuda ") for each in runtimes)
                raise ValueError(f"no runtime {runtime!r} here: choose from {names}")
            if runtime == "cuda graph" and self.device.type != "cuda":
                raise ValueError(
                    f"cuda graphs are for GPUs: on {self.device} choose eager or compiled"
                )
        for batch in self.batches:
            if batch < 1:
                raise ValueError(f"batch {batch}: use a whole number from 1")
        if not self.runtimes or not self.batches:
            raise ValueError("nothing to measure: give at least one runtime and one batch size")
        if self.resolution < 64:
            raise ValueError(
                f"resolution {self.resolution}: use 64 or more, the microbenchmarks halve it six "
                "times"
            )
        if not self.minutes > 0:
            raise ValueError(f"{self.minutes:g} minutes to measure: use a number above 0")
        if self.device.type == "cpu" and self.precision == "float16":
            raise ValueError("fp16 is for GPUs: on the CPU say --precision bf16 or fp32")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The measured time of one network."""

    network: str
    family: str  # its networks are left out of a fit together
    operators: Operators
    runtime: Runtime
    batch: int
    seconds: float  # per batch, median of the quiet rounds
    wall_s: float  # per batch, median of all rounds
    cpu_s: float  # CPU time of the calling thread per batch, median of all rounds
    spread: float = 0.0  # (p90 - p10) / median of the rounds
    # The fraction of quiet rounds, in which the calling thread had a core all the time. With fewer
    # than QUIET_ROUNDS quiet rounds, `seconds` is CPU time, not wall time.
    quiet: float = 1.0
    clock: Literal["wall", "cpu"] = "wall"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A profile, and its errors in percent for networks outside the fit."""

    profile: Profile
    times: int  # number of fitted times
    left_out: float  # error for microbenchmarks, with numbers fitted without their family
    by_family: dict[str, float]  # `left_out` by family
    whole: dict[str, float]  # estimated / measured of WHOLE networks, mean over batch sizes


def measure(plan: Plan, networks: Sequence[Microbenchmark] | None = None) -> Iterator[Timing]:
    """Yield the times of the microbenchmarks, without networks that are too slow or too large.

    Every runtime and batch size has an equal share of the minutes, in which groups of networks from
    all families are timed one after the other. Each share begins with a different group.
    """
    networks = all_microbenchmarks() if networks is None else networks
    count = -(-len(networks) // GROUP)
    groups = [networks[i::count] for i in range(count)]
    operators = {each.name: traced(each.build, plan.resolution) for each in networks}
    cells = [*product(plan.runtimes, plan.batches)]
    end = time.monotonic() + 60 * plan.minutes
    for number, (runtime, batch) in enumerate(cells):
        now = time.monotonic()
        share = now + (end - now) / (len(cells) - number)
        for i in range(count):
            if time.monotonic() >= share:
                break
            group = groups[(i + number) % count]
            for each, rounds in time_in_turn(group, plan, runtime, batch, share):
                yield Timing(
                    network=each.name,
                    family=each.family,
                    operators=operators[each.name],
                    runtime=runtime,
                    batch=batch,
                    **microbenchmarks.time_of(rounds),
                )


def time_in_turn(
    group: Sequence[Microbenchmark], plan: Plan, runtime: Runtime, batch: int, end: float = math.inf
) -> list[tuple[Microbenchmark, list[Round]]]:
    """Time the networks in turn in every round; return the rounds of each network.

    Rounds are added, up to MORE_ROUNDS times the protocol's, until as many as the protocol has were
    quiet. No network is prepared after `time.monotonic()` passes `end`: compiling takes long.
    """
    device = plan.device
    with workload.exact_float32(), workload.compiling(runtime == "compiled"):
        prepared = (
            (each, prepare_step(each, plan, runtime, batch))
            for each in group
            if time.monotonic() < end
        )
        steps = [(each, step) for each, step in prepared if step]
        calls = [warm_up(step, plan.protocol, device) for _, step in steps]
        done: list[list[Round]] = [[] for _ in steps]
        for number in range(MORE_ROUNDS * plan.protocol.rounds):
            for (_, step), n, own in zip(steps, calls, done, strict=True):
                quiet = sum(each.quiet for each in own)
                if number < plan.protocol.rounds or quiet < plan.protocol.rounds:
                    own.append(microbenchmarks.timed_round(step, n, device))
    rounds = [(each, own) for (each, _), own in zip(steps, done, strict=True)]
    del steps
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rounds


def prepare_step(
    network: Microbenchmark, plan: Plan, runtime: Runtime, batch: int
) -> Callable[[], object] | None:
    """A function that runs one batch; None if a call takes too long or does not fit in memory."""
    options = workload.StepOptions(
        precision=plan.precision, layout=plan.layout, compiled=runtime == "compiled"
    )
    size = batch, plan.resolution, plan.device
    try:
        step = workload.Step(network.build(), "inference", *size, options=options)
        timed_calls(step, 1, plan.device)  # compiles, picks algorithms
        (seconds,), _ = timed_calls(step, 1, plan.device)
        if seconds > MAX_CALL_S:
            return None
        return capture(step) if runtime == "cuda graph" else step
    except (MemoryError, RuntimeError) as error:
        if lacks_memory(error):
            return None
        raise


def capture(step: workload.Step) -> Callable[[], object]:
    """Capture a call of `step` as a CUDA graph, which needs a single launch."""
    # Capturing requires that lazy initialisation is done, and a stream other than the current one.
    side = torch.cuda.Stream(step.device)
    side.wait_stream(torch.cuda.current_stream(step.device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(step.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> object:
        graph.replay()
        return step, out  # the graph reads and writes their memory

    return replay


def fit_profile(
    timings: Sequence[Timing], plan: Plan, machine: Machine, sheet: str, name: str
) -> Calibration:
    """Fit the numbers of one runtime to the times of microbenchmarks.

    The error and the interval are measured on WHOLE networks, if four or more were timed, else on
    microbenchmarks whose family was left out. The latter are larger, since errors of few operators
    do not average out. The spread of the rounds widens the interval (`widen`). Raises ValueError
    for too few times.
    """
    fitted = np.array([timing.family != WHOLE for timing in timings], dtype=bool)
    families = np.array([t.family if t.family != WHOLE else t.network for t in timings])
    if fitted.sum() < MIN_TIMES or len(np.unique(families[fitted])) < 3:
        raise ValueError(
            f"{count_of(fitted.sum(), 'time')} of "
            f"{count_of(len(np.unique(families[fitted])), 'family')} in {plan.minutes:g} minutes, "
            f"where a fit needs {MIN_TIMES} of 3: give more minutes, or a smaller resolution"
        )
    work = prepare([t.operators for t in timings], [t.batch for t in timings], machine)
    seconds = np.array([timing.seconds for timing in timings])
    parameters = fitting.Parameters(names_for(machine.runtime, plan.device), CALIBRATION_PRIORS)
    data = work.select(fitted), seconds[fitted]
    numbers = fitting.fit(*data, parameters)
    estimated = times(work, numbers).total_s
    estimated[fitted] = fitting.left_out(*data, families[fitted], parameters)
    whole = sorted(set(families[~fitted]))
    tested, tests = fitted, "microbenchmarks of families left out"
    if len(whole) >= 4:
        tested, tests = ~fitted, f"{len(whole)} whole networks"
    noise = median_spread(timings)
    bounds = fitting.interval(estimated[tested], seconds[tested], families[tested])
    low, high = widen(*bounds, noise)
    batch = work.batch[tested]

    def error_of(mask: np.ndarray) -> float:
        return round(fitting.error(estimated[mask], seconds[mask]), 1)

    ratio = fitting.resolvable_ratio(estimated[tested] / batch, seconds[tested] / batch, batch)
    inference = Fit(
        numbers={key: float(f"{value:.4g}") for key, value in numbers.items()},
        error=error_of(tested),
        low=round(low, 3),
        high=round(high, 3),
        resolvable_ratio=round(ratio, 2),
        spread=round(noise, 3),
        **origin(timings, plan),
    )
    return Calibration(
        profile=calibrated_profile(inference, plan, machine, sheet, name, tests),
        times=int(fitted.sum()),
        left_out=error_of(fitted),
        by_family={str(key): error_of(families == key) for key in np.unique(families[fitted])},
        whole={str(key): float((estimated / seconds)[families == key].mean()) for key in whole},
    )


def origin(timings: Sequence[Timing], plan: Plan) -> dict[str, Any]:
    """The fields of `Fit` that say where the numbers of a calibration come from."""
    environment = plan.environment
    batches = ", ".join(str(batch) for batch in sorted({timing.batch for timing in timings}))
    gpu = f", CUDA {environment.cuda}, driver {environment.driver}" if environment.cuda else ""
    software, clocks = f"torch {environment.torch}{gpu}", None
    if plan.there:
        software = f"{timings[0].runtime} {plan.there.versions[timings[0].runtime]}"
    else:
        by_cpu = sum(timing.clock == "cpu" for timing in timings)
        ratio = round(float(np.median([timing.wall_s / timing.cpu_s for timing in timings])), 3)
        clocks = Clocks(wall=len(timings) - by_cpu, cpu=by_cpu, wall_per_cpu=ratio)
    return {
        "networks": len({timing.network for timing in timings if timing.family != WHOLE}),
        "source": f"{CALIBRATED}, batch {batches}, {plan.resolution} pixels a side",
        "software": software,
        "date": environment.date[:10],
        "clocks": clocks,
    }


def calibrated_profile(
    inference: Fit, plan: Plan, machine: Machine, sheet: str, name: str, tests: str
) -> Profile:
    """The profile of this device with a fit; `tests` names the networks that gave its error."""
    environment, is_cpu = plan.environment, plan.device.type == "cpu"
    conditions = "files of uint8 pixels in turn, with a wait after each call"
    if clocks := inference.clocks:
        conditions = "wall time of rounds without other work on its core"
        if clocks.cpu:
            conditions += f", and CPU time for {clocks.cpu} of {clocks.wall + clocks.cpu} times, "
            conditions += "which had too few such rounds"
        conditions += "; calls are queued, as if a next batch always waited"
    return Profile(
        name=name,
        device=environment.device
        + (f", {count_of(environment.threads, 'thread')}" if is_cpu else ""),
        layout="" if plan.there else plan.layout,
        precision=plan.precision,
        machine=machine,
        sheet=sheet,
        inference=inference,
        note=f"the error is from {tests}; {conditions}",
    )


def median_spread(timings: Sequence[Timing]) -> float:
    """The median spread of a network's rounds; above 0.05 the machine was busy."""
    return float(np.median([timing.spread for timing in timings]))


def widen(low: float, high: float, spread: float) -> tuple[float, float]:
    """Add the noise of single rounds to an interval for nine of ten times.

    Rounds are taken as log-normal, with eight of ten within `spread`. Their 90 % interval and the
    interval itself are added in quadrature, in the logarithm, around the same middle.
    """
    middle, reach = math.log(low * high) / 2, math.log(high / low) / 2
    wider = math.hypot(reach, spread / 2 * NORMAL_95 / NormalDist().inv_cdf(0.9))
    return math.exp(middle - wider), math.exp(middle + wider)


def names_for(runtime: Runtime, device: torch.device) -> tuple[str, ...]:
    """The numbers to fit: host time only for GPUs without a graph, and no copies of images."""
    host = device.type == "cuda" and runtime != "cuda graph"
    return tuple(name for name in NUMBERS if name != "image_us" and (host or name != "host_us"))


# ---- files and defaults

TIMES = json_output("the times of a calibration", "environment", "times")
MAX_BIAS = 1.1  # between a profile's estimates and the nearer end of their interval
# The runtimes by their names in `--runtimes`.
RUNTIME_OF_WORD: dict[str, Runtime] = {
    each.removeprefix("cuda "): each for each in (*RUNTIMES, *FILES)
}


def default_plan(
    device: torch.device, options: CalibrateSettings, there: Elsewhere | None = None
) -> Plan:
    """A plan with defaults for a GPU, a CPU or another machine in place of empty options."""
    gpu = device.type == "cuda"
    usual = [*there.versions] if there else [*RUNTIME_OF_WORD][: len(RUNTIMES) if gpu else 1]
    return Plan(
        device=device,
        runtimes=tuple(RUNTIME_OF_WORD[name] for name in dict.fromkeys(options.runtimes or usual)),
        batches=tuple(dict.fromkeys(options.batches)) or ((1, 8, 64, 256) if gpu else (1, 8)),
        resolution=(224 if gpu else 128) if options.resolution is None else options.resolution,
        precision=workload.find_precision(options.precision or ("fp16" if gpu else "fp32")),
        layout=options.layout,
        minutes=options.minutes,
        there=there,
    )


def profile_paths(plan: Plan, out: Path) -> dict[Runtime, Path]:
    """The file of each runtime's profile: `out`, for several with the runtime in its name."""
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
        check_output(path, PROFILE.output)
    if times in paths:
        raise ValueError(f"--times-out {times} is the file of a profile: give another name")
    check_output(times, TIMES)


def peaks_by_runtime(plan: Plan, samples: Sequence[Timing]) -> dict[Runtime, tuple[Machine, str]]:
    """The device's peaks and their source by runtime; another machine's come from the samples."""
    if plan.there is None:
        where = plan.device, plan.precision
        return {each: microbenchmarks.machine(*where, each) for each in plan.runtimes}
    return {each: highest_rates(samples, each, plan) for each in plan.runtimes}


def highest_rates(samples: Sequence[Timing], runtime: Runtime, plan: Plan) -> tuple[Machine, str]:
    """The highest rates of arithmetic and memory traffic of whole networks, close to a bound."""
    samples = [each for each in samples if each.runtime == runtime]
    unit = Machine(
        runtime=runtime,
        peak_tflops=1,
        bandwidth_gb_s=1,
        bytes_per_element=microbenchmarks.BYTES[plan.precision],
        folded=True,
    )
    source = "the highest rates of the networks that were timed"
    if not samples:
        return unit, source
    work = prepare([each.operators for each in samples], [each.batch for each in samples], unit)
    seconds = np.array([each.seconds for each in samples])
    rates = (
        float((np.add.reduceat(part * work.count, work.starts) / seconds).max())
        for part in (work.arithmetic_s, work.memory_s)
    )
    tflops, gb_s = (float(f"{rate:.4g}") for rate in rates)
    return replace(unit, peak_tflops=tflops, bandwidth_gb_s=gb_s), source


def measure_by_batch(plan: Plan) -> Iterator[tuple[str, list[Timing]]]:
    """Yield a runtime and batch size in words, and its times, as soon as they are complete."""
    for words, rows in groupby(measure(plan), lambda row: f"{row.runtime}, batch {row.batch}"):
        yield words, [*rows]


def noise_line(samples: Sequence[Timing], plan: Plan) -> str:
    """Say how much a network's rounds differ, and on this machine how many were quiet."""
    noise = f"a network's rounds spread by {median_spread(samples):.0%}, in the median: above 5 %"
    share = sum(sample.quiet for sample in samples) / len(samples)
    quiet = "" if plan.there else f"; {share:.0%} of all rounds were quiet"
    return f"{noise} the machine was not quiet{quiet}"


def save_times(path: Path, samples: Sequence[Timing], plan: Plan) -> None:
    """Save all measured times and the environment as JSON."""
    keys = ("runtime", "network", "family", "batch", "seconds", "spread")
    keys += () if plan.there else ("quiet", "clock", "wall_s", "cpu_s")
    rows = [{key: getattr(sample, key) for key in keys} for sample in samples]
    settings = {key: getattr(plan, key) for key in ("resolution", "precision", "layout")}
    write_json(path, TIMES, {"environment": plan.environment, **settings, "times": rows})


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
) -> Iterator[tuple[Path, Calibration]]:
    """Fit and write a profile for each runtime; several profiles have their own names and paths.

    Raises ValueError at the end for a runtime with too few times, or with all measured times on one
    side of the estimates.
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
        PROFILE.save(paths[runtime], calibration.profile)
        yield paths[runtime], calibration
    if failures:
        raise ValueError("; ".join(failures))
