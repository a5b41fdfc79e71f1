"""What do the lean operators compute that look at more than one pixel at once, and what do their gradients?

Those of `abn_conv`, `pool_conv` and `abn_blur`; what `operators.py` says of its own holds for them too.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from fullstride.nets.fused.dispatch import choose
from fullstride.nets.fused.statistics import (
    Norm,
    laid,
    like,
    numbers,
    precise,
    statistics,
)

# ---- conv(act(norm(x))): `abn_conv`.


@custom_op("fullstride::conv", mutates_args=())
@precise
def conv(
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    pivot: Tensor,
    weight: Tensor,
    geometry: Sequence[int],
    slope: float | None,
    eps: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    """The convolution's output and the moments of its input. `geometry`: strides, paddings, groups."""
    moments, _ = statistics(x, pivot, group)
    inside = laid(
        choose(x).join(x, Norm.of(moments, gain, bias, eps).affine(), None, None, slope), x
    )
    return laid(
        F.conv2d(inside, weight, None, geometry[:2], geometry[2:4], 1, geometry[4]), x
    ), moments


@conv.register_fake
def _(x, gain, bias, pivot, weight, geometry, slope, eps, group):
    sides = (
        (side + 2 * padding - kernel) // stride + 1
        for side, kernel, stride, padding in zip(
            x.shape[2:], weight.shape[2:], geometry[:2], geometry[2:4], strict=True
        )
    )
    return like(x, len(x), len(weight), *sides), numbers(x, 3, x.shape[1])


@custom_op("fullstride::conv_backward", mutates_args=())
@precise
def conv_backward(
    grad: Tensor,
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    weight: Tensor,
    moments: Tensor,
    geometry: Sequence[int],
    slope: float | None,
    eps: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gain, bias and weight."""
    kernels = choose(x)
    norm = Norm.of(moments, gain, bias, eps)
    inside = laid(kernels.join(x, norm.affine(), None, None, slope), x)
    strides, paddings, groups = geometry[:2], geometry[2:4], geometry[4]
    of_inside, of_weight, _ = torch.ops.aten.convolution_backward(
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
    d_nc, d_x_nc, _ = kernels.join_sums(of_inside, inside, x, norm.affine(), None, None, slope)
    of_gain, of_bias, slopes = norm.gradients(d_nc, d_x_nc, group)
    of_x, _ = kernels.join_gradients(
        of_inside, inside, x, norm.affine(), slopes, None, None, None, slope
    )
    return laid(of_x, x), of_gain.to(gain.dtype), of_bias.to(bias.dtype), laid(of_weight, weight)


@conv_backward.register_fake
def _(grad, x, gain, bias, weight, moments, geometry, slope, eps, group):
    return like(x), torch.empty_like(gain), torch.empty_like(bias), like(weight)


def keep_for_conv(ctx, inputs, output) -> None:
    x, gain, bias, _, weight, ctx.geometry, ctx.slope, ctx.eps, ctx.group = inputs
    moments = output[1]
    ctx.mark_non_differentiable(moments)
    ctx.save_for_backward(x, gain, bias, weight, moments)


def differentiate_conv(ctx, grad, _):
    of_x, of_gain, of_bias, of_weight = conv_backward(
        grad, *ctx.saved_tensors, ctx.geometry, ctx.slope, ctx.eps, ctx.group
    )
    return of_x, of_gain, of_bias, None, of_weight, *[None] * 4


conv.register_autograd(differentiate_conv, setup_context=keep_for_conv)


# ---- conv(average(x)): `pool_conv`.

POOL = (
    [2, 2],
    [2, 2],
    [0, 0],
    True,
    False,
)  # kernel, stride, padding, round up, and pixels outside do not count


@custom_op("fullstride::pool", mutates_args=())
@precise
def pool(x: Tensor, weight: Tensor) -> Tensor:
    return laid(F.conv2d(F.avg_pool2d(x, *POOL), weight), x)


@pool.register_fake
def _(x, weight):
    return like(x, len(x), len(weight), *((side + 1) // 2 for side in x.shape[2:]))


@custom_op("fullstride::pool_backward", mutates_args=())
@precise
def pool_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    of_pooled, of_weight, _ = torch.ops.aten.convolution_backward(
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
    return laid(torch.ops.aten.avg_pool2d_backward(of_pooled, x, *POOL, None), x), laid(
        of_weight, weight
    )


@pool_backward.register_fake
def _(grad, x, weight):
    return like(x), like(weight)


def keep_for_pool(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def differentiate_pool(ctx, grad):
    return pool_backward(grad, *ctx.saved_tensors)


pool.register_autograd(differentiate_pool, setup_context=keep_for_pool)


# ---- blur(act(norm(x))): `abn_blur`.


@custom_op("fullstride::blur", mutates_args=())
@precise
def blur(
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    pivot: Tensor,
    slope: float | None,
    eps: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, its means (N, C), and the moments."""
    moments, _ = statistics(x, pivot, group)
    y, means_nc = choose(x).blurred(x, Norm.of(moments, gain, bias, eps).affine(), slope)
    return laid(y, x), means_nc, moments


@blur.register_fake
def _(x, gain, bias, pivot, slope, eps, group):
    n, c, h, w = x.shape
    return like(x, n, c, (h + 1) // 2, (w + 1) // 2), numbers(x, n, c), numbers(x, 3, c)


@custom_op("fullstride::blur_backward", mutates_args=())
@precise
def blur_backward(
    grad: Tensor,
    of_means: Tensor,
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    moments: Tensor,
    slope: float | None,
    eps: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gain and bias."""
    kernels = choose(x)
    norm = Norm.of(moments, gain, bias, eps)
    squeeze_nc = of_means / (grad.shape[2] * grad.shape[3])
    d_nc, d_x_nc = kernels.blurred_sums(grad, squeeze_nc, x, norm.affine(), slope)
    of_gain, of_bias, slopes = norm.gradients(d_nc, d_x_nc, group)
    of_x = kernels.blurred_gradients(grad, squeeze_nc, x, norm.affine(), slopes, slope)
    return laid(of_x, x), of_gain.to(gain.dtype), of_bias.to(bias.dtype)


@blur_backward.register_fake
def _(grad, of_means, x, gain, bias, moments, slope, eps, group):
    return like(x), torch.empty_like(gain), torch.empty_like(bias)


def keep_for_blur(ctx, inputs, output) -> None:
    x, gain, bias, _, ctx.slope, ctx.eps, ctx.group = inputs
    moments = output[2]
    ctx.mark_non_differentiable(moments)
    ctx.save_for_backward(x, gain, bias, moments)


def differentiate_blur(ctx, grad, of_means, _):
    of_x, of_gain, of_bias = blur_backward(
        grad, of_means, *ctx.saved_tensors, ctx.slope, ctx.eps, ctx.group
    )
    return of_x, of_gain, of_bias, *[None] * 4


blur.register_autograd(differentiate_blur, setup_context=keep_for_blur)
