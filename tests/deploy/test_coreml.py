"""Packages of Core ML: what coremltools reads in them again, computed by PyTorch's operations."""

import shutil
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bundles import COLOUR, GRAY, make_bundle
from clips import clip_bundle, some_clips
from torch import nn
from toy_bundles import bundle_of, some_pictures

from fullstride.data.dataset import open_data
from fullstride.deploy.choose_form import runnable
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export
from fullstride.deploy.formats import base, coreml, detect_format, open_as_modules, open_file
from fullstride.deploy.predict import probabilities
from fullstride.deploy.settings import ExportOptions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("coremltools") is None, reason="not installed: coremltools"),
]


@pytest.fixture(scope="module")
def pictures():
    digits = open_data("digits").test
    return [digits.picture(index).resize((40 + 3 * index, 50)) for index in range(4)]


@pytest.fixture(scope="module")
def written(pictures, tmp_path_factory):
    """A network of colours in fp32, and what the export said."""
    bundle, lines = make_bundle("tresnet_tiny", COLOUR), []
    path = tmp_path_factory.mktemp("coreml") / "net.mlpackage"
    options = ExportOptions(format="coreml", input_kind="pixels")
    export(bundle, path, ComparisonImages(pictures), options, progress=lines.append)
    return SimpleNamespace(bundle=bundle, path=path, lines=lines)


def test_a_package_computes_what_pytorch_computes_and_names_its_operations(written, pictures):
    (line,) = written.lines
    assert line.startswith("not run, as Core ML needs macOS. Its operations: 33 conv, ")
    model = open_file(written.path)
    assert "macOS" in model.runtime
    expected = probabilities(written.bundle, pictures)
    assert probabilities(model, pictures) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="does not take inputs of"):
        model.run(np.zeros((1, 16, 16, 3), np.uint8))


def description(path):
    with base.quiet(""):
        from coremltools.models.utils import load_spec
    return load_spec(str(path)).description


def test_core_ml_sees_an_image_and_a_classifier_with_its_licence(written):
    files = {str(each.relative_to(written.path)) for each in written.path.rglob("*")}
    assert files - {"Data", coreml.DATA, f"{coreml.DATA}/weights"} == {*coreml.FILES}
    about = description(written.path)
    (image,) = about.input
    assert (image.type.imageType.width, image.type.imageType.height) == (40, 40)
    assert image.type.WhichOneof("Type") == "imageType"
    assert about.predictedFeatureName == "classLabel"
    last = coreml.read(written.path)[1][-1]
    assert last.op_type == "classify"
    assert coreml.arguments(last)["classes"] == [*written.bundle.classes]
    assert about.metadata.license == written.bundle.licence
    assert open_file(written.path).metadata.classes == written.bundle.classes


def test_another_weight_and_a_damaged_file_are_noticed(written, pictures, tmp_path):
    path = tmp_path / "net.mlpackage"
    shutil.copytree(written.path, path)
    weights = path / coreml.WEIGHTS
    data = bytearray(weights.read_bytes())
    data[128:160] = np.full(8, 9, "<f4").tobytes()  # behind the head of the first weights
    weights.write_bytes(data)
    difference = probabilities(open_file(path), pictures) - probabilities(written.bundle, pictures)
    assert np.abs(difference).max() > 1e-3
    weights.write_bytes(written.path.joinpath(coreml.WEIGHTS).read_bytes())
    graph = path / coreml.GRAPH
    graph.write_bytes(graph.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"^[^\n]*net.mlpackage cannot be read[^\n]*$"):
        open_file(path)


def test_half_of_the_bits_are_nearly_the_same_and_the_next_export_replaces_the_package(
    pictures, tmp_path
):
    bundle, path = make_bundle("genet_tiny", GRAY), tmp_path / "net.mlpackage"
    images = ComparisonImages(pictures)
    for precision, kind in (("fp32", "pixels"), ("fp16", "pixels"), ("fp16", "normalised")):
        options = ExportOptions(
            format="coreml", input_kind=kind, precision=precision, force=precision == "fp16"
        )
        result = export(bundle, path, images, options)
        assert precision == "fp32" or 0 < result.comparison.relative_difference < 0.02
    assert open_file(path).metadata.precision == "fp16"
    about = description(path)
    for (array,) in (about.input, about.output):
        assert array.type.multiArrayType.dataType == array.type.multiArrayType.FLOAT32


def test_clips_and_maps_are_those_of_pytorch_and_others_are_refused_in_one_line(tmp_path):
    for bundle, images, kind in [
        (clip_bundle(), some_clips(), "normalised"),
        (bundle_of("segment"), some_pictures(), "pixels"),
    ]:
        options = ExportOptions(format="coreml", input_kind=kind, force=True)
        result = export(bundle, tmp_path / "x.mlpackage", ComparisonImages(images), options)
        assert result.comparison.relative_difference < 1e-4
    options = ExportOptions(format="coreml", input_kind="pixels")
    with pytest.raises(ValueError, match=r"^Core ML takes no clips of pixels: leave [^\n]* out$"):
        export(clip_bundle(), tmp_path / "y.mlpackage", ComparisonImages(some_clips()), options)
    images = ComparisonImages(some_pictures())
    with pytest.raises(ValueError, match=r"^coremltools cannot convert toy: [^\n]*$"):
        export(bundle_of("detect"), tmp_path / "z.mlpackage", images, options)


def test_files_of_another_system_are_not_timed(written):
    assert detect_format(written.path) == "coreml"
    line = "^coreml files are not timed: they run on macOS, and not in fullstride$"
    with pytest.raises(ValueError, match=line):
        open_as_modules([str(written.path)])
    with pytest.raises(ValueError, match=line):
        runnable(("coreml",))


class Rest(nn.Module):
    """Layers that the networks above lack."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv2d(8, 8, 3, stride=2, padding=1, dilation=2, groups=4)

    def forward(self, x):
        x = F.max_pool2d(F.hardswish(x), 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1)
        x = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False).clamp(-1, 0.5)
        x = self.conv(F.pad(x, (1, 2, 0, 3), value=0.5))
        x = F.gelu(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True)
        x = F.gelu(F.interpolate(x, scale_factor=2))
        return F.silu(x)[:, 1:7, :, -5:]


def test_operations_compute_what_those_of_pytorch_compute(tmp_path):
    net, x = Rest().eval(), torch.randn(1, 8, 15, 17)
    program = torch.export.export(net, (x,)).run_decompositions({})
    with base.quiet(""):
        import coremltools as ct

        ct.convert(
            program,
            inputs=[ct.TensorType(coreml.SOURCE, x.shape)],
            minimum_deployment_target=ct.target.iOS16,
            compute_precision=ct.precision.FLOAT32,
            skip_model_load=True,
            package_dir=str(tmp_path / "net.mlpackage"),
        )
    operations = coreml.read(tmp_path / "net.mlpackage")[1]
    assert {"clip", "gelu", "layer_norm", "max_pool", "sigmoid_hard"} <= {
        each.op_type for each in operations
    }
    assert coreml.outputs(operations)(x.numpy()) == pytest.approx(net(x).detach().numpy(), abs=1e-5)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: coreml.same_on_both_sides("custom", [1, 0]), "other sizes at its ends"),
        (lambda: coreml.slice_by_index(torch.ones(2), [0], [1], squeeze_mask=[True]), "removes"),
        (
            lambda: coreml.upsample(
                torch.ones(1, 1, 2, 2), 2.0, 2.0, align_corners=False, half_pixel_centers=False
            ),
            "other places",
        ),
        (
            lambda: coreml.outputs([SimpleNamespace(op_type="topk")]),
            "^fullstride cannot compare its operations topk$",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(call, reason):
    with pytest.raises(ValueError, match=reason):
        call()
