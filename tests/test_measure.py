import json
import math
import time
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from fullstride.measure import bench as bench_module
from fullstride.measure.bench import ONLINE, THROUGHPUT, Measurement, Protocol, bench, measure_all
from fullstride.measure.cost import cost, layer_costs
from fullstride.measure.environment import Environment, choose_device, commit, find_device
from fullstride.measure.tables import published
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network

QUICK = Protocol(name="online", batch=1, resolution=32, warmup_s=0.0, rounds=3, round_s=0.01)


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10))


def test_the_cost_of_a_convolution_and_a_classifier_is_what_counting_by_hand_gives():
    found = cost(tiny, 32)
    assert found.params == (8 * 3 * 3 * 3 + 8) + (2048 * 10 + 10)
    assert found.macs == 8 * 16 * 16 * (3 * 3 * 3) + 2048 * 10
    assert found.activations == 8 * 16 * 16 + 10


def test_tresnet_m_costs_the_published_multiply_adds():
    found = cost(lambda: Network(SPECS["tresnet_m"]), 224)
    assert (found.params, found.macs) == (31_389_032, 5_736_545_792)


def test_the_rows_of_the_layers_and_the_fixed_blurs_add_up_to_the_whole():
    blurs = [(128, 28), (256, 14), (512, 7)]  # channels and side of what each blur of TResNet-M puts out at 224
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
    sleep_s = 0.005
    (online,) = measure_all({"sleep": lambda: time.sleep(sleep_s)}, QUICK)
    assert online.ms_p50 == pytest.approx(sleep_s * 1e3, rel=0.5)
    assert online.cpu_ms_per_image is not None
    assert online.cpu_ms_per_image < sleep_s * 1e3 / 2  # sleeping takes no CPU time
    (batched,) = measure_all({"sleep": lambda: time.sleep(sleep_s)}, replace(QUICK, name="throughput", batch=8))
    assert batched.images_per_s == pytest.approx(8 / sleep_s, rel=0.5)
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
    monkeypatch.setattr(bench_module, "wait", lambda _device: events.append("wait"))
    measure_all({"a": lambda: events.append("call")}, replace(QUICK, name="throughput", rounds=1))
    assert events == ["call"] * 4 + ["wait"]
    events.clear()
    measure_all({"a": lambda: events.append("call")}, replace(QUICK, rounds=1))
    assert events == ["call", "wait"] * 5  # the first one is not counted


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_bench_measures_every_network_and_changes_none(layout):
    nets = {"a": tiny().train(), "b": tiny().double()}
    found = bench(nets, QUICK, layout=layout, threads=1)
    assert [m.name for m in found] == ["a", "b"]
    assert all(m.images_per_s > 0 and m.samples and m.layout == layout for m in found)
    assert all(min(m.samples) <= (m.ms_p50 or 0) <= (m.ms_p90 or 0) <= (m.ms_p99 or 0) for m in found)
    assert all(m.environment.threads == 1 for m in found)
    assert nets["a"].training
    assert next(nets["b"].parameters()).dtype == torch.float64


def test_a_measurement_survives_json():
    (measured,) = bench({"tiny": tiny()}, QUICK)
    assert Measurement.from_json(measured.to_json()) == measured
    with pytest.raises(ValueError, match="not the JSON of a measurement"):
        Measurement.from_json('{"name": "tiny"}')


@pytest.mark.parametrize(
    ("device", "hint"), [("gpu", "use cpu"), ("cuda:99", "is not here: use c"), ("mps", "use cpu")]
)
def test_an_absent_device_is_refused_with_one_that_is_here(device, hint):
    with pytest.raises(ValueError, match=hint) as caught:
        bench({"tiny": tiny()}, QUICK, device)
    assert "\n" not in str(caught.value)


def test_a_batch_that_does_not_fit_is_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"batch 100000000 at 32 x 32 does not fit into memory: try a smaller --batch"):
        bench({"tiny": tiny()}, replace(QUICK, batch=100_000_000))


def test_an_error_that_is_not_about_memory_stays_itself():
    with pytest.raises(RuntimeError, match="expected input"):
        bench({"tiny": tiny()}, QUICK, in_channels=1)


@pytest.mark.parametrize("change", [{"batch": 0}, {"rounds": 0}, {"resolution": -1}, {"round_s": 0.0}])
def test_a_protocol_that_measures_nothing_is_refused(change):
    with pytest.raises(ValueError, match="use "):
        replace(THROUGHPUT, **change)


def test_the_named_protocols_answer_their_two_questions():
    assert (THROUGHPUT.name, THROUGHPUT.batch) == ("throughput", 64)
    assert (ONLINE.name, ONLINE.batch) == ("online", 1)


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
