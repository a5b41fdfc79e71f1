"""Calibration: designed networks that find out every number, timed in turn, and a profile that
others can read."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from fullstride import cli
from fullstride.latency import calibrate
from fullstride.latency.calibrate import (
    Plan,
    Timing,
    fit_profile,
    measure,
    prepare_step,
    save_profiles,
    widen,
)
from fullstride.latency.devices import load_profile
from fullstride.latency.estimator import estimate
from fullstride.latency.microbenchmarks import (
    WHOLE,
    Microbenchmark,
    Round,
    all_microbenchmarks,
    by_sheet,
    peaks,
    time_of,
    timed_round,
)
from fullstride.latency.profiles import Clocks
from fullstride.latency.roofline import ARITHMETIC_OF, MEMORY_OF, Machine, prepare, times
from fullstride.measure.operators import OPERATOR_KINDS
from fullstride.measure.protocols import Protocol, spread, timed_calls
from fullstride.measure.tracer import traced
from fullstride.nets import zoo

CPU = torch.device("cpu")
QUICK = Protocol(name="throughput", batch=1, warmup_s=0.0, rounds=2, round_s=1e-4)
MADE = Machine(runtime="eager", peak_tflops=0.1, bandwidth_gb_s=20, bytes_per_element=4)
TRUE = {
    **{"dense": 0.6, "1x1": 0.5, "depthwise": 0.1, "group_channels": 20.0},
    **{"convolution": 0.7, "elementwise": 0.9, "norm": 0.7, "statistics": 0.4, "gather": 0.6},
    **{"launch_us": 5.0, "start_us": 30.0},
}


def plan(**changes) -> Plan:
    given = dict(
        device=CPU,
        runtimes=("eager",),
        batches=(1, 8),
        resolution=64,
        precision="float32",
        protocol=QUICK,
    )
    return Plan(**{**given, **changes})


@pytest.fixture(scope="module")
def networks():
    return {design: traced(design.build, 64) for design in all_microbenchmarks()}


@pytest.fixture(scope="module")
def samples(networks):
    """What would be measured on a device for which the model is right."""
    cases = [
        (design, operators, batch) for design, operators in networks.items() for batch in (1, 8)
    ]
    took = times(prepare([o for _, o, _ in cases], [b for *_, b in cases], MADE), TRUE).total_s
    return [
        Timing(
            network=d.name,
            family=d.family,
            operators=o,
            runtime="eager",
            batch=b,
            seconds=s,
            wall_s=s,
            cpu_s=s,
        )
        for (d, o, b), s in zip(cases, took.tolist(), strict=True)
    ]


@pytest.mark.slow
def test_some_forty_networks_have_every_kind_of_operator_and_every_class_in_two_families(networks):
    designed = {design: o for design, o in networks.items() if design.family != WHOLE}
    assert 35 <= len(designed) <= 50
    assert len({design.name for design in networks}) == len(networks)
    families: dict[object, set[str]] = {}
    for design, operators in designed.items():
        for kind in {OPERATOR_KINDS[k] for k in operators.kind}:
            families.setdefault(kind, set()).add(design.family)
            if kind in ARITHMETIC_OF:
                families.setdefault((ARITHMETIC_OF[kind], "arithmetic"), set()).add(design.family)
            families.setdefault((MEMORY_OF[kind], "memory"), set()).add(design.family)
    assert set(OPERATOR_KINDS) - {"product"} == {
        key for key in families if isinstance(key, str)
    }  # attention is not ours
    assert all(len(found) >= 2 for key, found in families.items() if isinstance(key, tuple))


@pytest.mark.slow
def test_every_designed_network_runs(networks):
    for design in networks:
        if design.family != WHOLE:
            with torch.inference_mode():
                assert design.build().eval()(torch.randn(2, 3, 64, 64)).shape[0] == 2


def test_where_the_model_is_right_its_numbers_are_found_and_families_left_out_are_estimated_well(
    samples,
):
    found = fit_profile(samples, plan(), MADE, "", "here")
    for name, value in TRUE.items():
        assert found.profile.inference.numbers[name] == pytest.approx(value, rel=0.1), name
    assert found.left_out < 6
    assert all(ratio == pytest.approx(1, abs=0.03) for ratio in found.whole.values())
    assert found.profile.inference.error < 2
    assert found.times == sum(sample.family != WHOLE for sample in samples)


def test_the_error_is_that_of_whole_networks_which_are_never_fitted(samples):
    slow = [
        s if s.family != WHOLE else Timing(**{**s.__dict__, "seconds": 2 * s.seconds})
        for s in samples
    ]
    found, right = (
        fit_profile(slow, plan(), MADE, "", "here"),
        fit_profile(samples, plan(), MADE, "", "here"),
    )
    assert found.profile.inference.numbers == right.profile.inference.numbers
    assert found.profile.inference.error == pytest.approx(50, abs=2)
    assert found.profile.inference.low < 2 < found.profile.inference.high
    alone = fit_profile([s for s in slow if s.family != WHOLE], plan(), MADE, "", "here")
    assert alone.profile.inference.error == alone.left_out == right.left_out
    assert "families left out" in alone.profile.note


def test_too_few_times_are_refused(samples):
    with pytest.raises(ValueError, match="more minutes"):
        fit_profile(samples[:20], plan(), MADE, "", "here")
    with pytest.raises(ValueError, match="1 time of 1 family in"):
        fit_profile(
            [s for s in samples if s.family == WHOLE] * 2 + samples[:1], plan(), MADE, "", "here"
        )


class Waits(torch.nn.Module):
    """Takes no less than `IMAGE_S` for each image, however busy the machine."""

    IMAGE_S = 0.01

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 1)

    def forward(self, x):
        end = time.thread_time() + self.IMAGE_S * len(x)
        while time.thread_time() < end:
            pass
        return self.conv(x).mean((2, 3))


def test_measured_times_are_of_a_batch():
    builds = {"s": lambda: zoo.create("genet_tiny"), "w": Waits}
    asked = [Microbenchmark(name=name, family=name, build=build) for name, build in builds.items()]
    took = {(s.network, s.batch): s.seconds for s in measure(plan(), asked)}
    assert set(took) == {(name, batch) for name in "sw" for batch in (1, 8)}
    assert all(took["w", batch] >= Waits.IMAGE_S * batch for batch in (1, 8))
    assert 0 < took["s", 1] < took["w", 8]


def round_of(wall_s: float, cpu_s: float) -> Round:
    return Round(wall_s=wall_s, cpu_s=cpu_s, quiet=cpu_s > 0.95 * wall_s)


def test_times_are_wall_times_of_quiet_rounds_or_say_that_they_are_not():
    quiet, busy = [round_of(1.0, 0.99)] * 4, [round_of(2.0, 1.1)] * 9
    both = dict(wall_s=1.0, cpu_s=0.99)
    assert time_of(quiet) == dict(seconds=1.0, spread=0.0, quiet=1.0, clock="wall", **both)
    mixed = time_of(quiet + busy)
    assert (mixed["seconds"], mixed["clock"]) == (1.0, "wall")
    assert mixed["quiet"] == pytest.approx(4 / 13)
    alone = time_of(quiet[:2] + busy)
    assert (alone["seconds"], alone["clock"]) == (1.1, "cpu")
    assert (alone["wall_s"], alone["cpu_s"]) == (2.0, 1.1)


def test_a_round_is_quiet_if_its_thread_had_a_core():
    def compute():
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass

    waiting = timed_round(lambda: time.sleep(0.02), 1, CPU)
    assert not waiting.quiet
    assert waiting.seconds == waiting.cpu_s < 0.01 <= waiting.wall_s
    computing = [timed_round(compute, 1, CPU) for _ in range(20)]
    assert all(each.quiet == (each.cpu_s >= 0.95 * each.wall_s) for each in computing)
    assert min(each.seconds for each in computing) == pytest.approx(0.01, rel=0.1)


def test_the_profile_says_which_clock_and_one_without_its_own_estimates_is_not_written(
    samples, tmp_path
):
    by_cpu = [replace(sample, clock="cpu") for sample in samples[:5]] + samples[5:]
    note = fit_profile(by_cpu, plan(), MADE, "", "here").profile.note
    assert f"CPU time for 5 of {len(samples)} times" in note
    assert "wall time" in fit_profile(samples, plan(), MADE, "", "here").profile.note
    slow = [
        replace(sample, seconds=sample.seconds * (2 if sample.family == WHOLE else 1))
        for sample in samples
    ]
    out = tmp_path / "here.json"
    with pytest.raises(ValueError, match="when the machine is quiet"):
        list(save_profiles(slow, plan(), {"eager": (MADE, "")}, out, "here"))
    assert not out.exists()
    ((path, calibration),) = save_profiles(samples, plan(), {"eager": (MADE, "")}, out, "here")
    fit = load_profile(path).inference
    assert fit.low <= 1 <= fit.high
    assert fit == calibration.profile.inference


def test_the_spread_of_the_rounds_widens_the_interval_and_both_clocks_are_in_the_profile(samples):
    busy = [replace(sample, spread=0.4, wall_s=1.5 * sample.cpu_s) for sample in samples]
    busy[:3] = [replace(sample, clock="cpu") for sample in busy[:3]]
    noisy, fit = (
        fit_profile(rows, plan(), MADE, "", "here").profile.inference for rows in (busy, samples)
    )
    assert (noisy.spread, fit.spread) == (0.4, 0)
    assert noisy.clocks == Clocks(wall=len(samples) - 3, cpu=3, wall_per_cpu=1.5)
    assert fit.clocks == Clocks(wall=len(samples), cpu=0, wall_per_cpu=1)
    assert noisy.numbers == fit.numbers
    assert noisy.low < fit.low < fit.high < noisy.high


def test_an_interval_that_noise_widens_holds_nine_of_ten_noisy_times():
    random = np.random.default_rng(0)
    errors, noise = random.normal(0.1, 0.2, 100_000), random.normal(0, 0.15, 100_000)
    low, high = np.exp(np.quantile(errors, (0.05, 0.95)))
    rounds = np.exp(noise)
    times = np.exp(errors) * rounds
    inside = (low <= times) & (times <= high)
    assert inside.mean() < 0.83
    low, high = widen(low, high, spread(rounds.tolist()))
    inside = (low <= times) & (times <= high)
    assert inside.mean() == pytest.approx(0.9, abs=0.01)


def test_what_takes_too_long_or_comes_too_late_is_left_out(monkeypatch):
    asked = all_microbenchmarks()[:3]
    assert not list(measure(plan(minutes=1e-9), asked))
    monkeypatch.setattr(calibrate, "MAX_CALL_S", 1e-9)
    assert not list(measure(plan(), asked))


def test_a_batch_that_does_not_fit_in_memory_is_left_out():
    network = all_microbenchmarks()[0]
    assert prepare_step(network, plan(), "eager", 10**13) is None  # 10**17 bytes


def test_a_gpu_whose_data_sheet_is_known_is_found_by_the_name_that_torch_has_for_it():
    for name, profile in (
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
    ):
        known = by_sheet(name)
        assert known is not None
        assert known.machine.peak_tflops == load_profile(profile).machine.peak_tflops
    for other in (
        "NVIDIA H100 PCIe",
        "NVIDIA L40S",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB",
        "AMD EPYC",
    ):
        assert by_sheet(other) is None


@pytest.mark.slow
def test_peaks_are_above_what_a_product_and_a_copy_reach():
    tflops, gb_s = peaks(CPU, "float32")
    a = torch.randn(512, 512)
    (seconds,), _ = timed_calls(lambda: a @ a, 5, CPU)
    assert 0.5 * 2e-12 * 512**3 / (seconds / 5) < tflops < 100
    assert 1 < gb_s < 10_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_puts_out_what_the_network_does():
    asked = plan(device=torch.device("cuda"), runtimes=("cuda graph",), precision="float16")
    replay = prepare_step(all_microbenchmarks()[0], asked, "cuda graph", 2)
    assert replay is not None
    step, kept = replay()
    torch.testing.assert_close(kept, step())


@pytest.mark.slow
def test_the_command_writes_a_profile_that_estimates_read(tmp_path, monkeypatch, capsys):
    few = [
        design
        for design in all_microbenchmarks()
        if design.family in ("3x3", "depthwise", "elements", "other norms")
    ]
    monkeypatch.setattr(calibrate, "all_microbenchmarks", lambda: few)
    out = tmp_path / "mine.json"
    words = [
        "--device",
        "cpu",
        "--resolution",
        "64",
        "--batches",
        "1",
        "2",
        "--name",
        "mine",
        "--out",
        str(out),
    ]
    assert (
        cli.run(["measure", "calibrate", *words, "--times-out", str(tmp_path / "times.json")]) == 0
    )
    said = capsys.readouterr().out
    assert "% off for microbenchmarks of a family left out" in said
    profile = load_profile(out)
    assert (profile.name, profile.machine.runtime, profile.inference.networks) == (
        "mine",
        "eager",
        len(few),
    )
    assert f"{profile.inference.error:g} % off" in said
    rows = json.loads((tmp_path / "times.json").read_text())["times"]
    assert {(row["network"], row["batch"]) for row in rows} == {
        (design.name, n) for design in few for n in (1, 2)
    }
    assert all(row["wall_s"] > 0 and row["cpu_s"] > 0 for row in rows)
    clocks = profile.inference.clocks
    assert clocks is not None
    assert clocks.wall + clocks.cpu == len(rows)
    assert estimate(zoo.create("resnet18"), profile, 1).ms_per_image > 0
    assert cli.run(["measure", "estimate", "resnet18", "--target", str(out)]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--runtimes", "graph"), "cuda graphs are for GPUs"),
        (("--precision", "fp16"), "fp16 is for GPUs"),
        (("--batches", "0"), "batch 0"),
        (("--minutes", "0"), "above 0"),
        (("--resolution", "32"), "use 64 or more"),
        (("--name", "rtx3090"), "rtx3090 is a profile that comes with fullstride"),
        (("--name", "my\ngpu"), "use one line of text"),
        (("--out", "a.json", "--times-out", "a.json"), "a.json is the file of a profile"),
        (("--out", "."), ". is a folder"),
        (("--times-out", "/dev/null/times.json"), "/dev/null"),
    ],
)
def test_what_cannot_be_calibrated_or_kept_is_one_line_before_anything_is_measured(
    words, told, capsys, monkeypatch
):
    monkeypatch.setattr(calibrate, "measure", None)
    assert cli.run(["measure", "calibrate", "--device", "cpu", *words]) in (1, 2)
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1
