"""Writes files whole or not at all, synced to the disk, and only over files of the same kind.

`atomic_write` is the one way in which files reach their paths.
"""

import ctypes
import errno
import json
import os
import platform
import re
import shutil
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

# Opening files safely: only regular files, and reading at most a given number of bytes.


KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# Phrases of out-of-memory errors; the last one is about libraries that could not be loaded.
NO_MEMORY = ("out of memory", "allocate memory", "ALLOC_FAILED", "bad_alloc", "map segment")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # also a quota or a file size limit


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
    """Memory ran out; the message tells users what would help."""


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out, for which libraries raise errors of many classes."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return any(phrase in str(error) for phrase in NO_MEMORY)


def lost_worker(error: BaseException) -> bool:
    """Whether a DataLoader worker was killed, which PyTorch says only in the message."""
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


EXPORTED_SUFFIXES = (".engine", ".mlpackage", ".onnx", ".pt2", ".pte", ".tflite", ".xml")
# Suffixes of files that hold a network or a recipe, here or in other software.
FILE_SUFFIXES = (".bin", ".ckpt", ".npz", ".pt", ".pth", ".safetensors", ".json")
FILE_SUFFIXES += EXPORTED_SUFFIXES


def looks_like_path(word: str) -> bool:
    """Whether a word that names nothing was probably meant as a path."""
    separators = [each for each in (os.sep, os.altsep) if each]
    return (
        word.startswith((".", "~"))
        or any(each in word for each in separators)
        or word.lower().endswith(FILE_SUFFIXES)
    )


def allow_open_files(count: int) -> None:
    """Let this process open `count` more files. Raises OSError where the limits are lower.

    The soft limit is raised, at most to the hard limit. A system without limits stays as it is.
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

    The opened file is checked once more: another file may have got its name meanwhile.
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
    """The bytes of a regular file. Raises ValueError if there are more than `limit`.

    The bytes read are counted, since a file system may state a wrong size. The stated size is read
    first: Python allocates all that a call may read, and the limit may be 1 GiB.
    """
    with open_regular(path) as file:
        stated = os.fstat(file.fileno()).st_size
        content = file.read(min(stated, limit) + 1)
        if stated < len(content) <= limit:
            content += file.read(limit + 1 - len(content))
    if len(content) > limit:
        raise ValueError(f"{path} has more than {limit:,} bytes, which no such file has")
    return content


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is {KINDS.get(stat.S_IFMT(mode), 'no file')}, not a file")


# A file may be replaced by a file of the same kind, if fullstride wrote it.
#
# An `Output` says how an earlier file of its kind is recognised. Anything else at its path is
# refused and left as it is, which `atomic_write` checks for every file.


GENERATOR = "fullstride"  # in the metadata of pages and plots
MAX_HEAD_BYTES = 4096  # the metadata is in these
MAX_JSON_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Output:
    """A kind of file or folder to write, and how an earlier one is recognised."""

    noun: str  # for errors
    suffix: str  # of the path, with its dot; "" for any
    is_ours: Callable[[Path], bool]  # whether an existing file or folder may be replaced
    files: tuple[str, ...] = ()  # patterns of paths in a folder; nothing else in it is removed


def has_keys(*keys: str) -> Callable[[Path], bool]:
    """Recognises a JSON object with these keys, or a list of such objects."""

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
    """Recognises a file whose first `MAX_HEAD_BYTES` contain all of `marks`."""

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
    """Raise ValueError if `path` exists and is not an earlier `output`."""
    if output.files and path.name in ("", ".."):  # . and / have no name either
        raise ValueError(f"{path} is no name of a folder: give one, such as {path / 'new'}")
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


# A temporary file of another machine, or from before a restart, is abandoned after this time.
MAX_AGE_S = 24 * 3600
SCRATCH = Output("a folder for a while", "", lambda path: False, ("*",))
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


def check_output(path: Path | None, output: Output) -> None:
    """Raise ValueError or PermissionError if `atomic_write` would refuse `path`; writes nothing.

    For the beginning of a command, before any slow work. Temporary files that killed processes
    left beside `path` are cleaned up. None stands for no output.
    """
    if path is None:
        return
    parent = next((each for each in path.parents if each.exists()), path)
    if not parent.is_dir():
        raise _file_for_folder(path, parent)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{parent} cannot be written to", str(path))
    if output.suffix and path.suffix.lower() != output.suffix and not path.is_dir():
        raise ValueError(f"{path} would be {output.noun}: give a name that ends in {output.suffix}")
    path = _resolved(path)
    recover_interrupted_write(path, output)
    refuse_foreign(path, output)


def check_page_or(path: Path | None, output: Output) -> bool:
    """`check_output` of a page if `path` has its suffix, else of `output`; whether it is a page."""
    is_page = path is not None and path.suffix.lower() == PAGE.suffix
    check_output(path, PAGE if is_page else output)
    return is_page


def _resolved(path: Path) -> Path:
    """Follow a link: the link stays, and its target is replaced."""
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():
        raise ValueError(f"{path} is a loop of links: give another path")
    return target


@contextmanager
def atomic_write(path: Path, output: Output) -> Iterator[Path]:
    """Yield a temporary path to write a file or a folder at; on success it replaces `path`.

    An earlier file or folder at `path` is there until the new one is complete and on the disk, and
    stays if the body raises. In a folder, only `output.files` are replaced, other files stay. Modes
    follow the umask. Parent folders are created, and removed again if the body raises.

    Raises ValueError for anything else at `path`, and if a parent folder cannot be created because
    a file has its name. An OSError names `path`, not the temporary path, also where a library
    raised another error because the disk was full.
    """
    path = _resolved(path)
    recover_interrupted_write(path, output)
    refuse_foreign(path, output)
    temporary, old = _hidden(path, "new"), _hidden(path, "old")
    with parent_folders(path):
        try:
            yield temporary
            _set_modes(temporary)
            _sync(temporary)
            refuse_foreign(path, output)
            _replace(temporary, path, old)
            _sync_one(path.parent)
            _discard(old, path, output)
        except BaseException as error:
            remove(temporary)
            recover_interrupted_write(path, output)
            cause = _disk_error(error, path)
            if cause is not None:
                raise cause from None
            raise


def user_cache() -> Path:
    """The cache folder that all runs of a user share; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fullstride"


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """A temporary folder next to `path`, for candidates of its content.

    Folders that killed processes left are removed first.
    """
    place = path.with_name(f"{path.name}.scratch")
    recover_interrupted_write(place, SCRATCH)
    folder = _hidden(place, "new")
    with parent_folders(folder):
        folder.mkdir()
        try:
            yield folder
        finally:
            remove(folder)


@contextmanager
def parent_folders(path: Path) -> Iterator[None]:
    """Create the parent folders of `path`, and remove the new ones if the body raises.

    Raises ValueError where one of them is a file.
    """
    missing = [each for each in path.parents if not each.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        files = (each for each in path.parents if each.exists() and not each.is_dir())
        raise _file_for_folder(path, next(files, path.parent)) from None
    try:
        yield
    except BaseException:
        for each in missing:  # the innermost first
            with suppress(OSError):  # not empty
                each.rmdir()
        raise


def _file_for_folder(path: Path, file: Path) -> ValueError:
    return ValueError(
        f"{path} cannot be written, because {file} is a file: give a path in a folder"
    )


def _replace(temporary: Path, path: Path, old: Path) -> None:
    """Rename `temporary` to `path`. An earlier folder gets the name `old`.

    The complete new folder is called `old` before it is exchanged with the earlier one, so that
    after a kill at any point the folder with that name is complete, and `_discard` handles it.
    """
    if not path.is_dir():
        temporary.replace(path)
        return
    temporary.rename(old)
    if not exchange(old, path):  # then `path` is missing for a moment
        old.rename(temporary)
        path.rename(old)
        temporary.rename(path)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders in one step. False where the system cannot."""
    function = _renameat2()
    if function is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if function(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):  # file systems differ
        return False
    raise OSError(code, os.strerror(code), str(other))


@cache
def _renameat2() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def recover_interrupted_write(path: Path, output: Output) -> None:
    """Clean up after processes that died in `atomic_write`.

    The earlier content is restored if nothing is at `path`; temporary files are removed unless a
    process may still be writing them.
    """
    names = re.compile(re.escape(f".{path.name}.") + r"(\d+)(?:-([0-9a-f]{8}))?\.(new|old)")
    if not path.parent.is_dir():
        return
    for each in sorted(path.parent.iterdir()):
        match = names.fullmatch(each.name)
        if match is None:
            continue
        process, host, kind = match.groups()
        if kind == "old" and not os.path.lexists(path):
            each.rename(path)
        elif _may_be_written(each, int(process), host):
            continue
        elif kind == "new":
            remove(each)
        else:
            _discard(each, path, output)


def _may_be_written(temporary: Path, process: int, host: str | None) -> bool:
    """Whether the process that created a temporary file may still run."""
    if host in (None, _host()):
        return _runs(process)
    with suppress(FileNotFoundError):  # it was renamed meanwhile
        return time.time() - temporary.lstat().st_mtime < MAX_AGE_S
    return True


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{_host()}.{kind}")


def _host() -> str:
    """Identifies this machine or container, outside of which its process numbers mean nothing."""
    return f"{zlib.crc32(f'{platform.node()} {machine()}'.encode()):08x}"


@cache
def machine() -> str:
    """Identifies one boot of one machine or container; "" where unknown, as outside of Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _runs(process: int) -> bool:
    """Whether another process has this number."""
    if process == os.getpid() or os.name == "nt":  # on Windows os.kill would end it
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _discard(old: Path, path: Path, output: Output) -> None:
    """Remove `output.files` from the folder `old`, and move other files to its successor `path`."""
    if old.is_symlink() or not old.is_dir():
        old.unlink(missing_ok=True)
        return
    for each in sorted(old.rglob("*"), reverse=True):  # the content before its folder
        place = each.relative_to(old)
        if each.is_dir() and not each.is_symlink():
            with suppress(OSError):  # not empty
                each.rmdir()
        elif any(
            len(place.parts) == len(Path(pattern).parts) and place.match(pattern)
            for pattern in output.files
        ):
            each.unlink()
        elif not os.path.lexists(path / place):
            (path / place).parent.mkdir(parents=True, exist_ok=True)
            each.rename(path / place)
    with suppress(OSError):
        old.rmdir()


def _set_modes(path: Path) -> None:
    """Add the permissions that the umask allows: some libraries write for their user alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    for each in _files_and_folders(path):
        mode = each.stat().st_mode
        usual = (0o777 if stat.S_ISDIR(mode) else 0o666) & ~mask
        if mode & usual != usual:
            each.chmod(stat.S_IMODE(mode) | usual)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder with its content, is on the disk."""
    for each in _files_and_folders(path):
        _sync_one(each)


def _sync_one(path: Path) -> None:
    folder = path.is_dir()
    if folder and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not folder or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems differ
            raise
    finally:
        os.close(descriptor)


def _files_and_folders(path: Path) -> list[Path]:
    return [*path.rglob("*"), path] if path.is_dir() else [path]


def _disk_error(error: BaseException, path: Path) -> OSError | None:
    """The OSError about `path` that caused `error`; None if there is none."""
    hidden = str(path.with_name(f".{path.name}."))
    if isinstance(error, OSError):
        named = [str(name) for name in (error.filename, error.filename2) if name is not None]
        ours = any(name.startswith(hidden) for name in named)
        if error.errno and (ours or (error.errno in DISK_FULL and not named)):
            return OSError(error.errno, os.strerror(error.errno), str(path))
        return None
    if not isinstance(error, Exception):
        return None
    cause: BaseException | None = error
    while cause is not None:
        code = cause.errno if isinstance(cause, OSError) else _code_in(str(cause))
        if code in DISK_FULL:
            return OSError(code, os.strerror(code), str(path))
        cause = cause.__cause__ or cause.__context__
    if shutil.disk_usage(path.parent).free < 2**20:  # some libraries say only: a stream failed
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return None


def _code_in(message: str) -> int | None:
    """The system's error number in the message of a library written in Rust."""
    match = re.search(r"\(os error (\d+)\)", message)
    return int(match[1]) if match else None


def cores() -> int:
    """The cores that this process may use. A container's limit on CPU time is not visible."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
