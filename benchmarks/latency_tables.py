"""Which measured times test the estimates, with which data sheets and fitted numbers?"""

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import timm
from latency_spreads import ASSUMED, ASSUMED_COMPILED, FULL_BATCH
from timm.models.efficientnet import _gen_mobilenet_v2
from torch import nn

from fullstride.io.writing import Output, atomic_write, begins_with
from fullstride.latency.device_sheets import DeviceSheet
from fullstride.latency.devices import find_operators
from fullstride.latency.fitting import PRIORS, Parameters
from fullstride.latency.roofline import Machine
from fullstride.measure.operators import KIND, Operators
from fullstride.measure.tracer import traced
from fullstride.nets.blocks import merge_branches
from fullstride.tables import latencies

CACHE = Output("a cache of operators", "", begins_with(b"PK", b"keys.npy"))
# GENet's networks that timm has: family, timm's name (or MobileNetV2's width), pixels a side.
PAPER: dict[str, tuple[str, str | float, int]] = {
    "RegNetY-200MF": ("RegNetY", "regnety_002", 224),
    "RegNetY-400MF": ("RegNetY", "regnety_004", 224),
    "RegNetY-600MF": ("RegNetY", "regnety_006", 224),
    "RegNetY-800MF": ("RegNetY", "regnety_008", 224),
    "ResNet-18": ("ResNet", "resnet18", 224),
    "ResNet-34": ("ResNet", "resnet34", 224),
    "ResNet-50": ("ResNet", "resnet50", 224),
    "ResNet-101": ("ResNet", "resnet101", 224),
    "ResNet-152": ("ResNet", "resnet152", 224),
    "EfficientNet-B0": ("EfficientNet", "efficientnet_b0", 224),
    "EfficientNet-B1": ("EfficientNet", "efficientnet_b1", 240),
    "EfficientNet-B2": ("EfficientNet", "efficientnet_b2", 260),
    "EfficientNet-B3": ("EfficientNet", "efficientnet_b3", 300),
    "MobileNetV2-0.25": ("MobileNet and MNAS", 0.25, 224),
    "MobileNetV2-0.5": ("MobileNet and MNAS", 0.5, 224),
    "MobileNetV2-0.75": ("MobileNet and MNAS", 0.75, 224),
    "MobileNetV2-1.0": ("MobileNet and MNAS", 1.0, 224),
    "MobileNetV2-1.4": ("MobileNet and MNAS", 1.4, 224),
    "MnasNet-1.0": ("MobileNet and MNAS", "mnasnet_100", 224),
    "GENet-light": ("GENet", "gernet_s", 192),
    "GENet-normal": ("GENet", "gernet_m", 192),
    "GENet-large": ("GENet", "gernet_l", 256),
}
# timm's modules of convolutional networks; of these, networks with at most 1 % of MACs in attention
MODULES = (
    "byobnet", "convmixer", "convnext", "cspnet", "densenet", "dla", "dpn",
    "efficientnet", "fasternet", "ghostnet", "hardcorenas", "hgnet", "hrnet", "inception_next",
    "inception_resnet_v2", "inception_v3", "inception_v4", "mambaout", "metaformer",
    "mobilenetv3", "nasnet", "nfnet", "pnasnet", "rdnet", "regnet", "repghost", "repvit", "res2net",
    "resnest", "resnet", "resnetv2", "rexnet", "selecsls", "senet", "sknet",
    "starnet", "tresnet", "vgg", "vovnet", "xception", "xception_aligned",
)  # fmt: skip

# Peaks of fp32 beside the tensor cores are those of the same sheets.
VOLTA = "NVIDIA V100 data sheet: PCIe, 112 TFLOPS of tensor cores, 900 GB/s"
TURING = "NVIDIA T4 data sheet: 65 TFLOPS fp16, 130 TOPS int8, 320 GB/s"
AMPERE = "NVIDIA GA102 white paper: RTX 3090, 71 TFLOPS fp16 with fp32 accumulate, dense; 936 GB/s"
ADA = "NVIDIA Ada white paper: RTX 4090, 165.2 TFLOPS fp16 with fp32 accumulate, dense; 1008 GB/s"
V100 = Machine(
    runtime="eager",
    peak_tflops=112,
    bandwidth_gb_s=900,
    vector_tflops=14,
    folded=True,
    split_silu=True,
    silu_launches=2,  # PyTorch before 1.7 had no SiLU
)
T4 = Machine(runtime="tensorrt", peak_tflops=65, bandwidth_gb_s=320, folded=True, split_silu=True)
T4_INT8 = replace(T4, peak_tflops=130, bytes_per_element=1)
RTX3090 = Machine(runtime="eager", peak_tflops=71, bandwidth_gb_s=936, vector_tflops=35.6)
RTX4090 = Machine(runtime="eager", peak_tflops=165.2, bandwidth_gb_s=1008, vector_tflops=82.6)
EAGER = (
    "dense",
    "1x1",
    "depthwise",
    "group_channels",
    "convolution",
    "elementwise",
    "launch_us",
    "host_us",
)
TENSORRT = (
    "dense",
    "1x1",
    "depthwise",
    "group_channels",
    "convolution",
    "launch_us",
    "start_us",
    "image_us",
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Measured times, and the numbers of the model that are fitted to them."""

    profile: str
    title: str
    device: str
    machine: Machine
    sheet: str
    parameters: Parameters
    layout: Literal["nchw", "nhwc", ""]
    precision: str
    software: str
    goal: float  # percent
    rank: float = 0.0  # goal of the rank correlation
    file: str = ""  # of timm; "" for a paper's table
    paper: Literal["v100_fp16", "t4_fp16", "t4_int8", ""] = ""
    training: bool = False
    reparameterized: bool = False  # timm merged branches into one convolution before timing
    note: str = ""
    unseen: DeviceSheet | None = None  # of a device that nothing is fitted to


EXTRAPOLATED = "only full batches were timed: the times of a launch are assumed"
OLD = "2020, its authors' script; batch norms taken as folded, SiLU as two kernels"
TORCH_2_4 = "torch 2.4.0, CUDA 12.4, timm's benchmark"
TORCH_2_9 = "torch 2.9.1, CUDA 12.8, timm's benchmark"
TORCH_1_12 = "torch 1.12, CUDA 11.3, timm's benchmark"
ON_3090 = dict(device="NVIDIA RTX 3090", machine=RTX3090, sheet=AMPERE)
ON_4090 = dict(device="NVIDIA RTX 4090", machine=RTX4090, sheet=ADA)
ON_T4 = dict(
    device="NVIDIA T4",
    sheet=TURING,
    parameters=Parameters(TENSORRT, {**PRIORS, "launch_us": (8, 0.5)}, max_share=1.0),
    layout="",
)


LARGE_BATCHES = Parameters(FULL_BATCH, assumed=ASSUMED, max_share=1.0)


def of_timm(profile: str, title: str, layout: str, file: str, **fields: Any) -> Table:
    """A table of timm's benchmark with automatic mixed precision, by default of inference."""
    options = dict(parameters=LARGE_BATCHES, goal=11, rank=0.985, note=EXTRAPOLATED)
    options |= dict(software=TORCH_2_4, precision="fp16 (autocast)")
    return Table(profile=profile, title=title, layout=layout, file=file, **options | fields)


TRAINING = dict(
    goal=12,
    rank=0.0,
    training=True,
    note="training steps were timed in nchw; these numbers are 25 % off for channels-last ones, "
    "where grouped convolutions and TResNet take several times as long",
)
COMPILED = dict(
    **{**ON_4090, "machine": replace(RTX4090, runtime="compiled")},
    parameters=replace(LARGE_BATCHES, assumed=ASSUMED_COMPILED),
    software=f"{TORCH_2_9} with torch.compile",
    goal=14,
    rank=0.0,
    reparameterized=True,
)
TABLES = (
    Table(
        profile="v100-fp16",
        title="V100 fp16",
        device="NVIDIA V100",
        machine=V100,
        sheet=VOLTA,
        parameters=Parameters(EAGER, {**PRIORS, "host_us": (55, 0.5)}, max_share=1.0),
        layout="nchw",
        precision="fp16",
        software=f"PyTorch of {OLD}",
        goal=13,
        rank=0.90,
        paper="v100_fp16",
    ),
    Table(
        profile="t4-int8",
        title="T4 TensorRT int8",
        **ON_T4,
        machine=T4_INT8,
        precision="int8",
        software=f"TensorRT of {OLD}",
        goal=15,
        paper="t4_int8",
    ),
    Table(
        profile="t4-fp16",
        title="T4 TensorRT fp16",
        **ON_T4,
        machine=T4,
        precision="fp16",
        software=f"TensorRT of {OLD}",
        goal=19,
        paper="t4_fp16",
    ),
    of_timm(
        "rtx3090", "RTX 3090 nhwc", "nhwc", "infer-amp-nhwc-pt240-cu124-rtx3090.csv", **ON_3090
    ),
    of_timm(
        "rtx3090-nchw", "RTX 3090 nchw", "nchw", "infer-amp-nchw-pt240-cu124-rtx3090.csv", **ON_3090
    ),
    of_timm(
        "rtx4090", "RTX 4090 nhwc", "nhwc", "infer-amp-nhwc-pt240-cu124-rtx4090.csv", **ON_4090
    ),
    of_timm(
        "",
        "RTX 4090 nchw, torch 2.4",
        "nchw",
        "infer-amp-nchw-pt240-cu124-rtx4090.csv",
        **ON_4090,
    ),
    of_timm(
        "rtx4090-nchw",
        "RTX 4090 nchw, torch 2.9",
        "nchw",
        "infer-amp-nchw-pt291-cu128-4090.csv",
        **ON_4090,
        software=TORCH_2_9,
        reparameterized=True,
    ),
    of_timm(
        "rtx4090-compiled",
        "RTX 4090 compiled",
        "nchw",
        "infer-amp-nchw-pt291-cu128-4090-dynamo.csv",
        **COMPILED,
    ),
    of_timm(
        "rtx3090",
        "RTX 3090 training, nchw",
        "nchw",
        "train-amp-nchw-pt112-cu113-rtx3090.csv",
        **ON_3090,
        **TRAINING,
        software=f"{TORCH_1_12}, nchw",
    ),
    of_timm(
        "",
        "RTX 3090 training, nhwc",
        "nhwc",
        "train-amp-nhwc-pt112-cu113-rtx3090.csv",
        **ON_3090,
        **TRAINING,
        software=f"{TORCH_1_12}, nhwc",
    ),
)


@dataclass(frozen=True)
class Case:
    """One measured time."""

    name: str
    family: str
    resolution: int
    operators: Operators
    batch: int
    seconds: float  # of the batch

    @property
    def ms_per_image(self) -> float:
        return 1e3 * self.seconds / self.batch


class Tracer:
    """Operators of timm's networks: those of the package's table, others traced.

    Traced ones are cached in a file, because tracing all takes minutes.
    """

    def __init__(self, path: Path | None):
        self.path, self.cache, self.changed = path, {}, False
        if path and path.is_file():
            with np.load(path) as file:
                ends = np.cumsum(file["sizes"])
                tables = np.split(file["rows"], ends[:-1])
                for key, rows in zip(file["keys"], tables, strict=True):
                    self.cache[str(key)] = Operators.of_columns(rows.T.copy())

    def __call__(
        self, name: str, resolution: int, build: Callable[[], nn.Module], merge: bool = False
    ) -> Operators:
        key = f"{name} {resolution} {int(merge)}"
        if key not in self.cache:
            known = find_operators(f"timm/{name}", resolution, training=not merge)
            if known is None:
                net = (lambda: merge_branches(build())) if merge else build
                known = traced(net, resolution).merged()
                self.changed = True
            self.cache[key] = known
        return self.cache[key]

    def save(self) -> None:
        if self.path and self.changed:
            rows = [net.table().T for net in self.cache.values()]
            sizes = [len(table) for table in rows]
            with atomic_write(self.path, CACHE) as temporary, temporary.open("wb") as file:
                np.savez(file, keys=list(self.cache), sizes=sizes, rows=np.concatenate(rows))


def paper_cases(table: Table, tracer: Tracer) -> list[Case]:
    def network(printed: str) -> Operators:
        _, name, resolution = PAPER[printed]
        if isinstance(name, str):
            return tracer(name, resolution, lambda: timm.create_model(name))
        return tracer(
            f"mobilenetv2-{name}", resolution, lambda: _gen_mobilenet_v2("mobilenetv2_100", name)
        )

    assert table.paper
    return [
        Case(
            row.name,
            PAPER[row.name][0],
            PAPER[row.name][2],
            network(row.name),
            row.batch,
            row.ms_per_image * row.batch / 1e3,
        )
        for row in latencies(table.paper)
        if row.name in PAPER
    ]


def timm_file(folder: Path, table: Table) -> Path:
    """A table in a folder of timm's `results/`, or in one where names lack `benchmark-`.

    Raises ValueError, in one line, if it is in neither.
    """
    paths = [folder / f"benchmark-{table.file}", folder / table.file]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise ValueError(f"{folder} has no {paths[0].name}: give the folder results/ of timm")
    return found


def timm_cases(table: Table, folder: Path, tracer: Tracer, *, others: bool = False) -> list[Case]:
    """Each network once at each resolution, since the time does not depend on the weights.

    `others`: those that are not convolutional networks, which are never fitted.
    """
    kind = "train" if table.training else "infer"
    cases: dict[tuple[str, int], Case] = {}
    with timm_file(folder, table).open() as file:
        for row in csv.DictReader(file):
            name, resolution = row["model"].split(".")[0], int(row[f"{kind}_img_size"])
            if not timm.is_model(name) or (name, resolution) in cases:
                continue
            family = timm.models.model_entrypoint(name).__module__.rpartition(".")[2]
            if family not in MODULES and not others:
                continue
            build = partial(timm.create_model, name)
            net = tracer(name, resolution, build, table.reparameterized)
            spatial = np.isin(net.kind, [KIND[k] for k in ("dense", "depthwise", "grouped")])
            attention = (net.macs * net.count)[net.kind == KIND["product"]].sum()
            fits = net.count[spatial].sum() >= 4 and attention <= 0.01 * net.total_macs
            if (family in MODULES and fits) == others:
                continue
            batch = int(row[f"{kind}_batch_size"])
            seconds = batch / float(row[f"{kind}_samples_per_sec"])
            cases[name, resolution] = Case(name, family, resolution, net, batch, seconds)
    return list(cases.values())
