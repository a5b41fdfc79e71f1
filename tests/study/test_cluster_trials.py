"""Trials on this machine, on a Ray cluster and as jobs: workers and drivers that are killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cluster_fit
import pytest
from forks import Fork
from sleeping_trials import SLEEP, STEPS, TRIALS, trials_in

from fullstride.autofit.halving import Outcome, RungScore
from fullstride.io.records import from_json
from fullstride.study.driver import saved_stage
from fullstride.study.trials import Trial

TESTS = Path(__file__).parents[1]
SCRIPT = [sys.executable, str(TESTS / "sleeping_trials.py")]
WAIT_S = 300  # on a machine that does other things too


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def ray_cluster(environment, tmp_path_factory) -> Iterator[dict[str, str]]:
    """A Ray cluster of two nodes with a core each; yields the environment of its drivers."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    folder = Path(f"/tmp/fsray{os.getpid()}")  # names of sockets have at most 107 characters
    port = 20000 + os.getpid() % 10000
    head = ["--head", f"--port={port}", f"--temp-dir={folder}", "--node-ip-address=127.0.0.1"]
    logs, nodes = tmp_path_factory.mktemp("ray"), []
    try:
        for role in ([*head, "--include-dashboard=false"], [f"--address=127.0.0.1:{port}"]):
            nodes.append(start_ray(role, logs, environment))
        yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        for node in reversed(nodes):
            node.terminate()
            node.wait(WAIT_S)
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def start_ray(role: list[str], logs: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    """A node of a Ray cluster. Ray gives it 30 s to start, too few on a machine that is busy."""
    words = [str(Path(sys.executable).with_name("ray")), "start", *role, "--block"]
    words += ["--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000"]
    words += ["--disable-usage-stats", "--include-log-monitor=false"]
    for attempt in range(3):
        path = logs / f"{role[0].partition('=')[0]}{attempt}"
        with path.open("w") as log:
            node = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + WAIT_S
        while node.poll() is None and time.monotonic() < deadline:
            if "This command will now block" in path.read_text():
                return node
            time.sleep(0.1)
        node.terminate()
        node.wait(WAIT_S)
    raise AssertionError(path.read_text())


def read(log) -> str:
    return Path(log.name).read_text()


def running(process: subprocess.Popen) -> Callable[[], bool]:
    return lambda: process.poll() is None


def wait_until(condition: Callable[[], bool], is_alive: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert is_alive(), log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def starts(trial: Trial) -> list[int]:
    """The step that each process of a trial began at."""
    path = trial.folder / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[0]) for line in lines]


def check_steps(trial: Trial) -> None:
    """Each process went on from the checkpoint, and only after the one before had ended."""
    steps: list[tuple[int, str]] = []
    for line in (trial.folder / "steps").read_text().splitlines():
        step, process = line.split()
        steps.append((int(step), process))
    assert [step for step, _ in steps][-1] == STEPS - 1
    processes = [process for _, process in steps]
    changes = sum(one != other for one, other in zip(processes, processes[1:], strict=False))
    assert changes == len({*processes}) - 1, "two processes at the same time"
    repeated = len(steps) - STEPS  # a process may be killed between its step and its checkpoint
    assert 0 <= repeated <= changes


def finished(trials: list[Trial]) -> dict[str, tuple[str, list[int]]]:
    """The result of each trial that has one, and the starts of its processes."""
    return {
        each.name: (each.result.read_text(), starts(each))
        for each in trials
        if each.result.exists()
    }


def has_results(trials: list[Trial], results: int) -> bool:
    """Whether so many trials have ended, and one has begun at least."""
    begun = any((each.folder / "steps").exists() for each in trials)
    return begun and len(finished(trials)) >= results


def drive(name: str, folder: Path, environment: Mapping[str, str], killed: int = 0) -> Any:
    log = (folder.parent / f"{folder.name}.log").open("a+")
    words = [*SCRIPT, name, str(folder), str(killed)]
    driver = subprocess.Popen(
        words, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder.parent
    )
    return driver, log


def environment_of(name: str, request) -> dict[str, str]:
    return request.getfixturevalue("ray_cluster" if name == "ray" else "environment")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "ray", "slurm"])
def test_a_worker_that_is_killed_goes_on_from_its_checkpoint(name, request, tmp_path):
    folder = tmp_path / "study"
    driver, log = drive(name, folder, environment_of(name, request), killed=1)
    with log:
        assert driver.wait(WAIT_S) == 0, read(log)
        lines = read(log).splitlines()
    trials = trials_in(folder, killed=1)
    assert starts(trials[0]) == [0, 3]
    assert [SLEEP.read(trial).begin for trial in trials] == [3, 0, 0, 0]
    assert {f"trial {number} from step 0" for number in range(TRIALS)} <= {*lines}
    assert "trial 0 from step 3" in lines
    for trial in trials:
        check_steps(trial)
    assert not list(folder.glob("results/.*")), "no lock is left"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "ray", "slurm"])
def test_a_driver_that_is_killed_early_in_the_middle_and_late_loses_and_repeats_no_trial(
    name, request, tmp_path
):
    folder, environment = tmp_path / "study", environment_of(name, request)
    trials, before = trials_in(folder), {}
    for results in (0, TRIALS // 2, TRIALS - 1):
        driver, log = drive(name, folder, environment)
        with log:
            wait_until(partial(has_results, trials, results), running(driver), Path(log.name))
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        now = finished(trials)
        assert before.items() <= now.items()
        before = now
    driver, log = drive(name, folder, environment)
    with log:
        assert driver.wait(WAIT_S) == 0, read(log)
        assert "all have ended" in read(log)
    after = finished(trials)
    assert len(after) == TRIALS
    assert before.items() <= after.items()
    processes = sum(len(each) for _, each in after.values())
    # Jobs of Slurm outlive the driver; other processes end with it.
    assert (processes == TRIALS) == (name == "slurm"), processes
    for trial in trials:
        check_steps(trial)


@pytest.mark.slow
def test_two_drivers_of_one_folder_share_the_trials(environment, tmp_path):
    folder = tmp_path / "study"
    drivers = [drive("local", folder, environment) for _ in range(2)]
    for driver, log in drivers:
        with log:
            assert driver.wait(WAIT_S) == 0, read(log)
    trials = trials_in(folder)
    assert [starts(trial) for trial in trials] == [[0]] * TRIALS
    for trial in trials:
        check_steps(trial)


@pytest.mark.slow
def test_a_job_whose_time_is_over_is_requeued_and_goes_on(environment, tmp_path):
    """By the signal that Slurm sends then."""
    folder = tmp_path / "study"
    trials = trials_in(folder)
    driver, log = drive("slurm", folder, environment)
    with log:
        wait_until((trials[0].folder / "steps").exists, running(driver), Path(log.name))
        process = (trials[0].folder / "starts").read_text().split()[-1]
        os.kill(int(process), signal.SIGUSR2)
        assert driver.wait(WAIT_S) == 0, read(log)
    begin, again = starts(trials[0])
    assert begin == 0 < again
    check_steps(trials[0])
    assert len(list(folder.glob("slurm/*_submitted.pkl"))) == TRIALS, "the same jobs"


def trained_in(fit: Path) -> dict[str, object]:
    """Weights of the bundles of a fit, the scores of its rungs, and the outcome, without times."""
    weights = {str(path.relative_to(fit)): path.read_bytes() for path in fit.glob(BUNDLES)}
    outcome = saved_stage(fit, "training", Outcome)
    assert outcome is not None
    scores = [replace(each, seconds=0.0) for each in outcome.scores]
    stored = {
        path.stem + path.parent.name: replace(from_json(RungScore, path.read_text(), ""), seconds=0)
        for path in fit.glob("rungs/*/*.json")
    }
    return {**weights, "rungs": stored, "outcome": replace(outcome, scores=tuple(scores))}


BUNDLES = "trials/*/bundle/*.safetensors"


@pytest.mark.slow
def test_a_fit_on_ray_that_is_killed_has_the_bits_of_one_left_alone_here(ray_cluster, tmp_path):
    """Both have the plan and the times of one dry run, which decide between tied candidates."""

    def results() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in killed.glob("rungs/*/*.json")}

    alone, killed = tmp_path / "alone", tmp_path / "killed"
    log = tmp_path / "killed.log"
    cluster_fit.train(alone, "local", dry_run=True)
    shutil.copytree(alone, killed)
    cluster_fit.train(alone, "local")
    before: dict[Path, int] = {}
    for count in (1, 5):  # of the four results of the first rung and the two of the second
        driver = Fork(cluster_fit.train_on_ray, killed, ray_cluster, log)
        wait_until(lambda count=count: len(results()) >= count, driver.process.is_alive, log)
        if count == 1:  # a second fit on the same folder
            with pytest.raises(ValueError, match=f"works in {killed}: wait"):
                cluster_fit.train(killed, "local")
        driver.kill()
        assert before.items() <= results().items()
        before = results()
    driver = Fork(cluster_fit.train_on_ray, killed, ray_cluster, log)
    assert driver.end() == 0, log.read_text()
    assert before.items() <= results().items(), "a finished training has run twice"
    assert trained_in(killed) == trained_in(alone)
    logs = {path.read_text().count("\n") for path in killed.glob("trials/*/log.jsonl")}
    assert logs == {1, 3}, "each epoch is trained once"
