"""A bundle goes to the hub in one commit, with a card that says what it is."""

from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from bundles import COLOUR, GRAY, make_bundle
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from local_hub import LocalHub, refusal
from toy_bundles import bundle_of

import fullstride
from fullstride import cli
from fullstride.commands.shipping import PushFlags
from fullstride.measure.bench import bench
from fullstride.measure.protocols import ONLINE
from fullstride.nets import zoo
from fullstride.report.console_tables import wilson
from fullstride.report.model_card import model_card, push_to_hub

PLACE = "huggingface.co/ann/digits"
SCORES = {"val": {"top1": 80.0, "images": 200}, "test": {"top1": 75.0, "ece": 3.0, "images": 400}}


@pytest.fixture
def hub(monkeypatch, tmp_path) -> LocalHub:
    return LocalHub(monkeypatch, tmp_path)


def header_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def names(hub: LocalHub) -> list[str]:
    folder = hub.root / "ann" / "digits"
    return [each.relative_to(folder).as_posix() for each in hub.files("ann/digits")]


def test_a_bundle_that_was_pushed_is_loaded_with_the_same_weights(hub):
    bundle = make_bundle("genet_tiny", COLOUR)
    assert fullstride.push_to_hub(bundle, "ann/digits") == f"https://{PLACE}/commit/1"
    assert hub.private == {"ann/digits": True}
    state = bundle.net.state_dict()
    loaded = zoo.load("hf:ann/digits").net.state_dict()
    assert all(value.equal(state[name]) for name, value in loaded.items())


def test_exported_files_of_an_earlier_commit_are_replaced_in_the_same_one(hub, tmp_path):
    bundle = make_bundle("genet_tiny", COLOUR)
    file, folder = tmp_path / "net.onnx", tmp_path / "net"
    file.write_bytes(b"onnx")
    folder.mkdir()
    for name in ("model.bin", "model.xml"):
        (folder / name).write_text(name)
    own = [".gitattributes", "README.md", "bundle.json"]
    push_to_hub(bundle, "ann/digits", exported=file)
    assert names(hub) == [*own, "exported/net.onnx", "weights.safetensors"]
    push_to_hub(bundle, "ann/digits", exported=folder)
    exported = ["exported/net/model.bin", "exported/net/model.xml"]
    assert names(hub) == [*own, *exported, "weights.safetensors"]
    assert len(hub.commits) == 2


def test_a_command_pushes_a_run_with_its_times(hub, tmp_path, capsys):
    make_bundle("genet_tiny", GRAY, scores=SCORES).save(tmp_path / "mine")
    assert cli.run(["export", str(tmp_path / "mine"), "--push", "ann/digits", "--public"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"hf:ann/digits: https://{PLACE}/commit/1"
    assert hub.private == {"ann/digits": False}
    card = (hub.root / "ann" / "digits" / "README.md").read_text()
    assert "| genet_tiny |" in card
    assert "online, batch 1, 32 pixels" in card


def test_a_file_that_runs_on_another_system_is_pushed_without_a_time(hub, tmp_path):
    (tmp_path / "net.mlpackage").mkdir()
    (tmp_path / "net.mlpackage" / "Manifest.json").write_text("{}")
    package: Any = SimpleNamespace(path=tmp_path / "net.mlpackage", format="coreml")
    PushFlags(push="ann/digits").commit(make_bundle("genet_tiny", GRAY), package)
    assert "exported/net.mlpackage/Manifest.json" in names(hub)
    card = (hub.root / "ann" / "digits" / "README.md").read_text()
    assert "| genet_tiny |" in card
    assert "| net.mlpackage |" not in card


@pytest.mark.slow
def test_a_command_pushes_the_file_that_it_exports(hub, tmp_path, capsys):
    make_bundle("genet_tiny", GRAY, scores=SCORES).save(tmp_path / "mine")
    words = ["--out", str(tmp_path / "net.onnx"), "--data", "digits", "--push", "ann/digits"]
    assert cli.run(["export", str(tmp_path / "mine"), *words]) == 0
    folder = hub.root / "ann" / "digits"
    exported = (folder / "exported" / "net.onnx").read_bytes()
    assert exported == (tmp_path / "net.onnx").read_bytes()
    assert "| net.onnx |" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to write: give --out FILE, --push USER/NAME, or both"),
        (["--out", "x.onnx", "--public"], "--public is for --push USER/NAME: add it"),
        (["--push", "ann"], "'ann' names no repository: use USER/NAME"),
        (
            ["--push", "ann/a", "--precision", "int8"],
            "--precision without --out, the file to write",
        ),
    ],
)
def test_flags_that_do_not_fit_are_one_line(hub, tmp_path, capsys, words, message):
    make_bundle("genet_tiny", GRAY).save(tmp_path / "mine")
    assert cli.run(["export", str(tmp_path / "mine"), *words]) == 2
    assert message in capsys.readouterr().err
    assert hub.commits == []


def test_a_repository_with_other_files_is_left_as_it_is(hub):
    folder = hub.root / "ann" / "digits"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("of someone else")
    with pytest.raises(ValueError, match=f"{PLACE} has other files, .*: model.safetensors; give"):
        push_to_hub(make_bundle("genet_tiny", COLOUR), "ann/digits")
    assert names(hub) == ["model.safetensors"]


def test_what_is_private_stays_private_and_what_is_public_is_not_pushed_to_by_accident(hub):
    bundle = make_bundle("genet_tiny", COLOUR)
    push_to_hub(bundle, "ann/digits")
    with pytest.raises(ValueError, match=f"{PLACE} is private: push without --public"):
        push_to_hub(bundle, "ann/digits", public=True)
    hub.private["ann/digits"] = False
    with pytest.raises(ValueError, match=f"{PLACE} is public: push with --public"):
        push_to_hub(bundle, "ann/digits")
    assert len(hub.commits) == 1


def test_without_a_token_nothing_is_asked_of_the_hub(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="no token .*: run `hf auth login`, or set HF_TOKEN"):
        push_to_hub(make_bundle("genet_tiny", COLOUR), "ann/digits")
    assert hub.requests == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refusal(GatedRepoError, 403), f"{PLACE} is gated"),
        (refusal(HfHubHTTPError, 401, "bad token"), f"{PLACE}: the hub answered 401 .bad token."),
        (ConnectionError("reset"), f"{PLACE} cannot be reached .reset."),
    ],
)
def test_what_the_hub_refuses_is_one_line_and_writes_nothing(hub, error, message):
    hub.error = error
    with pytest.raises(ValueError, match=f"^{message}"):
        push_to_hub(make_bundle("genet_tiny", COLOUR), "ann/digits")
    assert hub.commits == []


def test_a_refused_commit_leaves_no_half_of_a_bundle(hub, monkeypatch):
    def refuse(*_, **__):
        raise refusal(HfHubHTTPError, 412, "A commit has happened since")

    monkeypatch.setattr(hub, "create_commit", refuse)
    with pytest.raises(ValueError, match="the hub answered 412 .A commit has happened since."):
        push_to_hub(make_bundle("genet_tiny", COLOUR), "ann/digits")
    assert names(hub) == [".gitattributes"]


def test_a_token_that_may_not_create_a_repository_is_one_line(hub, monkeypatch):
    def refuse(*_, **__):
        raise refusal(RepositoryNotFoundError, 401)

    monkeypatch.setattr(hub, "create_repo", refuse)
    with pytest.raises(ValueError, match=f"there is no {PLACE}, or it is private"):
        push_to_hub(make_bundle("genet_tiny", COLOUR), "ann/digits")


def test_a_card_has_the_scores_of_the_bundle_with_their_intervals():
    about = {"scores": SCORES, "source": "trained on digits, the average of epochs 1, 2"}
    card = model_card(make_bundle("genet_tiny", COLOUR, **about), "ann/digits", [])
    low, high = wilson(75.0, 400)
    assert f"| test | 400 | top-1 75.00 % | {low:.2f} to {high:.2f} |" in card
    assert "| test | 400 | ECE 3.00 % |  |" in card
    (index,) = header_of(card)["model-index"]
    values = {
        (each["dataset"]["name"], each["dataset"]["split"], metric["type"]): metric["value"]
        for each in index["results"]
        for metric in each["metrics"]
    }
    tested = {("digits", "test", "top1"): 75.0, ("digits", "test", "ece"): 3.0}
    assert values == {("digits", "val", "top1"): 80.0, **tested}


def test_a_card_of_a_training_says_how_many_images_each_split_has(few_digits, tmp_path):
    options = fullstride.RunOptions()
    changes = dict(options=options, steps=2, resolution=16)
    bundle = fullstride.train_network(few_digits, "genet_tiny", tmp_path / "run", **changes)
    card = model_card(zoo.load(tmp_path / "run"), "ann/digits", [])
    (line,) = (each for each in card.splitlines() if each.startswith("| trained |"))
    assert f"on {len(few_digits.train)} images, " in line
    for split in ("val", "test"):
        assert f"| {split} | {bundle.scores[split]['images']} | " in card


@pytest.mark.parametrize(
    ("licence", "header"),
    [
        ("", {}),
        ("apache-2.0", {"license": "apache-2.0"}),
        ("cc-by-nc-4.0", {"license": "other", "license_name": "cc-by-nc-4.0"}),
    ],
)
def test_a_licence_is_one_that_the_hub_lists_or_another(licence, header):
    card = model_card(make_bundle("genet_tiny", COLOUR, licence=licence), "ann/digits", [])
    assert {key: value for key, value in header_of(card).items() if "license" in key} == header


@pytest.mark.parametrize(
    ("task", "pipeline"), [("detect", "object-detection"), ("depth", "depth-estimation")]
)
def test_a_card_names_the_task_as_the_hub_does(task, pipeline):
    header = header_of(model_card(bundle_of(task), "ann/digits", []))
    assert header["pipeline_tag"] == pipeline
    assert header["library_name"] == "fullstride"
    assert "model-index" not in header


def test_names_of_others_do_not_break_the_table_or_the_header():
    classes = ("a|b", "<script>", "new\nline", *"3456789")
    bundle = make_bundle("genet_tiny", COLOUR, classes=classes, scores=SCORES)
    card = model_card(bundle, "ann/digits", [])
    (line,) = (each for each in card.splitlines() if each.startswith("| classes |"))
    assert line.count("|") == 3
    assert "<script>" not in card
    assert r"new\nline" in line


def test_a_card_has_times_with_their_device_and_protocol():
    bundle = make_bundle("genet_tiny", COLOUR)
    (row,) = bench({"mine": bundle.net}, ONLINE)
    card = model_card(bundle, "ann/digits", [], [row])
    (line,) = (each for each in card.splitlines() if each.startswith("| mine |"))
    assert row.environment.device in line
    assert "online, batch 1, 224 pixels" in line
    assert f"{row.ms_p50:.3g}" in line


def test_the_lines_of_the_card_predict(hub, tmp_path, monkeypatch, capsys):
    bundle = make_bundle("genet_tiny", COLOUR)
    push_to_hub(bundle, "ann/digits")
    card = (hub.root / "ann" / "digits" / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    fullstride.open_data("digits").test.picture(0).save("photo.jpg")
    exec(card.split("```python\n")[1].split("```")[0], {})
    assert "photo.jpg" in capsys.readouterr().out
