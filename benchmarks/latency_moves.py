"""How wrong are estimates for a GPU by its data sheet, moved from GPUs that were measured?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from latency_tables import RTX3090, RTX4090, TABLES, V100, Case, Table

from fullstride.latency.device_sheets import (
    BASES,
    DeviceSheet,
    MeasuredTime,
    corrected,
    profile_of,
)
from fullstride.latency.fitting import error
from fullstride.latency.network_times import Estimate, estimates
from fullstride.latency.profiles import Profile
from fullstride.latency.roofline import Machine

# Networks whose measured times correct the scale: dense, depthwise, and many small operators
THREE = ("resnet50", "efficientnet_b0", "densenet121")
OF_THE_PAPER = ("ResNet-50", "EfficientNet-B0", "MobileNetV2-1.0")
PIXELS = 224
FULL = 64  # images of a batch, from which those of GENet's V100 are full


@dataclass(frozen=True, kw_only=True)
class Move:
    """Profiles of one or two GPUs on another."""

    title: str
    networks: int
    error: float  # percent
    bias: float  # median of estimate / measured
    inside: float  # percent of times in their 90 % intervals
    corrected_error: float  # after three measured networks, which are not counted
    corrected_inside: float


def sheet_of(machine: Machine, device: str, layout: str) -> DeviceSheet:
    assert machine.vector_tflops
    assert layout in ("nchw", "nhwc")
    return DeviceSheet(
        device=device,
        tflops={"fp16": machine.peak_tflops},
        vector_tflops=machine.vector_tflops,
        bandwidth_gb_s=machine.bandwidth_gb_s,
        layout=layout,
    )


# Data sheets of devices that no number was fitted to, nor any constant chosen by: their tables were
# read after everything else was fixed. Max-Q: the watts that its clock would need are those of the
# workstation edition, 600 W at 2,617 MHz, by the cube of the clock, 2,288 MHz.
BLACKWELL = "NVIDIA RTX Blackwell architecture: dense fp16 with fp32 accumulation"
RTX5090 = dict(
    device="NVIDIA RTX 5090",
    tflops={"fp16": 209.5},
    vector_tflops=104.8,
    bandwidth_gb_s=1792,
    watts=575,
    layout="nchw",
    source=BLACKWELL,
)
PRO6000 = dict(
    device="NVIDIA RTX PRO 6000 Max-Q",
    tflops={"fp16": 438.9},
    vector_tflops=109.7,
    bandwidth_gb_s=1792,
    watts=300,
    needed_watts=600 * (2288 / 2617) ** 3,
    layout="nchw",
    source=BLACKWELL,
)


def of_blackwell(title: str, file: str, sheet: dict[str, Any]) -> Table:
    """`sheet` is for eager; a table of compiled networks says so in its title."""
    runtime = "compiled" if title.endswith("compiled") else "eager"
    return replace(
        next(table for table in TABLES if table.profile == "rtx4090-nchw"),
        title=title,
        file=file,
        unseen=DeviceSheet(**sheet, runtime=runtime),
    )


UNSEEN = (
    of_blackwell("RTX 5090", "infer-amp-nchw-pt291-cu130-5090.csv", RTX5090),
    of_blackwell("RTX 5090 compiled", "infer-amp-nchw-pt291-cu130-5090-dynamo.csv", RTX5090),
    of_blackwell("RTX PRO 6000 Max-Q", "infer-amp-nchw-pt291-cu130-pro6000maxq.csv", PRO6000),
    of_blackwell(
        "RTX PRO 6000 Max-Q compiled", "infer-amp-nchw-pt291-cu130-pro6000maxq-dynamo.csv", PRO6000
    ),
)


def evaluate_move(
    title: str,
    sheet: DeviceSheet,
    bases: Sequence[Profile],
    cases: Sequence[Case],
    machine: Machine | None = None,
) -> Move:
    """`machine`: where networks ran in another form there, such as with folded norms."""
    names = (*THREE, *OF_THE_PAPER)
    three = [case for case in cases if case.name in names and case.resolution == PIXELS]
    rest = [case for case in cases if case not in three]
    profile = profile_of(sheet, title, bases)
    profile = replace(profile, machine=machine or profile.machine)

    def estimated(profile: Profile, cases: Sequence[Case]) -> list[Estimate]:
        return estimates([c.operators for c in cases], profile, [c.batch for c in cases])

    measured = [
        MeasuredTime(network=c.name, resolution=PIXELS, batch=c.batch, ms_per_image=c.ms_per_image)
        for c in three
    ]
    better = corrected(profile, measured, estimated(profile, three))
    image = np.array([case.ms_per_image for case in rest])
    first, second = estimated(profile, rest), estimated(better, rest)

    def error_of(rows: Sequence[Estimate]) -> float:
        return error(np.array([row.ms_per_image for row in rows]), image)

    def inside(rows: Sequence[Estimate]) -> float:
        return 100 * float(
            np.mean([row.low <= ms <= row.high for row, ms in zip(rows, image, strict=True)])
        )

    return Move(
        title=title,
        networks=len(rest),
        error=error_of(first),
        bias=float(np.median([r.ms_per_image for r in first] / image)),
        inside=inside(first),
        corrected_error=error_of(second),
        corrected_inside=inside(second),
    )


def moves(
    profiles: Mapping[str, Profile],
    cases: Mapping[str, Sequence[Case]],
    unseen: Mapping[str, Sequence[Case]],
) -> list[Move]:
    """Between all pairs of measured GPUs, and to the `unseen` ones that are given."""
    one, other = (RTX3090, "NVIDIA RTX 3090"), (RTX4090, "NVIDIA RTX 4090")
    pairs = [
        ("RTX 3090 -> 4090, nhwc", other, "nhwc", ["rtx3090"], "RTX 4090 nhwc"),
        ("RTX 4090 -> 3090, nhwc", one, "nhwc", ["rtx4090"], "RTX 3090 nhwc"),
        ("RTX 3090 -> 4090, nchw", other, "nchw", ["rtx3090-nchw"], "RTX 4090 nchw, torch 2.4"),
        ("RTX 4090 -> 3090, nchw", one, "nchw", ["rtx4090-nchw"], "RTX 3090 nchw"),
    ]
    rows = [
        evaluate_move(
            title, sheet_of(*to, layout), [profiles[name] for name in bases], cases[target]
        )
        for title, to, layout, bases, target in pairs
    ]
    full = [case for case in cases["V100 fp16"] if case.batch >= FULL]
    nchw = [profiles[name] for name in BASES["eager", "nchw", "fp16"]]
    to_v100 = "RTX 3090 and 4090 -> V100 (PyTorch of 2020), nchw"
    rows.append(evaluate_move(to_v100, sheet_of(V100, "NVIDIA V100", "nchw"), nchw, full, V100))
    for table in UNSEEN:
        sheet = table.unseen
        if sheet and table.title in unseen:
            bases = [profiles[name] for name in BASES[sheet.runtime, sheet.layout, sheet.precision]]
            names = " and ".join(basis.device.removeprefix("NVIDIA RTX ") for basis in bases)
            title = f"RTX {names} -> {table.title}"
            rows.append(evaluate_move(title, sheet, bases, unseen[table.title]))
    return rows


def moves_section(rows: Sequence[Move]) -> list[str]:
    """Lines of the page."""
    lines = [
        "",
        "## Devices by their data sheets",
        "",
        "Profiles of measured GPUs, moved to another by its data sheet",
        "(`latency/device_sheets.py`), and after three measured networks corrected the scale:",
        f"{', '.join(THREE)} (on the V100 {', '.join(OF_THE_PAPER)}).",
        "",
        "| from and to | networks | error | estimate / measured | inside | error after three | "
        "inside |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.title} | {row.networks} | {row.error:.1f} | {row.bias:.2f} | {row.inside:.0f} % | "
        f"{row.corrected_error:.1f} | {row.corrected_inside:.0f} % |"
        for row in rows
    ]
    return lines
