"""Which images lie in tar files, and where in them? Pictures and labels under webdataset's names, read at random.

A sample is `000000.jpg` beside `000000.cls`, the number of its class. Beside the shards, `index.json` tells each
picture's name, place and class, as `fullstride pack` writes it; without it the headers of the shards are read once.
Nothing is ever extracted, so that no name in a shard becomes a path.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from fullstride.data.readers.decode import UnreadableImage
from fullstride.data.readers.splits import (
    TEST,
    TRAIN,
    VAL,
    Parts,
    Sample,
    divide,
    in_order,
    listed,
)
from fullstride.data.readers.tar_headers import Member, Shard, scan
from fullstride.storage import Bounds, from_json, read_json

INDEX = "index.json"
FORMAT: Literal["fullstride shards 1"] = "fullstride shards 1"
MAX_INDEX_BYTES = 2**30  # ten million samples
OPEN = 256  # shards held open by a process; systems allow 1024 files and less
KINDS = {word: words[0] for words in (TRAIN, (*VAL, "minival"), TEST) for word in words}


@dataclass(frozen=True)
class Index:
    """What `index.json` says."""

    classes: tuple[str, ...]
    channels: Literal[1, 3]
    mirror: bool
    shards: Mapping[str, Shard]  # by file name


class Place(NamedTuple):
    shard: str  # file name
    offset: int
    size: int


@dataclass(frozen=True)
class Members:
    """Gives a picture's bytes by its name. Each process opens shards when it first needs them; pickles without them."""

    folder: Path
    places: Mapping[str, Place] = field(repr=False)
    _open: dict[str, "_Handle"] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, name: str) -> bytes:
        place = self.places[name]
        try:
            handle = self._open.get(place.shard) or self._opened(place.shard)
            data = os.pread(
                handle.number, place.size, place.offset
            )  # no position that processes could share
        except OSError as error:
            raise UnreadableImage(name, f"{place.shard}: {error.strerror}") from error
        if len(data) < place.size:
            raise UnreadableImage(name, f"{place.shard} is cut short")
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        return Members, (self.folder, self.places)

    def _opened(self, shard: str) -> "_Handle":
        while len(self._open) >= OPEN:
            self._open.pop(next(iter(self._open)), None)
        handle = self._open[shard] = _Handle(os.open(self.folder / shard, os.O_RDONLY))
        return handle


class _Handle:
    """An open file that closes when nobody reads from it any more, whichever thread that is."""

    def __init__(self, number: int):
        self.number = number

    def __del__(self, close=os.close) -> None:
        close(self.number)


def holds_shards(folder: Path) -> bool:
    """Whether a folder is one of shards: it has some with their index, or no subfolders beside them."""
    names = _tar_names(folder)
    index = (folder / INDEX).is_file()
    if names and index:
        return True
    return bool(names or index) and not any(
        p.is_dir() and not p.name.startswith(".") for p in folder.iterdir()
    )


def read_shards(folder: Path, pattern: str, minival: float | None) -> tuple[Index, Parts, Members]:
    """The index of the shards in `folder`, or those that `pattern` names, their samples by part, and their bytes.

    `photos-{000000..000007}.tar` and `photos-{a,b}.tar` name shards that must all be there, `photos-*.tar` all that
    fit. A shard is for train, val (or minival) or test if its name says so between hyphens, underscores or dots.
    Parts that no shard is for are cut from the training images, as `open_data` says; val alone is the test.
    """
    index = _read_index(folder / INDEX) if (folder / INDEX).exists() else None
    names = _chosen(folder, pattern, index)
    if index is None:
        shards = {name: scan(folder / name) for name in names}
    else:
        for name in names:
            _check_size(folder / name, index.shards[name].size)
        shards = {name: index.shards[name] for name in names}
    groups = _by_part(names)
    found = {
        kind: [member for name in group for member in shards[name].members]
        for kind, group in groups.items()
    }
    classes = index.classes if index else in_order(member.label for member in found["train"])
    if len(classes) == 1:
        raise ValueError(
            f"the shards in {str(folder)!r} have one class only, {classes[0]!r}: add shards with a second"
        )
    labels = {name: label for label, name in enumerate(classes)}
    if strange := sorted(
        {member.label for members in found.values() for member in members} - labels.keys()
    ):
        raise ValueError(
            f"{str(folder)!r} has the classes {listed(strange)}, which the training images lack: remove them"
        )
    samples = {
        k: [Sample(m.name, labels[m.label], m.size) for m in members]
        for k, members in found.items()
    }
    parts = divide(
        samples["train"],
        {groups[k][0]: samples[k] for k in ("val", "test") if k in samples},
        minival,
    )
    places = {m.name: Place(name, m.offset, m.size) for name in names for m in shards[name].members}
    return index or Index(classes, 3, True, shards), parts, Members(folder, places)


def _by_part(names: list[str]) -> dict[str, list[str]]:
    """Shards for "train", "val" and "test", as far as there are some."""
    groups: dict[str, list[str]] = {}
    for name in names:
        words = re.split(r"[-_.]", name.lower())
        groups.setdefault(next((KINDS[word] for word in words if word in KINDS), ""), []).append(
            name
        )
    if len(groups) == 1:  # a word that is said of all tells none apart
        return {"train": names}
    if "" in groups:
        raise ValueError(
            f"{groups[''][0]!r} does not say train, val or test as other shards do: rename it"
        )
    if "train" not in groups:
        raise ValueError(
            f"none of {listed(names)} is for training: add shards with 'train' in their names"
        )
    return groups


# ---- which shards


def _tar_names(folder: Path) -> list[str]:
    return sorted(
        p.name
        for p in folder.iterdir()
        if p.suffix.lower() == ".tar" and not p.name.startswith(".")
    )


def _chosen(folder: Path, pattern: str, index: Index | None) -> list[str]:
    there = _tar_names(folder)
    if pattern in there:
        names = [pattern]
    elif pattern:
        names = sorted({name for each in _expanded(pattern) for name in _fitting(each, there)})
    else:
        names = sorted({*there, *(index.shards if index else ())})
    if not names:
        has = f"it has {listed(there)}" if there else "it has no .tar files"
        raise ValueError(f"no shard {pattern!r} in {str(folder)!r}: {has}")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"{len(missing)} of {len(names)} shards are missing in {str(folder)!r}: {listed(missing)}"
        )
    if index and (unknown := [name for name in names if name not in index.shards]):
        raise ValueError(
            f"{listed(unknown)} not in {str(folder / INDEX)!r}: keep them in another folder, or pack again"
        )
    return names


def _fitting(name: str, there: list[str]) -> list[str]:
    return (
        [each for each in there if fnmatchcase(each, name)]
        if any(sign in name for sign in "*?[")
        else [name]
    )


def _expanded(pattern: str) -> list[str]:
    """The names that a pattern with {first..last} and {one,other} spells."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    before, after = pattern[: match.start()], _expanded(pattern[match.end() :])
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", match[1]):
        first, last, digits = int(span[1]), int(span[2]), len(span[1])
        if not 0 <= last - first < 10**5:
            raise ValueError(f"{match[0]} in {pattern!r}: count up, to at most 100,000 shards")
        words = [f"{number:0{digits}}" for number in range(first, last + 1)]
    else:
        words = match[1].split(",")
    return [before + word + rest for word in words for rest in after]


# ---- the index


def write_index(folder: Path, index: Index) -> None:
    labels = {name: label for label, name in enumerate(index.classes)}
    shards = {
        name: _ShardEntry(
            shard.size, tuple((m.name, m.offset, m.size, labels[m.label]) for m in shard.members)
        )
        for name, shard in index.shards.items()
    }
    data = _IndexFile(FORMAT, index.classes, index.channels, index.mirror, shards)
    (folder / INDEX).write_text(json.dumps(asdict(data)))


_Count = Annotated[int, Bounds(ge=0)]


@dataclass(frozen=True)
class _ShardEntry:
    bytes: _Count
    samples: tuple[tuple[str, _Count, _Count, _Count], ...]  # name, offset, size, class


@dataclass(frozen=True)
class _IndexFile:
    """The content of `index.json`."""

    format: Literal["fullstride shards 1"]
    classes: tuple[str, ...]
    channels: Literal[1, 3]
    mirror: bool
    shards: Mapping[str, _ShardEntry]


def _read_index(path: Path) -> Index:
    try:
        file = from_json(_IndexFile, read_json(path, most=MAX_INDEX_BYTES), "index")
        if not file.classes or len(set(file.classes)) < len(file.classes):
            raise ValueError("classes are missing or listed twice")
        names: set[str] = set()
        shards = {
            name: _read_entry(name, entry, file.classes, names)
            for name, entry in file.shards.items()
        }
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} is not what `fullstride pack` writes ({error}): copy it again, or "
            "remove it and class names are numbers"
        ) from None
    return Index(file.classes, file.channels, file.mirror, shards)


def _read_entry(shard: str, entry: _ShardEntry, classes: Sequence[str], names: set[str]) -> Shard:
    """The samples of a shard. Adds their names to `names`."""
    if Path(shard).name != shard or not shard.lower().endswith(".tar"):
        raise ValueError(f"{shard!r} is not a file name that ends in .tar")
    members = []
    for name, offset, size, label in entry.samples:
        if name in names:
            raise ValueError(f"{name!r} is listed twice")
        if offset + size > entry.bytes:
            raise ValueError(f"{name!r} ends behind its shard")
        if label >= len(classes):
            raise ValueError(f"{name!r} has class {label} of {len(classes)}")
        names.add(name)
        members.append(Member(name, classes[label], offset, size))
    return Shard(entry.bytes, members)


def _check_size(path: Path, wanted: int) -> None:
    size = path.stat().st_size
    if size < wanted:
        raise ValueError(
            f"{str(path)!r} is cut short, {wanted - size:,} of {wanted:,} bytes are missing: copy it again"
        )
    if size > wanted:
        raise ValueError(
            f"{str(path)!r} has {size:,} bytes, its index is of {wanted:,}: copy both again"
        )
