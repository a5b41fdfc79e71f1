import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from networks import first_block
from torch import nn
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

from fullstride import cli
from fullstride.measure import max_batch
from fullstride.measure.bench import BenchOptions, bench, find_batches
from fullstride.measure.compiled_bytes import compiled_bytes
from fullstride.measure.max_batch import Probe, Trial, predict
from fullstride.measure.protocols import (
    PROTOCOLS,
    RESNET_RS,
    Measurement,
    Protocol,
)
from fullstride.measure.workload import Step, StepOptions
from fullstride.nets import compile
from fullstride.nets.compile import recompute_options
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network

CPU = torch.device("cpu")
SHORT: dict[str, Any] = dict(
    batch=4, resolution=32, warmup_s=0.0, rounds=2, round_s=0.01, fit="given"
)
TRAINING = replace(RESNET_RS, **SHORT)


def tiny(name: str = "genet_tiny") -> Network:
    return Network(SPECS[name])


def one_block() -> Network:
    return Network(first_block("resnet_rs_tiny"))


@pytest.mark.parametrize(
    ("net", "options", "efficiency", "recomputes"),
    [
        (tiny, {"efficiency": "plain_compiled"}, "plain_compiled", True),
        (tiny, {"compiled": True}, "plain_compiled", True),
        (lambda: nn.Conv2d(3, 4, 3), {"efficiency": "plain_compiled"}, "plain_compiled", True),
        (lambda: nn.Conv2d(3, 4, 3), {"compiled": True}, "plain", False),
    ],
)
def test_a_compiled_training_step_recomputes_and_says_where_the_installed_torch_cannot(
    net, options, efficiency, recomputes, monkeypatch, recwarn
):
    monkeypatch.setattr(compile, "why_not_recompute", lambda device: "too old")
    step = Step(
        net(), "training", 2, 32, CPU, options=StepOptions(**options)
    )  # compiles at its first call
    assert (step.efficiency, step.is_compiled) == (efficiency, True)
    assert [str(warning.message) for warning in recwarn] == (
        ["compiled without recomputation: too old"] if recomputes else []
    )


def test_an_efficiency_is_for_training():
    inference = Protocol(name="throughput", **SHORT)
    with pytest.raises(ValueError, match="a, plain_compiled: .* for training"):
        bench({"a": tiny()}, inference, options=BenchOptions(efficiency={"a": "plain_compiled"}))


@pytest.mark.slow
def test_the_search_for_a_batch_runs_steps_of_the_efficiency(monkeypatch):
    trials: dict[str, Trial] = {}

    def probe(trial: Trial, batch: int) -> Probe:
        trials[trial.options.efficiency] = trial
        return Probe(batch=batch, outcome="fits")

    monkeypatch.setattr(Trial, "probe", probe)
    monkeypatch.setattr(max_batch, "budget_bytes", lambda *_: 2**30)
    part = replace(RESNET_RS, resolution=32)
    options = BenchOptions(efficiency={"b": "plain_compiled"})
    sizes = find_batches({"a": tiny(), "b": tiny()}, part, CPU, options)
    assert sizes == {"a": 128, "b": 128}
    assert list(trials) == ["plain", "plain_compiled"]
    efficiencies: list[str] = []

    def step(*arguments: Any) -> Any:
        efficiencies.append(arguments[-1].efficiency)
        raise MemoryError

    monkeypatch.setattr(max_batch, "Step", step)
    with pytest.raises(MemoryError):
        trials["plain_compiled"].run(8)
    assert efficiencies == ["plain_compiled"]


def saved_bytes(net: Network, images: int, side: int) -> float:
    """Bytes per image that autograd saves in a compiled step whose passes run eagerly."""

    def backend(gm, inputs):
        with config.patch(**recompute_options()):
            return compile_fx(
                gm, inputs, inner_compile=lambda graph, *_, **__: make_boxed_func(graph)
            )

    storages: dict[int, Any] = {}
    own = {t.data_ptr() for t in (*net.parameters(), *net.buffers())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.dim() and len(tensor) == images:
            storages[storage.data_ptr()] = storage
        return tensor

    call: Callable = torch.compile(net, fullgraph=True, backend=backend, dynamic=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _logits = call(torch.randn(images, 3, side, side), net.draw(images))
    return sum(storage.nbytes() for storage in storages.values()) / images


@pytest.mark.slow
def test_the_bytes_of_a_compiled_step_are_those_that_autograd_saves():
    net = one_block().train()
    assert compiled_bytes(net, 48, "float32") == saved_bytes(net, 5, 48)


@pytest.mark.slow
def test_a_prediction_for_compiled_steps_is_of_the_tensors_that_they_save():
    net, memory, image = one_block(), 2.0**30, 3 * 32 * 32 * 4
    eager = predict(net, memory, 32)
    compiled = predict(net, memory, 32, efficiency="plain_compiled")
    expected = compiled_bytes(one_block(), 32)
    assert compiled.bytes_per_image == expected + image < eager.bytes_per_image
    assert predict(net, memory, 32, compiled=True) == compiled
    assert compiled.map_batch == eager.map_batch


@pytest.fixture
def everything_fits(monkeypatch):
    def probe(trial: Trial, batch: int) -> Probe:
        return Probe(batch=batch, outcome="fits" if batch < 9 else "memory")

    monkeypatch.setattr(Trial, "probe", probe)
    for name, parts in PROTOCOLS.items():
        short = dict(batch=8, warmup_s=0.0, rounds=1, round_s=1e-6)
        monkeypatch.setitem(PROTOCOLS, name, tuple(replace(part, **short) for part in parts))


@pytest.mark.slow
@pytest.mark.usefixtures("everything_fits")
def test_bench_times_both_efficiencies_of_one_network(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SPECS, "genet_tiny", first_block("genet_tiny"))
    command = "bench genet_tiny --protocol tresnet --resolution 32 --precision fp32 --device cpu"
    command += " --memory-gib 1 --efficiency plain_compiled --reference genet_tiny --out"
    assert cli.run([*command.split(), str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "genet_tiny compiled" in out
    rows = json.loads((tmp_path / "b.json").read_text())
    assert [(row["name"], row["efficiency"], row["protocol"]["work"]) for row in rows] == [
        ("genet_tiny", "plain", "training"),
        ("genet_tiny compiled", "plain_compiled", "training"),
    ]
    assert all(row["reference"] == "genet_tiny" and row["ratio"] for row in rows)
    assert json.loads(Measurement.from_json(json.dumps(rows[1])).to_json()) == rows[1]
    del rows[1]["efficiency"]
    assert Measurement.from_json(json.dumps(rows[1])).efficiency == "plain"


@pytest.mark.slow
def test_the_command_predicts_more_images_for_compiled_steps(capsys, monkeypatch):
    """Of the first two stages: tracing a step of all four takes 6 s."""
    spec = SPECS["tresnet_tiny"]
    monkeypatch.setitem(SPECS, "tresnet_tiny", replace(spec, stages=spec.stages[:2]))
    batches = {}
    for efficiency in ("plain", "plain_compiled"):
        command = (
            "measure capacity tresnet_tiny --memory-gib 2 --device cuda --predict --efficiency"
        )
        assert cli.run([*command.split(), efficiency]) == 0
        settings, prediction, *_ = capsys.readouterr().out.splitlines()
        assert efficiency in settings
        batches[efficiency] = int(prediction.split()[2].strip(","))
    assert batches["plain_compiled"] > 1.3 * batches["plain"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bench genet_tiny --protocol genet --efficiency plain_compiled", "for training"),
        (
            "bench genet_tiny --protocol resnet_rs --efficiency plain_compiled --compiled",
            "leave one of them out",
        ),
        ("bench --suite papers --efficiency plain_compiled", "--efficiency"),
        (
            "measure capacity genet_tiny --memory-gib 1 --efficiency plain_compiled --compiled",
            "leave one of them out",
        ),
    ],
)
def test_an_efficiency_that_cannot_be_measured_is_refused_in_one_line(command, message, capsys):
    assert cli.run([*command.split(), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
