"""The trials of a study: one result each, failures in one line, and processes that are killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
from generators import drain

from fullstride.study.trials import Failure, LocalExecutor, Trial, TrialKind, run_trials


@dataclass(frozen=True, kw_only=True)
class Number:
    number: int
    device: str
    process: int


def work(folder: Path, device: str, *, number: int, how: str = "") -> Generator[str, None, Number]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "starts").open("a") as file:
        file.write("x")
    yield f"trial {number}"
    starts = len((folder / "starts").read_text())
    if how == "value":
        raise ValueError("not\nthis one")
    if how == "loss":
        raise FloatingPointError("the loss became nan")
    if how == "memory":
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory")
    if how == "disk":
        raise OSError(28, "No space left on device")
    if how == "lost worker" and starts == 1:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    if how == "interrupt" and starts == 1:
        raise KeyboardInterrupt
    if how == "always killed" or (how == "killed once" and starts == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleep":
        time.sleep(60)
    return Number(number=number, device=device, process=os.getpid())


KIND = TrialKind(work=work, result_type=Number, noun="a number", keys=("number", "device"))


def trials_in(folder: Path, *hows: str) -> list[Trial]:
    return [
        Trial(
            folder=folder / str(number),
            result=folder / "results" / f"{number}.json",
            arguments=dict(number=number, how=how),
        )
        for number, how in enumerate(hows)
    ]


def run_on(trials, devices=("cpu",)):
    return run_trials(KIND, trials, LocalExecutor(devices))


def starts(trial: Trial) -> int:
    path = trial.folder / "starts"
    return len(path.read_text()) if path.exists() else 0


def test_a_trial_with_a_result_does_not_run_again(tmp_path):
    trials = trials_in(tmp_path, "", "")
    lines, results = drain(run_on(trials))
    assert lines == ["trial 0", "trial 1"]
    assert drain(run_on(trials)) == ([], results)
    assert [result.number for result in results] == [0, 1]
    assert [starts(trial) for trial in trials] == [1, 1]


@pytest.mark.parametrize("how", ["value", "loss", "memory"])
def test_a_trial_that_fails_is_one_line_and_others_go_on(tmp_path, how):
    trials = trials_in(tmp_path, how, "")
    results = drain(run_on(trials))[1]
    assert isinstance(results[0], Failure)
    assert "\n" not in results[0].failure
    assert ("memory" in results[0].failure) == (how == "memory")
    assert results[1].number == 1
    assert drain(run_on(trials))[1] == results
    assert starts(trials[0]) == 1
    trials[0].result.unlink()
    drain(run_on(trials))
    assert starts(trials[0]) == 2
    assert starts(trials[1]) == 1


@pytest.mark.parametrize(
    ("how", "kind"),
    [("disk", OSError), ("interrupt", KeyboardInterrupt), ("lost worker", RuntimeError)],
)
def test_what_the_machine_does_is_no_failure_of_a_trial(tmp_path, how, kind):
    trials = trials_in(tmp_path, "", how)
    with pytest.raises(kind):
        drain(run_on(trials))
    assert trials[0].result.exists()
    assert not trials[1].result.exists()
    if how != "disk":
        results = drain(run_on(trials))[1]
        assert results[1].number == 1
        assert starts(trials[0]) == 1


def test_a_file_of_somebody_else_is_not_replaced(tmp_path):
    trials = trials_in(tmp_path, "")
    trials[0].result.parent.mkdir()
    trials[0].result.write_text('{"mine": 1}')
    with pytest.raises(ValueError, match="not a number"):
        drain(run_on(trials))
    assert starts(trials[0]) == 0


@pytest.mark.slow
def test_each_device_runs_one_trial_at_a_time_in_a_process_of_its_own(tmp_path):
    trials = trials_in(tmp_path, "", "value", "killed once", "always killed", "")
    devices = ("cpu", "cpu:0")
    lines, results = drain(run_on(trials, devices))
    assert {*lines} == {f"trial {number}" for number in range(5)}
    numbers = [results[index] for index in (0, 2, 4)]
    assert [each.number for each in numbers] == [0, 2, 4]
    assert len({each.process for each in numbers} | {os.getpid()}) == 4
    assert {each.device for each in numbers} <= {*devices}
    assert isinstance(results[1], Failure)
    assert isinstance(results[3], Failure)
    assert [starts(trial) for trial in trials] == [1, 1, 2, 2, 1]


@pytest.mark.slow
def test_processes_end_with_a_driver_that_is_killed(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]\n"
        "from test_trials import run_on, trials_in\n"
        "if __name__ == '__main__':\n"
        "    trials = trials_in(Path(sys.argv[2]), 'sleep', 'sleep')\n"
        "    for line in run_on(trials, ('cpu', 'cpu')):\n"
        "        print(line, flush=True)\n"
    )
    script = tmp_path / "driver.py"
    script.write_text(code)
    command = [sys.executable, str(script), str(Path(__file__).parent), str(tmp_path / "study")]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout
    assert {driver.stdout.readline(), driver.stdout.readline()} == {"trial 0\n", "trial 1\n"}
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
    if not children.exists():
        pytest.skip("only Linux lists the children of a process, in /proc")
    pids = children.read_text().split()
    driver.kill()
    driver.wait()
    driver.stdout.close()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
