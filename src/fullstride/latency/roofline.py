"""How long does a network take? From its operators and about ten numbers of a device and an engine.

An operator takes as long as its arithmetic or its memory traffic, whichever is slower, joined smoothly as the root of
the sum of squares. Each launch costs time on the device. An eager engine pays for each launch on the host as well,
which runs beside the device: the slower of the two counts, smoothly again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from fullstride.measure.cost.operators import (
    AFTER_PRODUCT,
    IN_CHAIN,
    JOINING,
    KIND,
    KINDS,
    PRODUCTS,
    Operators,
    joined,
)

Engine = Literal["eager", "cuda graph", "compiled", "tensorrt"]

ARITHMETIC = ("dense", "1x1", "depthwise", "grouped")
ARITHMETIC_OF = {"dense": 0, "1x1": 1, "linear": 1, "product": 1, "depthwise": 2, "grouped": 3}
MEMORY = ("convolution", "elementwise", "norm", "statistics", "gather")
MEMORY_OF = {
    **dict.fromkeys(PRODUCTS, 0),
    **dict.fromkeys(("activation", "silu", "add", "scale", "reduce"), 1),
    **dict.fromkeys(("batch_norm", "norm"), 2),
    **dict.fromkeys(("group_norm", "statistics"), 3),
    **dict.fromkeys(("pool", "copy"), 4),
}
WIDER = {
    "elementwise": "convolution",
    "norm": "elementwise",
    "statistics": "elementwise",
    "gather": "elementwise",
}
UNUSUAL = {  # what not every ConvNet has
    "norm": "batch norms apart from convolutions",
    "group_norm": "group norms",
    "statistics": "layer norms or softmax",
    "product": "attention",
}
SPLIT_SILU = 2.5  # a sigmoid and a product read 3 maps and write 2; one pass reads 1 and writes 1

# What is fitted. Shares are of the data sheet's rates; a clock above the sheet's makes them exceed 1.
NUMBERS = {
    "dense": "share of peak arithmetic",
    "1x1": "share of peak arithmetic, linear layers too",
    "depthwise": "share of peak arithmetic",
    "group_channels": "channels of a group at which grouped convolutions reach half of the share of dense ones",
    "convolution": "share of bandwidth of convolutions and linear layers",
    "elementwise": "share of bandwidth",
    "norm": "share of bandwidth of batch norms",
    "statistics": "share of bandwidth of layer and group norms",
    "gather": "share of bandwidth of pooling, padding and joining",
    "launch_us": "device time of a launch",
    "host_us": "host time of a launch",
    "start_us": "time of a batch, whatever is in it",
    "image_us": "time of an image, whatever is done with it: its copy to the device",
}
SHARES = ("dense", "1x1", "depthwise", *MEMORY)  # of a rate
NEEDED = ("dense", "1x1", "depthwise", "group_channels", "convolution", "launch_us")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is known before anything is fitted: the data sheet, and what the engine does with operators."""

    engine: Engine
    peak_tflops: float  # dense, at the precision that is timed; 2 FLOPs are a multiply-add
    bandwidth_gb_s: float
    bytes_per_element: float = 2
    folded: bool = False  # batch norms behind convolutions are part of them
    silu_launches: int = 1  # 2: sigmoid and product are launched apart
    split_silu: bool = False  # and pass over the map apart


@dataclass(frozen=True)
class Work:
    """Many networks in the units of one machine: a row per operator, in order of the networks."""

    starts: np.ndarray  # the first row of each network
    batch: np.ndarray  # images at once, of each network
    arithmetic: np.ndarray  # into ARITHMETIC
    arithmetic_s: np.ndarray  # at the data sheet's peak
    group_channels: np.ndarray  # channels of a group of a grouped convolution
    memory: np.ndarray  # into MEMORY
    memory_s: np.ndarray  # at the data sheet's bandwidth; below 0: saves traffic of another row
    launches: np.ndarray
    count: np.ndarray  # how often it runs

    def __len__(self) -> int:
        return len(self.batch)

    def of(self, which: np.ndarray) -> "Work":
        """The networks where the mask `which` is true."""
        sizes = np.diff(np.append(self.starts, len(self.count)))
        rows = np.repeat(which, sizes)
        starts = first_rows(sizes[which])
        rest = {field.name: getattr(self, field.name)[rows] for field in fields(self)[2:]}
        return Work(starts=starts, batch=self.batch[which], **rest)


def first_rows(sizes: np.ndarray) -> np.ndarray:
    return (np.cumsum(sizes) - sizes).astype(np.int64)


def prepare(
    networks: Sequence[Operators],
    batches: Sequence[int],
    machine: Machine,
    *,
    training: bool = False,
) -> Work:
    """The work of each network at the batch size beside it."""
    sizes = np.array([len(net) for net in networks])
    return prepare_rows(joined(networks), sizes, np.array(batches), machine, training=training)


def prepare_rows(
    rows: Operators,
    sizes: np.ndarray,
    batches: np.ndarray,
    machine: Machine,
    *,
    training: bool = False,
) -> Work:
    """`rows`: of all networks, one after the other; `sizes`: rows of each; `batches`: images of each."""
    kind, chain = rows.kind, rows.chain
    images = np.repeat(np.asarray(batches, dtype=np.float64), sizes)
    read, written, weights = rows.read, rows.written, rows.weights
    launches = np.ones(len(kind))
    element = np.full(len(kind), float(machine.bytes_per_element))
    silu = kind == KIND["silu"]
    launches[silu] = machine.silu_launches
    if machine.split_silu:
        read, written = (
            np.where(silu, SPLIT_SILU * read, read),
            np.where(silu, SPLIT_SILU * written, written),
        )

    gone = np.zeros(
        len(kind), dtype=bool
    )  # part of the operator before it: only other operands are read
    if machine.engine == "compiled":  # one kernel a chain
        gone = chain >= IN_CHAIN
    elif machine.engine == "tensorrt":  # the last step of the convolution itself
        last = (kind == KIND["activation"]) | (kind == KIND["add"])
        gone = last & ((chain == AFTER_PRODUCT) | (chain == IN_CHAIN) | (chain == JOINING))
        alone = ~gone & (MEMORY_INDEX[kind] > 0)
        element[alone] = np.maximum(element[alone], 2)  # int8 is for convolutions
    read = np.where(gone, np.maximum(read - written, 0), read)
    if machine.engine == "compiled":  # the other chain need not write what is read at once
        read = np.where(chain == JOINING, -written, read)
        launches[chain == JOINING] = 0
    written = np.where(gone, 0, written)
    launches[gone] = 0
    kept = np.ones(len(kind))
    if machine.folded:
        kept[kind == KIND["batch_norm"]] = 0
    passes = (
        3.0 if training else 1.0
    )  # backward is two products for each one, and about twice the traffic
    moved = passes * (read + written) * images * element + weights * machine.bytes_per_element
    return Work(
        starts=first_rows(sizes),
        batch=np.asarray(batches, dtype=np.float64),
        arithmetic=ARITHMETIC_INDEX[kind],
        arithmetic_s=rows.macs * images * (passes * 2e-12 / machine.peak_tflops),
        group_channels=np.where(kind == KIND["grouped"], rows.c_in, 0.0),
        memory=MEMORY_INDEX[kind],
        memory_s=moved * (1e-9 / machine.bandwidth_gb_s),
        launches=launches * passes,
        count=rows.count * kept,
    )


ARITHMETIC_INDEX = np.array([ARITHMETIC_OF.get(kind, 0) for kind in KINDS])
MEMORY_INDEX = np.array([MEMORY_OF[kind] for kind in KINDS])


@dataclass(frozen=True)
class Times:
    """Of each network, in seconds for a batch."""

    total_s: np.ndarray
    device_s: np.ndarray
    host_s: np.ndarray
    launch_s: np.ndarray  # of `device_s`: launches and the start
    arithmetic_s: np.ndarray  # of all operators, were memory infinitely fast
    memory_s: np.ndarray  # and the other way round


def share(numbers: Mapping[str, float], name: str) -> float:
    """A profile without a number for a class of memory traffic takes that of a wider class."""
    while name not in numbers:
        name = WIDER[name]
    return numbers[name]


def unfitted(
    operators: Operators, numbers: Mapping[str, float], *, designed: bool = False
) -> list[str]:
    """What a network runs that none did whose times gave these numbers, in words; empty where all is known.

    Norms that were fitted have a number of their own. Tables of networks with layer norms have attention too, but
    `designed` networks have none.
    """
    known = {
        "norm": "norm" in numbers,
        **dict.fromkeys(("group_norm", "statistics"), "statistics" in numbers),
    }
    known["product"] = known["statistics"] and not designed
    return [
        UNUSUAL[kind]
        for kind in UNUSUAL
        if not known[kind] and (operators.kind == KIND[kind]).any()
    ]


def times(work: Work, numbers: Mapping[str, float]) -> Times:
    dense = numbers["dense"]
    rates = np.array([dense, numbers["1x1"], numbers["depthwise"], dense])
    arithmetic = work.arithmetic_s / rates[work.arithmetic]
    grouped = work.group_channels > 0
    arithmetic[grouped] *= 1 + numbers["group_channels"] / work.group_channels[grouped]
    memory = work.memory_s / np.array([share(numbers, name) for name in MEMORY])[work.memory]
    launches = np.add.reduceat(work.launches * work.count, work.starts)
    launch_s = 1e-6 * (launches * numbers["launch_us"] + numbers.get("start_us", 0.0))
    image_s = 1e-6 * work.batch * numbers.get("image_us", 0.0)
    slower = np.hypot(arithmetic, memory)
    slower[memory < 0] = memory[memory < 0]
    device_s = np.add.reduceat(slower * work.count, work.starts) + launch_s + image_s
    host_s = 1e-6 * launches * numbers.get("host_us", 0.0)
    return Times(
        total_s=np.sqrt(np.hypot(device_s**2, host_s**2)),
        device_s=device_s,
        host_s=host_s,
        launch_s=launch_s,
        arithmetic_s=np.add.reduceat(arithmetic * work.count, work.starts),
        memory_s=np.add.reduceat(memory * work.count, work.starts) + image_s,
    )
