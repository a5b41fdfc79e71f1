"""Which model and which images do the words of a command line name?"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from fullstride import tasks
from fullstride.data.readers.folder import SUFFIXES
from fullstride.deploy.exported import ExportedModel
from fullstride.deploy.formats import is_exported_path, open_file
from fullstride.nets.bundle import Bundle


def open_model(word: str, *, trust: bool = False) -> Bundle | ExportedModel:
    """An exported file, or the bundle of a run, a file of weights or a name with released weights.

    Programs (formats pt2 and aoti) are opened with `trust` only. Raises ValueError.
    """
    return open_file(word, trust=trust) if is_exported_path(word) else tasks.load(word)


def find_images(words: Sequence[str], listed: Iterable[str] | None = None) -> list[Path]:
    """Files, those in folders in sorted order, and for - the paths in the lines of `listed`.

    `listed` is standard input by default. Raises ValueError if there are none.
    """
    paths = []
    for word in words:
        path = Path(word)
        if word == "-":
            lines = sys.stdin if listed is None else listed
            paths += [Path(line.rstrip("\n")) for line in lines if line.strip()]
        elif path.is_dir():
            paths += sorted(each for each in path.rglob("*") if each.suffix.lower() in SUFFIXES)
        else:
            paths.append(path)
    if not paths:
        where = f" in {', '.join(words)}" if words else ""
        raise ValueError(
            f"no pictures{where}: name files or folders of {' '.join(SUFFIXES)} after the run"
        )
    return paths
