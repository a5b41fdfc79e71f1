"""Finished trainings, from a scaling study, a CSV file or Table 7, and their points."""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, NamedTuple

from fullstride.io.records import Bounds, Positive, PositiveInt, check_bounds, read_rows
from fullstride.tables import PRINTED, published, speeds

MAX_BYTES = 10_000_000  # of a CSV file
COLUMNS = (
    "name", "width", "depth", "resolution", "epochs", "seed", "error", "ms", "images", "regime"
)  # fmt: skip
NUMBERS: dict[str, type] = {"resolution": int, "seed": int, "images": int} | dict.fromkeys(
    ("width", "depth", "epochs", "error", "ms"), float
)
TABLE_7 = "arXiv:2103.07579 Table 7, V100 in float32"
# Multipliers of width and depth of EfficientNet-B0 to B7, from arXiv:1905.11946's code.
EFFICIENTNET_SIZES = (
    (1.0, 1.0), (1.0, 1.1), (1.1, 1.2), (1.2, 1.4), (1.4, 1.8), (1.6, 2.2), (1.8, 2.6), (2.0, 3.1),
)  # fmt: skip
VALIDATION_IMAGES = 50_000  # of ImageNet
PAPER_EPOCHS = 350  # of both families in Table 7


class Size(NamedTuple):
    """Width, depth and resolution of a scaled network."""

    width: float  # multiplier
    depth: float  # multiplier, or layers
    resolution: int  # pixels a side

    def __str__(self) -> str:
        return f"width {self.width:g}, depth {self.depth:g}, {self.resolution} pixels"


@dataclass(frozen=True, kw_only=True)
class Training:
    name: str  # of the network with its resolution
    width: Positive
    depth: Positive
    resolution: PositiveInt
    epochs: Positive
    seed: int
    error: Annotated[float, Bounds(ge=0, le=100)]  # per cent
    ms: Positive  # per image
    images: PositiveInt  # on which the error was measured
    correct: str = ""  # 1 or 0 for each image
    regime: str = ""  # names the length and the recipe

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def size(self) -> Size:
        return Size(self.width, self.depth, self.resolution)


class Source(NamedTuple):
    """Finished trainings, and their origin."""

    name: str
    trainings: Sequence[Training]
    device: str  # the origin of the times
    by_time: bool = False  # whether there are several networks, not one network scaled
    failures: Mapping[str, str] = {}  # training -> why


@dataclass(frozen=True, kw_only=True)
class FinishedPoint:
    """All trainings of one network in one regime."""

    name: str
    size: Size
    epochs: float
    regime: str
    ms: float  # per image
    error: float  # per cent, mean of the seeds
    seeds: int
    images: int
    trainings: tuple[Training, ...]

    @property
    def key(self) -> tuple[str, Size]:
        """Names a point of a regime; in a CSV file several sizes may have one name."""
        return self.name, self.size

    def standard_error(self, seed_deviation: float | None) -> float | None:
        """The standard error of `error` over seeds; None without a repeated seed."""
        return None if seed_deviation is None else seed_deviation / math.sqrt(self.seeds)

    def bar(self, seed_deviation: float | None) -> float:
        """Half of the 95 % interval of the error, by the seeds and the number of images."""
        share = min(max(self.error / 100, 0.5 / self.images), 1 - 0.5 / self.images)
        images = 100 * math.sqrt(share * (1 - share) / self.images)
        return 1.96 * math.hypot(images, self.standard_error(seed_deviation) or 0.0)


def points_of(trainings: Iterable[Training]) -> list[FinishedPoint]:
    """Group the seeds of each network and regime, the fastest first."""
    groups: dict[tuple[str, float, str, Size], list[Training]] = defaultdict(list)
    for each in trainings:
        groups[each.name, each.epochs, each.regime, each.size].append(each)
    points = [
        FinishedPoint(
            name=name,
            size=size,
            epochs=epochs,
            regime=regime,
            ms=fmean(each.ms for each in group),
            error=fmean(each.error for each in group),
            seeds=len(group),
            images=min(each.images for each in group),
            trainings=tuple(sorted(group, key=lambda each: each.seed)),
        )
        for (name, epochs, regime, size), group in groups.items()
    ]
    return sorted(points, key=lambda point: (point.epochs, point.regime, point.ms))


def seed_deviation(points: Sequence[FinishedPoint]) -> float | None:
    """Standard deviation over seeds in points of error, pooled; None without a repeated seed."""
    repeated = [point for point in points if point.seeds > 1]
    if not repeated:
        return None
    squares = sum((each.error - point.error) ** 2 for point in repeated for each in point.trainings)
    return math.sqrt(squares / sum(point.seeds - 1 for point in repeated))


def table_7(family: str) -> list[Training]:
    """ResNet-RS's Table 7: `resnet_rs` or `efficientnet`, with ms of training per image on a V100.

    Depths are layers for ResNet-RS, and multipliers for EfficientNet. The seeds are unknown.
    """
    scores = {
        (row.name, row.resolution): row.top1
        for row in (*published(), *published("timm"))
        if row.source == "arXiv:2103.07579 Table 7"
    }
    trainings = []
    for row in speeds():
        zoo, is_time = PRINTED.get(row.line, ""), row.quantity == "seconds per 128 images"
        is_own = zoo.removeprefix("timm/").startswith(family)
        if not (row.table == "ResNet-RS 7" and is_time and is_own):
            continue
        number = int(zoo.rpartition("_")[2].removeprefix("b"))
        is_rs = family == "resnet_rs"
        width, depth = (1.0, float(number)) if is_rs else EFFICIENTNET_SIZES[number]
        trainings.append(
            Training(
                name=f"{row.line} at {row.resolution}",
                width=width,
                depth=depth,
                resolution=row.resolution,
                epochs=PAPER_EPOCHS,
                seed=0,
                error=round(100 - scores[zoo, row.resolution], 1),
                ms=1e3 * row.value / 128,
                images=VALIDATION_IMAGES,
            )
        )
    return trainings


def read_trainings(path: Path) -> list[Training]:
    """Trainings from a CSV file with the columns `COLUMNS`; `error` in per cent.

    Missing columns seed, images and regime are 0, ImageNet's 50,000, and "". Raises ValueError
    with the line that does not fit.
    """
    return read_rows(path, training_of, ", ".join(COLUMNS), MAX_BYTES)


def training_of(row: Mapping[str, str]) -> Training:
    values = {"seed": "0", "images": str(VALIDATION_IMAGES), **row}
    numbers = {name: kind(values[name]) for name, kind in NUMBERS.items()}
    return Training(name=values["name"], regime=values.get("regime", ""), **numbers)


def write_trainings(trainings: Iterable[Training]) -> str:
    """The CSV text that `read_trainings` reads."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([getattr(each, name) for name in COLUMNS] for each in trainings)
    return text.getvalue()
