"""A GPU by its data sheet: numbers that move, kind errors, and times that correct the scale."""

import json
import math
from dataclasses import replace

import pytest

from fullstride.cli import run
from fullstride.latency.device_sheets import (
    BASES,
    FLOPS_PER_BYTE,
    DeviceSheet,
    MeasuredTime,
    corrected,
    device_spread,
    moved_numbers,
    sustained_clock,
)
from fullstride.latency.devices import correct, estimate_by_name, load_profile
from fullstride.latency.roofline import DEVICE

SHEET = dict(device="NVIDIA RTX 3090", tflops={"fp16": 71}, vector_tflops=35.6, bandwidth_gb_s=936)
BASIS = load_profile("rtx3090")


def written(path, **changes):
    path.write_text(json.dumps({**SHEET, **changes}))
    return path


def test_the_sheet_of_a_measured_gpu_alone_gives_its_own_numbers():
    moved = moved_numbers(BASIS.inference.numbers, BASIS.machine, BASIS.machine)
    assert moved == pytest.approx(BASIS.inference.numbers)


def test_numbers_are_the_geometric_mean_of_those_of_the_measured_gpus(tmp_path):
    profile = load_profile(written(tmp_path / "same.json"))
    ours, other = (load_profile(name) for name in BASES["eager", "nhwc", "fp16"])
    moved = moved_numbers(other.inference.numbers, other.machine, ours.machine)
    for name, value in profile.inference.numbers.items():
        expected = math.sqrt(ours.inference.numbers[name] * moved[name])
        assert value == pytest.approx(expected, rel=1e-3), name
    assert not profile.measured
    assert profile.name == "same"


def test_depthwise_rates_move_with_the_cores_that_run_them():
    """Tensor cores do not: A100, H100 and H200 have 4 to 14 times those of an RTX 3090."""
    rate = BASIS.inference.numbers["depthwise"] * BASIS.machine.peak_tflops
    for name, vector in (("a100", 19.5), ("h100", 67), ("h200", 67)):
        machine = load_profile(name).machine
        moved = moved_numbers(BASIS.inference.numbers, BASIS.machine, machine)
        assert moved["depthwise"] * machine.peak_tflops == pytest.approx(rate * vector / 35.6)
    without = replace(BASIS.machine, vector_tflops=None, bandwidth_gb_s=5000)
    kept = moved_numbers(BASIS.inference.numbers, BASIS.machine, without)
    assert kept == pytest.approx(BASIS.inference.numbers)


def test_element_wise_operators_take_time_on_the_cores_too():
    machine = load_profile("a100").machine

    def seconds_of_a_gigabyte(machine, share):
        memory = 1 / machine.bandwidth_gb_s
        cores = FLOPS_PER_BYTE * 1e9 / (machine.vector_tflops * 1e12)
        return math.hypot(memory, cores), memory / share

    (here, _), (there, _) = (seconds_of_a_gigabyte(m, 1) for m in (BASIS.machine, machine))
    own = BASIS.inference.numbers
    moved = moved_numbers(own, BASIS.machine, machine)
    for name in ("elementwise", "statistics", "gather"):
        took = 1 / (BASIS.machine.bandwidth_gb_s * own[name])
        takes = 1 / (machine.bandwidth_gb_s * moved[name])
        assert takes / took == pytest.approx(there / here), name
    assert moved["convolution"] == own["convolution"]


def test_a_power_limit_slows_arithmetic_by_the_clock_that_it_sustains_and_not_memory():
    assert sustained_clock(300, 600) == pytest.approx(0.5 ** (1 / 3), abs=1e-3)
    assert sustained_clock(700, 600) == 1
    limited = moved_numbers(
        BASIS.inference.numbers, BASIS.machine, replace(BASIS.machine, clock_share=0.79)
    )
    for name, value in BASIS.inference.numbers.items():
        slower = 0.79 if name in ("dense", "1x1", "depthwise") else 1
        assert limited[name] == pytest.approx(slower * value)
    for name in ("l4", "a10", "t4"):
        assert load_profile(name).machine.clock_share < 0.9
    clocks = dict(boost_mhz=2000, sustained_mhz=1500, watts=100, needed_watts=800)
    assert DeviceSheet(**SHEET, **clocks).clock_share == 0.75


def test_devices_unlike_the_measured_ones_have_wider_intervals():
    a100, l40s = (
        load_profile("a100"),
        DeviceSheet(device="L40S", tflops={"fp16": 362}, vector_tflops=91.6, bandwidth_gb_s=864),
    )
    assert a100.inference.spreads[DEVICE] > 0.3
    near = replace(BASIS.machine, peak_tflops=2 * BASIS.machine.peak_tflops, vector_tflops=71.2)
    assert device_spread(BASIS.machine, near) == pytest.approx(0.05)
    far = replace(BASIS.machine, peak_tflops=l40s.tflops["fp16"], vector_tflops=91.6)
    assert device_spread(BASIS.machine, far) > 0.08


def test_the_times_of_a_launch_may_stand_on_the_sheet(tmp_path):
    path = written(tmp_path / "mine.json", launch_us=2, host_us=7.5)
    own = load_profile(path)
    numbers = own.inference.numbers
    assert (numbers["launch_us"], numbers["host_us"]) == (2, 7.5)
    assumed = load_profile(written(tmp_path / "other.json"))
    widths = [
        row.estimate.high / row.estimate.low
        for profile in (own, assumed)
        for row in estimate_by_name(["resnet50"], profile, 1)
    ]
    assert widths[0] < widths[1] / 2
    reasons = [
        estimate_by_name(["resnet50"], profile, 1)[0].estimate.unfitted
        for profile in (own, assumed)
    ]
    assert reasons == [(), ("batches this small",)]


@pytest.mark.parametrize(
    ("runtime", "layout", "precision"), [("compiled", "nchw", "fp16"), ("tensorrt", "", "int8")]
)
def test_each_runtime_has_profiles_of_its_own(runtime, layout, precision, tmp_path):
    form = dict(runtime=runtime, layout=layout, precision=precision)
    path = written(tmp_path / "mine.json", tflops={"fp16": 71, "int8": 284}, **form)
    profile = load_profile(path)
    assert profile.machine.runtime == runtime
    assert profile.machine.peak_tflops == (284 if precision == "int8" else 71)
    assert BASES[runtime, layout, precision][0] in profile.note


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(tflops={"int8": 284}), "tflops lacks fp16"),
        (dict(tflops={"fp8": 284}), "fp8"),
        (dict(tflops={"fp16": -1}), "-1"),
        (dict(bandwidth_gb_s="fast"), "bandwidth_gb_s is 'fast'"),
        (dict(layout="nchw", runtime="cuda graph"), "no GPU was measured with cuda graph"),
        (dict(colour="green"), "'colour'"),
        (dict(device="a\nb"), "use one line"),
        (dict(watts=0), "watts"),
        (dict(needed_watts=600), "needed_watts 600 without watts"),
        (dict(boost_mhz=2500), "boost_mhz and sustained_mhz"),
        (dict(sustained_mhz=2500), "boost_mhz and sustained_mhz"),
        (dict(boost_mhz=2.5, sustained_mhz=2.2), "boost_mhz is 2.5"),  # GHz
        (dict(bandwidth_gb_s=0.864), "bandwidth_gb_s is 0.864"),  # TB/s
        (dict(tflops={"fp16": 362e12}), "tflops.*fp16"),  # FLOPS
        (dict(runtime="tensorrt"), 'tensorrt, layout "", fp16'),
        (dict(vector_tflops=None), "vector_tflops"),
    ],
)
def test_a_bad_sheet_is_one_line(changes, says, tmp_path):
    with pytest.raises(ValueError, match=says) as error:
        load_profile(written(tmp_path / "bad.json", **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", SHEET)
def test_a_sheet_that_lacks_a_field_is_told_which(missing, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({key: value for key, value in SHEET.items() if key != missing}))
    with pytest.raises(ValueError, match=f"bad.json lacks {missing}$"):
        load_profile(path)


@pytest.mark.parametrize(
    ("tflops", "vector", "bandwidth", "watts", "mhz"),
    [(0.1, 1e5, 10, 1, 100), (1e5, 0.1, 1e5, 1e4, 1e4)],
)
def test_the_ends_of_what_a_sheet_may_say_give_a_profile(
    tflops, vector, bandwidth, watts, mhz, tmp_path
):
    rates = dict(tflops={"fp16": tflops}, vector_tflops=vector, bandwidth_gb_s=bandwidth)
    for limit in (
        dict(watts=watts, needed_watts=1e4),
        dict(sustained_mhz=mhz, boost_mhz=1e4, launch_us=0.01, host_us=1e4),
    ):
        profile = load_profile(written(tmp_path / "far.json", **rates, **limit))
        (row,) = estimate_by_name(["resnet50"], profile, 1)
        assert 0 < row.estimate.low < row.estimate.ms_per_image < row.estimate.high < math.inf


def times_csv(path, factor: float, names=("resnet50", "timm/efficientnet_b0", "timm/densenet121")):
    rows = estimate_by_name(names, BASIS, 64, 224)
    lines = [f"{r.network},224,64,{r.estimate.ms_per_image * factor}" for r in rows]
    path.write_text("\n".join(["model,img_size,batch,ms_per_image", *lines]))
    return path


@pytest.mark.parametrize("factor", [0.5, 1.7])
def test_measured_times_correct_the_scale_of_all_others(factor, tmp_path):
    profile = correct(BASIS, times_csv(tmp_path / "times.csv", factor))
    for batch in (1, 128):
        before, after = (estimate_by_name(["tresnet_m"], p, batch)[0] for p in (BASIS, profile))
        ratio = after.estimate.ms_per_image / before.estimate.ms_per_image
        assert ratio == pytest.approx(factor, rel=2e-3)
    assert f"multiplied by {factor:.3g}" in profile.note


def test_the_median_of_measured_times_counts_and_more_of_them_narrow_the_interval():
    (row,) = estimate_by_name(["resnet50"], load_profile("a100"), 64)
    own = row.estimate

    def by(*factors):
        measured = [
            MeasuredTime(
                network=f"network {number}",
                resolution=224,
                batch=64,
                ms_per_image=own.ms_per_image * factor,
            )
            for number, factor in enumerate(factors)
        ]
        profile = corrected(load_profile("a100"), measured, [own] * len(measured))
        return estimate_by_name(["resnet50"], profile, 64)[0].estimate

    assert by(1.2, 1.3, 5).ms_per_image == pytest.approx(1.3 * own.ms_per_image, rel=2e-3)
    widths = [e.high / e.low for e in (own, by(1.2), by(1.2, 1.2, 1.2))]
    assert widths[0] > widths[1] > widths[2]


def measured_at(batch, profile, **factors):
    """The times by `profile` at a batch size, each multiplied by a factor of its own."""
    names = [name.replace("__", "/") for name in factors]
    rows = [estimate_by_name([name], profile, batch, 224)[0].estimate for name in names]
    times = [row.ms_per_image * factor for row, factor in zip(rows, factors.values(), strict=True)]
    return [
        MeasuredTime(network=name, resolution=224, batch=batch, ms_per_image=ms)
        for name, ms in zip(names, times, strict=True)
    ], rows


def test_a_network_that_was_measured_often_counts_once():
    once, own = measured_at(64, BASIS, resnet50=1.2)
    assert corrected(BASIS, once * 9, own * 9) == corrected(BASIS, once, own)
    others, theirs = measured_at(64, BASIS, resnet18=2, tresnet_m=2)
    assert "multiplied by 2, from 3" in corrected(BASIS, once * 9 + others, own * 9 + theirs).note


def test_times_that_the_host_bounds_correct_the_host_alone():
    factors = dict(resnet50=0.4, timm__efficientnet_b0=0.4, resnet18=0.4)
    profile = corrected(BASIS, *measured_at(1, BASIS, **factors))
    (small, large), (small_before, large_before) = (
        [estimate_by_name(["tresnet_m"], each, batch)[0].estimate for batch in (1, 128)]
        for each in (profile, BASIS)
    )
    assert small.host_ms == pytest.approx(0.4 * small_before.host_ms, rel=1e-3)
    assert small.high / small.low < small_before.high / small_before.low / 2
    assert not small.unfitted
    assert large.ms_per_image == pytest.approx(large_before.ms_per_image, rel=0.05)
    assert large.device_ms == large_before.device_ms


def test_measured_times_of_inference_do_not_correct_training_steps(tmp_path, capsys):
    measured = ["--measured", str(times_csv(tmp_path / "times.csv", 1.5))]
    assert (
        run(["measure", "estimate", "resnet50", "--target", "rtx3090", "--train", *measured]) == 2
    )
    assert "--measured has times of inference" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no line below its header"),
        ("model,img_size,batch,ms_per_image\n", "no line below its header"),
        ("model,img_size,batch\nresnet50,224,64\n", "lacks 'ms_per_image'.*columns model"),
        ("model,img_size,batch,ms_per_image\nresnet50,224,64\n", "line 2.*convert"),
        ("model,img_size,batch,ms_per_image\n,224,64,1\n", "line 2.*no model"),
        ("model,img_size,batch,ms_per_image\nresnet50,224,64,fast\n", "line 2.*fast"),
        ("model,img_size,batch,ms_per_image\nresnet50,224,64,-1\n", "line 2.*-1"),
        ("model,img_size,batch,images_per_s\nresnet50,224,64,0\n", "line 2.*a rate above 0"),
        ("model,img_size,batch,ms_per_image\nresnet50,224,0,1\n", "line 2.*batch"),
        ("model,img_size,batch,ms_per_image\nresnet50,224,70000,1\n", "line 2.*batch 70000"),
        ("model,img_size,batch,ms_per_image\nresnet51,224,64,1\n", "times.csv: .*resnet51"),
        ("model,img_size,batch,ms_per_image\nresnet50,224,64,250\n", "250 ms.*check the unit"),
        ("model\n" + "x" * 200_000, "100,000 bytes"),
    ],
)
def test_a_bad_table_of_times_is_one_line(content, says, tmp_path):
    path = tmp_path / "times.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=says) as error:
        correct(BASIS, path)
    assert "\n" not in str(error.value)


def test_a_rate_may_stand_in_place_of_a_time(tmp_path):
    path = times_csv(tmp_path / "times.csv", 1.5)
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    rates = [f"{name},{side},{batch},{1e3 / float(ms)}" for name, side, batch, ms in rows]
    path.write_text("\n".join(["model,img_size,batch,images_per_s", *rates]))
    assert "multiplied by 1.5" in correct(BASIS, path).note


def test_the_command_estimates_and_chooses_by_a_sheet(tmp_path, capsys):
    sheet = str(written(tmp_path / "mine.json"))
    measured = str(times_csv(tmp_path / "times.csv", 1.5))
    assert (
        run(
            [
                "measure",
                "estimate",
                "resnet50",
                "--device-sheet",
                sheet,
                "--call-batch",
                "64",
                "--json",
            ]
        )
        == 0
    )
    plain = json.loads(capsys.readouterr().out)["estimates"][0]
    words = ["--device-sheet", sheet, "--measured", measured, "--call-batch", "64", "--json"]
    assert run(["measure", "estimate", "resnet50", *words]) == 0
    better = json.loads(capsys.readouterr().out)["estimates"][0]
    assert better["ms_per_image"] > plain["ms_per_image"]
    assert run(["choose", *words, "--budget-ms", "1", "--from", "ours"]) == 0
    chosen = json.loads(capsys.readouterr().out)
    assert chosen["profile"]["name"] == "mine"
    assert chosen["best"]["ms_per_image"] <= 1


@pytest.mark.parametrize("words", [[], ["--target", "a100", "--device-sheet", "x.json"]])
def test_one_device_is_named(words, capsys):
    assert run(["measure", "estimate", "resnet50", *words]) == 2
    assert "--device-sheet" in capsys.readouterr().err
