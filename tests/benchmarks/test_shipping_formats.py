"""benchmarks/shipping_formats.py: a file that fails is a row, and others are timed in turn."""

import json
import sys
from dataclasses import replace

import pytest
import shipping_formats
from PIL import Image
from shipping_formats import photographs, table

from fullstride.deploy.export import write


@pytest.mark.slow
def test_a_format_that_fails_is_a_row_and_others_are_timed_beside_the_reference(
    monkeypatch, tmp_path
):
    def fails(kind, job, path):
        if job.metadata.precision == "int8":
            raise ValueError("no int8 today")
        write(kind, job, path)

    monkeypatch.setattr(shipping_formats, "NETWORKS", {"genet_tiny": 32})
    monkeypatch.setattr(shipping_formats, "PICTURES", 4)
    monkeypatch.setattr(shipping_formats, "CALIBRATION", 2)
    monkeypatch.setattr(shipping_formats, "write", fails)
    quick = replace(shipping_formats.THROUGHPUT, warmup_s=0, round_s=0.01)
    monkeypatch.setattr(shipping_formats, "THROUGHPUT", quick)
    out, words = tmp_path / "out.json", ["--only", "genet_tiny", "--formats", "onnx"]
    words += ["--out", str(out), "--files", str(tmp_path / "files"), "--rounds", "2"]
    page = tmp_path / "page.md"
    page.write_text(f"above\n{shipping_formats.BEGIN}old\n{shipping_formats.END}below\n")
    words += ["--page", str(page)]
    other = {
        "file": "gone",
        "ratio": 2,
        "same_class_percent": 100,
        "megabytes": 1,
        "cpu_seconds": 1,
    }
    before = {"genet_tiny": {"files": {"ncnn fp32": other}}}  # of a format that is not named
    out.write_text(json.dumps({"networks": before}))
    for step in ("convert", "time"):
        monkeypatch.setattr(sys, "argv", ["shipping_formats.py", *words, "--step", step])
        shipping_formats.main()
    results = json.loads(out.read_text())["networks"]
    files = results["genet_tiny"]["files"]
    assert [*files] == ["ncnn fp32", "onnx fp32", "onnx fp16", "onnx int8"]
    assert files["ncnn fp32"] == other
    assert files["onnx int8"] == {"error": "no int8 today"}
    assert files["onnx fp32"]["ratio"] == pytest.approx(1)
    assert files["onnx fp16"]["megabytes"] < files["onnx fp32"]["megabytes"]
    assert files["onnx fp32"]["difference"] < 1e-4
    lines = table(results).splitlines()
    assert lines[0] == "| | genet_tiny, 32 |"
    assert lines[3].startswith("| onnx fp32 | 1.00 (100 %, ")
    assert lines[5] == "| onnx int8 | not written |"
    above, begin, *rest, end, below = page.read_text().splitlines()
    assert (above, rest, below) == ("above", ["", *lines, ""], "below")


def test_photographs_of_the_ranges_are_not_those_of_the_comparison():
    ours, theirs = (photographs(split, 3, 16) for split in ("train", "test"))
    assert all(isinstance(each, Image.Image) and each.size == (16, 16) for each in ours)
    assert not {each.tobytes() for each in ours} & {each.tobytes() for each in theirs}
    assert [each.tobytes() for each in photographs("test", 3, 16)] == [
        each.tobytes() for each in theirs
    ]
