"""Which measurements of the papers' networks do files of `bench` and `bench-blocks` contain?"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from fullstride.measure.environment import Environment
from fullstride.measure.protocols import Measurement, Protocol
from fullstride.nets.precision import short_precision
from fullstride.papers.block_study import BlockTime
from fullstride.papers.lines import TIMM
from fullstride.papers.suite_page import SuiteFile
from fullstride.strict_json import from_json, read_json
from fullstride.tables.names import PRINTED

LARGEST_BATCH = 64  # of measurements by the protocol genet: the batch of GENet's figures
# Quantities by their names in speed.csv, as functions of ms per image.
QUANTITIES: dict[str, Callable[[float], float]] = {
    "training images/s": lambda ms: 1e3 / ms,
    "inference images/s": lambda ms: 1e3 / ms,
    "seconds per 128 images": lambda ms: 0.128 * ms,
    "ms per image": lambda ms: ms,
}
TRAINING = ("training images/s", "seconds per 128 images")
# The quantities that a protocol measures, by its name and work.
MEASURES = {
    ("tresnet", "training"): ("training images/s",),
    ("tresnet", "inference"): ("inference images/s",),
    ("throughput", "inference"): ("inference images/s", "ms per image"),
    ("genet", "inference"): ("ms per image",),
    ("resnet_rs", "training"): ("seconds per 128 images",),
}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One measured quantity of a network."""

    zoo: str
    resolution: int
    quantity: str
    value: float
    place: str  # device and batch
    way: str  # a description of the whole measurement

    def __post_init__(self) -> None:
        if not 0 < self.value < inf:
            raise ValueError(f"{self.value!r} {self.quantity}: expected a number above 0")


@dataclass(frozen=True, kw_only=True)
class BlocksFile:
    """A file of `bench-blocks --out` with measured times."""

    how: Literal["measured"]
    protocol: Protocol
    precision: str
    layout: str
    environment: Environment
    rows: tuple[BlockTime, ...]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The contents of files of measurements."""

    times: tuple[Timed, ...] = ()
    blocks: tuple[BlockTime, ...] = ()
    blocks_place: str = ""


def read_bench(paths: Sequence[Path], networks: Container[tuple[str, int]]) -> Bench:
    """Read files of `fullstride bench --out`, `bench --suite papers` and `bench-blocks --out`.

    `networks`: (name in the zoo, pixels a side); measurements of other networks are left out.
    Raises ValueError for other files, and for a file without any measurement of `networks`.
    """
    times: list[Timed] = []
    bench = Bench()
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"no file {path}: give one of `fullstride bench --out` or `bench --suite papers`"
            )
        data = read_json(path)
        try:
            if isinstance(data, dict) and "numbers" in data:
                rows = [*of_suite(from_json(SuiteFile, data, "suite"))]
            elif isinstance(data, dict) and "how" in data:
                if bench.blocks:
                    raise ValueError(
                        "an earlier file has measurements of blocks: give one of the two"
                    )
                bench = of_blocks(data)
                continue
            else:
                rows = [
                    timed
                    for row in (data if isinstance(data, list) else [data])
                    for timed in of_measurement(Measurement.from_json(row, "measurement"))
                ]
        except (ValueError, ZeroDivisionError) as error:
            what = "is not what `fullstride bench`, its suite, or `bench-blocks` wrote"
            raise ValueError(f"{path} {what}: {error}") from None
        selected = [row for row in rows if (row.zoo, row.resolution) in networks]
        if not selected:
            raise ValueError(
                f"{path} has no measurement of a figure's network at its resolution by the "
                "protocol throughput, tresnet, resnet_rs or genet"
            )
        times += selected
    return Bench(times=tuple(times), blocks=bench.blocks, blocks_place=bench.blocks_place)


def of_blocks(data: Mapping[str, Any]) -> Bench:
    if data["how"] != "measured":
        raise ValueError("its times are estimated: name the profile instead")
    if not data.get("rows"):
        raise ValueError("it has no rows: the run that wrote it stopped before the first")
    file = from_json(BlocksFile, data, "blocks")
    for row in file.rows:
        row.stage()  # raises for an invalid block
    precision = short_precision(file.precision)
    place = f"{file.environment.device}, {precision}, batch {file.protocol.batch}"
    return Bench(blocks=file.rows, blocks_place=place)


def own_name(name: str) -> str:
    """Our name of a network that was measured as timm's, fused or compiled."""
    ours = {f"timm/{theirs}": name for name, theirs in TIMM.items()}
    plain = name.removesuffix(" compiled").removesuffix(" fused")
    return ours.get(plain, plain)


def of_suite(file: SuiteFile) -> Iterator[Timed]:
    device = file.environment.device
    for row in file.numbers:
        if row.quantity in QUANTITIES and row.line in PRINTED:
            way = f"{row.network} on {device}, {short_precision(row.precision)}, {row.layout}, "
            way += row.made
            yield Timed(
                zoo=PRINTED[row.line],
                resolution=row.resolution,
                quantity=row.quantity,
                value=row.measured,
                place=f"{device}, batch {row.batch}",
                way=f"{way}, batch {row.batch}, by the suite of the papers",
            )


def of_measurement(one: Measurement) -> Iterator[Timed]:
    """One row for each quantity that the protocol measures, at batches up to `LARGEST_BATCH`."""
    protocol = one.protocol
    if protocol.name == "genet" and protocol.batch > LARGEST_BATCH:
        return
    mode = "compiled" if one.compiled else "eager"
    device = one.environment.device
    way = f"{one.name} on {device}, {short_precision(one.precision)}, {one.layout}, "
    way += one.runtime or mode
    way += f", batch {protocol.batch}, protocol {protocol.name}"
    for quantity in MEASURES.get((protocol.name, protocol.work), ()):
        yield Timed(
            zoo=own_name(one.name),
            resolution=protocol.resolution,
            quantity=quantity,
            value=QUANTITIES[quantity](one.ms_per_image or 1e3 / one.images_per_s),
            place=f"{device}, batch {protocol.batch}",
            way=way,
        )
