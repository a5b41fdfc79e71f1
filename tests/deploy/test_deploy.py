"""From a trained network to predictions, and to files with the same outputs."""

import copy
import json
import re
import shutil
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from bundles import COLOUR, GRAY, make_bundle, small_bundle
from onnx import numpy_helper
from PIL import Image

from fullstride.data.dataset import Images, UnreadableImage, open_data
from fullstride.data.transforms import crop as cropping
from fullstride.deploy import choose_form
from fullstride.deploy import export as exporting
from fullstride.deploy import predict as predicting
from fullstride.deploy.comparison import MAX_DIFFERENCE, Comparison, ComparisonImages
from fullstride.deploy.export import export, make_reference
from fullstride.deploy.export_runs import evenly_spaced, export_runs
from fullstride.deploy.predict import inputs, predict
from fullstride.deploy.settings import ExportOptions, ShipSettings
from fullstride.measure.budget import Budget
from fullstride.measure.protocols import ONLINE


@pytest.fixture(scope="module")
def pictures():
    digits = open_data("digits").test
    return [digits.picture(index) for index in range(6)]


def network_input(bundle, pictures) -> torch.Tensor:
    return torch.from_numpy(next(inputs("normalised", bundle.preprocessing, pictures)))


# Each network once; the pairs that are missing here are exported by other tests.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pre"),
    [
        ("tresnet_tiny", GRAY),
        ("resnet_rs_tiny", GRAY),
        ("genet_tiny", COLOUR),
        ("timm/resnet10t", COLOUR),
    ],
    ids=["tresnet-gray", "resnet-rs-gray", "genet-colour", "timm-colour"],
)
def test_onnx_runtime_gives_the_logits_of_pytorch_at_any_batch(name, pre, pictures, tmp_path):
    bundle = make_bundle(name, pre)
    comparison = export(bundle, tmp_path / "net.onnx", ComparisonImages(pictures)).comparison
    assert comparison.images == comparison.same_class == len(pictures)
    assert comparison.relative_difference < MAX_DIFFERENCE["fp32"]
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    for count in (1, 3, 6):
        x = network_input(bundle, pictures[:count])
        with torch.inference_mode():
            expected = bundle.net(x).numpy()
        (logits,) = session.run(None, {"images": x.numpy()})
        assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_file_has_no_batch_norm_the_bundle_keeps_its_own_and_metadata_says_what_it_is(
    pictures, tmp_path
):
    bundle = make_bundle(
        "genet_tiny", GRAY, scores={"test": {"top1": 99.0}}, source="a test", licence="ours"
    )
    state = {name: value.clone() for name, value in bundle.net.state_dict().items()}
    export(bundle, tmp_path / "net.onnx", ComparisonImages(pictures))
    model = onnx.load(tmp_path / "net.onnx")
    assert {node.op_type for node in model.graph.node} >= {"Conv", "Relu"}
    assert not [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    assert all(torch.equal(value, state[key]) for key, value in bundle.net.state_dict().items())
    assert bundle.net.state_dict().keys() == state.keys()
    metadata = {p.key: p.value for p in model.metadata_props}
    assert json.loads(metadata["classes"]) == list("0123456789")
    assert json.loads(metadata["preprocessing"])["mean"] == [0.2]
    assert json.loads(metadata["scores"]) == {"test": {"top1": 99.0}}
    assert [
        metadata[key] for key in ("source", "licence", "precision", "input_kind", "float_layers")
    ] == [
        "a test",
        "ours",
        "fp32",
        "normalised",
        "[]",
    ]


def test_a_file_with_other_outputs_is_not_written_and_an_earlier_one_stays(
    pictures, tmp_path, monkeypatch
):
    path = tmp_path / "net.onnx"
    path.write_text("earlier")
    bundle, images, outputs = small_bundle(), ComparisonImages(pictures), exporting.outputs
    monkeypatch.setattr(exporting, "outputs", lambda *args: outputs(*args) * 1.001)
    with pytest.raises(ValueError, match=r"net.onnx was not written: .* 1.0e-03 .* 0.0001 "):
        export(bundle, path, images, ExportOptions(force=True))
    monkeypatch.setattr(exporting, "outputs", lambda *args: -outputs(*args))
    monkeypatch.setitem(MAX_DIFFERENCE, "bf16", 3.0)
    with pytest.raises(ValueError, match=r"100.00 points .* 0.2 .* 6 images\): .* --max-drop"):
        export(
            bundle,
            tmp_path / "net",
            images,
            ExportOptions(format="openvino", precision="bf16", force=True),
        )
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_points_are_lost_by_true_classes_where_they_are_known_and_else_by_other_answers():
    ours, theirs = np.eye(4), np.eye(4)[[1, 0, 2, 3]]
    assert exporting.compare(theirs, ours).drop == 50
    assert exporting.compare(theirs, ours, [0, 1, 2, 3]).drop == 50
    assert exporting.compare(theirs, ours, [1, 0, 2, 3]).drop == 0  # it became better
    assert exporting.compare(theirs, ours, [0, 0, 2, 3]).drop == 0  # lost one and won one


def test_an_earlier_file_is_replaced_only_with_force(pictures, tmp_path):
    path, images = tmp_path / "net.onnx", ComparisonImages(pictures)
    path.write_text("earlier")
    with pytest.raises(ValueError, match="net.onnx exists: .* --force .* --out"):
        export(small_bundle(), path, images)
    assert path.read_text() == "earlier"
    export(small_bundle(), path, images, ExportOptions(force=True))
    assert onnx.load(path).graph.node


def test_what_cannot_be_exported_is_said_in_one_line(pictures, tmp_path):
    bundle, path, images = small_bundle(), tmp_path / "net.onnx", ComparisonImages(pictures)
    for how, message in (
        (dict(format="onxx"), "'onxx': choose from onnx, openvino"),
        (
            dict(precision="bf16"),
            "onnx in bf16: use fp32, fp16, int8, or bf16 in openvino, aoti, pt2",
        ),
        (dict(precision="int8"), "--calibration"),
        (dict(input_kind="pictures", any_size=True), "leave --any-size out"),
        (dict(any_size=True), "network of 32 pixels: .* 64, 96, 128"),
        (
            dict(format="triton-server", precision="bf16"),
            "triton-server in bf16: use fp32, fp16, int8",
        ),
        (dict(format="pt2"), "net.onnx .* --out that ends in .pt2"),
        (dict(backend="openvino"), "--backend openvino .* triton-server"),
        (dict(device="cuda"), "--device cuda is for aoti and pt2"),
        (dict(max_drop=-1), "--max-drop -1: use 0 or more"),
        (dict(max_drop=float("nan")), "--max-drop nan: use 0 or more"),
    ):
        with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
            export(bundle, path, images, ExportOptions(**how))
    with pytest.raises(ValueError, match="--backend is for --format triton-server"):
        export_runs(["net"], path, ShipSettings(format="auto", backend="openvino"))
    with pytest.raises(ValueError, match="--data"):
        export(bundle, path, ComparisonImages([]))
    with pytest.raises(ValueError, match="2 labels for 6 pictures"):
        ComparisonImages(pictures, [1, 2])
    assert not any(tmp_path.iterdir())


def test_outputs_that_are_no_numbers_are_refused_in_every_precision_without_a_warning(
    pictures, tmp_path, monkeypatch
):
    nan = np.full((len(pictures), 10), np.nan, np.float32)
    monkeypatch.setattr(exporting, "outputs", lambda *args: nan)
    bundle, images = small_bundle(), ComparisonImages(pictures, [0] * 6)
    how = dict(calibration=pictures, reference=make_reference(bundle, images, "normalised"))
    for precision in ("fp32", "fp16", "int8"):
        with pytest.raises(ValueError, match="was not written: .* nan "):
            export(
                bundle,
                tmp_path / "net.onnx",
                images,
                ExportOptions(precision=precision, max_drop=100),
                **how,
            )


@pytest.mark.slow
def test_a_folder_is_replaced_only_where_export_wrote_it(pictures, tmp_path):
    bundle, images = small_bundle(), ComparisonImages(pictures)
    run, models = tmp_path / "run", tmp_path / "models"
    run.mkdir()
    (run / "checkpoint.pt").write_text("days of work")
    reference = make_reference(bundle, images, "normalised")
    options = ExportOptions(format="triton-server", force=True)
    export(bundle, models, images, options, reference=reference)
    (models / "small" / "notes.txt").write_text("mine")
    export(bundle, models, images, options, reference=reference)
    assert (models / "small" / "notes.txt").read_text() == "mine"
    shutil.copytree(models / "small", models / "another")
    for folder, format in ((run, "openvino"), (run, "triton-server"), (models, "triton-server")):
        with pytest.raises(ValueError, match=f"{folder.name} is a folder with "):
            export(bundle, folder, images, ExportOptions(format=format, force=True))
    assert (run / "checkpoint.pt").read_text() == "days of work"


def test_what_a_library_cannot_write_is_one_line_and_leaves_nothing(
    pictures, tmp_path, monkeypatch
):
    def fail(*_, **how):
        raise RuntimeError("pages\nof text\n\nno such operator\n")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(ValueError, match="^small .* onnx in fp32: no such operator$"):
        export(small_bundle(), tmp_path / "net.onnx", ComparisonImages(pictures))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(OSError, match="No space left on device"):
        export(small_bundle(), tmp_path / "net.onnx", ComparisonImages(pictures))
    assert not any(tmp_path.iterdir())


def test_layers_fall_back_to_float_where_training_for_int8_fails(pictures, tmp_path, monkeypatch):
    checks = iter((2, 4, 6))
    monkeypatch.setattr(
        exporting, "compare", lambda *_: Comparison(6, 0.0, 1.0, same_class=next(checks))
    )

    def diverge(net):
        raise FloatingPointError("the loss is nan")

    lines = []
    how = dict(calibration=pictures, finetune=diverge, progress=lines.append)
    images, options = ComparisonImages(pictures), ExportOptions(precision="int8")
    result = export(small_bundle(), tmp_path / "net.onnx", images, options, **how)
    assert len(result.metadata.float_layers) == 2
    assert [count for count, _ in result.tried] == [0, 1, 2]
    assert [line[-5:] for line in lines if "points of top-1 lost" in line] == [
        "66.67",
        "33.33",
        " 0.00",
    ]
    assert [line for line in lines if line.endswith("the loss is nan")] == lines[1:2]


def test_an_int8_file_is_written_of_the_network_that_was_trained_for_it(
    pictures, tmp_path, monkeypatch
):
    checks = iter((0, 6))
    monkeypatch.setattr(
        exporting, "compare", lambda *_: Comparison(6, 0.0, 1.0, same_class=next(checks))
    )

    def double(net):
        net = copy.deepcopy(net)
        with torch.no_grad():
            net[-1].weight *= 2
        return net

    bundle = small_bundle()
    how = dict(calibration=pictures, finetune=double)
    images, options = ComparisonImages(pictures), ExportOptions(precision="int8")
    path = export(bundle, tmp_path / "net.onnx", images, options, **how).path
    initializers = onnx.load(path).graph.initializer
    scale = max(
        (numpy_helper.to_array(each) for each in initializers if each.name == "net.7.weight_scale"),
        key=np.size,
    )
    assert scale.max() == pytest.approx(
        2 * bundle.net[-1].weight.abs().max().item() / 127, rel=0.01
    )


def test_pictures_come_from_all_over_a_set_and_are_not_held(pictures):
    read = []

    def picture(name):
        if name == "n2":
            raise UnreadableImage(name, "broken")
        read.append(name)
        return pictures[0]

    images = Images(tuple(f"n{i}" for i in range(7)), tuple(range(7)), picture)
    found = evenly_spaced(images, 4)
    assert list(found.indices) == [0, 1, 3, 5]
    assert list(evenly_spaced(images, 100).indices) == [0, 1, 3, 4, 5, 6]
    del read[:]
    for _ in range(2):
        assert found[1:3] == pictures[:1] * 2
    assert read == ["n1", "n3"] * 2


def test_predictions_are_the_networks_calibrated_softmax_best_first(pictures, tmp_path):
    bundle = make_bundle("resnet_rs_tiny", GRAY)
    pictures[0].save(tmp_path / "a.png")
    (answer,) = predict(bundle, [tmp_path / "a.png"], top=10)
    with torch.inference_mode():
        logits = bundle.net(network_input(bundle, pictures[:1]))[0]
    expected = (logits / bundle.temperature).softmax(0)
    assert [g.label for g in answer.guesses] == [
        str(k) for k in expected.argsort(descending=True).tolist()
    ]
    assert [g.probability for g in answer.guesses] == pytest.approx(
        expected.sort(descending=True).values.tolist()
    )


def test_a_picture_may_be_a_path_an_image_or_an_array_alone_or_in_a_list(tmp_path):
    bundle = make_bundle("resnet_rs_tiny", COLOUR)
    pixels = np.random.default_rng(0).integers(0, 256, (31, 44, 3)).astype(np.uint8)
    path = tmp_path / "a.png"
    image = Image.fromarray(pixels)
    image.save(path)
    (expected,) = predict(bundle, [path])
    assert expected.path == str(path)
    for picture in (path, str(path), image, pixels, pixels[None], [pixels], (p for p in [image])):
        (answer,) = predict(bundle, picture)
        assert answer.guesses == expected.guesses
    mixed = list(predict(bundle, [str(path), image, pixels, pixels[:, :, :1]], batch=3))
    assert [answer.path for answer in mixed] == [str(path), "", "", ""]
    assert mixed[0].guesses == pytest.approx(mixed[2].guesses)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right
    image.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    with Image.open(path) as turned:
        (answer,) = predict(bundle, turned)
        assert turned.size == (31, 44)
    assert answer.guesses == expected.guesses
    for wrong in (pixels / 255, pixels[0, 0], 7.5, np.zeros((4, 4, 2), np.uint8)):
        with pytest.raises(ValueError, match="use "):
            list(predict(bundle, [wrong]))


def test_pictures_of_a_batch_are_resized_one_by_one_and_a_batch_is_bounded(tmp_path, monkeypatch):
    bundle, batches = make_bundle("genet_tiny", COLOUR), []
    bundle.net.register_forward_pre_hook(lambda _, inputs: batches.append(len(inputs[0])))
    alive = []

    def decoded(source, channels, choose, **how):
        picture = Image.new("RGB", (60, 60))
        alive.append(weakref.ref(picture))
        assert sum(each() is not None for each in alive) <= 2
        return picture, choose(picture.size)

    monkeypatch.setattr(cropping, "decode_crop", decoded)
    assert len(list(predict(bundle, ["a"] * 9, batch=4))) == 9
    assert batches == [4, 4, 1]
    monkeypatch.setattr(predicting, "MAX_BATCH_PIXELS", 2 * 40 * 40)
    assert len(list(predict(bundle, ["a"] * 5))) == 5
    assert batches[3:] == [2, 2, 1]


def test_pictures_that_cannot_be_read_are_named_in_their_place_and_the_others_are_answered(
    pictures, tmp_path
):
    pictures[0].save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"not a picture")
    paths = [tmp_path / "bad.png", tmp_path / "good.png", tmp_path / "none.png"]
    answers = list(predict(make_bundle("genet_tiny", GRAY), paths, batch=2))
    assert [answer.path for answer in answers] == [str(path) for path in paths]
    assert [bool(answer.guesses) for answer in answers] == [False, True, False]
    assert "not a JPEG" in answers[0].unreadable
    assert answers[2].unreadable == "No such file or directory"


def test_a_picture_in_colour_is_answered_by_a_gray_network_and_the_other_way_round(tmp_path):
    Image.new("RGB", (50, 30), "red").save(tmp_path / "red.png")
    Image.new("L", (50, 30), 90).save(tmp_path / "gray.png")
    for pre in (GRAY, COLOUR):
        answers = list(
            predict(make_bundle("genet_tiny", pre), [tmp_path / "red.png", tmp_path / "gray.png"])
        )
        assert all(len(answer.guesses) == 5 for answer in answers)


def test_the_most_accurate_network_within_the_budget_is_chosen(monkeypatch):
    base = small_bundle()
    bundles = {
        name: replace(base, name=name, scores={"test": {"top1": top1}})
        for name, top1 in (("slow", 99.0), ("good", 98.0), ("fast", 90.0))
    }
    times = {"slow": 9.0, "good": 3.0, "fast": 1.0}

    def bench(nets, protocol, options):
        assert (protocol.name, protocol.resolution, options.in_channels) == ("online", 32, 3)
        (name,) = nets
        samples = [times[name] * protocol.batch] * protocol.rounds
        return [SimpleNamespace(samples=samples, protocol=protocol)]

    monkeypatch.setattr(choose_form, "bench", bench)
    # The time of a call divided by its images, so that a batch does not change the budget.
    for batch in (1, 8):
        lines: list[str] = []
        budget = Budget(ms_per_image=5, batch=batch)
        best, bundle = choose_form.most_accurate(bundles, budget, lines.append)
        assert (best, bundle.name) == ("good", "good")
        (line,) = lines
        assert line.startswith(f"good: 3.000 ms an image here (batch {batch}, ")
    lines = []
    assert choose_form.most_accurate(bundles, None, lines.append)[0] == "slow"
    val = {"val": {"top1": 99.9}}
    without_test = {name: replace(base, scores=val) for name in ("a",)}
    both = replace(base, scores={"val": {"top1": 50.0}, "test": {"top1": 100.0}})
    assert choose_form.most_accurate({**without_test, "b": both}, None, lines.append)[0] == "a"
    assert not lines  # nothing is measured where nothing depends on it
    times_in_words = "0.5 ms an image .*: slow 9.000 ms, good 3.000 ms, fast 1.000 ms"
    with pytest.raises(ValueError, match=times_in_words):
        choose_form.most_accurate(bundles, Budget(ms_per_image=0.5))
    with pytest.raises(ValueError, match="other has no test score"):
        choose_form.most_accurate({**bundles, "other": base}, None)
    with pytest.raises(ValueError, match="good, cats have different classes"):
        choose_form.most_accurate(
            {name: replace(base, classes=tuple(name + "012345")) for name in ("good", "cats")}, None
        )


@pytest.mark.parametrize("budget", [None, Budget(ms_per_image=8)])
@pytest.mark.parametrize("order", [("slow", "fast", "poor"), ("poor", "fast", "slow")])
def test_of_equal_scores_the_faster_network_is_exported(order, budget, monkeypatch):
    times = {"slow": 3.0, "fast": 2.0, "poor": 1.0}
    tops = {"slow": 98.0, "fast": 98.0, "poor": 97.5}
    bundles = {
        name: replace(small_bundle(), name=name, scores={"test": {"top1": tops[name]}})
        for name in order
    }
    monkeypatch.setattr(choose_form, "ms_per_image", lambda bundle, batch: times[bundle.name])
    lines: list[str] = []
    assert choose_form.most_accurate(bundles, budget, lines.append)[0] == "fast"
    assert "slow 3.000 ms" in lines[0]
    assert lines[-1].startswith("fast: 2.000 ms")


@pytest.fixture
def quick(monkeypatch):
    """The online protocol in a fraction of a second."""
    protocol = replace(ONLINE, rounds=2, warmup_s=0, round_s=0.01)
    monkeypatch.setattr(choose_form, "ONLINE", protocol)
    monkeypatch.setattr(choose_form, "TRIAL", protocol)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_time_that_decides_is_measured_here():
    bundle = make_bundle("genet_tiny", GRAY, scores={"test": {"top1": 1.0}})
    lines: list[str] = []
    budget = Budget(ms_per_image=1e6)
    assert choose_form.most_accurate({"one": bundle}, budget, lines.append) == ("one", bundle)
    (ms,) = re.findall(r"^one: ([\d.]+) ms an image", lines[0])
    assert float(ms) > 0


def test_auto_exports_the_fastest_file_that_passes_within_the_budget(
    pictures, tmp_path, monkeypatch
):
    pytest.importorskip("openvino")
    bundle, images = small_bundle(), ComparisonImages(pictures)
    choices = [("onnx", "fp32"), ("openvino", "fp32"), ("pt2", "bf16")]
    monkeypatch.setattr(choose_form, "available", lambda precision: choices)
    monkeypatch.setitem(MAX_DIFFERENCE, "bf16", 0.0)
    ms = {"onnx fp32": 2.0, "openvino fp32": 1.0}
    monkeypatch.setattr(
        choose_form, "latencies", lambda paths, *_: {label: ms[label] for label in paths}
    )
    lines = []
    how, budget = dict(progress=lines.append), Budget(ms_per_image=5)
    result = choose_form.fastest(bundle, tmp_path / "net", images, budget=budget, **how)
    assert (result.format, result.path) == ("openvino", tmp_path / "net")
    assert (tmp_path / "net" / "model.xml").is_file()
    starts = [
        "onnx fp32: 1 of 3",
        "onnx fp32: 2.000 ms an image, 0.00 points lost, after ",
        "openvino fp32: 2 of 3",
        "openvino fp32: 1.000 ms an image, 0.00 points lost, after ",
        "pt2 bf16: 3 of 3",
        "pt2 bf16: was not written: ",
        "measured in turn, an image: openvino fp32 1.000 ms, onnx fp32 2.000 ms",
    ]
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
    assert all(re.search(r"after \d+\.\d s$", lines[number]) for number in (1, 3, 5))
    with pytest.raises(ValueError, match=r"openvino fp32 .* 1.000 ms .* 0.5 ms"):
        choose_form.fastest(bundle, tmp_path / "other", images, budget=Budget(ms_per_image=0.5))
    assert [each.name for each in tmp_path.iterdir()] == ["net"]


@pytest.mark.slow
def test_auto_folds_traces_and_trains_once_and_refuses_at_once_where_a_file_is(
    pictures, tmp_path, monkeypatch
):
    bundle, images = small_bundle(), ComparisonImages(pictures)
    choices = [("onnx", "fp32"), ("openvino", "fp32"), ("onnx", "int8"), ("openvino", "int8")]
    monkeypatch.setattr(choose_form, "available", lambda precision: choices)
    fold, trace, calls = exporting.fold_batch_norm, torch.onnx.export, Counter()
    monkeypatch.setattr(
        exporting, "fold_batch_norm", lambda net: calls.update(["fold"]) or fold(net)
    )
    monkeypatch.setattr(
        torch.onnx, "export", lambda *args, **how: calls.update(["trace"]) or trace(*args, **how)
    )
    monkeypatch.setattr(choose_form, "latencies", lambda paths, *_: dict.fromkeys(paths, 1.0))
    checks = iter((6, 6, 5, 6, 5, 6))
    monkeypatch.setattr(
        exporting, "compare", lambda *_: Comparison(6, 0.0, 1.0, same_class=next(checks))
    )

    def tune(net):
        calls.update(["train"])
        return net

    lines, how = [], dict(finetune=tune, calibration=pictures)
    choose_form.fastest(bundle, tmp_path / "net", images, progress=lines.append, **how)
    # One graph for all files in float, and one for each int8 file of the trained network.
    assert calls == {"fold": 1, "train": 1, "trace": 3}
    assert "onnx int8: layers in float: 0, points of top-1 lost: 16.67" in lines
    with pytest.raises(ValueError, match="net.onnx exists: .* --force"):
        choose_form.fastest(bundle, tmp_path / "net", images)
    assert calls["fold"] == 1


@pytest.mark.usefixtures("quick")
def test_the_latencies_of_files_are_measured_in_turn_by_their_own_runtimes(pictures, tmp_path):
    bundle = small_bundle()
    for format, name in (("onnx", "a.onnx"), ("openvino", "b")):
        export(bundle, tmp_path / name, ComparisonImages(pictures), ExportOptions(format=format))
    ms = choose_form.latencies({"a": tmp_path / "a.onnx", "b": tmp_path / "b"}, bundle)
    assert set(ms) == {"a", "b"}
    assert min(ms.values()) > 0
