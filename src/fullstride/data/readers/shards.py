"""Reads shards, tar files in webdataset's layout, with random access.

A sample is `000000.jpg` beside `000000.cls`, the number of its class. `index.json`, as `fullstride
data pack` writes it, has each image's name, offset and class; without it the headers of the shards
are read once. Nothing is extracted, so no name in a shard becomes a path.

If images have several labels, or none, a sample has `000000.json` with the numbers of its labels in
place of the `.cls`, and the index is needed.
"""

import io
import itertools
import json
import math
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fullstride.data.readers.decode import UnreadableImage
from fullstride.data.readers.folder import IMAGES, FileKind, entries_of, subfolders, why_unused
from fullstride.data.readers.listing import (
    SPLITS,
    Listing,
    Sample,
    check_classes,
    quote_names,
    sorted_classes,
)
from fullstride.io.console import count_of, counted, verb_of
from fullstride.io.records import Count, from_json, read_json
from fullstride.io.writing import check_regular, read_regular

# ---- the samples of a tar file without an index, from its headers


BLOCK = tarfile.BLOCKSIZE  # bytes; headers and data of a tar file begin at multiples of it
MAX_TEXT_BYTES = 2**20  # larger labels are ignored, larger file names refused
TEXT_SUFFIXES = (".cls", ".json")


class Member(NamedTuple):
    """An image in a shard."""

    name: str
    label: str | tuple[str, ...]  # the class name, or the names of all labels
    offset: int  # bytes from the shard's start
    size: int  # bytes


class Shard(NamedTuple):
    size: int  # bytes of the whole file
    members: list[Member]
    ignored: Mapping[str, int] = {}  # number of files that are no images or labels, by reason


class ShardError(ValueError):
    """A tar file that cannot be read as a shard."""


def scan(path: Path, *, labelled: bool = True, kind: FileKind = IMAGES) -> Shard:
    """Read the headers and labels of a shard; without `labelled`, labels may be "".

    Raises ValueError for a shard without such files.
    """
    samples: dict[str, dict[str, tuple[int, int]]] = {}  # key -> suffix -> (offset, size)
    members: list[Member] = []
    unlabelled: list[str] = []
    ignored: Counter[str] = Counter()
    with _HeaderFile(path) as file:
        for name, *location in counted(_files(file, path), f"files of {path.name}"):
            key, suffix = _key_and_suffix(name)
            if suffix in (*kind.suffixes, *TEXT_SUFFIXES):
                files = samples.setdefault(key, {})
                if suffix in files:
                    raise ShardError(f"{str(path)!r} has {name!r} twice: keep one")
                files[suffix] = (location[0], location[1])
            else:
                ignored[why_unused(f"x{suffix}", kind)] += 1
        for key, files in samples.items():
            images = [suffix for suffix in files if suffix in kind.suffixes]
            if len(images) > 1:
                raise ShardError(
                    f"{str(path)!r} has two {kind.name} for {key!r}, {' and '.join(images)}: "
                    "keep one"
                )
            label = _label(file.fileno(), files) if images else ""
            if images and (label or not labelled):
                members.append(Member(f"{path.name}/{key}{images[0]}", label, *files[images[0]]))
            elif images:
                unlabelled.append(key)
    if unlabelled:
        raise ShardError(
            f"{len(unlabelled)} of {len(unlabelled) + len(members)} {kind.name} in {str(path)!r} "
            f"{verb_of(len(unlabelled), 'have')} no label, the first is {unlabelled[0]!r}: add "
            f"{unlabelled[0]}.cls, or 'label' to its .json"
        )
    if not members:
        raise ShardError(
            f"{str(path)!r} has no {kind.name}: give shards of {' '.join(kind.suffixes)} with a "
            ".cls each"
        )
    return Shard(file.size, members, dict(ignored))


def _key_and_suffix(name: str) -> tuple[str, str]:
    """Split a name as webdataset does, at the first dot after the folders."""
    folder, slash, file = name.rpartition("/")
    stem, dot, rest = file.partition(".")
    return folder + slash + stem, (dot + rest).lower()


def _label(descriptor: int, files: Mapping[str, tuple[int, int]]) -> str:
    """The class in .cls, or the label in .json; "" if there is neither."""
    texts = {}
    for suffix in TEXT_SUFFIXES:
        offset, size = files.get(suffix, (0, 0))
        data = os.pread(descriptor, size, offset) if 0 < size <= MAX_TEXT_BYTES else b""
        texts[suffix] = data.decode("utf-8", "replace").strip()
    if texts[".cls"] or not texts[".json"]:
        return texts[".cls"]
    try:
        label = json.loads(texts[".json"])["label"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return str(label) if isinstance(label, str | int) and not isinstance(label, bool) else ""


def _files(file: "_HeaderFile", path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each regular file; links, devices and folders are skipped.

    `tarfile` trusts sizes and silently ends at a damaged header: both are checked here.
    """
    offset = 0
    try:
        with tarfile.open(
            fileobj=file, mode="r:", tarinfo=_Header, encoding="utf-8", errors="surrogateescape"
        ) as tar:
            while member := tar.next():
                # else it collects the headers of all files
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]
                end = member.offset_data + (member.size if member.isreg() else 0)
                if member.issparse():
                    raise ShardError(
                        f"{str(path)!r} stores {member.name!r} with holes: write it without "
                        "--sparse"
                    )
                if member.size < 0:
                    raise _NegativeSizeError
                if end > file.size:
                    behind = f"{end - file.size:,} bytes behind its end"
                    raise _cut_short(path, f"{member.name!r} ends {behind}")
                if member.isreg():
                    yield member.name, member.offset_data, member.size
                offset = tar.offset
    except ShardError:
        raise
    except _NegativeSizeError:
        raise ShardError(
            f"{str(path)!r} is damaged at byte {offset:,}, a size below 0: copy it again"
        ) from None
    except Exception:  # on a damaged header, tarfile raises almost anything
        raise _damaged(file, path, offset) from None
    if any(os.pread(file.fileno(), BLOCK, offset)) or file.size < offset + BLOCK:
        raise _damaged(file, path, offset)


def _damaged(file: "_HeaderFile", path: Path, offset: int) -> ShardError:
    if file.size < offset + BLOCK:
        return _cut_short(path, "the mark of its end is missing")
    return ShardError(
        f"{str(path)!r} is damaged at byte {offset:,}, or no plain tar: give an uncompressed one"
    )


def _cut_short(path: Path, reason: str) -> ShardError:
    return ShardError(f"{str(path)!r} is cut short, {reason}: copy it again")


class _NegativeSizeError(Exception):
    """A header claims a size below 0, which newer versions of Python take for another damage."""


class _Header(tarfile.TarInfo):
    """A header whose plain form, which nearly all images have, is read in a fifth of the time."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> tarfile.TarInfo:
        return cls._plain(buf, encoding, errors) or super().frombuf(buf, encoding, errors)

    @classmethod
    def _frombuf(
        cls, buf: bytes | bytearray, encoding: str, errors: str, **how: bool
    ) -> tarfile.TarInfo:
        """Newer versions of Python call it in place of `frombuf`."""
        plain = cls._plain(buf, encoding, errors)
        return plain or super()._frombuf(buf, encoding, errors, **how)  # pyright: ignore

    def _block(self, count: int) -> int:
        if count < 0:
            raise _NegativeSizeError
        return super()._block(count)  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def _plain(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header | None":
        """The header of a plain file; None if it is another one, or damaged."""
        kind, magic, size, total = buf[156:157], buf[257:262], buf[124:135], buf[148:154]
        is_plain = len(buf) == BLOCK and kind == b"0" and magic == b"ustar" and not buf[345]
        if not (is_plain and size.isdigit() and total.isdigit()):
            return None
        if int(total, 8) != sum(buf[:148]) + sum(buf[156:]) + 8 * ord(" "):
            return None
        name = bytes(buf[:100]).partition(b"\0")[0]
        header = cls(name.decode(encoding, errors))
        header.type, header.size = tarfile.REGTYPE, int(size, 8)
        return header


class _HeaderFile(io.FileIO):
    """A file that reads only headers and names, whatever size a header claims."""

    def __init__(self, path: Path):
        check_regular(path)
        super().__init__(path)
        self.path, self.size = path, os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            raise ShardError(f"{str(self.path)!r} is damaged, a size below 0: copy it again")
        if self.tell() + size > self.size + BLOCK:
            raise _cut_short(self.path, "the name of a file is missing")
        if size > MAX_TEXT_BYTES:
            raise ShardError(f"{str(self.path)!r} has a name of {size:,} bytes: write it again")
        return super().read(size)


# ---- patterns of shards: `photos-{000000..000007}.tar`, `photos-{a,b}.tar`, `*.tar`


MAX_NAMES = 100_000  # of shards that a pattern names


def names_by_pattern(pattern: str, existing: list[str]) -> list[str]:
    """The sorted names of a pattern: braces name all, wildcards match `existing` names."""
    names: set[str] = set()
    for each in _expand(pattern):
        wild = any(sign in each for sign in "*?[")
        names.update(filter(partial(fnmatchcase, pat=each), existing) if wild else [each])
    return sorted(names)


def _expand(pattern: str) -> list[str]:
    """The names of a pattern with {first..last} and {one,other}, at most MAX_NAMES."""
    pieces = re.split(r"\{([^{}]*)\}", pattern)  # the contents of braces have odd indices
    choices = [_words(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    if (count := math.prod(map(len, choices))) > MAX_NAMES:
        raise ValueError(f"{pattern!r} names {count:,} shards: use at most {MAX_NAMES:,}")
    return ["".join(words) for words in itertools.product(*choices)]


def _words(braces: str) -> list[str]:
    span = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", braces)
    if not span:
        return braces.split(",")
    first, last, digits = int(span[1]), int(span[2]), len(span[1])
    if not 0 <= last - first < MAX_NAMES:
        raise ValueError(f"{{{braces}}}: count up, to at most {MAX_NAMES:,} shards")
    return [f"{number:0{digits}}" for number in range(first, last + 1)]


INDEX = "index.json"
LABEL_SETS = re.compile(rb'"label_sets":\s*\[\s*\[')  # the field of an index, not empty
FORMAT: Literal["fullstride shards 1"] = "fullstride shards 1"
MAX_INDEX_BYTES = 2**30  # ten million samples
MAX_LABELS_PER_BYTE = 16  # of an index, where images share sets of labels
MAX_OPEN_SHARDS = 256  # in a process; systems allow 1024 open files or fewer


@dataclass(frozen=True)
class Index:
    """The shards of a folder and their classes."""

    classes: tuple[str, ...]
    channels: int  # 1: gray, 3: RGB
    mirror: bool
    shards: Mapping[str, Shard]  # by file name
    several_labels: bool = False  # whether images have any number of labels


@dataclass(frozen=True)
class ShardReader:
    """Maps an image's name to its bytes.

    Each process opens a shard when it first reads from it. A pickled reader has no open files.
    """

    folder: Path
    members: Mapping[str, tuple[str, Member]] = field(repr=False)  # name -> shard and image
    _open: dict[str, "_Descriptor"] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, name: str) -> bytes:
        shard, member = self.members[name]
        try:
            file = self._open.get(shard) or self._opened(shard)
            # pread has no file position, which threads and forked processes would share
            data = os.pread(file.number, member.size, member.offset)
        except OSError as error:
            raise UnreadableImage(name, f"{shard}: {error.strerror}") from error
        if len(data) < member.size:
            raise UnreadableImage(name, f"{shard} is cut short")
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardReader, (self.folder, self.members)

    def _opened(self, shard: str) -> "_Descriptor":
        while len(self._open) >= MAX_OPEN_SHARDS:
            self._open.pop(next(iter(self._open)), None)
        check_regular(self.folder / shard)
        file = self._open[shard] = _Descriptor(os.open(self.folder / shard, os.O_RDONLY))
        return file


class _Descriptor:
    """An open file, which is closed when the last thread that reads from it drops it."""

    def __init__(self, number: int):
        self.number = number

    def __del__(self, close=os.close) -> None:
        close(self.number)


def holds_shards(folder: Path) -> bool:
    """Whether a folder has shards with an index, or shards or an index and no subfolders."""
    names = _tar_names(folder)
    index = (folder / INDEX).is_file()
    if names and index:
        return True
    return bool(names or index) and not subfolders(folder)


def has_label_sets(folder: Path) -> bool:
    """Whether the index of the shards in a folder, if it has one, names several labels an image."""
    path = folder / INDEX
    if not (path.is_file() and _tar_names(folder)):
        return False
    return LABEL_SETS.search(read_regular(path, MAX_INDEX_BYTES)) is not None


def read_shards(folder: Path, pattern: str, kind: FileKind = IMAGES) -> Listing:
    """The images or videos of shards.

    The pattern "" names all shards of the folder, `photos-*.tar` all matching shards;
    `photos-{000000..000007}.tar` and `photos-{a,b}.tar` name shards that must all exist.

    A shard is for train, val (or valid, validation) or test if one of these words is in its name,
    separated by hyphens, underscores or dots.
    """
    index, shards = _open_shards(folder, pattern, kind=kind)
    names = list(shards)
    groups = _by_split(names)
    members = {
        split: [member for name in group for member in shards[name].members]
        for split, group in groups.items()
    }
    classes = index.classes if index else sorted_classes(str(m.label) for m in members["train"])
    several = index is not None and index.several_labels
    if not several:
        check_classes(repr(str(folder)), classes, "add shards with a second class")
    targets = {name: target for target, name in enumerate(classes)}
    labels = {member.label for each in members.values() for member in each}
    if not several and (unknown := sorted({*map(str, labels)} - targets.keys())):
        raise ValueError(
            f"{str(folder)!r} has the classes {quote_names(unknown)}, which the training images "
            "lack: remove them"
        )
    target_of = {label: _target(targets, label) for label in labels}
    splits = {
        split: [Sample(m.name, target_of[m.label], m.size) for m in members[split]]
        for split in ("train", "val", "test")
        if split in members
    }
    ignored: Counter[str] = Counter()
    for shard in shards.values():
        ignored.update(shard.ignored)
    reader, val_name = _reader(folder, shards), groups.get("val", [""])[0]
    listing = Listing(classes, splits, reader, val_name, ignored=dict(ignored.most_common()))
    if index:
        listing = replace(listing, channels=index.channels, mirror=index.mirror)
    return listing.at(folder, f"/{pattern}" if pattern else "")


def list_shards(folder: Path, pattern: str) -> ShardReader:
    """The images of all splits in the order of the shards, with or without labels.

    `folder` and `pattern` are as for `read_shards`.
    """
    return _reader(folder, _open_shards(folder, pattern, labelled=False)[1])


def _open_shards(
    folder: Path, pattern: str, labelled: bool = True, kind: FileKind = IMAGES
) -> tuple[Index | None, dict[str, Shard]]:
    """The index, if there is one, and the shards that a pattern names."""
    index = _read_index(folder / INDEX) if os.path.lexists(folder / INDEX) else None
    names = _matching_names(folder, pattern, index)
    if index is None:
        return None, {name: scan(folder / name, labelled=labelled, kind=kind) for name in names}
    for name in names:
        _check_size(folder / name, index.shards[name].size)
    return index, {name: index.shards[name] for name in names}


def _reader(folder: Path, shards: Mapping[str, Shard]) -> ShardReader:
    members = {each.name: (name, each) for name, shard in shards.items() for each in shard.members}
    return ShardReader(folder, members)


def _target(targets: Mapping[str, int], label: str | tuple[str, ...]) -> int | tuple[int, ...]:
    if isinstance(label, tuple):
        return tuple(sorted(targets[name] for name in label))
    return targets[label]


def _by_split(names: list[str]) -> dict[str, list[str]]:
    """The shards of "train" and, if there are any, of "val" and "test"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        words = re.split(r"[-_.]", name.lower())
        split = next((SPLITS[word] for word in words if word in SPLITS), "")
        groups.setdefault(split, []).append(name)
    if len(groups) == 1:  # a word that all names have says nothing
        return {"train": names}
    if "" in groups:
        raise ValueError(
            f"{groups[''][0]!r} does not say train, val or test as other shards do: rename it"
        )
    if "train" not in groups:
        raise ValueError(
            f"none of {quote_names(names)} is for training: add shards with 'train' in their names"
        )
    return groups


# ---- which shards


def _tar_names(folder: Path) -> list[str]:
    return [each.name for each in entries_of(folder) if each.name.lower().endswith(".tar")]


def _matching_names(folder: Path, pattern: str, index: Index | None) -> list[str]:
    existing = _tar_names(folder)
    if pattern in existing:
        names = [pattern]
    elif pattern:
        names = names_by_pattern(pattern, existing)
    else:
        names = sorted({*existing, *(index.shards if index else ())})
    if not names:
        content = f"it has {quote_names(existing)}" if existing else "it has no .tar files"
        raise ValueError(f"no shard {pattern!r} in {str(folder)!r}: {content}")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"{len(missing)} of {count_of(len(names), 'shard')} {verb_of(len(missing), 'are')} "
            f"missing in {str(folder)!r}: {quote_names(missing)}"
        )
    if index and (unknown := [name for name in names if name not in index.shards]):
        raise ValueError(
            f"{quote_names(unknown)} not in {str(folder / INDEX)!r}: keep them in another folder, "
            "or pack again"
        )
    return names


# ---- the index


@dataclass(frozen=True)
class _ShardEntry:
    bytes: Count
    # name, offset, size, and class or index in `label_sets`
    samples: tuple[tuple[str, Count, Count, Count], ...]


@dataclass(frozen=True)
class _IndexFile:
    """The content of `index.json`."""

    format: Literal["fullstride shards 1"]
    classes: tuple[str, ...]
    channels: Literal[1, 3]
    mirror: bool
    shards: Mapping[str, _ShardEntry]
    # the distinct sets of class indices of images with several labels
    label_sets: tuple[tuple[Count, ...], ...] = ()


def write_index(folder: Path, index: Index) -> None:
    targets = {name: target for target, name in enumerate(index.classes)}
    sets: dict[tuple[int, ...], int] = {}

    def number(label: str | tuple[str, ...]) -> int:
        target = _target(targets, label)
        return sets.setdefault(target, len(sets)) if isinstance(target, tuple) else target

    shards = {
        name: _ShardEntry(
            shard.size, tuple((m.name, m.offset, m.size, number(m.label)) for m in shard.members)
        )
        for name, shard in index.shards.items()
    }
    channels = 1 if index.channels == 1 else 3
    file = _IndexFile(FORMAT, index.classes, channels, index.mirror, shards, tuple(sets))
    (folder / INDEX).write_text(json.dumps(asdict(file)))


def _read_index(path: Path) -> Index:
    try:
        file = from_json(_IndexFile, read_json(path, most=MAX_INDEX_BYTES), INDEX)
        if not file.classes or len(set(file.classes)) < len(file.classes):
            raise ValueError("classes are missing or listed twice")
        for each in file.label_sets:
            if len({*each}) < len(each) or any(target >= len(file.classes) for target in each):
                shown = str(each[:9])
                raise ValueError(f"label_sets has {shown} of {len(file.classes)} classes")
        sets = (tuple(file.classes[target] for target in each) for each in file.label_sets)
        labels = tuple(sets) or file.classes
        names: set[str] = set()
        shards = {
            name: _read_entry(name, entry, labels, names) for name, entry in file.shards.items()
        }
        members = (member for shard in shards.values() for member in shard.members)
        count = sum(len(each.label) for each in members) if file.label_sets else 0
        if count > MAX_LABELS_PER_BYTE * path.stat().st_size:
            raise ValueError(f"it names {count:,} labels of {len(names):,} images")
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} is not what `fullstride data pack` writes ({error}): copy it again; "
            "without it class names are numbers"
        ) from None
    return Index(file.classes, file.channels, file.mirror, shards, bool(file.label_sets))


def _read_entry(
    shard: str, entry: _ShardEntry, labels: Sequence[str | tuple[str, ...]], names: set[str]
) -> Shard:
    """The samples of a shard; their names are added to `names`."""
    if Path(shard).name != shard or not shard.lower().endswith(".tar"):
        raise ValueError(f"{shard!r} is not a file name that ends in .tar")
    members = []
    for name, offset, size, target in entry.samples:
        if name in names:
            raise ValueError(f"{name!r} is listed twice")
        if offset + size > entry.bytes:
            raise ValueError(f"{name!r} ends behind its shard")
        if target >= len(labels):
            raise ValueError(f"{name!r} has class {target} of {len(labels)}")
        names.add(name)
        members.append(Member(name, labels[target], offset, size))
    return Shard(entry.bytes, members)


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size
    if size < expected:
        raise ValueError(
            f"{str(path)!r} is cut short, {expected - size:,} of {expected:,} bytes are missing: "
            "copy it again"
        )
    if size > expected:
        raise ValueError(
            f"{str(path)!r} has {size:,} bytes, {expected:,} in its index: copy both again"
        )
