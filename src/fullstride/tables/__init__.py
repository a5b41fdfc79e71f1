"""Published accuracies and speeds with their sources, and the names of all tables.

`networks.csv` is what `fullstride zoo` lists, by `benchmarks/write_networks.py`.
`pretrained.csv` has the ConvNets with weights on the Hugging Face hub, by timm's own measurements
and configurations (`benchmarks/pretrained_table.py`). `accuracy.csv` is top-1 on ImageNet-1k,
`accuracy_timm.csv` the top-1 of timm's networks as the three papers print it, `speed.csv` the
papers' speeds on a V100, `latency_*.csv` the times per image of 34 networks by batch size in
Tables 7 to 9 of GENet, arXiv:2006.14090.
"""

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Literal, NamedTuple, TypeVar

NETWORKS, PRETRAINED = "networks.csv", "pretrained.csv"
T = TypeVar("T")
PERMISSIVE = ("apache-2.0", "bsd-2-clause", "bsd-3-clause", "mit")

# Candidates for images smaller than the training resolution of the weights; at 96 pixels, a stride
# of 32 leaves a map of 3 x 3.
SMALL_RESOLUTIONS = (96, 128)


class ListedNetwork(NamedTuple):
    """A network of the zoo; its cost is for one image or clip at its own resolution."""

    name: str
    params: int
    macs: int  # multiply-adds
    frames: int  # of a clip; 0: the network takes images
    resolution: int  # pixels a side
    weights: str  # of released weights, the argument of `fullstride.zoo.load`; "" for none

    @property
    def size(self) -> str:
        """The input size: pixels a side, after the frames of a clip."""
        return f"{self.frames}x{self.resolution}" if self.frames else str(self.resolution)


def networks() -> list[ListedNetwork]:
    """The networks of the zoo, without building any."""
    return read_csv(NETWORKS, ListedNetwork)


class PretrainedNetwork(NamedTuple):
    """Released ImageNet-1k weights of a ConvNet, with timm's accuracy at one resolution."""

    name: str  # for `zoo.create`: a name of the zoo, or timm/NAME
    tag: str  # which weights
    family: str  # networks of one family have the same kind of blocks
    resolution: int  # pixels a side that top-1 was measured at
    trained_at: int  # pixels a side
    crop: float  # side of the center crop / shorter side of the image, for top-1
    top1: float  # per cent
    params: int  # with 1,000 classes
    licence: str  # of the weights, in the authors' words
    source: str  # of top-1

    @property
    def weights(self) -> str:
        """The argument of `zoo.load`."""
        return f"{self.name}.{self.tag}"

    @property
    def resolutions(self) -> tuple[int, ...]:
        return resolutions_around(self.trained_at)

    @property
    def is_permissive(self) -> bool:
        return self.licence in PERMISSIVE


def resolutions_around(side: int) -> tuple[int, ...]:
    """Three resolutions for weights trained at `side` pixels: 192, 224 and 288 for 224."""
    step = 32 if side >= 96 else 8
    others = {max(step, step * round(factor * side / step)) for factor in (0.8, 1.25)}
    return tuple(sorted({*others, side}))


def pretrained_networks() -> list[PretrainedNetwork]:
    """About 300 ConvNets with released weights, by family."""
    return read_csv(PRETRAINED, PretrainedNetwork)


@dataclass(frozen=True)
class Published:
    """One accuracy. A network may have several: by resolution and by training."""

    name: str  # as `fullstride zoo` lists it, or timm/NAME
    resolution: int  # pixels a side in evaluation
    top1: float  # per cent
    source: str
    note: str  # on training and evaluation, where they change the number


def published(of: Literal["zoo", "timm"] = "zoo") -> list[Published]:
    """Accuracies of the zoo's networks, or of the `timm/NAME` that the papers compare with them."""
    return read_csv({"zoo": "accuracy.csv", "timm": "accuracy_timm.csv"}[of], Published)


def read_rows(file: str) -> Iterator[dict[str, str]]:
    text = resources.files(__name__).joinpath(file).read_text()
    return csv.DictReader(text.splitlines())


def read_csv(file: str, kind: Callable[..., T]) -> list[T]:
    """The rows of a table of the package, whose columns are the fields of `kind`."""
    types = kind.__annotations__
    return [
        kind(**{name: types[name](text) for name, text in row.items()}) for row in read_rows(file)
    ]


@dataclass(frozen=True)
class Speed:
    """One number of a table of speeds."""

    table: str  # "TResNet 3"
    line: str  # as printed
    resolution: int  # pixels a side; the training resolution where the table has none
    quantity: str  # "training images/s"
    value: float
    source: str


def speeds() -> list[Speed]:
    return read_csv("speed.csv", Speed)


@dataclass(frozen=True)
class Latency:
    """One time of Tables 7 to 9 of GENet, arXiv:2006.14090, rounded to 0.01 ms."""

    name: str  # as printed
    top1: float  # per cent, as printed
    batch: int
    ms_per_image: float


def latencies(table: Literal["v100_fp16", "t4_fp16", "t4_int8"]) -> list[Latency]:
    """Times by GENet's authors of 2020: on a V100 with PyTorch, or on a T4 with TensorRT."""
    return [
        Latency(row["model"], float(row["top1"]), int(column.removeprefix("ms_b")), float(ms))
        for row in read_rows(f"latency_{table}.csv")
        for column, ms in row.items()
        if column.startswith("ms_b")
    ]


def genet_paper() -> list[Published]:
    """The 21 of 34 networks of GENet's Table 7 that can be built here, with its accuracies."""
    sides = {row.line: row.resolution for row in speeds() if row.table.startswith("GENet")}
    return [
        Published(PRINTED[row.name], sides[row.name], row.top1, "arXiv:2006.14090 Table 7", "")
        for row in latencies("v100_fp16")
        if row.batch == 1 and row.name in sides
    ]


def timm_published() -> list[Published]:
    """Accuracies of timm's networks: from the three papers and from `pretrained_networks`."""
    genet = (row for row in genet_paper() if row.name.startswith("timm/"))
    released = (
        Published(
            row.weights,
            row.resolution,
            row.top1,
            row.source,
            "" if row.is_permissive else f"licence of the weights: {row.licence}",
        )
        for row in pretrained_networks()
        if row.name.startswith("timm/")
    )
    return [*published("timm"), *genet, *released]


# ---- names

# Name in the papers -> name in the zoo, or timm/NAME.
PRINTED = {
    **{f"ResNet-{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    "ResNet-50-D": "resnet50d",
    "ResNeXt-50": "timm/resnext50_32x4d",
    "SE-ResNeXt-50": "timm/seresnext50_32x4d",
    "MixNet-L": "timm/mixnet_l",
    **{f"EfficientNet-B{size}": f"timm/efficientnet_b{size}" for size in range(8)},
    **{f"RegNetY-{size}00MF": f"timm/regnety_00{size}" for size in (2, 4, 6, 8)},
    **{
        f"MobileNetV2-{width:g}": f"timm/mobilenetv2_{width * 100:03.0f}"
        for width in (0.5, 0.75, 1.4)
    },
    "MobileNetV2-1.0": "timm/mobilenetv2_100",
    "MnasNet-1.0": "timm/mnasnet_100",
    **{f"TResNet-{size}": f"tresnet_{size.lower()}" for size in ("M", "L", "XL")},
    **{f"GENet-{size}": f"genet_{size}" for size in ("light", "normal", "large")},
    **{f"ResNet-RS-{depth}": f"resnet_rs_{depth}" for depth in (50, 101, 152, 200, 270, 350, 420)},
}

# Task -> its module and class in `fullstride.tasks`; here, because `--help` lists the names.
TASKS = {
    "classify": "classify:Classify",
    "detect": "detect.task:Detect",
    "multilabel": "multilabel:MultiLabel",
    "retrieval": "retrieval:Retrieval",
    "segment": "segment:Segment",
    "depth": "depth:Depth",
    "video": "video:Video",
}
# The formats of `fullstride.deploy.formats`.
FORMATS = ("onnx", "openvino", "aoti", "pt2", "tensorrt", "triton-server", "executorch", "ncnn")
FORMATS += ("litert", "coreml")

REPOSITORY = "hf:"  # before USER/NAME of a bundle on the Hugging Face hub


def is_repository(name: str) -> bool:
    """Whether a name means a bundle on the hub, not a network or a path."""
    return name.startswith(REPOSITORY)


def check_name(kind: str, name: str, names: Iterable[str]) -> None:
    """Raise ValueError, in one line, if `name`, a task, format or protocol, is not in `names`."""
    if name not in names:
        raise ValueError(f"no {kind} named {name!r}: choose from {', '.join(names)}")
