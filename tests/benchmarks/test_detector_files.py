"""benchmarks/dense_files.py: boxes for others' programs, and files that are scored and timed."""

import json
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from fullstride.examples import Look, write_scenes

pytest.importorskip("sklearn")
pytest.importorskip("skimage")
dense_files = import_module("dense_files")

SIDE = 64
LOOK = Look(most=2, sides=(0.4, 0.6))
STUDY = replace(
    dense_files.STUDIES["detection"],
    write=lambda folder, seed: write_scenes(
        folder, {"train": 8, "val": 4, "test": 1}, SIDE, seed, look=LOOK, one_class=True
    ),
    recipe=replace(dense_files.STUDIES["detection"].recipe, steps=2, batch_size=4, resolution=SIDE),
    models=("genet_tiny",),
)
PROGRAM = """#!{python}
import shutil, sys
from pathlib import Path
words = dict(each.split("=", 1) for each in sys.argv[2:] if "=" in each)
if sys.argv[1] == "detect":
    weights = Path(words["project"], words["name"], "weights")
    weights.mkdir(parents=True)
    (weights / "last.pt").write_text(" ".join(sys.argv[1:]))
else:
    shutil.copy("{file}", Path(words["model"]).with_suffix(".onnx"))
"""


def write_constant(path: Path, boxes: np.ndarray) -> None:
    """A file that says `boxes` (n, 6) of every picture."""
    value = helper.make_tensor("boxes", TensorProto.FLOAT, (1, *boxes.shape), boxes.ravel())
    graph = helper.make_graph(
        [helper.make_node("Constant", [], ["out"], value=value)],
        "constant",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, (1, 3, SIDE, SIDE))],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, (1, *boxes.shape))],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


@pytest.mark.slow
def test_a_program_gets_the_boxes_of_the_scenes_and_its_file_is_scored(tmp_path):
    """The file says the boxes of the one test picture, in order and then all wrong."""
    STUDY.write(tmp_path / "seed0/data", 0)
    contents = {
        split: json.loads((tmp_path / f"seed0/data/annotations/instances_{split}.json").read_text())
        for split in ("train", "val", "test")
    }
    corners = np.array([each["bbox"] for each in contents["test"]["annotations"]])
    corners[:, 2:] += corners[:, :2]
    scored = np.insert(corners, 4, [[0.9], [0]], 1).astype(np.float32)
    trainings = {}
    for name, move in (("right", 0), ("wrong", SIDE)):
        write_constant(tmp_path / f"{name}.onnx", scored + [move, move, move, move, 0, 0])
        program = tmp_path / name
        program.write_text(PROGRAM.format(python=sys.executable, file=tmp_path / f"{name}.onnx"))
        program.chmod(0o755)
        words = ["model=tiny.yaml", "epochs=3"]
        trainings[name] = partial(dense_files.train_yolo, program, words)
    rows = dense_files.compare(STUDY, trainings, tmp_path, 1)
    assert [row["scores"]["ap50"] for row in rows] == [pytest.approx(100), 0]
    folder = tmp_path / "seed0/yolo"
    for split, content in contents.items():
        lines = dict.fromkeys((each["file_name"] for each in content["images"]), 0)
        for each in content["annotations"]:
            name = content["images"][each["image_id"]]["file_name"]
            text = (folder / "labels" / split / name).with_suffix(".txt").read_text()
            label, *numbers = text.splitlines()[lines[name]].split()
            x, y, w, h = SIDE * np.array(numbers, float)
            assert label == "0"
            assert [x - w / 2, y - h / 2, w, h] == pytest.approx(each["bbox"], abs=1e-3)
            lines[name] += 1
        assert {each.name for each in (folder / "images" / split).glob("*.png")} == {*lines}
    assert "epochs=3" in (folder / "run/weights/last.pt").read_text()


@pytest.mark.slow
def test_the_file_of_torchvisions_detector_says_what_it_says(tmp_path):
    pre = replace(dense_files.Preprocessing(), resolution=SIDE)
    torch.manual_seed(0)
    net = dense_files.torchvision_fcos(1, 64, SIDE).eval()
    dense_files.write_fcos(net, pre, tmp_path / "fcos.onnx")
    x = torch.rand(2, 3, SIDE, SIDE)
    mean, std = (torch.tensor(each)[:, None, None] for each in (pre.mean, pre.std))
    with torch.no_grad():
        expected = net((x - mean) / std)
    assert (expected[..., 5] == 0).any()
    rows = dense_files.File(tmp_path / "fcos.onnx")(x)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_networks_are_trained_once_and_measured_at_every_call(tmp_path):
    trainings = {"ours": dense_files.train_ours, "fcos": dense_files.train_fcos}
    first = dense_files.compare(STUDY, trainings, tmp_path, 1)
    second = dense_files.compare(STUDY, {"ours": None, "fcos": None}, tmp_path, 1)
    for one, other in zip(first, second, strict=True):
        assert one.pop("ms") > 0 < other.pop("ms")
        assert one == other
    where = {"date": "2026-11-26", "device": "x", "torch": "2"}
    content = {"environment": where, "yolo": "YOLO 1", "rows": [r | {"ms": 1.5} for r in first]}
    page = dense_files.page(content)
    assert "| fcos | 0 | 0 |" in page
    assert "| 1.5 |" in page
