"""Runs the trials of a study: one after the other, one for each device, or on a cluster."""

import multiprocessing
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fullstride.io import locks, writing
from fullstride.io.records import deletable, from_json, read_json, write_json

STARTS = 2  # of a trial's process, if something kills it
POLL_S = 0.5  # between two polls of trials that run elsewhere
CORES_PER_TRIAL = 2  # of a CPU: one computes while the other decodes images
# Errors that are a trial's own fault; the other trials go on.
FAILURES = (ValueError, ArithmeticError, RuntimeError, MemoryError)

T = TypeVar("T")
Work = Generator[str, None, T]  # yields lines for people and returns a result


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a study."""

    folder: Path  # where the work stores its state, to resume after a stop
    result: Path  # JSON of the work's result, or of a `Failure`
    arguments: Mapping[str, Any] = field(default_factory=dict)  # picklable

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def lock(self) -> Path:
        """The lock of the process that runs the trial."""
        return self.folder / locks.RUN_LOCK


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a trial has no result, in one line."""

    failure: str


@dataclass(frozen=True, kw_only=True)
class TrialKind:
    """The work and the results of one kind of trial."""

    # (folder, device, **arguments) -> a frozen dataclass. A module's function, as processes import
    # it by name.
    work: Callable[..., Work[Any]]
    result_type: type[Any]
    noun: str  # names the result in errors
    keys: tuple[str, ...]  # fields by which files of results are recognised

    @property
    def output(self) -> writing.Output:
        ours, failed = writing.has_keys(*self.keys), writing.has_keys("failure")
        return writing.Output(self.noun, ".json", lambda path: ours(path) or failed(path))

    def read(self, trial: Trial) -> Any:
        """The result of `trial`, a `Failure`, or None if it has not ended."""
        if not trial.result.exists():
            return None
        with deletable():
            data = read_json(trial.result)
            has_failed = isinstance(data, Mapping) and data.keys() == {"failure"}
            return from_json(Failure if has_failed else self.result_type, data, str(trial.result))

    def write(self, trial: Trial, result: Any) -> None:
        write_json(trial.result, self.output, result)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a trial ended on an executor. By default another process runs the trial."""

    has_result: bool = False
    error: BaseException | None = None  # an error that is not the trial's own failure
    crash: str = ""  # how the process was killed, as in "by SIGKILL"
    starts: int = 1  # of a killed process


Update = str | tuple[Trial, Outcome]


class Executor(Protocol):
    """Runs trials by `run_trial`, which stores the results."""

    def submit(self, kind: TrialKind, trials: Sequence[Trial]) -> None:
        """Run the trials as soon as a device is free."""
        ...

    def poll(self) -> Generator[Update, None, None]:
        """Lines for people and the trials that ended since the last call; waits for a moment."""
        ...

    def cancel(self) -> None:
        """End the running trials, and forget the waiting ones."""
        ...


def run_trials(
    kind: TrialKind, trials: Sequence[Trial], executor: Executor
) -> Work[tuple[Any, ...]]:
    """Run the trials that have no result on `executor`; return all results, in order.

    A killed process, as for lack of memory, is started once more. A trial that raises one of
    `FAILURES` has the result `Failure`, and other trials go on; to try it again, delete that file.
    Everything else, such as a full disk, a killed process that decodes images or Ctrl-C, is raised;
    the same call then resumes. Several processes may make the same call at once: each waits for
    trials that another process runs, and runs them if that process was killed (`io.locks`).
    """
    for trial in trials:
        writing.check_output(trial.result, kind.output)
    left = [trial for trial in trials if kind.read(trial) is None]
    if left:
        try:
            yield from _run_on(executor, kind, left)
        finally:
            executor.cancel()
    return tuple(kind.read(trial) for trial in trials)


def _run_on(executor: Executor, kind: TrialKind, trials: Sequence[Trial]) -> Work[None]:
    left, locked = {trial.result: trial for trial in trials}, dict[Path, Trial]()
    starts = Counter[Path]()
    again = list(trials)
    while left:
        if again:
            executor.submit(kind, again)
        again.clear()
        with closing(executor.poll()) as updates:
            for update in updates:
                if isinstance(update, str):
                    yield update
                    continue
                trial, outcome = update
                key = trial.result
                if outcome.error is not None:
                    raise outcome.error
                if outcome.crash:
                    starts[key] += outcome.starts
                if kind.read(trial) is not None:
                    del left[key]
                elif not outcome.crash:
                    locked[key] = trial
                    holder = locks.find_holder(trial.lock) or "another process"
                    yield f"{trial.name}: {holder} runs it"
                elif starts[key] < STARTS:
                    again.append(trial)
                elif _fail(kind, trial, f"{starts[key]} times, the last time {outcome.crash}"):
                    del left[key]
                else:
                    locked[key] = trial
        for key, trial in list(locked.items()):
            if kind.read(trial) is not None:
                del locked[key], left[key]
            elif locks.find_holder(trial.lock) is None:
                again.append(locked.pop(key))
        if locked and not again:
            time.sleep(POLL_S)


def _fail(kind: TrialKind, trial: Trial, how: str) -> bool:
    """Store that a trial's process was killed too often; False if another process runs it."""
    try:
        with locks.hold(trial.lock):
            if kind.read(trial) is None:
                kind.write(trial, Failure(failure=f"its process ended {how}"))
    except locks.LockedError:
        return False
    return True


def run_trial(kind: TrialKind, trial: Trial, device: str) -> Work[bool]:
    """Run `trial` in this process, and store its result; False if another process runs it."""
    try:
        with locks.hold(trial.lock, lends=True) as lock:
            if kind.read(trial) is not None:
                return True
            try:
                with closing(kind.work(trial.folder, device, **trial.arguments)) as steps:
                    result = yield from _while_locked(steps, lock)
            except locks.LockedError:  # another process trains in the folder
                raise
            except FAILURES as error:
                result = Failure(failure=reason(error, device))
            if device.startswith("cuda"):
                import torch

                torch.cuda.empty_cache()  # the next trial is another network
            lock.check()
            kind.write(trial, result)
    except (locks.LockedError, locks.LostLockError):
        return False
    return True


def _while_locked(steps: Work[Any], lock: locks.Lock) -> Work[Any]:
    """`steps`, until another process takes over the trial."""
    while True:
        try:
            line = next(steps)
        except StopIteration as stop:
            return stop.value
        lock.check()
        yield line


def reason(error: Exception, device: str) -> str:
    """Why a trial failed on a device, in one line.

    Raises `error` again if a process that decodes images was killed: the trial is not at fault, and
    the next call may have more memory.
    """
    if writing.lost_worker(error):
        raise error
    text = " ".join(str(error).split())[:300]
    memory = f"{device} has too little memory: " if writing.lacks_memory(error) else ""
    return f"{memory}{text or type(error).__name__}"


def local_devices(
    name: str = "auto", cores_per_trial: int | None = CORES_PER_TRIAL
) -> tuple[str, ...]:
    """The devices of this machine that each run a trial.

    All GPUs, or "cpu" once for every `cores_per_trial`, once in all for None; a name such as cuda:1
    is that device alone. Raises ValueError for a device that is not here.
    """
    import torch

    from fullstride.measure.environment import choose_device

    if name in ("auto", "cuda") and torch.cuda.device_count() > 1:
        return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    device = str(choose_device(name))
    if device != "cpu" or cores_per_trial is None:
        return (device,)
    return (device,) * max(1, writing.cores() // cores_per_trial)


def share_cores(threads: int, processes: int) -> None:
    """Let this process, one of `processes` on the machine, compute with `threads` threads."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # if PyTorch is imported later
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)
    # the number of processes that decode images depends on this, as with torchrun
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)


class TrialProcess:
    """A child process that runs one trial on one device.

    The cores are shared by `processes` processes.
    """

    def __init__(self, kind: TrialKind, trial: Trial, device: str, processes: int):
        self.trial, self.device = trial, device
        self.error: BaseException | None = None  # an error that is not the trial's own failure
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.lines, sender = context.Pipe(duplex=False)
        torch = sys.modules.get("torch")  # it takes seconds to import, and need not be there
        limit = torch.get_num_threads() if torch else writing.cores()
        threads = max(1, min(limit, writing.cores() // processes))
        settings = (sender, kind, trial, device, threads, processes)
        # No daemon, as data loaders start processes too.
        self.process = context.Process(target=_run_in_process, args=settings)
        self.process.start()
        sender.close()

    def read(self) -> Iterator[str]:
        """The new lines. The process may have been killed within a line."""
        try:
            while self.lines.poll():
                message = self.lines.recv()
                if isinstance(message, BaseException):
                    self.error = message
                else:
                    yield message
        except (EOFError, OSError):
            self.process.join()


def _run_in_process(
    sender: Connection, kind: TrialKind, trial: Trial, device: str, threads: int, processes: int
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    share_cores(threads, processes)
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_device(device)
    try:
        for line in run_trial(kind, trial, device):
            sender.send(line)
    except KeyboardInterrupt:
        os._exit(130)  # the parent is interrupted too
    except Exception as error:
        sender.send(error)


def _end_with_parent() -> None:
    """End this process if the parent is killed: the next call would run the same trial."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


class LocalExecutor:
    """Runs trials on this machine.

    With one device, or for a single trial, trials run in this process. With several devices, each
    entry of `devices` has one process at a time, which runs one trial and ends with this process; a
    device may occur twice.
    """

    def __init__(self, devices: Sequence[str]):
        self.devices = tuple(devices)
        self._waiting = deque[tuple[TrialKind, Trial]]()
        self._running = list[TrialProcess]()
        self._has_processes = False

    def submit(self, kind: TrialKind, trials: Sequence[Trial]) -> None:
        self._waiting.extend((kind, trial) for trial in trials)
        if len(self.devices) > 1 and len(self._waiting) > 1:
            self._has_processes = True  # from now on: a killed trial may be killed again

    def poll(self) -> Generator[Update, None, None]:
        if self._has_processes:
            yield from self._poll_processes()
        elif self._waiting:
            kind, trial = self._waiting.popleft()
            yield from run_trial(kind, trial, self.devices[0])
            yield trial, Outcome()

    def _poll_processes(self) -> Generator[Update, None, None]:
        free = Counter(self.devices) - Counter(each.device for each in self._running)
        for device in free.elements():
            if self._waiting:
                process = TrialProcess(*self._waiting.popleft(), device, len(self.devices))
                self._running.append(process)
        ends, lines = [p.process.sentinel for p in self._running], [p.lines for p in self._running]
        wait([*ends, *lines], POLL_S)
        for each in list(self._running):
            has_ended = not each.process.is_alive()  # before the last lines are read
            yield from each.read()
            if has_ended:
                self._running.remove(each)
                code = each.process.exitcode
                crash = f"with code {code}" if code else ""
                yield each.trial, Outcome(error=each.error, crash=crash)

    def cancel(self) -> None:
        for each in self._running:
            each.process.terminate()
        for each in self._running:
            each.process.join()
        self._running.clear()
        self._waiting.clear()
        self._has_processes = False
