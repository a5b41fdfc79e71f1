"""Files that are none, or that would take endless time or memory: one line, at once."""

import ast
import json
import os
import pickle
import socket
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fullstride
from fullstride import cli
from fullstride.io.writing import check_regular, open_regular, read_regular
from fullstride.nets.weights import reader
from fullstride.nets.weights.reader import read


@pytest.fixture
def special(tmp_path):
    """One path of each kind that is no regular file, by a word of its error."""
    paths = {word: tmp_path / word for word in ("FIFO", "socket", "loop", "folder")}
    os.mkfifo(paths["FIFO"])
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(paths["socket"]))
    paths["loop"].symlink_to(paths["loop"])
    paths["folder"].mkdir()
    return {**paths, "device": Path("/dev/zero")}


@pytest.mark.parametrize("word", ["FIFO", "socket", "loop", "folder", "device"])
def test_what_is_no_regular_file_is_one_line_at_once(special, word):
    for action in (check_regular, open_regular, lambda path: read_regular(path, 10)):
        with pytest.raises(ValueError, match=word) as raised:
            action(special[word])
        assert len(str(raised.value).splitlines()) == 1
        assert str(special[word]) in str(raised.value)


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 7) == b"content"


def test_a_missing_file_and_one_without_permission_keep_their_own_errors(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 10)
    (tmp_path / "file").touch()

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied", "file")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError):
        read_regular(tmp_path / "file", 10)


def test_the_bytes_that_are_read_count_not_the_size_that_is_stated(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_regular(tmp_path / "file", 4)
    with pytest.raises(ValueError, match="more than 10 bytes"):  # it says that its size is 0
        read_regular(Path("/proc/self/mountinfo"), 10)


def test_a_file_that_becomes_a_fifo_while_it_is_opened_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a")
    os.mkfifo(tmp_path / "fifo")
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flags: opened(tmp_path / "fifo", flags))
    before = len(list(Path("/proc/self/fd").iterdir()))
    errors: list[BaseException] = []

    def read() -> None:
        try:
            open_regular(tmp_path / "file")
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(timeout=5)
    assert "FIFO" in str(errors[0])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def shared_tuples(levels: int) -> bytes:
    """A pickle of {key: 1} whose key is a tuple that holds a tuple twice, and so on."""
    return b"\x80\x02}K\x01" + b"2\x86" * levels + b"K\x01s."


def deep_tuple(levels: int) -> bytes:
    return b"\x80\x02}K\x01" + b"\x85" * levels + b"K\x01s."


def as_archive(pickled: bytes, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")


def as_legacy(pickled: bytes, path: Path) -> None:
    magic, protocol, system = pickle.dumps(0x1950A86A20F9469CFC6C), pickle.dumps(1001), b"}."
    path.write_bytes(magic + protocol + system + pickled + b"]." + b"\0" * 64)


def safetensors_header(size: int) -> bytes:
    entries = size // 60
    tensors = {
        str(i): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(entries)
    }
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize("write", [as_archive, as_legacy])
@pytest.mark.parametrize("pickled", [shared_tuples(60), deep_tuple(200_000)], ids=["wide", "deep"])
def test_a_key_that_takes_endless_time_to_hash_is_refused_at_once(write, pickled, tmp_path):
    write(pickled, tmp_path / "weights.pth")
    start = time.process_time()
    with pytest.raises(ValueError, match="nested"):
        read(tmp_path / "weights.pth")
    assert time.process_time() - start < 5  # 0.3 s; a tracer of coverage makes it 2.3


@pytest.mark.parametrize("mib", [3, 5, 76])
def test_a_large_header_of_safetensors_is_read_or_refused_in_two_seconds(mib, tmp_path):
    data = safetensors_header(2**18)
    path = tmp_path / "weights.safetensors"
    length = mib * 2**20
    header = data[8:] + b" " * (length - len(data) + 8)
    path.write_bytes(length.to_bytes(8, "little") + header)
    start = time.process_time()
    if mib > 4:
        with pytest.raises(ValueError, match="header"):
            read(path)
    else:
        assert len(read(path)) > 4000
    assert time.process_time() - start < 2


def test_an_archive_with_a_million_members_is_refused_before_they_are_listed(tmp_path):
    as_archive(b"\x80\x02}.", tmp_path / "weights.pth")
    data = (tmp_path / "weights.pth").read_bytes()
    end = data.rindex(b"PK\5\6")
    large = data[: end + 12] + (76 * 2**20).to_bytes(4, "little") + data[end + 16 :]
    (tmp_path / "weights.pth").write_bytes(large)
    with pytest.raises(ValueError, match="table of contents"):
        read(tmp_path / "weights.pth")


@pytest.mark.parametrize("legacy", [False, True])
def test_checkpoints_with_an_optimizer_and_tuples_are_read(legacy, tmp_path):
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(300)))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"args": {"mean": (0.5, 0.5), "classes": tuple(map(str, range(21_841)))}}
    torch.save(state, tmp_path / "weights.pth", _use_new_zipfile_serialization=not legacy)
    assert len(read(tmp_path / "weights.pth")) == 600


def test_out_of_memory_and_missing_permission_are_not_called_damage(tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(3)}, path)

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    monkeypatch.setattr(reader, "read_safetensors", full)
    with pytest.raises(MemoryError, match=path.name):
        read(path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(reader, "open_regular", refuse)
    with pytest.raises(ValueError, match="Permission denied") as raised:
        read(path)
    assert "damaged" not in str(raised.value)


# Where files are opened, and why no check of their kind is needed there. Everything else opens by
# `writing.open_regular`, or calls `check_regular` before a library opens a path.
OPENERS = {
    "io/writing.py": "the checks themselves, and what it wrote",
    "io/console.py": "opens the null device",
    "data/readers/idx.py": "the digits of the package",
    "examples/files.py": "writes the labels",
    "data/pack.py": "writes a shard",
    "data/readers/shards.py": "checks before it opens",
    "deploy/formats/litert_converter.py": "what the package wrote for it",
    "deploy/formats/ncnn.py": "a graph that pnnx wrote in a temporary folder",
    "deploy/formats/tensorrt.py": "opened by `formats.open_file`, which checks",
    "latency/devices.py": "profiles of the package",
    "measure/environment.py": "/proc and the checkout of the package",
    "measure/max_batch.py": "/proc",
    "nets/weights/reader.py": "checks before it reads",
    "study/executors.py": "the log of a trial, which it writes",
    "io/locks.py": "/proc, and a lock that it makes",
    "tables/__init__.py": "tables of the package",
    "targets/runner.py": "/proc, and files in its temporary folder",
    "targets/target.py": "its runner, and exported files that `formats.open_file` has opened",
    "train/distill.py": "writes the cache",
    "train/run_folder.py": "writes the checkpoint",
}


def opens(tree: ast.AST) -> bool:
    """Whether code calls `open`, `read_bytes` or `read_text` of a path or of the system."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("open", "os.open") or name.endswith((".read_bytes", ".read_text")):
                return True
            mode = [ast.unparse(argument) for argument in node.args[:1]]
            if name.endswith(".open") and (not mode or mode[0][:2] in ("'r", "'w", "'a")):
                return True
    return False


def test_every_file_of_a_user_is_opened_by_the_function_that_checks_its_kind():
    source = Path(fullstride.__file__).parent
    found_in = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if opens(ast.parse(path.read_text()))
    }
    assert found_in == set(OPENERS)


def test_memory_that_a_file_of_weights_does_not_fit_into_is_told_of_the_file(
    tmp_path, monkeypatch, capsys
):
    path = tmp_path / "weights.safetensors"
    save_file({"fc.weight": torch.zeros(1)}, path)

    def full(path):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(reader, "read_safetensors", full)
    assert cli.run(["predict", str(path), str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert "memory" in line
    assert "batch" not in line
