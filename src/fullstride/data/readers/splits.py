"""Which images are for training, validation and test? Without splits, a hash of names decides.

The validation split is called minival: it chooses epochs and settings, never the reported scores.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# Names of splits in folders, tables, shards and datasets.
TRAIN, VAL, TEST = ("train", "training"), ("val", "valid", "validation"), ("test", "testing")
TEST_SHARE = 0.1
OLD_SPLITS, LATEST_SPLITS = 1, 2  # versions of the rule; a run keeps the one that it began with
STRATIFIED = 3  # images of a class beyond those that must be left, from which on one is taken


@dataclass(frozen=True)
class SplitRule:
    """How the splits that data do not have are taken from the training images."""

    minival: float | None = None  # share of the training images; None: by their number
    version: int = LATEST_SPLITS

    def __post_init__(self) -> None:
        if self.minival is not None and not 0 < self.minival < 1:
            raise ValueError(
                f"minival {self.minival}: use a share of the training images above 0 and below 1"
            )
        if self.version not in (OLD_SPLITS, LATEST_SPLITS):
            raise ValueError(f"splits {self.version}: use {OLD_SPLITS} or {LATEST_SPLITS}")


class Sample(NamedTuple):
    name: str  # POSIX path below the data folder
    target: int
    size: int  # bytes; -1 for a broken link


class Splits(NamedTuple):
    train: list[Sample]
    minival: list[Sample]
    test: list[Sample]


def complete_splits(
    train: list[Sample],
    held_out: Mapping[str, list[Sample]],
    rule: SplitRule,
    val_name: str = "val",
) -> Splits:
    """Take the splits that are missing from `train`.

    Without any, a test and a minival are taken, both stratified by class. Beside a test, the
    minival is taken. A validation split is the minival, and there is then no test unless the data
    have one; by the old rule it is the test, and the minival is taken.

    Args:
        train: The training samples.
        held_out: The splits "val" and "test", where the data have them.
        rule: Which samples are taken.
        val_name: What the data call the validation split.
    """
    val, test = held_out.get("val"), held_out.get("test")
    if val is not None and test is None and rule.version == OLD_SPLITS:
        val, test = None, val
    if val is not None:
        if rule.minival is not None:
            raise ValueError(
                f"minival {rule.minival}: {val_name!r} is the minival already; leave the share out"
            )
        return Splits(train, val, test or [])
    take, start = _take if rule.version == OLD_SPLITS else _take_by_class, 0.0
    if test is None:
        train, test = take(train, TEST_SHARE, 0.0, 2)
        start = TEST_SHARE
    share = rule.minival or min(0.1, max(0.02, 500 / len(train)))
    rest, minival = take(train, share, start, 1)
    return Splits(rest, minival, test)


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
    pool: list[Sample], share: float, start: float = 0.0, leave: int = 1
) -> tuple[list[Sample], list[Sample]]:
    """The other samples, and the `share` of them with the lowest fractions, whatever their class.

    `start` is the lowest fraction in the pool. At least one sample is taken, and never all.
    """
    _check_number(pool)
    fractions = {sample: fraction(sample.name) for sample in pool}
    count = sum(each < start + (1 - start) * share for each in fractions.values())
    lowest = set(sorted(pool, key=fractions.__getitem__)[: min(max(1, count), len(pool) - 1)])
    return [s for s in pool if s not in lowest], [s for s in pool if s in lowest]


def _take_by_class(
    pool: list[Sample], share: float, start: float, leave: int
) -> tuple[list[Sample], list[Sample]]:
    """The other samples, and of each class the `share` with the lowest fractions.

    `leave` samples of each class are left, for the splits that are still to be filled; of a class
    with STRATIFIED more, at least one is taken. Where nothing would be taken, it is the sample with
    the lowest fraction of the classes that have enough.
    """
    _check_number(pool)
    by_class: dict[int, list[Sample]] = {}
    for sample in sorted(pool, key=lambda sample: fraction(sample.name)):
        by_class.setdefault(sample.target, []).append(sample)
    taken: set[Sample] = set()
    for samples in by_class.values():
        count = sum(fraction(each.name) < start + (1 - start) * share for each in samples)
        count = max(count, int(len(samples) - leave >= STRATIFIED))
        taken.update(samples[: min(count, max(0, len(samples) - leave))])
    if not taken:
        enough = [s for s in by_class.values() if len(s) > leave] or [*by_class.values()]
        enough = [samples for samples in enough if len(samples) > 1] or enough
        taken.add(min((samples[0] for samples in enough), key=lambda s: fraction(s.name)))
    return [s for s in pool if s not in taken], [s for s in pool if s in taken]


def _check_number(pool: list[Sample]) -> None:
    if len(pool) < 2:
        raise ValueError(
            "too few images to keep one each for the minival and the test: add more, at least 3 in "
            "all"
        )
