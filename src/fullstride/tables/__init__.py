"""How accurate are our networks, and how fast were they, by their papers? Each number with its source.

`accuracy.csv` is top-1 on ImageNet-1k, `accuracy_timm.csv` that of timm's networks, as our papers print it, `speed.csv`
what the papers measured on a V100,
`latency_*.csv` the times per image of 34 networks by batch size in Tables 7 to 9 of GENet, arXiv:2006.14090.
"""

import csv
from dataclasses import dataclass
from importlib import resources
from typing import Literal


@dataclass(frozen=True)
class Published:
    """One printed number. The same network may have several: other resolutions, other training."""

    name: str  # as `fullstride zoo` lists it, or timm/NAME
    resolution: int  # pixels a side of the pictures it was evaluated on
    top1: float  # per cent
    source: str
    note: str  # how it was trained and evaluated, where that changes the number


def published(of: Literal["zoo", "timm"] = "zoo") -> list[Published]:
    """Of our networks, or of those of timm that our papers compare theirs with, by the name `timm/NAME`."""
    text = (
        resources.files(__name__)
        .joinpath({"zoo": "accuracy.csv", "timm": "accuracy_timm.csv"}[of])
        .read_text()
    )
    return [
        Published(
            row["name"], int(row["resolution"]), float(row["top1"]), row["source"], row["note"]
        )
        for row in csv.DictReader(text.splitlines())
    ]


@dataclass(frozen=True)
class Speed:
    """One printed number of a table that says how fast."""

    table: str  # "TResNet 3"
    line: str  # as printed
    resolution: int  # pixels a side; where a table does not say, what the network is trained at
    quantity: str  # "training images/s"
    value: float
    source: str


def speeds() -> list[Speed]:
    text = resources.files(__name__).joinpath("speed.csv").read_text()
    return [
        Speed(
            row["table"],
            row["line"],
            int(row["resolution"]),
            row["quantity"],
            float(row["value"]),
            row["source"],
        )
        for row in csv.DictReader(text.splitlines())
    ]


@dataclass(frozen=True)
class Latency:
    """One printed time of GENet's Tables 7 to 9, rounded to 0.01 ms."""

    name: str  # as printed
    top1: float  # per cent, as printed
    batch: int
    ms_per_image: float
    source: str


def latencies(table: Literal["v100_fp16", "t4_fp16", "t4_int8"]) -> list[Latency]:
    """What GENet's authors measured in 2020: on a V100 with PyTorch, or on a T4 with TensorRT."""
    text = resources.files(__name__).joinpath(f"latency_{table}.csv").read_text()
    source = "arXiv:2006.14090 Tables 7 to 9"
    return [
        Latency(
            row["model"],
            float(row["top1"]),
            int(column.removeprefix("ms_b")),
            float(row[column]),
            source,
        )
        for row in csv.DictReader(text.splitlines())
        for column in row
        if column.startswith("ms_b")
    ]
