"""A real OpenSSH server stands for a board."""

import io
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from forks import Fork
from networks import first_block
from test_target import file  # noqa: F401  a fixture

from fullstride import cli
from fullstride.measure.protocols import ONLINE
from fullstride.nets.families import SPECS
from fullstride.targets import target as target_module
from fullstride.targets.target import Target

pytestmark = pytest.mark.slow
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
CONFIG = """
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile {folder}/pid
StrictModes no
UsePAM no
PasswordAuthentication no
"""


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """The address of a server, whose keys are known."""
    if not SSHD:
        pytest.skip("needs Debian's openssh-server")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    (folder / "conf").write_text(CONFIG.format(folder=folder))
    Path("/run/sshd").mkdir(parents=True, exist_ok=True)
    # One core: threads that wait for each other are slow where other tests run.
    words = ["taskset", "-c", str(max(os.sched_getaffinity(0))), SSHD, "-D"]
    words += ["-f", str(folder / "conf"), "-p", str(port)]
    server = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    public = (folder / "host.pub").read_text()
    known = folder / "known"
    known.write_text(f"[127.0.0.1]:{port} {public}")
    options = ("-i", str(folder / "user"), "-o", f"UserKnownHostsFile={known}")
    patch = pytest.MonkeyPatch()
    patch.setattr(target_module, "SSH", (*target_module.SSH, *options))
    patch.setattr(target_module, "PAUSES_S", (0.2, 0.5, 1.0))
    time.sleep(0.5)
    yield Board(f"ssh://127.0.0.1:{port}{sys.executable}", known, options, server.pid)
    server.terminate()
    server.wait()
    patch.undo()


class Board(NamedTuple):
    address: str
    known: Path  # the file of keys of hosts
    options: tuple[str, ...]  # of ssh
    server: int  # its process

    def sessions(self) -> list[int]:
        return children(self.server)

    def runners(self) -> list[int]:
        """The processes that time files: each session has a process of its own, which has one."""
        processes = self.sessions()
        for _ in range(3):
            processes += [child for each in processes for child in children(each)]
        return [each for each in {*processes} if name_of(each).startswith("python")]

    def cut(self) -> None:
        """End every connection, as if the cable were out; the server goes on."""
        kill(self.sessions())


def children(process: int) -> list[int]:
    listing = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True)
    return [int(each) for each in listing.stdout.split()]


def name_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text()
    except OSError:
        return ""


def kill(processes: list[int]) -> None:
    for each in processes:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def test_files_are_timed_over_ssh_though_the_connection_is_cut(board, file):  # noqa: F811
    with Target(board.address) as target:
        images = np.array([[1, 2, 3, 4]], np.uint8)
        np.testing.assert_array_equal(target.run(file, images), 2 * images)
        cuts = [threading.Timer(delay, board.cut) for delay in (0.5, 2.0)]
        for each in cuts:
            each.start()
        protocol = replace(ONLINE, rounds=500, round_s=0.004, warmup_s=0.02)
        times = target.measure([file], protocol, threads=1)
        assert not any(each.is_alive() for each in cuts)  # both while it was measured
        assert len(times.ms[file.name]) % 500 == 0


def test_an_unknown_host_key_is_refused_with_what_helps(board, capsys):
    known = board.known
    text = known.read_text()
    known.write_text("")
    try:
        assert cli.run(["measure", "target", board.address]) == 1
    finally:
        known.write_text(text)
    assert "accept its key" in capsys.readouterr().err


def test_the_command_says_what_is_on_a_board(board, capsys):
    assert cli.run(["measure", "target", board.address]) == 0
    lines = capsys.readouterr().out
    assert "onnx: runs here" in lines
    assert "noise" in lines


CONNECTED = "connected\n"


class Lines(io.TextIOBase):
    """Sends each line that is written."""

    def __init__(self, say: Callable[[str], object]):
        self.say, self.begun = say, ""

    def write(self, text: str) -> int:
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            self.say(line + "\n")
        return len(text)


def run_command(say: Callable[[str], object], options: tuple[str, ...], words: list[str]) -> None:
    connect, target_module.SSH = Target._connect, (*target_module.SSH, *options)

    def said(self: Target) -> None:
        connect(self)
        say(CONNECTED)

    Target._connect = said
    SPECS["genet_tiny"] = first_block("genet_tiny")
    with redirect_stdout(Lines(say)), redirect_stderr(Lines(say)):
        code = cli.run(words)
    sys.exit(code)


MEASURED = re.compile(r"^(\S+): \d+ of \d+, onnx .* after")
FIT = "fit digits --budget-ms 50 --epochs 1 --weights none --candidates genet_tiny --formats onnx"


def test_a_fit_that_is_killed_on_both_sides_measures_nothing_twice(board, tmp_path):
    out = tmp_path / "fit"
    words = [*FIT.split(), "--resolutions", "16", "24", "32", "--device", "cpu"]
    words += ["--target", board.address, "--out", str(out)]
    rng, lines, kept = random.Random(0), list[str](), dict[Path, bytes]()
    for number in (3, 6, 8, None):
        fit = Fork(run_command, board.options, words)
        if number is None:
            lines += takewhile(lambda line: line != CONNECTED, fit.said())
            ends = Ends(board, 3, rng)  # a first connection that is lost ends the fit
            lines += fit.said()
            assert fit.end() == 0, "".join(lines)
            assert ends.wait() == 3
            break
        lines += islice(fit.said(), number)
        time.sleep(rng.uniform(0, 1))
        fit.process.kill()
        lines += fit.said()
        assert fit.end() != 0
        kept |= {path: path.read_bytes() for path in out.glob("times/*.json")}
    assert kept
    assert all(path.read_bytes() == content for path, content in kept.items())
    measured = Counter(match[1] for line in lines if (match := MEASURED.match(line)))
    assert len(measured) == 3
    assert set(measured.values()) == {1}
    assert json.loads((out / "ship" / "times.json").read_text())["environment"]["torch"] == ""


class Ends(threading.Thread):
    """Kills runners at random moments, and counts them."""

    def __init__(self, board: Board, most: int, rng: random.Random):
        super().__init__(daemon=True)
        self.board, self.most, self.rng, self.count = board, most, rng, 0
        self.start()

    def run(self) -> None:
        while self.count < self.most:
            time.sleep(self.rng.uniform(0, 0.25))
            # a killed fit's runner may still end while the next fit's begins
            runners = self.board.runners()[: self.most - self.count]
            kill(runners)
            self.count += len(runners)

    def wait(self) -> int:
        self.join(1)
        return self.count
