"""What does the fused operator of `batch_norm.bn_act_se` compute, and what is its gradient?

The conventions are those of `pointwise_ops`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from fullstride.nets.fused.dispatch import choose
from fullstride.nets.fused.statistics import (
    MIN_GATE,
    Gate,
    Norm,
    empty_map,
    empty_numbers,
    in_format_of,
    statistics,
    without_autocast,
)


@custom_op("fullstride::gate", mutates_args=())
@without_autocast
def bn_act_se(
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    se: Sequence[Tensor],
    slope: float,
    eps: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """gate * act(norm(x)): the result, the batch statistics and the gate's input (N, C)."""
    batch_stats, _ = statistics(x, group)
    affine = Norm.of(batch_stats, gain, bias, eps).affine()
    gate_input_nc = choose(x).squeezed(x, affine, slope)
    gate_nc = Gate.of(gate_input_nc, se).out_nc.clamp(min=MIN_GATE)
    return in_format_of(choose(x).gated(x, affine, gate_nc, slope), x), batch_stats, gate_input_nc


@bn_act_se.register_fake
def _(x, gain, bias, se, slope, eps, group):
    n, c = x.shape[:2]
    return empty_map(x), empty_numbers(x, 3, c), empty_numbers(x, n, c)


@custom_op("fullstride::gate_backward", mutates_args=())
@without_autocast
def bn_act_se_backward(
    grad: Tensor,
    y: Tensor,
    gain: Tensor,
    bias: Tensor,
    batch_stats: Tensor,
    gate_input_nc: Tensor,
    se: Sequence[Tensor],
    slope: float,
    eps: float,
    group: str,
) -> list[Tensor]:
    """Gradients of x, gain, bias and `se`."""
    kernels = choose(y)
    norm = Norm.of(batch_stats, gain, bias, eps)
    affine = norm.inverse()
    gated = Gate.of(gate_input_nc, se)
    gate_nc = gated.out_nc.clamp(min=MIN_GATE)
    grad_gate, d_nc, d_x_nc, steep_nc, steep_x_nc = kernels.gated_sums(
        grad, y, affine, gate_nc, slope
    )
    grad_gate_input, grad_se = gated.gradients(grad_gate, se)
    squeeze_nc = grad_gate_input / (y.shape[2] * y.shape[3])
    first_nc, second_nc = (
        gate_nc * d_nc + squeeze_nc * steep_nc,
        gate_nc * d_x_nc + squeeze_nc * steep_x_nc,
    )
    grad_gain, grad_bias, slopes = norm.gradients(first_nc, second_nc, group)
    grad_x = kernels.gated_gradients(grad, y, affine, gate_nc, squeeze_nc, slopes, slope)
    return [in_format_of(grad_x, y), grad_gain.to(gain.dtype), grad_bias.to(bias.dtype), *grad_se]


@bn_act_se_backward.register_fake
def _(grad, y, gain, bias, batch_stats, gate_input_nc, se, slope, eps, group):
    weights = (
        torch.empty_like(weight, memory_format=torch.contiguous_format)
        for weight in (gain, bias, *se)
    )
    return [empty_map(y), *weights]


def save_for_bn_act_se(ctx, inputs, output) -> None:
    _, gain, bias, se, ctx.slope, ctx.eps, ctx.group = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output, gain, bias, *se)


def differentiate_bn_act_se(ctx, grad, *_):
    y, batch_stats, gate_input_nc, gain, bias, *se = ctx.saved_tensors
    grad_x, grad_gain, grad_bias, *grad_se = bn_act_se_backward(
        grad, y, gain, bias, batch_stats, gate_input_nc, se, ctx.slope, ctx.eps, ctx.group
    )
    return grad_x, grad_gain, grad_bias, grad_se, None, None, None


bn_act_se.register_autograd(differentiate_bn_act_se, setup_context=save_for_bn_act_se)
