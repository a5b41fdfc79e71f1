"""Which files may be replaced? Those that fullstride wrote, and of the same kind.

An `Output` says how an earlier file of its kind is recognised. Anything else at its path is refused
and left as it is, which `writing.atomic_write` checks for every file.
"""

import json
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fullstride.storage import open_regular, read_regular

GENERATOR = "fullstride"  # in the metadata of pages and plots
MAX_HEAD_BYTES = 4096  # in which that metadata is
MAX_JSON_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Output:
    """A kind of file, or of folder, that is written, and how an earlier one is recognised."""

    noun: str  # for errors
    suffix: str  # of the path, with its dot; "" for any
    is_ours: Callable[[Path], bool]  # whether that file or folder may be replaced
    files: tuple[str, ...] = ()  # patterns of the paths in a folder, which alone are removed


def has_keys(*keys: str) -> Callable[[Path], bool]:
    """Recognises JSON of an object with these keys, or of a list of them."""

    def is_ours(path: Path) -> bool:
        try:
            data = json.loads(read_regular(path, MAX_JSON_BYTES))
        except (FileNotFoundError, ValueError, RecursionError):
            return False
        if isinstance(data, list) and data:
            data = data[0]
        return isinstance(data, Mapping) and data.keys() >= set(keys)

    return is_ours


def begins_with(*marks: bytes) -> Callable[[Path], bool]:
    """Recognises a file that has all of these bytes among its first ones."""

    def is_ours(path: Path) -> bool:
        with open_regular(path) as file:
            head = file.read(MAX_HEAD_BYTES)
        return all(mark in head for mark in marks)

    return is_ours


def json_output(noun: str, *keys: str) -> Output:
    return Output(noun, ".json", has_keys(*keys))


PAGE = Output(
    "a page of fullstride",
    ".html",
    begins_with(b"<!DOCTYPE html>", f'<meta name="generator" content="{GENERATOR}">'.encode()),
)
PLOT = Output(
    "a plot of fullstride", ".png", begins_with(b"PNG\r\n", f"Software\0{GENERATOR}".encode())
)


def refuse_foreign(path: Path, output: Output) -> None:
    """Raise ValueError if something is at `path` that is not an earlier `output`."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(mode):
        if not output.files:
            raise ValueError(f"{path} is a folder: give a file")
        names = sorted(each.name for each in path.iterdir())
        if names and not output.is_ours(path):
            first = next((name for name in names if name not in output.files), names[0])
            raise ValueError(
                f"{path} is a folder with other files in it, such as {first}, and not "
                f"{output.noun}: give another path"
            )
    elif not stat.S_ISREG(mode):
        raise ValueError(f"{path} is no regular file: give another path")
    elif output.files:
        raise ValueError(f"{path} is a file: give a folder")
    elif path.stat().st_size and not output.is_ours(path):
        raise ValueError(f"{path} exists and is not {output.noun}: give another path, or move it")
