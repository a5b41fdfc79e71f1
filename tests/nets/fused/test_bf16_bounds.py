"""Errors of gradients in bf16: a step of whole published networks, fused and plain."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride.nets.families import SPECS
from fullstride.nets.fused.network import to_fused
from fullstride.nets.layers import ConvNorm
from fullstride.nets.network import Network

TIMES_PLAIN = 4  # that a lean network's error may be of a plain one's whose maps are kept in bf16
LARGEST_ERROR = 0.02  # relative, of all gradients together
LEAST_COSINE = 0.9995  # of the worst convolution's gradients


class RoundedConvolutions(TorchDispatchMode):
    """What convolutions put out is rounded to bf16, as under autocast, so that keeping it so
    changes no sign."""

    def __init__(self, net: Network):
        super().__init__()
        self.weights = {
            layer.conv.weight.data_ptr() for layer in net.modules() if isinstance(layer, ConvNorm)
        }
        self.rounded = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        ours = name in ("fullstride::conv", "fullstride::pool")  # which have a convolution inside
        if ours or name == "aten::convolution" and args[1].data_ptr() in self.weights:
            first = out[0] if isinstance(out, tuple) else out
            first.copy_(first.bfloat16())
            self.rounded += 1
        return out


@contextmanager
def kept_in_bf16() -> Iterator[None]:
    def pack(t: Tensor) -> tuple[Tensor, torch.dtype]:
        return t.bfloat16() if t.dim() == 4 and not isinstance(t, nn.Parameter) else t, t.dtype

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[0].to(kept[1])):
        yield


def gradients(net: Network, x: Tensor, *, rounded: bool) -> dict[str, Tensor]:
    """By name, in float32 arithmetic; of maps that are kept as they are, or rounded to bf16."""
    net = copy.deepcopy(net)
    convolutions = RoundedConvolutions(net)
    with ExitStack() as stack:
        if rounded:
            stack.enter_context(kept_in_bf16())
        with convolutions:
            logits = net(x)
        F.cross_entropy(logits, torch.arange(len(x))).backward()
    assert convolutions.rounded == sum(isinstance(layer, ConvNorm) for layer in net.modules())
    return {
        name: p.grad.double().flatten() for name, p in net.named_parameters() if p.grad is not None
    }


def distance(net: Network, x: Tensor) -> tuple[float, float]:
    """Of the gradients from rounded maps to those from exact ones: the error of all, the cosine of
    the worst layer.

    The same network, whose two forward passes give the same bits, so that nothing but what is kept
    makes a difference: lean and plain ones add in other orders, and their gradients in float32 are
    a hundredth apart by that alone.
    """
    exact, found = (gradients(net, x, rounded=rounded) for rounded in (False, True))
    whole, other = (torch.cat(list(each.values())) for each in (exact, found))
    kernels = [name for name, p in net.named_parameters() if p.dim() == 4]
    worst = min(F.cosine_similarity(found[name], exact[name], 0).item() for name in kernels)
    return ((other - whole).norm() / whole.norm()).item(), worst


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "images", "side"),
    [("tresnet_m", 16, 160), ("resnet_rs_50", 8, 96), ("genet_large", 8, 96)],
)
def test_keeping_bf16_costs_a_lean_network_at_most_four_times_what_it_costs_a_plain_one(
    name, images, side
):
    torch.manual_seed(0)
    net = Network(SPECS[name]).train()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.2, 1.2)
    x = torch.randn(images, 3, side, side)
    plain, _ = distance(net, x)
    error, worst = distance(to_fused(net), x)
    print(f"{name}: lean {error:.4f}, worst cosine {worst:.6f}; plain {plain:.4f}")
    assert error <= min(LARGEST_ERROR, TIMES_PLAIN * plain)
    assert worst >= LEAST_COSINE
