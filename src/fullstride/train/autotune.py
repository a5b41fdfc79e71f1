"""Which way of training is fastest here? Each is tried once with a few real steps, and the answer is remembered.

plain: PyTorch's modules. lean: the fused operators of `nets/fused/batch_norm.py`, which keep less memory. compiled: those by
torch.compile. A network of timm has no fused form, and a CPU is not asked to compile.
"""

import copy
import hashlib
import json
import os
import statistics
import time
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullstride.data.transforms.crop import to_input
from fullstride.measure.environment import Environment
from fullstride.measure.memory.limits import lacks_memory
from fullstride.measure.protocols import THROUGHPUT
from fullstride.measure.timing import timed_calls, warm_up
from fullstride.nets.backbone import Backbone
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.storage import atomic_write
from fullstride.tasks.classify import Classify
from fullstride.train.distributed import SINGLE_PROCESS
from fullstride.train.loop import Learner, numerics
from fullstride.train.recipe import Recipe

SECONDS = 1.0  # of each way
BLOCK_S = 0.25  # of one sample, where a step does not take longer
LEAST_SAMPLES = 3
DECISIVE = (
    "batch",
    "precision",
    "channels_last",
    "grad_accum_steps",
    "optimizer",
    "drop_path",
    "dropout",
    "triplet",
)
DECISIVE += ("deterministic", "int8_maps")


def choose_efficiency(
    recipe: Recipe,
    net: Backbone,
    pre: Preprocessing,
    device: torch.device | str,
    processes: int = 1,
) -> Recipe:
    """The recipe with its `efficiency` chosen where it says auto, for this network on this device.

    What was found is remembered in `fullstride/efficiency.json` of the user's cache folder, with every rate and where
    it was measured; it is tried again where the network, what is computed, the device or the software is another.
    """
    if recipe.efficiency != "auto":
        return recipe
    here = asdict(Environment.here(device))
    asked = {name: getattr(recipe, name) for name in DECISIVE} | {"processes": processes}
    asked |= {"spec": json.loads(net.spec.to_json()), "resolution": pre.resolution}
    asked |= {
        name: here[name]
        for name in ("device", "threads", "torch", "cuda", "driver", "fullstride", "commit")
    }
    key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    path = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "fullstride"
        / "efficiency.json"
    )
    known = remembered(path)
    if key not in known:
        rates = tried(recipe, net, pre, torch.device(device), recipe.batch // processes)
        known[key] = {
            "fastest": max(rates, key=rates.__getitem__),
            "images_per_s": rates,
            "environment": here,
        }
        with atomic_write(path) as beside:
            beside.write_text(json.dumps(known, indent=1))
    return recipe.with_efficiency(known[key]["fastest"])


def remembered(path: Path) -> dict[str, Any]:
    """A file that is not ours any more is begun anew: it holds nothing that cannot be measured again."""
    try:
        known = json.loads(path.read_text())
        return {
            key: value
            for key, value in known.items()
            if value["fastest"] in ("plain", "lean", "compiled")
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def tried(
    recipe: Recipe, net: Backbone, pre: Preprocessing, device: torch.device, batch: int
) -> dict[str, float]:
    """Images/s of each way whose batch fits into memory."""
    ways = ["plain", "lean"] if isinstance(net, Network) else ["plain"]
    rates, lack = {}, None
    for way in ways if device.type == "cpu" else [*ways, "compiled"]:
        try:
            rates[way] = rate(recipe.with_efficiency(way), net, pre, device, batch)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            lack = error
    if not rates:
        assert lack
        raise lack
    return rates


def rate(
    recipe: Recipe, net: Backbone, pre: Preprocessing, device: torch.device, batch: int
) -> float:
    """Images/s of training steps on random images, the median over blocks."""
    learner = Learner(
        copy.deepcopy(net).to(device).train(),
        Classify(),
        recipe.in_epochs(1000),
        1000,
        None,
        SINGLE_PROCESS,
    )
    shape = batch, pre.resolution, pre.resolution, pre.channels
    x = to_input(torch.randint(256, shape, dtype=torch.uint8, device=device), pre)
    labels = torch.arange(batch, device=device) // max(recipe.per_class, 1) % net.spec.classes
    return statistics.median(timed_steps(learner, x, labels, SECONDS))


def timed_steps(learner: Learner, x: Tensor, labels: Tensor, seconds: float) -> list[float]:
    """Images/s of blocks of training steps on one batch that is on the device, for about `seconds`."""
    numbers = cycle(
        range(learner.per_epoch)
    )  # within the schedule, which training might have left long ago

    def step() -> None:
        learner.step(x, labels, next(numbers))

    protocol = replace(THROUGHPUT, batch=len(x), resolution=x.shape[-1], round_s=BLOCK_S)
    samples = []
    with numerics(learner.recipe.precision == "tf32", learner.recipe.deterministic):
        step()  # compiles and picks algorithms
        calls = warm_up(step, protocol, learner.device)
        deadline = time.perf_counter() + seconds
        while len(samples) < LEAST_SAMPLES or time.perf_counter() < deadline:
            (block_s,), _ = timed_calls(step, calls, learner.device)
            samples.append(calls * len(x) / block_s)
    return samples
