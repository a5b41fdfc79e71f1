"""What do the fused operators without a convolution compute, and what are their gradients?

They are those of `batch_norm.bn_add_relu` and `bn_act`, registered with torch. Each is functional,
has a fake implementation, and its gradient is an operator too, so that torch.compile keeps both as
they are. A gradient is one pass over the maps for sums, arithmetic on numbers per image and channel
(N, C) or per channel (C,), and one pass for results (see `reference`).

Every operator computes batch statistics and returns them: `batch_stats`, (3, C), are the number of
values, the mean and the biased variance.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from fullstride.nets.fused.dispatch import choose
from fullstride.nets.fused.reference import INT8_MAX, Affine, Slopes
from fullstride.nets.fused.statistics import (
    Gate,
    Norm,
    empty_map,
    empty_numbers,
    in_format_of,
    statistics,
    without_autocast,
)

LIMIT = 6.0  # standard deviations that int8 reaches; values beyond are clamped
STEP = LIMIT / INT8_MAX  # standard deviations of one step


@custom_op("fullstride::join", mutates_args=())
@without_autocast
def bn_add_act(
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    se: Sequence[Tensor],
    mask: Tensor | None,
    other: Sequence[Tensor],
    slope: float | None,
    eps: Sequence[float],
    save: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """act(mask * gate * norm(x) + other).

    `other` is empty, a map, or a map with the gain and bias of its norm. Returns the result, the
    batch statistics of one or two norms (norms, 3, C), for a gate the means of x - mean (N, C), and
    if `save` is "int8" the normalised x, and such an `other`, as int8.
    """
    batch_stats, means_nc = statistics(x, group)
    both = [batch_stats]
    shortcut, shortcut_affine, shortcut_rate = other[0] if other else None, None, None
    if len(other) > 1:
        both.append(statistics(other[0], group)[0])
        shortcut_norm = Norm.of(both[1], other[1], other[2], eps[1])
        shortcut_affine, shortcut_rate = shortcut_norm.affine(), shortcut_norm.rstd / STEP
    norm = Norm.of(batch_stats, gain, bias, eps[0])
    factor, gate = scaling(norm, means_nc, se, mask)
    affine = norm.affine(factor * gate.out_nc if gate else factor)
    arguments = x, affine, shortcut, shortcut_affine, slope
    x_int8, shortcut_int8 = None, None
    if save == "int8":
        rates = norm.rstd / STEP, shortcut_rate
        y, x_int8, shortcut_int8 = choose(x).bn_add_act_int8(*arguments, *rates)
    else:
        y = choose(x).bn_add_act(*arguments)
    gate_input_nc = means_nc if se else empty_numbers(x, 0)
    return (
        in_format_of(y, x),
        torch.stack(both),
        gate_input_nc,
        map_or_empty(x_int8, x),
        map_or_empty(shortcut_int8, x),
    )


def map_or_empty(x_int8: Tensor | None, x: Tensor) -> Tensor:
    """In the memory format of x. Operators return tensors, so an empty one stands for None."""
    return x.new_empty(0, dtype=torch.int8) if x_int8 is None else in_format_of(x_int8, x)


def scaling(
    norm: Norm, means_nc: Tensor, se: Sequence[Tensor], mask: Tensor | None
) -> tuple[Tensor | float, Gate | None]:
    """The factors of a branch: the mask (N, 1), and the gate of the means of the norm's output."""
    factor = 1.0 if mask is None else mask.to(norm.mean.dtype).flatten(1)
    return factor, Gate.of(norm.gain * norm.rstd * means_nc + norm.bias, se) if se else None


def affine_for(saved: Tensor, norm: Norm, factor: Tensor | float = 1.0) -> Affine:
    """The affine of factor * norm for a map that is saved as it is, or as int8."""
    affine = norm.affine(factor)
    if saved.is_floating_point():
        return affine
    zero_c, scale_nc = torch.zeros_like(affine.pivot_c), per_step(affine.scale_nc, norm, saved)
    return Affine(zero_c, scale_nc, affine.shift_nc)


def per_step(numbers: Tensor, norm: Norm, saved: Tensor | None) -> Tensor:
    """Sums, slopes or scales of a map, converted to its steps if it is saved as int8."""
    is_map = saved is None or saved.is_floating_point()
    return numbers if is_map else numbers * (STEP / norm.rstd)


@bn_add_act.register_fake
def _(x, gain, bias, se, mask, other, slope, eps, save, group):
    n, c = x.shape[:2]
    int8_maps = (
        empty_map(x, dtype=torch.int8) if each else x.new_empty(0, dtype=torch.int8)
        for each in (save == "int8", save == "int8" and len(other) > 1)
    )
    return (
        empty_map(x),
        empty_numbers(x, len(eps), 3, c),
        empty_numbers(x, n, c) if se else empty_numbers(x, 0),
        *int8_maps,
    )


@custom_op("fullstride::join_backward", mutates_args=())
@without_autocast
def bn_add_act_backward(
    grad: Tensor,
    y: Tensor | None,
    x: Tensor | None,
    gain: Tensor,
    bias: Tensor,
    batch_stats: Tensor,
    means_nc: Tensor,
    se: Sequence[Tensor],
    mask: Tensor | None,
    other: Sequence[Tensor],
    slope: float | None,
    eps: Sequence[float],
    group: str,
) -> list[Tensor]:
    """Gradients of x, gain, bias, `se` and `other`. Either y or x may be None.

    x, and an `other` that has a norm, may be int8.
    """
    kernels, saved = choose(grad), x if y is None else y
    assert saved is not None
    norm = Norm.of(batch_stats[0], gain, bias, eps[0])
    affine = norm.inverse() if x is None else affine_for(x, norm)
    shortcut = other[0] if other else None
    shortcut_norm, shortcut_affine, shortcut_slopes = None, None, None
    if len(other) > 1:
        shortcut_norm = Norm.of(batch_stats[1], other[1], other[2], eps[1])
        shortcut_affine = affine_for(other[0], shortcut_norm)
    factor, gate = scaling(norm, means_nc, se, mask)
    if y is None:
        y_affine = norm.affine(factor * gate.out_nc if gate else factor)
        y = kernels.bn_add_act(saved, y_affine, shortcut, shortcut_affine, slope)
    d_nc, d_x_nc, d_other_nc = kernels.bn_add_act_sums(
        grad, y, x, affine, shortcut, shortcut_affine, slope
    )
    d_x_nc = per_step(d_x_nc, norm, x)

    squeeze_nc, squeeze_x_nc, grad_se = 0.0, 0.0, []
    if gate:
        squeeze_nc, grad_se = gate.gradients(
            factor * (norm.gain * norm.rstd * d_x_nc + norm.bias * d_nc), se
        )
        squeeze_x_nc, factor = squeeze_nc * means_nc, factor * gate.out_nc
    grad_gain, grad_bias, (scale, constant, linear) = norm.gradients(
        factor * d_nc + squeeze_nc, factor * d_x_nc + squeeze_x_nc, group
    )
    constant = constant + scale * squeeze_nc / (saved.shape[2] * saved.shape[3])
    slopes = Slopes(scale * factor, constant, per_step(linear, norm, x))
    grad_other = []
    if shortcut_norm and d_other_nc is not None:
        d_other_nc = per_step(d_other_nc, shortcut_norm, other[0])
        *grads, (scale, constant, linear) = shortcut_norm.gradients(d_nc, d_other_nc, group)
        shortcut_slopes = Slopes(scale, constant, per_step(linear, shortcut_norm, other[0]))
        grad_other = [grad.to(weight.dtype) for grad, weight in zip(grads, other[1:], strict=True)]
    grad_x, grad_shortcut = kernels.bn_add_act_gradients(
        grad, y, x, affine, slopes, shortcut, shortcut_affine, shortcut_slopes, slope
    )
    if grad_shortcut is not None:
        grad_other.insert(0, in_format_of(grad_shortcut, other[0]))
    return [
        in_format_of(grad_x, saved),
        grad_gain.to(gain.dtype),
        grad_bias.to(bias.dtype),
        *grad_se,
        *grad_other,
    ]


@bn_add_act_backward.register_fake
def _(grad, y, x, gain, bias, batch_stats, means_nc, se, mask, other, slope, eps, group):
    weights = [
        torch.empty_like(weight, memory_format=torch.contiguous_format)
        for weight in (gain, bias, *se)
    ]
    saved = x if y is None else y
    grad_other = [empty_map(other[0], dtype=saved.dtype)] if other else []
    return [
        empty_map(saved),
        *weights,
        *grad_other,
        *(torch.empty_like(weight) for weight in other[1:]),
    ]


def save_for_bn_add_act(ctx, inputs, output) -> None:
    x, gain, bias, se, mask, other, ctx.slope, ctx.eps, save, ctx.group = inputs
    y, batch_stats, means_nc, x_int8, other_int8 = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.sizes = len(se), len(other)
    # The gradient of an `other` without a norm needs its shape alone, which is that of y.
    others = other if len(other) > 1 or save == "input" else []
    if save == "int8":
        x, others = x_int8, [other_int8, *others[1:]] if others else []
    maps = None if save == "input" else y, None if save == "output" else x
    ctx.save_for_backward(*maps, gain, bias, batch_stats, means_nc, mask, *se, *others)


def differentiate_bn_add_act(ctx, grad, *_):
    y, x, gain, bias, batch_stats, means_nc, mask, *rest = ctx.saved_tensors
    se_size, other_size = ctx.sizes
    se, other = rest[:se_size], rest[se_size:] or [y] * other_size
    grad_x, grad_gain, grad_bias, *grads = bn_add_act_backward(
        *(grad, y, x, gain, bias, batch_stats, means_nc, se, mask, other),
        *(ctx.slope, ctx.eps, ctx.group),
    )
    grad_se, grad_other = grads[:se_size], grads[se_size:]
    return grad_x, grad_gain, grad_bias, grad_se, None, grad_other, *[None] * 4


bn_add_act.register_autograd(differentiate_bn_add_act, setup_context=save_for_bn_add_act)


@custom_op("fullstride::rejoin", mutates_args=())
@without_autocast
def recompute_from_int8(
    x_int8: Tensor,
    gain: Tensor,
    bias: Tensor,
    batch_stats: Tensor,
    means_nc: Tensor,
    se: Sequence[Tensor],
    mask: Tensor | None,
    other: Sequence[Tensor],
    slope: float | None,
    eps: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """The result of `bn_add_act` from its int8 output, for `fused.compile`.

    `other` is as in the backward pass. Equal up to the rounding, and of the same sign.
    """
    norm = Norm.of(batch_stats[0], gain, bias, eps[0])
    factor, gate = scaling(norm, means_nc, se, mask)
    shortcut, shortcut_affine = other[0] if other else None, None
    if len(other) > 1:
        shortcut_affine = affine_for(other[0], Norm.of(batch_stats[1], other[1], other[2], eps[1]))
    affine = affine_for(x_int8, norm, factor * gate.out_nc if gate else factor)
    kernels = choose(x_int8.new_empty(0, dtype=dtype))
    return in_format_of(
        kernels.bn_add_act(x_int8, affine, shortcut, shortcut_affine, slope, dtype), x_int8
    )


@recompute_from_int8.register_fake
def _(x_int8, gain, bias, batch_stats, means_nc, se, mask, other, slope, eps, dtype):
    return empty_map(x_int8, dtype=dtype)
