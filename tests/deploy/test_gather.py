"""What is on a page of `fullstride report`: runs, bundles, files and measured networks."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from fullstride.data.dataset import open_data
from fullstride.deploy import choose_form
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export
from fullstride.deploy.settings import ExportOptions
from fullstride.measure.budget import Budget
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import ONLINE, Measurement, save_measurements
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.report.gather import gather
from fullstride.report.page import render
from fullstride.train.recipes.named import DIGITS
from fullstride.train.run_folder import BUNDLE, LOG, RunConfig, create_or_resume

DATA = open_data("digits")
ROW = {"epoch": 1, "epochs": 1, "loss": 2.0, "lr": 0.1, "images_per_s": 9.0, "data_share": 0.0}


def network(side: int, name: str, score: float) -> Bundle:
    torch.manual_seed(side)
    net = zoo.create("genet_tiny", classes=10, in_channels=1, resolution=side)
    pre = Preprocessing(resolution=side, mean=(0.3,), std=(0.3,), crop=1.0)
    scores = {"test": {"top1": score, "loss": 1.0, "images": len(DATA.test)}}
    how = dict(classes=DATA.classes, preprocessing=pre, scores=scores)
    return Bundle(net.eval(), name=name, source="trained on digits", **how)


def finished_run(folder, side: int, score: float, fingerprint: str = DATA.fingerprint) -> Bundle:
    """A folder as `fullstride train` leaves it, of a network with random weights."""
    bundle = network(side, folder.name, score)
    config = RunConfig(
        model="genet_tiny",
        weights="",
        data="digits",
        val=None,
        fingerprint=fingerprint,
        classes=DATA.classes,
        spec=json.loads(bundle.net.spec.to_json()),
        preprocessing=asdict(bundle.preprocessing),
        recipe=asdict(DIGITS),
        efficiency="plain",
        score_every_epochs=1,
        precision="fp32",
        channels_last=True,
        grad_accum_steps=1,
    )
    folder.mkdir()
    create_or_resume(folder, config)
    (folder / LOG).write_text(json.dumps(ROW | {"val/top1": 9.0, "skipped": {}}) + "\n")
    bundle.save(folder / BUNDLE)
    return bundle


def measured(name: str, side: int, ms: float, samples: tuple[float, ...] = (1.0,) * 20):
    return Measurement(
        name=name,
        protocol=replace(ONLINE, resolution=side),
        images_per_s=1e3 / ms,
        spread=0.0,
        ms_p50=ms,
        ms_p90=ms,
        ms_p99=ms,
        samples=samples,
        precision="float32",
        layout="nchw",
        compiled=False,
        environment=Environment.here(),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_of_different_resolutions_stand_on_one_page_by_any_spelling_of_their_paths(folder):
    for name, side, score in (("a", 32, 90.0), ("b", 48, 95.0), ("c", 32, 80.0)):
        finished_run(folder / name, side, score)
    rows = [measured("a/", 32, 1.0), measured(str(folder / "b"), 48, 2.0), measured("c", 32, 3.0)]
    save_measurements([*rows, measured("genet_tiny", 32, 4.0)], folder / "bench.json")
    content = gather(["./a", "b/"], folder / "bench.json")
    by_name = {entry.name: entry for entry in content["entries"]}
    assert [(e.resolution, e.ms_p50, e.score) for e in by_name.values()] == [
        (32, 1.0, 90.0),
        (48, 2.0, 95.0),
        (32, 4.0, None),  # a name with fresh weights; c is a run, which was not named
    ]
    assert len(by_name["a"].log) == 1
    assert str(folder / "c") in content["notes"][-1]
    assert "b</strong> has a top-1 of 95.0 %" in render(**content)


@pytest.mark.parametrize(
    ("ms", "best"),
    [({"a": 2.0, "b": 1.0}, "b"), ({"a": 1.0, "b": 2.0}, "a"), ({"b": 1.0}, "a"), ({}, "a")],
)
def test_of_equal_scores_the_page_names_the_faster_network(folder, ms, best):
    for name in "ab":
        finished_run(folder / name, 32, 90.0)
    save_measurements([measured(name, 32, time) for name, time in ms.items()], folder / "b.json")
    content = gather(["a", "b"], folder / "b.json")
    assert f"predictions of {best} on test images" in content["notes"][1]
    assert f"<strong>{best}</strong> has a top-1 of 90.0 %" in render(**content)


@pytest.mark.slow
def test_exported_files_and_bundles_are_scored_on_the_images_of_the_run(folder):
    bundle = finished_run(folder / "run", 32, 10.0)
    images = ComparisonImages([picture for _, picture in zip(range(8), pictures(), strict=False)])
    export(bundle, folder / "net.onnx", images)
    export(bundle, folder / "vino", images, ExportOptions(format="openvino", input_kind="pixels"))
    rows = [measured("net.onnx", 32, 1.0), replace(measured("vino/", 32, 2.0), runtime="OpenVINO")]
    save_measurements(rows, folder / "bench.json")
    content = gather(["run", "net.onnx", "vino/", "run/bundle/"], folder / "bench.json")
    run, onnx, vino, copy = content["entries"]
    # The run's score was set to 10 above; the others are scored here.
    right = sum(
        int(bundle.net(tensor(picture, bundle)).argmax()) == target
        for picture, target in zip(pictures(), DATA.test.targets, strict=True)
    )
    assert run.score == 10.0
    assert {onnx.score, vino.score, copy.score} == {100 * (right / len(DATA.test))}
    assert {onnx.test_images, vino.test_images, copy.test_images} == {len(DATA.test)}
    assert (onnx.name, vino.name, onnx.ms_p50, vino.ms_p50) == ("net.onnx", "vino", 1.0, 2.0)
    assert "ONNX Runtime" in onnx.note
    assert copy.params == run.params
    assert render(**content).count("not counted") == 4
    alone = gather(["net.onnx"], data="digits")["entries"]
    assert [entry.score for entry in alone] == [onnx.score]
    with pytest.raises(ValueError, match="net.onnx .* --data"):
        gather(["net.onnx"])


def pictures():
    return (picture for _, picture in DATA.test.readable())


def tensor(picture, bundle: Bundle) -> torch.Tensor:
    from fullstride.deploy.predict import inputs

    (batch,) = inputs("normalised", bundle.preprocessing, [picture])
    return torch.from_numpy(batch)


def test_models_of_other_images_or_classes_are_refused_in_one_line(folder):
    finished_run(folder / "a", 32, 90.0)
    finished_run(folder / "other", 32, 90.0, fingerprint="0" * 64)
    cats = replace(network(32, "cats", 1.0), classes=tuple("abcdefghij"))
    cats.save(folder / "cats")
    (folder / "begun").mkdir()
    (folder / "begun" / "run.json").write_bytes((folder / "a" / "run.json").read_bytes())
    for word, reason in (
        ("other", "trained on"),
        ("cats", "other classes"),
        ("begun", "not a finished run"),
    ):
        with pytest.raises(ValueError, match=f"{word} .*{reason}") as caught:
            gather(["a", word])
        assert "\n" not in str(caught.value)
    save_measurements([measured("a", 48, 1.0)], folder / "b.json")
    with pytest.raises(ValueError, match="a is for 32 pixels a side and was timed at 48"):
        gather(["a"], folder / "b.json")


def test_a_page_says_which_times_were_measured_on_a_busy_machine(folder):
    finished_run(folder / "a", 32, 90.0)
    noisy = tuple(float(1 + number % 2) for number in range(20) for _ in range(3))
    rows = [measured("a", 32, 1.0, noisy), measured("genet_tiny", 32, 1.0)]
    save_measurements(rows, folder / "b.json")
    (line,) = [note for note in gather(["a"], folder / "b.json")["notes"] if "busy" in note]
    assert line.startswith("a: rounds of online spread by 67%")


def test_times_of_an_earlier_measurement_take_the_place_of_new_ones(folder, monkeypatch):
    bundles = {name: finished_run(folder / name[0], 32, 90.0) for name in ("a/", "b")}
    save_measurements([measured("./a", 32, 9.0), measured("b", 32, 7.0)], folder / "times.json")
    times = choose_form.earlier_times(folder / "times.json", bundles)
    assert times == {"a/": 9.0, "b": 7.0}
    monkeypatch.delattr(choose_form, "bench")
    for budget in (None, Budget(ms_per_image=8)):
        assert choose_form.most_accurate(bundles, budget, times=times)[0] == "b"
    save_measurements([measured("a", 48, 9.0), measured("b", 32, 7.0)], folder / "times.json")
    with pytest.raises(ValueError, match=r"no time of a/ .* 32"):
        choose_form.earlier_times(folder / "times.json", bundles)
    with pytest.raises(ValueError, match=r"no time of b .* batch 8"):
        choose_form.earlier_times(folder / "times.json", {"b": bundles["b"]}, batch=8)
