"""From a trained network to answers and to files that give the same answers."""

import json
import shutil
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

from fullstride.commands.shipping import spread
from fullstride.data.dataset import Images, UnreadableImage, open_data
from fullstride.deploy import export as exporting
from fullstride.deploy import select
from fullstride.deploy.comparison import MAX_DIFFERENCE, Comparison, ComparisonImages
from fullstride.deploy.export import export
from fullstride.deploy.predict import inputs, predict
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing

GRAY = Preprocessing(resolution=32, mean=(0.2,), std=(0.5,), crop=1.0)
COLOUR = Preprocessing(resolution=40, crop=0.9)


def make(name: str, pre: Preprocessing, **more) -> Bundle:
    """A bundle of random weights whose batch norms have statistics of real size."""
    torch.manual_seed(0)
    net = zoo.create(name, classes=10, in_channels=pre.channels)
    with torch.no_grad():
        for norm in net.modules():
            if isinstance(norm, torch.nn.BatchNorm2d):
                norm.weight.uniform_(-1.5, 1.5)
                norm.bias.uniform_(-0.5, 0.5)
        for _ in range(3):
            net.train()(torch.randn(8, pre.channels, 48, 48))
    return Bundle(net=net.eval(), name=name, classes=tuple("0123456789"), preprocessing=pre, **more)


@pytest.fixture(scope="module")
def pictures():
    digits = open_data("digits").test
    return [digits.picture(index) for index in range(6)]


def network_input(bundle, pictures) -> torch.Tensor:
    return torch.from_numpy(next(inputs("normalised", bundle.preprocessing, pictures)))


@pytest.mark.parametrize("pre", [GRAY, COLOUR], ids=["gray", "colour"])
@pytest.mark.parametrize("name", ["tresnet_tiny", "resnet_rs_tiny", "genet_tiny", "timm/resnet10t"])
def test_onnx_runtime_gives_the_logits_of_pytorch_at_any_batch(name, pre, pictures, tmp_path):
    bundle = make(name, pre, scores={"test": {"top1": 99.0}})
    check = export(bundle, tmp_path / "net.onnx", ComparisonImages(pictures)).comparison
    assert check.images == check.same_top1 == len(pictures)
    assert check.relative_difference < MAX_DIFFERENCE["fp32"]
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    for count in (1, 3, 6):
        x = network_input(bundle, pictures[:count])
        with torch.inference_mode():
            expected = bundle.net(x).numpy()
        (found,) = session.run(None, {"images": x.numpy()})
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_what_is_exported_has_no_batch_norm_left_and_the_bundle_keeps_its_own(
    pictures, tmp_path, monkeypatch
):
    bundle = make("resnet_rs_tiny", GRAY)
    state = {name: value.clone() for name, value in bundle.net.state_dict().items()}
    given, whole = [], torch.export.export
    monkeypatch.setattr(
        torch.export,
        "export",
        lambda net, *args, **how: given.append(net) or whole(net, *args, **how),
    )
    export(bundle, tmp_path / "net.onnx", ComparisonImages(pictures))
    assert not [module for module in given[0].modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert {name: value.tolist() for name, value in bundle.net.state_dict().items()} == {
        name: value.tolist() for name, value in state.items()
    }


def test_the_onnx_file_says_what_it_holds(pictures, tmp_path):
    bundle = make(
        "genet_tiny", GRAY, scores={"test": {"top1": 99.0}}, source="a test", licence="ours"
    )
    export(bundle, tmp_path / "net.onnx", ComparisonImages(pictures))
    told = {p.key: p.value for p in onnx.load(tmp_path / "net.onnx").metadata_props}
    assert json.loads(told["classes"]) == list("0123456789")
    assert json.loads(told["preprocessing"])["mean"] == [0.2]
    assert json.loads(told["scores"]) == {"test": {"top1": 99.0}}
    assert (told["source"], told["licence"], told["precision"]) == ("a test", "ours", "fp32")


def test_a_file_that_answers_differently_is_not_written_and_an_earlier_one_stays(
    pictures, tmp_path, monkeypatch
):
    path = tmp_path / "net.onnx"
    path.write_text("earlier")
    answers = exporting.outputs
    monkeypatch.setattr(exporting, "outputs", lambda *args: answers(*args) * 1.001)
    bundle = make("genet_tiny", GRAY)
    with pytest.raises(ValueError, match=r"net.onnx was not written: .* 1.0e-03 .* 0.0001 "):
        export(bundle, path, ComparisonImages(pictures), force=True)
    monkeypatch.setattr(exporting, "outputs", lambda *args: -answers(*args))
    monkeypatch.setitem(MAX_DIFFERENCE, "bf16", 3.0)
    with pytest.raises(
        ValueError,
        match=r"it loses 100.00 points of top-1, 0.2 are allowed \(on 6 images\): .* --max-drop",
    ):
        export(
            bundle,
            path,
            ComparisonImages(pictures),
            format="openvino",
            precision="bf16",
            force=True,
        )
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_points_are_lost_by_true_classes_where_they_are_known_and_else_by_other_answers():
    ours, theirs = np.eye(4), np.eye(4)[[1, 0, 2, 3]]
    assert exporting.compare(theirs, ours).drop == 50
    assert exporting.compare(theirs, ours, [0, 1, 2, 3]).drop == 50
    assert exporting.compare(theirs, ours, [1, 0, 2, 3]).drop == 0  # it became better
    assert exporting.compare(theirs, ours, [0, 0, 2, 3]).drop == 0  # lost one and won one


def test_an_earlier_file_is_kept_unless_forced(pictures, tmp_path):
    (tmp_path / "net.onnx").write_text("earlier")
    with pytest.raises(
        ValueError, match="net.onnx exists: say --force to replace it, or give another --out"
    ):
        export(make("genet_tiny", GRAY), tmp_path / "net.onnx", ComparisonImages(pictures))
    assert (tmp_path / "net.onnx").read_text() == "earlier"
    export(make("genet_tiny", GRAY), tmp_path / "net.onnx", ComparisonImages(pictures), force=True)
    assert onnx.load(tmp_path / "net.onnx").graph.node


def test_what_cannot_be_exported_is_said_in_one_line(pictures, tmp_path):
    bundle, path, sample = (
        make("genet_tiny", GRAY),
        tmp_path / "net.onnx",
        ComparisonImages(pictures),
    )
    for how, message in (
        (dict(format="onxx"), "no format named 'onxx': choose from onnx, openvino"),
        (
            dict(precision="bf16"),
            "onnx in bf16: use fp32, fp16, int8, or bf16 in openvino, aoti, pt2",
        ),
        (dict(precision="int8"), "int8 needs images to take its ranges from"),
        (
            dict(input_kind="pictures", any_size=True),
            "a file that takes pictures takes any size as it is",
        ),
        (dict(any_size=True), "any size for a network of 32 pixels: .* 64, 96, 128"),
        (
            dict(format="triton-server", precision="bf16"),
            "triton-server in bf16: use fp32, fp16, int8",
        ),
        (
            dict(format="pt2"),
            "net.onnx would not be detect_format: give an --out that ends in .pt2",
        ),
        (
            dict(backend="openvino"),
            "--backend openvino is for --format triton-server: leave it out",
        ),
        (dict(max_drop=-1), "--max-drop -1: use 0 or more points"),
        (dict(max_drop=float("nan")), "--max-drop nan: use 0 or more points"),
    ):
        with pytest.raises(ValueError, match=message):
            export(bundle, path, sample, **how)
    with pytest.raises(ValueError, match="no images to compare answers on"):
        export(bundle, path, ComparisonImages([]))
    with pytest.raises(ValueError, match="2 labels for 6 pictures: give one for each, or none"):
        ComparisonImages(pictures, [1, 2])
    assert not any(tmp_path.iterdir())


def test_answers_that_are_no_numbers_are_refused_in_every_precision_without_a_warning(
    pictures, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        exporting, "outputs", lambda *args: np.full((len(pictures), 10), np.nan, np.float32)
    )
    for precision in ("fp32", "fp16", "int8"):
        with pytest.raises(
            ValueError, match="its answers differ from PyTorch's by nan of the largest"
        ):
            export(
                make("genet_tiny", GRAY),
                tmp_path / "net.onnx",
                ComparisonImages(pictures, [0] * 6),
                precision=precision,
                calibration=pictures,
                max_drop=100,
            )


def test_a_folder_is_replaced_only_where_export_wrote_it(pictures, tmp_path):
    bundle, sample = make("genet_tiny", GRAY), ComparisonImages(pictures)
    run, models = tmp_path / "run", tmp_path / "models"
    run.mkdir()
    (run / "checkpoint.pt").write_text("days of work")
    for _ in range(2):
        export(bundle, models, sample, format="triton-server", force=True)
    shutil.copytree(models / "genet_tiny", models / "another")
    for folder, format in ((run, "openvino"), (run, "triton-server"), (models, "triton-server")):
        with pytest.raises(
            ValueError, match="is a folder with something else in it: give another --out"
        ):
            export(bundle, folder, sample, format=format, force=True)
    assert (run / "checkpoint.pt").read_text() == "days of work"


def test_what_a_library_cannot_write_is_one_line_and_leaves_nothing(
    pictures, tmp_path, monkeypatch
):
    def fail(*_, **how):
        raise RuntimeError("pages\nof text\n\nno such operator\n")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(
        ValueError, match="^genet_tiny cannot be written as onnx in fp32: no such operator$"
    ):
        export(make("genet_tiny", GRAY), tmp_path / "net.onnx", ComparisonImages(pictures))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(OSError, match="No space left on device"):
        export(make("genet_tiny", GRAY), tmp_path / "net.onnx", ComparisonImages(pictures))
    assert not any(tmp_path.iterdir())


def test_training_for_int8_that_comes_to_nothing_is_said_and_layers_go_back_to_float(
    pictures, tmp_path, monkeypatch
):
    checks = iter((2, 4, 6))
    monkeypatch.setattr(
        exporting, "compare", lambda *_: Comparison(6, 0.0, 1.0, same_top1=next(checks))
    )

    def diverge(net):
        raise FloatingPointError("the loss is nan")

    said = []
    how = dict(precision="int8", calibration=pictures, finetune=diverge, progress=said.append)
    made = export(
        make("genet_tiny", GRAY), tmp_path / "net.onnx", ComparisonImages(pictures), **how
    )
    assert len(made.metadata.float_layers) == 2
    assert [count for count, _ in made.tried] == [0, 1, 2]
    assert said[:2] == [
        "layers in float: 0, points of top-1 lost: 66.67",
        "training for int8 came to nothing: the loss is nan",
    ]
    assert said[-1] == "layers in float: 2, points of top-1 lost: 0.00"


def test_pictures_come_from_all_over_a_set_and_are_not_held(pictures):
    read = []

    def picture(name):
        if name == "n2":
            raise UnreadableImage(name, "broken")
        read.append(name)
        return pictures[0]

    images = Images(tuple(f"n{i}" for i in range(7)), tuple(range(7)), picture)
    found = spread(images, 4)
    assert list(found.indices) == [0, 1, 3, 5]
    assert list(spread(images, 100).indices) == [0, 1, 3, 4, 5, 6]
    del read[:]
    for _ in range(2):
        assert found[1:3] == pictures[:1] * 2
    assert read == ["n1", "n3"] * 2


def test_predictions_are_the_networks_softmax_best_first(pictures, tmp_path):
    bundle = make("resnet_rs_tiny", GRAY)
    pictures[0].save(tmp_path / "a.png")
    (answer,) = predict(bundle, [tmp_path / "a.png"], top=10)
    with torch.inference_mode():
        expected = bundle.net(network_input(bundle, pictures[:1])).softmax(1)[0]
    assert [g.label for g in answer.guesses] == [
        str(k) for k in expected.argsort(descending=True).tolist()
    ]
    assert [g.probability for g in answer.guesses] == pytest.approx(
        expected.sort(descending=True).values.tolist()
    )


def test_pictures_that_cannot_be_read_are_named_in_their_place_and_the_others_are_answered(
    pictures, tmp_path
):
    pictures[0].save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"not a picture")
    paths = [tmp_path / "bad.png", tmp_path / "good.png", tmp_path / "none.png"]
    answers = list(predict(make("genet_tiny", GRAY), paths, batch=2))
    assert [answer.path for answer in answers] == [str(path) for path in paths]
    assert [bool(answer.guesses) for answer in answers] == [False, True, False]
    assert "not a JPEG" in answers[0].unreadable
    assert answers[2].unreadable == "No such file or directory"


def test_a_picture_in_colour_is_answered_by_a_gray_network_and_the_other_way_round(tmp_path):
    Image.new("RGB", (50, 30), "red").save(tmp_path / "red.png")
    Image.new("L", (50, 30), 90).save(tmp_path / "gray.png")
    for pre in (GRAY, COLOUR):
        answers = list(
            predict(make("genet_tiny", pre), [tmp_path / "red.png", tmp_path / "gray.png"])
        )
        assert all(len(answer.guesses) == 5 for answer in answers)


def test_the_most_accurate_network_within_the_budget_is_chosen(monkeypatch):
    base = make("genet_tiny", GRAY)
    bundles = {
        name: replace(base, name=name, scores={"test": {"top1": top1}})
        for name, top1 in (("slow", 99.0), ("good", 98.0), ("fast", 90.0))
    }
    times = {"slow": 9.0, "good": 3.0, "fast": 1.0}

    def bench(nets, protocol, in_channels):
        assert (protocol.name, protocol.resolution, in_channels) == ("online", 32, 1)
        (name,) = nets
        return [type("M", (), {"ms_p50": times[name]})]

    monkeypatch.setattr(select, "bench", bench)
    best, bundle, ms = select.most_accurate(bundles, 5.0)
    assert (best, bundle.name, ms) == ("good", "good", 3.0)
    assert select.most_accurate(bundles, None)[0] == "slow"
    with pytest.raises(
        ValueError,
        match="nothing answers within 0.5 ms: slow 9.000 ms, good 3.000 ms, fast 1.000 ms",
    ):
        select.most_accurate(bundles, 0.5)
    with pytest.raises(ValueError, match="other has no test score"):
        select.most_accurate({**bundles, "other": base}, None)
    with pytest.raises(ValueError, match="good, cats know different classes: export each alone"):
        select.most_accurate(
            {"good": bundles["good"], "cats": replace(base, classes=tuple("abcdefghij"))}, None
        )


def test_the_time_that_decides_is_measured_here():
    best, _, ms = select.most_accurate(
        {"one": make("genet_tiny", GRAY, scores={"test": {"top1": 1.0}})}, 1e6
    )
    assert best == "one"
    assert ms > 0


def test_auto_keeps_the_fastest_file_that_passes_within_the_budget(pictures, tmp_path, monkeypatch):
    bundle, sample = make("genet_tiny", GRAY), ComparisonImages(pictures)
    monkeypatch.setattr(
        select,
        "available",
        lambda precision: [("onnx", "fp32"), ("openvino", "fp32"), ("pt2", "bf16")],
    )
    monkeypatch.setattr(
        select, "latencies", lambda paths, _: {"onnx fp32": 2.0, "openvino fp32": 1.0}
    )
    said = []
    made = select.fastest(bundle, tmp_path / "net", sample, budget_ms=5, progress=said.append)
    assert (made.format, made.path) == ("openvino", tmp_path / "net")
    assert (tmp_path / "net" / "model.xml").is_file()
    assert said[-2:] == [
        "openvino fp32: 1.000 ms an image, 0.00 points lost",
        "onnx fp32: 2.000 ms an image, 0.00 points lost",
    ]
    with pytest.raises(
        ValueError,
        match="other was not written: openvino fp32 is the fastest with 1.000 ms an image, the budget is 0.5 ms",
    ):
        select.fastest(bundle, tmp_path / "other", sample, budget_ms=0.5)
    assert [each.name for each in tmp_path.iterdir()] == ["net"]


def test_auto_folds_once_trains_once_and_refuses_at_once_where_a_file_stands(
    pictures, tmp_path, monkeypatch
):
    bundle, sample = make("genet_tiny", GRAY), ComparisonImages(pictures)
    monkeypatch.setattr(
        select, "available", lambda precision: [("onnx", "int8"), ("openvino", "int8")]
    )
    fold, count, trained = exporting.fold_batch_norm, [], []
    monkeypatch.setattr(exporting, "fold_batch_norm", lambda net: count.append(net) or fold(net))
    monkeypatch.setattr(select, "latencies", lambda paths, _: dict.fromkeys(paths, 1.0))
    checks = iter((5, 6, 5, 6))
    monkeypatch.setattr(
        exporting, "compare", lambda *_: Comparison(6, 0.0, 1.0, same_top1=next(checks))
    )

    def tune(net):
        trained.append(net)
        return net

    said = []
    select.fastest(
        bundle, tmp_path / "net", sample, finetune=tune, calibration=pictures, progress=said.append
    )
    assert (len(count), len(trained)) == (1, 1)
    assert "onnx int8: layers in float: 0, points of top-1 lost: 16.67" in said
    with pytest.raises(ValueError, match=r"net.onnx exists: say --force"):
        select.fastest(bundle, tmp_path / "net", sample)
    assert len(count) == 1


def test_the_times_of_files_are_measured_in_turn_by_their_own_engines(pictures, tmp_path):
    bundle = make("genet_tiny", GRAY)
    for format, name in (("onnx", "a.onnx"), ("openvino", "b")):
        export(bundle, tmp_path / name, ComparisonImages(pictures), format=format)
    found = select.latencies({"a": tmp_path / "a.onnx", "b": tmp_path / "b"}, bundle)
    assert set(found) == {"a", "b"}
    assert min(found.values()) > 0
