"""Computes the fused operators over several pixels, and their gradients.

They implement `batch_norm.bn_act_conv`, `pool_conv` and `bn_act_blur`, by the conventions of
`pointwise_ops`.
"""

import torch
import torch.nn.functional as F

from fullstride.nets.fused.operators import choose, in_format_of, operator, set_gradient
from fullstride.nets.fused.pointwise_ops import bn_add_act, bn_add_act_backward
from fullstride.nets.fused.reference import Term
from fullstride.nets.fused.statistics import Norm, statistics

# The arguments of `layers.average_pool`: kernel, stride, padding, ceil_mode, count_include_pad
POOL = ([2, 2], [2, 2], [0, 0], True, False)


@operator(
    "conv",
    "(Tensor x, Tensor gain, Tensor bias, Tensor weight, int[] geometry, float? slope, float eps,"
    " str group) -> (Tensor y, Tensor batch_stats)",
)
def bn_act_conv(x, gain, bias, weight, geometry, slope, eps, group):
    """conv(act(norm(x))) and the batch statistics of x. `geometry`: strides, paddings, groups."""
    inside, batch_stats, *_ = bn_add_act(x, gain, bias, [], [], None, slope, [eps], "input", group)
    y = F.conv2d(inside, weight, None, geometry[:2], geometry[2:4], 1, geometry[4])
    return in_format_of(y, x), batch_stats


@operator(
    "conv_backward",
    "(Tensor grad, Tensor x, Tensor gain, Tensor bias, Tensor weight, Tensor batch_stats,"
    " int[] geometry, float? slope, float eps, str group) -> (Tensor, Tensor, Tensor, Tensor)",
)
def bn_act_conv_backward(grad, x, gain, bias, weight, batch_stats, geometry, slope, eps, group):
    """Gradients of x, gain, bias and weight."""
    affine = Norm.of(batch_stats[0], gain, bias, eps).affine()
    inside = in_format_of(choose(x).bn_add_act(Term(x, affine), None, slope)[0], x)
    grad_inside, grad_weight = conv_gradients(grad, inside, weight, geometry)
    no_gate = batch_stats.new_empty(0)
    rest = [], [], None, slope, [eps], group
    grads = bn_add_act_backward(grad_inside, inside, x, gain, bias, batch_stats, no_gate, *rest)
    return *grads, in_format_of(grad_weight, weight)


def conv_gradients(grad, x, weight, geometry):
    """Gradients of a convolution's input and weight."""
    strides, paddings, groups = geometry[:2], geometry[2:4], geometry[4]
    rest = [1, 1], False, [0, 0], groups, [True, True, False]
    return torch.ops.aten.convolution_backward(grad, x, weight, None, strides, paddings, *rest)[:2]


set_gradient("conv")


@operator("pool", "(Tensor x, Tensor weight) -> Tensor")
def pool_conv(x, weight):
    return in_format_of(F.conv2d(F.avg_pool2d(x, *POOL), weight), x)


@operator("pool_backward", "(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)")
def pool_conv_backward(grad, x, weight):
    """Gradients of x and weight."""
    pooled = F.avg_pool2d(x, *POOL)
    grad_pooled, grad_weight = conv_gradients(grad, pooled, weight, [1, 1, 0, 0, 1])
    grad_x = torch.ops.aten.avg_pool2d_backward(grad_pooled, x, *POOL, None)
    return in_format_of(grad_x, x), in_format_of(grad_weight, weight)


set_gradient("pool")


@operator(
    "blur",
    "(Tensor x, Tensor gain, Tensor bias, float? slope, float eps, str group)"
    " -> (Tensor y, Tensor means_nc, Tensor batch_stats)",
)
def bn_act_blur(x, gain, bias, slope, eps, group):
    """blur(act(norm(x))), its means over the pixels (N, C), and the batch statistics."""
    batch_stats, _ = statistics(x, group)
    term = Term(x, Norm.of(batch_stats, gain, bias, eps).affine())
    y, means_nc = choose(x).blurred(term, slope)
    return in_format_of(y, x), means_nc, batch_stats


@operator(
    "blur_backward",
    "(Tensor grad, Tensor grad_means, Tensor x, Tensor gain, Tensor bias, Tensor batch_stats,"
    " float? slope, float eps, str group) -> (Tensor, Tensor, Tensor)",
)
def bn_act_blur_backward(grad, grad_means, x, gain, bias, batch_stats, slope, eps, group):
    """Gradients of x, gain and bias."""
    kernels = choose(x)
    norm = Norm.of(batch_stats, gain, bias, eps)
    squeeze_nc = grad_means / (grad.shape[2] * grad.shape[3])
    term = Term(x, norm.affine())
    d_nc, d_x_nc = kernels.blurred_sums(grad, squeeze_nc, term, slope)
    grad_gain, grad_bias, slopes = norm.gradients(d_nc, d_x_nc, group)
    grad_x = kernels.blurred_gradients(grad, squeeze_nc, term._replace(slopes=slopes), slope)
    return in_format_of(grad_x, x), grad_gain.to(gain.dtype), grad_bias.to(bias.dtype)


set_gradient("blur")
