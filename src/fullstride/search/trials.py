"""How do the trials of a study run? One after the other here, or one per device in processes.

The files of the results are the truth: a trial that has one is not run again, by any process.
"""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from fullstride.measure.environment import cores
from fullstride.outputs import Output, has_keys
from fullstride.storage import lacks_memory, lost_worker
from fullstride.strict_json import from_json, read_json, to_json
from fullstride.writing import atomic_write, check_output

STARTS = 2  # of a trial's process, if something ends it
# What a trial may raise that is its own fault; others go on.
FAILURES = (ValueError, ArithmeticError, RuntimeError, MemoryError)

# (folder, device, **arguments): yields lines for people and returns a frozen dataclass. A function
# of a module, as a process gets it by its name.
Work = Callable[..., Generator[str, None, Any]]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a study."""

    folder: Path  # where `Work` stores what it needs to go on after a stop
    result: Path  # JSON of what it returns, or of a `Failure`
    arguments: Mapping[str, Any] = field(default_factory=dict)  # picklable


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a trial has no result, in one line."""

    failure: str


@dataclass(frozen=True, kw_only=True)
class Study:
    """Trials of one kind."""

    work: Work
    kind: type[Any]  # what `work` returns
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
        data = read_json(trial.result)
        kind = Failure if isinstance(data, Mapping) and data.keys() == {"failure"} else self.kind
        return from_json(kind, data, str(trial.result))

    def write(self, trial: Trial, result: Any) -> None:
        with atomic_write(trial.result, self.output) as temporary:
            temporary.write_text(to_json(result))


def run_trials(
    study: Study, trials: Sequence[Trial], devices: Sequence[str] = ("cpu",)
) -> Generator[str, None, tuple[Any, ...]]:
    """Run the trials that have no result; returns all results, in order.

    With one device they run in this process. With several, each device has one process at a time,
    which is started for a trial and uses that device only; a device may occur twice. One that is
    ended from outside, such as for lack of memory, is started once more.

    A trial that raises ValueError, ArithmeticError or RuntimeError, or lacks memory, has the
    result `Failure`, and the others go on. To try it again, delete that file. Everything else, such
    as a full disk, a killed process that decodes images or Ctrl-C, is raised; the same call then
    goes on where it was.
    """
    for trial in trials:
        check_output(trial.result, study.output)
    left = [trial for trial in trials if study.read(trial) is None]
    if len(devices) > 1 and len(left) > 1:
        yield from _run_in_processes(study, left, devices)
    else:
        for trial in left:
            yield from _run(study, trial, devices[0])
    return tuple(study.read(trial) for trial in trials)


def _run(study: Study, trial: Trial, device: str) -> Generator[str, None, None]:
    """Run `trial` in this process, and store its result."""
    try:
        result = yield from study.work(trial.folder, device, **trial.arguments)
    except FAILURES as error:
        result = Failure(failure=reason(error, device))
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # the next trial is another network
    study.write(trial, result)


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


def _run_in_processes(
    study: Study, trials: Sequence[Trial], devices: Sequence[str]
) -> Generator[str, None, None]:
    waiting = deque((trial, 1) for trial in trials)
    free, running = list(devices), list[_Running]()
    try:
        while waiting or running:
            while waiting and free:
                trial, start = waiting.popleft()
                running.append(_Running.begin(study, trial, free.pop(0), start, len(devices)))
            wait([each.process.sentinel for each in running] + [each.lines for each in running])
            for each in list(running):
                has_ended = not each.process.is_alive()  # before its last lines are read
                yield from each.read()
                if not has_ended:
                    continue
                running.remove(each)
                free.append(each.device)
                if each.error is not None:
                    raise each.error
                if study.read(each.trial) is not None:
                    continue
                if each.start < STARTS:
                    waiting.appendleft((each.trial, each.start + 1))
                else:
                    code = each.process.exitcode
                    text = f"its process ended {STARTS} times, the last time with code {code}"
                    study.write(each.trial, Failure(failure=text))
    finally:
        for each in running:
            each.process.terminate()
            each.process.join()


@dataclass
class _Running:
    """A process that runs a trial."""

    process: BaseProcess
    lines: Connection
    trial: Trial
    device: str
    start: int  # from 1
    error: BaseException | None = None  # that is not a failure of the trial

    @classmethod
    def begin(
        cls, study: Study, trial: Trial, device: str, start: int, processes: int
    ) -> "_Running":
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        lines, sender = context.Pipe(duplex=False)
        threads = max(1, min(torch.get_num_threads(), cores() // processes))
        arguments = (sender, study, trial, device, threads, processes)
        process = context.Process(target=_process, args=arguments)  # its loaders have processes too
        process.start()
        sender.close()
        return cls(process, lines, trial, device, start)

    def read(self) -> Generator[str, None, None]:
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


def _process(
    sender: Connection, study: Study, trial: Trial, device: str, threads: int, processes: int
) -> None:
    """The body of one of so many processes, which share the cores."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)  # by which workers are chosen
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    try:
        for line in _run(study, trial, device):
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
