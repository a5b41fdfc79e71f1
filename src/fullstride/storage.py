"""How are files stored safely? They are written whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write a file or a folder at; on success it replaces `path`.

    An earlier file or folder at `path` stays until the new one is complete, and stays for good if
    the body raises. A file does not replace a folder. Raises ValueError where a parent folder
    cannot be created because a file has its name. An OSError names `path`, not the temporary path.
    """
    make_parent_folders(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    hidden = {str(temporary), str(old)}
    remove(temporary)
    try:
        yield temporary
        if path.is_dir() and not temporary.is_dir():
            raise IsADirectoryError(
                errno.EISDIR, "a folder stands where the file should go", str(path)
            )
        if path.is_dir():
            remove(old)
            path.rename(old)  # a folder cannot be renamed over a folder with files
        temporary.rename(path)
    except BaseException as error:
        remove(temporary)
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


def make_parent_folders(path: Path) -> None:
    """Create the parent folders of `path`. Raises ValueError where one of them is a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(
            (each for each in path.parents if each.exists() and not each.is_dir()), path.parent
        )
        raise ValueError(
            f"{path} cannot be written, because {file} is a file: give a path in a folder"
        ) from None


def recover_interrupted_write(path: Path) -> None:
    """Clean up after a process that died in `atomic_write`.

    The earlier content is restored if nothing is at `path`; temporary files are removed.
    """
    for old in path.parent.glob(f".{path.name}.*.old"):
        if path.exists():
            remove(old)
        else:
            old.rename(path)
    for temporary in path.parent.glob(f".{path.name}.*.new"):
        remove(temporary)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
