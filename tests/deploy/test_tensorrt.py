"""Engines of TensorRT are built, opened and run, by a stand-in for its Python package.

The stand-in has the classes and methods of TensorRT 10 that are used here, with their return
values, and computes with ONNX Runtime on the CPU. It does not show that TensorRT takes the graphs.
"""

import ctypes
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from bundles import small_bundle
from PIL import Image

from fullstride.deploy import choose_form
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export
from fullstride.deploy.formats import open_file, tensorrt
from fullstride.deploy.predict import inputs, predict, probabilities
from fullstride.deploy.settings import ExportOptions
from fullstride.measure.protocols import ONLINE


class Profile:
    def set_shape(self, name, smallest, usual, largest):
        assert name == "images"
        assert len({shape[1:] for shape in (smallest, usual, largest)}) == 1
        self.smallest, self.largest = smallest, largest


class Builder:
    def __init__(self, logger):
        pass

    def create_network(self, flags):
        assert flags == 1 << 3
        return SimpleNamespace()

    def create_optimization_profile(self):
        return Profile()

    def create_builder_config(self):
        return SimpleNamespace(profiles=(profiles := []), add_optimization_profile=profiles.append)

    def build_serialized_network(self, network, config):
        (profile,) = config.profiles
        return memoryview(b"%d %d " % (profile.smallest[0], profile.largest[0]) + network.model)


class OnnxParser:
    def __init__(self, network, logger):
        self.network = network

    def parse(self, model: bytes):
        graph = onnx.load_from_string(model).graph
        self.network.model = model
        return not [node for node in graph.node if node.op_type == "Softplus"]

    def get_error(self, index):
        return SimpleNamespace(desc=lambda: "no importer for Softplus")


class Context:
    """Reads and writes the memory whose addresses it was given."""

    def __init__(self, engine):
        self.engine, self.addresses = engine, {}

    def set_input_shape(self, name, shape):
        self.shape = shape
        return self.engine.smallest <= shape[0] <= self.engine.largest

    def get_tensor_shape(self, name):
        (result,) = self.engine.session.get_outputs()
        assert name == result.name
        return (self.shape[0], *result.shape[1:])

    def set_tensor_address(self, name, address):
        self.addresses[name] = address

    def execute_async_v3(self, stream):
        (source,), (result,) = self.engine.session.get_inputs(), self.engine.session.get_outputs()
        kind = np.dtype({"tensor(float)": "f4", "tensor(uint8)": "u1"}[source.type])
        size = int(np.prod(self.shape)) * kind.itemsize
        images = np.frombuffer(ctypes.string_at(self.addresses[source.name], size), kind)
        (rows,) = self.engine.session.run(None, {source.name: images.reshape(self.shape)})
        ctypes.memmove(self.addresses[result.name], rows.tobytes(), rows.nbytes)
        return True


class Engine:
    def __init__(self, data: bytes):
        smallest, largest, model = data.split(b" ", 2)
        self.smallest, self.largest = int(smallest), int(largest)
        self.session = onnxruntime.InferenceSession(model)

    def create_execution_context(self):
        return Context(self)

    def get_tensor_name(self, index):
        return [*self.session.get_inputs(), *self.session.get_outputs()][index].name


class Runtime:
    def __init__(self, logger):
        pass

    def deserialize_cuda_engine(self, data: bytes):
        return Engine(data) if data[:1].isdigit() else None


class Logger:
    ERROR = 1

    def __init__(self, severity):
        assert severity == self.ERROR


@pytest.fixture(autouse=True)
def _tensorrt_and_a_gpu(monkeypatch):
    module = SimpleNamespace(
        __version__="10.0",
        __spec__=ModuleSpec("tensorrt", None),  # libraries look for it
        Builder=Builder,
        Logger=Logger,
        NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=3),
        OnnxParser=OnnxParser,
        Runtime=Runtime,
    )
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    stream = SimpleNamespace(cuda_stream=0)
    cuda = SimpleNamespace(is_available=lambda: True, current_stream=lambda: stream)
    parts = {name: getattr(torch, name) for name in ("empty", "from_numpy")}
    monkeypatch.setattr(tensorrt, "torch", SimpleNamespace(cuda=cuda, **parts))
    monkeypatch.setattr(tensorrt, "DEVICE", "cpu")


@pytest.fixture(scope="module")
def pictures():
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (40, 50, 3), np.uint8)) for _ in range(4)]


@pytest.mark.parametrize(
    ("precision", "input_kind"), [("fp32", "normalised"), ("fp16", "pixels"), ("int8", "pixels")]
)
def test_an_engine_is_built_opened_and_predicts_as_the_bundle_does(
    precision, input_kind, pictures, tmp_path
):
    bundle = small_bundle()
    options = ExportOptions(
        format="tensorrt", precision=precision, input_kind=input_kind, max_drop=100
    )
    images, ranges = ComparisonImages(pictures), pictures if precision == "int8" else ()
    result = export(bundle, tmp_path / "net", images, options, calibration=ranges)
    assert result.runtime == "TensorRT 10.0"
    assert sorted(path.name for path in result.path.iterdir()) == ["model.engine", "model.onnx"]
    model = open_file(result.path)
    assert (model.path, model.runtime) == (result.path, "TensorRT 10.0")
    assert model.metadata == result.metadata
    expected = probabilities(bundle, pictures)
    tolerance = {"fp32": 1e-5, "fp16": 2e-3, "int8": 0.1}[precision]
    assert probabilities(model, pictures) == pytest.approx(expected, abs=tolerance)
    pictures[0].save(tmp_path / "a.png")
    (prediction,) = predict(model, [tmp_path / "a.png"], top=1)
    assert prediction.guesses[0].probability == pytest.approx(expected[0].max(), abs=tolerance)


def test_auto_measures_an_engine_beside_other_files(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(choose_form, "CANDIDATES", ("onnx", "tensorrt"))
    monkeypatch.setattr(choose_form, "ONLINE", replace(ONLINE, rounds=2, warmup_s=0, round_s=0.01))
    lines, images = [], ComparisonImages(pictures)
    options = ExportOptions(precision="fp32")
    result = choose_form.fastest(
        small_bundle(), tmp_path / "net", images, options, progress=lines.append
    )
    assert {line.split(":")[0] for line in lines if " ms an image" in line} == {
        "onnx fp32",
        "tensorrt fp32",
    }
    assert open_file(result.path).runtime.startswith(("TensorRT", "ONNX Runtime"))


def test_a_batch_above_the_engines_largest_is_refused(pictures, tmp_path):
    bundle = small_bundle()
    path = export(
        bundle, tmp_path / "net", ComparisonImages(pictures), ExportOptions(format="tensorrt")
    ).path
    (x,) = inputs("normalised", bundle.preprocessing, pictures[:1])
    model = open_file(path)
    assert model.run(np.repeat(x, 256, 0)).shape == (256, 10)
    with pytest.raises(ValueError, match=r"\(257, 3, 32, 32\)"):
        model.run(np.repeat(x, 257, 0))


def test_an_engine_that_tensorrt_does_not_take_is_named_and_onnx_runs_without_one(
    pictures, tmp_path, monkeypatch
):
    bundle, images = small_bundle(), ComparisonImages(pictures)
    path = export(bundle, tmp_path / "net", images, ExportOptions(format="tensorrt")).path
    (path / "model.engine").write_bytes(b"of another version")
    with pytest.raises(ValueError, match="model.engine cannot be read.*: export it again"):
        open_file(path)
    monkeypatch.setattr(tensorrt.torch.cuda, "is_available", lambda: False)
    assert open_file(path).runtime.startswith("ONNX Runtime")
    assert tensorrt.engine_missing()


def test_files_that_resize_have_no_engine_which_would_be_for_one_size(pictures, tmp_path):
    options = ExportOptions(format="tensorrt", input_kind="pictures")
    result = export(small_bundle(), tmp_path / "net", ComparisonImages(pictures), options)
    assert [path.name for path in result.path.iterdir()] == ["model.onnx"]
    assert result.runtime.startswith("ONNX Runtime")


def test_a_graph_that_tensorrt_cannot_read_is_one_line(tmp_path):
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Softplus", ["images"], ["logits"])],
        "graph",
        [value("images", 1, ["N", 3])],
        [value("logits", 1, ["N", 3])],
    )
    onnx.save(onnx.helper.make_model(graph, ir_version=10), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=r"TensorRT 10.0 .* model.onnx: no importer for Softplus"):
        tensorrt.build(tmp_path / "model.onnx", (3,))


def test_an_engine_that_is_not_built_or_does_not_run_is_one_line(pictures, tmp_path, monkeypatch):
    bundle = small_bundle()
    path = export(
        bundle, tmp_path / "net", ComparisonImages(pictures), ExportOptions(format="tensorrt")
    ).path
    (x,) = inputs("normalised", bundle.preprocessing, pictures[:1])
    monkeypatch.setattr(Context, "execute_async_v3", lambda *_: False)
    with pytest.raises(ValueError, match="TensorRT could not run the engine"):
        open_file(path).infer(x)
    monkeypatch.setattr(Builder, "build_serialized_network", lambda *_: None)
    with pytest.raises(ValueError, match="TensorRT 10.0 could not build an engine of model.onnx"):
        tensorrt.build(path / "model.onnx", x.shape[1:])
