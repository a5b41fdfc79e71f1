"""A tiny network of clips with random weights, and clips that it tells apart."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fullstride.data.transforms.crop import to_input
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing

PRE = Preprocessing(resolution=32, crop=1.0, frames=8, frame_stride=2)
DIRECTIONS = ("down", "left", "right", "up")


def clip_bundle(pre: Preprocessing = PRE, stages: int | None = None, **more) -> Bundle:
    """A bundle of `resnet3d_rs_tiny`, or of its first stages."""
    torch.manual_seed(0)
    spec = zoo.spec("resnet3d_rs_tiny")
    net = Network(replace(spec, classes=4, stages=spec.stages[:stages]))
    with torch.no_grad():
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm3d):
                norm.weight.uniform_(-1.5, 1.5)
                norm.bias.uniform_(-0.5, 0.5)
        clips = to_input(torch.from_numpy(np.stack(some_clips(8))), PRE)
        for _ in range(20):
            net.train()(clips)
        nn.init.normal_(net.head.fc.weight)
        logits = net.eval()(clips)
        scale = 1.5 / logits.std()
        net.head.fc.weight *= scale
        net.head.fc.bias.copy_(-scale * logits.mean(0))
    names = {"name": "clips", "classes": DIRECTIONS, "preprocessing": pre, "temperature": 0.7}
    return Bundle(net, **{**names, **more})


def some_clips(count: int = 4, pre: Preprocessing = PRE) -> list[np.ndarray]:
    """Bars that move in other directions, by other steps, in other colours: (T, H, W, 3)."""
    side, clips = pre.resolution, []
    y, x = np.mgrid[:side, :side]
    for number in range(count):
        along = (x, -x, y, -y)[number % 4]
        waves = [(along + (number + 1) * t) * (30 + 10 * number) % 256 for t in range(pre.frames)]
        colour = np.array([255, 40 * number, 200 - 40 * number])
        clips.append((np.stack(waves)[..., None] * colour // 255).astype(np.uint8))
    return clips
