"""Runs the trials of a study: one after the other here, one for each device, or on a cluster."""

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

from fullstride.io.locks import (
    RUN_LOCK,
    Lock,
    LockedError,
    LostLockError,
    find_holder,
    hold,
)
from fullstride.io.records import deletable, from_json, read_json, to_json
from fullstride.io.writing import (
    Output,
    atomic_write,
    check_output,
    cores,
    has_keys,
    lacks_memory,
    lost_worker,
)

STARTS = 2  # of a trial's process, if something ends it
POLL_S = 0.5  # between two looks at trials that run elsewhere
CORES_PER_TRIAL = 2  # of a CPU: one computes while the other decodes images
# Errors that are a trial's own fault; the other trials go on.
FAILURES = (ValueError, ArithmeticError, RuntimeError, MemoryError)

T = TypeVar("T")
Work = Generator[str, None, T]  # yields lines for people and returns a result


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a study."""

    folder: Path  # where the work stores what it needs to go on after a stop
    result: Path  # JSON of what it returns, or of a `Failure`
    arguments: Mapping[str, Any] = field(default_factory=dict)  # picklable

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def lock(self) -> Path:
        """The name of the lock of the process that runs it."""
        return self.folder / RUN_LOCK


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a trial has no result, in one line."""

    failure: str


@dataclass(frozen=True, kw_only=True)
class TrialKind:
    """The work and the results of one kind of trial."""

    # (folder, device, **arguments) -> a frozen dataclass. A function of a module, as a process gets
    # it by its name.
    work: Callable[..., Work[Any]]
    result_type: type[Any]  # of what `work` returns
    noun: str  # of that, for errors
    keys: tuple[str, ...]  # fields by which its files are recognised

    @property
    def output(self) -> Output:
        ours, failed = has_keys(*self.keys), has_keys("failure")
        return Output(self.noun, ".json", lambda path: ours(path) or failed(path))

    def read(self, trial: Trial) -> Any:
        """The result of `trial`, a `Failure`, or None if it has not ended."""
        if not trial.result.exists():
            return None
        with deletable():
            data = read_json(trial.result)
            has_failed = isinstance(data, Mapping) and data.keys() == {"failure"}
            return from_json(Failure if has_failed else self.result_type, data, str(trial.result))

    def write(self, trial: Trial, result: Any) -> None:
        with atomic_write(trial.result, self.output) as temporary:
            temporary.write_text(to_json(result))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an executor has ended a trial."""

    has_result: bool = False  # False without more: another process runs the trial
    error: BaseException | None = None  # that is no failure of the trial
    crash: str = ""  # how its process was ended from outside, as in "by SIGKILL"
    starts: int = 1  # of its process, if it was ended


Update = str | tuple[Trial, Outcome]


class Executor(Protocol):
    """Where trials run, by `run_trial`, which stores their results."""

    def submit(self, kind: TrialKind, trials: Sequence[Trial]) -> None:
        """Run the trials as soon as there is a place."""
        ...

    def poll(self) -> Generator[Update, None, None]:
        """Lines for people and trials that have ended since the last call; waits for a moment."""
        ...

    def cancel(self) -> None:
        """End all trials that run, and forget those that wait."""
        ...


def run_trials(
    kind: TrialKind, trials: Sequence[Trial], executor: Executor
) -> Work[tuple[Any, ...]]:
    """Run the trials that have no result where `executor` says; returns all results, in order.

    A process that is ended from outside, such as for lack of memory, is started once more. A trial
    that raises one of `FAILURES` has the result `Failure`, and the others go on; to try it again,
    delete that file. Everything else, such as a full disk, a killed process that decodes images or
    Ctrl-C, is raised; the same call then goes on where it was. Several processes may call it at the
    same time: a trial that one of them runs is waited for by the others, and run if its process was
    killed (`io.locks`).
    """
    for trial in trials:
        check_output(trial.result, kind.output)
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
                    yield f"{trial.name}: {find_holder(trial.lock) or 'another process'} runs it"
                elif starts[key] < STARTS:
                    again.append(trial)
                elif _fail(kind, trial, f"{starts[key]} times, the last time {outcome.crash}"):
                    del left[key]
                else:
                    locked[key] = trial
        for key, trial in list(locked.items()):
            if kind.read(trial) is not None:
                del locked[key], left[key]
            elif find_holder(trial.lock) is None:
                again.append(locked.pop(key))
        if locked and not again:
            time.sleep(POLL_S)


def _fail(kind: TrialKind, trial: Trial, how: str) -> bool:
    """Store that the process of a trial was ended too often; False if another one runs it."""
    try:
        with hold(trial.lock):
            if kind.read(trial) is None:
                kind.write(trial, Failure(failure=f"its process ended {how}"))
    except LockedError:
        return False
    return True


def run_trial(kind: TrialKind, trial: Trial, device: str) -> Work[bool]:
    """Run `trial` in this process, and store its result; False if another process runs it."""
    try:
        with hold(trial.lock, lends=True) as lock:
            if kind.read(trial) is not None:
                return True
            try:
                with closing(kind.work(trial.folder, device, **trial.arguments)) as steps:
                    result = yield from _while_locked(steps, lock)
            except LockedError:  # `train` runs in its folder
                raise
            except FAILURES as error:
                result = Failure(failure=reason(error, device))
            if device.startswith("cuda"):
                import torch

                torch.cuda.empty_cache()  # the next trial is another network
            lock.check()
            kind.write(trial, result)
    except (LockedError, LostLockError):
        return False
    return True


def _while_locked(steps: Work[Any], lock: Lock) -> Work[Any]:
    """`steps`, which end where another process has taken the trial over."""
    while True:
        try:
            line = next(steps)
        except StopIteration as stop:
            return stop.value
        lock.check()
        yield line


def reason(error: Exception, device: str) -> str:
    """Why a trial failed on a device, in one line.

    Raises `error` again where a process that decodes images was killed: that is no fault of the
    trial, and the next call may have more memory.
    """
    if lost_worker(error):
        raise error
    text = " ".join(str(error).split())[:300]
    memory = f"{device} has too little memory: " if lacks_memory(error) else ""
    return f"{memory}{text or type(error).__name__}"


def local_devices(
    name: str = "auto", cores_per_trial: int | None = CORES_PER_TRIAL
) -> tuple[str, ...]:
    """The devices of this machine that each run a trial: all GPUs, or "cpu" for each so many cores.

    A name such as cuda:1 is that device alone, and None as many cores as there are. Raises
    ValueError for a device that is not here.
    """
    import torch

    from fullstride.measure.environment import choose_device

    if name in ("auto", "cuda") and torch.cuda.device_count() > 1:
        return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    device = str(choose_device(name))
    if device != "cpu" or cores_per_trial is None:
        return (device,)
    return (device,) * max(1, cores() // cores_per_trial)


def share_cores(threads: int, processes: int) -> None:
    """Let this process compute with so many threads, as one of so many on its machine."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # if PyTorch is imported later
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)
    # By this the processes that decode images are chosen, as among those of torchrun.
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)


class TrialProcess:
    """A process that runs one trial on one device, and ends with this one.

    It is one of so many processes, which share the cores.
    """

    def __init__(self, kind: TrialKind, trial: Trial, device: str, processes: int):
        self.trial, self.device = trial, device
        self.error: BaseException | None = None  # that is no failure of the trial
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.lines, sender = context.Pipe(duplex=False)
        torch = sys.modules.get("torch")  # it takes seconds to import, and need not be there
        limit = torch.get_num_threads() if torch else cores()
        threads = max(1, min(limit, cores() // processes))
        settings = (sender, kind, trial, device, threads, processes)
        # No daemon, as its loaders have processes too.
        self.process = context.Process(target=_run_in_process, args=settings)
        self.process.start()
        sender.close()

    def read(self) -> Iterator[str]:
        """The lines that are there. The process may have been ended within one."""
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
        os._exit(130)  # the parent got it too
    except Exception as error:
        sender.send(error)


def _end_with_parent() -> None:
    """End this process when its parent was killed: the next call would run the same trial."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


class LocalExecutor:
    """Runs trials on this machine.

    With one device, or for a single trial, they run in this process. With several, each device has
    one process at a time, which is started for a trial, uses that device only, and ends with this
    process; a device may occur twice.
    """

    def __init__(self, devices: Sequence[str]):
        self.devices = tuple(devices)
        self._waiting = deque[tuple[TrialKind, Trial]]()
        self._running = list[TrialProcess]()
        self._has_processes = False

    def submit(self, kind: TrialKind, trials: Sequence[Trial]) -> None:
        self._waiting.extend((kind, trial) for trial in trials)
        if len(self.devices) > 1 and len(self._waiting) > 1:
            self._has_processes = True  # from now on: a trial that was killed may be so again

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
            has_ended = not each.process.is_alive()  # before its last lines are read
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
