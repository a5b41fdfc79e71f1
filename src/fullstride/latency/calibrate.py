"""What numbers explain the device at hand? Designed networks are timed in turn, and a profile is fitted to them."""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fullstride.latency.fitting import PRIORS, apart, error, fit, interval, left_out
from fullstride.latency.microbenchmarks import WHOLE, Design, designs
from fullstride.latency.profiles import Fit, Profile, load_profile, profile_names
from fullstride.latency.roofline import NUMBERS, Engine, Machine, prepare, times
from fullstride.measure.cost.operators import Operators, traced
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import Protocol
from fullstride.measure.timing import spread, timed_calls, warm_up
from fullstride.measure.workload import Layout, Precision, Step, compiling, exact_float32

ENGINES: tuple[Engine, ...] = ("eager", "cuda graph", "compiled")
TOGETHER = 8  # networks on the device at once, timed in turn
LONGEST_S = 2.0  # of a call: what takes longer is left out
LEAST = 24  # times that a fit needs
VARIANT = re.compile(
    r"\b(PCIE|NVL|TI|SUPER|LAPTOP|SXM2)\b", re.IGNORECASE
)  # has a sheet of its own
SHORT = Protocol(name="throughput", batch=1, warmup_s=0.05, rounds=7, round_s=0.02)
# Images are on the device already, and little is paid for a batch itself.
OWN_PRIORS = {**PRIORS, "start_us": (20.0, 1.0)}
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be timed, and how."""

    device: torch.device
    engines: tuple[Engine, ...]
    batches: tuple[int, ...]
    resolution: int  # pixels a side
    precision: Precision
    layout: Layout = "nchw"
    minutes: float = 8.0  # after which no further networks are begun
    protocol: Protocol = SHORT

    def __post_init__(self) -> None:
        for engine in self.engines:
            if engine not in ENGINES:
                raise ValueError(f"no engine {engine!r} here: choose from {', '.join(ENGINES)}")
            if engine == "cuda graph" and self.device.type != "cuda":
                raise ValueError(
                    f"cuda graphs are for GPUs: on {self.device} choose eager or compiled"
                )
        for batch in self.batches:
            if batch < 1:
                raise ValueError(f"batch {batch}: use a whole number from 1")
        if not self.engines or not self.batches:
            raise ValueError("nothing to measure: give at least one engine and one batch size")
        if self.resolution < 64:
            raise ValueError(
                f"resolution {self.resolution}: use 64 or more, the designed networks halve it six times"
            )
        if not self.minutes > 0:
            raise ValueError(f"{self.minutes:g} minutes to measure: use a number above 0")
        if self.device.type == "cpu" and self.precision == "float16":
            raise ValueError("float16 is for GPUs: on the CPU say --precision bf16 or fp32")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured time."""

    network: str
    family: str  # left out of the fit together
    operators: Operators
    engine: Engine
    batch: int
    seconds: float  # of the batch, median of the rounds
    spread: float = 0.0  # (p90 - p10) / median of the rounds


@dataclass(frozen=True, kw_only=True)
class Report:
    """A profile, and how wrong the model was, in percent, where it was not fitted."""

    profile: Profile
    times: int  # that were fitted
    left_out: float  # error for designed networks, by numbers fitted without their family
    by_family: dict[str, float]  # the same
    whole: dict[
        str, float
    ]  # estimated / measured of whole networks, which are never fitted, mean over batch sizes


def measure(plan: Plan, asked: Sequence[Design] | None = None) -> Iterator[Sample]:
    """Times of the designed networks, some of all families in turn; what is too slow or too large is left out.

    Every engine and batch size gets its share of the minutes. What does not fit in it is not measured, and it is
    other networks each time.
    """
    asked = designs() if asked is None else asked
    count = -(-len(asked) // TOGETHER)
    groups = [asked[i::count] for i in range(count)]
    known = {design.name: traced(design.build, plan.resolution) for design in asked}
    cells: list[tuple[Engine, int]] = [
        (engine, batch) for engine in plan.engines for batch in plan.batches
    ]
    end = time.monotonic() + 60 * plan.minutes
    for number, (engine, batch) in enumerate(cells):
        now = time.monotonic()
        share = now + (end - now) / (len(cells) - number)
        for i in range(count):
            if time.monotonic() >= share:
                break
            group = groups[(i + number) % count]
            for design, rounds in turns(group, plan, engine, batch, share):
                yield Sample(
                    network=design.name,
                    family=design.family,
                    operators=known[design.name],
                    engine=engine,
                    batch=batch,
                    seconds=median(rounds),
                    spread=spread(rounds),
                )


def turns(
    group: Sequence[Design], plan: Plan, engine: Engine, batch: int, end: float = math.inf
) -> list[tuple[Design, list[float]]]:
    """Seconds of a batch of each network in every round, in which they are timed one after the other.

    None is made ready once `time.monotonic()` is past `end`: compiling takes long.
    """
    device = plan.device
    with exact_float32(), compiling(engine == "compiled"):
        made = (
            (design, ready(design, plan, engine, batch))
            for design in group
            if time.monotonic() < end
        )
        steps = [(design, step) for design, step in made if step]
        calls = [warm_up(step, plan.protocol, device) for _, step in steps]
        seconds: list[list[float]] = [[] for _ in steps]
        for _ in range(plan.protocol.rounds):
            for (_, step), n, own in zip(steps, calls, seconds, strict=True):
                (took,), _ = timed_calls(step, n, device)
                own.append(took / n)
    found = [(design, each) for (design, _), each in zip(steps, seconds, strict=True)]
    del steps
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def ready(design: Design, plan: Plan, engine: Engine, batch: int) -> Callable[[], object] | None:
    """What one call of is one batch; None where that takes too long or has no room."""
    how: dict[str, Any] = dict(
        precision=plan.precision, layout=plan.layout, compiled=engine == "compiled"
    )
    try:
        step = Step(design.build(), "inference", batch, plan.resolution, plan.device, **how)
        timed_calls(step, 1, plan.device)  # compiles, picks algorithms
        (seconds,), _ = timed_calls(step, 1, plan.device)
        if seconds > LONGEST_S:
            return None
        return graphed(step) if engine == "cuda graph" else step
    except (torch.OutOfMemoryError, MemoryError):
        return None


def graphed(step: Step) -> Callable[[], object]:
    """The launches of one call as a CUDA graph, which the device takes all at once."""
    side = torch.cuda.Stream(
        step.device
    )  # capturing wants all that is lazy to be done, on a stream of its own
    side.wait_stream(torch.cuda.current_stream(step.device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(step.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay() -> object:
        graph.replay()
        return step, kept  # the graph reads and writes their memory

    return replay


def machine(device: torch.device, precision: Precision, engine: Engine) -> tuple[Machine, str]:
    """Peaks of the device, and where they are from: its data sheet where a profile has it, else measured now."""
    found = (
        by_sheet(Environment.here(device).device)
        if BYTES[precision] == 2 and device.type == "cuda"
        else None
    )
    if found:
        tflops, gb_s, source = found.machine.peak_tflops, found.machine.bandwidth_gb_s, found.sheet
    else:
        tflops, gb_s = peaks(device, precision)
        source = f"measured: a large product or convolution in {precision}, and a copy"
    return Machine(
        engine=engine,
        peak_tflops=float(f"{tflops:.4g}"),
        bandwidth_gb_s=float(f"{gb_s:.4g}"),
        bytes_per_element=BYTES[precision],
    ), source


def by_sheet(name: str) -> Profile | None:
    """A profile of 16 bits of the GPU that torch calls `name`."""
    if VARIANT.search(name):
        return None
    for known in map(load_profile, profile_names()):
        model = re.match(r"NVIDIA ((RTX )?\w+)", known.device)
        if model and known.machine.bytes_per_element == 2 and re.search(rf"\b{model[1]}\b", name):
            return known
    return None


def peaks(device: torch.device, precision: Precision) -> tuple[float, float]:
    """TFLOPS of a large matrix product or convolution and GB/s, read and written, of a copy: each time the fastest.

    A peak is what nothing held back. A CPU's copies are of maps that fit in its caches as well.
    """
    gpu = device.type == "cuda"
    side, images, sizes = (8192, 64, (2**28,)) if gpu else (2048, 1, (2**20, 2**24))
    kind: Any = dict(device=device, dtype=getattr(torch, precision))
    a, b = torch.randn(side, side, **kind), torch.randn(side, side, **kind)
    maps, kernel = torch.randn(images, 256, 64, 64, **kind), torch.randn(256, 256, 3, 3, **kind)
    macs = images * 256 * 256 * 9 * 62 * 62  # without padding
    copies = {n: torch.zeros(2, n, **kind) for n in sizes}

    def seconds(call: Callable[[], object]) -> float:
        call()
        return min(timed_calls(call, 3, device)[0][0] / 3 for _ in range(5))

    with exact_float32(), torch.inference_mode():
        product, convolution = seconds(lambda: a @ b), seconds(lambda: F.conv2d(maps, kernel))
        rates = [
            2 * n * kept.element_size() / seconds(lambda k=kept: k[1].copy_(k[0]))
            for n, kept in copies.items()
        ]
    return 2e-12 * max(side**3 / product, macs / convolution), 1e-9 * max(rates)


def report(samples: Sequence[Sample], plan: Plan, made: Machine, sheet: str, name: str) -> Report:
    """Fit the numbers of one engine to the designed networks. Raises ValueError where there are too few times.

    The error and the interval are those of whole networks, where four or more were timed, else of designed ones of
    families left out, which are harder: little averages out in them.
    """
    designed = np.array([sample.family != WHOLE for sample in samples], dtype=bool)
    families = np.array([s.family if s.family != WHOLE else s.network for s in samples])
    if designed.sum() < LEAST or len(np.unique(families[designed])) < 3:
        raise ValueError(
            f"{designed.sum()} times of {len(np.unique(families[designed]))} families in {plan.minutes:g} minutes, "
            f"where a fit needs {LEAST} of 3: give more minutes, or a smaller resolution"
        )
    work = prepare(
        [sample.operators for sample in samples], [sample.batch for sample in samples], made
    )
    seconds = np.array([sample.seconds for sample in samples])
    names = names_for(made.engine, plan.device)
    numbers = fit(work.of(designed), seconds[designed], names, OWN_PRIORS)
    found = times(work, numbers).total_s
    found[designed] = left_out(
        work.of(designed), seconds[designed], families[designed], names, OWN_PRIORS
    )
    known = sorted(set(families[~designed]))
    tested = ~designed if len(known) >= 4 else designed
    estimated, took, groups = found[tested], seconds[tested], families[tested]
    low, high = interval(estimated, took, groups)
    batch = work.batch[tested]
    here = Environment.here(plan.device)
    cpu = plan.device.type == "cpu"
    networks = len({sample.network for sample in samples if sample.family != WHOLE})
    images = ", ".join(str(batch) for batch in sorted({sample.batch for sample in samples}))
    tests = (
        f"{len(known)} whole networks"
        if len(known) >= 4
        else "designed networks of families left out"
    )
    fitted = Fit(
        numbers={key: float(f"{value:.4g}") for key, value in numbers.items()},
        error=round(error(estimated, took), 1),
        low=round(low, 3),
        high=round(high, 3),
        apart=round(apart(estimated / batch, took / batch, batch), 2),
        networks=networks,
        source=f"fullstride calibrate at batch {images} and {plan.resolution} pixels a side",
        software=f"torch {here.torch}"
        + ("" if cpu else f", CUDA {here.cuda}, driver {here.driver}"),
        date=here.date[:10],
    )
    profile = Profile(
        name=name,
        device=here.device + (f", {here.threads} threads" if cpu else ""),
        layout=plan.layout,
        precision=plan.precision,
        machine=made,
        sheet=sheet,
        inference=fitted,
        note=f"the error is that of {tests}; calls are queued, as where there is always a next batch",
    )

    def off(which: np.ndarray) -> float:
        return round(error(found[which], seconds[which]), 1)

    return Report(
        profile=profile,
        times=int(designed.sum()),
        left_out=off(designed),
        by_family={str(key): off(families == key) for key in np.unique(families[designed])},
        whole={str(key): float((found / seconds)[families == key].mean()) for key in known},
    )


def names_for(engine: Engine, device: torch.device) -> tuple[str, ...]:
    """Which numbers are fitted: the host runs beside a GPU that is not fed by a graph, and images are not copied."""
    host = device.type == "cuda" and engine != "cuda graph"
    return tuple(name for name in NUMBERS if name != "image_us" and (host or name != "host_us"))
