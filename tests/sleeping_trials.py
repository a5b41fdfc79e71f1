"""Trials that sleep, with a checkpoint after each step, and a driver of them: run by tests."""

import os
import signal
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from fullstride.study.executors import ClusterExecutor, SlurmEngine, find_executor
from fullstride.study.settings import StudyOptions
from fullstride.study.trials import Executor, LocalExecutor, Trial, TrialKind, run_trials

STEPS = 6
TRIALS = 4


@dataclass(frozen=True, kw_only=True)
class Slept:
    number: int
    begin: int  # the step that its last process began at
    process: int


def sleep(
    folder: Path, device: str, *, number: int, kill_at: int | None, step_s: float
) -> Generator[str, None, Slept]:
    """Each step is one line of the file `steps`: step, process, time."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, process = folder / "checkpoint", os.getpid()
    begin = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with (folder / "starts").open("a") as file:
        file.write(f"{begin} {process}\n")
    yield f"trial {number} from step {begin}"
    for step in range(begin, STEPS):
        time.sleep(step_s)
        if step == kill_at and begin == 0:
            os.kill(process, signal.SIGKILL)
        with (folder / "steps").open("a") as file:
            file.write(f"{step} {process}\n")
        (folder / "new").write_text(str(step + 1))
        (folder / "new").replace(checkpoint)
    return Slept(number=number, begin=begin, process=process)


SLEEP = TrialKind(work=sleep, result_type=Slept, noun="a sleep", keys=("number", "begin"))


def trials_in(
    folder: Path, count: int = TRIALS, *, killed: int = 0, step_s: float = 0.1
) -> list[Trial]:
    """The process of the first `killed` trials ends itself in the first start."""
    return [
        Trial(
            folder=folder / str(number),
            result=folder / "results" / f"{number}.json",
            arguments=dict(number=number, kill_at=3 if number < killed else None, step_s=step_s),
        )
        for number in range(count)
    ]


def executor(name: str, folder: Path) -> Executor:
    if name == "local":
        return LocalExecutor(("cpu", "cpu"))
    if name == "ray":
        options = StudyOptions(executor="ray", trial_cores=1, device="cpu")
        return find_executor(options, folder, ())
    options = StudyOptions(executor="slurm", trial_cores=1, slurm_hours=0.1)
    engine = SlurmEngine(folder, options, gpus=0, cluster="local")
    from submitit import Job

    Job._results_timeout_s = 1  # of 15 s, for a result of a killed job on a slow file system
    return ClusterExecutor(engine, "cpu", 1)


def main() -> None:
    name, folder, killed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    for line in run_trials(SLEEP, trials_in(folder, killed=killed), executor(name, folder)):
        print(line, flush=True)
    print("all have ended", flush=True)


if __name__ == "__main__":
    from sleeping_trials import main as importable

    importable()
