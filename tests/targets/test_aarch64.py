"""The runner and exported files work on aarch64, by an emulator. Its times say nothing."""

import os

import numpy as np
import pytest

from fullstride.deploy.choose_form import run_there, timed_file, untrained_files
from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.targets.target import Target

COMMAND = os.environ.get("FULLSTRIDE_AARCH64", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not COMMAND,
        reason="needs FULLSTRIDE_AARCH64, the target that tests/targets/aarch64.sh prints",
    ),
]


@pytest.fixture(scope="module")
def board():
    with Target(COMMAND) as target:
        yield target


def test_the_runner_says_where_it_is(board):
    there = board.describe().machine
    assert there.machine == "aarch64"
    assert "onnx" in there.runtimes


@pytest.mark.parametrize(("name", "precision"), [("genet_tiny", "int8"), ("tresnet_tiny", "fp32")])
def test_files_compute_there_what_they_compute_here(board, tmp_path, name, precision):
    files = untrained_files(
        zoo.create(name, classes=10), name, Preprocessing(resolution=64), 10, "pixels"
    )
    model = files.open("onnx", precision, tmp_path)
    run_there(board, model, 1)
    images = np.random.default_rng(0).integers(256, size=(2, 64, 64, 3), dtype=np.uint8)
    outputs = board.run(timed_file("", model, 2), images)
    np.testing.assert_allclose(outputs, model.run(images), atol=1e-4)
