"""How are files stored safely? Written whole or not at all; only regular files are opened."""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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


# ---- reading

NO_MEMORY = ("out of memory", "allocate memory", "ALLOC_FAILED", "bad_alloc")  # in errors


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out. Libraries raise errors of many classes for it."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return any(phrase in str(error) for phrase in NO_MEMORY)


def check_regular(path: Path) -> None:
    """Raise ValueError for a FIFO, device, socket, folder or loop of links.

    Reading one of these may never end. For libraries that open paths themselves; OSErrors of a
    missing file or of its permissions are passed on.
    """
    try:
        _check_mode(path, path.stat().st_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a loop of links, not a file") from None
        raise


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read bytes. Raises ValueError for anything else, as `check_regular`.

    The file that was opened is checked once more: another one may have got its name meanwhile.
    """
    check_regular(path)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        _check_mode(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a regular file. Raises ValueError for one with more than `limit` bytes.

    The bytes that are read are counted: the size that a file system states may be wrong.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path} has more than {limit:,} bytes, which no such file has")
    return content


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is {KINDS.get(stat.S_IFMT(mode), 'no file')}, not a file")
