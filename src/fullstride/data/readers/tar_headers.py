"""Which samples are in a tar file without an index? Its headers are read, and no image."""

import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fullstride.data.readers.file_kinds import IMAGES, FileKind
from fullstride.data.readers.unused import why_unused
from fullstride.storage import check_regular

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
        for name, *location in _files(file, path):
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
            f"have no label, the first is {unlabelled[0]!r}: add {unlabelled[0]}.cls, or 'label' "
            "to its .json"
        )
    if not members:
        raise ShardError(
            f"{str(path)!r} has no {kind.name}: give shards of {' '.join(kind.suffixes)} with a "
            ".cls each"
        )
    return Shard(file.size, members, dict(ignored))


def _key_and_suffix(name: str) -> tuple[str, str]:
    """webdataset's halves of a name: up to the first dot after the folders, and the rest."""
    folder, slash, file = name.rpartition("/")
    stem, dot, rest = file.partition(".")
    return folder + slash + stem, (dot + rest).lower()


def _label(descriptor: int, files: Mapping[str, tuple[int, int]]) -> str:
    """The class in .cls, or the label in .json; "" where neither has one."""
    texts = {}
    for suffix in TEXT_SUFFIXES:
        offset, size = files.get(suffix, (0, 0))
        data = os.pread(descriptor, size, offset) if size <= MAX_TEXT_BYTES else b""
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

    `tarfile` trusts sizes and ends at a damaged header without an error: both are checked here.
    """
    offset = 0
    try:
        with tarfile.open(
            fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape"
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
                    raise ShardError(
                        f"{str(path)!r} is damaged at byte {member.offset:,}, a size below 0: "
                        "copy it again"
                    )
                if end > file.size:
                    raise _cut_short(
                        path, f"{member.name!r} ends {end - file.size:,} bytes behind its end"
                    )
                if member.isreg():
                    yield member.name, member.offset_data, member.size
                offset = tar.offset
    except ShardError:
        raise
    except Exception:  # of a damaged header, tarfile raises almost anything
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


class _HeaderFile(io.FileIO):
    """A file of which only headers and names are read, whatever size a header claims."""

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
