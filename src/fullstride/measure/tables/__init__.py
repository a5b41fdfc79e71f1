"""How accurate are our networks, by their papers? Top-1 on ImageNet-1k, each number with its source."""

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
