"""Runs trials on Ray or Slurm, whose workers write the results that the driver reads.

An engine starts calls of trials and reports how they ended. Everything else is shared.
"""

import logging
import logging.config
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fullstride.io.writing import cores
from fullstride.study.settings import StudyOptions
from fullstride.study.trials import (
    POLL_S,
    Executor,
    LocalExecutor,
    Outcome,
    Trial,
    TrialKind,
    Update,
    run_trial,
    share_cores,
)

# Network file systems show a new file to other machines with a delay of up to a minute.
VISIBLE_S = 90.0


@dataclass(frozen=True, kw_only=True)
class TrialCall:
    """A trial as a pickled call without arguments, for a worker."""

    kind: TrialKind
    trial: Trial
    device: str
    cores: int
    folder: Path  # the driver's working directory, the base of relative paths

    def __call__(self) -> Outcome:
        """Run the trial and append its lines to its log. Raises no `Exception`."""
        try:
            os.chdir(self.folder)
            share_cores(self.cores, max(1, cores() // self.cores))
            log_path(self.trial).parent.mkdir(parents=True, exist_ok=True)
            with log_path(self.trial).open("a", encoding="utf-8") as log:
                steps = run_trial(self.kind, self.trial, self.device)
                while True:
                    try:
                        print(next(steps), file=log, flush=True)
                    except StopIteration as stop:
                        return Outcome(has_result=stop.value)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)  # in the log files of the engine
            text = f"{self.trial.name} on {platform.node()}: {_line(error)}"
            return Outcome(error=OSError(text))

    def checkpoint(self) -> Any:
        """Let submitit run the call again if Slurm ends the job; the trial has checkpoints."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class Engine(Protocol):
    """Ray or Slurm, which runs trials on machines."""

    def start(self, calls: Sequence[TrialCall]) -> Sequence[Any]:
        """A job for each call, in order."""
        ...

    def outcome(self, job: Any) -> Outcome | None:
        """How a job ended; None before. Does not wait."""
        ...

    def stop(self, job: Any) -> None:
        """End a job, without waiting."""
        ...


@dataclass
class _Running:
    trial: Trial
    job: Any
    offset: int  # bytes of the log that were read
    ended_s: float | None = None  # when its end was noticed

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
    """Runs trials as jobs of an engine, which queues them."""

    def __init__(self, engine: Engine, device: str, cores: int):
        self.engine = engine
        self.device = device
        self.cores = cores
        self._running = list[_Running]()

    def submit(self, kind: TrialKind, trials: Sequence[Trial]) -> None:
        folder = Path.cwd()
        calls = [
            TrialCall(kind=kind, trial=trial, device=self.device, cores=self.cores, folder=folder)
            for trial in trials
        ]
        logs = [log_path(trial) for trial in trials]
        sizes = [log.stat().st_size if log.exists() else 0 for log in logs]  # before new lines
        jobs = self.engine.start(calls)
        self._running += (_Running(*each) for each in zip(trials, jobs, sizes, strict=True))

    def poll(self) -> Generator[Update, None, None]:
        time.sleep(POLL_S if self._running else 0)
        for each in list(self._running):
            outcome = self.engine.outcome(each.job)  # before the last lines are read
            yield from each.read()
            if outcome is None or (outcome.has_result and not self._is_visible(each)):
                continue
            self._running.remove(each)
            yield each.trial, outcome

    def cancel(self) -> None:
        for each in self._running:
            self.engine.stop(each.job)
        self._running.clear()

    def _is_visible(self, each: _Running) -> bool:
        """Whether this machine sees a worker's result. Raises OSError after `VISIBLE_S`."""
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


def log_path(trial: Trial) -> Path:
    """The file with the lines of a trial on a cluster."""
    return trial.result.with_suffix(".log")


# On a Ray cluster, trials are core tasks, for which Ray chooses machines and GPUs.

RETRIES = 3  # of a task whose process or machine is lost
CONNECT_S = 10.0


class RayEngine:
    """Tasks of the Ray cluster that RAY_ADDRESS names, or that runs on this machine.

    A new driver starts the trials that have no result; it needs no state of Ray.

    Raises ValueError in one line if Ray is not installed or there is no cluster.
    """

    def __init__(self, gpus: int, cores: int):
        try:
            import ray
        except ImportError:
            raise ValueError(
                "Ray is not installed: pip install 'fullstride[cluster]', on all machines"
            ) from None
        if not ray.is_initialized():
            try:
                _check_address(os.environ.get("RAY_ADDRESS", ""))
                ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ValueError(
                    "no Ray cluster could be reached: start one by `ray start --head`, or name "
                    f"one of another machine by RAY_ADDRESS=HOST:6379 ({reason})"
                ) from None
        self._ray = ray
        self._remote = ray.remote(
            num_gpus=gpus, num_cpus=cores, max_retries=RETRIES, scheduling_strategy="SPREAD"
        )(_run)

    def start(self, calls: Sequence[TrialCall]) -> Sequence[Any]:
        return [self._remote.options(name=call.trial.name).remote(call) for call in calls]

    def outcome(self, job: Any) -> Outcome | None:
        ready, _ = self._ray.wait([job], timeout=0)
        if not ready:
            return None
        from ray.exceptions import RayError, RayTaskError

        try:
            return self._ray.get(job)
        except RayTaskError as error:  # before the trial began, as if a module is missing
            return Outcome(error=OSError(_line(error.cause)))
        except RayError as error:
            return Outcome(crash=f"by {_line(error)}", starts=1 + RETRIES)

    def stop(self, job: Any) -> None:
        self._ray.cancel(job, force=True)


def _check_address(address: str) -> None:
    """Raise OSError if the machine does not answer: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        socket.create_connection((host, int(port)), CONNECT_S).close()


def _run(call: TrialCall) -> Outcome:
    return call()


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# On Slurm, trials are jobs of submitit, which requeues a job when its time is over.

FOLDER = "slurm"  # in the study's folder: scripts, logs and pickles of submitit
MOST_REQUEUES = 1000  # as good as no limit, as a trial resumes each time


class SlurmEngine:
    """Jobs of Slurm, or processes of this machine for `cluster="local"`, as in tests.

    Jobs survive the driver. A new driver submits the trials without a result; the trial's lock
    keeps two jobs from running the same trial.

    Raises ValueError in one line if submitit is not installed or there is no Slurm.
    """

    def __init__(self, folder: Path, options: StudyOptions, gpus: int, cluster: str = "slurm"):
        configure = logging.config.dictConfig
        # submitit's import configures logging, which would close all handlers of the process
        logging.config.dictConfig = lambda config: None
        try:
            import submitit
        except ImportError:
            raise ValueError("submitit is not installed: pip install 'fullstride[slurm]'") from None
        finally:
            logging.config.dictConfig = configure
        try:
            self._executor = submitit.AutoExecutor(
                folder / FOLDER, cluster=cluster, slurm_max_num_timeout=MOST_REQUEUES
            )
        except RuntimeError:
            raise ValueError(
                "there is no srun, so this is no Slurm machine: log in on one of the cluster, or "
                "leave out --executor"
            ) from None
        self._executor.update_parameters(
            name="fullstride",
            timeout_min=max(1, round(60 * options.slurm_hours)),
            nodes=1,
            tasks_per_node=1,
            cpus_per_task=options.trial_cores,
            gpus_per_node=gpus or None,
            slurm_additional_parameters=dict(each.split("=", 1) for each in options.slurm_options)
            or None,
        )

    def start(self, calls: Sequence[TrialCall]) -> Sequence[Any]:
        with self._executor.batch():  # one array of jobs
            return [self._executor.submit(call) for call in calls]

    def outcome(self, job: Any) -> Outcome | None:
        if not job.done():
            return None
        from submitit.core.utils import FailedJobError, UncompletedJobError

        state = job.state
        try:
            return job.result()
        except FailedJobError as error:  # before the trial began
            return Outcome(error=OSError(str(error).strip().splitlines()[-1][:300]))
        except UncompletedJobError:
            return Outcome(crash=f"in the state {state} of job {job.job_id}")

    def stop(self, job: Any) -> None:
        job.cancel(check=False)


def find_executor(options: StudyOptions, folder: Path, devices: Sequence[str]) -> Executor:
    """The executor of the study in `folder`; local trials run on `devices`.

    Raises ValueError, in one line, without a cluster or its extra.
    """
    if options.executor == "local":
        return LocalExecutor(devices)
    if options.device not in ("auto", "cuda", "cpu"):
        raise ValueError(
            f"--device {options.device} on a cluster, which chooses a free GPU for each trial: "
            "use cuda or cpu"
        )
    gpus = int(options.device != "cpu")
    if options.executor == "ray":
        engine = RayEngine(gpus, options.trial_cores)
    else:
        engine = SlurmEngine(folder, options, gpus)
    return ClusterExecutor(engine, "cuda:0" if gpus else "cpu", options.trial_cores)
