"""Is the fastest efficiency chosen once and kept?"""

import json
from dataclasses import replace

import pytest
import torch

from fullstride.data.loader import Batch
from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify
from fullstride.train import autotune, run, run_folder
from fullstride.train.recipes.named import DIGITS

GRAY = Preprocessing(resolution=16, mean=(0.0,), std=(1.0,), crop=1.0)
EXAMPLE = Batch(torch.zeros(4, 1, 32, 32), torch.arange(4), torch.arange(4))
BOTH = ["plain", "plain_compiled"]
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
        return 150.0 if recipe.efficiency == "plain_compiled" else 100.0

    monkeypatch.setattr(autotune, "rate", rate)
    monkeypatch.setattr(autotune, "candidates", lambda _: BOTH)
    return measured


def test_the_fastest_efficiency_is_measured_once_and_again_where_something_differs(rates, cache):
    net = zoo.create("genet_tiny", in_channels=1)
    auto = replace(SHORT, efficiency="auto")
    for _ in range(2):
        chosen = autotune.choose_efficiency(auto, Classify(), net, EXAMPLE, "cpu")
        assert chosen.efficiency == "plain_compiled"
    assert rates == BOTH
    (entry,) = json.loads(cache.read_text()).values()
    assert entry["images_per_s"] == {"plain": 100.0, "plain_compiled": 150.0}
    assert entry["environment"]["torch"] == torch.__version__
    autotune.choose_efficiency(replace(auto, batch_size=8), Classify(), net, EXAMPLE, "cpu")
    assert rates == BOTH * 2
    for content in ("nonsense", '{"key": {"fastest": "lean"}}'):
        cache.write_text(content)
        autotune.choose_efficiency(auto, Classify(), net, EXAMPLE, "cpu")
    assert rates == BOTH * 4


def test_a_gpu_is_asked_to_compile_and_a_cpu_is_not():
    assert autotune.candidates(torch.device("cuda")) == BOTH
    assert autotune.candidates(torch.device("cpu")) == ["plain"]


def test_an_efficiency_whose_batch_does_not_fit_is_left_out(monkeypatch, cache):
    def rate(recipe, *_):
        if recipe.efficiency == "plain":
            raise MemoryError
        return 1.0

    monkeypatch.setattr(autotune, "rate", rate)
    monkeypatch.setattr(autotune, "candidates", lambda _: BOTH)
    net, auto = zoo.create("genet_tiny", in_channels=1), replace(SHORT, efficiency="auto")
    chosen = autotune.choose_efficiency(auto, Classify(), net, EXAMPLE, "cpu")
    assert chosen.efficiency == "plain_compiled"


def test_a_rate_is_of_real_steps_which_leave_the_network_as_it_was(cache):
    net = zoo.create("genet_tiny", in_channels=1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert autotune.rate(SHORT, Classify(), net, EXAMPLE, torch.device("cpu"))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_run_continues_with_the_efficiency_that_it_began_with(
    few_digits, tmp_path, rates, cache, monkeypatch
):
    monkeypatch.setattr(autotune, "candidates", lambda _: BOTH[:1])
    auto = replace(SHORT, efficiency="auto")
    started = run.train(tmp_path / "run", "genet_tiny", few_digits, auto)
    next(started)
    started.close()
    config = json.loads((tmp_path / "run" / run_folder.RUN_CONFIG).read_text())
    assert config["efficiency"] == "plain"
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
