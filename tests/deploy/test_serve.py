"""The HTTP server of the docs, started as its first lines say."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A bundle, some pictures, and the address and the log of a server of its exported file."""
    bundle, digits = small_bundle(), open_data("digits").test
    pictures = [digits.picture(index) for index in range(2)]
    path = tmp_path_factory.mktemp("served") / "model.onnx"
    log = path.with_name("log.txt")
    export(bundle, path, ComparisonImages(pictures))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        sys.executable,
        "-m",
        "uvicorn",
        "--app-dir",
        str(DOCS),
        "serve:app",
        "--port",
        str(port),
    ]
    environment = {**os.environ, "MODEL": str(path)}
    with log.open("w") as file:
        server = subprocess.Popen(words, env=environment, stdout=file, stderr=file)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urlopen(address, b"", timeout=5)
            except HTTPError:
                break
            except URLError:
                assert server.poll() is None, "the server ended"
                time.sleep(0.2)
        yield bundle, pictures, address, log
    finally:
        server.terminate()
        server.wait(10)


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


def test_uploads_that_never_end_are_bounded_and_aborted_ones_are_no_error(served):
    host, port = served[2].removeprefix("http://").split(":")
    uploads = [socket.create_connection((host, int(port)), timeout=30) for _ in range(16)]
    for upload in uploads:
        upload.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n\r\npart")
    time.sleep(1)
    assert answer(served[2], png(9, 9))[0] == 503
    for upload in uploads:
        upload.close()
    for _ in range(50):
        if (status := answer(served[2], png(9, 9))[0]) == 200:
            break
        time.sleep(0.1)
    assert status == 200
    assert "Traceback" not in served[3].read_text()


@pytest.mark.parametrize(("body", "status"), [(b"not a picture", 400), (bytes(21 * 2**20), 413)])
def test_what_is_no_picture_is_refused_and_the_server_goes_on(served, body, status):
    with pytest.raises((HTTPError, URLError)) as refused:
        urlopen(served[2], body, timeout=30)
    if isinstance(refused.value, HTTPError):
        assert refused.value.code == status
        assert "error" in json.load(refused.value)
