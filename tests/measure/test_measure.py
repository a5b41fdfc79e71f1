import copy
import json
import math
import time
from dataclasses import asdict, replace
from statistics import median

import pytest
import torch
from torch import nn
from toy_bundles import bundle_of
from write_networks import derive

from fullstride import cli
from fullstride.latency.estimator import operators_of
from fullstride.measure import bench as bench_module
from fullstride.measure import bench_by_name
from fullstride.measure import environment as environment_module
from fullstride.measure import protocols as protocols_module
from fullstride.measure.bench import (
    BenchOptions,
    bench,
    bench_all,
    halving,
    measure_all,
    timed_batch,
)
from fullstride.measure.environment import (
    Environment,
    choose_device,
    commit,
    find_device,
    gpu_state,
)
from fullstride.measure.max_batch import Probe
from fullstride.measure.protocols import (
    GENET,
    ONLINE,
    PROTOCOLS,
    RESNET_RS,
    THROUGHPUT,
    TRESNET,
    Measurement,
    Protocol,
)
from fullstride.measure.settings import BenchSettings
from fullstride.measure.tracer import cost, layer_costs
from fullstride.measure.workload import Step, StepOptions, exact_float32
from fullstride.nets.bundle import Bundle
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.weights.hub import HUB
from fullstride.tables import networks, published

QUICK = Protocol(name="online", batch=1, resolution=32, warmup_s=0.0, rounds=3, round_s=0.01)
SHORT = dict(batch=4, resolution=32, warmup_s=0.0, rounds=2, round_s=0.01)


def tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10)
    )


def test_the_cost_of_a_convolution_and_a_classifier_is_what_counting_by_hand_gives():
    found = cost(tiny, 32)
    assert found.params == (8 * 3 * 3 * 3 + 8) + (2048 * 10 + 10)
    assert found.macs == 8 * 16 * 16 * (3 * 3 * 3) + 2048 * 10
    assert found.activations == 8 * 16 * 16 + 10


def test_tresnet_m_costs_the_published_multiply_adds():
    found = cost(lambda: Network(SPECS["tresnet_m"]), 224)
    assert (found.params, found.macs) == (31_389_032, 5_736_545_792)


def test_the_rows_of_the_layers_and_the_fixed_blurs_add_up_to_the_whole():
    blurs = [
        (128, 28),
        (256, 14),
        (512, 7),
    ]  # channels and side of what each blur of TResNet-M puts out at 224
    rows = layer_costs(lambda: Network(SPECS["tresnet_m"]), 224)
    whole = cost(lambda: Network(SPECS["tresnet_m"]), 224)
    fixed = sum(9 * channels * side**2 for channels, side in blurs)
    assert sum(row.macs for row in rows) + fixed == whole.macs


def test_costing_a_network_leaves_its_weights_and_its_mode_alone():
    net = tiny().train()
    before = [p.clone() for p in net.parameters()]
    assert cost(net, 32) == cost(tiny, 32)
    assert net.training
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert not any(module._forward_hooks for module in net.modules())


def test_an_image_that_a_network_cannot_take_is_refused_in_one_line():
    with pytest.raises(ValueError, match="takes no 3 x 48 x 48 image") as caught:
        cost(tiny, 48)
    assert "\n" not in str(caught.value)


def test_a_step_of_known_duration_is_measured_as_such():
    durations: list[float] = []

    def step():  # a busy machine may wake it late, so it takes its own time too
        start = time.perf_counter()
        time.sleep(0.005)
        durations.append((time.perf_counter() - start) * 1e3)

    (online,) = measure_all({"sleep": step}, QUICK)
    assert min(online.samples) >= 5
    gaps = [min(abs(sample - each) for each in durations) for sample in online.samples]
    assert median(gaps) < 1
    assert online.cpu_ms_per_image is not None
    assert online.cpu_ms_per_image < 2.5  # sleeping takes no CPU time
    durations.clear()
    (batched,) = measure_all({"sleep": step}, replace(QUICK, name="throughput", batch=8))
    assert max(batched.samples) <= 8 / 0.005
    assert min(batched.samples) >= 8e3 / max(durations) / 2
    assert batched.ms_p50 is None


def test_networks_are_timed_in_turn_inside_every_round(monkeypatch):
    monkeypatch.setattr(bench_module, "warm_up", lambda *_: 2)
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    found = measure_all(steps, replace(QUICK, name="throughput", rounds=3))
    assert "".join(order) == "aabb" * 3
    assert [m.name for m in found] == ["a", "b"]


def test_online_waits_after_every_call_and_throughput_once_a_round(monkeypatch):
    monkeypatch.setattr(bench_module, "warm_up", lambda *_: 4)
    events: list[str] = []
    monkeypatch.setattr(protocols_module, "wait", lambda _device: events.append("wait"))
    measure_all({"a": lambda: events.append("call")}, replace(QUICK, name="throughput", rounds=1))
    assert events == ["call"] * 4 + ["wait"]
    events.clear()
    measure_all({"a": lambda: events.append("call")}, replace(QUICK, rounds=1))
    assert events == ["call", "wait"] * 5  # the first one is not counted


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_bench_measures_every_network_and_changes_none(layout):
    nets = {"a": tiny().train(), "b": tiny().double()}
    found = bench(nets, QUICK, options=BenchOptions(layout=layout, threads=1))
    assert [m.name for m in found] == ["a", "b"]
    assert all(m.images_per_s > 0 and m.samples and m.layout == layout for m in found)
    assert all(
        min(m.samples) <= (m.ms_p50 or 0) <= (m.ms_p90 or 0) <= (m.ms_p99 or 0) for m in found
    )
    assert all(m.environment.threads == 1 for m in found)
    assert nets["a"].training
    assert next(nets["b"].parameters()).dtype == torch.float64


def test_a_measurement_survives_json():
    (measured,) = bench({"tiny": tiny()}, QUICK)
    assert Measurement.from_json(measured.to_json()) == measured
    with pytest.raises(ValueError, match="JSON of a measurement lacks protocol"):
        Measurement.from_json('{"name": "tiny"}')


@pytest.mark.parametrize(
    ("device", "hint"), [("gpu", "use cpu"), ("cuda:99", "is not here: use c"), ("mps", "use cpu")]
)
def test_an_absent_device_is_refused_with_one_that_is_here(device, hint):
    with pytest.raises(ValueError, match=hint) as caught:
        bench({"tiny": tiny()}, QUICK, device)
    assert "\n" not in str(caught.value)


def test_a_batch_that_does_not_fit_is_refused_with_a_hint():
    with pytest.raises(
        ValueError,
        match=r"batch 100000000 at 32 x 32 does not fit into memory: try a smaller --call-batch",
    ):
        bench({"tiny": tiny()}, replace(QUICK, batch=100_000_000))


def test_a_batch_of_a_paper_that_does_not_fit_is_refused_with_what_can_be_set():
    with pytest.raises(ValueError, match=r"batch 100000000 at 32 x 32 .*a smaller --resolution"):
        bench({"tiny": tiny()}, replace(GENET, batch=100_000_000, resolution=32))


def test_a_limit_of_memory_is_in_a_row_if_it_limited_anything():
    options = BenchOptions(memory_gib=0.1)
    (row,) = bench({"tiny": tiny()}, QUICK, options=options)
    assert row.memory_gib is None
    filled = replace(TRESNET, **SHORT)
    (row,) = bench({"tiny": tiny()}, filled, options=options, batches={"tiny": 8})
    assert row.memory_gib == 0.1


def test_an_error_that_is_not_about_memory_stays_itself():
    with pytest.raises(RuntimeError, match="expected input"):
        bench({"tiny": tiny()}, QUICK, options=BenchOptions(in_channels=1))


@pytest.mark.parametrize(
    "change", [{"batch": 0}, {"rounds": 0}, {"resolution": -1}, {"round_s": 0.0}]
)
def test_a_protocol_that_measures_nothing_is_refused(change):
    with pytest.raises(ValueError, match="use "):
        replace(THROUGHPUT, **change)


def test_the_named_protocols_answer_their_two_questions():
    assert (THROUGHPUT.name, THROUGHPUT.batch) == ("throughput", 64)
    assert (ONLINE.name, ONLINE.batch) == ("online", 1)


def test_the_protocols_of_the_papers_are_as_they_were_published():
    assert [part.batch for part in PROTOCOLS["genet"]] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert {(part.rounds, part.trim, part.work) for part in PROTOCOLS["genet"]} == {
        (30, 0.1, "inference")
    }
    assert (RESNET_RS.batch, RESNET_RS.memory_batch, RESNET_RS.work, RESNET_RS.precision) == (
        128,
        32,
        "training",
        "float32",
    )
    assert [part.work for part in PROTOCOLS["tresnet"]] == ["training", "inference"]
    assert {(part.resolution, part.precision) for part in PROTOCOLS["tresnet"]} == {
        (224, "float16")
    }


@pytest.mark.parametrize(
    ("largest", "batch"), [(288, 256), (512, 456), (4229, 3800), (10, 8), (7, 6), (1, 1)]
)
def test_nine_tenths_of_the_largest_batch_are_a_multiple_of_eight_where_that_is_one(largest, batch):
    assert timed_batch(TRESNET, largest) == batch
    assert timed_batch(RESNET_RS, 64) == 64


def test_a_batch_is_halved_until_it_fits_and_no_further():
    probes = halving(
        lambda batch: Probe(batch=batch, outcome="fits" if batch <= 40 else "memory"), 128
    )
    assert [probe.batch for probe in probes] == [128, 64, 32]
    assert [
        probe.batch for probe in halving(lambda batch: Probe(batch=batch, outcome="memory"), 4)
    ] == [4, 2, 1]


def test_the_ratio_to_the_reference_survives_a_machine_that_slows_down(monkeypatch):
    monkeypatch.setattr(bench_module, "warm_up", lambda *_: 1)
    slow = iter([1.0, 1.0, 2.0, 2.0, 9.0, 9.0])  # two networks a round
    monkeypatch.setattr(bench_module, "timed_calls", lambda step, *_: ([next(slow) * step()], 0.0))
    steps = {"reference": lambda: 1.0, "net": lambda: 0.5}
    found = measure_all(
        steps, replace(QUICK, name="throughput"), options=BenchOptions(reference="reference")
    )
    assert [(m.ratio, m.reference) for m in found] == [(1.0, "reference"), (2.0, "reference")]
    assert found[1].spread > 0.5


def test_genet_drops_the_fastest_and_the_slowest_tenth(monkeypatch):
    monkeypatch.setattr(bench_module, "warm_up", lambda *_: 1)
    ms = iter([1000.0, *range(1, 28), 0.001, 5000.0])
    monkeypatch.setattr(bench_module, "timed_each", lambda *_: ([next(ms) / 1e3], 0.0))
    (found,) = measure_all({"net": lambda: None}, replace(GENET, batch=2))
    kept = range(3, 27)  # of 30: 0.001, 1, 2 and 27, 1000, 5000 are left out
    assert found.ms_per_image == pytest.approx(sum(kept) / len(kept) / 2)
    assert len(found.samples) == 30


def test_a_training_step_is_that_of_a_plain_loop_with_momentum():
    step = Step(tiny(), "training", 4, 32, torch.device("cpu"))
    net = copy.deepcopy(step.net)
    step()
    velocity = [torch.zeros_like(p) for p in net.parameters()]
    for _ in range(3):
        gradients = torch.autograd.grad(
            nn.functional.cross_entropy(net(step.images), step.targets), list(net.parameters())
        )
        with torch.no_grad():
            for p, v, g in zip(net.parameters(), velocity, gradients, strict=True):
                v.mul_(0.9).add_(g)
                p.sub_(1e-3 * v)
    step()
    step()
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(net.parameters(), step.net.parameters(), strict=True)
    )
    assert all(p.grad is None for p in step.net.parameters())


def test_float32_is_measured_without_tf32():
    with exact_float32():
        assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_bench_of_training_takes_training_steps_and_keeps_the_network():
    net = tiny()
    before = [p.clone() for p in net.parameters()]
    options = BenchOptions(reference="net", threads=1)
    (found,) = bench_all({"net": net}, [replace(RESNET_RS, fit="given", **SHORT)], options=options)
    assert (found[0].protocol.work, found[0].ratio) == ("training", 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("protocol", ["resnet_rs", "tresnet"])
@pytest.mark.parametrize("task", ["segment", "detect", "depth"])
def test_a_protocol_that_trains_classifiers_refuses_heads_of_tasks_in_one_line(task, protocol):
    net, options = bundle_of(task).net, BenchOptions(memory_gib=0.1)
    with pytest.raises(ValueError, match="net has the head of a task.*--protocol online") as error:
        [*bench_all({"net": net}, PROTOCOLS[protocol], options=options)]
    assert "\n" not in str(error.value)


def test_a_batch_that_is_found_is_the_networks_own(monkeypatch):
    monkeypatch.setattr(bench_module, "find_batches", lambda nets, *_, **__: {"a": 24, "b": 10})
    nets = {"a": tiny(), "b": tiny()}
    parts = [replace(part, **{**SHORT, "batch": 8}) for part in PROTOCOLS["tresnet"]]
    for found in bench_all(nets, parts, options=BenchOptions(memory_gib=0.1)):
        assert [(m.protocol.batch, m.largest_batch) for m in found] == [(16, 24), (8, 10)]


def test_a_gpu_at_work_tells_its_clocks_and_what_holds_them_back(monkeypatch):
    asked = []

    def answer(*command: str) -> str:
        asked.append(command)
        return (
            ""
            if "clocks_event_reasons" in command[3]
            else "1755, 1980, [N/A], 700.00, 61, 0x0000000000000024"
        )

    monkeypatch.setattr(environment_module, "output", answer)
    assert gpu_state("abc") == dict(
        clock_mhz=1755.0,
        clock_max_mhz=1980.0,
        memory_clock_mhz=None,
        power_cap_w=700.0,
        temperature_c=61.0,
        held_back_by="power cap, heat (software)",
    )
    assert [command[2] for command in asked] == ["GPU-abc", "GPU-abc"]
    monkeypatch.setattr(environment_module, "output", lambda *_: "")
    assert gpu_state("abc") == {}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--protocol", "gennet"], "gennet"),
        (["--protocol", "genet", "--device", "cpu"], "genet in fp16 is for GPUs"),
        (
            ["--protocol", "tresnet", "--device", "cpu", "--precision", "fp32"],
            "say with --memory-gib how much to fill",
        ),
        (["--protocol", "genet", "--call-batch", "4"], "--call-batch 4 is for throughput"),
        (["--protocol", "online", "--device", "cuda:99"], "cuda:99 is not here"),
        (["--memory-gib", "0"], "memory of 0 GiB"),
        (["--reference", "timm/resnet51"], "timm has no network named 'resnet51'"),
    ],
)
def test_a_protocol_that_cannot_run_here_gets_one_line(words, told, capsys):
    assert cli.run(["bench", "genet_tiny", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


def test_the_command_times_beside_a_reference_and_keeps_every_sample(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(
        PROTOCOLS, "genet", tuple(replace(part, warmup_s=0.0) for part in PROTOCOLS["genet"][:3])
    )
    words = [
        "bench",
        "genet_tiny",
        "--protocol",
        "genet",
        "--precision",
        "fp32",
        "--resolution",
        "32",
    ]
    words += [
        "--reference",
        "tresnet_tiny",
        "--rounds",
        "1",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "b.json"),
    ]
    assert cli.run(words) == 0
    assert "to tresnet_tiny" in capsys.readouterr().out
    rows = [
        Measurement.from_json(json.dumps(row))
        for row in json.loads((tmp_path / "b.json").read_text())
    ]
    assert [row.name for row in rows] == ["tresnet_tiny", "genet_tiny"] * 3
    assert all(len(row.samples) == 1 and row.ratio and row.environment.torch for row in rows)


def test_an_environment_is_json_and_names_what_made_the_number():
    here = Environment.here()
    assert json.loads(json.dumps(asdict(here))) == asdict(here)
    assert here.device
    assert here.torch == torch.__version__
    assert here.cuda is None


def test_the_commit_of_a_foreign_checkout_is_not_reported(tmp_path):
    package = tmp_path / "src" / "fullstride"
    package.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "shop"\n')
    assert commit(package) is None


def test_the_cpu_is_always_here_and_auto_prefers_a_gpu():
    assert find_device("cpu") == choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_every_published_accuracy_names_a_network_of_ours_and_its_source():
    rows = published()
    assert {row.name for row in rows} <= set(SPECS)
    assert all(70 < row.top1 < 90 and math.isfinite(row.top1) for row in rows)
    assert all(row.source and row.resolution >= 128 for row in rows)
    assert len({(row.name, row.resolution, row.source) for row in rows}) == len(rows)


def test_the_table_of_the_zoo_has_all_networks_with_the_multiply_adds_of_their_specs():
    rows = networks()
    assert [(row.name, row.resolution) for row in rows] == [
        (name, spec.resolution) for name, spec in SPECS.items()
    ]
    assert [row.macs for row in rows] == [operators_of(spec).total_macs for spec in SPECS.values()]
    assert {row.name: row.weights for row in rows if row.weights} == {
        name: f"timm/{model}" for name, model in HUB.items()
    }


def test_the_table_of_the_zoo_is_what_its_networks_cost():
    names = ("genet_tiny", "resnet18", "tresnet_m", "masternet_1", "resnet3d_rs_50")
    assert set(derive(names)) == {row for row in networks() if row.name in names}


def test_an_exported_file_is_not_compiled_beside_a_compiled_network():
    file = tiny()
    file.runtime = "another runtime"
    step = Step(file, "inference", 1, 32, torch.device("cpu"), options=StepOptions(compiled=True))
    assert not step.is_compiled
    assert step.forward is step.net


def test_runs_and_files_are_measured_at_their_own_resolution_and_names_at_the_first_ones(tmp_path):
    for name, side in (("a", 40), ("b", 48)):
        spec = replace(SPECS["genet_tiny"], classes=2, resolution=side)
        how = dict(name=name, classes=("x", "y"), preprocessing=Preprocessing(resolution=side))
        Bundle(Network(spec), **how).save(tmp_path / name)
    models = [f"{tmp_path}/a/", f"{tmp_path}/b", "genet_tiny"]
    settings = BenchSettings(protocol=("online",), reference="none", rounds=1, device="cpu")

    def sides(**more) -> list[int]:
        plan = bench_by_name.plan(models, replace(settings, **more))
        (parts,) = plan.protocols.values()
        quick = [replace(part, warmup_s=0.0, round_s=1e-3) for part in parts]
        rows = [row for part in plan.measure(quick) for row in part]
        assert [row.name for row in rows] == models
        return [row.protocol.resolution for row in rows]

    assert sides() == [40, 48, 40]
    assert sides(resolution=32) == [32, 32, 32]


@pytest.mark.parametrize(
    ("spreads", "kept", "measured"),
    [([0.1, 0.0], 0.1, 1), ([0.5, 0.1], 0.1, 2), ([0.5, 0.9], 0.5, 2), ([0.3, 0.3, 0.0], 0.3, 2)],
)
def test_a_protocol_whose_rounds_spread_by_a_fifth_is_measured_once_more(
    spreads, kept, measured, monkeypatch
):
    (row,) = bench({"net": tiny()}, QUICK)
    rounds = replace(row.protocol, rounds=11)
    # The 10th and the 90th percentile of eleven rounds are the second and the last but one.
    rows = [
        replace(row, protocol=rounds, samples=(1.0,) * 9 + (1 + spread,) * 2) for spread in spreads
    ]
    rest = iter(rows)
    monkeypatch.setattr(bench_by_name, "bench_all", lambda *_, **__: iter([[next(rest)]]))
    settings = BenchSettings(protocol=("online",), reference="none")
    plan = bench_by_name.plan(["genet_tiny"], settings)
    (((result,),),) = plan.run()
    assert protocols_module.spread_of_rounds(result) == pytest.approx(kept)
    assert len(rows) - len([*rest]) == measured


def test_calls_that_wait_do_not_count_as_a_spread_of_rounds():
    (row,) = bench({"net": tiny()}, QUICK)
    samples = ((1.0,) * 8 + (50.0,) * 2) * row.protocol.rounds
    assert protocols_module.spread_of_rounds(replace(row, samples=samples, spread=49.0)) == 0
