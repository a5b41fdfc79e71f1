"""A real OpenSSH server stands for a board."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from test_target import file  # noqa: F401  a fixture

from fullstride import cli
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
    server = subprocess.Popen(
        [SSHD, "-D", "-f", str(folder / "conf"), "-p", str(port)], stderr=subprocess.DEVNULL
    )
    public = (folder / "host.pub").read_text()
    known = folder / "known"
    known.write_text(f"[127.0.0.1]:{port} {public}")
    options = ("-i", str(folder / "user"), "-o", f"UserKnownHostsFile={known}")
    patch = pytest.MonkeyPatch()
    patch.setattr(target_module, "SSH", (*target_module.SSH, *options))
    patch.setattr(target_module, "PAUSES_S", (0.2, 0.5, 1.0))
    time.sleep(0.5)
    yield f"ssh://127.0.0.1:{port}{sys.executable}", known
    server.terminate()
    server.wait()
    patch.undo()


def test_files_are_timed_over_ssh_though_the_connection_is_cut(board, file):  # noqa: F811
    address, _ = board
    with Target(address) as target:
        images = np.array([[1, 2, 3, 4]], np.uint8)
        np.testing.assert_array_equal(target.run(file, images), 2 * images)
        cuts = [threading.Timer(delay, cut) for delay in (0.5, 2.0)]
        for each in cuts:
            each.start()
        times = target.measure([file], rounds=20, round_s=0.1, warmup_s=0.1, threads=1)
        assert not any(each.is_alive() for each in cuts)  # both while it was measured
        assert len(times.ms[file.name]) % 20 == 0


def cut() -> None:
    """End every connection, as if the cable were out; the server goes on."""
    listing = subprocess.run(["pgrep", "-f", "sshd: .*notty"], capture_output=True, text=True)
    for process in listing.stdout.split():
        os.kill(int(process), signal.SIGKILL)


def test_an_unknown_host_key_is_refused_with_what_helps(board, capsys):
    address, known = board
    text = known.read_text()
    known.write_text("")
    try:
        assert cli.run(["measure", "target", address]) == 1
    finally:
        known.write_text(text)
    assert "accept its key" in capsys.readouterr().err


def test_the_command_says_what_is_on_a_board(board, capsys):
    address, _ = board
    assert cli.run(["measure", "target", address]) == 0
    lines = capsys.readouterr().out
    assert "onnx: runs here" in lines
    assert "noise" in lines
