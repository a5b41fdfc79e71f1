"""Chooses a training's fastest efficiency on this device, and the passes per step that fit memory.

A few real training steps run eager and compiled (see `nets.efficiency`), and their rates are
cached. A CPU only runs eager steps.
"""

import copy
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from typing import Any, get_args

import torch

from fullstride.data.loader import Batch
from fullstride.io.records import from_json, read_json, write_json
from fullstride.io.writing import Output, lacks_memory, user_cache
from fullstride.measure.environment import Environment
from fullstride.measure.max_batch import budget_bytes, predict
from fullstride.measure.protocols import THROUGHPUT, timed_calls, warm_up
from fullstride.measure.workload import find_precision
from fullstride.nets.backbone import Backbone
from fullstride.nets.efficiency import Efficiency, is_compiled
from fullstride.tasks.task import Task
from fullstride.train import compute
from fullstride.train.batches import check_batch, repeat
from fullstride.train.loop import Trainer, build_trainer
from fullstride.train.recipes.recipe import Recipe

SECONDS = 1.0  # of measuring each efficiency
BLOCK_S = 0.25  # per sample, unless a step takes longer
MIN_SAMPLES = 3
CPU_SHARE = 0.5  # of the machine's free memory; batches, gradients and other programs take some
# Fields of a recipe that may affect which efficiency is fastest.
CACHE_KEY_FIELDS = (
    "batch_size", "precision", "channels_last", "grad_accum_steps", "optimizer", "drop_path",
    "dropout", "triplet", "deterministic", "freeze_stages", "frozen",
)  # fmt: skip
OUTPUT = Output("a cache", ".json", lambda path: True)  # in fullstride's own folder
CACHE_KEY_ENVIRONMENT = ("device", "threads", "torch", "cuda", "driver", "fullstride", "commit")


def choose_efficiency(
    recipe: Recipe,
    task: Task,
    net: Backbone,
    example: Batch,
    device: torch.device | str,
    processes: int = 1,
) -> Recipe:
    """Replace the efficiency auto by the fastest for this network on this device.

    Rates are cached in `fullstride/efficiency.json` in the user's cache folder, and measured again
    for another network, recipe, device or software.
    """
    if recipe.efficiency != "auto":
        return recipe
    recipe = compute.on_device(recipe, device)
    environment = asdict(Environment.here(device))
    key = {name: getattr(recipe, name) for name in CACHE_KEY_FIELDS}
    key |= {"processes": processes, "task": task.name, "resolution": example.x.shape[-1]}
    key |= {"spec": json.loads(net.spec.to_json())}
    key |= {name: environment[name] for name in CACHE_KEY_ENVIRONMENT}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = user_cache() / "efficiency.json"
    entries: dict[str, CacheEntry] = {}
    with suppress(OSError, ValueError):  # entries of another file are measured again
        entries = from_json(dict[str, CacheEntry], read_json(path), str(path))
    if digest not in entries:
        batch = repeat(example, recipe.batch_size // processes)
        rates = measure_rates(recipe, task, net, batch, torch.device(device))
        fastest = max(rates, key=rates.__getitem__)
        entries[digest] = CacheEntry(fastest, rates, environment)
        write_json(path, OUTPUT, entries)
    return replace(recipe, efficiency=entries[digest].fastest)


@dataclass(frozen=True)
class CacheEntry:
    """Rates that were measured once."""

    fastest: Efficiency
    images_per_s: Mapping[Efficiency, float]
    environment: Mapping[str, Any]


def candidates(device: torch.device) -> list[Efficiency]:
    """The efficiencies on this device; compiling for a CPU is left out as too slow."""
    return [each for each in get_args(Efficiency) if device.type != "cpu" or not is_compiled(each)]


def measure_rates(
    recipe: Recipe, task: Task, net: Backbone, batch: Batch, device: torch.device
) -> dict[Efficiency, float]:
    """Images/s of each efficiency whose batch fits into memory."""
    rates: dict[Efficiency, float] = {}
    out_of_memory = None
    for efficiency in candidates(device):
        try:
            own = replace(recipe, efficiency=efficiency)
            rates[efficiency] = rate(own, task, net, batch, device)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            out_of_memory = error
    if not rates:
        assert out_of_memory
        raise out_of_memory
    return rates


def rate(recipe: Recipe, task: Task, net: Backbone, batch: Batch, device: torch.device) -> float:
    """Images/s of training steps on `batch`, the median over blocks."""
    own = copy.deepcopy(net).to(device).train()
    learner = build_trainer(own, task, replace(recipe.in_epochs(1000), freeze_epochs=0.0), 1000)
    return statistics.median(timed_steps(learner, batch, SECONDS))


def timed_steps(learner: Trainer, batch: Batch, seconds: float) -> list[float]:
    """Images/s of blocks of training steps on one batch on the device, for about `seconds`."""
    numbers = cycle(range(learner.per_epoch))  # the schedule ends there

    def step() -> None:
        learner.step(x, batch.targets, next(numbers))

    x = batch.x
    protocol = replace(THROUGHPUT, batch=len(x), resolution=x.shape[-1], round_s=BLOCK_S)
    with compute.keep_freed_memory(learner.device), learner.numerics():
        step()  # compiles and selects algorithms
        calls = warm_up(step, protocol, learner.device)
        blocks = timed_blocks(step, calls, learner.device, seconds)
    return [calls * len(x) / block_s for block_s, _ in blocks]


def timed_blocks(
    step: Callable[[], object], calls: int, device: torch.device, seconds: float
) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of blocks of `calls` calls, for about `seconds` in total."""
    blocks, deadline = [], time.perf_counter() + seconds
    while len(blocks) < MIN_SAMPLES or time.perf_counter() < deadline:
        (block_s,), cpu_s = timed_calls(step, calls, device)
        blocks.append((block_s, cpu_s))
    return blocks


def choose_passes(
    recipe: Recipe,
    net: Backbone,
    images: int,
    device: torch.device | str,
    context: compute.DistributedContext = compute.SINGLE_PROCESS,
    memory_bytes: float | None = None,
) -> Recipe:
    """Replace `grad_accum_steps` 0 by the fewest passes that are predicted to fit.

    `net` has its training form, with eager modules; the efficiency auto counts as plain. All
    processes use the same number. `memory_bytes`: by default the free memory of a GPU, or
    `CPU_SHARE` of the machine's; where the system does not say it, all fits. Raises ValueError if
    not even the smallest part of a batch fits.
    """
    device = torch.device(device)
    if recipe.grad_accum_steps:
        return recipe
    if memory_bytes is None:
        memory_bytes = budget_bytes(None, device) * (CPU_SHARE if device.type == "cpu" else 1.0)
    if math.isinf(memory_bytes):
        return replace(recipe, grad_accum_steps=1)
    resolution = net.spec.resolution if recipe.resolution is None else recipe.resolution
    prediction = predict(
        net,
        memory_bytes,
        max((resolution, *recipe.resolutions(resolution))),
        "float32" if recipe.precision == "tf32" else find_precision(recipe.precision),
        net.spec.in_channels,
        device="cuda" if device.type == "cuda" else "cpu",
        efficiency="plain" if recipe.efficiency == "auto" else recipe.efficiency,
    )
    weights = 4 * sum(parameter.numel() for parameter in net.parameters())
    own = (recipe.batch_size + recipe.unlabelled_batch) // context.world_size
    fewest = 0
    for passes in range(1, own + 1):
        with suppress(ValueError):  # unequal parts, or too few images of a class
            parts = replace(recipe, grad_accum_steps=passes)
            check_batch(images, parts, context)
            left = prediction.memory_bytes - weights * weight_copies(parts, context)
            largest = replace(prediction, memory_bytes=left).batch
            if own // passes <= min(largest, prediction.map_batch):
                fewest = passes
                break
    fewest = context.gather(fewest)
    if not all(fewest):
        raise ValueError(
            f"recipe.grad_accum_steps 0: no part of recipe.batch_size {recipe.batch_size} fits "
            f"into the {memory_bytes / 2**30:.1f} GiB of {device}: lower recipe.resolution"
        )
    return replace(recipe, grad_accum_steps=max(fewest))


def weight_copies(recipe: Recipe, context: compute.DistributedContext) -> int:
    """Number of tensors as large as the weights in a step, beyond weights and momentum."""
    second_moment = recipe.optimizer not in ("sgd", "muon")
    gradients = recipe.grad_accum_steps > 1  # in a single pass they replace saved tensors
    return second_moment + gradients + (recipe.ema_decay > 0) + context.is_distributed
