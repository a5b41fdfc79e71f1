"""Tiny networks of the dense tasks with random weights, and pictures for them."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import find_task

NAMES = ("a", "b", "c")


def bundle_of(task: str, side: int = 64, **options: Any) -> Bundle:
    """A bundle whose detections have scores on both sides of 0.5."""
    torch.manual_seed(0)
    net = zoo.create("resnet_rs_tiny", classes=len(NAMES))
    small = {"head_width": 32, **({"head_convs": 1} if task == "detect" else {})}
    kind = replace(find_task(task).for_classes(NAMES), **small, **options)
    net.task_head = kind.head(net)
    with torch.no_grad():
        for parameter in net.task_head.parameters():
            if parameter.ndim == 4:
                nn.init.normal_(parameter, std=0.08)
        for name, parameter in net.task_head.named_parameters():
            if name == "classes.bias":
                nn.init.normal_(parameter)
        for _ in range(3):
            net.train()(torch.randn(4, 3, side, side))
    pre = Preprocessing(resolution=side, fit="pad")
    names = {"name": "toy", "classes": NAMES, "preprocessing": pre, "task": task}
    return Bundle(net.eval(), **names, task_state=kind.state())


def some_pictures() -> list[Image.Image]:
    """Blocks of colours, of several sizes."""
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (3, 6, 8, 3), dtype=np.uint8)
    sizes = ((96, 72), (120, 60), (48, 96))
    return [
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
        for pixels, size in zip(small, sizes, strict=True)
    ]
