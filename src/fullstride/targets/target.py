"""Times exported files on another machine: over SSH, or by any command that runs Python there.

A target is written as ssh://[USER@]HOST[:PORT][/PATH/OF/PYTHON], or as a command, either a prefix
for commands there, such as "docker exec -i box", or a Python, such as
"docker exec -i box /venv/bin/python".
"""

import atexit
import base64
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from fullstride.io.console import count_of
from fullstride.io.records import Positive, Record, from_json
from fullstride.io.writing import user_cache
from fullstride.measure.budget import HERE
from fullstride.measure.environment import Environment, version
from fullstride.measure.protocols import MEASUREMENTS, Measurement, Protocol, spread
from fullstride.targets import runner, sessions

# Reads the text of the runner from standard input, before the requests.
BOOT = "import sys;i=sys.stdin.buffer;exec(compile(i.read(int(i.readline())),'runner','exec'))"
# Keys are checked as by the user's ssh, which must not prompt, and must notice a lost connection.
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
SSH += ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
PYTHON = "python3"
PART_BYTES = 2**19  # of a file per request
MAX_ANSWER_BYTES = 2**25
MAX_GREETING_BYTES = 2**16  # printed by a login before the first answer
HELLO_S = 60.0  # for an answer: a board imports NumPy and runtimes from a slow card
FILE_S = 180.0  # to open a file, and for slow calls, beside the protocol's seconds
GRACE_S = 10.0  # after the runner's own limit
PAUSES_S = (0.5, 2.0, 5.0, 10.0)  # before each attempt to connect again
SLOWER = 0.9  # fraction of an earlier clock below which a machine is held back
Milliseconds = Positive
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The properties that times depend on, which must not change between measurements."""

    processor: str
    machine: str  # architecture, such as aarch64
    cores: int
    runtimes: dict[str, str]  # format -> version


@dataclass(frozen=True, kw_only=True)
class State:
    """The state that changes under load, with None for unknown values."""

    governor: str | None
    clock_mhz: float | None
    clock_max_mhz: float | None
    temperature_c: float | None
    load: float | None

    def __str__(self) -> str:
        parts = [f"governor {self.governor}"] if self.governor else []
        if self.clock_mhz and self.clock_max_mhz:
            parts.append(f"{self.clock_mhz:,.0f} of {self.clock_max_mhz:,.0f} MHz")
        parts += [f"{self.temperature_c:.0f} °C"] if self.temperature_c else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Description:
    """The runner's description of the machine and its software."""

    machine: Machine
    state: State
    os: str
    python: str
    numpy: str
    missing: dict[str, str]  # format -> why its runtime cannot be imported
    free_mib: int


@dataclass(frozen=True, kw_only=True)
class TimedFile:
    """An exported file, with the inputs of a call."""

    name: str  # unique among the files of a measurement
    path: Path  # of a file, or of a folder of files
    format: str
    precision: str
    shape: tuple[int, ...]
    dtype: str

    def request(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in ("format", "precision", "dtype")}
        return {"name": self.key, "shape": [*self.shape], **parts}

    @cached_property
    def key(self) -> str:
        """The file's name on the target, a hash of its content."""
        digest = hashlib.sha256()
        for path in self.paths():
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()[:16] + self.path.suffix

    def paths(self) -> list[Path]:
        return sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of every call, in rounds of equal numbers of calls, with the conditions."""

    ms: dict[str, tuple[Milliseconds, ...]]  # by file name
    environment: Environment


@dataclass(frozen=True)
class Outputs:
    """A file's outputs, as base64 of little-endian float32."""

    shape: tuple[int, ...]
    data: str


@cache
def connect(where: str) -> "Target":
    """This process's only connection to a machine, which ends with the process."""
    target = Target(where)
    atexit.register(target.close)
    return target


class LostConnectionError(ConnectionError):
    """The connecting process has ended, and may be started again."""


class Target:
    """Another machine, connected when needed, and connected again after a failure.

    Every method raises ConnectionError, in one line, if the machine cannot be reached, is not the
    same machine as before, or gives an answer that the runner would not, and ValueError if the
    machine cannot serve the request, such as to open a file.
    """

    def __init__(self, where: str):
        self.where, self.command = where, command_of(where)
        self.description: Description | None = None  # from the first connection
        self.process: subprocess.Popen[bytes] | None = None
        self.sent: set[str] = set()  # names of files on the target
        self.errors: Any = None  # a file with the process's standard error

    @property
    def name(self) -> str:
        """A name for files, such as pi@raspberrypi for ssh://pi@raspberrypi."""
        return re.sub(r"[^\w.@=-]+", "-", self.where.removeprefix("ssh://"))[:100].strip("-.")

    def __enter__(self) -> "Target":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> Description:
        """Describe the machine; connects if there is no connection."""
        if self.description is None:
            self._connect()
        assert self.description is not None
        return self.description

    @property
    def environment(self) -> Environment:
        """The environment with all cores, at the first connection."""
        there = self.describe()
        return environment_of(there, there.state, there.state, None)

    def noise(self, rounds: int = 20, round_s: float = 0.2) -> float:
        """(p90 - p10) / median over rounds of one computation; above 0.05 the machine is busy."""
        how = {"rounds": rounds, "round_s": round_s, "warmup_s": 0.5}
        answer = self._again(lambda: self._ask("noise", FILE_S, **how))
        times = self._read_answer(dict[str, tuple[Milliseconds, ...]], answer.get("ms"))
        (samples,) = times.values()
        return spread([float(np.median(part)) for part in np.array_split(samples, rounds)])

    def run(
        self,
        file: TimedFile,
        images: np.ndarray,
        threads: int | None = None,
        rows: int | None = None,
    ) -> np.ndarray:
        """Run a batch on the target; return float32 outputs of its first `rows`, None for all."""
        inputs = np.ascontiguousarray(images, np.dtype(file.dtype).newbyteorder("<"))
        how = {"file": file.request(), "threads": threads, "shape": inputs.shape, "rows": rows}
        data = base64.b64encode(inputs.tobytes()).decode()

        def work() -> np.ndarray:
            self._send(file)
            answer = self._ask("run", FILE_S, **how, dtype=file.dtype, data=data)
            outputs = self._read_answer(Outputs, answer)
            return np.frombuffer(base64.b64decode(outputs.data), "<f4").reshape(outputs.shape)

        return self._again(work)

    def measure(
        self, files: Sequence[TimedFile], protocol: Protocol, threads: int | None = None
    ) -> Times:
        """Time all files in turn in every round; `threads`: None for all cores.

        Equal files are timed once.
        """
        rounds, round_s, warmup_s = protocol.rounds, protocol.round_s, protocol.warmup_s
        how = {"rounds": rounds, "round_s": round_s, "warmup_s": warmup_s, "threads": threads}
        seconds = len(files) * (FILE_S + warmup_s + 4 * rounds * round_s)

        def work() -> dict[str, Any]:
            for file in files:
                self._send(file)
            return self._ask("measure", seconds, **how, files=[file.request() for file in files])

        answer = self._again(work)
        ms = self._read_answer(dict[str, tuple[Milliseconds, ...]], answer.get("ms"))
        is_uneven = any(len(each) < rounds or len(each) % rounds for each in ms.values())
        if ms.keys() != {file.key for file in files} or is_uneven:
            raise ConnectionError(f"{self.where} answers with times of other files or rounds")
        before, after = (
            self._read_answer(State, answer.get(moment)) for moment in ("before", "after")
        )
        return Times(
            ms={file.name: ms[file.key] for file in files},
            environment=environment_of(self.describe(), before, after, threads),
        )

    def clear(self) -> None:
        """Remove all files on the target."""
        if self.process is not None:
            self._again(lambda: self._ask("remove", HELLO_S))
        self.sent.clear()

    def close(self) -> None:
        """End the connection, which removes all files on the target."""
        if self.process is not None:
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
            try:
                self.process.wait(1)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.errors.close()
        self.process = None
        self.sent.clear()

    def _again(self, work: Callable[[], Result]) -> Result:
        """Do `work`, again from the beginning after each new connection."""
        for pause_s in (*PAUSES_S, None):
            try:
                if self.process is None:
                    self._connect()
                return work()
            except LostConnectionError:
                self.close()
                if pause_s is None or self.description is None:
                    raise
                time.sleep(pause_s)
        raise AssertionError

    def _connect(self) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the connection
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                self.command, stdin=pipe, stdout=pipe, stderr=self.errors
            )
        except OSError as error:
            self.errors.close()
            raise ConnectionError(
                f"{self.command[0]} does not run here: {error.strerror}"
            ) from None
        text = runner_text()
        try:
            answer = self._ask("hello", HELLO_S, text=b"%d\n%s" % (len(text), text))
        except LostConnectionError:
            self.close()
            raise
        description = self._read_answer(Description, answer)
        if self.description is not None and description.machine != self.description.machine:
            self.close()
            raise ConnectionError(f"{self.where} is another machine now: {description.machine}")
        self.description = description

    def _send(self, file: TimedFile) -> None:
        """Send a file, unless it was sent before."""
        key = file.key
        if key in self.sent:
            return
        for path in file.paths():
            name = f"{key}/{path.name}" if file.path.is_dir() else key
            data = path.read_bytes()
            for offset in range(0, max(1, len(data)), PART_BYTES):
                part = data[offset : offset + PART_BYTES]
                request: dict[str, Any] = {"name": name, "offset": offset}
                request["data"] = base64.b64encode(part).decode()
                if offset + PART_BYTES >= len(data):
                    request["sha256"] = hashlib.sha256(data).hexdigest()
                self._ask("put", HELLO_S, **request)
        self.sent.add(key)

    def _ask(self, op: str, limit_s: float, text: bytes = b"", **request: Any) -> dict[str, Any]:
        """Send a request; return the answer, a JSON object, without text printed by a login."""
        line = json.dumps({"op": op, "limit_s": limit_s, **request}).encode() + b"\n"
        try:
            received = self._exchange(text + line, limit_s + GRACE_S, is_first=op == "hello")
        except ConnectionError:
            self.close()
            raise
        try:
            answer = json.loads(received)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self.close()
            raise ConnectionError(
                f"{self.where} answers {received[:40]!r}, which is no JSON object"
            )
        if "error" in answer:
            raise ValueError(f"{self.where}: {answer['error']}{advice(str(answer['error']))}")
        return answer

    def _read_answer(self, kind: type[Result], answer: Any) -> Result:
        try:
            return from_json(kind, answer, f"the answer of {self.where}")
        except ValueError as error:
            raise ConnectionError(str(error)) from None

    def _exchange(self, data: bytes, limit_s: float, *, is_first: bool) -> bytes:
        """Write `data` and read a line, after the lines that a login may print before the first.

        The process is killed at the limit.
        """
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        limit = MAX_GREETING_BYTES if is_first else MAX_ANSWER_BYTES
        received, end = b"", time.monotonic() + limit_s
        kill = Timer(limit_s, process.kill)
        kill.start()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(data)
                process.stdin.flush()
            while (line := process.stdout.readline(limit + 1)).endswith(b"\n"):
                if not is_first or line.startswith(b"{"):
                    return line
                received += line
                if len(received) > limit:
                    break
        finally:
            kill.cancel()
        received += line
        if len(received) > limit:
            reason = ": there is no runner" if is_first else ""
            raise ConnectionError(
                f"{self.where} answers {received[:40]!r}... and more than {limit:,} bytes{reason}"
            )
        if time.monotonic() >= end:
            raise ConnectionError(f"{self.where} has not answered within {limit_s:.0f} s")
        raise self._ended()

    def _ended(self) -> LostConnectionError:
        """The error with the reason: the process's last line on standard error."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - 4096))
        lines = self.errors.read().decode("utf-8", "replace").split("\n")
        last = next((each.strip() for each in reversed(lines) if each.strip()), "")
        reason = last or f"it ended with {self.process.returncode}"
        return LostConnectionError(f"no connection to {self.where}: {reason}{advice(last)}")


def command_of(where: str) -> list[str]:
    """The command that starts the runner. Raises ValueError for anything but a target."""
    if where == HERE:
        where = shlex.quote(sys.executable)
    if not where.startswith("ssh://"):
        words = shlex.split(where)
        if not words:
            raise ValueError(f"target {where!r}: use ssh://HOST, or a command")
        is_python = Path(words[-1]).name.startswith("python")
        return [*words, *([] if is_python else [PYTHON]), "-u", "-c", BOOT]
    try:
        parts = urlsplit(where, allow_fragments=False)  # a path may have a #
        port = parts.port
    except ValueError:
        port, parts = None, urlsplit("")
    # `parts.hostname` is in lower case, and ssh distinguishes the cases of its aliases.
    host = re.sub(r":\d*$", "", parts.netloc.rpartition("@")[2]).strip("[]")
    # ssh would take a name that begins with a hyphen as an option.
    is_option = any((each or "").startswith("-") for each in (parts.username, host))
    if not host or parts.query or parts.password or is_option:
        raise ValueError(f"target {where!r}: use ssh://[USER@]HOST[:PORT][/PATH/OF/PYTHON]")
    words = [*SSH, *(["-l", parts.username] if parts.username else [])]
    words += ["-p", str(port)] if port else []
    python = PYTHON if parts.path in ("", "/") else parts.path
    return [*words, "--", host, shlex.join([python, "-u", "-c", BOOT])]


def runner_text() -> bytes:
    """The program to send: two files joined."""
    texts = [Path(str(each.__file__)).read_bytes() for each in (sessions, runner)]
    return b"".join(texts).replace(b"from fullstride.targets.sessions import OPEN, PACKAGES\n", b"")


# Words of an error -> how to mend it.
ADVICE = {
    "Host key verification failed": "connect once by ssh, and accept its key",
    "Permission denied": "no password is asked for: add your key to its authorized_keys",
    "not found": "name its Python: ssh://HOST/PATH/OF/PYTHON",
    "No such file": "name its Python: ssh://HOST/PATH/OF/PYTHON",
    "No module named": "install it there: pip install numpy onnxruntime, or name a Python that has "
    "it: ssh://HOST/PATH/OF/PYTHON",
}


def advice(line: str) -> str:
    return next((f" ({what})" for words, what in ADVICE.items() if words in line), "")


def environment_of(
    description: Description, before: State, after: State, threads: int | None
) -> Environment:
    """The environment of a measurement on the target, without PyTorch."""
    first, last, reason = before.clock_mhz, after.clock_mhz, None
    if first is not None and last is not None and last < SLOWER * first:
        reason = f"the clock fell from {first:,.0f} MHz: {after}"
    return Environment(
        device=description.machine.processor,
        threads=threads or description.machine.cores,
        os=description.os,
        python=description.python,
        torch="",
        cuda=None,
        driver=None,
        fullstride=version("fullstride"),
        commit=None,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        clock_mhz=after.clock_mhz,
        clock_max_mhz=after.clock_max_mhz,
        temperature_c=after.temperature_c,
        held_back_by=reason,
    )


def report(there: Description, noise: float) -> Iterator[str]:
    """Describe a target in lines of text."""
    machine = there.machine
    cores = f"{machine.processor}, {machine.machine}, {count_of(machine.cores, 'core')}"
    yield "; ".join(filter(None, (cores, str(there.state))))
    yield f"Python {there.python}, NumPy {there.numpy}, {there.free_mib:,} MiB free; {there.os}"
    for name, number in machine.runtimes.items():
        yield f"{name}: runs here, {number}"
    for name, reason in there.missing.items():
        yield f"{name}: does not run ({reason}); pip install {sessions.PACKAGES[name]}"
    busy = " (busy: times will be uncertain)" if noise > 0.05 else ""
    yield f"noise: rounds of the same computation differ by {noise:.1%}{busy}"


# ---- times, stored in a folder named after their target: a fit stores them in its own folder,
# other commands in the user's cache folder

MACHINE_FILE = "target.json"
MACHINE = Record(Machine, "the machine that files were measured on", ("processor", "runtimes"))


def check_same(target: Target, folder: Path, advice: str = "use another --out") -> None:
    """Raise ValueError, in one line, if `folder` has times of another machine."""
    now, before = target.describe().machine, MACHINE.find(folder / MACHINE_FILE)
    if before is not None and before != now:
        raise ValueError(
            f"{target.where} is {now}, and was {before} when {folder} was measured: {advice}"
        )


def save_machine(target: Target, folder: Path) -> None:
    MACHINE.save(folder / MACHINE_FILE, target.describe().machine)


class StoredTimes:
    """Earlier measurements on a target, with a file per network, size, batch and form."""

    def __init__(self, target: Target):
        self.target = target
        self.folder = user_cache() / "targets" / target.name

    @cached_property
    def checked(self) -> Path:
        """The folder. Raises ValueError, in one line, if it has times of another machine."""
        check_same(self.target, self.folder, "remove it to measure anew")
        if not (self.folder / MACHINE_FILE).exists():
            save_machine(self.target, self.folder)
        return self.folder

    def path(self, network: str, resolution: int, batch: int, format: str, precision: str) -> Path:
        name = re.sub(r"[^\w.-]", "+", network)
        return self.checked / f"{name}-{resolution}-{batch}-{format}-{precision}.json"

    def find(self, *key: str | int) -> Measurement | None:
        """Find the measurement of a network, resolution, batch, format and precision, if stored.

        Raises ValueError for a file with other content.
        """
        path = self.path(*key)  # pyright: ignore[reportArgumentType]
        rows = MEASUREMENTS.find(path)
        return rows[0] if rows else None

    def save(self, network: str, format: str, precision: str, row: Measurement) -> Measurement:
        """Store a measurement by the online protocol."""
        path = self.path(network, row.protocol.resolution, row.protocol.batch, format, precision)
        return MEASUREMENTS.save(path, (replace(row, name=network),))[0]
