"""Do fused and plain steps train alike, and is the fastest efficiency chosen once and kept?"""

import json
from dataclasses import replace

import pytest
import torch

from fullstride.data.loader import Batch, Batches, LoaderOptions, TrainView
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify
from fullstride.train import autotune, run, run_folder
from fullstride.train.loop import train_epochs
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import DIGITS

GRAY = Preprocessing(resolution=16, mean=(0.0,), std=(1.0,), crop=1.0)
EXAMPLE = Batch(torch.zeros(4, 1, 32, 32), torch.arange(4), torch.arange(4))
SHORT = replace(DIGITS, epochs=2, warmup_epochs=0, lr=0.05, resolution=16, batch_size=16)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fullstride" / "efficiency.json"


@pytest.fixture
def rates(monkeypatch):
    """Fixed rates instead of measured ones; the list of what was measured."""
    measured = []

    def rate(recipe, *_):
        measured.append(recipe.efficiency)
        return 150.0 if recipe.efficiency == "fused" else 100.0

    monkeypatch.setattr(autotune, "rate", rate)
    return measured


@pytest.mark.fused
@pytest.mark.parametrize("name", ["tresnet_tiny", "resnet_rs_tiny", "genet_tiny"])
def test_a_fused_network_learns_as_the_plain_one_does(name, few_digits):
    losses = []
    for way in ("plain", "fused"):
        torch.manual_seed(0)
        net = zoo.create(name, in_channels=1)
        net.regularise(drop_path=0.2, dropout=0.2)
        batches = Batches(few_digits.train, TrainView(GRAY), LoaderOptions(batch=16, shuffle=True))
        epochs = train_epochs(
            net, Classify(), batches, replace(SHORT, epochs=1, lr=1e-4, efficiency=way)
        )
        losses.append([epoch.loss for epoch in epochs])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.fused
def test_a_fused_run_stopped_within_an_epoch_continues_to_the_same_weights(
    few_digits, tmp_path, monkeypatch
):
    recipe = replace(SHORT, efficiency="fused", drop_path=0.2)
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
                tmp_path / "stopped",
                "tresnet_tiny",
                few_digits,
                recipe,
                RunOptions(checkpoint_every_steps=1),
            )
        )
    monkeypatch.setattr(run_folder, "save_checkpoint", save)
    assert {"output", "input"} <= set(saved[0])
    list(
        run.train(
            tmp_path / "stopped",
            "tresnet_tiny",
            few_digits,
            recipe,
            RunOptions(checkpoint_every_steps=1),
        )
    )
    ours, theirs = (
        Bundle.load(tmp_path / name / run_folder.BUNDLE).net.state_dict()
        for name in ("stopped", "whole")
    )
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.fused
def test_the_fastest_efficiency_is_measured_once_and_again_where_something_differs(rates, cache):
    net = zoo.create("genet_tiny", in_channels=1)
    auto = replace(SHORT, efficiency="auto")
    for _ in range(2):
        assert (
            autotune.choose_efficiency(auto, Classify(), net, EXAMPLE, "cpu").efficiency == "fused"
        )
    assert rates == ["plain", "fused"]
    (entry,) = json.loads(cache.read_text()).values()
    assert entry["images_per_s"] == {"plain": 100.0, "fused": 150.0}
    assert entry["environment"]["torch"] == torch.__version__
    autotune.choose_efficiency(replace(auto, batch_size=8), Classify(), net, EXAMPLE, "cpu")
    assert rates == ["plain", "fused"] * 2
    for content in ("nonsense", '{"key": {"fastest": "lean"}}'):
        cache.write_text(content)
        autotune.choose_efficiency(auto, Classify(), net, EXAMPLE, "cpu")
    assert rates == ["plain", "fused"] * 4


@pytest.mark.fused
@pytest.mark.parametrize(
    ("name", "device", "efficiencies"),
    [
        ("genet_tiny", "cuda", ["plain", "fused", "plain_compiled", "fused_compiled"]),
        ("genet_tiny", "cpu", ["plain", "fused"]),
        ("timm/test_resnet", "cuda", ["plain", "plain_compiled"]),
        ("timm/test_resnet", "cpu", ["plain"]),
    ],
)
def test_a_gpu_is_asked_to_compile_and_networks_of_timm_have_no_fused_form(
    name, device, efficiencies, rates
):
    recipe = replace(SHORT, efficiency="auto")
    autotune.measure_rates(recipe, Classify(), zoo.create(name), EXAMPLE, torch.device(device))
    assert rates == efficiencies


@pytest.mark.fused
def test_an_efficiency_whose_batch_does_not_fit_is_left_out(monkeypatch, cache):
    def rate(recipe, *_):
        if recipe.efficiency == "plain":
            raise MemoryError
        return 1.0

    monkeypatch.setattr(autotune, "rate", rate)
    net, auto = zoo.create("genet_tiny", in_channels=1), replace(SHORT, efficiency="auto")
    assert autotune.choose_efficiency(auto, Classify(), net, EXAMPLE, "cpu").efficiency == "fused"


@pytest.mark.parametrize("efficiency", ["fused", "fused_compiled"])
def test_a_network_of_timm_is_refused_where_it_should_be_fused(efficiency):
    timm = zoo.create("timm/test_resnet", in_channels=1)
    with pytest.raises(ValueError, match="has no fused form"):
        list(train_epochs(timm, Classify(), [None], replace(SHORT, efficiency=efficiency)))


@pytest.mark.fused
def test_a_rate_is_of_real_steps_which_leave_the_network_as_it_was(cache):
    net = zoo.create("genet_tiny", in_channels=1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert autotune.rate(
        replace(SHORT, efficiency="fused"), Classify(), net, EXAMPLE, torch.device("cpu")
    )
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not net.is_fused


@pytest.mark.fused
def test_a_run_continues_with_the_efficiency_that_it_began_with(few_digits, tmp_path, rates, cache):
    auto = replace(SHORT, efficiency="auto")
    started = run.train(tmp_path / "run", "genet_tiny", few_digits, auto)
    next(started)
    started.close()
    assert (
        json.loads((tmp_path / "run" / run_folder.RUN_CONFIG).read_text())["efficiency"] == "fused"
    )
    cache.unlink()
    rates.clear()
    assert len(list(run.train(tmp_path / "run", "genet_tiny", few_digits, auto))) == 2
    assert rates == []


@pytest.mark.parametrize("error", [MemoryError("none left"), RuntimeError("no such kernel")])
def test_without_an_efficiency_that_runs_the_error_is_told(error, monkeypatch):
    def rate(*_):
        raise error

    monkeypatch.setattr(autotune, "rate", rate)
    recipe, net = replace(SHORT, efficiency="auto"), zoo.create("timm/test_resnet")
    with pytest.raises(type(error), match=str(error)):
        autotune.measure_rates(recipe, Classify(), net, EXAMPLE, torch.device("cpu"))
