"""Which model and which images or videos do the words of a command line name?"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from fullstride import tasks
from fullstride.data.readers.file_kinds import IMAGES, FileKind
from fullstride.data.readers.folder import find_files
from fullstride.data.readers.unused import count_unused, first_reason
from fullstride.data.readers.videos import frames_size
from fullstride.deploy.exported import ExportedModel
from fullstride.deploy.formats import is_exported_path, open_file
from fullstride.nets.bundle import Bundle
from fullstride.nets.load_options import BY_DEFAULT, LoadOptions


class ImagePaths(NamedTuple):
    paths: list[Path]
    ignored: Mapping[str, int]  # number of other files in the folders, by reason


def open_model(
    word: str, *, trust: bool = False, options: LoadOptions = BY_DEFAULT
) -> Bundle | ExportedModel:
    """An exported file, or the bundle of a run, a file of weights or a name with released weights.

    Programs (formats pt2 and aoti) are opened with `trust` only. Raises ValueError.
    """
    if not is_exported_path(word):
        return tasks.load(word, options=options)
    if options != BY_DEFAULT:
        changed = [field.name for field in fields(options) if differs(options, field.name)]
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise ValueError(f"{flags}: {word} is an exported file, which has its own: leave it out")
    return open_file(word, trust=trust)


def differs(options: LoadOptions, name: str) -> bool:
    return getattr(options, name) != getattr(BY_DEFAULT, name)


def find_images(
    words: Sequence[str], listed: Iterable[str] | None = None, kind: FileKind = IMAGES
) -> ImagePaths:
    """Files, those in folders in sorted order, and for - the paths in the lines of `listed`.

    Of videos, a folder of frames is one itself. `listed` is standard input by default. Raises
    ValueError if there are none.
    """
    paths, ignored = [], Counter()
    for word in words:
        path = Path(word)
        if word == "-":
            lines = sys.stdin if listed is None else listed
            paths += [Path(line.rstrip("\n")) for line in lines if line.strip()]
        elif path.is_dir() and not (kind.frames and frames_size(path)):
            inside = [name for name, _ in find_files(path, kind)]
            ignored.update(count_unused(path, {*inside}, kind))
            paths += [path / name for name in inside]
        else:
            paths.append(path)
    if not paths:
        where = f" in {', '.join(words)}" if words else ""
        raise ValueError(
            f"no {kind.name}{where}{first_reason(ignored)}: name files or folders of "
            f"{' '.join(kind.suffixes)} after the run"
        )
    return ImagePaths(paths, dict(ignored))
