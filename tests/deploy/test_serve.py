"""The HTTP server of the docs, started as its first lines say."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest
from bundles import small_bundle
from PIL import Image

from fullstride.data.dataset import open_data
from fullstride.deploy.export import ComparisonImages, export
from fullstride.deploy.predict import probabilities

DOCS = Path(__file__).parents[2] / "docs/guides"


@contextmanager
def serving(path: Path, app: str = "serve:app") -> Iterator[str]:
    """The address of a server of the file at `path`, whose log is beside the file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, "-m", "uvicorn", "--app-dir", str(DOCS), app, "--port", port]
    words += ["--limit-concurrency", "300"]
    places = os.pathsep.join([str(path.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "MODEL": str(path), "PYTHONPATH": places}
    with (path.parent / "log.txt").open("w") as file:
        server = subprocess.Popen(words, env=environment, stdout=file, stderr=file)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urlopen(f"{address}/none", timeout=5)
            except HTTPError:  # 404: it runs
                break
            except URLError:
                assert server.poll() is None, "the server ended"
                time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A bundle, some pictures, and the address and the log of a server of its exported file."""
    bundle, digits = small_bundle(), open_data("digits").test
    pictures = [digits.picture(index) for index in range(2)]
    path = tmp_path_factory.mktemp("served") / "model.onnx"
    export(bundle, path, ComparisonImages(pictures))
    with serving(path) as address:
        yield bundle, pictures, address, path.with_name("log.txt")


@pytest.mark.slow
def test_a_picture_that_is_posted_is_answered_with_the_bundles_probabilities(served, tmp_path):
    bundle, pictures, address, _ = served
    for picture, expected in zip(pictures, probabilities(bundle, pictures), strict=True):
        picture.save(tmp_path / "a.png")
        with urlopen(address, (tmp_path / "a.png").read_bytes(), timeout=30) as response:
            answer = json.load(response)
        assert list(answer) == list(bundle.classes)
        assert list(answer.values()) == pytest.approx(expected.tolist(), abs=1e-4)


def png(width: int, height: int) -> bytes:
    Image.new("RGB", (width, height)).save(buffer := BytesIO(), "PNG")
    return buffer.getvalue()


def answer(address: str, body: bytes) -> tuple[int, float]:
    """The status and the seconds until it came."""
    start = time.perf_counter()
    try:
        with urlopen(address, body, timeout=60) as response:
            return response.status, time.perf_counter() - start
    except HTTPError as error:
        return error.code, time.perf_counter() - start


@pytest.mark.slow
def test_a_small_picture_does_not_wait_for_large_ones(served):
    large, small = png(6000, 4000), png(200, 200)
    with ThreadPoolExecutor(7) as clients:
        others = [clients.submit(answer, served[2], large) for _ in range(6)]
        time.sleep(0.1)
        status, seconds = answer(served[2], small)
        left = sum(not other.done() for other in others)
        statuses = {other.result()[0] for other in others}
    assert (status, statuses) == (200, {200})
    assert left >= 2, f"{seconds} s"


def test_a_picture_of_too_many_pixels_is_refused_by_its_header(served):
    status, seconds = answer(served[2], png(9000, 9000))
    assert status == 413
    assert seconds < 2


def start_upload(address: str, sent: bytes, length: int) -> socket.socket:
    """A connection whose picture of `length` bytes never arrives whole."""
    host, port = address.removeprefix("http://").split(":")
    upload = socket.create_connection((host, int(port)), timeout=30)
    upload.sendall(
        f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode() + sent
    )
    return upload


def test_slow_uploads_keep_nobody_waiting_and_aborted_ones_are_no_error(served):
    uploads = [start_upload(served[2], b"abc", 9000) for _ in range(60)]
    with ThreadPoolExecutor(20) as clients:
        answers = [*clients.map(answer, 100 * [served[2]], 100 * [png(9, 9)])]
    assert {status for status, _ in answers} == {200}
    for upload in uploads:
        upload.close()
    assert answer(served[2], png(9, 9))[0] == 200
    assert "Traceback" not in served[3].read_text()


def test_the_bytes_of_large_uploads_are_bounded_and_small_pictures_pass_beside_them(served):
    large = bytes(2**20 + 2**16)
    uploads = [start_upload(served[2], large, 2 * len(large)) for _ in range(12)]
    time.sleep(1)
    assert answer(served[2], large)[0] == 503
    assert answer(served[2], png(9, 9))[0] == 200
    for upload in uploads:
        upload.close()
    for _ in range(50):
        if (status := answer(served[2], large)[0]) != 503:
            break
        time.sleep(0.1)
    assert status == 400  # it is no picture


SLOW_SERVER = """
import time
import serve
serve.MAX_WAITING, serve.WAIT_S = 3, 0.5
serve._scores = lambda body, max_mib: time.sleep(2) or {}
app = serve.app
"""


def test_pictures_wait_for_their_turn_in_a_bounded_queue_up_to_the_stated_time(served, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_SERVER)
    shutil.copy(served[3].with_name("model.onnx"), tmp_path)
    with serving(tmp_path / "model.onnx", "slow:app") as address, ThreadPoolExecutor(9) as clients:
        answers = [*clients.map(answer, 9 * [address], 9 * [b"a"])]
    refused = sorted(seconds for status, seconds in answers if status == 503)
    assert [status for status, _ in answers].count(200) == 2  # those that are computed
    assert len(refused) == 7
    assert refused[3] < 0.5 <= refused[4] < 2  # four at once, and the three that waited


@pytest.mark.parametrize(("body", "status"), [(b"not a picture", 400), (bytes(21 * 2**20), 413)])
def test_what_is_no_picture_is_refused_and_the_server_goes_on(served, body, status):
    with pytest.raises((HTTPError, URLError)) as refused:
        urlopen(served[2], body, timeout=30)
    if isinstance(refused.value, HTTPError):
        assert refused.value.code == status
        assert "error" in json.load(refused.value)
