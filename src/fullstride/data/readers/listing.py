"""What does a reader return? The names, classes and sizes of images, by the splits of the data."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fullstride.data.readers.objects import Objects

NO_LABEL = -1  # the class that an image without labels counts for where splits are taken

# Names of splits in folders, tables, shards and datasets.
TRAIN, VAL, TEST = ("train", "training"), ("val", "valid", "validation"), ("test", "testing")


class Sample(NamedTuple):
    name: str  # POSIX path below the data folder
    target: Any  # a class index, the sorted indices of all its labels, or its `Objects`
    size: int  # bytes; -1 for a broken link


@dataclass(frozen=True)
class Below:
    """The path of a name relative to `root`."""

    root: Path

    def __call__(self, name: str) -> Path:
        return self.root / name


@dataclass(frozen=True)
class Listing:
    """The images of a data set, before splits are taken from the training images."""

    classes: tuple[str, ...]
    splits: Mapping[str, list[Sample]]  # "train", and "val" and "test" where the data have them
    file: Callable[[str], Path | bytes]  # name -> the file of an image, or its bytes
    val_name: str = "val"  # what the data call the validation split
    columns: tuple[str, ...] = ()  # of the data, where they have columns
    # name -> value in the column that the rule names as the group, if there is such a column
    groups: Mapping[str, str] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()  # what a user should know of the data, a line each

    @property
    def samples(self) -> list[Sample]:
        """Those of all splits."""
        return [sample for samples in self.splits.values() for sample in samples]


def sorted_classes(classes: Iterable[str]) -> tuple[str, ...]:
    """Distinct class names: by value if all are whole numbers, else alphabetically."""
    names = set(classes)
    if all(name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def labels_of(target: Any) -> tuple[int, ...]:
    """The classes that a sample counts for: one, all its labels or objects', or `NO_LABEL`."""
    if isinstance(target, Objects):
        target = tuple(sorted({*target.labels}))
    return (target or (NO_LABEL,)) if isinstance(target, tuple) else (target,)


def target_text(classes: Sequence[str], target: Any) -> str:
    """The class names of a sample, for a line."""
    names = [repr(classes[label]) for label in labels_of(target) if label != NO_LABEL]
    return " with ".join(names) or "no class"


def quote_names(names: list[str]) -> str:
    """The first three names for an error message, and the number of the others."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + rest


def fraction(name: str) -> float:
    """A number in [0, 1) that is a function of the name alone."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48  # 48 bits: the quotient cannot round up to 1
