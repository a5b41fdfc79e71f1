"""Networks to export, as bundles of random weights whose batch norms have realistic statistics."""

import torch
from torch import nn

from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing

GRAY = Preprocessing(resolution=32, mean=(0.2,), std=(0.5,), crop=1.0)
COLOUR = Preprocessing(resolution=40, crop=0.9)
DIGITS = tuple("0123456789")
TEMPERATURE = 0.7


def make_bundle(name: str, pre: Preprocessing, **more) -> Bundle:
    torch.manual_seed(0)
    net = zoo.create(name, classes=10, in_channels=pre.channels)
    names = {"name": name, "classes": DIGITS, "preprocessing": pre, "temperature": TEMPERATURE}
    return Bundle(settled(net, pre), **{**names, **more})


def small_bundle(**more) -> Bundle:
    """Four layers that int8 makes faster: for what does not depend on the network."""
    torch.manual_seed(0)
    pre = Preprocessing(resolution=32, crop=1.0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    names = {"name": "small", "classes": DIGITS, "preprocessing": pre, "temperature": TEMPERATURE}
    return Bundle(settled(net, pre), **{**names, **more})


def settled(net: nn.Module, pre: Preprocessing) -> nn.Module:
    with torch.no_grad():
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.weight.uniform_(-1.5, 1.5)
                norm.bias.uniform_(-0.5, 0.5)
        for _ in range(3):
            net.train()(torch.randn(8, pre.channels, 48, 48))
    return net.eval()
