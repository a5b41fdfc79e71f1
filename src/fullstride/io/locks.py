"""Locks that one process holds, also where others are killed or run on other machines.

A lock is a file with the name of its holder, and the holder renews the time of the file. All
machines see the same files, and creating one is atomic on them.
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
from functools import cache
from pathlib import Path

from fullstride.io.records import from_json, to_json
from fullstride.io.writing import open_regular

HEARTBEAT_S = 10.0  # between two renewals
# After which a lock that was not renewed is taken over. File systems of a network show the times of
# files to other machines with a delay of up to a minute.
TAKEOVER_S = 90.0
MAX_BYTES = 4096  # of a lock
RUN_LOCK = ".run.lock"  # in the folder of a run, and of the trial that trains it
GONE = (errno.ENOENT, errno.ESTALE)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that has a lock."""

    host: str = ""  # for people
    process: int = 0
    machine: str = ""  # where the number of the process means something; "" if that is not known
    start: int = 0  # of the process: its number may be given again
    token: str = ""

    def __str__(self) -> str:
        return f"process {self.process} of {self.host}" if self.process else "another process"


class LockedError(ValueError):
    """Another process has the lock."""

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

    It is held by files `path`-1, `path`-2, ... A lock of a process of this machine that does not
    run any more is taken over at once, on Linux; any other one `TAKEOVER_S` after its last renewal.
    With `lends`, the body may hold it again: a trial has the lock of the run that it trains. New
    folders that the body leaves empty are removed.

    Raises `LockedError` where another process has it.
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
        with suppress(OSError):  # one has content
            for folder in new_folders:
                folder.rmdir()


def find_holder(path: Path) -> Holder | None:
    """The process that has the lock with the name `path`, if there is one."""
    return next((holder for each in _claims(path) if (holder := _holder_of(each))), None)


class Lock:
    """A lock that this process has, and renews."""

    def __init__(self, path: Path, text: str):
        self.path = path
        self.text = text
        self._released = threading.Event()
        threading.Thread(target=self._renew, daemon=True).start()

    def check(self) -> None:
        """Raise `LostLockError` if another process has taken it over."""
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
            with suppress(OSError):  # the next time; `check` tells whether it is lost
                os.utime(self.path)


LENT: dict[Path, Lock] = {}  # locks of this process that it may hold again


def _acquire(path: Path) -> Lock:
    """The number of a new file is one above those of killed processes.

    Of two processes that see the same files one creates it. One that saw older files sees in the
    end that there is another holder, and withdraws.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    old = _claims(path)
    if holder := next(filter(None, map(_holder_of, old)), None):
        raise LockedError(path, holder)
    own = path.with_name(f"{path.name}-{1 + max(map(_number, old), default=0)}")
    text = to_json(this_process())
    try:
        file = own.open("x")
    except FileExistsError:
        raise LockedError(path, _holder_of(own)) from None
    try:
        with file:
            file.write(text)
    except OSError as error:  # the disk is full, which a write says without the path
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


def _number(claim: Path) -> int:
    return int(claim.name.rpartition("-")[2])


def _holder_of(claim: Path) -> Holder | None:
    """The process that a file of a lock is of, if it runs as far as is known here."""
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
    """The time that a new file has. Clocks of machines differ, and files have the file server's."""
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


@cache
def machine() -> str:
    """One boot of one machine or container; "" where that is not known, as outside of Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_of(process: int) -> int | None:
    """The clock tick at which a process of this Linux began; None if it does not run any more."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
