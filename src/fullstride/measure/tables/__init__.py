"""How accurate are our networks, and how fast were they, by their papers? Each number with its source.

`accuracy.csv` is top-1 on ImageNet-1k, `speed.csv` what the papers measured on a V100.
"""

import csv
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Published:
    """One printed number. The same network may have several: other resolutions, other training."""

    name: str  # as `fullstride zoo` lists it
    resolution: int  # pixels a side of the pictures it was evaluated on
    top1: float  # per cent
    source: str
    note: str  # how it was trained and evaluated, where that changes the number


def published() -> list[Published]:
    text = resources.files(__name__).joinpath("accuracy.csv").read_text()
    return [
        Published(row["name"], int(row["resolution"]), float(row["top1"]), row["source"], row["note"])
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
        Speed(row["table"], row["line"], int(row["resolution"]), row["quantity"], float(row["value"]), row["source"])
        for row in csv.DictReader(text.splitlines())
    ]
