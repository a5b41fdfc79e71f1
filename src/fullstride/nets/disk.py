"""How does a file come to be whole or not at all? It is written beside its place and then renamed into it."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives the path to write a file or a folder at; on success it takes the place of `path`, else it is removed.

    What stood at `path` before stays until the new one is complete. A file does not replace a folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    remove(beside)
    try:
        yield beside
        if path.is_dir() and not beside.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a folder stands where the file should go", str(path))
        if path.is_dir():
            remove(old)
            path.rename(old)  # a folder cannot be renamed over a full one
        beside.rename(path)
    except BaseException:
        remove(beside)
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    remove(old)


def recover(path: Path) -> None:
    """After a process died in `replacing`: put back what stood at `path` if nothing does, remove what is left."""
    for old in path.parent.glob(f".{path.name}.*.old"):
        if path.exists():
            remove(old)
        else:
            old.rename(path)
    for beside in path.parent.glob(f".{path.name}.*.new"):
        remove(beside)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
