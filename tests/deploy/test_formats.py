"""Each format, written and run for real: the same outputs for every kind of input."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from bundles import COLOUR, GRAY, make_bundle, small_bundle
from PIL import Image

from fullstride import cli, commands
from fullstride.data.dataset import open_data
from fullstride.data.transforms.crop import test_view
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export, make_reference
from fullstride.deploy.exported import ExportedModule, Metadata
from fullstride.deploy.formats import FORMATS, detect_format, open_file, output, torch_export
from fullstride.deploy.formats.torch_export import METADATA
from fullstride.deploy.job import ExportJob, resize_and_crop
from fullstride.deploy.predict import inputs, probabilities
from fullstride.deploy.settings import ExportOptions
from fullstride.measure.bench import bench
from fullstride.measure.protocols import ONLINE
from fullstride.measure.settings import BenchSettings
from fullstride.nets.families import SPECS
from fullstride.nets.preprocessing import Preprocessing


@pytest.fixture(scope="module")
def pictures():
    digits = open_data("digits").test
    return [digits.picture(index).resize((40 + 3 * index, 50)) for index in range(4)]


@pytest.fixture(scope="module")
def bundle():
    return make_bundle(
        "tresnet_tiny", COLOUR, scores={"test": {"top1": 99.0}}, source="a test", licence="ours"
    )


@pytest.fixture(scope="module")
def export_bundle(bundle, pictures):
    """Export the bundle; files of one kind of input share its folded network and ONNX graph."""
    images, references = ComparisonImages(pictures), {}

    def write(path, format, input_kind="normalised", **how):
        if input_kind not in references:
            references[input_kind] = make_reference(bundle, images, input_kind)
        calibration = how.pop("calibration", ())
        options = ExportOptions(format=format, input_kind=input_kind, **how)
        return export(
            bundle,
            path,
            images,
            options,
            calibration=calibration,
            reference=references[input_kind],
        )

    return write


@pytest.fixture(scope="module")
def written(export_bundle, tmp_path_factory):
    """One file of each format that takes seconds to write."""
    folder = tmp_path_factory.mktemp("written")
    names = [name for name in FORMATS if name != "aoti" and not FORMATS[name].missing()]
    return {
        name: export_bundle(folder / f"{name}{FORMATS[name].suffix}", name).path for name in names
    }


def test_every_format_gives_the_bundles_probabilities_and_its_metadata(written, bundle, pictures):
    expected = probabilities(bundle, pictures)
    for name, path in written.items():
        assert detect_format(path) == name
        model = open_file(path, trust=True)
        assert probabilities(model, pictures) == pytest.approx(expected, abs=1e-5), name
        for field in ("name", "classes", "preprocessing", "source", "licence", "scores"):
            assert getattr(model.metadata, field) == getattr(bundle, field)


def check_package(path, bundle, pictures, tolerance):
    assert detect_format(path) == "aoti"
    model = open_file(path, trust=True)
    for some in (pictures, pictures[:1]):  # the package has code of its own for one image
        expected = probabilities(bundle, some)
        assert probabilities(model, some) == pytest.approx(expected, abs=tolerance)


@pytest.mark.slow
def test_a_package_compiled_ahead_of_time_predicts_as_the_bundle_does(pictures, tmp_path):
    bundle, path = small_bundle(), tmp_path / "net.pt2"
    export(bundle, path, ComparisonImages(pictures), ExportOptions(format="aoti"))
    check_package(path, bundle, pictures, 1e-5)


@pytest.mark.slow
def test_a_package_of_a_whole_network_in_bf16_predicts_nearly_as_the_bundle_does(
    pictures, tmp_path, monkeypatch
):
    """With one stage of either kind of block: each kernel takes a second to compile."""
    basic, *_, bottleneck = (replace(each, depth=1) for each in SPECS["tresnet_tiny"].stages)
    spec = replace(SPECS["tresnet_tiny"], stages=(basic, bottleneck))
    monkeypatch.setitem(SPECS, "tresnet_tiny", spec)
    bundle, path = make_bundle("tresnet_tiny", COLOUR), tmp_path / "net.pt2"
    options = ExportOptions(format="aoti", precision="bf16", max_drop=100)
    export(bundle, path, ComparisonImages(pictures), options)
    check_package(path, bundle, pictures, 0.02)


def test_a_package_is_compiled_where_weights_may_be_frozen_for_any_batch_and_for_one(
    bundle, monkeypatch, tmp_path
):
    seen = []

    def compiled(module, images, options):
        seen.append(
            (len(images[0]), options["freezing"] and not torch.is_grad_enabled())
        )  # PyTorch asks for both
        return str(tmp_path)

    monkeypatch.setattr(torch._inductor, "aot_compile", compiled)
    monkeypatch.setattr(
        "torch._inductor.package.package.package_aoti",
        lambda archive, files: seen.append(set(files)),
    )
    about = Metadata(name="a", classes=bundle.classes, preprocessing=COLOUR, scores={})
    job = ExportJob(bundle.net, about, np.zeros((3, 3, 40, 40), np.float32))
    torch_export.write_aoti(job, tmp_path / "a.pt2")
    assert seen == [(2, True), (1, True), {"model", "one"}]


def test_gray_images_are_compiled_for_and_read_with_plain_strides_whatever_theirs_are(
    pictures, monkeypatch
):
    bundle = make_bundle("genet_tiny", GRAY)
    odd = next(inputs("normalised", GRAY, pictures))
    assert odd.strides[1] != odd.strides[0]  # nobody but a compiled program minds
    plain = (32 * 32, 32 * 32, 32, 1)
    about = Metadata(name="a", classes=bundle.classes, preprocessing=GRAY, scores={})
    seen = []
    monkeypatch.setattr(
        torch.export, "export", lambda net, args, **how: seen.append(args[0].stride())
    )
    for count in (1, 4):
        ExportJob(bundle.net, about, odd[:count]).program()
    module = lambda x: seen.append(x.stride()) or bundle.net(x)  # noqa: E731
    shipped = torch_export.exported_model(
        "a.pt2", json.dumps(about.to_strings()), module, "graph", 1
    )
    found = shipped.run(odd)
    assert seen == [plain] * 4  # one of them when the file was opened
    with torch.no_grad():
        assert found == pytest.approx(bundle.net(torch.from_numpy(odd.copy())).numpy(), abs=1e-5)


@pytest.mark.parametrize(
    ("format", "precision"),
    [("openvino", "bf16"), ("openvino", "fp16"), ("onnx", "fp16"), ("pt2", "bf16")],
)
def test_short_precisions_give_nearly_the_same_and_not_exactly(
    export_bundle, format, precision, tmp_path
):
    path = tmp_path / f"net{FORMATS[format].suffix}"
    result = export_bundle(path, format, precision=precision, max_drop=100)
    assert 1e-7 < result.comparison.relative_difference < 0.05
    assert open_file(path, trust=True).metadata.precision == precision


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "openvino"])
@pytest.mark.parametrize("input_kind", ["pixels", "pictures"])
def test_pixels_go_in_and_probabilities_come_out(
    bundle, export_bundle, pictures, format, input_kind, tmp_path
):
    path = tmp_path / f"net{FORMATS[format].suffix}"
    model = open_file(export_bundle(path, format, input_kind).path)
    pixels = [np.asarray(picture.convert("RGB"))[None] for picture in pictures]
    if input_kind == "pixels":
        pixels = [test_view(picture, COLOUR)[None] for picture in pictures]
    rows = np.concatenate([model.run(each) for each in pixels])
    assert rows.sum(1) == pytest.approx(1, abs=1e-5)
    assert rows == pytest.approx(
        probabilities(bundle, pictures), abs={"pixels": 1e-5, "pictures": 5e-3}[input_kind]
    )


@pytest.mark.slow
def test_a_file_of_any_size_takes_other_sides_than_its_own(pictures, tmp_path):
    bundle = make_bundle("tresnet_tiny", replace(GRAY, resolution=64))
    path = export(
        bundle, tmp_path / "net.onnx", ComparisonImages(pictures), ExportOptions(any_size=True)
    ).path
    model = open_file(path)
    for height, width in ((64, 64), (128, 64), (96, 160)):
        x = np.random.default_rng(0).standard_normal((3, 1, height, width), np.float32)
        with torch.inference_mode():
            expected = bundle.net(torch.from_numpy(x)).numpy()
        assert model.run(x) == pytest.approx(expected, abs=1e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("kernel", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(
    ("fit", "crop"), [("crop", 0.875), ("crop", 1.0), ("squish", 1.0), ("pad", 1)]
)
def test_resizing_in_a_file_is_pillows_but_for_a_level_here_and_there(kernel, fit, crop):
    pre = Preprocessing(resolution=32, kernel=kernel, fit=fit, crop=crop)
    for width, height in (
        (150, 100),
        (65, 60),
        (27, 29),
        (70, 40) if fit == "squish" else (40, 70),
    ):
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        expected = test_view(Image.fromarray(pixels), pre).astype(float)
        found = resize_and_crop(torch.from_numpy(pixels)[None], pre)[0].numpy()
        assert np.abs(found - expected).max() <= 2  # Pillow rounds twice
        assert (found != expected).mean() < 0.1


def test_the_servers_folder_has_settings_labels_and_a_version(written, bundle):
    home = written["triton-server"] / "tresnet_tiny"
    assert sorted(str(path.relative_to(home)) for path in home.rglob("*.*")) == [
        "1/model.onnx",
        "config.pbtxt",
        "labels.txt",
    ]
    assert (home / "labels.txt").read_text().split() == list(bundle.classes)
    config = (home / "config.pbtxt").read_text()
    for line in (
        'name: "tresnet_tiny"',
        'backend: "onnxruntime"',
        "dims: [3, 40, 40]",
        "dims: [10]",
        "dynamic_batching {",
    ):
        assert line in config
    session = onnxruntime.InferenceSession(home / "1" / "model.onnx")
    assert f'name: "{session.get_inputs()[0].name}"' in config
    assert f'name: "{session.get_outputs()[0].name}"' in config


@pytest.mark.parametrize(
    ("backend", "files", "words"),
    [
        (
            "openvino",
            ["model.bin", "model.xml"],
            ['backend: "openvino"', "max_batch_size: 0", "[-1, 40, 40, 3]", "[-1, 10]"],
        ),
        (
            "tensorrt",
            ["model.onnx"],
            ['name: "tensorrt"', 'key: "precision_mode" value: "FP32"', "[40, 40, 3]", "[10]"],
        ),
    ],
    ids=["openvino", "tensorrt"],
)
def test_the_server_runs_another_backend(
    bundle, export_bundle, pictures, tmp_path, backend, files, words
):
    path = export_bundle(tmp_path / "models", "triton-server", "pixels", backend=backend).path
    home = path / "tresnet_tiny"
    assert sorted(file.name for file in (home / "1").iterdir()) == files
    config = (home / "config.pbtxt").read_text()
    assert all(word in config for word in (*words, "TYPE_UINT8"))
    assert ("dynamic_batching" in config) == (backend != "openvino")
    expected = probabilities(bundle, pictures)
    assert probabilities(open_file(path), pictures) == pytest.approx(expected, abs=1e-5)


def test_incomplete_files_and_those_of_other_programs_are_named_in_one_line(written, tmp_path):
    for path in written.values():
        if path.is_file():
            cut = tmp_path / path.name
            cut.write_bytes(path.read_bytes()[:-3000])
            with pytest.raises(ValueError, match=f"^{cut} .*incomplete[^\n]*$"):
                open_file(cut, trust=True)
    numbers = tmp_path / "model.bin"
    numbers.write_bytes((written["openvino"] / "model.bin").read_bytes()[:100])
    (tmp_path / "model.xml").write_bytes((written["openvino"] / "model.xml").read_bytes())
    with pytest.raises(ValueError, match="model.xml cannot be read"):
        open_file(tmp_path / "model.xml")
    stranger = onnx.load(written["onnx"])
    del stranger.metadata_props[:]
    onnx.save(stranger, tmp_path / "stranger.onnx")
    with pytest.raises(ValueError, match="stranger.onnx was not written by `fullstride export`"):
        open_file(tmp_path / "stranger.onnx")
    folder = written["onnx"].parent
    with pytest.raises(ValueError, match=f"^{folder} is not an exported file.*onnx, openvino"):
        open_file(folder)


@pytest.mark.slow
def test_labels_of_the_server_are_one_line_each_and_odd_names_travel_whole(pictures, tmp_path):
    names = ("two\nlines", 'it\'s "q" \\', "naïve 猫", "a\tb", *"456789")
    bundle = small_bundle(classes=names, name='ü "x"/\n', source="<&>\n")
    images = ComparisonImages(pictures)
    reference = make_reference(bundle, images, "normalised")
    for format in ("onnx", "openvino", "triton-server"):
        path = tmp_path / f"{format}{FORMATS[format].suffix}"
        export(bundle, path, images, ExportOptions(format=format), reference=reference)
        metadata = open_file(path).metadata
        assert (metadata.classes, metadata.name) == (names, bundle.name)
        assert metadata.source == bundle.source
    labels = tmp_path / "triton-server" / "x" / "labels.txt"
    expected = ["two lines", 'it\'s "q" \\', "naïve 猫", "a b", *"456789", ""]
    assert labels.read_text(encoding="utf-8").split("\n") == expected


def test_writing_openvino_sends_no_telemetry(pictures, tmp_path, monkeypatch):
    sent, telemetry = [], pytest.importorskip("openvino_telemetry").Telemetry
    for method in ("send_event", "start_session"):
        monkeypatch.setattr(telemetry, method, lambda *args, **_: sent.append(args))
    options = ExportOptions(format="openvino", precision="int8", max_drop=100)
    images = ComparisonImages(pictures)
    export(small_bundle(), tmp_path / "net", images, options, calibration=pictures)
    assert not sent


@pytest.mark.slow
def test_running_onnx_writes_no_telemetry(written, tmp_path):
    code = "import sys; from fullstride import cli; sys.exit(cli.run(sys.argv[1:]))"
    Image.new("RGB", (50, 50)).save(tmp_path / "picture.png")
    words = [sys.executable, "-c", code, "predict", written["onnx"], tmp_path / "picture.png"]
    home = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "home").mkdir()
    away = ("ORT_DISABLE_TELEMETRY", "CI")  # what else would turn it off
    env = {key: value for key, value in os.environ.items() if key not in away} | home
    assert subprocess.run(words, env=env, check=True, capture_output=True).stdout
    assert not [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name]


@pytest.mark.slow
def test_signals_arrive_after_files_were_opened_and_left_in_any_order(written):
    code = (
        "import signal, sys, openvino; from pathlib import Path\n"
        "from fullstride.deploy.formats import open_file\n"
        "first, second = open_file(Path(sys.argv[1])), open_file(Path(sys.argv[1]))\n"
        "del first; del second\n"
        "signal.signal(signal.SIGCHLD, lambda *_: print('heard'))\n"
        "signal.raise_signal(signal.SIGCHLD)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, written["openvino"]], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr


def test_of_a_servers_folder_with_two_models_none_is_picked(written, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(written["triton-server"] / "tresnet_tiny", tmp_path / name)
    assert detect_format(tmp_path) is None
    assert detect_format(written["triton-server"]) == "triton-server"


def test_a_file_whose_numbers_lie_outside_of_its_folder_is_not_opened(written, tmp_path):
    (tmp_path / "in").mkdir()
    model = onnx.load(written["onnx"])
    metadata = {each.key: each.value for each in model.metadata_props}
    onnx.save(
        model,
        tmp_path / "whole.onnx",
        save_as_external_data=True,
        location="numbers.bin",
        size_threshold=0,
    )
    model = onnx.load(tmp_path / "whole.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../numbers.bin" if entry.key == "location" else entry.value
    onnx.helper.set_model_props(model, metadata)
    (tmp_path / "in" / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="net.onnx cannot be read"):
        open_file(tmp_path / "in" / "net.onnx")


def with_metadata(path, target, **changes):
    """A copy of a file or a folder of OpenVINO with other metadata."""
    if path.is_dir():
        shutil.copytree(path, target)
        file = target / "model.xml"
        tree = ElementTree.parse(file)
        for name, value in changes.items():
            tree.find(f".//rt_info/fullstride/{name}").set("value", value)
        tree.write(file)
    elif path.suffix == ".onnx":
        model = onnx.load(path)
        metadata = {each.key: each.value for each in model.metadata_props}
        onnx.helper.set_model_props(model, {**metadata, **changes})
        onnx.save(model, target)
    else:
        with zipfile.ZipFile(path) as before, zipfile.ZipFile(target, "w") as after:
            for entry in before.infolist():
                text = before.read(entry)
                if entry.filename.endswith(METADATA):
                    text = json.dumps({**json.loads(text), **changes}).encode()
                after.writestr(entry, text)
    return target


@pytest.mark.parametrize("name", ["onnx", "openvino", "pt2"])
def test_a_file_whose_sizes_are_not_those_of_its_metadata_is_refused_when_it_is_opened(
    name, written, tmp_path
):
    """Fewer classes than outputs, and pixels that the network does not take."""
    suffix, path = written[name].suffix, written[name]
    same = with_metadata(path, tmp_path / f"same{suffix}", licence="mine")
    assert open_file(same, trust=True).metadata.licence == "mine"
    for number, (key, value) in enumerate(
        {
            "classes": '["only one"]',
            "preprocessing": json.dumps(
                json.loads(open_file(path, trust=True).metadata.to_strings()["preprocessing"])
                | {"resolution": 48}
            ),
        }.items()
    ):
        other = with_metadata(path, tmp_path / f"other{number}{suffix}", **{key: value})
        with pytest.raises(ValueError, match=f"other{number}.* (numbers|classes|exported for)"):
            open_file(other, trust=True)


def test_a_program_is_opened_only_with_trust(written):
    with pytest.raises(ValueError, match="pt2.pt2 is a program .*--trust"):
        open_file(written["pt2"])


def test_metadata_is_checked(bundle):
    metadata = Metadata(
        name="a",
        classes=("x", "y"),
        preprocessing=bundle.preprocessing,
        scores={},
        float_layers=("stem",),
    )
    strings = metadata.to_strings()
    assert Metadata.from_strings(strings, "file") == metadata
    for key, value in (
        ("classes", "3"),
        ("classes", "[]"),
        ("task", "cook"),
        ("preprocessing", "[]"),
        ("preprocessing", strings["preprocessing"].replace("bilinear", "magic")),
        ("preprocessing", strings["preprocessing"].replace("40", '"forty"')),
        ("input_kind", "voices"),
        ("precision", "fp8"),
        ("scores", "{"),
        ("scores", "3"),
        ("licence", "bomb" * 2**24),
        ("classes", "[" * 2**20),
        ("float_layers", '"stem"'),
    ):
        with pytest.raises(ValueError, match="file was not written by `fullstride export`"):
            Metadata.from_strings({**strings, key: value}, "file")


def test_a_zip_of_a_newer_version_is_no_exported_file(written, tmp_path):
    text = written["pt2"].read_bytes()
    archive = re.sub(rb"(PK\x01\x02..).", lambda match: match[1] + b"\xff", text, flags=re.DOTALL)
    (tmp_path / "newer.pt2").write_bytes(archive)
    with pytest.raises(ValueError, match="newer.pt2 is not an exported file"):
        open_file(tmp_path / "newer.pt2", trust=True)


def test_a_small_graph_that_makes_much_of_little_is_refused(written, tmp_path):
    """One large tensor, many that are not, and one whose size only computing it would tell."""

    def refusal(*nodes: tuple[str, list[str], str], output: bool = False) -> str:
        model = onnx.load(written["onnx"])
        sizes = {"large": [8 * 10**8], "half": [2 * 10**7], "sides": [20_000, 20_000]}
        for name, values in sizes.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values), name))
        for kind, sources, name in nodes:
            model.graph.node.append(onnx.helper.make_node(kind, sources, [name]))
        if output:
            model.graph.output.append(onnx.helper.make_tensor_value_info("a", 1, None))
        onnx.save(model, tmp_path / "net.onnx")
        with pytest.raises(ValueError, match="cannot be read") as caught:
            open_file(tmp_path / "net.onnx")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    large = ("ConstantOfShape", ["large"], "a")
    assert "it makes a tensor of 800,000,000 numbers" in refusal(large)
    assert "it makes a tensor of 800,000,000 numbers" in refusal(large, output=True)
    many = [("ConstantOfShape", ["half"], f"a{number}") for number in range(10)]
    assert "it makes 200,000,000 numbers of none" in refusal(*many)
    product = [("ReduceProd", ["sides"], "all"), ("ConstantOfShape", ["all"], "a")]
    assert "it makes a tensor of unknown size by ConstantOfShape" in refusal(*product)
    assert "it has Loop, which no file" in refusal(("Loop", ["large"], "a"))


@pytest.mark.parametrize(
    "text", ["hello \x01 <net", "", "node { name: 'x' }", "<html/>", "<net version='x'/>"]
)
def test_a_file_that_is_no_graph_of_openvino_is_one_line_of_ours(text, tmp_path, capfd):
    (tmp_path / "model.xml").write_text(text)
    with pytest.raises(ValueError, match="model.xml"):
        open_file(tmp_path / "model.xml")
    assert capfd.readouterr().err == ""


def test_a_missing_runtime_is_named_with_its_extra(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ValueError, match="onnxruntime is not installed: pip install onnxruntime"):
        open_file(written["onnx"])


def test_a_file_is_measured_by_the_protocols_of_inference_and_no_other(written):
    quick = replace(ONLINE, resolution=40, rounds=2, warmup_s=0, round_s=0.01)
    engines = {name: ExportedModule(open_file(written[name])) for name in ("onnx", "openvino")}
    rows = bench(engines, quick)
    assert [row.name for row in rows] == ["onnx", "openvino"]
    assert all(row.ms_p50 > 0 for row in rows)
    assert "ONNX Runtime" in rows[0].runtime
    assert rows[1].runtime.endswith((", 1 thread, fp32", " threads, fp32"))
    with pytest.raises(
        ValueError, match="cannot be trained: measure it by online, throughput or genet"
    ):
        bench(engines, replace(quick, name="throughput", work="training"))
    with pytest.raises(ValueError, match="40 x 40 pixels"):
        bench(engines, replace(quick, resolution=64))


def test_what_does_not_change_how_a_file_computes_is_refused_when_it_is_measured(written):
    with pytest.raises(
        ValueError,
        match=r"^--precision, --compiled: a file computes as it was exported, leave it out$",
    ):
        commands.bench(
            (str(written["onnx"]),), BenchSettings(precision="bf16", compiled=True, device="cpu")
        )


@pytest.mark.parametrize("word", ["none.onnx", "none.pt2", "folder/model.xml"])
def test_a_file_that_is_not_there_is_not_taken_for_a_network(word, pictures, tmp_path):
    for command in (
        cli.parse(["predict", word, str(tmp_path)]),
        cli.parse(["bench", word]),
    ):
        pictures[0].save(tmp_path / "a.png")
        with pytest.raises(ValueError, match=f"^no such file or folder: {word}$"):
            command()


def test_a_fit_and_its_file_in_another_format_lead_to_the_file_that_is_there(written, tmp_path):
    there = tmp_path / "model.pt2"
    shutil.copy(written["pt2"], there)
    (tmp_path / "fit.json").touch()
    for word, message in (("model.onnx", "no file"), ("", "is a fit")):
        with pytest.raises(ValueError, match=message) as refused:
            cli.parse(["predict", str(tmp_path / word), str(tmp_path)])()
        assert str(refused.value).endswith(f" {there}")
    shutil.copy(written["onnx"], tmp_path / "model.onnx")
    there.unlink()
    with pytest.raises(ValueError, match=r"is a fit: give .*trials, .*model\.onnx"):
        cli.parse(["predict", str(tmp_path), str(tmp_path)])()
    for kind in FORMATS.values():
        if kind.files:
            assert not output(kind, force=True).is_ours(tmp_path), "it is no folder of an export"
    (tmp_path / "model.onnx").unlink()
    (tmp_path / "fit.json").unlink()  # a run, into whose folder a file was exported
    with pytest.raises(ValueError, match=r"no bundle\.json"):
        cli.parse(["predict", str(tmp_path), str(tmp_path)])()


def test_batches_of_inputs_are_the_same_as_one_by_one(bundle, pictures):
    for input_kind in ("normalised", "pixels"):
        whole = np.concatenate(list(inputs(input_kind, bundle.preprocessing, pictures)))
        alone = np.concatenate(list(inputs(input_kind, bundle.preprocessing, pictures, batch=1)))
        assert (whole == alone).all()


def test_a_zip_archive_of_something_else_is_no_format(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt2", "w") as archive:
        archive.writestr("a/b", "c")
    assert detect_format(tmp_path / "a.pt2") is None
    whole = (tmp_path / "a.pt2").read_bytes()
    (tmp_path / "a.pt2").write_bytes(whole.replace(b"PK\1\2", b"PK\1\3"))
    assert zipfile.is_zipfile(tmp_path / "a.pt2")
    assert detect_format(tmp_path / "a.pt2") is None


def test_validate_scores_an_exported_file_as_its_bundle(written, bundle, tmp_path, capsys):
    bundle.save(tmp_path / "bundle")
    scores = []
    for word in (tmp_path / "bundle", written["onnx"]):
        out = tmp_path / f"{len(scores)}.json"
        assert cli.run(["validate", str(word), "--data", "digits", "--out", str(out)]) == 0
        scores.append(json.loads(out.read_text())["splits"]["test"]["scores"])
    assert scores[1]["top1"] == pytest.approx(scores[0]["top1"], abs=0.1)
    capsys.readouterr()
    for words, advice in (
        ([written["pt2"], "--data", "digits"], "--trust"),
        ([written["onnx"], "--data", "digits", "--tta", "flip"], "leave"),
        ([written["onnx"]], "--data"),
        ([tmp_path / "bundle" / "weights.safetensors", "--data", "digits"], "give its folder"),
    ):
        assert cli.run(["validate", *map(str, words)]) == 2
        assert advice in capsys.readouterr().err
