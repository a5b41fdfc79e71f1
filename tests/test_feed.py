"""Does `bench-data` say what training then meets, and name what would help?"""

import json
import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image

from fullstride import cli
from fullstride.data.dataset import DataSet, open_data
from fullstride.tasks.classify import Classify
from fullstride.train.batches import training_batches
from fullstride.train.data_bench import Balance, Feed, Steps, balance, long_side
from fullstride.train.loop import Epoch, train_epochs
from fullstride.train.recipes import DIGITS, FINETUNE
from fullstride.train.run import initial_network

RECIPE = replace(DIGITS, epochs=1, warmup_epochs=0, resolution=16, batch=16)
SLEEP_S = 0.02


@dataclass(frozen=True)
class Slow:
    """Reads as a far-away disk does: waiting costs no CPU time."""

    read: Callable[[str], Image.Image]

    def __call__(self, name: str) -> Image.Image:
        time.sleep(SLEEP_S)
        return self.read(name)


def blank(_: str) -> Image.Image:
    return Image.new("L", (8, 8))


def reading(read: Callable[[str], Image.Image]) -> DataSet:
    data = open_data("digits")
    return replace(data, train=replace(data.train, read=read))


def slow() -> DataSet:
    return reading(Slow(open_data("digits").train.read))


def weighed(
    supply: float,
    demand: float,
    *,
    workers: int = 0,
    per_cpu_s: float = 100,
    device: str = "cuda",
    long_side: int = 100,
) -> Balance:
    """What a measurement of these rates would give, where one process decodes 100 images/s and 8 cores are here."""
    feed = Feed(
        workers=workers,
        images_per_s=supply,
        images_per_s_alone=100,
        images_per_cpu_s=per_cpu_s,
        long_side=long_side,
        samples=(supply,),
        samples_alone=(100.0,),
        samples_cpu=(per_cpu_s,),
        skipped={},
    )
    steps = Steps(batch=64, images_per_s=demand, samples=(demand,))
    return Balance(feed=feed, steps=steps, device=device, cores=8, resolution=224)


def data_share(data: DataSet, workers: int) -> float:
    """What a real epoch waits for images, by the log of training."""
    net, pre = initial_network("genet_tiny", Classify(), data, RECIPE)
    batches = training_batches(data, Classify(), pre, RECIPE, "cpu", workers)
    (epoch,) = train_epochs(net, Classify(), batches, RECIPE)
    assert isinstance(epoch, Epoch)
    return epoch.data_share


@pytest.mark.parametrize("workers", [0, 2])
def test_images_that_come_slowly_starve_the_network_by_as_much_as_training_then_waits(workers):
    data = slow()
    data = replace(
        data,
        train=data.train.subset(range(96)),
    )
    found = balance("genet_tiny", data, RECIPE, workers=workers, seconds=1)
    assert 0.5 / SLEEP_S < found.feed.images_per_s_alone < 1 / SLEEP_S
    assert found.feed.images_per_cpu_s > 4 / SLEEP_S  # sleeping is free
    assert found.feed.images_per_s < 1.1 * max(1, workers) / SLEEP_S
    assert found.workers_needed == pytest.approx(found.steps.images_per_s * SLEEP_S, rel=0.5, abs=1)
    assert found.workers_needed > 2
    assert found.cores_needed < found.workers_needed
    assert found.waiting == pytest.approx(data_share(data, workers), abs=0.2)
    assert "will wait" in found.verdict()


def test_two_workers_bring_twice_as_much_of_what_is_waited_for_and_rates_are_medians():
    found = balance("genet_tiny", slow(), RECIPE, workers=2, seconds=1)
    feed, steps = found.feed, found.steps
    assert feed.images_per_s == pytest.approx(2 * feed.images_per_s_alone, rel=0.3)
    for rate, samples in (
        (feed.images_per_s, feed.samples),
        (feed.images_per_s_alone, feed.samples_alone),
        (feed.images_per_cpu_s, feed.samples_cpu),
        (steps.images_per_s, steps.samples),
    ):
        assert len(samples) >= 3
        assert rate == np.median(samples)
    assert (
        not multiprocessing.active_children()
    )  # they would disturb the steps that are measured next


def test_a_source_without_pictures_feeds_a_network_that_takes_its_time():
    found = balance("genet_tiny", reading(blank), replace(RECIPE, resolution=48), seconds=0.2)
    assert found.ratio > 1
    assert found.levers(DIGITS, from_files=True) == []
    assert "times what the network eats" in found.verdict()
    assert found.feed.skipped == {}


def test_a_batch_of_more_images_than_there_are_is_measured_as_training_would_take_it():
    data = open_data("digits")
    few = replace(data, train=data.train.subset(range(5)))
    assert balance("genet_tiny", few, RECIPE, seconds=0.1).steps.batch == 5


@pytest.mark.parametrize(("supply", "demand"), [(57, 100), (50, 400), (100, 50)])
def test_the_gpu_waits_for_what_is_missing_and_a_cpu_alone_for_every_image(supply, demand):
    beside = weighed(supply, demand, workers=1)
    assert beside.waiting == pytest.approx(max(0, 1 - supply / demand))
    in_turn = weighed(supply, demand, device="cpu")
    decode_s, step_s = 1 / supply, 1 / demand
    assert in_turn.waiting == pytest.approx(decode_s / (decode_s + step_s))


def test_the_verdict_says_by_how_much_and_what_is_needed():
    assert weighed(180, 100).verdict() == "the data path brings 1.8 times what the network eats"
    said = weighed(313, 550, workers=2, per_cpu_s=120).verdict()
    assert said.startswith("the GPU will wait 43 % of the time: it needs about 6 workers (have 2)")
    assert said.endswith("the time of 5 such cores (have 8)")


def test_who_waits_with_workers_on_idle_cores_needs_more_of_them():
    assert (
        weighed(120, 200, workers=2).workers_needed == 4
    )  # 60 images/s each: they get into each other's way
    assert weighed(800, 2000, workers=32).workers_needed == 20  # 8 cores keep 8 of them busy


def test_the_levers_are_those_not_yet_used_in_order():
    def levers(found: Balance, decoder="pillow", from_files=True) -> list[str]:
        recipe = replace(FINETUNE, decoder=decoder, rand_layers=2)
        return [lever.split(":")[0].split(",")[0] for lever in found.levers(recipe, from_files)]

    large = weighed(100, 550, long_side=4000)
    assert levers(large) == [
        "--workers 6",
        "--recipe.decoder opencv",
        "fullstride pack --long-side 400",
    ]
    assert levers(weighed(800, 900, workers=8)) == ["--recipe.decoder opencv"]
    assert levers(weighed(800, 2000, workers=8), decoder="opencv") == []  # no core is left
    assert levers(weighed(100, 2000), from_files=False) == ["--workers 8"]
    assert levers(weighed(800, 2000, workers=8, per_cpu_s=1000), from_files=False) == [
        "--workers 20"
    ]  # a slow disk
    assert levers(weighed(600, 550, long_side=4000)) == []


def test_the_long_side_is_of_readable_pictures_spread_over_the_data(tmp_path):
    for name, side in (("a", 30), ("b", 70)):
        for part in ("train", "val"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(20):
                Image.new("RGB", (20, side)).save(tmp_path / part / name / f"{number}.png")
    (tmp_path / "train/a/0.png").write_bytes(b"")
    images = open_data(str(tmp_path)).train
    assert long_side(images) in (30, 50, 70)
    only_b = replace(images, names=tuple(n for n in images.names if "/b/" in n), targets=(1,) * 20)
    assert long_side(only_b) == 70


def test_the_command_prints_the_table_and_the_verdict_and_writes_all_samples(tmp_path, capsys):
    out = tmp_path / "new" / "feed.json"
    words = [
        "bench-data",
        "digits",
        "--model",
        "genet_tiny",
        "--recipe.resolution",
        "16",
        "--recipe.batch",
        "32",
    ]
    words += [
        "--workers",
        "1",
        "--seconds",
        "0.2",
        "--device",
        "cpu",
        "--recipe.teacher",
        "nobody",
        "--out",
        str(out),
    ]
    assert cli.run(words) == 0
    printed = capsys.readouterr().out
    saved = json.loads(out.read_text())
    assert saved["verdict"] in " ".join(printed.split())
    for said in (
        "decoding with --workers 1",
        "training steps of 32 at 16 pixels",
        "without the teacher nobody",
    ):
        assert said in printed
    assert (
        saved["recipe"]["rotation_degrees"] == DIGITS.rotation_degrees
    )  # the digits' own recipe, as in train
    assert (saved["recipe"]["batch"], saved["steps"]["batch"]) == (32, 32)
    assert saved["feed"]["images_per_s"] == np.median(saved["feed"]["samples"])
    assert math.isfinite(saved["waiting"])
    assert saved["environment"]["torch"] == torch.__version__
    assert [path.name for path in out.parent.iterdir()] == ["feed.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "genet_tinny"], "genet_tinny"),
        (["--model", "genet_tiny", "--workers", "-1"], "workers -1"),
        (["--model", "genet_tiny", "--seconds", "0"], "seconds 0"),
        (["--model", "genet_tiny", "--device", "tpu"], "tpu"),
        (["--model", "genet_tiny", "--recipe", "nonsense"], "nonsense"),
        (["--model", "genet_tiny", "--recipe.batch", "0"], "batch 0"),
        (
            ["--model", "genet_tiny", "--recipe.precision", "bf16", "--recipe.channels-last"],
            "not reliable on a CPU",
        ),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2_before_anything_is_measured(words, said, capsys):
    began = time.perf_counter()
    assert cli.run(["bench-data", "digits", "--device", "cpu", *words]) == 2
    assert time.perf_counter() - began < 5
    error = capsys.readouterr().err.strip()
    assert error.startswith("fullstride: ")
    assert said in error
    assert len(error.splitlines()) == 1


def test_images_that_are_not_there_are_refused_in_one_line(tmp_path, capsys):
    assert cli.run(["bench-data", str(tmp_path / "nowhere"), "--model", "genet_tiny"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
