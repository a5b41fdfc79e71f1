"""Write the table of operators that `estimate` and `choose` read.

    python benchmarks/write_operator_table.py [timm/repvgg* ...]

Computes the operators of the zoo's networks again, after a family was added or changed, and of
timm's networks those that are missing or match an argument; `timm/*` takes a quarter of an hour.
Tests do so for all of the zoo and a sample of timm.
"""

import io
import lzma
import sys
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
from timm.models import get_arch_pretrained_cfgs, list_models

from fullstride import tables
from fullstride.io.writing import Output, atomic_write, begins_with
from fullstride.latency.devices import COUNT, PATH, TRAINING, key_of, operator_table
from fullstride.latency.estimator import operators_of
from fullstride.measure.operators import Operators
from fullstride.measure.tracer import on_meta
from fullstride.nets import zoo
from fullstride.nets.blocks import has_branches
from fullstride.nets.bundle import build

OUTPUT = Output("the table of operators", ".xz", begins_with(b"\xfd7zXZ"))


def encode(networks: Mapping[str, Operators], sides: Mapping[str, int]) -> bytes:
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
        names=np.array(list(sides)),
        sides=np.array(list(sides.values()), np.uint32),
    )
    return lzma.compress(file.getvalue(), preset=9)


def derive(keys: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Operators]]:
    """The operators of networks by name and pixels a side, traced. Others are left out."""
    for name, side in keys:
        key, spec = key_of(name, side), zoo.spec(name)
        try:
            yield key, operators_of(spec, side).merged()
        except ValueError:  # takes no such image, or none at all without its own preprocessing
            continue
        if name.startswith("timm/") and has_branches(on_meta(partial(build, spec))):
            yield f"{key}{TRAINING}", operators_of(spec, side, training=True).merged()


def all_keys() -> Iterator[tuple[str, int]]:
    """The zoo's networks at their own and at published resolutions, and timm's at those of weights.

    Without those of clips, which have no published accuracies on images to choose by.
    timm's networks without weights are taken at 224 pixels, and those of `pretrained_networks` at
    the resolutions of candidates too.
    """
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


def all_sides() -> Iterator[tuple[str, int]]:
    """The networks of the zoo, and timm's with and without the tags of their weights."""
    tagged = [tag for name in list_models() for tag in (name, *get_arch_pretrained_cfgs(name))]
    for name in (*zoo.list(), *(f"timm/{tag}" for tag in tagged)):
        yield name, zoo.spec(name).resolution


def main() -> None:
    """Write the table of the package, with timm's rows as they are where no argument matches."""
    rows, spans, _ = operator_table()
    keys = {key_of(*key): key for key in all_keys()}
    for pattern in sys.argv[1:]:
        if not any(fnmatchcase(name, pattern) for name, _ in keys.values()):
            raise SystemExit(f"{pattern} matches no network: write it as timm/* or timm/repvgg*")
    networks: dict[str, Operators] = {}
    for key, (begin, end) in spans.items():
        name, side, *_ = key.split()
        again = not name.startswith("timm/") or any(fnmatchcase(name, a) for a in sys.argv[1:])
        if f"{name} {side}" in keys and not again:
            networks[key] = Operators.of_columns(rows[:, begin:end])
    networks |= derive(keys[key] for key in keys if key not in networks)
    with atomic_write(PATH, OUTPUT) as temporary:
        temporary.write_bytes(encode(networks, dict(all_sides())))
    print(f"{PATH}: {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
