"""Which images are for training, validation and test? Without splits, a hash of names decides.

The validation split is called minival: it chooses epochs and settings, never the reported scores.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# Names of splits in folders, tables, shards and datasets.
TRAIN, VAL, TEST = ("train", "training"), ("val", "valid", "validation"), ("test", "testing")
TEST_SHARE = 0.1


class Sample(NamedTuple):
    name: str  # POSIX path below the data folder
    target: int
    size: int  # bytes; -1 for a broken link


class Splits(NamedTuple):
    train: list[Sample]
    minival: list[Sample]
    test: list[Sample]


def complete_splits(
    train: list[Sample], held_out: Mapping[str, list[Sample]], minival: float | None
) -> Splits:
    """Take the splits that are missing from `train`.

    Args:
        train: The training samples.
        held_out: The other splits of the data by their names: none, the test, or minival and test.
        minival: Share of the training samples for the minival; None: by their number.
    """
    if not held_out:
        pool, test = _take(train, TEST_SHARE)
        rest, validation = _take(pool, _minival_share(pool, minival), start=TEST_SHARE)
        return Splits(rest, validation, test)
    *validations, test = held_out.values()
    if not validations:
        rest, validation = _take(train, _minival_share(train, minival))
        return Splits(rest, validation, test)
    if minival is not None:
        raise ValueError(
            f"minival {minival}: {next(iter(held_out))!r} is the minival already; leave the share "
            "out"
        )
    return Splits(train, validations[0], test)


def sorted_classes(classes: Iterable[str]) -> tuple[str, ...]:
    """Distinct class names: by value if all are whole numbers, else alphabetically."""
    names = set(classes)
    if all(name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def quote_names(names: list[str]) -> str:
    """The first three names for an error message, and the number of the others."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + rest


def fraction(name: str) -> float:
    """A number in [0, 1) that is a function of the name alone."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48  # 48 bits: the quotient cannot round up to 1


def _take(
    pool: list[Sample], share: float, start: float = 0.0
) -> tuple[list[Sample], list[Sample]]:
    """The other samples, and the `share` of them with the lowest fractions.

    `start` is the lowest fraction in the pool. At least one sample is taken, and never all.
    """
    if len(pool) < 2:
        raise ValueError(
            "too few images to keep one each for the minival and the test: add more, at least 3 in "
            "all"
        )
    fractions = {sample: fraction(sample.name) for sample in pool}
    count = sum(each < start + (1 - start) * share for each in fractions.values())
    lowest = set(sorted(pool, key=fractions.__getitem__)[: min(max(1, count), len(pool) - 1)])
    return [s for s in pool if s not in lowest], [s for s in pool if s in lowest]


def _minival_share(pool: list[Sample], share: float | None) -> float:
    return share or min(0.1, max(0.02, 500 / len(pool)))
