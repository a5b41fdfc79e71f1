"""Ways of training: the same numbers from each, the fastest one found once, and a run that keeps to its own."""

import json
from dataclasses import replace

import pytest
import torch

from fullstride.data.loader import Batches, TrainView
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify
from fullstride.train import autotune, run, run_folder
from fullstride.train.loop import train_epochs
from fullstride.train.recipes import DIGITS

GRAY = Preprocessing(resolution=16, mean=(0.0,), std=(1.0,), crop=1.0)
SHORT = replace(DIGITS, epochs=2, warmup_epochs=0, lr=0.05, resolution=16, batch=16)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fullstride" / "efficiency.json"


@pytest.fixture
def rates(monkeypatch):
    """Measured rates in the place of a clock; every measurement is written down."""
    asked = []

    def rate(recipe, *_):
        asked.append(recipe.efficiency)
        return {"plain": 100.0, "lean": 150.0}[recipe.efficiency]

    monkeypatch.setattr(autotune, "rate", rate)
    return asked


@pytest.mark.parametrize("name", ["tresnet_tiny", "resnet_rs_tiny", "genet_tiny"])
def test_a_lean_network_learns_as_the_plain_one_does(name, few_digits):
    losses = []
    for way in ("plain", "lean"):
        torch.manual_seed(0)
        net = zoo.create(name, in_channels=1)
        net.regularise(drop_path=0.2, dropout=0.2)
        batches = Batches(few_digits.train, TrainView(GRAY), batch=16, shuffle=True)
        epochs = train_epochs(
            net, Classify(), batches, replace(SHORT, epochs=1, lr=1e-4, efficiency=way)
        )
        losses.append([epoch.loss for epoch in epochs])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_lean_run_stopped_within_an_epoch_goes_on_to_the_same_weights(
    few_digits, tmp_path, monkeypatch
):
    recipe = replace(SHORT, efficiency="lean", drop_path=0.2)
    list(run.train(tmp_path / "whole", "tresnet_tiny", few_digits, recipe))
    save, saved = run_folder.save_checkpoint, []

    def stop_at_the_third(folder, state):
        save(folder, state)
        saved.append(state["saves"])
        if len(saved) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "save_checkpoint", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        list(
            run.train(
                tmp_path / "stopped", "tresnet_tiny", few_digits, recipe, checkpoint_every_steps=1
            )
        )
    monkeypatch.setattr(run_folder, "save_checkpoint", save)
    assert {"output", "input"} <= set(saved[0])
    list(
        run.train(
            tmp_path / "stopped", "tresnet_tiny", few_digits, recipe, checkpoint_every_steps=1
        )
    )
    ours, theirs = (
        Bundle.load(tmp_path / name / run_folder.BUNDLE).net.state_dict()
        for name in ("stopped", "whole")
    )
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_the_fastest_way_is_found_once_and_remembered_until_something_is_another(rates, cache):
    net = zoo.create("genet_tiny", in_channels=1)
    auto = replace(SHORT, efficiency="auto")
    for _ in range(2):
        assert autotune.choose_efficiency(auto, net, GRAY, "cpu") == replace(
            auto, efficiency="lean"
        )
    assert rates == ["plain", "lean"]
    (kept,) = json.loads(cache.read_text()).values()
    assert kept["images_per_s"] == {"plain": 100.0, "lean": 150.0}
    assert kept["environment"]["torch"] == torch.__version__
    autotune.choose_efficiency(replace(auto, batch=8), net, GRAY, "cpu")
    assert rates == ["plain", "lean"] * 2
    cache.write_text("nonsense")
    autotune.choose_efficiency(auto, net, GRAY, "cpu")
    assert rates == ["plain", "lean"] * 3


def test_a_way_whose_batch_does_not_fit_is_left_out(monkeypatch, cache):
    def rate(recipe, *_):
        if recipe.efficiency == "plain":
            raise MemoryError
        return 1.0

    monkeypatch.setattr(autotune, "rate", rate)
    net = zoo.create("genet_tiny", in_channels=1)
    assert (
        autotune.choose_efficiency(replace(SHORT, efficiency="auto"), net, GRAY, "cpu").efficiency
        == "lean"
    )


def test_a_network_of_timm_has_no_lean_form():
    timm = zoo.create("timm/test_resnet", in_channels=1)
    with pytest.raises(
        ValueError, match="has no fused form: set recipe.efficiency to plain or compiled"
    ):
        list(train_epochs(timm, Classify(), [None], replace(SHORT, efficiency="lean")))


def test_a_rate_is_of_real_steps_which_leave_the_network_as_it_was(cache):
    net = zoo.create("genet_tiny", in_channels=1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert autotune.rate(replace(SHORT, efficiency="lean"), net, GRAY, torch.device("cpu"), 8) > 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not net.is_fused


def test_a_run_goes_on_in_the_way_that_it_began(few_digits, tmp_path, rates, cache):
    auto = replace(SHORT, efficiency="auto")
    started = run.train(tmp_path / "run", "genet_tiny", few_digits, auto)
    next(started)
    started.close()
    assert (
        json.loads((tmp_path / "run" / run_folder.RUN_CONFIG).read_text())["efficiency"] == "lean"
    )
    cache.unlink()
    rates.clear()
    assert len(list(run.train(tmp_path / "run", "genet_tiny", few_digits, auto))) == 2
    assert rates == []
