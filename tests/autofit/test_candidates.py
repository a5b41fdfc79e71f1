"""Which networks could it be: with released weights, with those of a folder, or with neither."""

import json
import os
import shutil
import struct
from dataclasses import fields, replace
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

from fullstride import zoo
from fullstride.autofit.candidates import Candidate, Pictures, fits_of, list_candidates
from fullstride.autofit.released_weights import examine
from fullstride.io.records import from_json, to_json
from fullstride.nets.bundle import Bundle
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.timm_wrapper import pretrained_config
from fullstride.nets.weights import hub
from fullstride.nets.weights.reader import read, read_shapes
from fullstride.tables import PERMISSIVE, pretrained_networks
from fullstride.tasks import find_task
from fullstride.train.prepare import initial_network, initial_weights
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.run import train

PHOTOS = dict(classes=10, channels=3, side=300)
OF_PICTURES = {each.name for each in fields(Pictures)}
TIMM = "mobilenetv3_small_050"  # the smallest one


def listing(**changes) -> tuple[tuple[Candidate, ...], list[str]]:
    """The candidates, and the lines on the way to them."""
    pictures = {name: changes.pop(name) for name in OF_PICTURES & changes.keys()}
    lines, steps = [], list_candidates(Pictures(**{**PHOTOS, **pictures}), **changes)
    while True:
        try:
            lines.append(next(steps))
        except StopIteration as end:
            return end.value, lines


@pytest.fixture
def reachable(monkeypatch):
    monkeypatch.setattr(hub, "is_reachable", lambda: True)


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """No hub, and an empty cache at the path."""
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


# ---- released weights


@pytest.mark.usefixtures("reachable")
def test_released_weights_are_permissive_of_many_families_and_each_at_two_or_three_sizes():
    candidates, lines = listing()
    assert len({each.name for each in candidates}) == len(candidates) > 300
    assert {each.licence for each in candidates} <= {*PERMISSIVE}
    assert {"tresnet", "genet", "resnet_rs", "hgnet", "convnext"} <= {c.family for c in candidates}
    sizes = {}
    for each in candidates:
        sizes.setdefault((each.model, each.weights), set()).add(each.resolution)
    assert sizes["timm/hgnetv2_b2.ssld_stage1_in22k_in1k", "hub"] == {192, 224, 288}
    assert all(1 <= len(each) <= 3 and max(each) <= 384 for each in sizes.values())
    assert any("cc-by-nc-4.0" in line and "--licence any" in line for line in lines)
    assert any(str(len(sizes)) in line and "fine-tuning" in line for line in lines)


@pytest.mark.usefixtures("reachable")
def test_any_licence_adds_what_the_filter_leaves_out():
    free, everything = (
        {c.model for c in listing(licence=kind)[0]} for kind in ("permissive", "any")
    )
    assert free < everything
    others = {row.weights for row in pretrained_networks() if not row.is_permissive}
    assert everything - free <= others


@pytest.mark.usefixtures("reachable")
@pytest.mark.parametrize(
    ("side", "least", "most"), [(28, 96, 128), (150, 96, 192), (1000, 128, 576)]
)
def test_pictures_are_not_enlarged_far_above_their_size(side, least, most):
    sizes = {each.resolution for each in listing(side=side)[0]}
    assert min(sizes) >= least
    assert max(sizes) <= most


@pytest.mark.usefixtures("reachable")
def test_both_resize_policies_are_candidates_where_pictures_are_not_square():
    names = {each.name for each in listing(fits=fits_of(1.5))[0]}
    assert len(names) == 2 * len(listing(fits=fits_of(1.1))[0])
    assert {"tresnet_m-224", "tresnet_m-224-squish"} <= names


@pytest.mark.usefixtures("reachable")
def test_top1_is_that_of_the_nearest_resolution_it_was_measured_at():
    row = {(row.weights, row.resolution): row.top1 for row in pretrained_networks()}
    name = "timm/convnext_tiny.in12k_ft_in1k"
    candidates = {c.resolution: c for c in listing()[0] if c.model == name}
    assert candidates[192].top1 == row[name, 224]
    assert candidates[288].top1 == row[name, 288]
    assert candidates[192].top1_resolution == 224


def test_without_the_hub_the_weights_of_its_cache_are_candidates(unreachable):
    folder = unreachable / "models--timm--resnet18.a1_in1k"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "model.safetensors").write_bytes(b"")
    candidates, lines = listing()
    assert {(each.model, each.weights) for each in candidates} == {("resnet18", "hub")}
    assert "not reachable" in lines[-1]


def test_without_hub_and_cache_candidates_of_three_families_begin_with_random_weights(unreachable):
    candidates, lines = listing()
    assert {each.family for each in candidates} == {"genet", "resnet_rs", "tresnet"}
    assert {each.weights for each in candidates} == {""}
    assert len(lines) == 1
    assert "from scratch" in lines[0]
    assert candidates == listing(weights="")[0]


@pytest.mark.usefixtures("reachable")
def test_grey_pictures_begin_with_random_weights_unless_a_folder_of_weights_is_named():
    candidates, lines = listing(channels=1)
    assert {(each.weights, each.channels) for each in candidates} == {("", None)}
    assert "--weights FOLDER" in lines[0]


@pytest.mark.usefixtures("reachable")
def test_names_are_taken_with_their_weights_if_there_are_any():
    names = ("tresnet_m", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", "genet_tiny")
    candidates, lines = listing(names=names)
    weights = {(each.model, each.weights) for each in candidates}
    assert weights == {("tresnet_m", "hub"), (names[1], "hub"), ("genet_tiny", "")}
    assert {c.resolution for c in candidates if c.model == names[1]} == {224}  # takes no other
    assert "genet_tiny" in lines[-1]
    tagged, _ = listing(names=("timm/resnet26d.bt_in1k", "tresnet_m.miil_in1k"), weights="hub")
    assert {each.family for each in tagged} == {"resnet", "tresnet"}


@pytest.mark.usefixtures("reachable")
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (dict(names=("timm/convnext_tinny",)), "timm/convnext_tiny"),
        (dict(names=("tresnet_n",)), "tresnet_m"),
        (dict(names=("timm/convnextv2_tiny",)), "--licence any"),
        (dict(weights="no/such/folder"), "no/such/folder"),
    ],
)
def test_what_leaves_no_candidates_is_one_line(changes, word):
    with pytest.raises(ValueError, match=word) as error:
        listing(**changes)
    assert "\n" not in str(error.value)


# ---- random weights


@pytest.mark.parametrize("side", [8, 28, 32, 64, 96, 300, 2000])
def test_networks_without_weights_fit_the_size_of_the_pictures(side):
    candidates, _ = listing(weights="", side=side, channels=1)
    assert max(each.resolution for each in candidates) <= max(2 * side + 8, 32)
    assert max(each.resolution for each in candidates) <= 288
    assert len({each.name for each in candidates}) == len(candidates) >= 50
    params = {each.params for each in candidates}
    assert max(params) > 20 * min(params)


@pytest.mark.parametrize("number", [0, 40, 89])
def test_parameters_are_those_of_the_network_that_is_trained(number):
    each = listing(weights="", side=28, channels=1)[0][number]
    net = zoo.create(each.model, classes=10, in_channels=1, width=each.width, depth=each.depth)
    assert each.params == sum(parameter.numel() for parameter in net.parameters())


def test_a_candidate_is_the_same_after_it_was_written_and_read():
    each = listing(weights="", side=28)[0][-1]
    assert from_json(Candidate, to_json(each), "candidates.json") == each
    assert each.name == "tresnet_tiny-w3-d2-64"


def test_resolutions_may_be_chosen():
    assert {each.resolution for each in listing(weights="", sides=(64, 48))[0]} == {48, 64}


# ---- files of specs


def test_the_json_file_of_a_spec_stands_for_a_network_and_trains(tmp_path, few_digits):
    spec = replace(zoo.spec("genet_tiny"), resolution=16, source="ours").scaled(width=0.5)
    path = tmp_path / "small.json"
    path.write_text(spec.to_json())
    assert zoo.spec(str(path)) == spec
    (candidate,), _ = listing(weights="", names=(str(path),), channels=1)
    assert (candidate.name, candidate.family) == ("small-16", "genet")
    recipe = Recipe(lr=0.01, epochs=1, batch_size=16, warmup_epochs=0)
    (row,) = train(tmp_path / "run", candidate.model, few_digits, recipe)
    assert row["epochs"] == 1
    bundle = Bundle.load(tmp_path / "run" / "bundle")
    assert bundle.net.spec == replace(spec, in_channels=1)
    again = zoo.spec(str(tmp_path / "run" / "bundle" / "bundle.json"))
    assert again == bundle.net.spec


def test_a_spec_of_timm_may_stand_in_a_json_file_too(tmp_path):
    path = tmp_path / "mobile.json"
    path.write_text(zoo.spec(f"timm/{TIMM}").to_json())
    assert zoo.spec(str(path)) == zoo.spec(f"timm/{TIMM}")


@pytest.mark.parametrize(
    ("text", "word"),
    [("{", "whole JSON"), ("[]", "use an object"), ('{"spec": {}}', "lacks"), (None, "no x.json")],
)
def test_a_json_file_that_is_no_spec_is_one_line(tmp_path, text, word):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=word) as error:
        zoo.create(str(path))
    assert "\n" not in str(error.value)


# ---- a folder of weights


def bundle_of(net: Network, classes: int) -> Bundle:
    pre = Preprocessing(resolution=net.spec.resolution)
    return Bundle(
        net, name="tiny", classes=tuple(map(str, range(classes))), preprocessing=pre, licence="mit"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    state = timm.create_model(TIMM, num_classes=5).state_dict()
    safetensors.torch.save_file(state, root / f"{TIMM}.lamb_in1k.safetensors")
    (root / TIMM).mkdir()
    torch.save({"state_dict": state}, root / TIMM / "pytorch_model.bin")
    spec = replace(zoo.spec("genet_tiny"), classes=7, in_channels=3)
    torch.save(Network(spec).state_dict(), root / "checkpoint.pth")
    bundle_of(Network(spec), 7).save(root / "own")
    bundle_of(Network(spec.scaled(width=2.0)), 7).save(root / "wide" / "bundle")
    (root / "readme.txt").write_text("no weights")
    (root / "broken.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    torch.save({"other.weight": torch.ones(3)}, root / "other.pt")
    return root


def test_files_bundles_and_cached_repositories_of_a_folder_are_candidates(folder):
    candidates, lines = listing(weights=str(folder), licence="any")
    models = {each.name.rpartition("-")[0]: each for each in candidates}
    assert {name: each.model for name, each in models.items()} == {
        f"{TIMM}.lamb_in1k": f"timm/{TIMM}.lamb_in1k",
        TIMM: f"timm/{TIMM}",
        "checkpoint": "genet_tiny",
        "own": "genet_tiny",
        "wide": str(folder / "wide" / "bundle" / "bundle.json"),
    }
    assert (models["own"].licence, models[f"{TIMM}.lamb_in1k"].licence) == ("mit", "apache-2.0")
    assert models[f"{TIMM}.lamb_in1k"].top1 == pytest.approx(57.9, abs=0.1)
    assert sum("left out" in line for line in lines) == 2
    assert "networks: 5, families: 2 (genet, mobilenetv3)" in lines[-1]
    assert "2 without a known licence" in lines[-1]


def test_weights_of_unknown_licence_are_left_out_unless_any_licence_will_do(folder, tmp_path):
    candidates, lines = listing(weights=str(folder))
    assert {each.licence for each in candidates} == {"mit", "apache-2.0"}
    (line,) = (line for line in lines if "--licence any" in line)
    assert "weights under an unknown licence: 2" in line
    shutil.copy(folder / "checkpoint.pth", tmp_path)
    with pytest.raises(ValueError, match="under an unknown licence.*: use --licence any"):
        listing(weights=str(tmp_path))


@pytest.mark.usefixtures("reachable")
def test_a_name_whose_weights_have_no_stated_licence_is_refused():
    name = next(
        name for name in timm.list_pretrained("*") if pretrained_config(name).license is None
    )
    with pytest.raises(ValueError, match="under an unknown licence.*: use --licence any"):
        listing(names=(f"timm/{name}",))
    assert listing(names=(f"timm/{name}",), licence="any")[0]


def test_a_run_has_the_licence_of_its_initial_weights_or_is_the_users_own(
    folder, tmp_path, few_digits
):
    recipe = Recipe(lr=0.01, epochs=1, batch_size=16, resolution=16)
    weights = {"own": "", "mit": str(folder / "own"), "": str(folder / "checkpoint.pth")}
    for licence, start in weights.items():
        run = tmp_path / (licence or "unknown")
        list(train(run, "genet_tiny", few_digits, recipe, RunOptions(weights=start)))
        assert Bundle.load(run / "bundle").licence == licence.replace("own", "")
    assert {start.licence for start in examine(tmp_path)} == {*weights}
    candidates, lines = listing(weights=str(tmp_path), channels=1)
    assert {each.licence for each in candidates} == {"mit", "own"}
    assert "weights under an unknown licence: 1" in lines[0]


@pytest.mark.parametrize("channels", [1, 3])
def test_training_begins_with_the_weights_of_every_candidate(folder, few_digits, channels):
    data = replace(few_digits, channels=channels)
    task = find_task().for_data(data)
    candidates, _ = listing(weights=str(folder), channels=channels, licence="any")
    assert {each.channels for each in candidates} == {3}
    for each in {each.model + each.weights: each for each in candidates}.values():
        recipe = Recipe(lr=0.01, epochs=1, batch_size=16, resolution=each.resolution)
        start = initial_weights(each.model, each.weights)
        assert start is not None
        net, pre = initial_network(each.model, task, data, recipe, start)
        assert pre.resolution == each.resolution
        first, theirs = (next(net.parameters()) for net in (net, start.net))
        assert torch.equal(first, theirs)
        assert each.params == sum(parameter.numel() for parameter in net.parameters())


def test_files_of_other_networks_and_without_weights_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="no weights of a known network"):
        listing(weights=str(tmp_path))
    state = {"_conv_stem.weight": torch.zeros(32, 3, 3, 3)}
    torch.save(state, tmp_path / "efficientnet-lite0-57934424.pth")
    with pytest.raises(ValueError, match="NAME.TAG, such as tf_efficientnet_lite0.in1k"):
        listing(weights=str(tmp_path))
    (tmp_path / "efficientnet-lite0-57934424.pth").rename(tmp_path / "tf_efficientnet_lite0.pth")
    with pytest.raises(ValueError, match=r"lite0: _conv_stem\.weight is no tensor of it"):
        listing(weights=str(tmp_path))
    spec = replace(zoo.spec("genet_tiny"), classes=7, in_channels=1)
    grey = Bundle(
        Network(spec),
        name="grey",
        classes=tuple("abcdefg"),
        preprocessing=Preprocessing(mean=(0.0,), std=(1.0,)),
    )
    grey.save(tmp_path / "grey")
    with pytest.raises(ValueError, match="takes gray pictures, and these are RGB"):
        listing(weights=str(tmp_path))
    (only,), _ = listing(weights=str(folder), names=(f"timm/{TIMM}.lamb_in1k",), sides=(64,))
    assert only.weights.endswith(".safetensors")


def test_two_files_of_one_name_are_one_line(tmp_path):
    state = zoo.create("genet_tiny", in_channels=3).state_dict()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        torch.save(state, tmp_path / name / "last.pth")
    with pytest.raises(ValueError, match="several candidates are named last-"):
        listing(weights=str(tmp_path), licence="any")


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "npz"])
def test_names_and_shapes_are_those_of_the_whole_file(tmp_path, suffix):
    state = {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2), "n": torch.tensor(3)}
    path = tmp_path / f"weights.{suffix}"
    if suffix == "safetensors":
        safetensors.torch.save_file(state, path)
    elif suffix == "pth":
        torch.save({"model": {f"module.{name}": value for name, value in state.items()}}, path)
    else:
        import numpy as np

        np.savez(path, **{name: value.numpy() for name, value in state.items()})
    whole, shapes = read(path), read_shapes(path)
    assert {name: value.shape for name, value in shapes.items()} == {
        name: value.shape for name, value in whole.items()
    }


def test_a_file_of_16_gigabytes_is_examined_without_reading_them(tmp_path):
    count = 4 * 2**30
    header = json.dumps({"a.weight": dict(dtype="F32", shape=[count], data_offsets=[0, 4 * count])})
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        file.truncate(8 + len(header) + 4 * count)  # a hole, which takes no space
    (line,) = examine(tmp_path)
    assert "large.safetensors" in line


def test_a_file_that_would_run_code_is_left_out_in_one_line(tmp_path):
    torch.save({"a": torch.nn.Linear(1, 1)}, tmp_path / "resnet18.pth")
    (line,) = examine(tmp_path)
    assert "run code" in line


def test_a_pipe_is_not_opened_and_folders_are_looked_through_to_the_end(tmp_path):
    os.mkfifo(tmp_path / "resnet18.pth")
    inner = tmp_path / "snapshots" / "abc"
    inner.mkdir(parents=True)
    torch.save(zoo.create("resnet_rs_tiny").state_dict(), inner / "model.bin")
    (inner / "again").symlink_to(tmp_path, target_is_directory=True)
    line, start = examine(tmp_path)
    assert "resnet18.pth" in line
    assert start.model == "resnet_rs_tiny"


def test_sizes_of_weights_for_small_pictures_are_kept():
    pictures = Pictures(classes=10, channels=3, side=8)
    assert pictures.among((24, 32, 40)) == (24, 32, 40)
    assert pictures.among((192, 224, 288)) == (96, 128)
    assert pictures.among((224,)) == (224,)
