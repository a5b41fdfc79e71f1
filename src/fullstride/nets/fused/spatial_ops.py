"""What do the fused operators over several pixels compute, and what are their gradients?

They are those of `batch_norm.bn_act_conv`, `pool_conv` and `bn_act_blur`. The conventions are those
of `pointwise_ops`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from fullstride.nets.fused.dispatch import choose
from fullstride.nets.fused.statistics import (
    Norm,
    empty_map,
    empty_numbers,
    in_format_of,
    statistics,
    without_autocast,
)


@custom_op("fullstride::conv", mutates_args=())
@without_autocast
def bn_act_conv(
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    weight: Tensor,
    geometry: Sequence[int],
    slope: float | None,
    eps: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    """conv(act(norm(x))) and the batch statistics of x. `geometry`: strides, paddings, groups."""
    batch_stats, _ = statistics(x, group)
    inside = in_format_of(
        choose(x).bn_add_act(x, Norm.of(batch_stats, gain, bias, eps).affine(), None, None, slope),
        x,
    )
    return in_format_of(
        F.conv2d(inside, weight, None, geometry[:2], geometry[2:4], 1, geometry[4]), x
    ), batch_stats


@bn_act_conv.register_fake
def _(x, gain, bias, weight, geometry, slope, eps, group):
    sides = (
        (side + 2 * padding - kernel) // stride + 1
        for side, kernel, stride, padding in zip(
            x.shape[2:], weight.shape[2:], geometry[:2], geometry[2:4], strict=True
        )
    )
    return empty_map(x, len(x), len(weight), *sides), empty_numbers(x, 3, x.shape[1])


@custom_op("fullstride::conv_backward", mutates_args=())
@without_autocast
def bn_act_conv_backward(
    grad: Tensor,
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    weight: Tensor,
    batch_stats: Tensor,
    geometry: Sequence[int],
    slope: float | None,
    eps: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gain, bias and weight."""
    kernels = choose(x)
    norm = Norm.of(batch_stats, gain, bias, eps)
    inside = in_format_of(kernels.bn_add_act(x, norm.affine(), None, None, slope), x)
    strides, paddings, groups = geometry[:2], geometry[2:4], geometry[4]
    grad_inside, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad,
        inside,
        weight,
        None,
        strides,
        paddings,
        [1, 1],
        False,
        [0, 0],
        groups,
        [True, True, False],
    )
    d_nc, d_x_nc, _ = kernels.bn_add_act_sums(
        grad_inside, inside, x, norm.affine(), None, None, slope
    )
    grad_gain, grad_bias, slopes = norm.gradients(d_nc, d_x_nc, group)
    grad_x, _ = kernels.bn_add_act_gradients(
        grad_inside, inside, x, norm.affine(), slopes, None, None, None, slope
    )
    return (
        in_format_of(grad_x, x),
        grad_gain.to(gain.dtype),
        grad_bias.to(bias.dtype),
        in_format_of(grad_weight, weight),
    )


@bn_act_conv_backward.register_fake
def _(grad, x, gain, bias, weight, batch_stats, geometry, slope, eps, group):
    return empty_map(x), torch.empty_like(gain), torch.empty_like(bias), empty_map(weight)


def save_for_bn_act_conv(ctx, inputs, output) -> None:
    x, gain, bias, weight, ctx.geometry, ctx.slope, ctx.eps, ctx.group = inputs
    batch_stats = output[1]
    ctx.mark_non_differentiable(batch_stats)
    ctx.save_for_backward(x, gain, bias, weight, batch_stats)


def differentiate_bn_act_conv(ctx, grad, _):
    grad_x, grad_gain, grad_bias, grad_weight = bn_act_conv_backward(
        grad, *ctx.saved_tensors, ctx.geometry, ctx.slope, ctx.eps, ctx.group
    )
    return grad_x, grad_gain, grad_bias, grad_weight, *[None] * 4


bn_act_conv.register_autograd(differentiate_bn_act_conv, setup_context=save_for_bn_act_conv)


# Of `layers.average_pool`: kernel, stride, padding, ceil_mode, count_include_pad
POOL = ([2, 2], [2, 2], [0, 0], True, False)


@custom_op("fullstride::pool", mutates_args=())
@without_autocast
def pool_conv(x: Tensor, weight: Tensor) -> Tensor:
    return in_format_of(F.conv2d(F.avg_pool2d(x, *POOL), weight), x)


@pool_conv.register_fake
def _(x, weight):
    return empty_map(x, len(x), len(weight), *((side + 1) // 2 for side in x.shape[2:]))


@custom_op("fullstride::pool_backward", mutates_args=())
@without_autocast
def pool_conv_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    grad_pooled, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad,
        F.avg_pool2d(x, *POOL),
        weight,
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        [True, True, False],
    )
    return in_format_of(
        torch.ops.aten.avg_pool2d_backward(grad_pooled, x, *POOL, None), x
    ), in_format_of(grad_weight, weight)


@pool_conv_backward.register_fake
def _(grad, x, weight):
    return empty_map(x), empty_map(weight)


def save_for_pool_conv(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def differentiate_pool_conv(ctx, grad):
    return pool_conv_backward(grad, *ctx.saved_tensors)


pool_conv.register_autograd(differentiate_pool_conv, setup_context=save_for_pool_conv)


@custom_op("fullstride::blur", mutates_args=())
@without_autocast
def bn_act_blur(
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    slope: float | None,
    eps: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """blur(act(norm(x))), its means over the pixels (N, C), and the batch statistics."""
    batch_stats, _ = statistics(x, group)
    y, means_nc = choose(x).blurred(x, Norm.of(batch_stats, gain, bias, eps).affine(), slope)
    return in_format_of(y, x), means_nc, batch_stats


@bn_act_blur.register_fake
def _(x, gain, bias, slope, eps, group):
    n, c, h, w = x.shape
    return (
        empty_map(x, n, c, (h + 1) // 2, (w + 1) // 2),
        empty_numbers(x, n, c),
        empty_numbers(x, 3, c),
    )


@custom_op("fullstride::blur_backward", mutates_args=())
@without_autocast
def bn_act_blur_backward(
    grad: Tensor,
    grad_means: Tensor,
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    batch_stats: Tensor,
    slope: float | None,
    eps: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gain and bias."""
    kernels = choose(x)
    norm = Norm.of(batch_stats, gain, bias, eps)
    squeeze_nc = grad_means / (grad.shape[2] * grad.shape[3])
    d_nc, d_x_nc = kernels.blurred_sums(grad, squeeze_nc, x, norm.affine(), slope)
    grad_gain, grad_bias, slopes = norm.gradients(d_nc, d_x_nc, group)
    grad_x = kernels.blurred_gradients(grad, squeeze_nc, x, norm.affine(), slopes, slope)
    return in_format_of(grad_x, x), grad_gain.to(gain.dtype), grad_bias.to(bias.dtype)


@bn_act_blur_backward.register_fake
def _(grad, grad_means, x, gain, bias, batch_stats, slope, eps, group):
    return empty_map(x), torch.empty_like(gain), torch.empty_like(bias)


def save_for_bn_act_blur(ctx, inputs, output) -> None:
    x, gain, bias, ctx.slope, ctx.eps, ctx.group = inputs
    batch_stats = output[2]
    ctx.mark_non_differentiable(batch_stats)
    ctx.save_for_backward(x, gain, bias, batch_stats)


def differentiate_bn_act_blur(ctx, grad, grad_means, _):
    grad_x, grad_gain, grad_bias = bn_act_blur_backward(
        grad, grad_means, *ctx.saved_tensors, ctx.slope, ctx.eps, ctx.group
    )
    return grad_x, grad_gain, grad_bias, *[None] * 3


bn_act_blur.register_autograd(differentiate_bn_act_blur, setup_context=save_for_bn_act_blur)
