"""Files of detectors, of segmentation and of depth: the same predictions as PyTorch's."""

import json
import sys

import numpy as np
import pytest
import torch
from toy_bundles import bundle_of, some_pictures

from fullstride.cli import main
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import inputs, outputs
from fullstride.deploy.settings import ExportOptions
from fullstride.examples import write_scenes
from fullstride.tasks import task_of


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize(
    ("task", "format", "kind"),
    [
        pytest.param("detect", "onnx", "normalised", marks=pytest.mark.slow),
        pytest.param("detect", "openvino", "pixels", marks=pytest.mark.slow),
        ("segment", "onnx", "pictures"),
        ("depth", "openvino", "normalised"),
        pytest.param("segment", "pt2", "pixels", marks=pytest.mark.slow),
    ],
)
def test_a_file_has_the_outputs_of_pytorch(task, format, kind, tmp_path):
    bundle, pictures = bundle_of(task), some_pictures()
    path = tmp_path / ("net" + {"onnx": ".onnx", "openvino": "", "pt2": ".pt2"}[format])
    result = export(
        bundle, path, ComparisonImages(pictures), ExportOptions(format=format, input_kind=kind)
    )
    assert result.comparison.same_class == len(pictures)
    if kind != "pictures":
        assert result.comparison.relative_difference < 1e-3
    model = open_file(path, trust=True)
    rows = outputs(model, inputs(kind, bundle.preprocessing, pictures))
    sizes = {"detect": (100, 6), "segment": (3, 64, 64), "depth": (1, 64, 64)}
    assert rows.shape == (len(pictures), *sizes[task])


@pytest.mark.usefixtures("few_rounds")
def test_openvino_has_a_row_for_each_image_from_a_detector_in_int8(tmp_path):
    """It misplaces the axes of a choice among rounded channels, of which there is one."""
    bundle, pictures, path = bundle_of("detect"), some_pictures(), tmp_path / "net"
    options = ExportOptions(format="openvino", precision="int8", max_drop=100)
    check = export(
        bundle, path, ComparisonImages(pictures), options, calibration=pictures
    ).comparison
    assert check.images == len(pictures)
    images = np.concatenate([*inputs("normalised", bundle.preprocessing, pictures)])
    rows = torch.from_numpy(open_file(path).run(images))
    with torch.inference_mode():
        expected = bundle.net(torch.from_numpy(images))
    assert rows.shape == expected.shape
    assert (rows[..., 4] - expected[..., 4]).abs().mean() < 0.05, "scores, falling"


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize("task", [pytest.param("detect", marks=pytest.mark.slow), "segment"])
def test_a_file_for_any_size_has_the_outputs_of_pytorch(task, tmp_path):
    bundle, path = bundle_of(task, side=96), tmp_path / "net.onnx"
    export(bundle, path, ComparisonImages(some_pictures()), ExportOptions(any_size=True))
    model = open_file(path)
    for sides in ((160, 128), (64, 256)):
        images = np.random.default_rng(0).standard_normal((2, 3, *sides)).astype(np.float32)
        with torch.inference_mode():
            expected = bundle.net(torch.from_numpy(images))
        rows = torch.from_numpy(model.run(images))
        assert rows.shape == expected.shape
        assert task_of(bundle).difference(rows, expected) < 1e-3  # equal scores in any order


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command; returns what it printed."""

    def call(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["fullstride", *map(str, words)])
        code = None
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        assert not code, printed.err
        return printed.out

    return call


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize("task", ["detect", "segment", "depth"])
def test_a_user_trains_scores_predicts_exports_and_measures(task, run, tmp_path):
    data, out = tmp_path / "scenes", tmp_path / "run"
    kind = "floor" if task == "depth" else "digits"
    write_scenes(data, {"train": 12, "val": 4, "test": 4}, 64, seed=0, kind=kind)
    fields = ["--epochs", 1, "--resolution", 64, "--task.head-width", 32]
    fields += ["--task.head-convs", 1] if task == "detect" else []
    run("train", data, "--task", task, "--model", "resnet_rs_tiny", "--out", out, *fields)
    assert "test" in run("validate", out)
    folders = ["--draw", tmp_path / "drawn"]
    folders += [] if task == "detect" else ["--maps", tmp_path / "maps"]
    lines = run("predict", out, data / "test", "--json", *folders).splitlines()
    assert len(lines) == len([*(tmp_path / "drawn").iterdir()]) == 4
    assert all(not json.loads(line)["unreadable"] for line in lines)
    path = tmp_path / ("openvino" if task == "segment" else "net.onnx")
    run("export", out, "--out", path, "--with-preprocessing")
    assert "test" in run("validate", path, "--data", data)
    for each in (path, out):
        run("bench", each, "--rounds", 2, "--protocol", "online", "--reference", "none")
    assert "task_head" in run("measure", "cost", out)
