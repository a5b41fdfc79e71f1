"""What did files of measurements find of the papers' networks? Those of `bench`, of its suite and of `bench-blocks`."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

from fullstride.latency.profiles import positive
from fullstride.measure.protocols import Measurement
from fullstride.papers.block_study import BlockTime
from fullstride.papers.lines import TIMM
from fullstride.storage import read_json
from fullstride.tables.names import PRINTED

LARGEST_BATCH = 64  # of the protocol genet that counts: GENet's figures are of this batch
# Quantities by their names in speed.csv, each of ms per image.
QUANTITIES: dict[str, Callable[[float], float]] = {
    "training images/s": lambda ms: 1e3 / ms,
    "inference images/s": lambda ms: 1e3 / ms,
    "seconds per 128 images": lambda ms: 0.128 * ms,
    "ms per image": lambda ms: ms,
}
TRAINING = ("training images/s", "seconds per 128 images")
# Which of them a protocol measures, by its name and work.
MEASURES = {
    ("tresnet", "training"): ("training images/s",),
    ("tresnet", "inference"): ("inference images/s",),
    ("throughput", "inference"): ("inference images/s", "ms per image"),
    ("genet", "inference"): ("ms per image",),
    ("resnet_rs", "training"): ("seconds per 128 images",),
}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a file says was measured of a network."""

    zoo: str
    resolution: int
    quantity: str
    value: float
    place: str  # device and batch
    way: str  # in words, all of it

    def __post_init__(self) -> None:
        if not positive(self.value):
            raise ValueError(f"{self.value!r} {self.quantity}: a number above 0 was to stand there")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What files of measurements hold."""

    times: tuple[Timed, ...] = ()
    blocks: tuple[BlockTime, ...] = ()
    blocks_place: str = ""


def read_bench(paths: Sequence[Path], networks: Container[tuple[str, int]]) -> Bench:
    """Files that `fullstride bench --out`, `bench --suite papers` and `bench-blocks --out` write.

    `networks` are names, as the zoo lists them, at pixels a side: what is measured of others is left out.
    Raises ValueError in one line for other files, and for one of which nothing is left.
    """
    times: list[Timed] = []
    found = Bench()
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"no file {path}: give what `fullstride bench --out` or `bench --suite papers` wrote"
            )
        told = read_json(path)
        try:
            if isinstance(told, dict) and "numbers" in told:
                rows = [*of_suite(told)]
            elif isinstance(told, dict) and "how" in told:
                if found.blocks:
                    raise ValueError(
                        "blocks were measured in a file before it: give one of the two"
                    )
                found = Bench(blocks=tuple(of_blocks(told)), blocks_place=blocks_place(told))
                continue
            else:
                several = told if isinstance(told, list) else [told]
                rows = [
                    timed
                    for one in several
                    for timed in of_measurement(Measurement.from_json(dumps(one)))
                ]
        except (TypeError, KeyError, ValueError, AttributeError, ZeroDivisionError) as error:
            what = "is not what `fullstride bench`, its suite, or `bench-blocks` wrote"
            raise ValueError(f"{path} {what}: {type(error).__name__} {error}") from None
        mine = [row for row in rows if (row.zoo, row.resolution) in networks]
        if not mine:
            raise ValueError(
                f"{path}: none of its measurements is of a figure's network at its resolution, by the protocol "
                "throughput, tresnet, resnet_rs or genet"
            )
        times += mine
    return Bench(times=tuple(times), blocks=found.blocks, blocks_place=found.blocks_place)


def of_blocks(told: Mapping[str, Any]) -> Iterator[BlockTime]:
    if told["how"] != "measured":
        raise ValueError("its times are estimated: name the profile instead")
    if not told["rows"]:
        raise ValueError("it has no rows: the run that wrote it did not get that far")
    for row in told["rows"]:
        if not all(positive(value) for name, value in row.items() if name != "kind"):
            raise ValueError(f"not all numbers of {row} are above 0")
        time = BlockTime(**row)
        time.stage()  # refuses what is no block
        yield time


def blocks_place(told: Mapping[str, Any]) -> str:
    return (
        f"{told['environment']['device']}, {told['precision']}, batch {told['protocol']['batch']}"
    )


def own_name(name: str) -> str:
    """That of ours where it is timm's of one of ours, or a lean one."""
    ours = {f"timm/{theirs}": name for name, theirs in TIMM.items()}
    plain = name.removesuffix(" compiled").removesuffix(" lean")
    return ours.get(plain, plain)


def of_suite(told: Mapping[str, Any]) -> Iterator[Timed]:
    device = told["environment"]["device"]
    for row in told["numbers"]:
        if row["quantity"] in QUANTITIES and row["line"] in PRINTED:
            how = (
                f"{row['network']} on {device}, {row['precision']}, {row['layout']}, {row['made']}"
            )
            yield Timed(
                zoo=PRINTED[row["line"]],
                resolution=int(row["resolution"]),
                quantity=row["quantity"],
                value=float(row["measured"]),
                place=f"{device}, batch {row['batch']}",
                way=f"{how}, batch {row['batch']}, by the suite of the papers",
            )


def of_measurement(one: Measurement) -> Iterator[Timed]:
    """In every quantity of a figure that its protocol measures; GENet's figures are of batches up to 64."""
    protocol = one.protocol
    if protocol.name == "genet" and protocol.batch > LARGEST_BATCH:
        return
    made = "compiled" if one.compiled else "eager"
    device = one.environment.device
    way = f"{one.name} on {device}, {one.precision}, {one.layout}, {one.runtime or made}, batch {protocol.batch}"
    for quantity in MEASURES.get((protocol.name, protocol.work), ()):
        yield Timed(
            zoo=own_name(one.name),
            resolution=protocol.resolution,
            quantity=quantity,
            value=QUANTITIES[quantity](one.ms_per_image or 1e3 / one.images_per_s),
            place=f"{device}, batch {protocol.batch}",
            way=f"{way}, protocol {protocol.name}",
        )
