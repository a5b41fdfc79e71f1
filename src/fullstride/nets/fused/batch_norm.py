"""Normalises and activates a convolution's outputs with few tensors saved for backward.

Batch norm in training, and everything up to the next convolution, in few passes over the maps. The
gains are merged with the squeeze-and-excitation gate and the stochastic-depth mask into one scale
and one shift per image and channel. The operators behind these functions are functional; the
running statistics are updated here, as in `nn.BatchNorm2d`. In evaluation, use that module itself.

`slope` is the activation's negative slope: 0 is ReLU, None is no activation. `group` names a
process group that shares batch statistics; "" means each process computes its own.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fullstride.nets.fused import ops

# An input is recomputed from its output if no |bias / gain| is above MAX_OFFSET: in bf16 within
# 2^-6 of its standard deviation. Below MIN_INVERTIBLE_GAIN, float16 runs out of digits.
MAX_OFFSET, MIN_INVERTIBLE_GAIN = 8.0, 1e-3


Shortcut = tuple[()] | tuple[Tensor] | tuple[Tensor, nn.BatchNorm2d]


def bn_add_relu(
    x: Tensor,
    norm: nn.BatchNorm2d,
    shortcut: Shortcut = (),
    *,
    se: Sequence[Tensor] = (),
    mask: Tensor | None = None,
    slope: float | None = 0.0,
    saved: Literal["both", "input", "output", "int8"] = "both",
    group: str = "",
) -> Tensor:
    """The end of a block: act(mask * gate * norm(x) + shortcut); the shortcut may have a norm.

    All maps are (N, C, H, W); `se` holds the weights and biases of the gate's two convolutions,
    `mask` is (N, 1, 1, 1). With `saved` "both", x, a shortcut that has a norm, and the result are
    saved; the next convolution saves the result anyway. "input" is for the case that no
    convolution follows: any shortcut is saved, and the backward pass recomputes the result. Both
    are exact at any gain, also at zero. "output" is as in `bn_act`, without a shortcut.

    With "int8", the backward pass gets x, and a shortcut that has a norm, as int8: the normalised
    value up to 6 standard deviations, in steps of 0.047. x has every second step only, odd
    where the result is positive. The result does not change; gradients of the norms change by the
    rounding.
    """
    check(x, norm, group)
    norms, other = [norm], []
    if shortcut:
        if shortcut[0].shape != x.shape:
            raise ValueError(
                f"a branch of {tuple(x.shape)} and a shortcut of {tuple(shortcut[0].shape)}: "
                "use maps of equal shape"
            )
        other.append(shortcut[0].to(x.dtype))
    if len(shortcut) == 2:
        check(*shortcut, group)
        norms.append(shortcut[1])
        other += [shortcut[1].weight, shortcut[1].bias]
    eps, gain, bias = [each.eps for each in norms], norm.weight, norm.bias
    y, stats, *_ = ops.bn_add_act(x, gain, bias, list(se), other, mask, slope, eps, saved, group)
    for each, its_stats in zip(norms, stats, strict=True):
        update(each, its_stats, x, group)
    return y


def bn_act(
    x: Tensor,
    norm: nn.BatchNorm2d,
    slope: float | None,
    *,
    saved: Literal["both", "input", "output"] = "both",
    group: str = "",
) -> Tensor:
    """act(norm(x)), saving x and the result, or one of the two and recomputing the other.

    "both" costs one map if the next layer saves the result anyway. `is_invertible` says whether
    "output" may be used.
    """
    if saved == "output" and slope is not None and not slope > 0:
        raise ValueError(f'slope {slope} cannot be inverted: use saved="both", or a slope above 0')
    return bn_add_relu(x, norm, slope=slope, saved=saved, group=group)


def bn_act_conv(
    x: Tensor, norm: nn.BatchNorm2d, slope: float | None, conv: nn.Conv2d, *, group: str = ""
) -> Tensor:
    """conv(act(norm(x))), saving x alone: backward recomputes the convolution's input, exactly.

    For a convolution without bias and with zero padding.
    """
    check(x, norm, group)
    weight = conv.weight.to(x.dtype)  # as autocast does
    assert isinstance(conv.padding, tuple)
    geometry = [*conv.stride, *conv.padding, conv.groups]
    gain, bias = norm.weight, norm.bias
    y, stats = ops.bn_act_conv(x, gain, bias, weight, geometry, slope, norm.eps, group)
    update(norm, stats[0], x, group)
    return y


def pool_conv(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """conv(average_pool(x)) for a 1 x 1 convolution and `layers.average_pool`: saves x alone."""
    return ops.pool_conv(x, conv.weight.to(x.dtype))


def bn_act_se(
    x: Tensor, norm: nn.BatchNorm2d, se: Sequence[Tensor], slope: float, *, group: str = ""
) -> Tensor:
    """gate * act(norm(x)), with the gate of act(norm(x)). Saves only the result, as `bn_act` can.

    `se` holds the weights and biases of the gate's two convolutions.
    """
    if not slope > 0:
        raise ValueError(
            f"slope {slope} cannot be inverted: use bn_act and SqueezeExcite, or a slope above 0"
        )
    check(x, norm, group)
    gain, bias = norm.weight, norm.bias
    y, stats, *_ = ops.bn_act_se(x, gain, bias, list(se), slope, norm.eps, group)
    update(norm, stats, x, group)
    return y


def bn_act_blur(
    x: Tensor, norm: nn.BatchNorm2d, slope: float | None, *, group: str = ""
) -> tuple[Tensor, Tensor]:
    """blur(act(norm(x))) as by `BlurPool`, and its means over the pixels (N, C). Saves x alone."""
    check(x, norm, group)
    gain, bias = norm.weight, norm.bias
    y, means, stats = ops.bn_act_blur(x, gain, bias, slope, norm.eps, group)
    update(norm, stats, x, group)
    return y, means


@torch.no_grad()
def is_invertible(norm: nn.BatchNorm2d) -> Tensor:
    """Whether an input can be recomputed from its output: one boolean, on the device.

    In bf16 the normalised input has an error of 2^-9 * |input + bias / gain|, so |bias / gain| of
    each channel must be at most `MAX_OFFSET`, and |gain| at least `MIN_INVERTIBLE_GAIN`.
    """
    size = norm.weight.abs()
    return ((norm.bias.abs() <= MAX_OFFSET * size) & (size >= MIN_INVERTIBLE_GAIN)).all()


def check(x: Tensor, norm: nn.BatchNorm2d, group: str) -> None:
    """Raise ValueError if batch statistics of `x` cannot be computed."""
    if norm.momentum is None or norm.running_mean is None or norm.weight is None:
        raise ValueError(
            "a batch norm without gain, running statistics or momentum: use PyTorch's defaults"
        )
    if not x.is_floating_point():
        raise ValueError(f"batch norm of a map of {x.dtype}: use a floating-point type")
    if x.dim() != 4 or x.shape[1] != norm.num_features:
        raise ValueError(f"a map of {tuple(x.shape)}: use one of (N, {norm.num_features}, H, W)")
    if x.device != norm.weight.device:
        raise ValueError(
            f"a map on {x.device} and a batch norm on {norm.weight.device}: use one device"
        )
    if not group and x.numel() == x.shape[1]:
        raise ValueError(
            f"a map of {tuple(x.shape)} has one value per channel: use more or larger images"
        )


@torch.no_grad()
def update(norm: nn.BatchNorm2d, stats: Tensor, x: Tensor, group: str) -> None:
    """Update the running statistics from the batch statistics, as `nn.BatchNorm2d` does."""
    assert norm.momentum is not None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    if x.numel() == 0 and not group:
        return
    count, mean, variance = stats.to(norm.running_mean.dtype)
    norm.running_mean.lerp_(mean, norm.momentum)
    norm.running_var.lerp_(variance * count / (count - 1).clamp(min=1), norm.momentum)
