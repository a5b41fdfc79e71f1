"""Which operators do named networks run? The package has a table, so that none need be built.

`choose` reads it for hundreds of networks, which building and tracing would take minutes for; it
needs no PyTorch. `python -m fullstride.latency.operator_table` computes those of the zoo again,
after a family was added or changed, and with `timm` as argument those of timm too, which takes a
quarter of an hour; tests do so for all of the zoo and a sample of timm.
"""

import io
import lzma
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np

from fullstride import tables
from fullstride.measure.cost.operators import COLUMNS, Operators
from fullstride.outputs import Output, begins_with
from fullstride.writing import atomic_write

PATH = Path(tables.__file__).with_name("operators.xz")
OUTPUT = Output("the table of operators", ".xz", begins_with(b"\xfd7zXZ"))
COUNT = COLUMNS.index("count")  # the last column; the others are stored once for equal rows


def find_operators(name: str, resolution: int) -> Operators | None:
    """The merged operators of one image, by the name that `zoo.spec` takes; None if not there.

    timm's tags of weights do not change them.
    """
    rows, spans = table()
    span = spans.get(key_of(name, resolution))
    return None if span is None else Operators.of_columns(rows[:, span[0] : span[1]])


def table_keys() -> list[tuple[str, int]]:
    """Name and pixels a side of all networks of the table."""
    return [(name, int(side)) for name, side in map(str.split, table()[1])]


def key_of(name: str, resolution: int) -> str:
    return f"{name.split('.')[0] if name.startswith('timm/') else name} {resolution}"


@cache
def table() -> tuple[np.ndarray, dict[str, tuple[int, int]]]:
    """(columns, operators) of all networks, and where those of each begin and end."""
    return decode(PATH.read_bytes())


def encode(networks: Mapping[str, Operators]) -> bytes:
    """Equal rows are stored once, sorted, as differences; this and xz make 90 bytes a network."""
    columns = np.concatenate([net.table() for net in networks.values()], axis=1).astype(np.int64)
    rows, place = np.unique(columns[:COUNT], axis=1, return_inverse=True)
    file = io.BytesIO()
    np.savez(
        file,
        keys=np.array(list(networks)),
        sizes=np.array([len(net) for net in networks.values()], np.uint32),
        rows=np.diff(rows, axis=1, prepend=0),
        place=place.reshape(-1).astype(np.uint32),
        count=columns[COUNT].astype(np.uint32),
    )
    return lzma.compress(file.getvalue(), preset=9)


def decode(data: bytes) -> tuple[np.ndarray, dict[str, tuple[int, int]]]:
    with np.load(io.BytesIO(lzma.decompress(data))) as file:
        rows, ends = np.cumsum(file["rows"], axis=1), np.cumsum(file["sizes"], dtype=np.int64)
        columns = np.vstack([rows[:, file["place"]], file["count"]]).astype(np.float64)
        spans = zip((ends - file["sizes"]).tolist(), ends.tolist(), strict=True)
        return columns, dict(zip(file["keys"].tolist(), spans, strict=True))


def derive(keys: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Operators]]:
    """The operators of networks by name and pixels a side, traced. Others are left out."""
    from fullstride.latency.spec_operators import operators_of
    from fullstride.nets import zoo

    for name, side in keys:
        try:
            yield key_of(name, side), operators_of(zoo.spec(name), side).merged()
        except ValueError:  # takes no such image, or none at all without its own preprocessing
            continue


def all_keys() -> Iterator[tuple[str, int]]:
    """The zoo's networks at their own and at published resolutions, and timm's at those of weights.

    Without those of clips, which have no published accuracies on images to choose by.
    timm's networks without weights are taken at 224 pixels, and those of `pretrained_networks` at
    the resolutions of candidates too.
    """
    from timm.models import get_arch_pretrained_cfgs, list_models

    own = [(row.name, row.resolution) for row in tables.networks() if not row.frames]
    printed = [(row.name, row.resolution) for row in tables.published()]
    others = [(row.name, row.resolution) for row in tables.timm_published()]
    others += [
        (row.name, side)
        for row in tables.pretrained_networks()
        for side in (row.resolution, *row.resolutions, *tables.SMALL_RESOLUTIONS)
    ]
    for name in list_models():
        sizes = {
            size[1]
            for weights in get_arch_pretrained_cfgs(name).values()
            for size in (weights.input_size, weights.test_input_size)
            if size
        }
        others += [(f"timm/{name}", side) for side in sorted(sizes or {224})]
    others = [(key_of(*key).split()[0], key[1]) for key in others]  # without tags
    yield from dict.fromkeys([*own, *printed, *others])


def main() -> None:
    """Write the table of the package, with timm's rows as they are unless `timm` is an argument."""
    present = {} if "timm" in sys.argv[1:] else {key: find_operators(*key) for key in table_keys()}
    present = {key: rows for key, rows in present.items() if rows and key[0].startswith("timm/")}
    keys = list(all_keys())
    networks = {key_of(*key): rows for key, rows in present.items() if key in keys}
    networks |= derive(key for key in keys if key not in present)
    with atomic_write(PATH, OUTPUT) as temporary:
        temporary.write_bytes(encode(networks))
    print(f"{PATH}: {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
