"""Measures the networks of the papers' tables here, every line beside timm's, on one page.

A line is measured in contests: timm's network and ours alternate in every round, in one memory
layout, eager or compiled. Each finished contest is a file, which is not measured again in the same
environment.
"""

import gc
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch

from fullstride.io.records import from_json, read_json, write_json
from fullstride.io.writing import Output, atomic_write, begins_with, check_output, json_output
from fullstride.measure.bench import BenchOptions, bench, find_batches
from fullstride.measure.environment import Environment, find_device
from fullstride.measure.protocols import Measurement, Protocol
from fullstride.measure.workload import Precision
from fullstride.nets.efficiency import short_precision
from fullstride.papers import lines
from fullstride.papers.block_study import BlockTime
from fullstride.papers.lines import QUANTITIES, TIMM, TITLE, Contest, Kind, Row, RowFile, SuiteFile

PAGE, DATA, ROWS = "results.md", "results.json", "rows"  # in the folder of a suite
OUTPUTS = {
    PAGE: Output("a page of a suite", ".md", begins_with(f"# {TITLE}".encode())),
    DATA: json_output("the results of a suite", "environment", "numbers", "not_measured"),
}
# The settings are in the file's name, so that only a suite has it; half a file is measured again.
ROW = Output("a row of a suite", ".json", lambda path: True)
QUICK_MINUTES = 6.5  # the last contest to start may take more than a minute
MAX_REASON = 240  # characters


def measure(contest: Contest, device: torch.device) -> Row:
    """Measure the networks together, or one at a time if that fails."""
    options = BenchOptions(
        precision=contest.precision,
        layout=contest.layout,
        compiled=contest.compiled,
        memory_gib=contest.memory_gib,
    )
    kinds: dict[str, Kind] = {entry.name: entry.kind for entry in contest.entries}
    nets, batches, failed = dict[str, Any](), dict[str, int](), dict[str, str]()
    for entry in contest.entries:
        net = attempt(entry.build, failed, f"{entry.name}, building")
        if net is not None:
            nets[entry.name] = net
    first = contest.parts[0]
    if first.fit != "given":
        for name, net in nets.items():
            search = partial(find_batches, {name: net}, first, device, options)
            batches |= attempt(search, failed, f"{name}, finding its batch") or {}
        nets = {name: net for name, net in nets.items() if name in batches}
    rows, names = list[Measurement](), [*nets]
    for part in contest.parts:

        def timed(
            names: Sequence[str], reference: str | None, part: Protocol = part
        ) -> list[Measurement]:
            some, how = {name: nets[name] for name in names}, replace(options, reference=reference)
            what = f"{names[0]}, {part.work}" if len(names) == 1 else ""
            run = partial(bench, some, part, device, how, batches or None)
            return attempt(run, failed, what) or []

        together = timed(names, names[0]) if names else []
        if not together and len(names) > 1:
            together = [row for name in names for row in timed([name], None)]
        rows += together
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    measured: dict[Kind, tuple[Measurement, ...]] = {}
    for row in rows:
        measured[kinds[row.name]] = (*measured.get(kinds[row.name], ()), row)
    return Row(contest=contest, measured=measured, failed=failed)


def attempt(work: Callable[[], Any], failed: dict[str, str], name: str = "") -> Any:
    """The result of `work`, or None with the reason in `failed` under a name."""
    try:
        return work()
    except Exception as error:  # of any kind: the other contests continue
        if name:
            failed[name] = reason(error)
        error.__traceback__ = None  # it refers to tensors
    gc.collect()
    return None


def reason(error: Exception) -> str:
    """The error in one line of at most `MAX_REASON` characters."""
    message = " ".join(str(error).split())
    line = message if isinstance(error, ValueError) else f"{type(error).__name__} {message}"
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]} ..."


def run(
    out: Path,
    *,
    device: torch.device | str = "cpu",
    quick: bool = False,
    networks: Sequence[str] = (),
    resolution: int | None = None,
    precision: Precision | None = None,
    memory_gib: float | None = None,
    minutes: float | None = None,
) -> Iterator[Row]:
    """Measure the contests without results, and rewrite the page in `out` after each one.

    `networks` and `resolution` replace the papers' lines. No contest starts after `minutes`, by
    default `QUICK_MINUTES` if `quick`.
    """
    device = find_device(device)
    here = Environment.here(device)
    selected = lines.lines_of(networks, resolution) if networks else lines.lines()
    if quick and not networks:
        by_name = {(line.table, line.name): line for line in reversed(selected)}
        refined = [line for line in selected if line.table == "TResNet 4"]
        selected = [*(by_name[name] for name in lines.QUICK_LINES), *refined]
    plan = partial(
        lines.contests, quick=quick, device=device, precision=precision, memory_gib=memory_gib
    )
    planned = {line: plan(line) for line in selected}
    # A contest may belong to several tables. The first mode of all lines comes before the second.
    todo = dict.fromkeys(filter(None, chain.from_iterable(zip_longest(*planned.values()))))
    rows: dict[Contest, Row] = {}
    minutes = QUICK_MINUTES if quick and minutes is None else minutes
    deadline = inf if minutes is None else time.monotonic() + 60 * minutes

    def write() -> None:
        numbers = lines.data(planned, rows, here)
        texts = {PAGE: lines.page(planned, rows, here, quick), DATA: numbers}
        for name, text in texts.items():
            with atomic_write(out / name, OUTPUTS[name]) as beside:
                beside.write_text(text)

    for name, output in OUTPUTS.items():
        check_output(out / name, output)
    write()
    for contest in todo:
        file = out / ROWS / contest.file
        row = load(file, contest, here)
        if row is None:
            if time.monotonic() > deadline:
                continue
            row = measure(contest, device)
            write_json(file, ROW, RowFile(lines.same_environment(here), row.measured, row.failed))
        rows[contest] = row
        write()
        yield row
        if row.failed:
            check_alive(device)


def load(file: Path, contest: Contest, here: Environment) -> Row | None:
    """The row of an earlier run in the same environment, or None."""
    try:
        row = from_json(RowFile, read_json(file), str(file))
    except (OSError, ValueError):
        return None
    if row.alike != lines.same_environment(here):
        return None
    return Row(contest=contest, measured=row.measured, failed=row.failed)


def check_alive(device: torch.device) -> None:
    """Raise OSError if this process has lost the GPU, as after an illegal memory access."""
    try:
        torch.zeros(1, device=device).sum().item()
    except RuntimeError as error:
        raise OSError(
            f"{device} does not respond ({reason(error)}): run the command again to continue"
        ) from None


# Measurements of the papers' networks in files of `bench` and `study blocks`.

LARGEST_BATCH = 64  # of the protocol genet, as in GENet's figures
# Quantities by their names in speed.csv, as functions of ms per image.
OF_MS: dict[str, Callable[[float], float]] = {
    "training images/s": lambda ms: 1e3 / ms,
    "inference images/s": lambda ms: 1e3 / ms,
    "seconds per 128 images": lambda ms: 0.128 * ms,
    "ms per image": lambda ms: ms,
}


@dataclass(frozen=True, kw_only=True)
class Timed:
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
    """A file of `study blocks --out` with measured times."""

    how: Literal["measured"]
    protocol: Protocol
    precision: str
    layout: str
    environment: Environment
    rows: tuple[BlockTime, ...]


@dataclass(frozen=True, kw_only=True)
class Bench:
    times: tuple[Timed, ...] = ()
    blocks: tuple[BlockTime, ...] = ()
    place: str = ""  # of the blocks


def read_bench(paths: Sequence[Path], networks: Container[tuple[str, int]]) -> Bench:
    """Read files of `fullstride bench --out`, `bench --suite papers` and `study blocks --out`.

    `networks`: (name in the zoo, pixels a side); measurements of other networks are left out.
    Raises ValueError for other files, and for a file without any measurement of `networks`.
    """
    every = Bench()
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"no file {path}: give one of `fullstride bench --out` or `bench --suite papers`"
            )
        data = read_json(path)
        try:
            own = of_file(data)
            if own.blocks and every.blocks:
                raise ValueError("an earlier file has measurements of blocks: give one of the two")
        except (ValueError, ZeroDivisionError) as error:
            what = "is not what `fullstride bench`, its suite, or `study blocks` wrote"
            raise ValueError(f"{path} {what}: {error}") from None
        times = tuple(row for row in own.times if (row.zoo, row.resolution) in networks)
        if not times and not own.blocks:
            raise ValueError(
                f"{path} has no measurement of a figure's network at its resolution by the "
                "protocol throughput, tresnet, resnet_rs or genet"
            )
        blocks = own if own.blocks else every
        every = Bench(times=(*every.times, *times), blocks=blocks.blocks, place=blocks.place)
    return every


def of_file(data: Any) -> Bench:
    """The measurements of one file, by its content."""
    if isinstance(data, dict) and "numbers" in data:
        return Bench(times=tuple(of_suite(from_json(SuiteFile, data, "suite"))))
    if isinstance(data, dict) and "how" in data:
        return of_blocks(data)
    rows = data if isinstance(data, list) else [data]
    each = (Measurement.from_json(row, "measurement") for row in rows)
    return Bench(times=tuple(timed for one in each for timed in of_measurement(one)))


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
    return Bench(blocks=file.rows, place=place)


def own_name(name: str) -> str:
    """Our name of a network that was measured as timm's network, or compiled."""
    ours = {f"timm/{theirs}": name for name, theirs in TIMM.items()}
    plain = name.removesuffix(" compiled")
    return ours.get(plain, plain)


def of_suite(file: SuiteFile) -> Iterator[Timed]:
    device = file.environment.device
    for row in file.numbers:
        if row.quantity in OF_MS:
            way = f"{row.network} on {device}, {short_precision(row.precision)}, {row.layout}, "
            way += row.made
            yield Timed(
                zoo=own_name(row.network),
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
    device, runtime = one.environment.device, one.runtime or lines.mode(one.compiled)
    way = f"{one.name} on {device}, {short_precision(one.precision)}, {one.layout}, {runtime}"
    way += f", batch {protocol.batch}, protocol {protocol.name}"
    for quantity, (name, work, value_of) in QUANTITIES.items():
        # throughput measures all quantities of inference
        if quantity in OF_MS and work == protocol.work and protocol.name in (name, "throughput"):
            yield Timed(
                zoo=own_name(one.name),
                resolution=protocol.resolution,
                quantity=quantity,
                value=value_of(one) or 0.0,
                place=f"{device}, batch {protocol.batch}",
                way=way,
            )
