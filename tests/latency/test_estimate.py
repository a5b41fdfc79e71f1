"""Estimates as a user asks for them: what the model says of the real module, in words or JSON, or
one line."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from pages import code

from fullstride import cli, zoo
from fullstride.latency.devices import load_profile, profile_names
from fullstride.latency.estimator import estimate
from fullstride.latency.profiles import PROFILE
from fullstride.nets.bundle import Bundle
from fullstride.report.console_tables import three_digits


def test_the_python_of_the_page_prints_a_time_inside_of_its_interval(capsys):
    (text,) = code("docs/guides/latency.md")
    exec(text, {})
    middle, low, high = map(float, capsys.readouterr().out.split()[:3])
    assert low < middle < high


def ask(capsys, *words: str) -> str:
    assert cli.run(["measure", "estimate", *words]) == 0
    return capsys.readouterr().out


def refuse(capsys, *words: str) -> str:
    assert cli.run(["measure", "estimate", *words]) == 2
    out, line = capsys.readouterr()
    assert not out
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize(("name", "side"), [("genet_large", 256), ("timm/mobilenetv2_050", 224)])
def test_the_command_says_what_the_model_says_of_the_real_module(name, side, capsys):
    (told,) = json.loads(
        ask(capsys, name, "--target", "v100-fp16", "--call-batch", "16", "--json")
    )["estimates"]
    there = estimate(zoo.create(name), load_profile("v100-fp16"), 16, side)
    assert told["resolution"] == side
    for key in ("ms_per_image", "low", "high", "device_ms", "host_ms", "images_per_s"):
        assert told[key] == pytest.approx(getattr(there, key), rel=1e-9)
    assert told["bound"] == there.bound


def test_one_network_is_told_with_its_interval_its_bound_and_the_profile_behind_it(capsys):
    told = ask(capsys, "genet_light", "--target", "v100-fp16", "--call-batch", "1")
    profile = load_profile("v100-fp16")
    there = estimate(zoo.create("genet_light"), profile, 1, 192)
    assert f"{three_digits(there.ms_per_image)} ms/image" in told
    assert f"90 % interval {three_digits(there.low)} to {three_digits(there.high)} ms" in told
    assert f"bounded by {there.bound}" in told
    assert f"{profile.inference.error:g} % off" in told
    assert profile.inference.source in told


def test_several_networks_stand_fastest_first_and_those_too_close_to_tell_apart_are_ties(capsys):
    asked = ("resnet152", "genet_light", "resnet50", "resnet50d")
    told = json.loads(ask(capsys, *asked, "--target", "rtx3090", "--json"))
    rows, apart = told["estimates"], told["profile"]["inference"]["resolvable_ratio"]
    times = {row["network"]: row["ms_per_image"] for row in rows}
    assert list(times) == sorted(asked, key=times.get)
    for row in rows:
        near = {
            o
            for o, ms in times.items()
            if max(ms / times[row["network"]], times[row["network"]] / ms) < apart
        }
        assert set(row["ties"]) == near - {row["network"]}
    assert {"resnet50", "resnet50d"} <= {name for row in rows for name in row["ties"]}
    table = ask(capsys, *asked, "--target", "rtx3090").splitlines()
    ties = {words[1]: words[-3:] for words in map(str.split, table[1:5])}
    assert ties["resnet50"] == ties["resnet50d"] == ["2", "to", "3"]


def test_a_training_step_takes_longer_and_is_refused_where_the_profile_has_none(capsys):
    asked = ("resnet50", "--target", "rtx3090")
    one, step = (
        json.loads(ask(capsys, *asked, "--json", *more))["estimates"][0]
        for more in ((), ("--train",))
    )
    assert step["work"] == "training"
    assert step["ms_per_image"] > 2 * one["ms_per_image"]
    assert step["ms_per_image"] < 10 * one["ms_per_image"]
    text = ask(capsys, *asked, "--train")
    assert "channels-last" in text
    assert "25 %" in text
    assert "channels-last" not in ask(capsys, *asked)
    assert "no training steps" in refuse(capsys, "resnet50", "--target", "v100-fp16", "--train")


def test_a_profile_may_be_a_file_and_a_bundle_a_network(tmp_path, capsys):
    known = load_profile("v100-fp16")
    slow = replace(
        known, machine=replace(known.machine, peak_tflops=known.machine.peak_tflops / 1e3)
    )
    PROFILE.save(tmp_path / "slow.json", slow)
    asked = ("resnet18", "--target", str(tmp_path / "slow.json"), "--call-batch", "64")
    told = json.loads(ask(capsys, *asked, "--json"))["estimates"][0]
    here = estimate(zoo.create("resnet18"), known, 64, 224)
    assert told["ms_per_image"] > 50 * here.ms_per_image
    assert told["bound"] == "arithmetic"
    net = zoo.create("genet_tiny", in_channels=1, resolution=48)
    labels, pixels = tuple(map(str, range(10))), zoo.family_preprocessing(net.spec)
    Bundle(net=net, name="gray", classes=labels, preprocessing=pixels).save(tmp_path / "gray")
    told = json.loads(ask(capsys, str(tmp_path / "gray"), "--target", "v100-fp16", "--json"))[
        "estimates"
    ][0]
    assert told["resolution"] == 48
    assert told["ms_per_image"] == pytest.approx(
        estimate(net, known, 1, 48, in_channels=1).ms_per_image, rel=1e-9
    )


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_of_the_package_estimates_and_says_where_it_is_from(name, capsys):
    told = ask(capsys, "resnet18", "--target", name)
    assert load_profile(name).inference.source in told
    assert ("not measured" in told) != load_profile(name).measured


def test_what_cannot_be_estimated_is_one_line_that_says_what_would_work(capsys):
    assert "did you mean" in refuse(capsys, "resnet50", "--target", "v100")
    assert all(name in refuse(capsys, "resnet50", "--target", "!!") for name in profile_names())
    assert "did you mean resnet50" in refuse(capsys, "resnet5", "--target", "h100")
    assert "batch 0" in refuse(capsys, "resnet50", "--target", "h100", "--call-batch", "0")
    assert "resolution 0" in refuse(capsys, "resnet50", "--target", "h100", "--resolution", "0")
    assert "resolution 100000000000: use" in refuse(
        capsys, "timm/resnet18", "--target", "h100", "--resolution", "100000000000"
    )
    assert "to 65536" in refuse(capsys, "resnet50", "--target", "h100", "--call-batch", "10" * 20)
    assert "name one or more" in refuse(capsys, "--target", "h100")


@pytest.mark.parametrize("more", [(), ("--train", "--json"), ("--resolution", "288")])
def test_names_that_the_package_knows_the_operators_of_need_no_pytorch(more):
    names = ["timm/resnet50", "timm/resnet50.a1_in1k"]
    names += [] if "--resolution" in more else ["genet_large", "resnet50"]
    words = ["measure", "estimate", *names, "--target", "rtx3090", *more]
    program = f"""
import resource, sys
from fullstride import cli
assert cli.run({words!r}) == 0
used = resource.getrusage(resource.RUSAGE_SELF)
assert not {{"torch", "timm"}} & set(sys.modules)
assert used.ru_utime + used.ru_stime < 2
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in names)


def test_a_name_that_is_a_folder_too_is_the_folder(tmp_path, monkeypatch, capsys):
    net = zoo.create("genet_tiny", classes=10, in_channels=1)
    bundle = Bundle(
        net,
        name="mine",
        classes=tuple("0123456789"),
        preprocessing=zoo.family_preprocessing(net.spec),
    )
    bundle.save(tmp_path / "resnet50")
    monkeypatch.chdir(tmp_path)
    (told,) = json.loads(ask(capsys, "resnet50", "--target", "rtx3090", "--json"))["estimates"]
    assert told["resolution"] == net.spec.resolution
    there = estimate(net, load_profile("rtx3090"), 1, net.spec.resolution, in_channels=1)
    assert told["ms_per_image"] == pytest.approx(there.ms_per_image)
