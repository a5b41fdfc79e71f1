"""What do several tests need? Networks whose every number matters, and who is called what in
timm."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fullstride.nets.families import SPECS
from fullstride.nets.spec import NetSpec

# Ours -> timm's.
TIMM = {
    **{name: name for name in ("tresnet_m", "tresnet_l", "tresnet_xl", "tresnet_v2_l")},
    **{f"resnet_rs_{depth}": f"resnetrs{depth}" for depth in (50, 101, 152, 200, 270, 350, 420)},
    "genet_light": "gernet_s",
    "genet_normal": "gernet_m",
    "genet_large": "gernet_l",
    **{
        name: name
        for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet50d")
    },
}


def randomise(
    net: nn.Module,
    generator: torch.Generator,
    resolution: int = 64,
    channels: int = 3,
    frames: int = 0,
) -> nn.Module:
    """Draw all that an initialisation leaves at zero or one, and leave `net` in evaluation mode.

    Gains, shifts and means get both signs. Each batch norm's statistics are near those of what it
    meets when noise passes: otherwise a deep network would amplify beyond the range of numbers.
    """

    def normal(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    def between(like: Tensor, low: float, high: float) -> Tensor:
        return torch.rand(like.shape, generator=generator) * (high - low) + low

    def settle(norm: nn.BatchNorm2d, inputs: tuple[Tensor]):
        x = inputs[0]
        means = x.transpose(0, 1).flatten(1).mean(1)
        norm.running_mean.copy_(means + x.std() * normal(norm.running_mean, 0.3))
        norm.running_var.copy_(x.var() * between(norm.running_var, 0.5, 1.5))

    with torch.no_grad():
        hooks = []
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm3d):
                layer.weight.copy_(between(layer.weight, 0.5, 1.5) * normal(layer.weight, 1).sign())
                layer.bias.copy_(normal(layer.bias, 0.3))
                hooks.append(layer.register_forward_pre_hook(settle))
            elif isinstance(layer, nn.Conv2d | nn.Conv3d | nn.Linear) and layer.bias is not None:
                layer.bias.copy_(normal(layer.bias, 1))
        size = (*([frames] if frames else []), resolution, resolution)
        net.eval()(torch.randn(2, channels, *size, generator=generator))
        for hook in hooks:
            hook.remove()
    return net


def first_block(name: str) -> NetSpec:
    """The spec of a network with its first block alone: each kernel takes a second to compile."""
    first = SPECS[name].stages[0]
    return replace(SPECS[name], stages=(replace(first, depth=1),))
