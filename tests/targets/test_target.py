"""Files are timed by a Python elsewhere, and whatever it answers is times or one line."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from fullstride.measure.protocols import ONLINE
from fullstride.targets import runner, sessions
from fullstride.targets import target as target_module
from fullstride.targets.target import Target, TimedFile, command_of, report, runner_text

HOW = replace(ONLINE, rounds=3, round_s=0.01, warmup_s=0.01), 1  # and one thread
# Stands between fullstride and the runner, as a connection does.
RELAY = """
import json, subprocess, sys
from pathlib import Path
here, cut_after, edit = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
number = len(list(here.glob("start*")))
(here / f"start{number}").touch()
boot = sys.argv[sys.argv.index("-c") + 1]
pipe = subprocess.PIPE
runner = subprocess.Popen([sys.executable, "-u", "-c", boot], stdin=pipe, stdout=pipe)
source = sys.stdin.buffer
text = source.readline()
runner.stdin.write(text + source.read(int(text)))
for count, line in enumerate(source):
    if number == 0 and count == cut_after:
        runner.kill()
        sys.exit("the cable is out")
    runner.stdin.write(line)
    runner.stdin.flush()
    answer = json.loads(runner.stdout.readline())
    operation = json.loads(line)["op"]
    exec(edit)
    print(answer if isinstance(answer, str) else json.dumps(answer), flush=True)
    with (here / "log").open("a") as log:
        log.write(operation + "\\n")
"""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(target_module, "PAUSES_S", (0.0, 0.0))


@pytest.fixture
def relay(tmp_path):
    """A target behind a relay that is cut once before a request, and that edits answers."""
    script, here = tmp_path / "relay.py", tmp_path / "relayed"
    script.write_text(RELAY)
    here.mkdir()

    def make(cut_after: int = -1, edit: str = "pass") -> Target:
        words = [sys.executable, str(script), str(here), str(cut_after), edit]
        target = Target("nothing")
        target.where, target.command = "board", [*words, "-c", target_module.BOOT]
        return target

    make.log = lambda: (here / "log").read_text().split()
    return make


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """An ONNX file that doubles uint8 inputs."""
    path = tmp_path_factory.mktemp("files") / "double.onnx"
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["floats", "floats"], ["sums"]),
    ]
    graph = helper.make_graph(
        nodes,
        "double",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["n", 4])],
        [helper.make_tensor_value_info("sums", TensorProto.FLOAT, ["n", 4])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path)
    return TimedFile(
        name="double", path=path, format="onnx", precision="fp32", shape=(1, 4), dtype="uint8"
    )


def here() -> Target:
    return Target(f"env {sys.executable}")


def test_a_target_says_what_is_there():
    with here() as target:
        found = target.describe()
        lines = "\n".join(report(found, target.noise(rounds=3, round_s=0.01)))
    assert found.numpy == np.__version__
    machine = found.machine
    assert {"onnx", "openvino"} <= set(machine.runtimes)
    assert set(machine.runtimes) | set(found.missing) == set(sessions.PACKAGES)
    assert machine.processor in lines
    assert f"{machine.cores} core" in lines


def test_a_missing_runtime_is_named_with_the_line_that_installs_it():
    with here() as target:
        there = target.describe()
    missing = dict.fromkeys(sessions.PACKAGES, "why")
    found = replace(there, machine=replace(there.machine, runtimes={}), missing=missing)
    lines = [*report(found, 0.2)]
    for package in sessions.PACKAGES.values():
        assert any(line.endswith(f"pip install {package}") for line in lines)
    assert any("busy" in line for line in report(found, 0.2))
    assert not any("busy" in line for line in report(found, 0.01))


def test_outputs_there_are_those_of_the_file(file):
    images = np.array([[1, 2, 3, 250]], np.uint8)
    with here() as target:
        np.testing.assert_array_equal(target.run(file, images), [[2, 4, 6, 500]])


def test_a_file_whose_outputs_exceed_an_answer_runs_when_none_are_asked_for(file, monkeypatch):
    images = np.ones((4096, 4), np.uint8)
    monkeypatch.setattr(target_module, "MAX_ANSWER_BYTES", 2**16)
    with here() as target:
        assert target.run(file, images, rows=0).shape == (0, 4)
        with pytest.raises(ConnectionError, match="more than 65,536 bytes$"):
            target.run(file, images)


def test_times_are_those_of_all_rounds_and_files_are_sent_once(file, relay):
    with relay() as target:
        other = replace(file, name="again", shape=(2, 4))
        for _ in range(2):
            times = target.measure([file], *HOW)
        assert times.ms.keys() == {"double"}
        assert len(times.ms["double"]) % 3 == 0
        assert times.environment.device == target.describe().machine.processor
        assert times.environment.threads == 1
        target.clear()
        target.measure([other], *HOW)
    operations = relay.log()
    assert operations == ["hello", "put", "measure", "measure", "remove", "put", "measure"]


def test_equal_files_in_two_folders_have_the_same_times(tmp_path, file):
    copied = tmp_path / file.path.name
    copied.write_bytes(file.path.read_bytes())
    with here() as target:
        times = target.measure([file, replace(file, name="copy", path=copied)], *HOW)
    assert times.ms["copy"] == times.ms["double"]


@pytest.mark.parametrize("cut_after", range(1, 4))
def test_a_connection_that_ends_is_made_again(file, relay, cut_after):
    with relay(cut_after) as target:
        target.describe()
        assert target.run(file, np.ones((1, 4), np.uint8)).tolist() == [[2, 2, 2, 2]]
        assert target.measure([file], *HOW).ms["double"]


def test_a_large_file_is_sent_in_parts_and_compared_with_its_digest(tmp_path, file, monkeypatch):
    monkeypatch.setattr(target_module, "PART_BYTES", 50)
    assert file.path.stat().st_size > 100
    with here() as target:
        assert target.run(file, np.ones((1, 4), np.uint8)).tolist() == [[2, 2, 2, 2]]
        part = {"name": "x", "offset": 0, "data": "AAAA", "sha256": "0"}
        with pytest.raises(ValueError, match="damaged"):
            target._ask("put", 5, **part)
        with pytest.raises(ValueError, match="is no name of a file"):
            target._ask("put", 5, **{**part, "name": "../x"})


def test_another_machine_after_the_connection_was_made_again_is_refused(file, relay):
    edit = "if operation == 'hello' and number: answer['machine']['cores'] = 999"
    with relay(1, edit) as target, pytest.raises(ConnectionError, match="another machine.*999"):
        target.measure([file], *HOW)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("answer = 'Segmentation fault'", "no JSON object"),
        ("answer = '[1]'", "no JSON object"),
        ("answer['ms'] = {key: [-1.0] * 3 for key in answer['ms']}", "-1"),
        ("answer['ms'] = {key: [float('nan')] * 3 for key in answer['ms']}", "board"),
        ("answer['ms'] = {}", "other files or rounds"),
        ("answer['ms'] = {key: [1.0] * 4 for key in answer['ms']}", "other files or rounds"),
        ("answer['ms'] = 3", "board"),
        ("del answer['ms']", "board"),
        ("answer['before'] = 3", "board.*use an object"),
        ("answer = 'x' * 2**24", "more than 4,194,304 bytes"),
        ("import time; time.sleep(60)", "has not answered within"),
    ],
)
def test_a_wrong_answer_is_one_line(file, relay, edit, message, monkeypatch):
    monkeypatch.setattr(target_module, "MAX_ANSWER_BYTES", 2**22)
    monkeypatch.setattr(target_module, "GRACE_S", 0.5)
    monkeypatch.setattr(target_module, "FILE_S", 1.0)
    with relay(edit=f"if operation == 'measure': {edit}") as target:
        with pytest.raises(ConnectionError, match=message) as error:
            target.measure([file], *HOW)
        assert "\n" not in str(error.value)


def test_a_file_that_the_runtime_there_cannot_open_is_one_line(tmp_path, file):
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"nothing")
    with here() as target:
        with pytest.raises(ValueError, match=r"python.*: \w+") as error:
            target.run(replace(file, path=path), np.ones((1, 4), np.uint8))
        assert "\n" not in str(error.value)
        assert target.run(file, np.ones((1, 4), np.uint8)).shape == (1, 4)


def test_what_a_login_prints_is_left_out(tmp_path):
    script = tmp_path / "login"
    script.write_text(f"#!/bin/sh\necho 'Welcome to {{board}}'\nexec {sys.executable} \"$@\"\n")
    script.chmod(0o755)
    target = Target("x")
    target.command = [str(script), "-u", "-c", target_module.BOOT]
    with target:
        assert target.describe().numpy == np.__version__


def test_a_target_that_only_prints_is_refused(monkeypatch):
    target = Target("x")
    target.command = ["yes"]
    with target, pytest.raises(ConnectionError, match="there is no runner"):
        target.describe()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'Host key verification failed.' >&2; exit 255", "accept its key"),
        ("echo 'me@board: Permission denied (publickey).' >&2; exit 255", "authorized_keys"),
        ("echo 'sh: python3: not found' >&2; exit 127", "name its Python"),
        ("echo \"ModuleNotFoundError: No module named 'numpy'\" >&2; exit 1", "pip install numpy"),
        ("exit 7", "ended with 7"),
    ],
)
def test_why_there_is_no_connection_is_one_line_with_what_helps(script, message):
    target = Target("x")
    target.command = ["sh", "-c", script]
    start = time.perf_counter()
    with target, pytest.raises(ConnectionError, match=message):
        target.describe()
    assert time.perf_counter() - start < 2  # it is not tried again


def test_a_command_that_is_not_here_is_one_line():
    with (
        Target("no-such-command-here") as target,
        pytest.raises(ConnectionError, match="not run here"),
    ):
        target.describe()


def test_targets_are_commands_or_addresses():
    ssh = command_of("ssh://pi@board:2222/opt/venv/bin/python")
    assert ssh[0] == "ssh"
    assert "BatchMode=yes" in ssh
    assert ssh[ssh.index("-l") + 1] == "pi"
    assert ssh[ssh.index("-p") + 1] == "2222"
    assert ssh[-2] == "board"
    assert ssh[-1].startswith("/opt/venv/bin/python -u -c 'import sys")
    assert command_of("here")[0] == sys.executable
    assert command_of("ssh://board")[-1].startswith("python3 -u -c ")
    assert command_of("ssh://Pi@MyPi4.Lan:22")[-2] == "MyPi4.Lan"  # an alias of ~/.ssh/config
    assert command_of("ssh://[FE80::1%Eth0]:22")[-2] == "FE80::1%Eth0"
    assert command_of("ssh://board/opt/py#3/bin/python")[-1].startswith("'/opt/py#3/bin/python' -u")
    words = command_of("docker exec -i box")
    assert words[:5] == ["docker", "exec", "-i", "box", "python3"]
    assert command_of("docker exec -i box /venv/bin/python3.12")[4:6] == [
        "/venv/bin/python3.12",
        "-u",
    ]


@pytest.mark.parametrize(
    "where",
    [
        "",
        "ssh://",
        "ssh://-oProxyCommand=x",
        "ssh://me:secret@board",
        "ssh://board:port",
        "ssh://a?b",
    ],
)
def test_what_is_no_target_is_refused(where):
    with pytest.raises(ValueError, match="ssh://"):
        command_of(where)


def test_the_runner_needs_neither_torch_nor_this_package(tmp_path):
    for each in (runner, sessions):
        assert len(Path(str(each.__file__)).read_text().splitlines()) <= 250
    (tmp_path / "runner.py").write_bytes(runner_text())
    code = "import sys, runner; print('torch' in sys.modules, 'fullstride' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[*sys.path]!r}; {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "False"]


def test_the_runner_leaves_nothing(tmp_path, file, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with here() as target:
        target.run(file, np.ones((1, 4), np.uint8))
        assert any(tmp_path.iterdir())
    assert not any(tmp_path.iterdir())
