"""Only regular files are opened, and no more of them is read than the limit."""

import os
import socket
import threading
from pathlib import Path

import pytest

from fullstride.storage import check_regular, open_regular, read_regular


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
    for read in (check_regular, open_regular, lambda path: read_regular(path, 10)):
        with pytest.raises(ValueError, match=word) as raised:
            read(special[word])
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
