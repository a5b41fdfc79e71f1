"""Which images are for learning, tuning and testing? Where the data do not say, a hash of each name decides."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

TRAIN, VAL, TEST = ("train", "training"), ("val", "valid", "validation"), ("test", "testing")
TEST_SHARE = 0.1


class Sample(NamedTuple):
    name: str  # POSIX path below the data folder
    target: int
    size: int  # bytes; -1 where a link leads nowhere


class Parts(NamedTuple):
    train: list[Sample]
    minival: list[Sample]
    test: list[Sample]


def divide(
    train: list[Sample], held_out: Mapping[str, list[Sample]], minival: float | None
) -> Parts:
    """Cut what is missing from `train`. `held_out`, by where it was found: nothing, the test, or minival and test."""
    if not held_out:
        pool, test = _cut(train, TEST_SHARE)
        kept, tuned = _cut(pool, _minival_share(pool, minival), start=TEST_SHARE)
        return Parts(kept, tuned, test)
    *chosen, test = held_out.values()
    if not chosen:
        kept, tuned = _cut(train, _minival_share(train, minival))
        return Parts(kept, tuned, test)
    if minival is not None:
        raise ValueError(
            f"minival {minival}: {next(iter(held_out))!r} is the minival already; leave the share out"
        )
    return Parts(train, chosen[0], test)


def in_order(classes: Iterable[str]) -> tuple[str, ...]:
    """Class names by number where all are whole numbers, else by letter."""
    names = set(classes)
    if all(name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )


def fraction(name: str) -> float:
    """A number in [0, 1) that depends on nothing but the name."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).digest()
    return (
        int.from_bytes(digest, "big") / 2**48
    )  # 48 bits, so that the quotient cannot round up to 1


def _cut(pool: list[Sample], share: float, start: float = 0.0) -> tuple[list[Sample], list[Sample]]:
    """Those that stay, and a share taken by their fractions, which begin at `start`: at least one, and never all."""
    if len(pool) < 2:
        raise ValueError(
            "too few images to keep one each for the minival and the test: add more, at least 3 in all"
        )
    fractions = {sample: fraction(sample.name) for sample in pool}
    count = sum(each < start + (1 - start) * share for each in fractions.values())
    taken = set(sorted(pool, key=fractions.__getitem__)[: min(max(1, count), len(pool) - 1)])
    return [s for s in pool if s not in taken], [s for s in pool if s in taken]


def _minival_share(pool: list[Sample], share: float | None) -> float:
    return share or min(0.1, max(0.02, 500 / len(pool)))
