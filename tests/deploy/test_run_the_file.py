"""The page on exported files is true: its code runs without PyTorch and without fullstride."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundles import COLOUR, GRAY, make_bundle
from pages import code
from PIL import Image

from fullstride.data.readers.decode import decode
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import probabilities
from fullstride.deploy.settings import ExportOptions

CODE = code("docs/guides/run_the_file.md")
# An import of a module that is None fails.
WITHOUT = "import sys, runpy; sys.modules.update(torch=None, fullstride=None); sys.argv[:] = "
WITHOUT += "sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    small = random.integers(256, size=(3, 6, 8, 4), dtype=np.uint8)
    images = [Image.fromarray(each, "RGBA").resize((90, 70)) for each in small]
    images[0] = images[0].convert("RGB")
    images[1] = images[1].convert("RGB").rotate(90, expand=True)
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
    deep = np.linspace(0, 65535, 70 * 90).astype(np.uint16).reshape(70, 90)
    Image.fromarray(deep).save(folder / "deep.png")
    return sorted(folder.iterdir())


SQUISHED = replace(COLOUR, fit="squish", kernel="bicubic", background="#2040c0")


@pytest.mark.parametrize("pre", [COLOUR, SQUISHED, GRAY])
def test_the_code_of_the_page_predicts_as_fullstride_does(pre, pictures, tmp_path):
    path, script = tmp_path / "model.onnx", tmp_path / "classify.py"
    images = [decode(each, pre.channels, background=pre.background) for each in pictures]
    options = ExportOptions(format="onnx", input_kind="pixels")
    # untrained logits are so far apart that without a temperature one class has the whole of 1
    bundle = replace(make_bundle("genet_tiny", pre), temperature=300.0)
    export(bundle, path, ComparisonImages(images), options)
    script.write_text(CODE[0])
    words = [sys.executable, "-c", WITHOUT, script, path, *pictures]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=True)
    expected = probabilities(open_file(path), images)
    for line, file, row in zip(done.stdout.splitlines(), pictures, expected, strict=True):
        name, *guesses = line.split()
        assert name == str(file)
        assert guesses[0] == str(row.argmax())
        for guess, share in zip(guesses[::2], guesses[1::2], strict=True):
            assert float(share.rstrip("%")) == pytest.approx(100 * row[int(guess)], abs=0.06)


def test_the_code_for_openvino_gives_the_same_probabilities(pictures, tmp_path, monkeypatch):
    images = [decode(each, 3) for each in pictures]
    bundle = make_bundle("genet_tiny", COLOUR)
    for format, name in (("onnx", "model.onnx"), ("openvino", "runs/mine/model")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        options = ExportOptions(format=format, input_kind="pixels")
        export(bundle, tmp_path / name, ComparisonImages(images), options)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["classify.py", "model.onnx"])
    images[0].save("photo.jpg", quality=95)
    names: dict = {}
    exec(compile(CODE[0] + CODE[1], "run_the_file.md", "exec"), names)
    expected = probabilities(open_file("model.onnx"), [decode(Path("photo.jpg"), 3)])
    np.testing.assert_allclose(names["output"], expected, atol=1e-4)
    assert names["classes"] == list(bundle.classes)
