"""What does a training step keep for its gradient: timm's networks, ours, lean, compiled? MB per image; nothing is run.

    python benchmarks/bytes.py --out benchmarks/bytes.json

At 224 pixels in bf16. Eager: what autograd is handed on a GPU (`measure.saved`). Compiled: what torch.compile's
forward pass hands to its backward pass (`measure.saved_compiled`). What either pass needs for a moment is in neither; a
compiled step's peak is higher by that.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from torch import nn

from fullstride.measure.environment import Environment
from fullstride.measure.memory.activation_bytes import saved
from fullstride.measure.memory.compiled_bytes import compiled_bytes
from fullstride.nets import zoo

RESOLUTION = 224
TIMM = {
    "resnet50": "resnet50",
    "tresnet_m": "tresnet_m",
    "resnet_rs_50": "resnetrs50",
    "genet_large": "gernet_l",
}
PLAIN, LEAN, COMPILED = "plain", "lean", "lean, compiled, recomputing"
INT8, INT8_COMPILED = "lean, int8 maps", "lean, int8 maps, compiled, recomputing"
GOALS = {  # MB, of the project's fourth issue
    ("tresnet_m", LEAN): 22.6,
    ("tresnet_m", COMPILED): 15.6,
    ("tresnet_m", INT8_COMPILED): 12.5,
    ("resnet_rs_50", LEAN): 36.0,
    ("resnet_rs_50", COMPILED): 25.0,
    ("genet_large", COMPILED): 13.0,
}


def eager(net: nn.Module) -> int:
    return saved(net, RESOLUTION).bytes_per_image


def compiled(net: nn.Module, *, recompute: bool) -> int:
    return compiled_bytes(net, RESOLUTION, recompute=recompute)


def lean(name: str, *, int8: bool = False) -> nn.Module:
    return zoo.create(name, efficiency="lean", int8=int8)


def columns(name: str) -> dict[str, Callable[[], int]]:
    return {
        "timm": lambda: eager(zoo.create(f"timm/{TIMM[name]}")),
        PLAIN: lambda: eager(zoo.create(name)),
        LEAN: lambda: eager(lean(name)),
        INT8: lambda: eager(lean(name, int8=True)),
        "timm, compiled": lambda: compiled(zoo.create(f"timm/{TIMM[name]}"), recompute=False),
        "plain, compiled": lambda: compiled(zoo.create(name), recompute=False),
        "plain, compiled, recomputing": lambda: compiled(zoo.create(name), recompute=True),
        COMPILED: lambda: compiled(lean(name), recompute=True),
        INT8_COMPILED: lambda: compiled(lean(name, int8=True), recompute=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    found: dict[str, dict[str, int]] = {}
    for name in TIMM:
        found[name] = {}
        for column, count in columns(name).items():
            found[name][column] = count()
            megabytes, goal = found[name][column] / 1e6, GOALS.get((name, column))
            said = (
                ""
                if goal is None
                else f"   goal {goal}: {'reached' if megabytes <= goal else 'MISSED'}"
            )
            print(f"{name:14}{column:40}{megabytes:6.1f} MB{said}", flush=True)
    if out:
        how = dict(resolution=RESOLUTION, precision="bfloat16", unit="bytes per image")
        goals = {f"{name}: {column}": goal for (name, column), goal in GOALS.items()}
        told = dict(environment=asdict(Environment.here()), **how, goals_mb=goals, kept=found)
        out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
