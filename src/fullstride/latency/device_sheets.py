"""Derives profiles of GPUs from their data sheets and from profiles of measured GPUs.

The numbers of a profile are shares of a data sheet's rates, about equal on other GPUs with the same
runtime and layout: estimates were 9 to 12 % off between an RTX 3090 and an RTX 4090
(benchmarks/latency.md). `moved_numbers` changes numbers that depend on the kind of GPU, and
`device_spread` widens the interval. Measured times of a few networks correct the scale.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Literal

from fullstride.io.records import Bounds, check_bounds, read_rows
from fullstride.latency import roofline
from fullstride.latency.network_times import Estimate
from fullstride.latency.profiles import Profile, check_text
from fullstride.latency.roofline import DEVICE, RATES, Machine, Positive, Runtime
from fullstride.measure.budget import MOST_IMAGES

# Runtime, layout and precision -> profiles of measured GPUs, without the V100's: it was measured
# with PyTorch of 2020, whose convolutions are up to 2.8 times slower.
BASES: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("eager", "nhwc", "fp16"): ("rtx3090", "rtx4090"),
    ("eager", "nchw", "fp16"): ("rtx3090-nchw", "rtx4090-nchw"),
    ("compiled", "nchw", "fp16"): ("rtx4090-compiled",),
    ("tensorrt", "", "fp16"): ("t4-fp16",),
    ("tensorrt", "", "int8"): ("t4-int8",),
}
# FLOPs of the CUDA cores per byte of an element-wise operator. With it the model predicts that
# ResNet-50 trains 2.04 times as fast on an A100 as on an RTX 3090, and without it 2.4 times.
# Published: 2.03 to 2.13 times, by 2,470 images/s (NVIDIA DeepLearningExamples, PyTorch 21.03) and
# 2,600 (timm, issue 1491) on the A100, and 1,218 (timm's results) on the RTX 3090.
FLOPS_PER_BYTE = 10
ELEMENTWISE = ("elementwise", "norm", "statistics", "gather")
# Standard deviations of the logarithm of all times, for `device_spread`.
# SAME_KIND: between GPUs with one ratio of tensor to CUDA cores, since moves between an RTX 3090
# and an RTX 4090 had a bias of 1 to 6 %.
# BY_RATIO: per unit of the logarithm of that ratio. A V100 with 4 times the ratio (and PyTorch of
# 2020) is off by 0.33 per unit, an RTX PRO 6000 with 2 times by 0.4, ResNet-50 on an A100 with 8
# times by 0.02.
# BY_POWER: per unit of the logarithm of the clock under a power limit, because the cube root may be
# the square root or the sixth.
SAME_KIND, BY_RATIO, BY_POWER = 0.05, 0.25, 0.5
OF_A_LAUNCH = 0.2  # spread of a launch time from a sheet, since operators differ
MOST_BYTES = 100_000  # for a table of measured times: about 3,000 rows
MOST_OFF = 10  # a measured time further off its estimate, as a ratio, has a wrong unit

# Bounds wider than any GPU, and narrow enough to catch most wrong units.
Tflops = Annotated[float, Bounds(ge=0.1, le=1e5)]
GigabytesPerS = Annotated[float, Bounds(ge=10, le=1e5)]
Watts = Annotated[float, Bounds(ge=1, le=1e4)]
Megahertz = Annotated[float, Bounds(ge=100, le=1e4)]
Microseconds = Annotated[float, Bounds(ge=0.01, le=1e4)]


@dataclass(frozen=True, kw_only=True)
class DeviceSheet:
    """A GPU's rates in NVIDIA's data sheets, and how the GPU is used."""

    device: str
    # Dense peak of the tensor cores by precision, fp16 with fp32 accumulation, which halves the
    # peak of GeForce GPUs.
    tflops: Mapping[Literal["fp16", "int8"], Tflops]
    vector_tflops: Tflops  # fp32 TFLOPS of the CUDA cores
    bandwidth_gb_s: GigabytesPerS
    watts: Watts | None = None  # the power limit
    needed_watts: Watts | None = None  # power that the peak's clock would need; else `watts`
    boost_mhz: Megahertz | None = None  # the clock of the peak
    sustained_mhz: Megahertz | None = None  # clock observed under load; else computed from power
    launch_us: Microseconds | None = None  # device time of a launch; else the measured GPUs'
    host_us: Microseconds | None = None  # host time of a launch; else the measured GPUs'
    runtime: Runtime = "eager"
    layout: Literal["nchw", "nhwc", ""] = "nhwc"
    precision: Literal["fp16", "int8"] = "fp16"
    source: str = ""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_text(self)
        if (self.runtime, self.layout, self.precision) not in BASES:
            forms = "; ".join(map(form_text, BASES))
            own = form_text((self.runtime, self.layout, self.precision))
            raise ValueError(f"no GPU was measured with {own}: use one of {forms}")
        if self.precision not in self.tflops:
            raise ValueError(
                f"tflops lacks {self.precision}, the precision of this sheet: give its dense peak"
            )
        if self.needed_watts and not self.watts:
            raise ValueError(f"needed_watts {self.needed_watts:g} without watts: give both")
        if bool(self.boost_mhz) != bool(self.sustained_mhz):
            raise ValueError("one of boost_mhz and sustained_mhz alone says nothing: give both")

    @property
    def clock_share(self) -> float:
        """The sustained clock / the clock of the peak."""
        if self.sustained_mhz and self.boost_mhz:
            return min(1.0, self.sustained_mhz / self.boost_mhz)
        if self.watts and self.needed_watts:
            return sustained_clock(self.watts, self.needed_watts)
        return 1.0


def form_text(form: tuple[str, str, str]) -> str:
    runtime, layout, precision = form
    return f'{runtime}, layout "{layout}", {precision}'


def sustained_clock(watts: float, needed_watts: float) -> float:
    """The fraction of the clock under a power limit, if the full clock needs `needed_watts`.

    Power grows with the clock and the square of the voltage, which grows with the clock, so the
    clock goes with the cube root of power. An RTX PRO 6000 with 300 W instead of 600 W was 21 to
    29 % slower than by its peak; the cube root of a half is 0.79.
    """
    return min(1.0, round((watts / needed_watts) ** (1 / 3), 3))


def profile_of(sheet: DeviceSheet, name: str, bases: Sequence[Profile]) -> Profile:
    """Derive the profile of a device from its sheet and the profiles that `BASES` names for it.

    Each number is the geometric mean of the numbers that `bases` give for this device.
    """
    basis = bases[0]
    machine = replace(
        basis.machine,
        peak_tflops=sheet.tflops[sheet.precision],
        bandwidth_gb_s=sheet.bandwidth_gb_s,
        vector_tflops=sheet.vector_tflops,
        clock_share=sheet.clock_share,
    )
    moved = [moved_numbers(each.inference.numbers, each.machine, machine) for each in bases]
    numbers = {key: math.exp(fmean(math.log(m[key]) for m in moved)) for key in moved[0]}
    launches = {"launch_us": sheet.launch_us, "host_us": sheet.host_us}
    launches = {key: value for key, value in launches.items() if value}
    numbers |= launches
    fits = [each.inference for each in bases]
    spreads = {
        key: math.sqrt(fmean(fit.spreads[key] ** 2 for fit in fits)) for key in fits[0].spreads
    }
    spreads |= dict.fromkeys(launches, OF_A_LAUNCH)
    further = max(device_spread(each.machine, machine) for each in bases)
    spreads[DEVICE] = further
    worst = max(fits, key=lambda fit: fit.error)
    names = " and ".join(each.name for each in bases)
    return Profile(
        name=name,
        device=sheet.device,
        layout=basis.layout,
        precision=basis.precision,
        machine=machine,
        sheet=sheet.source or "a data sheet",
        inference=replace(
            worst,
            full_batches=worst.full_batches and len(launches) < 2,
            numbers={key: float(f"{value:.4g}") for key, value in numbers.items()},
            spreads={key: round(value, 4) for key, value in spreads.items()},
            low=round(min(fit.low for fit in fits) * math.exp(-further), 3),
            high=round(max(fit.high for fit in fits) * math.exp(further), 3),
            source=f"{names} by data sheet: {worst.source}",
        ),
        measured=False,
        note=f"not measured: shares of the data sheet's rates come from {names}",
    )


def moved_numbers(
    numbers: Mapping[str, float], source: Machine, target: Machine
) -> dict[str, float]:
    """Convert the numbers of one machine to another machine with a known data sheet.

    Depthwise convolutions do not run on tensor cores: their rate moves with the peak of the CUDA
    cores, if both sheets have it. An element-wise operator takes the root of the sum of squares of
    its memory traffic and of `FLOPS_PER_BYTE` on those cores. Arithmetic follows the clock that the
    power limit sustains.
    """
    moved = dict(numbers)
    if source.vector_tflops and target.vector_tflops:
        vector_share = target.vector_tflops / target.peak_tflops
        moved["depthwise"] *= vector_share / (source.vector_tflops / source.peak_tflops)
        slower = slowed_by_cores(source) / slowed_by_cores(target)
        for name in {roofline.number_of(name, numbers) for name in ELEMENTWISE} & set(ELEMENTWISE):
            moved[name] *= slower
    for name in roofline.ARITHMETIC_SHARES:
        moved[name] *= target.clock_share / source.clock_share
    return {name: min(value, 1.0) if name in RATES else value for name, value in moved.items()}


def slowed_by_cores(machine: Machine) -> float:
    """Time of an element-wise operator divided by the time of its memory traffic alone."""
    assert machine.vector_tflops
    return math.hypot(1, 1e-3 * FLOPS_PER_BYTE * machine.bandwidth_gb_s / machine.vector_tflops)


def device_spread(source: Machine, target: Machine) -> float:
    """Standard deviation of the logarithm of all times of `target` by the numbers of `source`."""
    by_ratio = 0.0
    if source.vector_tflops and target.vector_tflops:
        ratio = source.peak_tflops / source.vector_tflops
        by_ratio = math.log(target.peak_tflops / target.vector_tflops / ratio)
    by_power = math.log(target.clock_share / source.clock_share)
    return math.hypot(SAME_KIND, BY_RATIO * by_ratio, BY_POWER * by_power)


# ---- measured times


@dataclass(frozen=True, kw_only=True)
class MeasuredTime:
    """A measured time of one network at one batch size on the device."""

    network: str
    resolution: Annotated[int, Bounds(ge=1, le=10_000)]  # pixels a side
    batch: Annotated[int, Bounds(ge=1, le=MOST_IMAGES)]
    ms_per_image: Positive

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.network:
            raise ValueError("no model: give its name")


def read_measured(path: Path) -> list[MeasuredTime]:
    """Read a CSV file with the columns model, img_size, batch, and ms_per_image or images_per_s.

    Raises ValueError, in one line, for anything else.
    """
    columns = "model, img_size (pixels), batch, and ms_per_image or images_per_s"
    return read_rows(path, measured_of, columns, MOST_BYTES)


def measured_of(row: Mapping[str, str]) -> MeasuredTime:
    if row.get("ms_per_image") or "images_per_s" not in row:
        ms = float(row["ms_per_image"])
    elif rate := float(row["images_per_s"]):
        ms = 1e3 / rate
    else:
        raise ValueError("images_per_s 0: give a rate above 0")
    side, batch = int(row["img_size"]), int(row["batch"])
    return MeasuredTime(network=row["model"], resolution=side, batch=batch, ms_per_image=ms)


def corrected(
    profile: Profile,
    measured: Sequence[MeasuredTime],
    by_profile: Sequence[Estimate],
    most_off: float = MOST_OFF,
) -> Profile:
    """Multiply the profile's times by the median ratio of measured to estimated times.

    `by_profile`: the estimate of each measured time. Several times of a network count as one, their
    median. A time bounded by launches on the host says nothing about the device, and corrects only
    the host time of a launch. Raises ValueError if a measured and an estimated time are `most_off`
    times apart.
    """
    on_device, on_host = defaultdict(list), defaultdict(list)
    for row, own in zip(measured, by_profile, strict=True):
        ratio = row.ms_per_image / own.ms_per_image
        if not 1 / most_off < ratio < most_off:
            raise ValueError(
                f"{row.network} at {row.resolution} pixels takes {row.ms_per_image:g} ms an image "
                f"as measured and {own.ms_per_image:.3g} by {profile.name}: check the unit, and "
                "that a time is a batch's, divided by its images"
            )
        (on_host if own.bound == "host launches" else on_device)[row.network].append(ratio)
    fit, notes = profile.inference, list(filter(None, [profile.note]))
    numbers, spreads, full_batches = dict(fit.numbers), dict(fit.spreads), fit.full_batches
    if on_device:
        factor = median(map(median, on_device.values()))
        for name, value in fit.numbers.items():
            if name in RATES or name.endswith("_us"):
                numbers[name] = value / factor if name in RATES else value * factor
        # The fit's error is a mean of absolute values. A standard deviation is sqrt(pi / 2) times
        # as large, and the variance of a median is pi / 2 times the variance of a mean.
        spreads[DEVICE] = round(fit.error / 100 * math.pi / 2 / math.sqrt(len(on_device)), 4)
        notes.append(f"times are multiplied by {factor:.3g}, from {len(on_device)} measured")
    if on_host:
        factor = median(map(median, on_host.values()))
        numbers["host_us"], spreads["host_us"] = fit.numbers["host_us"] * factor, OF_A_LAUNCH
        full_batches = False
        notes.append(f"host times are multiplied by {factor:.3g}, from {len(on_host)}")
    inference = replace(
        fit,
        numbers={name: float(f"{value:.4g}") for name, value in numbers.items()},
        spreads=fit.spreads and spreads,
        full_batches=full_batches,
    )
    return replace(profile, inference=inference, note="; ".join(notes))
