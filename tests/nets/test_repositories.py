"""Bundles are downloaded from the hub; nothing else of a repository is."""

import json
import shutil
from pathlib import Path

import pytest
from bundles import COLOUR, make_bundle
from generators import drain
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RevisionNotFoundError,
)
from local_hub import LocalHub, refusal
from toy_bundles import bundle_of

from fullstride import cli, tasks
from fullstride.autofit.candidates import Pictures, list_candidates
from fullstride.nets import zoo
from fullstride.nets.bundle import METADATA, WEIGHTS
from fullstride.nets.weights import hub as repositories

PLACE = "huggingface.co/ann/digits"


@pytest.fixture
def hub(monkeypatch, tmp_path) -> LocalHub:
    return LocalHub(monkeypatch, tmp_path)


@pytest.fixture
def pushed(hub) -> Path:
    """The repository ann/digits with a bundle, and with other files."""
    folder = hub.root / "ann" / "digits"
    make_bundle("genet_tiny", COLOUR).save(folder)
    (folder / "README.md").write_text("# digits")
    (folder / "code.py").write_text("raise SystemExit")
    return folder


def refused(name: str = "hf:ann/digits") -> str:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as raised:
        zoo.load(name)
    return str(raised.value)


def test_a_bundle_on_the_hub_is_the_bundle_that_was_saved(hub, pushed):
    loaded, saved = zoo.load("hf:ann/digits"), zoo.load(pushed)
    assert loaded.classes == saved.classes
    assert loaded.preprocessing == saved.preprocessing
    state = saved.net.state_dict()
    assert all(value.equal(state[name]) for name, value in loaded.net.state_dict().items())


@pytest.mark.parametrize(("at", "revision"), [("", ""), ("@v1.0", " v1.0")])
def test_only_the_files_of_a_bundle_are_downloaded(hub, pushed, at, revision):
    zoo.load(f"hf:ann/digits{at}")
    files = ("listing", METADATA, WEIGHTS)
    assert hub.requests == [f"{each} of ann/digits{revision}" for each in files]


def test_files_of_two_commits_are_not_taken_for_a_bundle(hub, pushed, monkeypatch):
    def download(repository, file, *, revision):
        hub.commits.append("of someone else")
        return hub.hf_hub_download(repository, file, revision=revision)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert refused() == f"{PLACE} has changed while it was downloaded: try again"


@pytest.mark.parametrize(
    "command",
    [
        "predict",
        "validate",
        "bench",
        "measure cost",
        "measure estimate",
        "study rank",
        pytest.param("export", marks=pytest.mark.slow),
    ],
)
def test_every_command_takes_a_bundle_on_the_hub(hub, pushed, tmp_path, capsys, command):
    words = {
        "predict": [str(Path(__file__).parents[2] / "docs" / "choice.png")],
        "validate": ["--data", "digits"],
        "bench": ["--reference", "none", "--rounds", "2", "--protocol", "online"],
        "measure cost": [],
        "study rank": [],
        "measure estimate": ["--target", "t4-fp16"],
        "export": ["--out", str(tmp_path / "digits.onnx"), "--data", "digits"],
    }
    assert cli.run([*command.split(), "hf:ann/digits", *words[command]]) == 0
    assert capsys.readouterr().out


@pytest.mark.slow
def test_training_begins_with_a_bundle_on_the_hub_and_repeats_its_recipe(hub, tmp_path, capsys):
    first, later = tmp_path / "first", tmp_path / "later"
    words = ["train", "digits", "--model", "genet_tiny", "--device", "cpu", "--workers", "0"]
    assert cli.run([*words, "--recipe.steps", "2", "--out", str(first)]) == 0
    shutil.copytree(first / "bundle", hub.root / "ann" / "digits")
    others = ["--weights", "hf:ann/digits", "--recipe", "hf:ann/digits", "--out", str(later)]
    assert cli.run([*words, *others]) == 0
    one, other = (json.loads((each / "run.json").read_text()) for each in (first, later))
    assert other["weights"] == "hf:ann/digits"
    assert other["recipe"] == one["recipe"]
    assert zoo.load(later).source == "trained on digits, beginning with first (trained on digits)"


def test_a_head_of_a_task_is_built(hub):
    bundle_of("segment").save(hub.root / "ann" / "digits")
    assert tasks.load("hf:ann/digits").task == "segment"
    assert tasks.find_network("hf:ann/digits").head is not None
    with pytest.raises(ValueError, match="--classes 3 is for names of networks"):
        tasks.find_network("hf:ann/digits", classes=3)


def test_a_fit_begins_with_the_commit_that_is_the_latest_when_it_begins(hub, pushed):
    pictures = Pictures(classes=4, channels=3, side=32)
    listing = list_candidates(pictures, weights="hf:ann/digits", licence="any")
    lines, candidates = drain(listing)
    assert lines[-1].startswith("fine-tuning: weights in hf:ann/digits, networks: 1")
    assert {(each.model, each.weights) for each in candidates} == {
        ("genet_tiny", "hf:ann/digits@commit0")
    }
    (pushed / METADATA).write_text("{")
    with pytest.raises(
        ValueError, match=r"^no weights of .* in hf:ann/digits .hf:ann/digits/[^\n]+\Z"
    ):
        drain(list_candidates(pictures, weights="hf:ann/digits"))


@pytest.mark.slow
def test_a_fit_trains_from_a_bundle_on_the_hub(hub, pushed, tmp_path, capsys):
    words = ["digits", "--weights", "hf:ann/digits", "--licence", "any", "--budget-ms", "1000"]
    words += ["--resolutions", "16", "--formats", "onnx", "--precisions", "fp32", "--epochs", "1"]
    out = tmp_path / "fit"
    assert cli.run(["fit", *words, "--device", "cpu", "--out", str(out)]) == 0
    assert "digits-16 as onnx fp32: test top-1" in capsys.readouterr().out
    (run,) = out.glob("trials/*/run.json")
    assert json.loads(run.read_text())["weights"] == "hf:ann/digits@commit0"


def test_without_a_network_the_copy_in_the_cache_is_used_and_that_is_said(
    hub, pushed, monkeypatch, capsys
):
    zoo.load("hf:ann/digits")
    monkeypatch.setattr(repositories, "is_offline", lambda: True)
    assert zoo.load("hf:ann/digits").classes
    assert "hf:ann/digits: the hub cannot be reached" in capsys.readouterr().err
    shutil.rmtree(hub.cache)
    assert refused() == (
        f"{PLACE} cannot be reached (no network): connect to the network, or give a local path"
    )


def test_the_hub_is_not_asked_where_the_environment_forbids_it(hub, pushed, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    assert f"{PLACE} cannot be reached (HF_HUB_OFFLINE is set)" in refused()
    assert hub.requests == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (refusal(GatedRepoError, 403), f"{PLACE} is gated: ask for access on its page"),
        (refusal(RevisionNotFoundError, 404), f"{PLACE} has no such revision"),
        (
            refusal(HfHubHTTPError, 503, "down\nfor a while"),
            f"{PLACE}: the hub answered 503 \\(down for a while\\)",
        ),
        (
            refusal(HfHubHTTPError, 500),
            f"{PLACE}: the hub answered 500 \\(Internal Server Error\\)",
        ),
        (ConnectionResetError("reset"), f"{PLACE} cannot be reached \\(reset\\)"),
        (RuntimeError(), f"{PLACE} cannot be reached \\(RuntimeError\\)"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub, pushed, error, said):
    hub.error = error
    with pytest.raises(ValueError, match=f"^{said}"):
        zoo.load("hf:ann/digits")


def test_errors_of_the_local_disk_are_not_taken_for_those_of_the_network(hub, pushed, monkeypatch):
    def full(*_, **__):
        raise PermissionError(13, "Permission denied", "cache/models")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with pytest.raises(PermissionError, match="cache/models"):
        zoo.load("hf:ann/digits")


def test_a_repository_that_does_not_exist_is_one_line(hub):
    assert refused() == (
        f"there is no {PLACE}, or it is private: look at the name, or run `hf auth login`"
    )


@pytest.mark.parametrize("name", ["hf:", "hf:digits", "hf:a/b/c", "hf:../b", "hf:a/b@", "hf:a/b c"])
def test_names_of_no_repository_are_not_asked_of_the_hub(hub, name):
    assert "use hf:USER/NAME or hf:USER/NAME@REVISION" in refused(name)
    assert hub.requests == []


def test_a_repository_of_another_library_is_named_with_its_files(hub):
    folder = hub.root / "timm" / "resnet18"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    hub.library = "timm"
    assert refused("hf:timm/resnet18") == (
        "huggingface.co/timm/resnet18 has no bundle.json and no weights.safetensors: it is a "
        "repository of timm with config.json; give timm/resnet18, without hf:"
    )
    (folder / "config.json").rename(folder / "pytorch_model.bin")
    hub.library = None
    assert (
        "it is a repository with pytorch_model.bin; give one that `export --push` wrote"
        in refused("hf:timm/resnet18")
    )


def test_a_bundle_without_weights_is_not_downloaded(hub, pushed):
    (pushed / WEIGHTS).unlink()
    assert "has no weights.safetensors: it is a repository with README.md, " in refused()
    assert len(hub.requests) == 1


def test_files_above_their_limits_are_not_downloaded(hub, pushed, monkeypatch):
    monkeypatch.setitem(zoo.FILE_LIMITS, WEIGHTS, 1000)
    assert "bytes, 1,000 are allowed" in refused()
    assert len(hub.requests) == 1


@pytest.mark.parametrize("file", [METADATA, WEIGHTS])
def test_damaged_files_are_named_as_those_of_the_repository(hub, pushed, file):
    whole = (pushed / file).read_bytes()
    (pushed / file).write_bytes(whole[: len(whole) // 2])
    message = refused()
    assert message.startswith("hf:ann/digits")
    assert str(hub.cache) not in message


def test_a_bundle_is_refused_where_the_name_of_a_network_belongs(hub):
    with pytest.raises(ValueError, match="hf:ann/digits is a bundle: give the name of a network"):
        zoo.create("hf:ann/digits")
