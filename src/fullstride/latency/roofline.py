"""Computes times by a roofline from a network's operators and about ten numbers of a device.

An operator takes the slower of its arithmetic and its memory traffic, combined smoothly as the root
of the sum of squares. Each launch costs time on the device, and in an eager runtime also on the
host, which runs beside the device: the slower of the two counts, again combined smoothly.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np

from fullstride.io.records import Bounds, check_bounds
from fullstride.measure import operators
from fullstride.measure.operators import AFTER_PRODUCT, IN_CHAIN, JOINING, KIND, Operators

Runtime = Literal["eager", "cuda graph", "compiled", "tensorrt", "onnx", "openvino"]
ONE_KERNEL = ("compiled", "onnx", "openvino")  # runtimes with one kernel per chain of operators

ARITHMETIC = ("dense", "1x1", "depthwise", "grouped")
ARITHMETIC_OF = {name: name for name in ARITHMETIC} | {"linear": "1x1", "product": "1x1"}
MEMORY = ("convolution", "elementwise", "norm", "statistics", "gather")
MEMORY_OF = {
    **dict.fromkeys(operators.PRODUCTS, 0),
    **dict.fromkeys(("activation", "silu", "add", "scale", "reduce"), 1),
    **dict.fromkeys(("batch_norm", "norm"), 2),
    **dict.fromkeys(("group_norm", "statistics"), 3),
    **dict.fromkeys(("pool", "copy"), 4),
}
# A class -> the wider class whose number it takes if a profile has none for the class.
WIDER = {
    "grouped": "dense",
    "elementwise": "convolution",
    "norm": "elementwise",
    "statistics": "elementwise",
    "gather": "elementwise",
}
SPLIT_SILU = 2.5  # sigmoid and product read 3 maps and write 2; one pass reads 1 and writes 1

# The numbers of a fit. Shares of the data sheet's rates exceed 1 with a clock above the sheet's.
NUMBERS = {
    "dense": "share of peak arithmetic",
    "1x1": "share of peak arithmetic, linear layers too",
    "depthwise": "share of peak arithmetic",
    "group_channels": "channels of a group at which a grouped convolution has half the dense share",
    "convolution": "share of bandwidth of convolutions and linear layers",
    "elementwise": "share of bandwidth",
    "norm": "share of bandwidth of batch norms",
    "statistics": "share of bandwidth of layer and group norms",
    "gather": "share of bandwidth of pooling, padding and concatenation",
    "launch_us": "device time of a launch",
    "host_us": "host time of a launch",
    "start_us": "time of a batch, independent of the network",
    "image_us": "time of an image, independent of the network: its copy to the device",
}
ARITHMETIC_SHARES = ("dense", "1x1", "depthwise")
SHARES = (*ARITHMETIC_SHARES, *MEMORY)
RATES = (*ARITHMETIC, *MEMORY)
REQUIRED = ("dense", "1x1", "depthwise", "group_channels", "convolution", "launch_us")

# Keys of spreads for `bounds`: a single network's error that no number explains, and the shared
# error of all times of a device that was not measured, or not with these networks.
REST, DEVICE = "network", "device"
NORMAL_95 = NormalDist().inv_cdf(0.95)
STEP = 1e-5  # of a number's logarithm, for slopes that are exact to 1e-10

Positive = Annotated[float, Bounds(ge=1e-12, le=1e12)]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The data sheet of a device, and how a runtime executes operators, without fitted numbers."""

    runtime: Runtime
    peak_tflops: Positive  # dense, at the precision of the profile; 2 FLOPs are a multiply-add
    bandwidth_gb_s: Positive
    bytes_per_element: Positive = 2
    # fp32 TFLOPS of the units for depthwise convolutions, which tensor cores do not run
    vector_tflops: Positive | None = None
    # The clock that the power limit sustains / the clock of the data sheet's peak
    clock_share: Annotated[float, Bounds(ge=0.01, le=1)] = 1.0
    folded: bool = False  # batch norms are folded into convolutions
    silu_launches: Annotated[int, Bounds(ge=1, le=2)] = 1  # 2: sigmoid and product apart
    split_silu: bool = False  # sigmoid and product each pass over the map

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class PeakTimes:
    """The operators of many networks, one per row, in seconds at the data sheet's rates."""

    starts: np.ndarray  # the first row of each network
    batch: np.ndarray  # images of each network
    arithmetic: np.ndarray  # index into ARITHMETIC
    arithmetic_s: np.ndarray  # at the data sheet's peak
    group_channels: np.ndarray  # channels of a group of a grouped convolution
    memory: np.ndarray  # index into MEMORY
    memory_s: np.ndarray  # at the data sheet's bandwidth; below 0: saves traffic of another row
    launches: np.ndarray
    count: np.ndarray  # repetitions

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def sizes(self) -> np.ndarray:
        """Number of rows of each network."""
        return np.diff(np.append(self.starts, len(self.count)))

    def select(self, mask: np.ndarray) -> "PeakTimes":
        """The networks where `mask` is true."""
        sizes = self.sizes
        rows = np.repeat(mask, sizes)
        columns = {field.name: getattr(self, field.name)[rows] for field in fields(self)[2:]}
        return PeakTimes(starts=first_rows(sizes[mask]), batch=self.batch[mask], **columns)


def first_rows(sizes: np.ndarray) -> np.ndarray:
    return (np.cumsum(sizes) - sizes).astype(np.int64)


def prepare(
    networks: Sequence[Operators],
    batches: Sequence[int],
    machine: Machine,
    *,
    training: bool = False,
) -> PeakTimes:
    """Compute the peak times of each network at its entry of `batches`."""
    sizes = np.array([len(net) for net in networks])
    rows = operators.concatenate(networks)
    return prepare_rows(rows, sizes, np.array(batches), machine, training=training)


def prepare_rows(
    rows: Operators,
    sizes: np.ndarray,
    batches: np.ndarray,
    machine: Machine,
    *,
    training: bool = False,
) -> PeakTimes:
    """`prepare` with the `rows` of all networks; `sizes`, `batches`: rows and images of each."""
    kind, chain = rows.kind, rows.chain
    images = np.repeat(np.asarray(batches, dtype=np.float64), sizes)
    read, written, weights = rows.read, rows.written, rows.weights
    launches = np.ones(len(kind))
    element = np.full(len(kind), float(machine.bytes_per_element))
    silu = kind == KIND["silu"]
    launches[silu] = machine.silu_launches
    if machine.split_silu:
        read = np.where(silu, SPLIT_SILU * read, read)
        written = np.where(silu, SPLIT_SILU * written, written)

    # Operators merged into the previous one: only their other operands are read.
    merged = np.zeros(len(kind), dtype=bool)
    if machine.runtime in ONE_KERNEL:
        merged = chain >= IN_CHAIN
    elif machine.runtime == "tensorrt":  # the epilogue of the convolution
        last = (kind == KIND["activation"]) | (kind == KIND["add"])
        merged = last & ((chain == AFTER_PRODUCT) | (chain == IN_CHAIN) | (chain == JOINING))
        alone = ~merged & (MEMORY_INDEX[kind] > 0)
        element[alone] = np.maximum(element[alone], 2)  # int8 is for convolutions
    read = np.where(merged, np.maximum(read - written, 0), read)
    if machine.runtime in ONE_KERNEL:  # the other chain need not write an operand of this one
        read = np.where(chain == JOINING, -written, read)
        launches[chain == JOINING] = 0
    written = np.where(merged, 0, written)
    launches[merged] = 0
    repeats = np.ones(len(kind))
    if machine.folded:
        repeats[kind == KIND["batch_norm"]] = 0
    # Backward computes two products for each product of forward and moves about twice as much.
    passes = 3.0 if training else 1.0
    moved = passes * (read + written) * images * element + weights * machine.bytes_per_element
    return PeakTimes(
        starts=first_rows(sizes),
        batch=np.asarray(batches, dtype=np.float64),
        arithmetic=ARITHMETIC_INDEX[kind],
        arithmetic_s=rows.macs * images * (passes * 2e-12 / machine.peak_tflops),
        group_channels=np.where(kind == KIND["grouped"], rows.c_in, 0.0),
        memory=MEMORY_INDEX[kind],
        memory_s=moved * (1e-9 / machine.bandwidth_gb_s),
        launches=launches * passes,
        count=rows.count * repeats,
    )


ARITHMETIC_INDEX = np.array(
    [ARITHMETIC.index(ARITHMETIC_OF.get(kind, "dense")) for kind in operators.OPERATOR_KINDS]
)
MEMORY_INDEX = np.array([MEMORY_OF[kind] for kind in operators.OPERATOR_KINDS])


@dataclass(frozen=True)
class Times:
    """The time of a batch in seconds for each network."""

    total_s: np.ndarray
    device_s: np.ndarray
    host_s: np.ndarray
    launch_s: np.ndarray  # part of `device_s` for launches and the start
    arithmetic_s: np.ndarray  # all operators with infinitely fast memory
    memory_s: np.ndarray  # all operators with infinitely fast arithmetic


def number_of(name: str, numbers: Mapping[str, float]) -> str:
    """The name of the number for a class of arithmetic or memory traffic, or for a wider class."""
    while name not in numbers:
        name = WIDER[name]
    return name


def times(work: PeakTimes, numbers: Mapping[str, float]) -> Times:
    """Compute the times of each network of `work` on a device with these `numbers`."""
    arithmetic, memory, slower = row_seconds(work, numbers)
    launches = np.add.reduceat(work.launches * work.count, work.starts)
    launch_s = 1e-6 * (launches * numbers["launch_us"] + numbers.get("start_us", 0.0))
    image_s = 1e-6 * work.batch * numbers.get("image_us", 0.0)
    device_s = np.add.reduceat(slower * work.count, work.starts) + launch_s + image_s
    host_s = 1e-6 * launches * numbers.get("host_us", 0.0)
    return Times(
        total_s=total_seconds(device_s, host_s),
        device_s=device_s,
        host_s=host_s,
        launch_s=launch_s,
        arithmetic_s=np.add.reduceat(arithmetic * work.count, work.starts),
        memory_s=np.add.reduceat(memory * work.count, work.starts) + image_s,
    )


def row_seconds(
    work: PeakTimes, numbers: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of each operator, without repetitions: arithmetic, memory traffic, and combined."""
    rates = np.array([numbers[number_of(name, numbers)] for name in ARITHMETIC])
    arithmetic = work.arithmetic_s / rates[work.arithmetic]
    grouped = work.group_channels > 0
    arithmetic[grouped] *= 1 + numbers["group_channels"] / work.group_channels[grouped]
    bandwidths = np.array([numbers[number_of(name, numbers)] for name in MEMORY])
    memory = work.memory_s / bandwidths[work.memory]
    slower = np.hypot(arithmetic, memory)
    slower[memory < 0] = memory[memory < 0]
    return arithmetic, memory, slower


def sensitivities(
    work: PeakTimes, numbers: Mapping[str, float], names: Sequence[str]
) -> np.ndarray:
    """Elasticity of each time to each number: (networks, `names`)."""
    columns = []
    for name in names:
        longer, shorter = (
            np.log(times(work, {**numbers, name: factor * numbers.get(name, 0.0)}).total_s)
            for factor in (math.exp(STEP), math.exp(-STEP))
        )
        columns.append((longer - shorter) / (2 * STEP))
    return np.stack(columns, axis=1)


def bounds(
    work: PeakTimes, numbers: Mapping[str, float], spreads: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Factors of each time that enclose nine of ten, for `numbers` uncertain by `spreads`.

    Each number is moved to both ends of its own interval. The changes of the logarithm of a time
    are added in quadrature, separately for smaller and for larger times.
    """
    middle = np.log(times(work, numbers).total_s)
    rest = (NORMAL_95 * math.hypot(*(spreads.get(name, 0.0) for name in (REST, DEVICE)))) ** 2
    squares = np.full((2, len(work)), rest)
    for name, deviation in spreads.items():
        if name not in numbers:
            continue
        for sign in (-1, 1):
            value = numbers[name] * math.exp(sign * NORMAL_95 * deviation)
            change = np.log(times(work, {**numbers, name: value}).total_s) - middle
            squares[(change > 0).astype(int), np.arange(len(work))] += change**2
    low, high = np.sqrt(squares)
    return np.exp(-low), np.exp(high)


def total_seconds(device_s: np.ndarray, host_s: np.ndarray) -> np.ndarray:
    """A smooth maximum, since both run in parallel: the fourth root of the sum of fourth powers."""
    return np.sqrt(np.hypot(device_s**2, host_s**2))
