"""The HTTP server of the docs, started as its first lines say."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest
from bundles import small_bundle

from fullstride.data.dataset import open_data
from fullstride.deploy.export import ComparisonImages, export
from fullstride.deploy.predict import probabilities

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A bundle, some pictures, and the address of a server of the bundle's exported file."""
    bundle, digits = small_bundle(), open_data("digits").test
    pictures = [digits.picture(index) for index in range(2)]
    path = tmp_path_factory.mktemp("served") / "model.onnx"
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
    server = subprocess.Popen(
        words,
        env={**os.environ, "MODEL": str(path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
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
        yield bundle, pictures, address
    finally:
        server.terminate()
        server.wait(10)


@pytest.mark.slow
def test_a_picture_that_is_posted_is_answered_with_the_bundles_probabilities(served, tmp_path):
    bundle, pictures, address = served
    for picture, expected in zip(pictures, probabilities(bundle, pictures), strict=True):
        picture.save(tmp_path / "a.png")
        with urlopen(address, (tmp_path / "a.png").read_bytes(), timeout=30) as response:
            answer = json.load(response)
        assert list(answer) == list(bundle.classes)
        assert list(answer.values()) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(("body", "status"), [(b"not a picture", 400), (bytes(21 * 2**20), 413)])
def test_what_is_no_picture_is_refused_and_the_server_goes_on(served, body, status):
    with pytest.raises((HTTPError, URLError)) as refused:
        urlopen(served[2], body, timeout=30)
    if isinstance(refused.value, HTTPError):
        assert refused.value.code == status
        assert "error" in json.load(refused.value)
