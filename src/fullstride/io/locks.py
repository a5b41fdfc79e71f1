"""Locks that one process holds, even if processes are killed or run on several machines.

A lock is a file that names its holder, and the holder renews the time of the file. All machines
see the same files, and creating a file is atomic.
"""

import errno
import os
import platform
import re
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fullstride.io.records import from_json, to_json
from fullstride.io.writing import machine, open_regular

HEARTBEAT_S = 10.0  # between two renewals
# A lock that was not renewed for this long is taken over. Network file systems show the times of
# files to other machines with a delay of up to a minute.
TAKEOVER_S = 90.0
MAX_BYTES = 4096  # of a lock file
RUN_LOCK = ".run.lock"  # in the folder of a run, and of the trial that trains it
GONE = (errno.ENOENT, errno.ESTALE)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lock."""

    host: str = ""  # for people
    process: int = 0
    machine: str = ""  # on which the process number is valid; "" if unknown
    start: int = 0  # of the process: its number may be reused
    token: str = ""

    def __str__(self) -> str:
        return f"process {self.process} of {self.host}" if self.process else "another process"


class LockedError(ValueError):
    """Another process holds the lock."""

    def __init__(self, path: Path, holder: Holder | None):
        here = holder is not None and holder.machine and holder.machine == machine()
        later = "" if here else f"; if it was killed, its lock ends {TAKEOVER_S:g} s later"
        super().__init__(
            f"{holder or 'another process'} works in {path.parent}: wait until it ends, or end it"
            f"{later}"
        )


class LostLockError(OSError):
    """Another process has taken the lock over, because this one did not renew it in time."""


@contextmanager
def hold(path: Path, *, lends: bool = False) -> Iterator["Lock"]:
    """Hold the lock with the name `path` while the body runs.

    The lock is one of the files `path`-1, `path`-2, ... On Linux, the lock of a dead process of
    this machine is taken over at once; any other lock `TAKEOVER_S` after its last renewal. With
    `lends`, the body may hold the lock again: a trial has the lock of the run that it trains. New
    folders that the body leaves empty are removed.

    Raises `LockedError` if another process holds the lock.
    """
    place = path.absolute()
    if place in LENT:
        yield LENT[place]
        return
    new_folders = [folder for folder in place.parents if not folder.exists()]
    lock = _acquire(path)
    if lends:
        LENT[place] = lock
    try:
        yield lock
    finally:
        LENT.pop(place, None)
        lock.release()
        with suppress(OSError):  # not empty
            for folder in new_folders:
                folder.rmdir()


def find_holder(path: Path) -> Holder | None:
    """The process that holds the lock with the name `path`, if any."""
    return next((holder for each in _claims(path) if (holder := _holder_of(each))), None)


class Lock:
    """A lock that this process holds and renews."""

    def __init__(self, path: Path, text: str):
        self.path = path
        self.text = text
        self._released = threading.Event()
        threading.Thread(target=self._renew, daemon=True).start()

    def check(self) -> None:
        """Raise `LostLockError` if another process has taken the lock over."""
        if _read(self.path)[0] != self.text:
            raise LostLockError(
                f"another process goes on in {self.path.parent}, because this one did not answer "
                f"for {TAKEOVER_S:g} s"
            )

    def release(self) -> None:
        self._released.set()
        if _read(self.path)[0] == self.text:
            self.path.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            with suppress(OSError):  # `check` tells whether the lock is lost
                os.utime(self.path)


LENT: dict[Path, Lock] = {}  # locks that this process may hold again


def _acquire(path: Path) -> Lock:
    """Create a lock file, numbered one above the files of killed processes.

    If two processes see the same files, one of them creates the new file. A process that saw
    outdated files finds the other holder at the end, and withdraws.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    old = _claims(path)
    if holder := next(filter(None, map(_holder_of, old)), None):
        raise LockedError(path, holder)
    number = 1 + max((int(each.name.rpartition("-")[2]) for each in old), default=0)
    own = path.with_name(f"{path.name}-{number}")
    text = to_json(this_process())
    try:
        file = own.open("x")
    except FileExistsError:
        raise LockedError(path, _holder_of(own)) from None
    try:
        with file:
            file.write(text)
    except OSError as error:  # a full disk, for example, for which a write names no path
        own.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(own)) from None
    others = [each for each in _claims(path) if each != own]
    if holder := next(filter(None, map(_holder_of, others)), None):
        own.unlink(missing_ok=True)
        raise LockedError(path, holder)
    for each in others:
        each.unlink(missing_ok=True)
    return Lock(own, text)


def _claims(path: Path) -> list[Path]:
    names = re.compile(re.escape(path.name) + r"-\d+")
    if not path.parent.is_dir():
        return []
    return [each for each in path.parent.iterdir() if names.fullmatch(each.name)]


def _holder_of(claim: Path) -> Holder | None:
    """The holder that a lock file names; None if it has ended or stopped renewing the file."""
    text, changed_s = _read(claim)
    if changed_s is None:
        return None
    try:
        holder = from_json(Holder, text, str(claim))
    except ValueError:  # it is being written, or its process was killed while it wrote
        holder = Holder()
    if holder.machine and holder.machine == machine():
        return holder if _start_of(holder.process) == holder.start else None
    return holder if _time_of_files_s(claim.parent) - changed_s < TAKEOVER_S else None


def _read(claim: Path) -> tuple[str, float | None]:
    """The content of a file and the time of its last change; no time if there is no file."""
    try:
        with open_regular(claim) as file:
            return file.read(MAX_BYTES).decode(errors="replace"), os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno in GONE:
            return "", None
        raise


def _time_of_files_s(folder: Path) -> float:
    """The file server's present time, from a new file: the clocks of machines differ."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def this_process() -> Holder:
    process = os.getpid()
    return Holder(
        host=platform.node(),
        process=process,
        machine=machine(),
        start=_start_of(process) or 0,
        token=uuid.uuid4().hex,
    )


def _start_of(process: int) -> int | None:
    """The clock tick at which a process of this Linux began; None if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
