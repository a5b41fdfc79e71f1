"""Trained networks on disk, and where networks come from."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fullstride import cli
from fullstride.data.transforms.crop import test_view, to_input
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle, build, reorder_outputs
from fullstride.nets.preprocessing import LoadOptions, Preprocessing
from fullstride.nets.weights import convert, hub


@pytest.fixture
def bundle():
    torch.manual_seed(0)
    return Bundle(
        net=zoo.create("tresnet_tiny", classes=3, in_channels=1).eval(),
        name="mine",
        classes=("a", "b", "ü/<c>"),
        preprocessing=Preprocessing(
            resolution=32, mean=(0.1,), std=(0.5,), kernel="bicubic", fit="squish", crop=1.0
        ),
        recipe={"epochs": 3, "scale": [0.1, 1.0]},
        scores={"test": {"top1": 98.5}},
        environment={"device": "here"},
        source="a test",
    )


@pytest.mark.parametrize("name", ["tresnet_tiny", "timm/resnet10t"])
def test_a_bundle_comes_back_from_disk_as_it_was(bundle, name, tmp_path):
    bundle = replace(bundle, net=zoo.create(name, classes=3, in_channels=1).eval())
    bundle.save(tmp_path / "b")
    loaded = Bundle.load(tmp_path / "b")
    for field in ("name", "classes", "preprocessing", "recipe", "scores", "environment", "source"):
        assert getattr(loaded, field) == getattr(bundle, field)
    assert loaded.net.spec == bundle.net.spec
    x = torch.rand(2, 1, 32, 32)
    with torch.inference_mode():
        assert torch.equal(loaded.net(x), bundle.net(x))


def test_a_network_that_was_compiled_is_saved_under_its_own_names(bundle, tmp_path):
    compiled = torch.compile(zoo.create("tresnet_tiny", classes=3, in_channels=1).eval())
    replace(bundle, net=compiled).save(tmp_path / "b")
    assert Bundle.load(tmp_path / "b").net.state_dict().keys() == bundle.net.state_dict().keys()


def test_saving_replaces_an_earlier_bundle_whole_and_leaves_nothing_else(bundle, tmp_path):
    bundle.save(tmp_path / "b")
    replace(bundle, name="newer").save(tmp_path / "b")
    assert Bundle.load(tmp_path / "b").name == "newer"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_save_that_fails_keeps_the_earlier_bundle(bundle, tmp_path):
    bundle.save(tmp_path / "b")
    with pytest.raises(TypeError):
        replace(bundle, name="newer", recipe={"lr": object()}).save(tmp_path / "b")
    assert Bundle.load(tmp_path / "b").name == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def broken(folder, how):
    about = json.loads((folder / "bundle.json").read_text())
    weights = folder / "weights.safetensors"
    if how == "no json":
        (folder / "bundle.json").unlink()
    elif how == "half a json":
        (folder / "bundle.json").write_text("{")
    elif how == "no weights":
        weights.unlink()
    elif how == "half the weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "a weight missing":
        state = load_file(weights)
        del state["head.fc.bias"]
        save_file(state, weights)
    elif how == "classes missing":
        (folder / "bundle.json").write_text(json.dumps({**about, "classes": ["a"]}))
    elif how == "no spec":
        del about["spec"]
        (folder / "bundle.json").write_text(json.dumps(about))
    elif how == "a spec of code":
        about["spec"]["stem"] = "os.system"
        (folder / "bundle.json").write_text(json.dumps(about))
    elif how == "a spec too large for memory":
        stage = {**about["spec"]["stages"][0], "width": 65_536, "depth": 2}  # 300 GB
        about["spec"]["stages"] = [stage]
        (folder / "bundle.json").write_text(json.dumps(about))
    elif how == "a timm name that fetches":
        (folder / "bundle.json").write_text(
            json.dumps({**about, "spec": {"timm": {"name": "hf-hub:evil/net"}}})
        )
    elif how == "a later format":
        (folder / "bundle.json").write_text(json.dumps({**about, "format": 99}))
    elif how == "preprocessing of nonsense":
        (folder / "bundle.json").write_text(json.dumps({**about, "preprocessing": {"mean": 3}}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "no json",
        "half a json",
        "no weights",
        "half the weights",
        "a weight missing",
        "classes missing",
        "no spec",
        "a spec of code",
        "a spec too large for memory",
        "a timm name that fetches",
        "a later format",
        "preprocessing of nonsense",
    ],
)
def test_a_bundle_that_is_not_whole_is_refused_in_one_line(bundle, how, tmp_path):
    bundle.save(tmp_path / "b")
    broken(tmp_path / "b", how)
    with pytest.raises(ValueError, match=str(tmp_path)) as refused:
        Bundle.load(tmp_path / "b")
    assert "\n" not in str(refused.value)


def changed(value, how):
    if how == "nan":
        return torch.where(torch.arange(value.numel()).view_as(value) == 0, torch.nan, value)
    return value.to(how)


@pytest.mark.parametrize("how", ["nan", torch.int32, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("name", ["tresnet_tiny", "timm/resnet10t"])
def test_a_bundle_of_weights_that_are_not_finite_floats_is_refused(bundle, name, how, tmp_path):
    replace(bundle, net=zoo.create(name, classes=3, in_channels=1)).save(tmp_path)
    state = load_file(tmp_path / "weights.safetensors")
    weight = next(key for key in state if key.endswith("weight"))
    save_file({**state, weight: changed(state[weight], how)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=f"{tmp_path}.*{weight}") as caught:
        Bundle.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_half_precision_in_a_bundle_and_counters_of_any_width_are_read(bundle, tmp_path):
    bundle.save(tmp_path)
    state = load_file(tmp_path / "weights.safetensors")
    half = {
        name: value.half() if value.is_floating_point() else value.int()
        for name, value in state.items()
    }
    save_file(half, tmp_path / "weights.safetensors")
    loaded = Bundle.load(tmp_path).net.state_dict()
    assert all(torch.equal(loaded[name], value.to(state[name])) for name, value in half.items())
    counter = next(name for name in state if name.endswith("tracked"))
    save_file({**half, counter: torch.tensor(1.0)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=f"{counter} is torch.float32"):
        Bundle.load(tmp_path)


def test_outputs_that_are_not_finite_end_a_command_without_a_score(bundle, tmp_path, capsys):
    net = zoo.create("tresnet_tiny", classes=10, in_channels=1).eval()
    net.head.fc.weight.data.fill_(3e38)
    replace(bundle, net=net, classes=tuple("0123456789")).save(tmp_path / "b")
    Image.new("L", (32, 32), 200).save(tmp_path / "gray.png")
    for words in (["validate", "--data", "digits"], ["predict", str(tmp_path / "gray.png")]):
        assert cli.run([words[0], str(tmp_path / "b"), *words[1:], "--device", "cpu"]) == 1
        out, error = capsys.readouterr()
        assert "nan" not in out
        assert error.startswith("fullstride: ")
        assert error.count("\n") == 1
        assert "not finite" in error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fit", "stretch"),
        ("fit", None),
        ("kernel", "x"),
        ("resolution", 224.0),
        ("resolution", True),
        ("mean", (math.nan,) * 3),
        ("std", (math.inf,) * 3),
        ("crop", math.nan),
    ],
)
def test_preprocessing_that_is_not_possible_is_refused_when_it_is_made(field, value):
    with pytest.raises(ValueError, match=field) as caught:
        Preprocessing(**{field: value})
    assert "\n" not in str(caught.value)


def test_a_file_of_weights_is_loaded_with_the_preprocessing_of_its_family(bundle, tmp_path):
    spec = zoo.spec("tresnet_tiny")
    net = zoo.create("tresnet_tiny")
    save_file(net.state_dict(), tmp_path / "w.bin")
    loaded = zoo.load(tmp_path / "w.bin", "tresnet_tiny")
    assert loaded.net.spec == spec
    assert loaded.preprocessing.mean == (0.0, 0.0, 0.0)
    assert zoo.family_preprocessing(zoo.spec("genet_light")).mean == (0.485, 0.456, 0.406)
    assert zoo.family_preprocessing(zoo.spec("resnet_rs_50")).kernel == "bicubic"


def test_a_released_file_at_another_resolution_is_a_network_of_that_resolution(
    tmp_path, monkeypatch
):
    release = hub.ReleasedFile("tiny_64", "genet_tiny", 10, 64, "crop", 0.875, "a test")
    monkeypatch.setattr(hub, "RELEASED", (release,))
    official_file(tmp_path / "tiny_64.pth")
    loaded = zoo.load(tmp_path / "tiny_64.pth")
    assert zoo.spec("genet_tiny").resolution == 32
    assert loaded.net.spec.resolution == loaded.preprocessing.resolution == 64


def official_file(path, classes=10, **more):
    """GENet in the authors' names, as a training program saves it with its average."""
    spec = replace(zoo.spec("genet_tiny"), classes=classes)
    torch.manual_seed(0)
    raw, averaged = (build(spec).state_dict() for _ in range(2))
    names = convert.parameter_names("official", spec)
    states = ({names[key]: value for key, value in state.items()} for state in (raw, averaged))
    torch.save(dict(zip(("state_dict", "state_dict_ema"), states, strict=True)), path)
    return raw, averaged


def test_what_a_file_of_weights_does_not_say_is_a_line_and_a_flag(tmp_path, capsys):
    raw, averaged = official_file(tmp_path / "net.pth")
    loaded = zoo.load(tmp_path / "net.pth")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "averaged weights (state_dict_ema)" in lines[0]
    assert "--weights-kind" in lines[0]
    assert "genet_tiny, for 32 pixels, center crop of 0.875" in lines[1]
    assert "--resolution, --fit and --crop" in lines[1]
    zoo.load(tmp_path / "net.pth")
    assert not capsys.readouterr().err  # once in a process
    key = "head.fc.weight"
    assert torch.equal(loaded.net.state_dict()[key], averaged[key])
    (tmp_path / "names.txt").write_text("\n".join("abcdefghij"))
    options = LoadOptions(
        resolution=48, fit="squish", class_names=tmp_path / "names.txt", weights_kind="raw"
    )
    loaded = zoo.load(tmp_path / "net.pth", options=options)
    assert (loaded.preprocessing.resolution, loaded.preprocessing.fit) == (48, "squish")
    assert loaded.classes == tuple("abcdefghij")
    assert torch.equal(loaded.net.state_dict()[key], raw[key])
    for options, says in (
        (LoadOptions(network="genet_light"), "genet_tiny"),
        (LoadOptions(fit="squish", crop=0.9), "--fit crop"),
        (LoadOptions(crop=1.5), "crop 1.5"),
    ):
        with pytest.raises(ValueError, match=says):
            zoo.load(tmp_path / "net.pth", options=options)


def test_the_network_of_a_file_is_refused_for_a_bundle_and_for_another_name(bundle, tmp_path):
    bundle.save(tmp_path / "b")
    for what in (tmp_path / "b", "resnet50", "hf:ann/digits"):
        with pytest.raises(ValueError, match=r"'tresnet_m' is for a file of weights, .* is none"):
            zoo.load(what, "tresnet_m")


def test_options_for_files_of_weights_are_refused_for_a_bundle(bundle, tmp_path):
    bundle.save(tmp_path / "b")
    assert zoo.load(tmp_path / "b", options=LoadOptions(resolution=64)).preprocessing == replace(
        bundle.preprocessing, resolution=64
    )
    with pytest.raises(ValueError, match="--weights-kind"):
        zoo.load(tmp_path / "b", options=LoadOptions(weights_kind="raw"))


@pytest.mark.parametrize(
    "words",
    [
        ["validate", "/no/such/path"],
        ["validate", "missing.pth", "--data", "digits"],
        ["predict", "missing.onnx", "x.png"],
        ["bench", "./runs/x"],
        ["bench", "~/net"],
        ["measure", "estimate", "runs/x", "--target", "v100-fp16"],
        ["measure", "cost", "../net.safetensors"],
        ["export", "runs/x", "--out", "x.onnx"],
        ["train", "digits", "--model", "genet_tiny", "--out", "o", "--weights", "runs/x"],
        ["train", "digits", "--model", "./runs/x", "--out", "o"],
        ["train", "digits", "--model", "genet_tiny", "--out", "o", "--recipe", "runs/x"],
    ],
    ids=" ".join,
)
def test_a_path_that_does_not_exist_is_answered_as_a_path(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(words) == 2
    error = capsys.readouterr().err
    assert "o such file or " in error
    assert any(word in error for word in words[1:] if word != "x")
    assert not any(tmp_path.iterdir())
    assert error.count("\n") == 1


def test_a_network_is_scored_on_a_folder_of_its_classes_in_another_order(tmp_path, capsys):
    """Scores are equal to those of a network whose outputs are permuted by hand."""
    official_file(tmp_path / "net.pth", classes=4)
    for number, name in enumerate(("goldfish", "great_white_shark", "hen", "tench")):
        for image in range(6):
            pixels = np.random.default_rng([number, image]).integers(256, size=(40, 40, 3))
            path = tmp_path / "data" / name / f"{image}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype("uint8")).save(path)
    names = ("hen", "tench, Tinca tinca", "Goldfish", "great white shark, white shark")
    (tmp_path / "names.txt").write_text("\n".join(names))
    data = str(tmp_path / "data")
    order = [2, 3, 0, 1]  # of the outputs, for the folder's classes
    bundle = zoo.load(tmp_path / "net.pth")
    for parameter in (bundle.net.head.fc.weight, bundle.net.head.fc.bias):
        parameter.data = parameter.data[order]
    replace(bundle, classes=("goldfish", "great_white_shark", "hen", "tench")).save(tmp_path / "b")
    capsys.readouterr()
    scores = []
    for words in (["b"], ["net.pth", "--class-names", str(tmp_path / "names.txt")], ["net.pth"]):
        command = ["validate", str(tmp_path / words[0]), *words[1:], "--data", data]
        assert cli.run([*command, "--split", "all", "--device", "cpu"]) == 0
        scores.append(capsys.readouterr().out.splitlines()[0])
    assert scores[0] == scores[1]
    assert scores[2] != scores[1]


def test_released_weights_are_asked_of_the_hub_and_their_absence_is_said_plainly(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(repository, filename):
        assert (repository, filename) == ("timm/tresnet_m.miil_in1k_448", "model.safetensors")
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    said = r"^huggingface.co/timm/tresnet_m.miil_in1k_448 cannot be reached \(no network\)"
    with pytest.raises(ValueError, match=said):
        zoo.load("tresnet_m.miil_in1k_448")


def test_without_a_network_the_hub_is_not_waited_for(monkeypatch):
    def fail(*_):
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub.socket, "getaddrinfo", fail)
    monkeypatch.setattr(hub, "getproxies", dict)
    start = time.perf_counter()
    with pytest.raises(ValueError, match="connect to the network, or give a local path"):
        zoo.load("tresnet_l.miil_in1k_448")
    assert time.perf_counter() - start < 10


def test_weights_from_the_hub_become_ours_with_classes_and_preprocessing(monkeypatch, tmp_path):
    import huggingface_hub
    import timm

    theirs = timm.create_model("gernet_s", pretrained=False).eval()
    for norm in theirs.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(norm.weight, -1, 1)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *_: str(tmp_path / "model.safetensors")
    )
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    x = torch.rand(1, 3, 64, 64)
    for name in ("genet_light", "timm/gernet_s"):
        bundle = zoo.load(name)
        with torch.inference_mode():
            assert torch.allclose(bundle.net(x), theirs(x), rtol=1e-3, atol=1e-4)
        authors = Preprocessing(resolution=192, crop=192 / 220)  # 75.7 % in the paper
        ours = name == "genet_light"
        assert bundle.preprocessing == (authors if ours else Preprocessing(resolution=224))
        assert len(bundle.classes) == 1000
        assert bundle.classes[0].startswith("tench")


@pytest.mark.parametrize(
    "name", ["tresnet_tiny", "timm/dla46x_c", "timm/deit_tiny_distilled_patch16_224"]
)
def test_reordered_outputs_are_the_logits_in_another_order(name):
    net = zoo.create(name, classes=3).eval()
    for path in net.classifiers:  # of one linear layer, of a convolution, or of two layers
        for parameter in net.get_submodule(path).parameters():
            torch.nn.init.normal_(parameter)
    x = torch.rand(2, 3, *2 * [224 if "deit" in name else 64])
    with torch.inference_mode():
        before = net(x)
        reorder_outputs(net, (1, 2, 0))
        assert torch.allclose(net(x), before[:, [1, 2, 0]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "is_equal"),
    [
        ("resnet18.a1_in1k", True),
        ("convnext_tiny.fb_in22k_ft_in1k_384", True),
        ("dm_nfnet_f0.dm_in1k", False),
        ("volo_d4_448.sail_in1k", False),
    ],
)
def test_pictures_are_those_of_timms_transform_or_a_note_says_how_they_differ(
    name, is_equal, capsys
):
    from timm.data import create_transform, resolve_data_config

    config = hub.hub_config(name)
    ours = hub.hub_preprocessing(name, config)
    assert is_equal is not (f"{name}: timm evaluates it with" in capsys.readouterr().err)
    transform = create_transform(**resolve_data_config(pretrained_cfg=config.to_dict()))
    picture = Image.fromarray(np.random.default_rng(0).integers(256, size=(60, 91, 3), dtype="u1"))
    pixels = torch.from_numpy(test_view(picture, ours)[None])
    assert torch.allclose(to_input(pixels, ours)[0], transform(picture), atol=1e-5) is is_equal


def test_names_without_released_weights_say_so():
    with pytest.raises(
        ValueError, match="no released weights for resnet_rs_400: train it, or choose from"
    ):
        zoo.load("resnet_rs_400")
    with pytest.raises(
        ValueError,
        match="timm knows no released weights 'tresnet_m.wrong': choose from tresnet_m.miil",
    ):
        zoo.load("tresnet_m.wrong")


def test_a_folder_of_many_trainings_says_which_folder_to_give(tmp_path):
    (tmp_path / "trials").mkdir()
    with pytest.raises(ValueError, match="has many trainings: give one of them, .*trials/NAME"):
        zoo.load(tmp_path)


def test_every_name_with_released_weights_is_one_that_timm_has():
    import timm

    for name, model in hub.HUB.items():
        assert zoo.spec(name)
        assert model in timm.list_pretrained()
