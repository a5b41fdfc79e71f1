"""benchmarks/shipping_formats.py: a file that fails is a row, and others are timed in turn."""

from dataclasses import replace

import pytest
import shipping_formats
from PIL import Image
from shipping_formats import measure, photographs, table

from fullstride.deploy.export import export


@pytest.mark.slow
def test_a_format_that_fails_is_a_row_and_others_are_timed_beside_the_reference(
    monkeypatch, tmp_path
):
    def fails(bundle, path, images, options, **more):
        if options.precision == "int8":
            raise ValueError("no int8 today")
        return export(bundle, path, images, options, **more)

    monkeypatch.setattr(shipping_formats, "NETWORKS", {"genet_tiny": 32})
    monkeypatch.setattr(shipping_formats, "PICTURES", 4)
    monkeypatch.setattr(shipping_formats, "CALIBRATION", 2)
    monkeypatch.setattr(shipping_formats, "export", fails)
    quick = replace(shipping_formats.THROUGHPUT, warmup_s=0, round_s=0.01)
    monkeypatch.setattr(shipping_formats, "THROUGHPUT", quick)
    files = measure("genet_tiny", ["onnx"], 2)
    assert [*files] == ["onnx fp32", "onnx fp16", "onnx int8"]
    assert files["onnx int8"] == {"error": "no int8 today"}
    assert files["onnx fp32"]["ratio"] == pytest.approx(1)
    assert files["onnx fp16"]["megabytes"] < files["onnx fp32"]["megabytes"]
    assert files["onnx fp32"]["difference"] < 1e-4
    about = {"device": "a machine", "date": "today"}
    lines = table({"genet_tiny": {"environment": about, "files": files}}).splitlines()
    assert lines[0] == "| | genet_tiny, 32 |"
    assert lines[2].startswith("| onnx fp32 | 1.00 (100 %, ")
    assert lines[4] == "| onnx int8 | not written |"


def test_photographs_of_the_ranges_are_not_those_of_the_comparison():
    ours, theirs = (photographs(split, 3, 16) for split in ("train", "test"))
    assert all(isinstance(each, Image.Image) and each.size == (16, 16) for each in ours)
    assert not {each.tobytes() for each in ours} & {each.tobytes() for each in theirs}
    assert [each.tobytes() for each in photographs("test", 3, 16)] == [
        each.tobytes() for each in theirs
    ]
