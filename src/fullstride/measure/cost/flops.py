"""What does a network ask for, whatever the device? Parameters, multiply-adds and activations of its module.

MACs are multiply-adds, FLOPs are 2 x MACs. TResNet and GENet print MACs under the name FLOPs, ResNet-RS
prints 2 x MACs.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

COUNTED = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear


@dataclass(frozen=True)
class Cost:
    """Of one image through a whole network."""

    params: int  # of all layers; running statistics and fixed filters are none
    macs: int  # multiply-adds of convolutions and matrix products, fixed blur filters included; FLOPs are twice this
    activations: (
        int  # elements put out by convolutions and linear layers: what memory traffic grows with
    )
    resolution: int  # pixels a side of the image


@dataclass(frozen=True)
class LayerCost:
    """Of one image through one convolution or linear layer."""

    name: str
    shape_in: tuple[int, ...]  # without the image dimension
    shape_out: tuple[int, ...]
    params: int
    macs: int  # multiply-adds
    activations: int  # elements put out


def cost(net: nn.Module | Callable[[], nn.Module], resolution: int, in_channels: int = 3) -> Cost:
    """The cost of a network, or of what a function builds. Nothing is computed: it runs on the meta device.

    MACs are multiply-adds, FLOPs are 2 x MACs.
    """
    net = on_meta(net)
    with FlopCounterMode(display=False) as counter:
        rows = run(net, resolution, in_channels)
    return Cost(
        params=sum(p.numel() for p in net.parameters()),
        macs=counter.get_total_flops() // 2,
        activations=sum(row.activations for row in rows),
        resolution=resolution,
    )


def layer_costs(
    net: nn.Module | Callable[[], nn.Module], resolution: int, in_channels: int = 3
) -> list[LayerCost]:
    """One row per call of a convolution or linear layer, in the order of the forward pass.

    Their MACs add up to those of `cost` but for fixed filters (the blurs of TResNet) and products of two
    activations (attention), which are no layers.
    """
    return run(on_meta(net), resolution, in_channels)


def on_meta(net: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """A copy of the network, ready to be run, whose tensors have shapes and no memory."""
    if isinstance(net, nn.Module):
        # deepcopy takes what the memo holds instead of copying it: no weight is duplicated on the way
        memo: dict[int, object] = {
            id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in net.parameters()
        }
        memo |= {id(b): b.to("meta") for b in net.buffers()}
        return copy.deepcopy(net, memo).eval()
    with torch.device("meta"):
        return net().eval()


def run(net: nn.Module, resolution: int, in_channels: int) -> list[LayerCost]:
    rows: list[LayerCost] = []

    def note(name: str, layer: nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear) -> None:
        def hook(_layer, inputs, out):
            params = sum(p.numel() for p in layer.parameters())
            macs = out.numel() * layer.weight[0].numel()
            rows.append(
                LayerCost(
                    name,
                    tuple(inputs[0].shape[1:]),
                    tuple(out.shape[1:]),
                    params,
                    macs,
                    out.numel(),
                )
            )

        layer.register_forward_hook(hook)

    for name, layer in net.named_modules():
        if isinstance(layer, COUNTED):
            note(name, layer)
    try:
        with torch.inference_mode():
            net(torch.empty(1, in_channels, resolution, resolution, device="meta"))
    except (RuntimeError, AssertionError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the network takes no {in_channels} x {resolution} x {resolution} image: {why}"
        ) from None
    return rows
