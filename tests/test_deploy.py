"""From a trained network to answers and to files that give the same answers."""

import json
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

from fullstride.data.images import open_data
from fullstride.deploy import choose, export
from fullstride.deploy.export import export_onnx
from fullstride.deploy.predict import network_input, predict
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


@pytest.mark.parametrize("pre", [GRAY, COLOUR], ids=["gray", "colour"])
@pytest.mark.parametrize("name", ["tresnet_tiny", "resnet_rs_tiny", "genet_tiny", "timm/resnet10t"])
def test_onnx_runtime_gives_the_logits_of_pytorch_at_any_batch(name, pre, pictures, tmp_path):
    bundle = make(name, pre, scores={"test": {"top1": 99.0}})
    check = export_onnx(bundle, tmp_path / "net.onnx", pictures)
    assert check.images == check.same_top1 == len(pictures)
    assert check.relative_difference < export.TOLERANCE
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    for count in (1, 3, 6):
        x = network_input(bundle, pictures[:count])
        with torch.inference_mode():
            expected = bundle.net(x).numpy()
        (found,) = session.run(None, {"images": x.numpy()})
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_what_is_exported_has_no_batch_norm_left_and_the_bundle_keeps_its_own(pictures, tmp_path, monkeypatch):
    bundle = make("resnet_rs_tiny", GRAY)
    state = {name: value.clone() for name, value in bundle.net.state_dict().items()}
    given, whole = [], torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda net, *args, **how: given.append(net) or whole(net, *args, **how))
    export_onnx(bundle, tmp_path / "net.onnx", pictures)
    assert not [module for module in given[0].modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert {name: value.tolist() for name, value in bundle.net.state_dict().items()} == {
        name: value.tolist() for name, value in state.items()
    }


def test_the_onnx_file_says_what_it_holds(pictures, tmp_path):
    bundle = make("genet_tiny", GRAY, scores={"test": {"top1": 99.0}}, source="a test")
    export_onnx(bundle, tmp_path / "net.onnx", pictures)
    told = {p.key: p.value for p in onnx.load(tmp_path / "net.onnx").metadata_props}
    assert json.loads(told["classes"]) == list("0123456789")
    assert json.loads(told["preprocessing"])["mean"] == [0.2]
    assert json.loads(told["scores"]) == {"test": {"top1": 99.0}}
    assert told["source"] == "a test"


def test_a_file_that_answers_differently_is_not_written_and_an_earlier_one_stays(pictures, tmp_path, monkeypatch):
    path = tmp_path / "net.onnx"
    path.write_text("earlier")
    run = export.run_onnx
    monkeypatch.setattr(export, "run_onnx", lambda *args: run(*args) * 1.001)
    with pytest.raises(ValueError, match=r"was not written: its logits differ from PyTorch's by .*e-0"):
        export_onnx(make("genet_tiny", GRAY), path, pictures)
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_predictions_are_the_networks_softmax_best_first(pictures, tmp_path):
    bundle = make("resnet_rs_tiny", GRAY)
    pictures[0].save(tmp_path / "a.png")
    (answer,) = predict(bundle, [tmp_path / "a.png"], top=10)
    with torch.inference_mode():
        expected = bundle.net(network_input(bundle, pictures[:1])).softmax(1)[0]
    assert [g.label for g in answer.guesses] == [str(k) for k in expected.argsort(descending=True).tolist()]
    assert [g.probability for g in answer.guesses] == pytest.approx(expected.sort(descending=True).values.tolist())


def test_pictures_that_cannot_be_read_are_named_in_their_place_and_the_others_are_answered(pictures, tmp_path):
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
        answers = list(predict(make("genet_tiny", pre), [tmp_path / "red.png", tmp_path / "gray.png"]))
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

    monkeypatch.setattr(choose, "bench", bench)
    best, bundle, ms = choose.most_accurate(bundles, 5.0)
    assert (best, bundle.name, ms) == ("good", "good", 3.0)
    assert choose.most_accurate(bundles, None)[0] == "slow"
    with pytest.raises(ValueError, match="nothing answers within 0.5 ms: slow 9.000 ms, good 3.000 ms, fast 1.000 ms"):
        choose.most_accurate(bundles, 0.5)
    with pytest.raises(ValueError, match="other has no test score"):
        choose.most_accurate({**bundles, "other": base}, None)


def test_the_time_that_decides_is_measured_here():
    best, _, ms = choose.most_accurate({"one": make("genet_tiny", GRAY, scores={"test": {"top1": 1.0}})}, 1e6)
    assert best == "one"
    assert ms > 0
