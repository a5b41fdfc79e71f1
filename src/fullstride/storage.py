"""How are files opened safely? Only regular ones, and no more of them than a limit is read."""

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# Words of errors where memory ran out; the last ones are of libraries that could not be loaded.
NO_MEMORY = ("out of memory", "allocate memory", "ALLOC_FAILED", "bad_alloc", "map segment")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # with a quota or a limit of files too


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def bytes_of(path: Path) -> int:
    """The size of a file, or of all files in a folder; 0 if there is none."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(each.stat().st_size for each in files if each.is_file())


class OutOfMemoryError(MemoryError):
    """Memory ran out, and the message is for users: it says what would help."""


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out. Libraries raise errors of many classes for it."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return any(phrase in str(error) for phrase in NO_MEMORY)


def lost_worker(error: BaseException) -> bool:
    """Whether a process that decodes images was killed, as PyTorch says it in words alone."""
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


# Of files that hold a network or a recipe in some form, here and elsewhere.
FILE_SUFFIXES = (
    *(".bin", ".ckpt", ".npz", ".pt", ".pth", ".safetensors"),
    *(".engine", ".onnx", ".pt2", ".xml", ".json"),
)


def looks_like_path(word: str) -> bool:
    """Whether a word that names nothing was meant to be a path, which does not exist then."""
    separators = [each for each in (os.sep, os.altsep) if each]
    return (
        word.startswith((".", "~"))
        or any(each in word for each in separators)
        or word.lower().endswith(FILE_SUFFIXES)
    )


def allow_open_files(count: int) -> None:
    """Let this process open `count` more files. Raises OSError where the limits are lower.

    The soft limit is raised as far as the hard one. A system without limits is left as it is.
    """
    try:
        import resource

        in_use = len(list(Path("/proc/self/fd").iterdir()))
    except (ImportError, FileNotFoundError):  # not Linux
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or in_use + count <= soft:
        return
    if hard != resource.RLIM_INFINITY and in_use + count > hard:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + count, hard))


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
