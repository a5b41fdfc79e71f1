"""Executors: which one a user gets, and what a driver does with the jobs of an engine."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sleeping_trials import SLEEP, STEPS, Slept, trials_in

from fullstride.io.locks import find_holder, hold
from fullstride.study import executors
from fullstride.study import trials as trials_module
from fullstride.study.executors import ClusterExecutor, Outcome, TrialCall, find_executor, log_path
from fullstride.study.settings import StudyOptions
from fullstride.study.trials import Failure, LocalExecutor, Trial, local_devices, run_trials


class FakeEngine:
    """Runs a trial when it is asked for the outcome; `crashes` are outcomes that come before."""

    def __init__(self, *crashes: Outcome, runs: bool = True):
        self.crashes = list(crashes)
        self.runs = runs
        self.stopped = list[str]()

    def start(self, calls: Sequence[TrialCall]) -> Sequence[TrialCall]:
        return calls

    def outcome(self, job: TrialCall) -> Outcome | None:
        if self.crashes:
            return self.crashes.pop(0)
        return job() if self.runs else None

    def stop(self, job: TrialCall) -> None:
        self.stopped.append(job.trial.name)


class QuickEngine(FakeEngine):
    """Its jobs end before `start` returns."""

    def start(self, calls: Sequence[TrialCall]) -> Sequence[Any]:
        return [call() for call in calls]

    def outcome(self, job: Any) -> Outcome:
        return job


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(trials_module, "POLL_S", 0.001)
    monkeypatch.setattr(executors, "POLL_S", 0.001)


@pytest.fixture
def trial(tmp_path) -> Trial:
    (only,) = trials_in(tmp_path, 1, step_s=0)
    return only


def run_on(engine: FakeEngine, trials: Sequence[Trial]):
    """The lines of a study on an engine, and its results."""
    lines, steps = [], run_trials(SLEEP, trials, ClusterExecutor(engine, "cpu", 1))
    while True:
        try:
            lines.append(next(steps))
        except StopIteration as stop:
            return lines, stop.value


@pytest.mark.parametrize("engine", [FakeEngine, QuickEngine])
def test_the_lines_and_results_of_workers_are_read_from_files(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trials = trials_in(Path("study"), 3, step_s=0)
    lines, results = run_on(engine(), trials)
    assert lines == [f"trial {number} from step 0" for number in range(3)]
    assert [each.number for each in results] == [0, 1, 2]
    assert (tmp_path / log_path(trials[1])).read_text() == "trial 1 from step 0\n"
    assert run_on(FakeEngine(), trials) == ([], results)


def test_a_line_is_read_when_it_is_whole(trial):
    executor = ClusterExecutor(FakeEngine(runs=False), "cpu", 1)
    log_path(trial).parent.mkdir(parents=True)
    log_path(trial).write_text("of an earlier start\n")
    executor.submit(SLEEP, [trial])
    texts = ["", "half", " a line\nand", " another\r\n\xe4", "\xe4\n"]
    lines = []
    for text in texts:
        with log_path(trial).open("a", newline="", encoding="utf-8") as log:
            log.write(text)
        lines.append(list(executor.poll()))
    assert lines == [[], [], ["half a line"], ["and another"], ["\xe4\xe4"]]


@pytest.mark.parametrize(
    ("crashes", "ends"),
    [
        ([Outcome(crash="by a signal")], False),
        ([Outcome(crash="by a signal"), Outcome(crash="by another")], True),
        ([Outcome(crash="by another", starts=4)], True),
    ],
)
def test_a_trial_whose_process_is_lost_too_often_has_failed(trial, crashes, ends):
    (result,) = run_on(FakeEngine(*crashes), [trial])[1]
    assert isinstance(result, Failure if ends else Slept)
    if isinstance(result, Failure):
        assert "by another" in result.failure
        assert find_holder(trial.lock) is None


def test_a_process_that_is_lost_after_its_result_loses_nothing(trial):
    engine = FakeEngine()

    def outcome(job: TrialCall) -> Outcome:
        assert job().has_result
        return Outcome(crash="at the end", starts=4)

    engine.outcome = outcome
    (result,) = run_on(engine, [trial])[1]
    assert isinstance(result, Slept)


def test_an_error_that_is_no_fault_of_the_trial_is_one_line_and_ends_the_others(tmp_path):
    trials = trials_in(tmp_path, 3, step_s=0)
    trials[0].folder.mkdir()
    (trials[0].folder / "checkpoint").mkdir()  # reading it raises IsADirectoryError
    engine = FakeEngine()
    with pytest.raises(OSError, match="0 on .*IsADirectoryError") as caught:
        run_on(engine, trials)
    assert "\n" not in str(caught.value)
    assert engine.stopped == ["1", "2"]
    assert not any(trial.result.exists() for trial in trials)
    (trials[0].folder / "checkpoint").rmdir()
    assert len(run_on(FakeEngine(), trials)[1]) == 3


def test_a_result_that_the_driver_cannot_see_is_an_error_after_a_while(trial, monkeypatch):
    monkeypatch.setattr(executors, "VISIBLE_S", 0.01)
    with pytest.raises(OSError, match="share the folder"):
        run_on(FakeEngine(*[Outcome(has_result=True)] * 10_000), [trial])


def test_a_worker_without_the_folder_of_the_driver_says_so(trial, monkeypatch, tmp_path):
    folder = tmp_path / "elsewhere"
    call = TrialCall(kind=SLEEP, trial=trial, device="cpu", cores=1, folder=folder)
    report = call()
    assert not report.has_result
    assert "elsewhere" in str(report.error)


def test_a_trial_that_another_process_runs_is_waited_for(tmp_path):
    trials = trials_in(tmp_path, 2, step_s=0)
    steps = run_trials(SLEEP, trials, ClusterExecutor(FakeEngine(), "cpu", 1))
    with hold(trials[0].lock):
        lines = [next(steps) for _ in range(2)]
        assert any(line.startswith("0: process ") for line in lines)
        assert "trial 1 from step 0" in lines
        assert not (trials[0].folder / "starts").exists()
    assert list(steps) == ["trial 0 from step 0"]
    assert SLEEP.read(trials[0]).begin == 0


def test_a_trial_that_loses_its_lock_ends_and_stores_nothing(tmp_path, monkeypatch):
    (trial,) = trials_in(tmp_path, 1, step_s=0)
    steps = trials_module.run_trial(SLEEP, trial, "cpu")
    assert next(steps) == "trial 0 from step 0"
    for each in trial.lock.parent.glob(f"{trial.lock.name}*"):
        each.unlink()
    assert list(steps) == []
    assert not trial.result.exists()
    assert (trial.folder / "checkpoint").read_text() == str(STEPS)


def test_the_local_executor_has_one_process_per_gpu_or_two_cores(monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(trials_module.writing, "cores", lambda: 9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_devices() == ("cpu",) * 4
    executor = find_executor(StudyOptions(device="cpu"), tmp_path, local_devices("cpu"))
    assert isinstance(executor, LocalExecutor)
    assert executor.devices == ("cpu",) * 4
    with pytest.raises(ValueError, match="cuda:1 is not here"):
        local_devices("cuda:1")
    monkeypatch.setattr(trials_module.writing, "cores", lambda: 1)
    assert local_devices("cpu") == ("cpu",)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert local_devices() == local_devices("cuda") == ("cuda:0", "cuda:1", "cuda:2")
    assert local_devices("cuda:1") == ("cuda:1",)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(trial_cores=0), "--trial-cores 0"),
        (dict(executor="slurm", slurm_hours=0), "--slurm-hours 0"),
        (dict(executor="slurm", slurm_options=("gpu",)), "partition=gpu"),
        (dict(executor="slurm", slurm_options=("--partition=gpu",)), "partition=gpu"),
        (dict(slurm_options=("partition=gpu",)), "--executor slurm"),
        (dict(executor="k8s"), "--executor 'k8s': use local or ray or slurm"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(fields, words):
    with pytest.raises(ValueError, match=words) as caught:
        StudyOptions(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("executor", "module", "words"),
    [("ray", "ray", r"fullstride\[cluster\]"), ("slurm", "submitit", r"fullstride\[slurm\]")],
)
def test_an_executor_whose_package_is_missing_names_its_extra(
    executor, module, words, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=words):
        find_executor(StudyOptions(executor=executor, device="cpu"), tmp_path, ())


def test_a_ray_cluster_that_does_not_answer_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # the port that discards, where nobody listens
    with pytest.raises(ValueError, match="ray start --head.*refused") as caught:
        find_executor(StudyOptions(executor="ray", device="cpu"), tmp_path, ())
    assert "\n" not in str(caught.value)


def test_a_cluster_chooses_the_gpu(tmp_path):
    with pytest.raises(ValueError, match="cuda or cpu"):
        find_executor(StudyOptions(executor="ray", device="cuda:1"), tmp_path, ())


def test_without_slurm_its_executor_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no srun") as caught:
        find_executor(StudyOptions(executor="slurm"), tmp_path / "study", ())
    assert "\n" not in str(caught.value)


def test_options_of_slurm_reach_its_script(tmp_path, monkeypatch):
    """With a program in the place of sbatch, which stores what it gets."""
    pytest.importorskip("submitit")
    for name in ("srun", "sbatch", "scancel", "sacct"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text('#!/bin/sh\nfor last; do :; done\ncp "$last" "$0.sh"\necho job 77\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    settings = StudyOptions(
        executor="slurm", trial_cores=3, slurm_hours=1.5, slurm_options=("partition=gpu", "qos=low")
    )
    executor = find_executor(settings, tmp_path / "study", ())
    assert not (tmp_path / "study").exists(), "the study creates its folder"
    executor.submit(SLEEP, trials_in(tmp_path / "study", 3))
    script = (tmp_path / "bin" / "sbatch.sh").read_text()
    lines = {line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line}
    assert lines >= {
        "--array=0-2%3",
        "--cpus-per-task=3",
        "--gpus-per-node=1",
        "--time=90",
        "--partition=gpu",
        "--qos=low",
    }
    executor.cancel()


LOGGING = """
import logging
from pathlib import Path
from fullstride.study.executors import SlurmEngine
from fullstride.study.settings import StudyOptions

class Handler(logging.Handler):
    def close(self):
        print("closed", flush=True)

logging.getLogger().addHandler(Handler())
SlurmEngine(Path("here"), StudyOptions(), 0, cluster="local")
print("engine", flush=True)
"""


def test_handlers_of_logging_stay_open_when_slurm_is_used(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LOGGING], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] == "engine"
