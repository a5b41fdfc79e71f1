import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

from fullstride import cli
from fullstride.measure import batch_sizes
from fullstride.measure.batch_sizes import find_batches
from fullstride.measure.bench import bench
from fullstride.measure.memory import max_batch
from fullstride.measure.memory.activation_bytes import saved
from fullstride.measure.memory.compiled_bytes import compiled_bytes
from fullstride.measure.memory.max_batch import Probe, Trial, predict
from fullstride.measure.protocols import (
    PROTOCOLS,
    RESNET_RS,
    Measurement,
    Protocol,
    compare,
)
from fullstride.measure.workload import Step
from fullstride.nets import compile, fused_form
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
    spec = SPECS["resnet_rs_tiny"]
    return Network(replace(spec, stages=(replace(spec.stages[0], depth=1),)))


def test_a_lean_step_is_the_plain_one_and_leaves_the_network_that_was_given_plain():
    net = tiny()
    plain = Step(net, "training", 4, 32, CPU)
    lean = Step(net, "training", 4, 32, CPU, efficiency="lean")
    assert (plain.efficiency, lean.efficiency, net.is_fused) == ("plain", "lean", False)
    lean.images = plain.images
    plain()
    lean.targets = plain.targets
    before = copy.deepcopy(lean.net)
    for step in (plain, lean):
        step.net.load_state_dict(before.state_dict())
        step.optimizer = torch.optim.SGD(step.net.parameters(), lr=0.1)
        step()
    moved = [
        (a - b).norm() for a, b in zip(lean.net.parameters(), before.parameters(), strict=True)
    ]
    apart = [
        (a - b).norm() for a, b in zip(lean.net.parameters(), plain.net.parameters(), strict=True)
    ]
    assert sum(moved) > 0
    assert sum(apart) < 1e-4 * sum(moved)


def test_a_step_of_efficiency_compiled_is_a_lean_network_compiled_as_a_recipe_does(monkeypatch):
    asked: list[tuple[str | None, dict]] = []

    def compile_ours(net: Network, **how: object) -> compile.Compiled:
        asked.append((net.is_fused, how))
        return compile.Compiled(net, "recompute", "")

    monkeypatch.setattr(compile, "compile_for_training", compile_ours)
    step = Step(tiny(), "training", 2, 32, CPU, efficiency="compiled")
    assert (step.efficiency, step.is_compiled, asked) == (
        "compiled",
        True,
        [("", {"dynamic": False})],
    )
    assert Step(tiny(), "training", 2, 32, CPU, compiled=True).efficiency == "plain"


def test_lean_and_plain_have_their_turn_together_and_each_row_says_which_it_is():
    net = tiny()
    nets: dict[str, nn.Module] = {"net": net, "net lean": net}
    rows = bench(nets, TRAINING, efficiency={"net lean": "lean"}, reference="net", threads=1)
    assert [(row.name, row.efficiency, row.ratio is not None) for row in rows] == [
        ("net", "plain", True),
        ("net lean", "lean", True),
    ]
    assert Measurement.from_json(rows[1].to_json()) == rows[1]
    with pytest.raises(ValueError, match=r"not measured alike \(efficiency plain and lean\)"):
        compare(*rows)
    before = {
        key: value for key, value in json.loads(rows[0].to_json()).items() if key != "efficiency"
    }
    assert Measurement.from_json(json.dumps(before)) == rows[0]


def test_a_network_that_is_lean_already_says_so_where_it_trains_and_is_plain_where_it_answers():
    nets = {"net": fused_form.fused(tiny())}
    answering = Protocol(name="throughput", **SHORT)
    assert [bench(nets, part, threads=1)[0].efficiency for part in (TRAINING, answering)] == [
        "lean",
        "plain",
    ]


def test_inference_and_networks_of_others_have_no_lean_form():
    answering = Protocol(name="throughput", **SHORT)
    with pytest.raises(ValueError, match="a, lean: inference has no fused form"):
        bench({"a": tiny()}, answering, efficiency={"a": "lean"})
    with pytest.raises(ValueError, match="b has no fused form: use efficiency plain"):
        bench(
            {"a": tiny(), "b": nn.Conv2d(3, 8, 3)},
            TRAINING,
            efficiency={"a": "lean", "b": "compiled"},
        )


def test_the_batch_that_is_looked_for_is_that_of_the_efficiency(monkeypatch):
    tried: dict[str, Trial] = {}

    def probe(trial: Trial, batch: int) -> Probe:
        tried[trial.efficiency] = trial
        return Probe(batch=batch, outcome="fits")

    monkeypatch.setattr(Trial, "probe", probe)
    monkeypatch.setattr(batch_sizes, "asked_bytes", lambda *_: 2**30)
    part = replace(RESNET_RS, resolution=32)
    assert find_batches({"a": tiny(), "b": tiny()}, part, CPU, efficiency={"b": "lean"}) == {
        "a": 128,
        "b": 128,
    }
    assert list(tried) == ["plain", "lean"]
    seen: list[str] = []

    def step(*_, efficiency: str, **__) -> Any:
        seen.append(efficiency)
        raise MemoryError

    monkeypatch.setattr(max_batch, "Step", step)
    with pytest.raises(MemoryError):
        tried["lean"].run(8)
    assert seen == ["lean"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_prediction_for_lean_steps_is_of_the_bytes_that_lean_networks_keep(precision):
    net, room = tiny("tresnet_tiny"), 2.0**32
    plain, lean = (predict(net, room, 64, precision, efficiency=way) for way in ("plain", "lean"))
    image = 0 if precision == "float32" else 3 * 64 * 64 * 4
    assert (
        lean.bytes_per_image
        == saved(fused_form.fused(tiny("tresnet_tiny")), 64, precision).bytes_per_image + image
    )
    assert lean.bytes_per_image < 0.7 * plain.bytes_per_image
    assert lean.batch > plain.batch
    assert not net.is_fused


def kept_for_backward(net: Network, images: int, side: int) -> float:
    """Bytes an image that autograd is really handed by a compiled step, whose passes PyTorch runs as they are cut."""

    def backend(gm, inputs):
        with config.patch(**recompute_options(net.custom_operators)):
            return compile_fx(
                gm, inputs, inner_compile=lambda graph, *_, **__: make_boxed_func(graph)
            )

    found: dict[int, Any] = {}
    own = {t.data_ptr() for t in (*net.parameters(), *net.buffers())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.dim() and len(tensor) == images:
            found[storage.data_ptr()] = storage
        return tensor

    call: Callable = torch.compile(net, fullgraph=True, backend=backend, dynamic=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _logits = call(torch.randn(images, 3, side, side), net.draw(images))
    return sum(storage.nbytes() for storage in found.values()) / images


@pytest.mark.slow
@pytest.mark.parametrize("lean", [False, True])
def test_the_bytes_of_a_compiled_step_are_those_that_autograd_is_handed(lean):
    net = (fused_form.fused(one_block()) if lean else one_block()).train()
    assert compiled_bytes(net, 48, "float32") == kept_for_backward(net, 5, 48)


@pytest.mark.slow
def test_a_prediction_for_compiled_steps_knows_what_they_keep():
    net = one_block()
    lean, both, alone = (
        predict(net, 2.0**30, 32, efficiency=way, compiled=by_torch)
        for way, by_torch in (("lean", False), ("compiled", False), ("plain", True))
    )
    assert (
        both.bytes_per_image
        == compiled_bytes(fused_form.fused(one_block()), 32) + 3 * 32 * 32 * 4
        < lean.bytes_per_image
    )
    assert both.bytes_per_image <= alone.bytes_per_image
    assert both.map_batch == lean.map_batch


@pytest.fixture
def anything_fits(monkeypatch):
    monkeypatch.setattr(
        Trial,
        "probe",
        lambda self, batch: Probe(batch=batch, outcome="fits" if batch < 9 else "memory"),
    )
    for name, parts in PROTOCOLS.items():
        short = tuple(
            replace(part, batch=8, warmup_s=0.0, rounds=1, round_s=1e-6) for part in parts
        )
        monkeypatch.setitem(PROTOCOLS, name, short)


@pytest.mark.usefixtures("anything_fits")
def test_bench_times_lean_beside_plain_of_the_same_network_in_the_table_and_the_file(
    tmp_path, capsys
):
    words = [
        "bench",
        "genet_tiny",
        "--protocol",
        "tresnet",
        "--resolution",
        "32",
        "--precision",
        "fp32",
    ]
    words += [
        "--device",
        "cpu",
        "--memory-gib",
        "1",
        "--efficiency",
        "lean",
        "--reference",
        "genet_tiny",
    ]
    assert cli.run([*words, "--out", str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "genet_tiny lean" in out
    assert "eager" in out
    assert out.endswith("inference has no fused form: measure it without --efficiency\n")
    rows = [
        Measurement.from_json(json.dumps(row))
        for row in json.loads((tmp_path / "b.json").read_text())
    ]
    assert [(row.name, row.efficiency, row.protocol.work) for row in rows] == [
        ("genet_tiny", "plain", "training"),
        ("genet_tiny lean", "lean", "training"),
    ]
    assert all(row.reference == "genet_tiny" and row.ratio for row in rows)


def test_the_command_predicts_more_images_for_lean_steps(capsys):
    batches = {}
    for way in ("plain", "lean"):
        words = [
            "capacity",
            "tresnet_tiny",
            "--memory-gib",
            "2",
            "--device",
            "cuda",
            "--predict",
            "--efficiency",
            way,
        ]
        assert cli.run(words) == 0
        head, line, *_ = capsys.readouterr().out.splitlines()
        assert f", {way}, " in head
        batches[way] = int(line.split()[2].strip(","))
    assert batches["lean"] > 1.3 * batches["plain"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["bench", "genet_tiny", "--efficiency", "lean"],
            "inference has no fused form, use --protocol tresnet",
        ),
        (
            ["bench", "genet_tiny", "--protocol", "genet", "--efficiency", "lean"],
            "inference has no fused form",
        ),
        (
            ["bench", "timm/resnet18", "--protocol", "resnet_rs", "--efficiency", "lean"],
            "timm/resnet18 has no fused form: use efficiency plain, or a network that `fullstride zoo` lists",
        ),
        (
            [
                "bench",
                "genet_tiny",
                "--protocol",
                "resnet_rs",
                "--efficiency",
                "lean",
                "--compiled",
            ],
            "leave one out",
        ),
        (
            ["bench", "--suite", "papers", "--efficiency", "lean"],
            "--efficiency with --suite papers: leave it out",
        ),
        (
            [
                "capacity",
                "timm/resnet18",
                "--memory-gib",
                "1",
                "--predict",
                "--efficiency",
                "compiled",
            ],
            "no lean form",
        ),
        (
            ["capacity", "genet_tiny", "--memory-gib", "1", "--efficiency", "lean", "--compiled"],
            "leave one out",
        ),
    ],
)
def test_an_efficiency_that_cannot_be_measured_is_refused_in_one_line(words, told, capsys):
    assert cli.run([*words, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1
