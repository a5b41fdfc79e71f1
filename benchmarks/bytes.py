"""What does a training step keep for its gradient: timm's networks, ours, lean, compiled? MB per image; nothing is run.

    python benchmarks/bytes.py --out benchmarks/bytes.json

At 224 pixels in bf16. Eager: what autograd is handed on a GPU (`measure.saved`). Compiled: what torch.compile's forward
pass hands to its backward pass, as it is cut for the CPU, of a network whose parameters are bf16 too; with the images,
without parameters. What either pass needs for a moment is in neither; a compiled step's peak is higher by that.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

from fullstride.measure.environment import Environment
from fullstride.measure.saved import saved
from fullstride.nets import zoo
from fullstride.nets.compiled import KeepLittle
from fullstride.nets.network import Network

RESOLUTION = 224
BATCH = 7  # images: no map of these networks has as many channels, so a first side of 7 is a batch
TIMM = {
    "resnet50": "resnet50",
    "tresnet_m": "tresnet_m",
    "resnet_rs_50": "resnetrs50",
    "genet_large": "gernet_l",
}
PLAIN, LEAN, COMPILED = "plain", "lean", "lean, compiled, recomputing"
GOALS = {  # MB, of the project's fourth issue
    ("tresnet_m", LEAN): 22.6,
    ("tresnet_m", COMPILED): 15.6,
    ("resnet_rs_50", LEAN): 36.0,
    ("resnet_rs_50", COMPILED): 25.0,
    ("genet_large", COMPILED): 13.0,
}
CONVOLUTIONS = ("aten::convolution", "fullstride::conv", "fullstride::pool")


class Told(Exception):  # noqa: N818
    """Ends a compilation of which all is known."""


class Watch(KeepLittle):
    """Cuts the passes, as PyTorch by itself or as `KeepLittle`, notes what goes between them, and ends there."""

    def __init__(self, recompute: bool):
        self.recompute = recompute
        self.bytes_per_image: int | None = None

    def __call__(self, gm: GraphModule, joint_inputs: Any, **settings: Any) -> Any:
        cut = super().__call__ if self.recompute else min_cut_rematerialization_partition
        forward, backward = cut(gm, joint_inputs, **settings)
        outputs: Any = forward.graph.output_node().args[0]
        self.bytes_per_image = sum(map(size, outputs[settings["num_fwd_outputs"] :])) // BATCH
        again = [node for node in backward.graph.nodes if node.op == "call_function" and convolution(node)]
        assert not again, f"computed twice: {again}"
        raise Told

    def uuid(self) -> None:
        """Nothing of this is kept for other compilations, nor taken from them."""


def size(node: Node) -> int:
    """Bytes, of what there is for each image."""
    value = node.meta["val"]
    of_batch = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == BATCH
    return value.numel() * value.element_size() if of_batch else 0


def convolution(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in CONVOLUTIONS


def eager(net: nn.Module) -> int:
    return saved(net, RESOLUTION).bytes_per_image


def compiled(net: nn.Module, *, recompute: bool) -> int:
    watch = Watch(recompute)
    torch._dynamo.reset()
    call = torch.compile(net.to(torch.bfloat16).train(), fullgraph=True, options={"custom_partitioner_fn": watch})
    try:
        call(torch.zeros(BATCH, 3, RESOLUTION, RESOLUTION, dtype=torch.bfloat16))
    except RuntimeError:
        if watch.bytes_per_image is None:
            raise
    assert watch.bytes_per_image is not None
    return watch.bytes_per_image


def lean(name: str) -> nn.Module:
    net = zoo.create(name)
    assert isinstance(net, Network)
    return net.lean()


def columns(name: str) -> dict[str, Callable[[], int]]:
    return {
        "timm": lambda: eager(zoo.create(f"timm/{TIMM[name]}")),
        PLAIN: lambda: eager(zoo.create(name)),
        LEAN: lambda: eager(lean(name)),
        "timm, compiled": lambda: compiled(zoo.create(f"timm/{TIMM[name]}"), recompute=False),
        "plain, compiled": lambda: compiled(zoo.create(name), recompute=False),
        "plain, compiled, recomputing": lambda: compiled(zoo.create(name), recompute=True),
        COMPILED: lambda: compiled(lean(name), recompute=True),
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
            said = "" if goal is None else f"   goal {goal}: {'reached' if megabytes <= goal else 'MISSED'}"
            print(f"{name:14}{column:30}{megabytes:6.1f} MB{said}", flush=True)
    if out:
        how = dict(resolution=RESOLUTION, precision="bfloat16", unit="bytes per image")
        goals = {f"{name}: {column}": goal for (name, column), goal in GOALS.items()}
        told = dict(environment=asdict(Environment.here()), **how, goals_mb=goals, kept=found)
        out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
