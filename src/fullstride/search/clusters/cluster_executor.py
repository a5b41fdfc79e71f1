"""How do trials run on other machines? Their workers write the results; the driver reads files.

An engine starts tasks and says how they ended. All else is the same for Ray and for Slurm.
"""

import os
import platform
import sys
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fullstride.cores import cores
from fullstride.search.processes import share_cores
from fullstride.search.trials import POLL_S, Ended, Study, Trial, run_trial

# File systems of a network show a new file to other machines with a delay of up to a minute.
VISIBLE_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker says at the end of a task."""

    has_result: bool = False  # False: another process runs the trial
    error: str = ""  # in one line, that is no failure of the trial


@dataclass(frozen=True, kw_only=True)
class Crash:
    """How the process of a task was ended from outside."""

    how: str  # in words, as in "the last time by SIGKILL"
    starts: int = 1


@dataclass(frozen=True, kw_only=True)
class Task:
    """A trial as a call without arguments, which is pickled and runs on a worker."""

    study: Study
    trial: Trial
    device: str
    cores: int
    folder: Path  # the working directory of the driver, which relative paths are of

    def __call__(self) -> Report:
        """Run the trial and append its lines to its log. Raises nothing but what ends a process."""
        try:
            os.chdir(self.folder)
            share_cores(self.cores, max(1, cores() // self.cores))
            log_path(self.trial).parent.mkdir(parents=True, exist_ok=True)
            with log_path(self.trial).open("a", encoding="utf-8") as log:
                steps = run_trial(self.study, self.trial, self.device)
                while True:
                    try:
                        print(next(steps), file=log, flush=True)
                    except StopIteration as stop:
                        return Report(has_result=stop.value)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)  # in the log files of the engine
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return Report(error=f"{self.trial.name} on {platform.node()}: {text}")


class Engine(Protocol):
    """What runs tasks on machines."""

    def start(self, tasks: Sequence[Task]) -> Sequence[Any]:
        """A job for each task, in order."""
        ...

    def outcome(self, job: Any) -> Report | Crash | None:
        """How a job has ended; None before. Does not wait."""
        ...

    def stop(self, job: Any) -> None:
        """End a job, and do not wait for that."""
        ...


@dataclass
class _Running:
    """A job of a trial."""

    trial: Trial
    job: Any
    offset: int  # of its log, up to which lines were read
    ended_s: float | None = None  # when it was first seen to have ended

    def read(self) -> Iterator[str]:
        """The new whole lines of the log."""
        try:
            with log_path(self.trial).open("rb") as log:
                log.seek(self.offset)
                text = log.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        yield from whole.decode(errors="replace").splitlines()


class ClusterExecutor:
    """Runs trials as jobs of an engine, which has its own queue."""

    def __init__(self, engine: Engine, device: str, cores: int):
        self.engine = engine
        self.device = device
        self.cores = cores
        self._running = list[_Running]()

    def submit(self, study: Study, trials: Sequence[Trial]) -> None:
        folder = Path.cwd()
        tasks = [
            Task(study=study, trial=trial, device=self.device, cores=self.cores, folder=folder)
            for trial in trials
        ]
        sizes = [log_size(trial) for trial in trials]  # before a job writes its first line
        jobs = self.engine.start(tasks)
        self._running += (_Running(*each) for each in zip(trials, jobs, sizes, strict=True))

    def poll(self) -> Generator[str | Ended, None, None]:
        time.sleep(POLL_S if self._running else 0)
        for each in list(self._running):
            outcome = self.engine.outcome(each.job)  # before its last lines are read
            yield from each.read()
            if outcome is None or (is_complete(outcome) and not self._is_visible(each)):
                continue
            self._running.remove(each)
            if isinstance(outcome, Crash):
                yield Ended(trial=each.trial, crash=outcome.how, starts=outcome.starts)
            else:
                error = OSError(outcome.error) if outcome.error else None
                yield Ended(trial=each.trial, error=error)

    def cancel(self) -> None:
        for each in self._running:
            self.engine.stop(each.job)
        self._running.clear()

    def _is_visible(self, each: _Running) -> bool:
        """Whether the result that a worker has written is here. Raises OSError if it never is."""
        path = each.trial.result
        if path.parent.is_dir() and path.name in os.listdir(path.parent):  # noqa: PTH208
            return True
        each.ended_s = each.ended_s or time.monotonic()
        if time.monotonic() - each.ended_s > VISIBLE_S:
            raise OSError(
                f"a worker has written {path}, which is not here: the machines must share the "
                "folder of the study"
            )
        return False


def is_complete(outcome: Report | Crash) -> bool:
    return isinstance(outcome, Report) and outcome.has_result


def log_path(trial: Trial) -> Path:
    """Where the lines of a trial on a cluster are."""
    return trial.result.with_suffix(".log")


def log_size(trial: Trial) -> int:
    """Bytes of the log of a trial; 0 before its first line."""
    path = log_path(trial)
    return path.stat().st_size if path.exists() else 0
