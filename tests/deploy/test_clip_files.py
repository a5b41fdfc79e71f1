"""Files of networks of clips: PyTorch's outputs, and inputs with frames, in every format."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from clips import PRE, clip_bundle, some_clips
from torch import nn
from videos import write_frames

from fullstride.data.readers.splits import SplitRule
from fullstride.data.targets import open_clips
from fullstride.deploy import choose_form
from fullstride.deploy.choose_form import untrained_files
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export, make_reference
from fullstride.deploy.export_runs import images_for_ranges, images_to_compare, view_of_clips
from fullstride.deploy.exported import ExportedModule
from fullstride.deploy.fold_batch_norm import folding
from fullstride.deploy.formats import FORMATS, open_file
from fullstride.deploy.predict import most_in_batch, predict, probabilities
from fullstride.deploy.settings import ExportOptions
from fullstride.measure.bench import bench
from fullstride.measure.protocols import ONLINE
from fullstride.nets import zoo

# float32 (N, C, T, H, W), and uint8 (N, T, H, W, C)
SHAPES = {"normalised": (3, 8, 32, 32), "pixels": (8, 32, 32, 3)}


@pytest.fixture(scope="module")
def bundle():
    return clip_bundle()


@pytest.fixture(scope="module")
def clips():
    return some_clips()


@pytest.fixture(scope="module")
def expected(bundle, clips):
    return by_hand(bundle, clips)


def by_hand(bundle, clips):
    """Probabilities by the network alone, of pixels that are normalised by NumPy."""
    x = (np.stack(clips) / 255 - PRE.mean) / PRE.std
    with torch.inference_mode():
        logits = bundle.net(torch.from_numpy(x).float().permute(0, 4, 1, 2, 3))
    rows = (logits / bundle.temperature).softmax(1).numpy()
    assert np.ptp(rows, 0).max() > 0.2  # the clips differ
    return rows


@pytest.fixture(scope="module")
def written(bundle, clips, tmp_path_factory):
    """Export the bundle once for each choice; files of one kind of input share the ONNX graph."""
    folder, references, models = tmp_path_factory.mktemp("clips"), {}, {}

    def write(format, precision="fp32", input_kind="normalised"):
        images = ComparisonImages(clips)
        if input_kind not in references:
            references[input_kind] = make_reference(bundle, images, input_kind)
        options = ExportOptions(
            format=format, precision=precision, input_kind=input_kind, max_drop=100
        )
        path = folder / f"{len(models)}{FORMATS[format].suffix}"
        key = format, precision, input_kind
        if key not in models:
            ranges = clips if precision == "int8" else ()
            reference = references[input_kind]
            export(bundle, path, images, options, calibration=ranges, reference=reference)
            models[key] = open_file(path, trust=True)
        return models[key]

    return write


FP32 = [
    ("onnx", "normalised"),
    ("onnx", "pixels"),
    ("openvino", "normalised"),
    ("openvino", "pixels"),
    ("tensorrt", "normalised"),
    ("triton-server", "pixels"),
    ("pt2", "normalised"),
    pytest.param("pt2", "pixels", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("format", "kind"), FP32)
def test_a_file_gives_the_networks_probabilities_and_says_its_frames(
    format, kind, written, clips, expected
):
    model = written(format, "fp32", kind)
    assert model.preprocessing == PRE
    assert (model.preprocessing.frames, model.preprocessing.frame_stride) == (8, 2)
    assert model.metadata.input_shape() == SHAPES[kind]
    for some in (slice(None), slice(1, 2)):
        assert probabilities(model, clips[some]) == pytest.approx(expected[some], abs=1e-5)


@pytest.mark.slow
def test_a_package_compiled_ahead_of_time_gives_the_networks_probabilities(clips, tmp_path):
    """Of the first stage: each kernel takes a second to compile."""
    bundle, path = clip_bundle(stages=1), tmp_path / "net.pt2"
    options = ExportOptions(format="aoti", input_kind="pixels")
    export(bundle, path, ComparisonImages(clips), options)
    model, rows = open_file(path, trust=True), by_hand(bundle, clips)
    assert model.metadata.input_shape() == SHAPES["pixels"]
    for some in (slice(None), slice(1, 2)):
        assert probabilities(model, clips[some]) == pytest.approx(rows[some], abs=1e-5)


def test_pixels_go_in_as_they_are_and_probabilities_come_out(written, clips, expected):
    model = written("onnx", "fp32", "pixels")
    assert model.run(np.stack(clips)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("format", "precision", "kind", "tolerance"),
    [
        ("onnx", "fp16", "pixels", 0.01),
        ("openvino", "bf16", "normalised", 0.1),
        ("openvino", "fp16", "normalised", 0.01),
        ("onnx", "int8", "pixels", 0.1),
        ("openvino", "int8", "normalised", 0.1),
        pytest.param("pt2", "bf16", "normalised", 0.1, marks=pytest.mark.slow),
    ],
)
def test_other_precisions_give_nearly_the_same_and_not_exactly(
    format, precision, kind, tolerance, written, clips, expected
):
    rows = probabilities(written(format, precision, kind), clips)
    assert 1e-6 < np.abs(rows - expected).max() < tolerance


def test_convolutions_of_an_int8_file_of_clips_have_int8_inputs_and_weights(written):
    import onnx

    graph = onnx.load(written("onnx", "int8", "pixels").path).graph
    makers = {name: node for node in graph.node for name in node.output}
    layers = [node for node in graph.node if node.op_type == "Conv"]
    assert len(layers) > 20
    for node in layers:
        assert [makers[name].op_type for name in node.input[:2]] == ["DequantizeLinear"] * 2
    means = [node for node in graph.node if node.op_type == "ReduceMean"]
    assert len(means) == 1  # before the classifier; those of the gates have an int8 kernel


def test_folding_batch_norms_of_three_dimensions_is_exact(bundle):
    fold = folding(bundle.net)
    norms = [path for path, each in bundle.net.named_modules() if isinstance(each, nn.BatchNorm3d)]
    assert len(norms) > 20
    assert {*fold.layers} == {*norms}
    x = torch.randn(2, 3, 8, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = bundle.net.double()(x.double())
        assert fold.net.double()(x.double()) == pytest.approx(exact, rel=1e-6, abs=1e-6)
    bundle.net.float()


def test_the_servers_inputs_have_frames(written):
    (config,) = written("triton-server", "fp32", "pixels").path.rglob("config.pbtxt")
    assert "dims: [8, 32, 32, 3]" in config.read_text()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("normalised", (2, 3, 8, 96, 128)),
        pytest.param("pixels", (2, 8, 96, 128, 3), marks=pytest.mark.slow),
    ],
)
def test_a_file_of_any_size_takes_clips_of_other_sides(kind, shape, tmp_path):
    bundle, path = clip_bundle(replace(PRE, resolution=64)), tmp_path / "net.onnx"
    images = ComparisonImages(some_clips(pre=bundle.preprocessing))
    export(bundle, path, images, ExportOptions(any_size=True, input_kind=kind))
    rng = np.random.default_rng(0)
    if kind == "pixels":
        rows = open_file(path).run(rng.integers(256, size=shape, dtype=np.uint8))
        assert rows.shape == (2, 4)
        return
    x = rng.standard_normal(shape, np.float32)
    with torch.inference_mode():
        found, rows = open_file(path).run(x), bundle.net(torch.from_numpy(x)).numpy()
    assert found == pytest.approx(rows, abs=1e-5 * float(np.abs(rows).max()))


def test_files_do_not_resize_clips_and_say_so(bundle, clips, tmp_path):
    with pytest.raises(ValueError, match="--with-preprocessing"):
        export(
            bundle,
            tmp_path / "net.onnx",
            ComparisonImages(clips),
            ExportOptions(input_kind="pictures"),
        )
    assert not [*tmp_path.iterdir()]


def test_a_clip_of_another_length_is_refused_by_the_frames_of_the_file(written):
    model = written("onnx", "fp32", "normalised")
    with pytest.raises(ValueError, match=r"exported for 8 frames of 32 x 32 pixels"):
        model.run(np.zeros((1, 3, 9, 32, 32), np.float32))


@pytest.mark.parametrize("kind", ["normalised", "pixels"])
def test_files_of_clips_are_measured_with_clips(kind, written):
    module = ExportedModule(written("onnx", "fp32", kind))
    assert module.random_images(2, 32).shape == (2, *SHAPES[kind])
    (row,) = bench({"clips": module}, replace(ONLINE, resolution=32, rounds=2, round_s=0.01))
    assert row.ms_p50


def test_the_fastest_file_of_a_bundle_of_clips_within_a_budget(
    bundle, clips, tmp_path, monkeypatch
):
    monkeypatch.setattr(choose_form, "CANDIDATES", ("onnx", "openvino"))
    monkeypatch.setattr(choose_form, "ONLINE", replace(ONLINE, rounds=2, warmup_s=0, round_s=0.01))
    budget, options = choose_form.Budget(ms_per_image=10_000), ExportOptions(precision="fp32")
    images = ComparisonImages(clips)
    result = choose_form.fastest(bundle, tmp_path / "net", images, options, budget=budget)
    assert open_file(result.path).preprocessing.frames == 8


@pytest.mark.parametrize("kind", ["normalised", pytest.param("pixels", marks=pytest.mark.slow)])
def test_untrained_files_of_clips_are_written_at_several_resolutions(kind, tmp_path):
    net = zoo.create("resnet3d_rs_tiny", classes=4)
    files = untrained_files(net, "clips", PRE, 4, kind)
    for side in (32, 64):
        model = files.at(f"at {side}", replace(PRE, resolution=side)).open("onnx", "fp32", tmp_path)
        assert model.preprocessing.resolution == side
        shape = model.metadata.input_shape()
        assert shape == tuple(side if size == 32 else size for size in SHAPES[kind])
        rows = model.run(np.zeros((1, *shape), np.uint8 if kind == "pixels" else np.float32))
        assert rows.shape == (1, 4)


def test_files_are_compared_on_the_middle_clips_of_videos_that_can_be_read(tmp_path):
    for label in ("a", "b"):
        for number in range(10):
            write_frames(tmp_path / label / f"{number}", 20, seed=number)
    data = open_clips(str(tmp_path), SplitRule(val=0.5, test=0))
    name = data.val.names[0]
    (tmp_path / name / "img8.png").write_bytes(b"broken")
    bundle = clip_bundle(task="video")
    images = images_to_compare(data, bundle)
    assert len(images.pictures) == len(data.val) - 1 == len(images.labels)
    (row,) = predict(bundle, [tmp_path / data.val.names[1]])
    (same,) = predict(bundle, [images.pictures[0][np.repeat(np.arange(8), 2)]])
    assert row.guesses == same.guesses
    ranges = images_for_ranges(data, 3, view_of_clips(bundle))
    assert [each.shape for each in ranges] == [SHAPES["pixels"]] * 3


def test_a_batch_of_clips_has_no_more_pixels_than_one_of_images():
    images = replace(PRE, resolution=224, frames=0)
    assert most_in_batch(images) == 334
    assert most_in_batch(replace(images, frames=32)) == 10
