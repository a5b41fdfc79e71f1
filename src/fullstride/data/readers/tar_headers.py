"""Which samples does a tar file without an index hold? Its headers are read once, and no picture."""

import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fullstride.data.readers.folder import SUFFIXES

BLOCK = 512  # bytes; headers and data of a tar file begin at multiples of it
NOTE = 2**20  # bytes; labels and long names above this are no labels and no names
PAX_LENGTH = re.compile(rb"(\d{1,8}) ")
DATALESS = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)


class Member(NamedTuple):
    """A picture in a shard."""

    name: str
    label: str  # the class name
    offset: int  # bytes from the shard's start
    size: int  # bytes


class Shard(NamedTuple):
    size: int  # bytes of the whole file
    members: list[Member]


def scan(path: Path) -> Shard:
    """What the headers of a shard tell; the pictures stay unread."""
    samples: dict[
        str, dict[str, tuple[int, int]]
    ] = {}  # by key: the places of its files, by suffix
    number = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(number).st_size
        for name, offset, length in _files(path, number, size):
            key, suffix = _key(name)
            if suffix in (*SUFFIXES, ".cls", ".json"):
                files = samples.setdefault(key, {})
                if suffix in files:
                    raise ValueError(f"{str(path)!r} has {name!r} twice: keep one")
                files[suffix] = offset, length
        members, unlabelled = [], []
        for key, files in samples.items():
            pictures = [suffix for suffix in files if suffix in SUFFIXES]
            if len(pictures) > 1:
                raise ValueError(
                    f"{str(path)!r} has two pictures for {key!r}, {' and '.join(pictures)}: keep one"
                )
            if pictures:
                label = _label(number, files)
                if label:
                    members.append(
                        Member(f"{path.name}/{key}{pictures[0]}", label, *files[pictures[0]])
                    )
                else:
                    unlabelled.append(key)
    finally:
        os.close(number)
    if unlabelled:
        raise ValueError(
            f"{len(unlabelled)} of {len(unlabelled) + len(members)} pictures in {str(path)!r} have no label, the first "
            f"is {unlabelled[0]!r}: add {unlabelled[0]}.cls, or 'label' to its .json"
        )
    if not members:
        raise ValueError(
            f"{str(path)!r} has no pictures: give shards of {' '.join(SUFFIXES)} with .cls beside them"
        )
    return Shard(size, members)


def _key(name: str) -> tuple[str, str]:
    """webdataset's halves of a name: up to the first dot after the folders, and the rest."""
    folder, slash, file = name.rpartition("/")
    stem, dot, rest = file.partition(".")
    return folder + slash + stem, (dot + rest).lower()


def _label(number: int, files: Mapping[str, tuple[int, int]]) -> str:
    """The class that .cls or the label in .json names; empty where neither does."""
    texts = {}
    for suffix in (".cls", ".json"):
        offset, length = files.get(suffix, (0, 0))
        texts[suffix] = (
            os.pread(number, length, offset).decode("utf-8", "replace").strip()
            if length <= NOTE
            else ""
        )
    if texts[".cls"] or not texts[".json"]:
        return texts[".cls"]
    try:
        label = json.loads(texts[".json"])["label"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return str(label) if isinstance(label, str | int) and not isinstance(label, bool) else ""


def _files(path: Path, number: int, total: int) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each plain file in a tar of `total` bytes. Links, devices and folders are passed over.

    Own steps from header to header, because a declared size must never lead backwards or behind the end.
    """
    at, told = 0, {}
    while len(block := os.pread(number, BLOCK, at)) == BLOCK:
        if not any(block):
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise ValueError(
                f"{str(path)!r} is damaged at byte {at:,}, or no plain tar: give an uncompressed one"
            ) from None
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise ValueError(
                f"{str(path)!r} stores {header.name!r} with holes: write it without --sparse"
            )
        start, size = (
            at + BLOCK,
            0 if header.type in DATALESS else int(told.get("size", header.size)),
        )
        if size < 0:
            raise ValueError(
                f"{str(path)!r} is damaged at byte {at:,}, a size below 0: copy it again"
            )
        if start + size > total:
            raise cut_short(
                path, f"{header.name!r} ends {start + size - total:,} bytes behind its end"
            )
        at = start + -(-size // BLOCK) * BLOCK
        if header.type in (
            tarfile.GNUTYPE_LONGNAME,
            tarfile.XHDTYPE,
        ):  # tells more of the file behind it
            if size > NOTE:
                raise ValueError(f"{str(path)!r} has a name of {size:,} bytes: write it again")
            data = os.pread(number, size, start)
            told = {
                **told,
                **(_pax(data) if header.type == tarfile.XHDTYPE else {"path": _text(data)}),
            }
        elif header.type not in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            if header.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                yield told.get("path", header.name), start, size
            told = {}
    raise cut_short(path, "the mark of its end is missing")


def cut_short(path: Path, why: str) -> ValueError:
    return ValueError(f"{str(path)!r} is cut short, {why}: copy it again")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "surrogateescape")


def _pax(data: bytes) -> dict[str, str]:
    """The path and the size of records such as `30 path=...`, each with its own length first and a line break last."""
    told, at = {}, 0
    while match := PAX_LENGTH.match(data, at):
        end = at + int(match[1])
        if end <= match.end():
            break
        key, _, value = data[match.end() : end - 1].partition(b"=")
        if key == b"path" or (key == b"size" and value.isdigit() and len(value) < 20):
            told[key.decode()] = _text(value)
        at = end
    return told
