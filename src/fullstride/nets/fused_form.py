"""Reaches the optional room `nets.fused`, which nothing else imports.

Without it networks train by PyTorch's modules, and the fused and padded forms are refused.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn

from fullstride.nets.backbone import Backbone
from fullstride.nets.network import Network

FUSED = "fullstride.nets.fused"


def to_fused(
    net: nn.Module,
    name: str = "this network",
    group: "dist.ProcessGroup | None" = None,
    *,
    int8: bool = False,
) -> Network:
    """Let `net` train by memory-efficient operators, in place (see `nets.fused.network.to_fused`).

    Raises ValueError for a network from elsewhere; `name` is for the message.
    """
    if not isinstance(net, Network) or net.spec.frames:
        raise ValueError(
            f"{name} has no fused form: use efficiency plain, or a network of images that "
            "`fullstride zoo` lists"
        )
    return fused_module("network").to_fused(net, group, int8=int8)


def is_available(net: nn.Module) -> bool:
    """Whether `to_fused` takes this network: this package's, for images, and the room is there."""
    takes_images = isinstance(net, Network) and not net.spec.frames
    return takes_images and find_spec(FUSED) is not None


def to_plain(net: nn.Module) -> Any:
    """Let `net` train by PyTorch's modules again, in place; a plain network stays as it is."""
    is_fused = isinstance(net, Backbone) and net.is_fused
    return fused_module("network").to_plain(net) if is_fused else net


def to_padded(net: nn.Module, name: str = "this network") -> Network:
    """The network with channels padded to multiples of 8 (see `nets.fused.padding.to_padded`)."""
    if not isinstance(net, Network) or net.spec.frames:
        raise ValueError(
            f"{name} has no padded form: leave pad_channels out, or use a network of images that "
            "`fullstride zoo` lists"
        )
    return fused_module("padding").to_padded(net)


def to_unpadded(net: Backbone, spec: Any) -> Backbone:
    """The network of `spec` from its padded form `net`; `net` itself if it has that spec."""
    return net if net.spec == spec else fused_module("padding").to_unpadded(net, spec)


def fused_module(name: str) -> ModuleType:
    """The module `nets.fused.<name>`. Raises ValueError if the room is not installed."""
    try:
        return import_module(f"{FUSED}.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(FUSED):
            raise
        raise ValueError(
            "the fused form is not part of this installation: use efficiency plain"
        ) from None
