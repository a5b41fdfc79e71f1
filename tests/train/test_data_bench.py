"""`data bench` predicts how long training waits for images, and suggests what helps."""

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
from rectangles import write_rectangles

from fullstride import cli
from fullstride.data.dataset import DataSet, open_data
from fullstride.tasks.classify import Classify
from fullstride.train.batches import BatchOptions, training_batches
from fullstride.train.loop import Epoch, train_epochs
from fullstride.train.prepare import initial_network
from fullstride.train.recipes.named import DIGITS, FINETUNE
from fullstride.train.timing import DataBench, DataLoading, TrainingSteps, bench_data, long_side

RECIPE = replace(DIGITS, epochs=1, warmup_epochs=0, resolution=16, batch_size=16)
SLEEP_S = 0.02


@dataclass(frozen=True)
class Slow:
    """Reads like a slow disk: waiting needs no CPU time."""

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
) -> DataBench:
    """A measurement with these rates; one process decodes 100 images/s, and there are 8 cores."""
    loading = DataLoading(
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
    steps = TrainingSteps(batch=64, images_per_s=demand, samples=(demand,))
    return DataBench(loading=loading, steps=steps, device=device, cores=8, resolution=224)


def data_wait_fraction(data: DataSet, workers: int) -> float:
    """The fraction of a real epoch that waits for images, by the log of training."""
    net, pre = initial_network("genet_tiny", Classify(), data, RECIPE)
    batches = training_batches(data, Classify(), BatchOptions(pre, "cpu", workers), RECIPE)
    (epoch,) = train_epochs(net, Classify(), batches, RECIPE)
    assert isinstance(epoch, Epoch)
    return epoch.data_wait_fraction


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_disk_makes_the_network_wait_as_long_as_training_then_does(workers):
    data = slow()
    data = replace(
        data,
        train=data.train.subset(range(96)),
    )
    bench = bench_data("genet_tiny", data, RECIPE, workers=workers, seconds=1)
    assert 0.5 / SLEEP_S < bench.loading.images_per_s_alone < 1 / SLEEP_S
    assert bench.loading.images_per_cpu_s > 4 / SLEEP_S  # sleeping is free
    assert bench.loading.images_per_s < 1.1 * max(1, workers) / SLEEP_S
    assert bench.workers_needed == pytest.approx(bench.steps.images_per_s * SLEEP_S, rel=0.5, abs=1)
    assert bench.workers_needed > 2
    assert bench.cores_needed < bench.workers_needed
    assert bench.waiting == pytest.approx(data_wait_fraction(data, workers), abs=0.2)
    assert "will wait" in bench.verdict()


@pytest.mark.slow
def test_two_workers_are_twice_as_fast_on_a_slow_disk_and_rates_are_medians():
    bench = bench_data("genet_tiny", slow(), RECIPE, workers=2, seconds=1)
    loading, steps = bench.loading, bench.steps
    assert loading.images_per_s == pytest.approx(2 * loading.images_per_s_alone, rel=0.3)
    for rate, samples in (
        (loading.images_per_s, loading.samples),
        (loading.images_per_s_alone, loading.samples_alone),
        (loading.images_per_cpu_s, loading.samples_cpu),
        (steps.images_per_s, steps.samples),
    ):
        assert len(samples) >= 3
        assert rate == np.median(samples)
    assert (
        not multiprocessing.active_children()
    )  # they would disturb the steps that are measured next


@pytest.mark.slow
def test_blank_images_are_loaded_faster_than_a_network_trains():
    bench = bench_data("genet_tiny", reading(blank), replace(RECIPE, resolution=48), seconds=0.2)
    assert bench.ratio > 1
    assert bench.suggestions(DIGITS, from_files=True) == []
    assert "times as fast as" in bench.verdict()
    assert bench.loading.skipped == {}


def test_a_batch_larger_than_the_data_set_is_measured_as_it_trains():
    data = open_data("digits")
    few = replace(data, train=data.train.subset(range(5)))
    assert bench_data("genet_tiny", few, RECIPE, seconds=0.1).steps.batch == 5


@pytest.mark.parametrize(("supply", "demand"), [(57, 100), (50, 400), (100, 50)])
def test_a_gpu_waits_for_the_missing_images_and_a_single_cpu_process_for_all(supply, demand):
    beside = weighed(supply, demand, workers=1)
    assert beside.waiting == pytest.approx(max(0, 1 - supply / demand))
    in_turn = weighed(supply, demand, device="cpu")
    decode_s, step_s = 1 / supply, 1 / demand
    assert in_turn.waiting == pytest.approx(decode_s / (decode_s + step_s))


def test_the_verdict_has_the_ratio_or_what_is_missing():
    assert weighed(180, 100).verdict() == "data loading is 1.8 times as fast as the training steps"
    text = weighed(313, 550, workers=2, per_cpu_s=120).verdict()
    assert text.startswith("the GPU will wait 43 % of the time: it needs about 6 workers (have 2)")
    assert text.endswith("and 5 such cores (have 8)")


def test_more_workers_are_needed_where_several_slow_each_other_down():
    assert (
        weighed(120, 200, workers=2).workers_needed == 4
    )  # 60 images/s each: they get into each other's way
    assert weighed(800, 2000, workers=32).workers_needed == 20  # 8 cores keep 8 of them busy


def test_suggestions_are_options_that_are_not_used_the_cheapest_first():
    def suggestions(bench: DataBench, decoder="pillow", from_files=True) -> list[str]:
        recipe = replace(FINETUNE, decoder=decoder, rand_layers=2)
        return [
            option.split(":")[0].split(",")[0] for option in bench.suggestions(recipe, from_files)
        ]

    large = weighed(100, 550, long_side=4000)
    assert suggestions(large) == [
        "--workers 6",
        "--recipe.decoder opencv",
        "fullstride data pack --long-side 400",
    ]
    assert suggestions(weighed(800, 900, workers=8)) == ["--recipe.decoder opencv"]
    assert suggestions(weighed(800, 2000, workers=8), decoder="opencv") == []  # no core is left
    assert suggestions(weighed(100, 2000), from_files=False) == ["--workers 8"]
    assert suggestions(weighed(800, 2000, workers=8, per_cpu_s=1000), from_files=False) == [
        "--workers 20"
    ]  # a slow disk
    assert suggestions(weighed(600, 550, long_side=4000)) == []


def test_the_long_side_is_that_of_readable_images_from_the_whole_data_set(tmp_path):
    for name, side in (("a", 30), ("b", 70)):
        for part in ("train", "val"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(20):
                color = (number, side, len(part))
                Image.new("RGB", (20, side), color).save(tmp_path / part / name / f"{number}.png")
    (tmp_path / "train/a/0.png").write_bytes(b"")
    images = open_data(str(tmp_path)).train
    assert long_side(images) in (30, 50, 70)
    only_b = replace(images, names=tuple(n for n in images.names if "/b/" in n), targets=(1,) * 20)
    assert long_side(only_b) == 70


def test_the_command_prints_the_table_and_the_verdict_and_writes_all_samples(tmp_path, capsys):
    out = tmp_path / "new" / "bench.json"
    words = [
        "data",
        "bench",
        "digits",
        "--model",
        "genet_tiny",
        "--recipe.resolution",
        "16",
        "--recipe.batch-size",
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
    for text in (
        "decoding with --workers 1",
        "training steps of 32 at 16 pixels",
        "without the teacher nobody",
    ):
        assert text in printed
    assert (
        saved["recipe"]["rotation_degrees"] == DIGITS.rotation_degrees
    )  # the digits' own recipe, as in train
    assert (saved["recipe"]["batch_size"], saved["steps"]["batch"]) == (32, 32)
    assert saved["loading"]["images_per_s"] == np.median(saved["loading"]["samples"])
    assert math.isfinite(saved["waiting"])
    assert saved["environment"]["torch"] == torch.__version__
    assert [path.name for path in out.parent.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model", "genet_tinny"], "genet_tinny"),
        (["--model", "genet_tiny", "--workers", "-1"], "workers -1"),
        (["--model", "genet_tiny", "--seconds", "0"], "seconds 0"),
        (["--model", "genet_tiny", "--device", "tpu"], "tpu"),
        (["--model", "genet_tiny", "--recipe", "nonsense"], "nonsense"),
        (["--model", "genet_tiny", "--recipe.batch-size", "0"], "batch_size 0"),
        (
            [
                *[
                    "--model",
                    "genet_tiny",
                    "--recipe.precision",
                    "bf16",
                    "--recipe.channels-last",
                    "True",
                ]
            ],
            "not reliable on a CPU",
        ),
    ],
)
def test_bad_input_exits_2_with_one_line_before_anything_is_measured(words, text, capsys):
    began = time.process_time()
    assert cli.run(["data", "bench", "digits", "--device", "cpu", *words]) == 2
    assert time.process_time() - began < 5
    error = capsys.readouterr().err.strip()
    assert error.startswith("fullstride: ")
    assert text in error
    assert len(error.splitlines()) == 1


def test_missing_images_are_refused_in_one_line(tmp_path, capsys):
    assert cli.run(["data", "bench", str(tmp_path / "nowhere"), "--model", "genet_tiny"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_task_is_that_of_the_data(tmp_path, capsys):
    boxes = str(write_rectangles(tmp_path / "boxes", {"train": 8, "val": 4, "test": 4}, 64))
    words = ["data", "bench", boxes, "--model", "genet_tiny", "--workers", "0", "--seconds", "0.1"]
    out = tmp_path / "bench.json"
    assert cli.run([*words, "--device", "cpu", "--out", str(out)]) == 0
    assert "the task is detect" in capsys.readouterr().err
    assert json.loads(out.read_text())["resolution"] == 64  # that in which boxes can be learned
