"""Finds profiles of devices, operators of networks and estimates of times by name."""

import io
import lzma
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fullstride import tables
from fullstride.io.records import from_json, parse_json
from fullstride.io.writing import read_regular
from fullstride.latency import device_sheets
from fullstride.latency.network_times import Estimate, estimates, is_tie
from fullstride.latency.profiles import Profile
from fullstride.measure.budget import is_elsewhere
from fullstride.measure.operators import COLUMNS, Operators

if TYPE_CHECKING:
    from fullstride.nets.zoo import NamedNetwork


FOLDER = resources.files("fullstride.latency")
MEASURED, SHEETS = FOLDER.joinpath("device_profiles"), FOLDER.joinpath("sheets")
MAX_BYTES = 100_000  # for a profile's file; the package's files have two thousand
THIS_MACHINE = {"auto", "cpu", "cuda", "gpu", "here"}  # words of other flags for this machine


def profile_names() -> list[str]:
    files = [entry.name for folder in (MEASURED, SHEETS) for entry in folder.iterdir()]
    return sorted(name.removesuffix(".json") for name in files if name.endswith(".json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """Load one of `profile_names()`, or a JSON file with a profile or a data sheet of a device.

    Raises ValueError in one line.

    Examples:
        >>> import fullstride
        >>> fullstride.load_profile("t4-fp16")
        Profile('t4-fp16': NVIDIA T4, tensorrt, fp16)
    """
    name, names = str(name_or_path), profile_names()
    if name in names:
        folder = MEASURED if MEASURED.joinpath(f"{name}.json").is_file() else SHEETS
        return profile_from(folder.joinpath(f"{name}.json").read_bytes(), name, name)
    path = Path(name_or_path)
    if path.suffix != ".json" and not path.exists():
        close = get_close_matches(name, names, n=3, cutoff=0.4)
        if name in THIS_MACHINE:
            advice = (
                "fullstride measure calibrate writes this machine's profile, and without --target "
                "fit and study search measure here"
            )
        elif is_elsewhere(name):
            advice = (
                "this command does not measure; `measure calibrate --target` writes a profile of "
                "that machine"
            )
        elif close:
            advice = f"did you mean {' or '.join(close)}, or the path of a JSON file?"
        else:
            advice = (
                f"choose from {', '.join(names)}, or give the path of a JSON file, or "
                "ssh://USER@HOST of a machine that can be reached"
            )
        raise ValueError(f"no profile named {name!r}: {advice}")
    try:
        text = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    return profile_from(text, str(path), path.stem)


def profile_from(text: bytes, where: str, name: str) -> Profile:
    """Read JSON of a profile, or derive the profile from JSON of a data sheet."""
    data = parse_json(text, where)
    if isinstance(data, dict) and {"machine", "inference"} & data.keys():
        return Profile.from_json(text, where)
    sheet = from_json(device_sheets.DeviceSheet, data, where)
    bases = device_sheets.BASES[sheet.runtime, sheet.layout, sheet.precision]
    return device_sheets.profile_of(sheet, name, [load_profile(basis) for basis in bases])


# ---- times of networks by name; networks in the table of operators need no PyTorch


@dataclass(frozen=True, kw_only=True)
class NamedEstimate:
    """A row of a comparison of networks."""

    network: str
    resolution: int  # pixels a side
    estimate: Estimate
    ties: tuple[int, ...]  # rows, from 0, within the resolvable ratio; itself included


def estimate_by_name(
    networks: "Sequence[str | NamedNetwork]",
    profile: Profile,
    batch: int = 1,
    resolution: int | None = None,
    *,
    training: bool = False,
) -> list[NamedEstimate]:
    """Estimate the times of networks or their names on the device of `profile`, fastest first.

    `resolution` defaults to each network's own. `training` asks for times of a training step, if
    the profile has them. Raises ValueError, in one line, for an unknown name.
    """
    if not networks:
        raise ValueError("nothing to estimate: name one or more networks or runs")
    work = [named_work(each, resolution, training) for each in networks]
    operators, ran = [each.operators for each in work], [each.ran for each in work]
    times = estimates(operators, profile, [batch] * len(work), training=training, names=ran)
    order = sorted(range(len(work)), key=lambda i: times[i].ms_per_image)
    return [
        NamedEstimate(
            network=work[i].name,
            resolution=work[i].resolution,
            estimate=times[i],
            ties=tuple(line for line, j in enumerate(order) if is_tie(times[i], times[j])),
        )
        for i in order
    ]


def correct(profile: Profile, path: Path) -> Profile:
    """Correct the profile by the measured times of a CSV file, see `device_sheets.corrected`.

    Raises ValueError, in one line with the path.
    """
    measured = device_sheets.read_measured(path)
    keys = [(row.network, row.resolution) for row in measured]
    try:
        by_key = {key: named_work(*key) for key in dict.fromkeys(keys)}
        work = [by_key[key] for key in keys]
        operators, ran = [each.operators for each in work], [each.ran for each in work]
        times = estimates(operators, profile, [row.batch for row in measured], names=ran)
        return device_sheets.corrected(profile, measured, times)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class NamedWork(NamedTuple):
    """The operators that a network runs for one image."""

    name: str
    resolution: int  # pixels a side
    operators: Operators
    ran: frozenset[str]  # ATen's names of the operators, if the network has the head of a task


def named_work(
    network: "str | NamedNetwork", resolution: int | None, training: bool = False
) -> NamedWork:
    """Find the operators in the package's table if it has the name, else trace the network."""
    if isinstance(network, str):
        side = own_resolution(network) if resolution is None else resolution
        if side is not None and not Path(network).exists():
            operators = find_operators(network, side, training=training)
            if operators is not None:
                return NamedWork(network, side, operators, frozenset())
        from fullstride import tasks

        network = tasks.find_network(network)
    from fullstride.latency.estimator import operators_with_names

    side = network.spec.resolution if resolution is None else resolution
    work = operators_with_names(network, side, training=training)
    return NamedWork(network.name, side, *work)


def estimates_json(rows: Sequence[NamedEstimate], profile: Profile) -> dict[str, Any]:
    """The profile and a row for each network as JSON values."""
    return {
        "profile": profile.to_dict(),
        "estimates": [
            {
                "network": row.network,
                "resolution": row.resolution,
                "images_per_s": row.estimate.images_per_s,
                **{key: value for key, value in asdict(row.estimate).items() if key != "unfitted"},
                "ties": [rows[line].network for line in row.ties if line != number],
                "not_fitted_on": row.estimate.unfitted,
            }
            for number, row in enumerate(rows)
        ],
    }


# ---- rough relative times, before anything is measured

# Relative times on a processor: one thread of a Xeon by `fullstride measure calibrate`,
# docs/guides/latency.md. The rank correlation of times and estimates was 0.99 for 15 ONNX files in
# fp32 from 0.1 to 50 ms.
CPU = Profile.from_json(FOLDER.joinpath("cpu.json").read_bytes(), "cpu.json")
GPU = "rtx4090-compiled"  # for relative times on any GPU


def profile_here() -> Profile:
    """A profile whose relative times roughly match this machine."""
    import torch  # not needed for names in the table of operators

    return load_profile(GPU) if torch.cuda.is_available() else CPU


# ---- the operators of named networks, in a table of the package: building and tracing a network
# takes a second and needs PyTorch. `benchmarks/write_operator_table.py` writes it after a change of
# a family.

PATH = Path(tables.__file__).with_name("operators.xz")
TRAINING = " training"  # suffix of keys of networks that ship and train in different forms
COUNT = COLUMNS.index("count")  # the last column; rows equal in all others are stored once


def find_operators(name: str, resolution: int, *, training: bool = False) -> Operators | None:
    """The merged operators of one image, by a name of `zoo.spec`; None for a name not in the table.

    `training` gives the form that trains, not the form that ships. timm's tags are ignored.
    """
    rows, spans, _ = operator_table()
    key = key_of(name, resolution)
    span = spans.get(f"{key}{TRAINING}" if training else key, spans.get(key))
    return None if span is None else Operators.of_columns(rows[:, span[0] : span[1]])


def own_resolution(name: str) -> int | None:
    """Pixels a side of `zoo.spec(name)`, with timm's tag; None for names not in the table."""
    return operator_table().sides.get(name)


def key_of(name: str, resolution: int) -> str:
    return f"{name.split('.')[0] if name.startswith('timm/') else name} {resolution}"


class Table(NamedTuple):
    """The content of the file."""

    rows: np.ndarray  # (columns, operators) of all networks
    spans: dict[str, tuple[int, int]]  # first row and end of each network
    sides: dict[str, int]  # own pixels a side of each network and of timm's tagged names


@cache
def operator_table() -> Table:
    return decode(PATH.read_bytes())


def decode(data: bytes) -> Table:
    with np.load(io.BytesIO(lzma.decompress(data))) as file:
        rows, ends = np.cumsum(file["rows"], axis=1), np.cumsum(file["sizes"], dtype=np.int64)
        columns = np.vstack([rows[:, file["place"]], file["count"]]).astype(np.float64)
        spans = zip((ends - file["sizes"]).tolist(), ends.tolist(), strict=True)
        sides = zip(file["names"].tolist(), file["sides"].tolist(), strict=True)
        return Table(columns, dict(zip(file["keys"].tolist(), spans, strict=True)), dict(sides))
