"""Holds the operators of named networks in a table of the package, to avoid building networks.

`estimate` and `choose` read it, since building and tracing a network takes a second and needs
PyTorch. `benchmarks/write_operator_table.py` writes it after a change of a family.
"""

import io
import lzma
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fullstride import tables
from fullstride.measure.operators import COLUMNS, Operators

PATH = Path(tables.__file__).with_name("operators.xz")
TRAINING = " training"  # suffix of keys of networks that ship and train in different forms
COUNT = COLUMNS.index("count")  # the last column; rows equal in all others are stored once


def find_operators(name: str, resolution: int, *, training: bool = False) -> Operators | None:
    """The merged operators of one image, by a name of `zoo.spec`; None for a name not in the table.

    `training` gives the form that trains, not the form that ships. timm's tags are ignored.
    """
    rows, spans, _ = table()
    key = key_of(name, resolution)
    span = spans.get(f"{key}{TRAINING}" if training else key, spans.get(key))
    return None if span is None else Operators.of_columns(rows[:, span[0] : span[1]])


def own_resolution(name: str) -> int | None:
    """Pixels a side of `zoo.spec(name)`, with timm's tag; None for names not in the table."""
    return table().sides.get(name)


def table_keys() -> list[tuple[str, int]]:
    """Name and pixels a side of all networks in the table."""
    keys = (key.split() for key in table().spans if not key.endswith(TRAINING))
    return [(name, int(side)) for name, side in keys]


def key_of(name: str, resolution: int) -> str:
    return f"{name.split('.')[0] if name.startswith('timm/') else name} {resolution}"


class Table(NamedTuple):
    """The content of the file."""

    rows: np.ndarray  # (columns, operators) of all networks
    spans: dict[str, tuple[int, int]]  # first row and end of each network
    sides: dict[str, int]  # own pixels a side of each network and of timm's tagged names


@cache
def table() -> Table:
    return decode(PATH.read_bytes())


def decode(data: bytes) -> Table:
    with np.load(io.BytesIO(lzma.decompress(data))) as file:
        rows, ends = np.cumsum(file["rows"], axis=1), np.cumsum(file["sizes"], dtype=np.int64)
        columns = np.vstack([rows[:, file["place"]], file["count"]]).astype(np.float64)
        spans = zip((ends - file["sizes"]).tolist(), ends.tolist(), strict=True)
        sides = zip(file["names"].tolist(), file["sides"].tolist(), strict=True)
        return Table(columns, dict(zip(file["keys"].tolist(), spans, strict=True)), dict(sides))
