"""Locks: one holder at a time, and those of processes that were killed are taken over."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fullstride.io import locks
from fullstride.io.locks import (
    LockedError,
    LostLockError,
    find_holder,
    hold,
    machine,
    this_process,
)
from fullstride.io.records import to_json

HOLD = """
import sys, time
from pathlib import Path
from fullstride.io.locks import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""
LINUX = pytest.mark.skipif(not machine(), reason="only Linux says when a process began")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "results" / ".a.lock"


def files(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.glob("*"))


def lock_of_another_machine(path: Path, number: int, age_s: float, text: str | None = None) -> Path:
    """A file of a lock that was renewed `age_s` ago."""
    other = replace(this_process(), machine="another boot", host="elsewhere", process=7)
    path.parent.mkdir(exist_ok=True)
    claim = path.with_name(f"{path.name}-{number}")
    claim.write_text(to_json(other) if text is None else text)
    os.utime(claim, (time.time() - age_s,) * 2)
    return claim


def test_a_lock_has_one_holder_and_leaves_no_file(path):
    with hold(path):
        holder = find_holder(path)
        assert holder is not None
        assert holder.process == os.getpid()
        with pytest.raises(LockedError) as caught, hold(path):
            pass
        assert str(os.getpid()) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert files(path) == []
    assert find_holder(path) is None
    with hold(path):
        pass


def test_the_lock_of_a_study_is_free_again_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), hold(tmp_path / ".lock"):
        raise KeyboardInterrupt
    with hold(tmp_path / ".lock"), pytest.raises(LockedError), hold(tmp_path / ".lock"):
        pass


@LINUX
def test_the_lock_of_a_process_of_this_machine_ends_with_it(path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match=str(process.pid)), hold(path):
        pass
    process.kill()
    while not Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].startswith(" Z"):
        time.sleep(0.01)
    with hold(path):  # though nobody has waited for it, so that its number is in use
        assert files(path) == [".a.lock-2"]
    process.wait()
    process.stdout.close()


@LINUX
def test_another_process_with_the_number_of_the_holder_is_not_the_holder(path):
    path.parent.mkdir()
    earlier = replace(this_process(), start=1)
    path.with_name(".a.lock-1").write_text(to_json(earlier))
    assert find_holder(path) is None


@pytest.mark.parametrize("text", [None, "", '{"process": '], ids=["whole", "empty", "half"])
def test_a_lock_of_another_machine_is_taken_over_some_time_after_its_last_renewal(path, text):
    lock_of_another_machine(path, 3, locks.TAKEOVER_S - 30, text)
    with pytest.raises(LockedError, match=f"{locks.TAKEOVER_S:g} s"), hold(path):
        pass
    assert files(path) == [".a.lock-3"]
    lock_of_another_machine(path, 3, locks.TAKEOVER_S + 30, text)
    with hold(path):
        assert files(path) == [".a.lock-4"]


def test_a_lock_is_renewed(path, monkeypatch):
    monkeypatch.setattr(locks, "HEARTBEAT_S", 0.02)
    with hold(path) as lock:
        os.utime(lock.path, (0, 0))
        deadline = time.monotonic() + 20
        while lock.path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lock.path.stat().st_mtime > 0
    time.sleep(0.1)
    assert files(path) == []


def test_a_holder_that_was_suspended_learns_that_its_lock_was_taken_over(path, monkeypatch):
    monkeypatch.setattr(locks, "machine", lambda: "")  # as outside of Linux
    with hold(path) as lock:
        lock.check()
        os.utime(lock.path, (0, 0))
        with hold(path):
            with pytest.raises(LostLockError):
                lock.check()
            lock.release()
            assert files(path) == [".a.lock-2"]


def test_of_many_that_want_a_lock_of_a_killed_holder_one_at_a_time_has_it(path):
    lock_of_another_machine(path, 1, 2 * locks.TAKEOVER_S)
    inside, most, held, errors = [0], [0], [0], list[BaseException]()

    def take():
        try:
            for _ in range(60):
                try:
                    with hold(path):
                        inside[0] += 1
                        most[0] = max(most[0], inside[0])
                        held[0] += 1
                        time.sleep(0.002)
                        inside[0] -= 1
                except LockedError:
                    time.sleep(0.001)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert most[0] == 1
    assert held[0] > 1
    assert files(path) == []


def test_folders_that_a_lock_makes_go_with_it_unless_something_is_written_there(tmp_path):
    with hold(tmp_path / "new" / "run" / ".lock"):
        assert (tmp_path / "new" / "run").is_dir()
    assert not (tmp_path / "new").exists()
    with hold(tmp_path / "new" / "run" / ".lock"):
        (tmp_path / "new" / "result").touch()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result"]
