"""Estimated times: what runs, what it takes, and what a profile says of it."""

import json
from dataclasses import replace
from time import process_time

import numpy as np
import pytest
import timm
import torch
from latency_spreads import FULL_BATCH
from torch import Tensor, nn
from torch.nn import functional

from fullstride.latency.devices import load_profile, profile_names
from fullstride.latency.estimator import estimate
from fullstride.latency.fitting import (
    PRIORS,
    Parameters,
    error,
    fit,
    interval,
    left_out,
    resolvable_ratio,
)
from fullstride.latency.network_times import Estimate, estimates, is_tie
from fullstride.latency.profiles import PROFILE
from fullstride.latency.roofline import Machine, prepare, times
from fullstride.measure.operators import (
    AFTER_PRODUCT,
    ALONE,
    IN_CHAIN,
    JOINING,
    OPERATOR_KINDS,
    Operators,
    convolution,
    elementwise,
    linear,
)
from fullstride.measure.tracer import cost, traced
from fullstride.nets import zoo
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import TimmNetwork
from fullstride.tables import latencies

NUMBERS = Parameters((*FULL_BATCH, "launch_us"))
GPU = Machine(runtime="eager", peak_tflops=100, bandwidth_gb_s=1000)
TRUE = {
    "dense": 0.6,
    "1x1": 0.5,
    "depthwise": 0.04,
    "group_channels": 40.0,
    "convolution": 0.7,
    "elementwise": 0.9,
    "norm": 0.9,
    "statistics": 0.4,
    "gather": 0.6,
    "launch_us": 4.0,
}


class Small(nn.Module):
    """A convolution, a block with a shortcut of its own and a gate, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
        self.grouped_norm = nn.BatchNorm2d(8)
        self.shortcut = nn.Conv2d(8, 8, 1, bias=False)
        self.shortcut_norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        shortcut = self.shortcut_norm(self.shortcut(x))
        x = torch.relu(self.grouped_norm(self.grouped(x)) + shortcut)
        gate = torch.sigmoid(x.mean((2, 3), keepdim=True))
        return self.fc((x * gate).mean((2, 3)))


def small_by_hand() -> Operators:
    """At 16 pixels: maps of 8 channels and 8 x 8 pixels, 512 elements."""
    norm = elementwise("batch_norm", 512, 512, 32, AFTER_PRODUCT)
    return Operators.of(
        [
            convolution(3, 8, 9, 256, 64),
            norm,
            elementwise("activation", 512, 512, chain=IN_CHAIN),
            convolution(8, 8, 1, 64, 64),
            norm,
            convolution(8, 8, 9, 64, 64, groups=2),
            norm,
            elementwise("add", 1024, 512, chain=JOINING),
            elementwise("activation", 512, 512, chain=IN_CHAIN),
            elementwise("reduce", 512, 8),
            elementwise("activation", 8, 8),
            elementwise("scale", 520, 512, chain=ALONE),
            elementwise("reduce", 512, 8),
            linear(8, 10),
        ]
    )


def same(a: Operators, b: Operators) -> bool:
    a, b = a.merged(), b.merged()
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in vars(a))


def test_a_small_network_runs_what_one_counts_by_hand():
    found = traced(Small(), 16)
    assert same(found, small_by_hand())
    assert [OPERATOR_KINDS[kind] for kind in found.kind[:4]] == [
        "dense",
        "batch_norm",
        "activation",
        "1x1",
    ]
    assert found.total_macs == 64 * 8 * (27 + 8 + 36) + 80
    assert found.total_weights == 216 + 64 + 288 + 90


NETWORKS = (
    "genet_light",
    "tresnet_m",
    "resnet_rs_50",
    "timm/convnext_atto",
    "timm/nfnet_f0",
    "timm/vit_tiny_patch16_224",
)


@pytest.mark.parametrize("name", NETWORKS)
def test_multiply_adds_of_traced_operators_are_those_of_the_whole_network(name: str):
    def build() -> nn.Module:
        spec = zoo.spec(name)
        return Network(spec) if isinstance(spec, NetSpec) else TimmNetwork(spec)

    assert traced(build, 224).total_macs == cost(build, 224).macs


def test_merging_changes_neither_sums_nor_times():
    net = traced(lambda: timm.create_model("resnet18"), 64)
    assert len(net.merged()) < len(net) / 2
    assert net.merged().total_macs == net.total_macs
    took = times(prepare([net, net.merged()], [4, 4], GPU), TRUE).total_s
    assert took[0] == pytest.approx(took[1], rel=1e-12)


class SelfAttention(nn.Module):
    """Of 2 heads of 8 channels, over the pixels of an 8 x 8 map of 16 channels."""

    def __init__(self, fused: bool):
        super().__init__()
        self.fused, self.project = fused, nn.Conv2d(3, 48, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).reshape(-1, 3, 2, 8, 64).transpose(3, 4).unbind(1)
        if self.fused:
            return functional.scaled_dot_product_attention(q, k, v)
        return (q @ k.transpose(2, 3)).softmax(3) @ v


def test_attention_is_one_operator_that_writes_no_products_of_tokens():
    fused, apart = (traced(SelfAttention(fused), 8) for fused in (True, False))
    assert fused.total_macs == apart.total_macs == 64 * 3 * 48 + 2 * 2 * 64 * 64 * 8
    kinds = [OPERATOR_KINDS[kind] for kind in fused.kind]
    assert kinds.count("product") == 1
    assert "statistics" not in kinds
    row = fused.rows()[kinds.index("product")]
    assert (row.read, row.written) == (3 * 16 * 64, 16 * 64)
    assert {"product", "statistics"} <= {OPERATOR_KINDS[kind] for kind in apart.kind}


def test_an_image_of_the_wrong_size_is_one_line():
    with pytest.raises(ValueError, match="takes no 3 x 2 x 2 image: .+") as caught:
        traced(nn.Sequential(nn.Conv2d(3, 4, 5), nn.ReLU()), 2)
    assert "\n" not in str(caught.value)


def obvious(net: Operators, batch: int, machine: Machine, numbers: dict[str, float]) -> float:
    """Seconds of a batch on an eager engine, operator by operator."""
    total = launches = 0.0
    for i in range(len(net)):
        kind = OPERATOR_KINDS[net.kind[i]]
        rate = numbers["dense"]
        if kind in ("1x1", "linear"):
            rate = numbers["1x1"]
        if kind == "depthwise":
            rate = numbers["depthwise"]
        if kind == "grouped":
            rate *= net.c_in[i] / (net.c_in[i] + numbers["group_channels"])
        compute = 2 * net.macs[i] * batch / (machine.peak_tflops * 1e12 * rate)
        memory = {"batch_norm": "norm", "pool": "gather"}.get(kind, "elementwise")
        band = numbers["convolution" if net.macs[i] else memory]
        moved = 2 * ((net.read[i] + net.written[i]) * batch + net.weights[i])
        total += (
            net.count[i]
            * (compute**2 + (moved / (machine.bandwidth_gb_s * 1e9 * band)) ** 2) ** 0.5
        )
        launches += net.count[i]
    device, host = (
        total + launches * numbers["launch_us"] * 1e-6,
        launches * numbers["host_us"] * 1e-6,
    )
    return (device**4 + host**4) ** 0.25


def test_the_time_is_what_a_loop_over_operators_gives():
    nets = [
        traced(lambda name=name: timm.create_model(name), 64)
        for name in ("resnet18", "regnety_002")
    ]
    numbers = {**TRUE, "host_us": 9.0}
    took = times(prepare(nets, [2, 64], GPU), numbers).total_s
    assert took == pytest.approx(
        [obvious(net, n, GPU, numbers) for net, n in zip(nets, (2, 64), strict=True)], rel=1e-9
    )


def test_engines_join_what_follows_a_convolution():
    net = small_by_hand()
    launches = {
        engine: prepare([net], [1], replace(GPU, runtime=engine, folded=engine == "tensorrt"))
        for engine in ("eager", "compiled", "tensorrt")
    }
    counts = {engine: (work.launches * work.count).sum() for engine, work in launches.items()}
    # compiled: of 3 norms, 3 activations and a sum behind convolutions 3 chains are left; TensorRT
    # keeps none of them
    assert counts == {"eager": 14, "compiled": 11, "tensorrt": 8}
    traffic = {engine: (work.memory_s * work.count).sum() for engine, work in launches.items()}
    assert traffic["tensorrt"] < traffic["compiled"] < traffic["eager"]


@pytest.fixture(scope="module")
def several() -> tuple[list[Operators], list[int], np.ndarray]:
    names = (
        "resnet18",
        "resnet50",
        "mobilenetv2_050",
        "regnety_002",
        "efficientnet_b0",
        "densenet121",
        "convnext_atto",
    )
    nets = [traced(lambda name=name: timm.create_model(name), 96).merged() for name in names]
    batches = [1, 16, 256]
    return (
        [net for net in nets for _ in batches],
        batches * len(nets),
        np.repeat(names, len(batches)),
    )


def test_a_fit_finds_the_numbers_that_made_the_times(several):
    nets, batches, _ = several
    work = prepare(nets, batches, GPU)
    found = fit(work, times(work, TRUE).total_s, NUMBERS)
    assert error(times(work, found).total_s, times(work, TRUE).total_s) < 1
    for name in ("1x1", "elementwise", "launch_us"):
        assert found[name] == pytest.approx(TRUE[name], rel=0.1), name


def test_what_is_left_out_does_not_teach(several):
    nets, batches, families = several
    work = prepare(nets, batches, GPU)
    seconds = times(work, TRUE).total_s
    odd = families == "resnet50"
    straight = left_out(work, seconds, families, NUMBERS)
    bent = left_out(work, np.where(odd, 3 * seconds, seconds), families, NUMBERS)
    assert np.array_equal(straight[odd], bent[odd])
    assert not np.allclose(straight[~odd], bent[~odd], rtol=1e-3)


def test_intervals_cover_nine_of_ten_of_families_with_shared_errors():
    random = np.random.default_rng(0)
    families = np.repeat(np.arange(40), 25)
    measured = np.exp(random.normal(0, 0.1, 1000) + random.normal(0, 0.1, 40)[families])
    low, high = interval(np.ones(1000), measured, families)
    assert 0.7 < low < 0.85
    assert 1.18 < high < 1.4


def test_networks_are_apart_where_their_order_is_right():
    random = np.random.default_rng(0)
    estimated = np.exp(random.uniform(0, 1, 400))
    assert resolvable_ratio(estimated, estimated) == 1
    noisy = resolvable_ratio(estimated, estimated * np.exp(random.normal(0, 0.1, 400)))
    # the difference of two errors has a deviation of 0.14, and 0.84 of it is exceeded in two cases
    # of ten
    assert 1.07 < noisy < 1.2
    # six networks have few pairs, or none, of a small ratio
    measured = np.array([1, 2, 4, 8, 16, 32])
    noise = np.exp([0.1, -0.1, 0.1, -0.1, 0.1, -0.1])
    assert resolvable_ratio(measured * noise, measured) == pytest.approx(1.14)


def test_every_profile_loads_and_names_its_sources():
    wanted = "v100-fp16 t4-fp16 t4-int8 rtx3090 rtx3090-nchw rtx4090 rtx4090-nchw rtx4090-compiled"
    assert set(profile_names()) >= {*wanted.split(), "a100", "h100", "h200", "l4", "a10", "t4"}
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.sheet
        assert profile.inference.source
        assert profile.inference.software
        assert profile.inference.low < 1 < profile.inference.high
        if not profile.measured:
            assert profile.note.startswith("not measured")
    assert load_profile("rtx3090").training


def test_a_profile_is_itself_after_a_file(tmp_path):
    profile = load_profile("rtx3090")
    PROFILE.save(tmp_path / "mine.json", profile)
    assert load_profile(tmp_path / "mine.json") == profile


def changed(**changes) -> str:
    data = load_profile("v100-fp16").to_dict()
    for path, value in changes.items():
        place = data
        *folders, last = path.split("__")
        for folder in folders:
            place = place[folder]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "bad.json"),
        ("[" * 50_000, "bad.json"),
        ("[]", r"bad.json is \[\]"),
        ("x" * 200_000, "100,000 bytes"),
        (changed(color="red"), "'color'"),
        (changed(device=7), "device is 7"),
        (changed(device=None), "lacks device"),
        (changed(machine__runtime="magic"), "machine.runtime is 'magic': use .*'eager'"),
        (changed(machine__peak_tflops=-1), "machine.peak_tflops is -1"),
        (changed(inference__numbers__dense=float("nan")), "inference.numbers.*dense.* is nan"),
        (changed(inference__numbers__dense=None), "inference.*lack dense"),
        (changed(inference__numbers__speed=1), "speed"),
        (changed(inference__error=1e400), "inference.error is inf"),
        (changed(inference__error=1e-320), "inference.error is 1e-320"),
        (changed(inference__low=5), "inference.*low 5 .*high"),
        (changed(inference__resolvable_ratio=0.5), "resolvable_ratio is 0.5: use .* at least 1"),
        (changed(layout="chw"), "layout is 'chw': use .*'nchw'.*'nhwc'"),
        (changed(name="a\nb"), r"name 'a\\nb'"),
        (changed(measured=1), "measured is 1"),
    ],
)
def test_a_bad_profile_is_one_line(tmp_path, text: str, says: str):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        load_profile(file)
    assert "\n" not in str(caught.value)


def test_a_wrong_name_is_told_near_ones():
    with pytest.raises(ValueError, match="no profile named 'rtx309': did you mean .*rtx3090"):
        load_profile("rtx309")
    with pytest.raises(ValueError, match="no profile named 'mine': choose from .*JSON file"):
        load_profile("mine")
    with pytest.raises(
        ValueError, match="no profile named 'cpu': fullstride measure calibrate writes"
    ):
        load_profile("cpu")
    with pytest.raises(ValueError, match="No such file"):
        load_profile("nowhere/mine.json")


def test_an_estimate_has_a_host_and_a_device_and_an_interval():
    profile = load_profile("v100-fp16")
    net = traced(lambda: timm.create_model("resnet50"), 224)
    one, full = estimates([net, net], profile, [1, 256])
    for found in (one, full):
        assert found.low < found.ms_per_image < found.high
        assert found.images_per_s == pytest.approx(1000 / found.ms_per_image)
    assert one.bound == "host launches"
    assert one.host_ms > one.device_ms
    assert full.bound in ("arithmetic", "memory")
    assert full.host_ms == one.host_ms
    assert full.device_ms > 20 * one.device_ms


def test_a_module_and_its_operators_have_one_estimate():
    profile = load_profile("rtx4090")
    assert estimate(Small(), profile, 8, 16) == estimate(small_by_hand(), profile, 8)


def test_training_is_slower_and_only_where_it_was_measured():
    net = traced(lambda: timm.create_model("resnet18"), 224)
    profile = load_profile("rtx3090")
    assert (
        estimate(net, profile, 256, training=True).ms_per_image
        > 2 * estimate(net, profile, 256).ms_per_image
    )
    with pytest.raises(ValueError, match="v100-fp16 has no training steps"):
        estimate(net, load_profile("v100-fp16"), 64, training=True)
    with pytest.raises(ValueError, match="batch 0: use"):
        estimate(net, profile, 0)


def with_ms(found: Estimate, ms: float) -> Estimate:
    return replace(found, ms_per_image=ms)


def test_near_estimates_tie():
    found = replace(estimate(small_by_hand(), load_profile("rtx3090"), 8), resolvable_ratio=1.1)
    assert is_tie(with_ms(found, 1.0), with_ms(found, 1.09))
    assert not is_tie(with_ms(found, 1.0), with_ms(found, 1.11))
    assert not is_tie(with_ms(found, 1.11), with_ms(found, 1.0))
    with pytest.raises(ValueError, match="estimates of one profile"):
        is_tie(found, replace(found, profile="rtx4090"))


def test_the_v100_orders_networks_as_the_papers_table_does():
    printed = {row.name: row.ms_per_image for row in latencies("v100_fp16") if row.batch == 64}
    names = {
        "ResNet-152": ("resnet152", 224),
        "ResNet-50": ("resnet50", 224),
        "MobileNetV2-1.0": ("mobilenetv2_100", 224),
        "GENet-light": ("gernet_s", 192),
    }
    nets = [traced(lambda n=n: timm.create_model(n), r) for n, r in names.values()]
    found = [e.ms_per_image for e in estimates(nets, load_profile("v100-fp16"), [64] * len(nets))]
    assert found == sorted(found, reverse=True)
    assert [printed[name] for name in names] == sorted(
        [printed[name] for name in names], reverse=True
    )
    for ms, name in zip(found, names, strict=True):
        assert ms == pytest.approx(printed[name], rel=0.3), name


def test_printed_times_are_those_of_34_networks():
    assert len(latencies("v100_fp16")) == 34 * 7
    assert len(latencies("t4_int8")) == len(latencies("t4_fp16")) == 34 * 6
    assert {row.name for row in latencies("t4_fp16")} == {
        row.name for row in latencies("v100_fp16")
    }


def test_a_hundred_thousand_networks_cost_seconds():
    net = traced(lambda: timm.create_model("resnet50"), 224).merged()
    start = process_time()
    work = prepare([net] * 10_000, [64] * 10_000, GPU)
    took = times(work, TRUE).total_s
    assert process_time() - start < 1
    assert np.ptp(took) == 0


def test_numbers_of_priors_suffice_for_any_engine():
    net = small_by_hand()
    numbers = {name: value for name, (value, _) in PRIORS.items()}
    for engine in ("eager", "cuda graph", "compiled", "tensorrt"):
        took = times(prepare([net], [1], replace(GPU, runtime=engine)), numbers).total_s
        assert took[0] > 0
