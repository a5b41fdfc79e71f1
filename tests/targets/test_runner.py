"""The runner's operations in this process, where faults of single requests are seen."""

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from test_target import file  # noqa: F401  a fixture

from fullstride.deploy.choose_form import timed_file, untrained_files
from fullstride.measure.protocols import ONLINE
from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.targets import runner
from fullstride.targets.runner import Runner
from fullstride.targets.target import Target

QUICK = {"rounds": 2, "warmup_s": 0.0, "round_s": 0.001, "threads": 1}


@pytest.fixture
def sent(tmp_path, file):  # noqa: F811
    """A runner that has the file, and the file as a request names it."""
    here, data = Runner(tmp_path), file.path.read_bytes()
    parts = (data[:50], data[50:])
    for number, part in enumerate(parts):
        request = {"name": file.key, "offset": 50 * number, "data": base64.b64encode(part)}
        if number:
            request["sha256"] = hashlib.sha256(data).hexdigest()
        assert here.put(request) == {}
    return here, file.request()


def test_a_file_in_parts_is_run_and_measured(sent):
    here, request = sent
    images = np.array([[1, 2, 3, 4]], np.uint8)
    answer = here.run(
        {
            "file": request,
            "threads": 1,
            "dtype": "uint8",
            "shape": images.shape,
            "data": base64.b64encode(images.tobytes()),
        }
    )
    outputs = np.frombuffer(base64.b64decode(answer["data"]), "<f4").reshape(answer["shape"])
    np.testing.assert_array_equal(outputs, 2 * images)
    times = here.measure({**QUICK, "files": [request]})
    (samples,) = times["ms"].values()
    assert len(samples) % 2 == 0
    assert min(samples) > 0
    assert here.remove({}) == {}
    assert not any(here.folder.iterdir())


def test_parts_follow_each_other_and_names_stay_in_the_folder(sent):
    here, request = sent
    with pytest.raises(ValueError, match="bytes"):
        here.put({"name": request["name"], "offset": 7, "data": ""})
    with pytest.raises(ValueError, match="damaged"):
        here.put({"name": "other", "offset": 0, "data": "AAAA", "sha256": "0"})
    for name in ("", "..", "a/../b", "/etc/passwd", "a/b/c"):
        with pytest.raises(ValueError, match="no name of a file"):
            here.path(name)


def test_the_system_is_described_and_what_it_does_not_say_is_none(sent, monkeypatch):
    here, _ = sent
    found = here.hello({})["machine"]
    assert found["cores"] >= 1
    assert found["processor"]
    monkeypatch.setattr(runner, "read", lambda path: "1500000" if path.endswith("freq") else "")
    assert runner.state()["clock_mhz"] == 1500
    assert runner.state()["governor"] is None
    for name in ("openvino", "ncnn", "ai_edge_litert", "executorch"):
        monkeypatch.setitem(sys.modules, name, None)
    versions, missing = runner.runtimes()
    assert set(versions) == {"onnx"}
    assert set(missing) == {"openvino", "ncnn", "litert", "executorch"}
    assert len(here.noise(QUICK)["ms"]["values"]) % 2 == 0


def test_a_request_that_fails_is_answered_and_the_next_one_works(monkeypatch, tmp_path):
    lines = [b"no JSON\n", json.dumps({"op": "steal", "limit_s": 1}).encode() + b"\n"]
    lines.append(json.dumps({"op": "remove", "limit_s": 5}).encode() + b"\n")
    stdin = io.TextIOWrapper(io.BytesIO(b"".join(lines)))
    answers = (tmp_path / "answers").open("w+")
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(os, "dup", lambda descriptor: os.open(tmp_path / "answers", os.O_WRONLY))
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)
    with answers:
        runner.main()
        read = [json.loads(line) for line in answers.read().splitlines()]
    assert ["error" in answer for answer in read] == [True, True, False]


def test_openvino_folders_are_opened_by_their_graph(tmp_path):
    import openvino
    from openvino import opset13

    images = opset13.parameter([-1, 4], np.uint8, name="images")
    floats = opset13.convert(images, "f32")
    model = openvino.Model([opset13.add(floats, floats)], [images], "double")
    (tmp_path / "net").mkdir()
    openvino.save_model(model, tmp_path / "net" / "model.xml", compress_to_fp16=False)
    infer = Runner(tmp_path).open({"name": "net", "format": "openvino", "precision": "fp32"}, 1)
    assert infer(np.array([[1, 2, 3, 4]], np.uint8)).tolist() == [[2, 4, 6, 8]]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ncnn") is None, reason="not installed: ncnn")
def test_threads_of_ncnn_do_not_wait_busily_beside_other_programs(tmp_path):
    pre = Preprocessing(resolution=32)
    files = untrained_files(zoo.create("genet_tiny"), "net", pre, 10, "pixels")
    model = files.open("ncnn", "fp32", tmp_path, threads=1)
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        with Target(sys.executable) as target:
            protocol = replace(ONLINE, rounds=2, warmup_s=0.0, round_s=0.001)
            times = target.measure([timed_file("net", model, 1)], protocol, threads=2)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert np.median(times.ms["net"]) < 300  # busy threads took 1,300 to 6,500 ms
