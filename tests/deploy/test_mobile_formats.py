"""Files for phones and boards, by real runtimes where these are installed, and by stand-ins.

A stand-in has the functions of a package that are used here, and computes with PyTorch. It shows
what is asked of the package, and not that the package takes the graphs.
"""

import re
import sys
from base64 import b64decode, b64encode
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bundles import COLOUR, GRAY, make_bundle, small_bundle
from clips import clip_bundle, some_clips
from torch import nn
from toy_bundles import bundle_of, some_pictures

from fullstride.data.dataset import open_data
from fullstride.deploy import choose_form
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export, export_job, make_reference
from fullstride.deploy.export_runs import format_by_suffix
from fullstride.deploy.formats import (
    FORMATS,
    base,
    coreml,
    detect_format,
    executorch,
    litert,
    mobile,
    ncnn,
    open_file,
)
from fullstride.deploy.formats.litert_converter import scope
from fullstride.deploy.predict import inputs, probabilities
from fullstride.deploy.settings import ExportOptions
from fullstride.measure.protocols import ONLINE
from fullstride.targets.runner import Runner

# Format -> the packages that write and run its files.
PACKAGES = {"executorch": ["executorch"], "ncnn": ["ncnn", "pnnx"], "litert": ["ai_edge_litert"]}


def real(format, *values, slow=True):
    """A case of a test by the real runtime, skipped where it is missing."""
    absent = [name for name in PACKAGES[format] if find_spec(name) is None]
    absent += ["its converter"] * (format == "litert" and bool(litert.converter_missing()))
    reason = f"not installed: {', '.join(absent)}"
    marks = [pytest.mark.skipif(bool(absent), reason=reason)] + [pytest.mark.slow] * slow
    return pytest.param(format, *values, marks=marks)


@pytest.fixture(scope="module")
def pictures():
    digits = open_data("digits").test
    return [digits.picture(index).resize((40 + 3 * index, 50)) for index in range(4)]


def job_of(bundle, pictures, **options):
    options = ExportOptions(input_kind="pixels", **options)
    reference = make_reference(bundle, ComparisonImages(pictures), "pixels")
    return export_job(bundle, reference, options, pictures), reference.outputs


def assert_runs_there(model, pictures):
    """The runner of another machine computes what the file computes here."""
    (images,) = inputs(model.metadata.input_kind, model.preprocessing, pictures, len(pictures))
    file = choose_form.timed_file("net", model, len(pictures)).request()
    infer = Runner(model.path.parent).open({**file, "name": model.path.name}, 1)
    assert infer(images) == pytest.approx(model.run(images), abs=1e-6)


def operators(program) -> set[str]:
    return {
        node.target._schema.name.removeprefix("aten::")
        for node in program.graph.nodes
        if node.op == "call_function"
    }


# Maps of 40 pixels become 10, 5, 3 and 2, and those of 32 become 8, 4, 2 and 1.
@pytest.mark.parametrize("pre", [COLOUR, GRAY, replace(COLOUR, resolution=38)])
@pytest.mark.parametrize("name", ["tresnet_tiny", "resnet_rs_tiny"])
def test_the_graph_of_common_operators_has_the_same_outputs(name, pre, pictures):
    job, expected = job_of(make_bundle(name, pre), pictures)
    program = mobile.program(job)
    module, images = program.module(), torch.from_numpy(np.concatenate([job.example]))
    rows = torch.cat([module(each) for each in images.split(1)])
    assert rows.detach().numpy() == pytest.approx(expected, abs=1e-6)
    before = operators(job.program(batch=1))
    if name == "tresnet_tiny":
        assert {"pad", "permute"} <= before
        assert not any("reflect" in node.args for node in program.graph.nodes)
    for node in program.graph.nodes:
        if "aten.avg_pool2d" in str(node.target):
            assert len(node.args) == 3  # no ceil_mode
        if "aten.mean.dim" in str(node.target):
            assert node.args[2]  # keeps its dimensions


@pytest.mark.parametrize("side", [40, 38])
def test_space_to_depth_of_ours_and_of_timm_is_a_convolution(side):
    from timm.layers.space_to_depth import SpaceToDepth

    from fullstride.nets.layers import SpaceToDepth as Ours

    x = torch.randn(2, 3, side, side)
    for layer in [Ours(), SpaceToDepth()] if side % 4 == 0 else [Ours()]:
        net = nn.Sequential(layer, nn.ReLU())
        other = mobile.with_patch_convolutions(net, 3)
        assert isinstance(other[0], mobile.PatchConvolution)
        assert torch.equal(other(x), net(x))


@pytest.mark.parametrize(
    "layer",
    [
        nn.AvgPool2d(3, 2, ceil_mode=True, count_include_pad=False),
        nn.AvgPool2d(2, 1, ceil_mode=True),
        nn.AvgPool2d(2, 2, padding=1, ceil_mode=True),
        nn.ReflectionPad2d(2),
        nn.ConstantPad2d(1, 2.0),
    ],
)
def test_other_operators_stay_as_they_are(layer):
    x = torch.randn(1, 3, 9, 9)
    program = torch.export.export(layer, (x,)).run_decompositions(mobile.DECOMPOSITIONS)
    assert torch.equal(program.module()(x), layer(x))
    assert not {"cat", "slice"} & operators(program)


class FakeModule:
    """What ExecuTorch loads: the methods of a file by their names."""

    def __init__(self, path: str):
        data = Path(path).read_bytes()
        extra = {"metadata": ""}
        if len(data) < 100:
            raise RuntimeError("Failed to load\nerror: 0x23")
        self.module = torch.export.load(BytesIO(data[8:]), extra_files=extra).module()
        self.metadata = torch.tensor([*extra["metadata"].encode()], dtype=torch.uint8)

    def run_method(self, name, arguments):
        assert (name, arguments) == ("metadata", [])
        return [self.metadata]

    def forward(self, arguments):
        (images,) = arguments
        assert len(images) == 1
        assert images.is_contiguous()
        return [self.module(images).detach()]


@dataclass
class FakeConfig:
    """Of XNNPACK: how to quantize, or of values the observer of their ranges."""

    is_per_channel: bool = True
    is_dynamic: bool = False
    input_activation: "FakeConfig | None" = None
    output_activation: "FakeConfig | None" = None
    observer_or_fake_quant_ctr: dict | None = None

    def __post_init__(self):
        if self.observer_or_fake_quant_ctr is None and self.input_activation is None:
            self.input_activation = FakeConfig(observer_or_fake_quant_ctr={})


class FakeQuantizer:
    """Of XNNPACK: records which convolutions it would compute in int8."""

    def set_filter_function(self, filter):
        self.filter = filter
        return self

    def set_global(self, config):
        assert config.is_per_channel
        for values in (config.input_activation, config.output_activation):
            assert values.observer_or_fake_quant_ctr == {"eps": 2**-12}  # their whole range

    def set_operator_type(self, operator, config):
        assert operator is torch.ops.aten.linear.default
        assert config.is_dynamic


def stand_in(monkeypatch, modules):
    """Let modules with these members, by their names, be imported."""
    for name in modules:
        parts = name.split(".")
        for parent in (".".join(parts[:end]) for end in range(1, len(parts))):
            package = SimpleNamespace(__spec__=ModuleSpec(parent, None), __path__=[])
            monkeypatch.setitem(sys.modules, parent, package)
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))


@pytest.fixture
def fake_executorch(monkeypatch):
    """The layers in int8, the images of each call of calibration, and the threads over time."""
    seen = SimpleNamespace(layers=[], images=[], threads=[8])

    def lower(program, partitioner, constant_methods):
        archive, text = BytesIO(), bytes(constant_methods["metadata"].tolist()).decode()
        torch.export.save(program, archive, extra_files={"metadata": text})
        data = SimpleNamespace(buffer=b"....ET12" + archive.getvalue())
        return SimpleNamespace(exported_program=lambda: program, to_executorch=lambda: data)

    def prepare(module, quantizer):
        seen.layers = [
            [*node.meta["nn_module_stack"].values()][-1][0]
            for node in module.graph.nodes
            if "conv2d" in str(node.target)
            and all(map(quantizer.filter, node.all_input_nodes[1:] + [node]))  # with its weights
        ]
        module.register_forward_pre_hook(lambda _, images: seen.images.append(len(images[0])))
        return module

    fake = {
        "executorch.backends.xnnpack.partition.xnnpack_partitioner": dict(XnnpackPartitioner=list),
        "executorch.exir": dict(to_edge_transform_and_lower=lower),
        "executorch.exir.dialects.edge._ops": dict(EdgeOpOverload=torch._ops.OpOverload),
        "executorch.backends.xnnpack.quantizer.xnnpack_quantizer": dict(
            XNNPACKQuantizer=FakeQuantizer, get_symmetric_quantization_config=FakeConfig
        ),
        "torchao.quantization.pt2e.observer": dict(MinMaxObserver=SimpleNamespace(with_args=dict)),
        "torchao.quantization.pt2e.quantize_pt2e": dict(
            prepare_pt2e=prepare, convert_pt2e=lambda module: module
        ),
        "executorch.extension.pybindings": dict(
            portable_lib=SimpleNamespace(
                _load_for_executorch=FakeModule,
                _threadpool_get_thread_count=lambda: seen.threads[-1],
                _unsafe_reset_threadpool=seen.threads.append,
            )
        ),
    }
    stand_in(monkeypatch, fake)
    monkeypatch.setattr(executorch, "version", lambda package: "1.0")
    return seen


def test_a_stand_in_of_executorch_is_asked_for_the_graph_and_gives_its_outputs(
    fake_executorch, pictures, tmp_path
):
    bundle, path, lines = make_bundle("tresnet_tiny", COLOUR), tmp_path / "net.pte", []
    options = ExportOptions(format="executorch", input_kind="pixels", threads=3)
    result = export(bundle, path, ComparisonImages(pictures), options, progress=lines.append)
    assert result.runtime == "ExecuTorch 1.0, 3 threads"
    assert fake_executorch.threads == [8, 3]
    (line,) = lines
    assert line.startswith("operators that XNNPACK does not compute: 33 conv2d, 16 slice")
    model = open_file(path)
    assert (detect_format(path), model.metadata) == ("executorch", result.metadata)
    assert probabilities(model, pictures) == pytest.approx(
        probabilities(bundle, pictures), abs=1e-6
    )
    assert_runs_there(model, pictures)


def test_layers_of_a_stand_in_stay_in_float_where_int8_loses_too_much(
    fake_executorch, pictures, tmp_path
):
    job, _ = job_of(small_bundle(), pictures, precision="int8")
    executorch.write(job, tmp_path / "net.pte")
    assert fake_executorch.layers == ["net.0", "net.3", "net.4"]
    assert fake_executorch.images[: len(pictures)] == [1] * len(pictures)
    metadata = replace(job.metadata, float_layers=("3",))
    executorch.write(replace(job, metadata=metadata), tmp_path / "net.pte")
    assert fake_executorch.layers == ["net.0", "net.4"]


def test_what_is_no_file_of_executorch_is_refused_in_one_line(fake_executorch, tmp_path):
    path = tmp_path / "net.pte"
    path.write_bytes(b"....ET12 and no more")
    with pytest.raises(ValueError, match=r"^.*net.pte cannot be read, [^\n]*: error: 0x23$"):
        open_file(path)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="net.pte is not an exported file"):
        open_file(path)


@pytest.mark.parametrize(
    ("how", "flag"), [(dict(any_size=True), "any-size"), (dict(input_kind="pictures"), "with-res")]
)
def test_files_of_one_size_are_not_asked_for_others(fake_executorch, pictures, how, flag, tmp_path):
    bundle, options = small_bundle(), ExportOptions(format="executorch", **how)
    with pytest.raises(ValueError, match=f"^executorch files [^\n]* --{flag}[^\n]* onnx$"):
        export(bundle, tmp_path / "net.pte", ComparisonImages(pictures), options)


@pytest.mark.parametrize(
    ("module", "name", "package"),
    [
        (executorch, "net.pte", "executorch"),
        (ncnn, "net", "ncnn"),
        (litert, "net.tflite", "ai-edge-litert"),
        (coreml, "net.mlpackage", "coremltools"),
    ],
    ids=["executorch", "ncnn", "litert", "coreml"],
)
def test_a_runtime_that_is_missing_is_one_line_with_its_extra(
    module, name, package, pictures, tmp_path, monkeypatch
):
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    path, format = tmp_path / name, module.__name__.split(".")[-1]
    line = rf"^{package} is not installed: pip install 'fullstride\[{format}\]'$"
    with pytest.raises(ValueError, match=line):
        export(small_bundle(), path, ComparisonImages(pictures), ExportOptions(format=format))
    if not FORMATS[format].files:
        path.write_bytes(b"....ET12" if format == "executorch" else b"....TFL3")
    else:
        for file in FORMATS[format].files:
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).touch()
    assert detect_format(path) == format
    with pytest.raises(ValueError, match=line):
        open_file(path)
    assert format not in choose_form.data_formats()


def test_the_suffix_of_a_file_says_its_format():
    assert format_by_suffix(Path("net.pte")) == "executorch"
    assert format_by_suffix(Path("net.tflite")) == "litert"
    assert format_by_suffix(Path("net.mlpackage")) == "coreml"


def test_an_installed_runtime_is_an_entrant_of_auto_and_of_fit(fake_executorch):
    assert "executorch" in choose_form.data_formats()
    assert ("executorch", "int8") in choose_form.runnable()


class FakeInterpreter:
    """What LiteRT loads: a graph of torch.export behind a mark, as text, as it is an archive."""

    def __init__(self, path, num_threads):
        data = Path(path).read_bytes()
        graph = b64decode(data[8:].partition(b"\n")[0])
        self.module = torch.export.load(BytesIO(graph)).module()
        self.threads = num_threads

    def allocate_tensors(self):
        pass

    def get_input_details(self):
        return [{"index": 0, "shape": np.array([1, 40, 40, 3])}]

    def get_output_details(self):
        return [{"index": 1, "shape": np.array([1, 10])}]

    def set_tensor(self, index, images):
        assert (index, images.shape) == (0, (1, 40, 40, 3))
        self.images = images

    def invoke(self):
        self.outputs = self.module(torch.from_numpy(self.images)).detach().numpy()

    def get_tensor(self, index):
        assert index == 1
        return self.outputs


@pytest.fixture
def fake_litert(monkeypatch, tmp_path):
    """The calls of programs: one makes an environment, one installs into it, others convert."""
    calls = []

    def run(python, *words):
        calls.append((python, *words))
        if words[:2] == ("-m", "venv"):
            (words[2] / "lib/python3/site-packages").mkdir(parents=True)
            (words[2] / "bin").mkdir()
            (words[2] / "bin/python").touch()
        elif words[0] == "-P":
            graph = Path(words[2], "graph.pt2").read_bytes()
            Path(words[2], "model.tflite").write_bytes(b"....TFL3" + b64encode(graph) + b"\n")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(litert, "run", run)
    monkeypatch.setattr(litert, "version", lambda package: "1.0")
    stand_in(monkeypatch, {"ai_edge_litert.interpreter": dict(Interpreter=FakeInterpreter)})
    return calls


def test_the_converter_of_litert_is_announced_and_then_installed_once(
    fake_litert, pictures, tmp_path
):
    bundle, path, lines = make_bundle("genet_tiny", COLOUR), tmp_path / "net.tflite", []
    assert "litert" not in choose_form.data_formats()  # it would install without being asked
    options, images = (
        ExportOptions(format="litert", input_kind="pixels"),
        ComparisonImages(pictures),
    )
    result = export(bundle, path, images, options, progress=lines.append)
    (line,) = lines
    home = litert.environment()
    assert line == f"installing the converter of LiteRT once, about 1 GB, in {home}"
    assert (home / "lib/python3/site-packages/parent.pth").read_text().strip() in sys.path
    assert [words[1:3] for words in fake_litert[:2]] == [("-m", "venv"), ("-m", "pip")]
    assert {*litert.CONVERTER} < {*fake_litert[1]}
    export(bundle, path, images, replace(options, force=True), progress=lines.append)
    assert len(lines) == 1
    assert [words[:2] for words in fake_litert[2:]] == [(home / "bin/python", "-P")] * 2
    assert "litert" in choose_form.data_formats()
    model = open_file(path)
    assert (detect_format(path), model.metadata) == ("litert", result.metadata)
    assert probabilities(model, pictures) == pytest.approx(
        probabilities(bundle, pictures), abs=1e-6
    )
    assert_runs_there(model, pictures)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"^[^\n]*net.tflite cannot be read[^\n]*$"):
        open_file(path)


def test_a_program_that_fails_is_the_last_line_that_it_printed():
    words = "-c", "import sys; print('why', file=sys.stderr); print(file=sys.stderr); sys.exit(3)"
    with pytest.raises(ValueError, match=r"^the converter of LiteRT failed \(3\): why$"):
        litert.run(Path(sys.executable), *words)


def test_layers_of_litert_are_matched_by_the_names_of_their_outputs():
    relu = "a.Wrapper/a.Net_net/b.Sequential_stages/b.Block_0/b.ReLU_act;"
    name = f"{relu};a.Wrapper/a.Net_net/b.Sequential_stages/b.Block_0/b.Conv2d_conv1;1"
    assert re.search(scope("stages.0.conv1"), name)
    assert not re.search(scope("stages.0.conv1"), relu)
    for other in ("stages.0.conv", "stages.0", "0.conv1", "conv1", "stages.1.conv1"):
        assert not re.search(scope(other), name)


# By the real runtimes.


@pytest.mark.parametrize(
    ("format", "precision", "kind", "tolerance"),
    [
        real("executorch", "fp32", "normalised", 1e-6),
        real("executorch", "int8", "normalised", 0.02),
        real("ncnn", "fp32", "pixels", 1e-6),
        real("ncnn", "fp16", "normalised", 1e-4),
        real("litert", "fp32", "normalised", 1e-6),
        real("litert", "int8", "pixels", 0.02),
    ],
)
def test_a_runtime_computes_all_of_a_tresnet(
    format, precision, kind, tolerance, pictures, tmp_path
):
    bundle, lines = make_bundle("tresnet_tiny", COLOUR), []
    path = tmp_path / f"net{FORMATS[format].suffix}"
    options = ExportOptions(format=format, precision=precision, input_kind=kind, max_drop=100)
    images = ComparisonImages(pictures)
    export(bundle, path, images, options, calibration=pictures, progress=lines.append)
    assert not [line for line in lines if "operators" in line]
    assert_runs_there(open_file(path), pictures)
    rows, expected = probabilities(open_file(path), pictures), probabilities(bundle, pictures)
    assert rows == pytest.approx(expected, abs=tolerance)
    assert (precision == "fp32") is bool(np.abs(rows - expected).max() < 1e-6)


@pytest.mark.parametrize("format", [real("executorch"), real("ncnn"), real("litert")])
def test_auto_measures_a_file_of_a_phone_beside_another(format, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(choose_form, "CANDIDATES", ("onnx", format))
    monkeypatch.setattr(choose_form, "ONLINE", replace(ONLINE, rounds=2, warmup_s=0, round_s=0.01))
    lines, options = [], ExportOptions(precision="fp32", input_kind="pixels")
    result = choose_form.fastest(
        small_bundle(), tmp_path / "net", ComparisonImages(pictures), options, progress=lines.append
    )
    timed = {line.split(":")[0] for line in lines if " ms an image" in line}
    assert timed == {"onnx fp32", f"{format} fp32"}
    assert result.path.suffix == FORMATS[result.format].suffix


@pytest.mark.parametrize("format", [real("executorch"), real("ncnn", slow=False), real("litert")])
def test_damaged_files_are_one_line(format, pictures, tmp_path):
    path = tmp_path / f"net{FORMATS[format].suffix}"
    bundle, options = small_bundle(), ExportOptions(format=format)
    export(bundle, path, ComparisonImages(pictures), options)
    for file in [*path.iterdir()] if path.is_dir() else [path]:
        data = file.read_bytes()
        for end in (8, 100, len(data) // 2):
            file.write_bytes(data[:end])
            with pytest.raises(ValueError, match=rf"^[^\n]*{path.name} cannot be read[^\n]*$"):
                open_file(path)
        file.write_bytes(data)
    (x,) = inputs("normalised", bundle.preprocessing, pictures[:1])
    with pytest.raises(ValueError, match="does not take inputs of"):
        open_file(path).run(x[..., :16])


@pytest.mark.parametrize(("format", "pre"), [real("ncnn", GRAY), real("ncnn", COLOUR)])
def test_ncnn_itself_makes_the_inputs_of_pixels(format, pre, pictures, tmp_path):
    import ncnn as library

    bundle, path = make_bundle("genet_tiny", pre), tmp_path / "net"
    options = ExportOptions(format=format, input_kind="pixels")
    export(bundle, path, ComparisonImages(pictures), options)
    assert_runs_there(open_file(path), pictures)
    net, kinds, side = library.Net(), library.Mat.PixelType, pre.resolution
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.load_param(str(path / "model.param"))
    net.load_model(str(path / "model.bin"))
    kind = kinds.PIXEL_RGB if pre.channels == 3 else kinds.PIXEL_GRAY
    expected = probabilities(bundle, pictures)
    for (pixels,), row in zip(inputs("pixels", pre, pictures, batch=1), expected, strict=True):
        extractor = net.create_extractor()
        extractor.input("in0", library.Mat.from_pixels(pixels, kind, side, side))
        assert np.array(extractor.extract("out0")[1]) == pytest.approx(row, abs=1e-4)


@pytest.mark.parametrize("format", [real("ncnn")])
def test_maps_are_those_of_pytorch_and_boxes_are_refused_in_one_line(format, tmp_path):
    pictures, options = some_pictures(), ExportOptions(format=format, input_kind="pixels")
    result = export(bundle_of("segment"), tmp_path / "maps", ComparisonImages(pictures), options)
    assert result.comparison.same_class == len(pictures)
    assert result.comparison.relative_difference < 1e-4
    assert open_file(result.path).run(np.zeros((2, 64, 64, 3), np.uint8)).shape == (2, 3, 64, 64)
    with pytest.raises(ValueError, match=r"^ncnn has no layer for [a-z.:]+: use another format$"):
        export(bundle_of("detect"), tmp_path / "boxes", ComparisonImages(pictures), options)
    assert not (tmp_path / "boxes").exists()


@pytest.mark.parametrize("format", [real("ncnn", slow=False)])
def test_clips_of_pixels_are_refused_in_one_line(format, tmp_path):
    options = ExportOptions(format=format, input_kind="pixels")
    with pytest.raises(ValueError, match=r"^ncnn makes no clips of pixels: leave [^\n]* out$"):
        export(clip_bundle(), tmp_path / "net", ComparisonImages(some_clips()), options)


@pytest.mark.parametrize(
    ("program", "reason"), [("/bin/false", r"\(1\): [^\n]*"), ("/bin/true", ": it wrote no graph")]
)
@pytest.mark.parametrize("format", [real("ncnn", slow=False)])
def test_a_converter_that_fails_is_one_line(
    format, pictures, tmp_path, monkeypatch, program, reason
):
    monkeypatch.setattr("pnnx.EXEC_PATH", program)
    options = ExportOptions(format=format)
    with pytest.raises(ValueError, match=rf"^the converter of ncnn failed ?{reason}$"):
        export(small_bundle(), tmp_path / "net", ComparisonImages(pictures), options)
    assert not (tmp_path / "net").exists()


@pytest.mark.parametrize("format", [real("ncnn", slow=False)])
def test_an_export_to_ncnn_replaces_its_own_folder_alone(format, pictures, tmp_path):
    path, images = tmp_path / "net", ComparisonImages(pictures)
    export(small_bundle(), path, images, ExportOptions(format=format))
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="--force"):
        export(small_bundle(), path, images, ExportOptions(format=format))
    result = export(small_bundle(), path, images, ExportOptions(format=format, force=True))
    assert {each.name for each in path.iterdir()} == {*FORMATS[format].files, "notes.txt"}
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.json").write_text("{}")
    with pytest.raises(ValueError, match="other"):
        export(small_bundle(), other, images, ExportOptions(format=format, force=True))
    assert result.path == path


@pytest.mark.parametrize("format", [real("litert")])
def test_a_layer_of_litert_stays_in_float_by_its_name(format, pictures, tmp_path):
    from ai_edge_litert.interpreter import Interpreter

    job, _ = job_of(make_bundle("tresnet_tiny", COLOUR), pictures, precision="int8")
    layer = "stages.2.0.branch.conv2.conv"
    path = tmp_path / "net.tflite"
    litert.write(replace(job, metadata=replace(job.metadata, float_layers=(layer,))), path)
    graph = Interpreter(str(path))
    tensors = {each["index"]: each for each in graph.get_tensor_details()}
    in_float = {
        tensors[each["outputs"][0]]["name"]
        for each in graph._get_ops_details()
        if "CONV_2D" in each["op_name"] and tensors[each["inputs"][1]]["dtype"] is np.float32
    }
    (name,) = in_float
    assert re.search(scope(layer), name)
