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

    What stood at `path` before stays until the new one is complete. A file does not replace a folder. Raises ValueError
    where no folder can be made for `path`, because a file stands there; an OSError names `path`.
    """
    make_place(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    hidden = {str(beside), str(old)}
    remove(beside)
    try:
        yield beside
        if path.is_dir() and not beside.is_dir():
            raise IsADirectoryError(
                errno.EISDIR, "a folder stands where the file should go", str(path)
            )
        if path.is_dir():
            remove(old)
            path.rename(old)  # a folder cannot be renamed over a full one
        beside.rename(path)
    except BaseException as error:
        remove(beside)
        if old.exists() and not path.exists():
            old.rename(path)
        if (
            isinstance(error, OSError)
            and error.errno
            and {str(error.filename), str(error.filename2)} & hidden
        ):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    remove(old)


def make_place(path: Path) -> None:
    """The folders that `path` is to stand in. Raises ValueError where one of them is a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(
            (each for each in path.parents if each.exists() and not each.is_dir()), path.parent
        )
        raise ValueError(
            f"{path} cannot be written, because {file} is a file: give a place in a folder"
        ) from None


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
