"""What does a network cost on any device? Parameters, multiply-adds (MACs) and activations.

FLOPs are 2 x MACs. TResNet and GENet print MACs under the name FLOPs, ResNet-RS prints 2 x MACs.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fullstride.nets.backbone import batch_shape

COUNTED = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear


@dataclass(frozen=True)
class Cost:
    """Of one image through a whole network."""

    params: int  # of all layers, without running statistics and fixed filters
    macs: int  # of convolutions and matrix products, fixed blur filters included; FLOPs are 2 x
    activations: int  # output elements of convolutions and linear layers; memory traffic grows so
    resolution: int  # pixels a side of the image


@dataclass(frozen=True)
class LayerCost:
    """Of one image through one convolution or linear layer."""

    name: str
    shape_in: tuple[int, ...]  # without the image dimension
    shape_out: tuple[int, ...]
    params: int
    macs: int  # multiply-adds
    activations: int  # output elements


def cost(net: nn.Module | Callable[[], nn.Module], resolution: int, in_channels: int = 3) -> Cost:
    """The cost of a network, or of the network that a function builds, for one square image.

    It runs on the meta device, so that nothing is computed. FLOPs are 2 x MACs. Raises ValueError
    for an image that the network does not take.
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

    Their MACs add up to those of `cost` except for fixed filters (TResNet's blurs) and products of
    two activations (attention), which are not layers.
    """
    return run(on_meta(net), resolution, in_channels)


def on_meta(net: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """A copy of the network on the meta device, in evaluation mode."""
    if isinstance(net, nn.Module):
        # deepcopy takes tensors from the memo instead of copying them: no weight is duplicated
        memo: dict[int, object] = {
            id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in net.parameters()
        }
        memo |= {id(b): b.to("meta") for b in net.buffers()}
        return copy.deepcopy(net, memo).eval()
    with torch.device("meta"):
        return net().eval()


def without_unused(build: Callable[[], nn.Module], resolution: int, in_channels: int) -> nn.Module:
    """The network on the meta device, without parameters that its outputs do not depend on.

    Such are those of the classifier beside the head of a task, which files do not have. Raises
    ValueError for an image that the network does not take.
    """
    with torch.device("meta"):
        net = build().eval().requires_grad_()
    image = torch.empty(batch_shape(net, 1, in_channels, resolution), device="meta")
    with unfit_image(image):
        outputs = [leaf for leaf in tree_leaves(net(image)) if leaf.requires_grad]
    parameters = dict(net.named_parameters())
    gradients = torch.autograd.grad(
        [leaf.sum() for leaf in outputs], list(parameters.values()), allow_unused=True
    )
    for path, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            layer, _, name = path.rpartition(".")
            setattr(net.get_submodule(layer), name, None)
    return net


def run(net: nn.Module, resolution: int, in_channels: int) -> list[LayerCost]:
    rows: list[LayerCost] = []

    def watch(name: str, layer: nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear) -> None:
        def hook(_layer, inputs, out):
            shapes = tuple(inputs[0].shape[1:]), tuple(out.shape[1:])
            params = sum(p.numel() for p in layer.parameters())
            macs = out.numel() * layer.weight[0].numel()
            rows.append(LayerCost(name, *shapes, params, macs, out.numel()))

        layer.register_forward_hook(hook)

    for name, layer in net.named_modules():
        if isinstance(layer, COUNTED):
            watch(name, layer)
    image = torch.empty(batch_shape(net, 1, in_channels, resolution), device="meta")
    with unfit_image(image), torch.inference_mode():
        net(image)
    return rows


@contextmanager
def unfit_image(image: torch.Tensor) -> Iterator[None]:
    """Turn the error of a network that does not take `image` into a ValueError of one line."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        shape = " x ".join(map(str, image.shape[1:]))
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"the network takes no {shape} image: {reason}") from None
