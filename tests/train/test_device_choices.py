"""What a recipe leaves to the machine: precision, memory format and workers."""

import copy
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from fullstride.data.dataset import open_data
from fullstride.io.writing import OutOfMemoryError, cores
from fullstride.measure import environment, max_batch
from fullstride.measure.activation_bytes import activation_bytes
from fullstride.nets import zoo
from fullstride.nets.layers import SubsampledConv2d, avoid_strided_pointwise
from fullstride.report.training_progress import plan_lines
from fullstride.tasks import find_task
from fullstride.train import compute, run, run_folder
from fullstride.train.autotune import choose_passes
from fullstride.train.compute import (
    SINGLE_PROCESS,
    choose_workers,
    numerics,
    on_device,
    step_advice,
)
from fullstride.train.loop import build_trainer
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import training_step
from fullstride.train.recipes.recipe import Recipe

RECIPE = Recipe(epochs=2, batch_size=16, lr=0.05, warmup_epochs=0, resolution=16)


@pytest.mark.parametrize(
    ("device", "has_bf16", "fields", "expected"),
    [
        ("cuda", True, {}, ("bf16", True)),
        ("cuda", False, {}, ("tf32", True)),
        ("cpu", False, {}, ("fp32", True)),
        ("cuda", True, dict(precision="fp32", channels_last=False), ("fp32", False)),
        ("cuda", False, dict(precision="fp16"), ("fp16", True)),
        ("cpu", False, dict(precision="bf16"), ("bf16", False)),
        ("cpu", False, dict(channels_last=False), ("fp32", False)),
    ],
)
def test_precision_and_memory_format_are_those_of_the_device(
    device, has_bf16, fields, expected, monkeypatch
):
    monkeypatch.setattr(compute, "has_bf16", lambda device: has_bf16)
    recipe = on_device(replace(RECIPE, **fields), device)
    assert (recipe.precision, recipe.channels_last) == expected
    assert on_device(recipe, "cpu" if device == "cuda" else "cuda") == recipe  # nothing is open


def test_a_gpu_that_emulates_bf16_does_not_count_as_one_that_has_it(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation
    )
    assert not environment.has_bf16(torch.device("cuda"))
    assert not environment.has_bf16(torch.device("cpu"))


def flags() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    products = torch.backends.cuda.matmul
    return cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, products.allow_tf32


def test_fast_algorithms_are_used_within_steps_unless_they_must_be_deterministic():
    before = flags()
    with numerics(tf32=True, benchmark=True, deterministic=False):
        assert flags() == (True, False, True, True)
    with numerics(tf32=False, benchmark=False, deterministic=True):
        assert flags() == (False, True, False, False)
        assert torch.are_deterministic_algorithms_enabled()
    assert flags() == before
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_time_convolutions_unless_they_are_deterministic(deterministic):
    net = zoo.create("genet_tiny", in_channels=1)
    recipe = replace(RECIPE, deterministic=deterministic)
    learner = build_trainer(net, find_task(), recipe, 4, None, SINGLE_PROCESS)
    with learner.numerics():
        assert flags() == (not deterministic, deterministic, False, False)  # on a CPU


def test_a_run_stores_what_was_chosen_and_goes_on_with_it(few_digits, tmp_path, monkeypatch):
    rows = run.train(tmp_path, "genet_tiny", few_digits, RECIPE)
    next(rows)
    rows.close()
    config = json.loads((tmp_path / run_folder.RUN_CONFIG).read_text())
    assert (config["precision"], config["channels_last"]) == ("fp32", True)
    assert (config["recipe"]["precision"], config["recipe"]["channels_last"]) == ("auto", None)
    # as if the run had begun on a device that chooses otherwise
    chosen = dict(precision="bf16", channels_last=False)
    (tmp_path / run_folder.RUN_CONFIG).write_text(json.dumps(config | chosen))
    plans = []
    rows = run.train(tmp_path, "genet_tiny", few_digits, RECIPE, announce=plans.append)
    assert len(list(rows)) == 2
    assert (plans[0].resolved.precision, plans[0].resolved.channels_last) == ("bf16", False)
    # nothing is chosen, or compared with the choice of this device, after the end either
    assert len(list(run.train(tmp_path, "genet_tiny", few_digits, RECIPE))) == 2
    with pytest.raises(ValueError, match="recipe.precision is 'auto' there and 'fp16' now"):
        list(run.train(tmp_path, "genet_tiny", few_digits, replace(RECIPE, precision="fp16")))


def test_a_run_that_chose_for_itself_goes_on_by_the_command_that_leaves_it_to_the_device(
    few_digits, tmp_path
):
    own = replace(RECIPE, precision="fp32", channels_last=False)
    rows = run.train(tmp_path, "genet_tiny", few_digits, own)
    next(rows)
    rows.close()
    plans = []
    assert len(list(run.train(tmp_path, "genet_tiny", few_digits, RECIPE, announce=plans.append)))
    assert (plans[0].resolved.precision, plans[0].resolved.channels_last) == ("fp32", False)


def test_memory_is_predicted_for_what_a_gpu_or_a_cpu_would_choose(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(dict(epochs=1, batch_size=8, lr=0.1)))
    gpu, cpu = (training_step(str(path), device=device) for device in ("auto", "cpu"))
    assert (gpu.precision, gpu.layout) == ("bf16", "nhwc")
    assert (cpu.precision, cpu.layout) == ("fp32", "nhwc")


@pytest.mark.parametrize(
    ("device", "own_cores", "processes", "images", "batches", "expected"),
    [
        ("cuda", 16, 1, 5000, 100, 15),
        ("cuda", 128, 1, 5000, 100, 16),
        ("cuda", 64, 8, 5000, 100, 7),  # torchrun's processes share the machine
        ("cuda", 16, 1, 60, 3, 3),  # a worker makes whole batches
        ("cuda", 16, 1, 60, 1, 0),
        ("cuda", 16, 1, 20, 5, 0),
        ("cuda", 1, 1, 5000, 100, 0),
        ("cpu", 8, 1, 5000, 100, 4),
        ("cpu", 2, 1, 5000, 100, 1),
        ("cpu", 1, 1, 5000, 100, 0),
        ("cpu", 2, 4, 5000, 100, 0),
    ],
)
def test_workers_are_those_that_the_cores_and_the_batches_can_keep_busy(
    device, own_cores, processes, images, batches, expected, few_digits, monkeypatch
):
    monkeypatch.setattr(compute, "cores", lambda: own_cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    names = tuple(map(str, range(images)))
    files = replace(few_digits.train, names=names, targets=(0,) * images, file=Path)
    assert choose_workers(files, batches, device) == expected
    assert choose_workers(replace(files, file=None), batches, device) == 0  # as of the digits


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="of Linux")
def test_cores_are_those_that_this_process_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(before)])
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert cores() == len(before)


@dataclass(frozen=True)
class Recording:
    """Reads an image, and writes down which process did."""

    read: Callable[[str], Image.Image]
    folder: Path

    def __call__(self, name: str) -> Image.Image:
        (self.folder / str(os.getpid())).touch()
        return self.read(name)


def test_workers_live_through_all_epochs_and_end_with_the_run(tmp_path):
    data, processes = open_data("digits"), {}
    for part, count in (("train", 64), ("val", 150)):
        folder = tmp_path / part
        folder.mkdir()
        images = getattr(data, part).subset(range(count))
        data = replace(data, **{part: replace(images, read=Recording(images.read, folder))})
    data = replace(data, test=data.test.subset(range(20)))
    recipe = replace(RECIPE, epochs=3, calibrate=False)
    rows = run.train(tmp_path / "run", "genet_tiny", data, recipe, RunOptions(workers=2))
    next(rows)
    for part in ("train", "val"):
        processes[part] = {int(path.name) for path in (tmp_path / part).iterdir()}
        assert len(processes[part] - {os.getpid()}) == 2
    alive = {child.pid for child in active_children()}
    assert alive == set.union(*processes.values())
    assert len(list(rows)) == 2
    for part, first in processes.items():
        assert {int(path.name) for path in (tmp_path / part).iterdir()} == first
    assert not active_children()


def test_a_run_that_is_abandoned_leaves_no_process(few_digits, tmp_path):
    rows = run.train(tmp_path / "run", "genet_tiny", few_digits, RECIPE, RunOptions(workers=2))
    next(rows)
    assert (
        len(active_children()) == 2
    )  # a validation split of 20 images, which are one batch, has none
    rows.close()
    assert not active_children()


GIB = 2**30


def fits(recipe: Recipe, net, memory: float, passes: int, copies: int) -> bool:
    """Whether a part of the batch fits, from the bytes that are counted for one image."""
    saved = activation_bytes(net, net.spec.resolution, "float32", 3)
    weights = 4 * sum(parameter.numel() for parameter in net.parameters())
    statistics = 4 * sum(buffer.numel() for buffer in net.buffers())
    fixed = (2 + copies) * weights + statistics + saved.fixed_bytes + 1 * GIB
    return fixed + recipe.batch_size / passes * saved.bytes_per_image <= 0.97 * memory


@pytest.mark.parametrize("gib", [1.3, 1.5, 2, 4, 16])
@pytest.mark.parametrize("average", [0, 1])
def test_a_batch_is_computed_in_the_fewest_passes_that_fit(gib, average):
    net, memory = zoo.create("resnet_rs_tiny"), gib * GIB
    recipe = Recipe(epochs=1, batch_size=512, lr=0.1, grad_accum_steps=0, ema_decay=0.9 * average)
    recipe = on_device(replace(recipe, precision="fp32"), "cuda")
    passes = choose_passes(recipe, net, 5000, "cuda", memory_bytes=memory).grad_accum_steps
    assert recipe.batch_size % passes == 0
    assert fits(recipe, net, memory, passes, average + (passes > 1))
    for fewer in range(1, passes):
        if recipe.batch_size % fewer == 0:
            assert not fits(recipe, net, memory, fewer, average + (fewer > 1))
    chosen = replace(recipe, grad_accum_steps=2)
    assert choose_passes(chosen, net, 5000, "cuda", memory_bytes=1) == chosen


def test_on_a_cpu_a_batch_takes_half_of_the_free_memory_that_the_system_names(monkeypatch):
    net = zoo.create("resnet_rs_tiny")
    recipe = Recipe(epochs=1, batch_size=512, lr=0.1, grad_accum_steps=0, precision="fp32")
    monkeypatch.setattr(max_batch, "available_bytes", lambda: 0.1 * GIB)
    passes = choose_passes(recipe, net, 5000, "cpu").grad_accum_steps
    within = choose_passes(recipe, net, 5000, "cpu", memory_bytes=0.05 * GIB)
    assert passes == within.grad_accum_steps > 1
    monkeypatch.setattr(max_batch, "available_bytes", lambda: math.inf)
    assert choose_passes(recipe, net, 5000, "cpu").grad_accum_steps == 1


def test_passes_are_chosen_for_the_largest_images_of_training_or_evaluation():
    net = zoo.create("resnet_rs_tiny")
    recipe = Recipe(epochs=2, batch_size=512, lr=0.1, grad_accum_steps=0, precision="fp32")

    def passes(resolution: int, ratio: float) -> int:
        own = replace(recipe, resolution=resolution, train_resolution_ratio=ratio)
        return choose_passes(own, net, 5000, "cuda", memory_bytes=2 * GIB).grad_accum_steps

    assert passes(64, 2) == passes(128, 1) == passes(128, 0.5) > passes(64, 1)


def test_parts_keep_the_groups_of_the_triplet_loss_and_what_never_fits_is_refused():
    net = zoo.create("resnet_rs_tiny")
    recipe = Recipe(epochs=1, batch_size=48, lr=0.1, grad_accum_steps=0, precision="fp32")
    groups = replace(recipe, triplet=1.0, per_class=8)
    image = activation_bytes(net, net.spec.resolution, "float32", 3).bytes_per_image
    weights = 4 * sum(parameter.numel() for parameter in net.parameters())
    memory = [(GIB + 4 * weights + images * image) / 0.97 for images in (10, 20)]
    chosen = [choose_passes(recipe, net, 5000, "cuda", memory_bytes=each) for each in memory]
    assert [each.grad_accum_steps for each in chosen] == [6, 3]
    assert choose_passes(groups, net, 5000, "cuda", memory_bytes=memory[1]).grad_accum_steps == 3
    with pytest.raises(
        ValueError, match=r"no part of recipe.batch_size 48 fits into the 1.0 GiB of"
    ):
        choose_passes(groups, net, 5000, "cuda", memory_bytes=memory[0])  # two groups are 16 images


def test_a_run_stores_its_passes_and_goes_on_with_them(few_digits, tmp_path):
    recipe = replace(RECIPE, grad_accum_steps=0)
    rows = run.train(tmp_path, "genet_tiny", few_digits, recipe)
    next(rows)
    rows.close()
    path = tmp_path / run_folder.RUN_CONFIG
    config = json.loads(path.read_text())
    assert config["grad_accum_steps"] == 1  # on a CPU
    path.write_text(json.dumps(config | dict(grad_accum_steps=4)))  # as if begun on a small GPU
    plans = []
    assert len(list(run.train(tmp_path, "genet_tiny", few_digits, recipe, announce=plans.append)))
    assert plans[0].resolved.grad_accum_steps == 4
    assert "16 images in 4 passes" in " ".join(plan_lines(plans[0]))


@pytest.mark.parametrize(
    ("batch", "passes", "advice"),
    [
        (48, 1, "recipe.grad_accum_steps 2, or 0 for as many"),
        (48, 4, "recipe.grad_accum_steps 6"),
        (2, 2, "recipe.resolution"),
    ],
)
def test_lack_of_memory_in_a_step_names_the_batch_and_what_helps(batch, passes, advice):
    recipe = replace(RECIPE, batch_size=batch, grad_accum_steps=passes)
    gpu = torch.device("cuda")
    expected = pytest.raises(OutOfMemoryError, match=f"of {batch} images in {passes} pass")
    with expected as error, step_advice(recipe, gpu, SINGLE_PROCESS):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert advice in str(error.value)
    assert ("grad_accum_steps" in str(error.value)) == (passes < batch)
    with pytest.raises(RuntimeError, match="^shapes"), step_advice(recipe, gpu, SINGLE_PROCESS):
        raise RuntimeError("shapes")


STRIDED = """
import torch
from torch import nn
from fullstride.measure.workload import Step, StepOptions

options = StepOptions(layout="nhwc")
net = nn.Sequential(nn.Conv2d(13, 8, 1, 2, bias=False), nn.Flatten(), nn.Linear(8 * 40 * 40, 2))
work = Step(net, "training", 4, 80, torch.device("cpu"), in_channels=13, options=options)
for _ in range(3):
    work()
"""


@pytest.mark.slow
def test_a_strided_pointwise_convolution_of_few_channels_trains_channels_last():
    done = subprocess.run([sys.executable, "-c", STRIDED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]  # PyTorch's own ends with a segmentation fault


def test_a_subsampled_convolution_is_the_function_of_the_strided_one():
    torch.manual_seed(0)
    strided = nn.Sequential(nn.Conv2d(13, 8, 1, (2, 3)), nn.Conv2d(24, 8, 1, 2)).double()
    own = copy.deepcopy(strided)
    avoid_strided_pointwise(own)
    assert [type(each) for each in own] == [SubsampledConv2d, nn.Conv2d]  # the second is safe
    x = torch.randn(2, 13, 7, 8, dtype=torch.float64, requires_grad=True)
    outputs = [net[0](x) for net in (strided, own)]
    torch.testing.assert_close(*outputs)
    weights = [net[0].weight for net in (strided, own)]
    gradients = [
        torch.autograd.grad(y.square().sum(), (x, weight))
        for y, weight in zip(outputs, weights, strict=True)
    ]
    torch.testing.assert_close(*gradients)


FREED = """
import resource
import torch
from fullstride.train.compute import keep_freed_memory


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20


before = resident_mib()
with keep_freed_memory(torch.device("cpu")):
    torch.ones(128 << 20)  # 512 MiB
    within = resident_mib()
print(within - before, resident_mib() - before)
"""


UNFINISHED = """
import fullstride
from fullstride.data.loader import Batches, LoaderOptions, TrainView
from fullstride.tasks.classify import Classify

view = TrainView(fullstride.Preprocessing(resolution=8, mean=(0.5,), std=(0.5,)))
images = fullstride.open_data("digits").train.subset(range(8))
batches = Batches(images, view, LoaderOptions(batch=8))
net = fullstride.zoo.create("resnet_rs_tiny", in_channels=1)
recipe = fullstride.Recipe(epochs=2, batch_size=8, lr=0.1)
epochs = fullstride.train_epochs(net, Classify(), batches, recipe)
print(next(epochs).number)
"""


def test_training_that_is_left_unfinished_ends_without_a_word():
    process = subprocess.run([sys.executable, "-c", UNFINISHED], capture_output=True, text=True)
    assert (process.stdout, process.stderr) == ("0\n", "")


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's thresholds")
def test_memory_is_kept_in_training_and_given_back_afterwards():
    process = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True)
    within, afterwards = map(int, process.stdout.split())
    assert within >= 512
    assert afterwards < 64
