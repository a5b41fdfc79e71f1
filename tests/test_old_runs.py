"""Runs and a bundle that version 0.1 wrote: they resume, load, and reach the same weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fullstride.data.dataset import open_data
from fullstride.measure.environment import Environment
from fullstride.nets import families
from fullstride.nets.bundle import Bundle
from fullstride.nets.spec import NetSpec
from fullstride.tasks import find_task
from fullstride.train import run, run_folder
from fullstride.train.recipes.named import RECIPES
from fullstride.train.recipes.reading import saved_recipe
from fullstride.train.run_data import matching_data
from fullstride.train.scoring import score_images

OLD = Path(__file__).parent / "old_runs"
RUNS = (
    "sgd",
    "mixed",
    pytest.param("rmsprop", marks=pytest.mark.fused),  # with padded channels
    pytest.param("lean", marks=pytest.mark.fused),
)
# In the others, libraries or the pivot of fused statistics round the last bit differently.
SAME_ARITHMETIC = {"sgd"}


@pytest.fixture(params=RUNS)
def old_run(request, tmp_path, monkeypatch):
    """A copy of a run that was stopped after two of three epochs, and what its version reached."""
    folder = tmp_path / request.param
    shutil.copytree(OLD / request.param, folder)
    expected = folder / "expected"
    config = json.loads((folder / run_folder.RUN_CONFIG).read_text())
    spec = NetSpec.from_json(json.dumps(config["spec"]), "old_tiny")
    monkeypatch.setitem(families.SPECS, "old_tiny", spec)
    reached = json.loads((expected / "expected.json").read_text())
    weights = load_file(expected / "weights.safetensors")
    shutil.rmtree(expected)
    return folder, saved_recipe(config, str(folder)), weights, reached


def is_same_machine(reached) -> bool:
    here = torch.__version__, torch.backends.cpu.get_cpu_capability()
    is_intel = "Intel" in str(Environment.here().device)  # as where the runs were made
    return is_intel and here == (reached["torch"], reached["cpu"])


def comparable(rows):
    """The numbers of log rows that do not depend on the time."""
    names = ("epoch", "loss", "minival/top1", "minival/loss")
    rows = [{key.replace("minival_", "minival/"): row[key] for key in row} for row in rows]
    return [[row[name] for name in names] for row in rows]


def test_an_old_run_resumes_to_the_weights_and_the_log_of_its_own_version(old_run, few_digits):
    folder, recipe, expected, reached = old_run
    rows = list(run.train(folder, "old_tiny", few_digits, recipe))
    weights = load_file(folder / run_folder.BUNDLE / "weights.safetensors")
    assert weights.keys() == expected.keys()
    same_machine = is_same_machine(reached)
    if same_machine and folder.name in SAME_ARITHMETIC:
        assert comparable(rows) == comparable(reached["rows"])
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
    else:
        assert comparable(rows)[:2] == comparable(reached["rows"])[:2]
        assert comparable(rows)[2] == pytest.approx(comparable(reached["rows"])[2], rel=1e-3)
        for name, value in weights.items():
            difference = (value - expected[name]).double().norm()
            limit = 1e-5 if same_machine else 1e-3
            assert difference <= limit * expected[name].double().norm(), name


def test_an_old_run_is_not_resumed_with_another_recipe(old_run, few_digits):
    folder, recipe, *_ = old_run
    other = json.loads((folder / run_folder.RUN_CONFIG).read_text())
    other["recipe"]["turn"] = 45.0
    other = saved_recipe(other, "the same with another rotation")
    with pytest.raises(ValueError, match=r"rotation_degrees is [\d.]+ there and 45.0 now"):
        next(run.train(folder, "old_tiny", few_digits, other))


def test_a_run_keeps_the_splits_that_it_began_with(tmp_path):
    for number in range(32):
        path = tmp_path / "data" / "abcd"[number % 4] / f"{number // 4}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (number, 0, 0)).save(path)
    where, folder = str(tmp_path / "data"), tmp_path / "run"
    recipe = replace(RECIPES["digits"], epochs=1, batch=8, resolution=32)
    old, new = open_data(where, splits=1), open_data(where)
    (row,) = run.train(folder, "genet_tiny", old, recipe)
    config = json.loads((folder / run_folder.RUN_CONFIG).read_text())
    assert config.pop("splits") == 1
    (folder / run_folder.RUN_CONFIG).write_text(json.dumps(config))  # as before it had the field
    with pytest.raises(ValueError, match="splits is 1 there and 3 now"):
        next(run.train(folder, "genet_tiny", new, recipe))
    same = open_data(where, splits=run_folder.saved_splits(folder))
    assert list(run.train(folder, "genet_tiny", same, recipe)) == [row]
    bundle = Bundle.load(folder / run_folder.BUNDLE)
    for data in ("", where):
        assert (
            matching_data(str(folder), bundle, data).fingerprint
            == old.fingerprint
            != new.fingerprint
        )


def test_an_old_bundle_is_loaded_scored_and_saved_as_it_was(few_digits, tmp_path):
    bundle = Bundle.load(OLD / "bundle")
    scores, skipped, *_ = score_images(
        bundle.net, find_task(bundle.task), few_digits.test, bundle.preprocessing, "cpu"
    )
    recorded = bundle.scores["test"]
    assert (scores["top1"], scores["images"], skipped) == (recorded["top1"], 20, {})
    assert scores["loss"] == pytest.approx(recorded["loss"], rel=1e-5)
    bundle.save(tmp_path / "again")
    again = Bundle.load(tmp_path / "again")
    assert again.net.spec == bundle.net.spec
    weights, saved = bundle.net.state_dict(), again.net.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in weights.items())
