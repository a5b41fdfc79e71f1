"""How many bytes does a training step save for its backward pass? By family and efficiency.

    python benchmarks/bytes.py --out benchmarks/bytes.json

MB per image at 224 pixels in bf16; nothing is run. Eager: the tensors that autograd saves on a GPU
(`memory.activation_bytes`). Compiled: the outputs of the compiled forward pass for the backward
pass (`memory.compiled_bytes`). Temporary tensors are in neither; benchmarks/peak.py has them.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from torch import nn

from fullstride.measure.activation_bytes import activation_bytes
from fullstride.measure.compiled_bytes import compiled_bytes
from fullstride.measure.environment import Environment
from fullstride.nets import zoo

RESOLUTION = 224
TIMM = {
    "resnet50": "resnet50",
    "tresnet_m": "tresnet_m",
    "resnet_rs_50": "resnetrs50",
    "genet_large": "gernet_l",
}
# MB that a change of the partitioner should not exceed.
GOALS = {("tresnet_m", "plain compiled"): 16.0}


def eager(build: Callable[[], nn.Module]) -> int:
    return activation_bytes(build(), RESOLUTION).bytes_per_image


def compiled(build: Callable[[], nn.Module], *, recompute: bool = True) -> int:
    return compiled_bytes(build(), RESOLUTION, recompute=recompute)


def columns(name: str) -> dict[str, Callable[[], int]]:
    """Label -> the function that counts bytes per image. Compiled by default with recomputation."""
    timm, plain = partial(zoo.create, f"timm/{TIMM[name]}"), partial(zoo.create, name)
    return {
        "timm": partial(eager, timm),
        "timm compiled, no recomputation": partial(compiled, timm, recompute=False),
        "timm compiled": partial(compiled, timm),
        "plain": partial(eager, plain),
        "plain compiled, no recomputation": partial(compiled, plain, recompute=False),
        "plain compiled": partial(compiled, plain),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    out = parser.parse_args().out
    sizes: dict[str, dict[str, int]] = {}
    for name in TIMM:
        sizes[name] = {}
        for column, count in columns(name).items():
            size = sizes[name][column] = count()
            goal = GOALS.get((name, column))
            result = "reached" if goal and size <= goal * 1e6 else "MISSED"
            note = f"   goal {goal:g}: {result}" if goal else ""
            print(f"{name:14}{column:36}{size / 1e6:6.1f} MB{note}", flush=True)
    if out:
        goals = {f"{name}: {column}": goal for (name, column), goal in GOALS.items()}
        protocol = dict(resolution=RESOLUTION, precision="bfloat16", unit="bytes per image")
        environment = asdict(Environment.here())
        data = dict(environment=environment, **protocol, goals_mb=goals, saved=sizes)
        out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
