"""Write the table of networks that `fullstride zoo` prints, after a family was added or changed.

    python benchmarks/write_networks.py

Building and tracing all networks takes half a minute.
"""

import csv
import io
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from fullstride import tables
from fullstride.io.writing import Output, atomic_write, begins_with
from fullstride.measure.tracer import cost
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.weights.hub import HUB

PATH = Path(tables.__file__).with_name(tables.NETWORKS)
OUTPUT = Output("the table of networks", ".csv", begins_with(b"name,params,macs"))


def derive(names: Iterable[str] = SPECS) -> Iterator[tables.ListedNetwork]:
    """Yield the table's rows of networks by name, each at its own resolution."""
    for name in names:
        spec = SPECS[name]
        total = cost(partial(Network, spec), spec.resolution, spec.in_channels)
        weights = f"timm/{HUB[name]}" if name in HUB else ""
        size = spec.frames, spec.resolution
        yield tables.ListedNetwork(name, total.params, total.macs, *size, weights)


def main() -> None:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(tables.ListedNetwork._fields)
    rows.writerows(derive())
    with atomic_write(PATH, OUTPUT) as temporary:
        temporary.write_text(text.getvalue())
    print(PATH)


if __name__ == "__main__":
    main()
