"""What do lean operators compute, and what do their gradients? Those of `nets/fused/batch_norm.py`, registered with torch.

Each is functional, has a form without data and a gradient that is an operator too, so torch.compile keeps both as they
are. A gradient is one pass that sums, arithmetic on numbers for each image and channel, (N, C), or each channel, (C,),
derived by hand as operators stand below autograd, and one pass that writes. `kernels` holds the passes.

Every operator takes the batch statistics about `pivot`, a guess of the mean, and gives them back: `moments`,
(3, C), are the count of values, the mean and the biased variance.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from fullstride.nets.fused.dispatch import choose
from fullstride.nets.fused.reference import LARGEST_CODE, Affine, Slopes
from fullstride.nets.fused.statistics import (
    LEAST_GATE,
    Gate,
    Norm,
    laid,
    like,
    numbers,
    precise,
    statistics,
)

LIMIT = 6.0  # deviations that codes reach; what lies beyond, as few values do, passes for this far
STEP = LIMIT / LARGEST_CODE  # deviations from one code to the next

# ---- act(keep * gate * norm(x) + other): `tail` and `abn`.


@custom_op("fullstride::join", mutates_args=())
@precise
def join(
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    pivot: Tensor,
    se: Sequence[Tensor],
    keep: Tensor | None,
    other: Sequence[Tensor],
    slope: float | None,
    eps: Sequence[float],
    save: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The result, the moments of one or two norms (norms, 3, C), and, for a gate, the means of x - mean (N, C).

    Then, where `save` is "codes", x and an `other` that has a norm as codes of their normalised values (`join_coded` of
    the kernels). `other`: nothing, a map, or a map with its norm's gain, bias and pivot.
    """
    moments, means_nc = statistics(x, pivot, group)
    both = [moments]
    shortcut, shortcut_affine, shortcut_rate = other[0] if other else None, None, None
    if len(other) > 1:
        both.append(statistics(other[0], other[3], group)[0])
        shortcut_norm = Norm.of(both[1], other[1], other[2], eps[1])
        shortcut_affine, shortcut_rate = shortcut_norm.affine(), shortcut_norm.rstd / STEP
    norm = Norm.of(moments, gain, bias, eps[0])
    kept, gate = scaling(norm, means_nc, se, keep)
    affine = norm.affine(kept * gate.out_nc if gate else kept)
    given = x, affine, shortcut, shortcut_affine, slope
    codes, shortcut_codes = None, None
    if save == "codes":
        y, codes, shortcut_codes = choose(x).join_coded(*given, norm.rstd / STEP, shortcut_rate)
    else:
        y = choose(x).join(*given)
    seen_nc = means_nc if se else numbers(x, 0)
    return laid(y, x), torch.stack(both), seen_nc, some(codes, x), some(shortcut_codes, x)


def some(codes: Tensor | None, x: Tensor) -> Tensor:
    """In the memory format of x; none of none."""
    return x.new_empty(0, dtype=torch.int8) if codes is None else laid(codes, x)


def scaling(
    norm: Norm, means_nc: Tensor, se: Sequence[Tensor], keep: Tensor | None
) -> tuple[Tensor | float, Gate | None]:
    """What a branch is scaled by: the mask, (N, 1), and the gate, which sees the means of the norm's output."""
    kept = 1.0 if keep is None else keep.to(norm.mean.dtype).flatten(1)
    return kept, Gate.of(norm.gain * norm.rstd * means_nc + norm.bias, se) if se else None


def affine_as(kept: Tensor, norm: Norm, factor: Tensor | float = 1.0) -> Affine:
    """Of factor * the norm of a map that is kept as it is, or as codes."""
    affine = norm.affine(factor)
    if kept.is_floating_point():
        return affine
    return Affine(
        torch.zeros_like(affine.pivot_c), by_step(affine.scale_nc, norm, kept), affine.shift_nc
    )


def by_step(numbers: Tensor, norm: Norm, kept: Tensor | None) -> Tensor:
    """Numbers for a step of a map from those for its unit, where it is kept as codes: sums, slopes, scales."""
    return numbers if kept is None or kept.is_floating_point() else numbers * (STEP / norm.rstd)


@join.register_fake
def _(x, gain, bias, pivot, se, keep, other, slope, eps, save, group):
    n, c = x.shape[:2]
    coded = save == "codes", save == "codes" and len(other) > 1
    both_codes = (
        like(x, dtype=torch.int8) if each else x.new_empty(0, dtype=torch.int8) for each in coded
    )
    return (
        like(x),
        numbers(x, len(eps), 3, c),
        numbers(x, n, c) if se else numbers(x, 0),
        *both_codes,
    )


@custom_op("fullstride::join_backward", mutates_args=())
@precise
def join_backward(
    grad: Tensor,
    y: Tensor | None,
    x: Tensor | None,
    gain: Tensor,
    bias: Tensor,
    moments: Tensor,
    means_nc: Tensor,
    se: Sequence[Tensor],
    keep: Tensor | None,
    other: Sequence[Tensor],
    slope: float | None,
    eps: Sequence[float],
    group: str,
) -> list[Tensor]:
    """Gradients of x, gain, bias, then of `se` and of `other` but for its pivot. Of y and x one may be missing.

    x, and an `other` that has a norm, may be codes.
    """
    kernels, kept = choose(grad), x if y is None else y
    assert kept is not None
    norm = Norm.of(moments[0], gain, bias, eps[0])
    affine = norm.inverse() if x is None else affine_as(x, norm)
    shortcut, shortcut_norm, shortcut_affine, shortcut_slopes = (
        other[0] if other else None,
        None,
        None,
        None,
    )
    if len(other) > 1:
        shortcut_norm = Norm.of(moments[1], other[1], other[2], eps[1])
        shortcut_affine = affine_as(other[0], shortcut_norm)
    factor, gate = scaling(norm, means_nc, se, keep)
    if y is None:
        y = kernels.join(
            kept,
            norm.affine(factor * gate.out_nc if gate else factor),
            shortcut,
            shortcut_affine,
            slope,
        )
    d_nc, d_x_nc, d_other_nc = kernels.join_sums(
        grad, y, x, affine, shortcut, shortcut_affine, slope
    )
    d_x_nc = by_step(d_x_nc, norm, x)

    squeeze_nc, squeeze_x_nc, of_se = 0.0, 0.0, []
    if gate:
        squeeze_nc, of_se = gate.gradients(
            factor * (norm.gain * norm.rstd * d_x_nc + norm.bias * d_nc), se
        )
        squeeze_x_nc, factor = squeeze_nc * means_nc, factor * gate.out_nc
    of_gain, of_bias, (scale, constant, linear) = norm.gradients(
        factor * d_nc + squeeze_nc, factor * d_x_nc + squeeze_x_nc, group
    )
    constant = constant + scale * squeeze_nc / (kept.shape[2] * kept.shape[3])
    slopes = Slopes(scale * factor, constant, by_step(linear, norm, x))
    of_other = []
    if shortcut_norm and d_other_nc is not None:
        d_other_nc = by_step(d_other_nc, shortcut_norm, other[0])
        *of_numbers, (scale, constant, linear) = shortcut_norm.gradients(d_nc, d_other_nc, group)
        shortcut_slopes = Slopes(scale, constant, by_step(linear, shortcut_norm, other[0]))
        of_other = [of.to(weight.dtype) for of, weight in zip(of_numbers, other[1:3], strict=True)]
    of_x, of_shortcut = kernels.join_gradients(
        grad, y, x, affine, slopes, shortcut, shortcut_affine, shortcut_slopes, slope
    )
    if of_shortcut is not None:
        of_other.insert(0, laid(of_shortcut, other[0]))
    return [laid(of_x, kept), of_gain.to(gain.dtype), of_bias.to(bias.dtype), *of_se, *of_other]


@join_backward.register_fake
def _(grad, y, x, gain, bias, moments, means_nc, se, keep, other, slope, eps, group):
    weights = [
        torch.empty_like(weight, memory_format=torch.contiguous_format)
        for weight in (gain, bias, *se)
    ]
    kept = x if y is None else y
    of_other = [like(other[0], dtype=kept.dtype)] if other else []
    return [like(kept), *weights, *of_other, *(torch.empty_like(weight) for weight in other[1:3])]


def keep_for_join(ctx, inputs, output) -> None:
    x, gain, bias, _, se, keep, other, ctx.slope, ctx.eps, save, ctx.group = inputs
    y, moments, means_nc, codes, other_codes = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.sizes = len(se), len(other)
    # Of an `other` without a norm, y, of the same shape, tells the gradient all that it needs.
    others = other[:3] if len(other) > 1 or save == "input" else []
    if save == "codes":
        x, others = codes, [other_codes, *others[1:]] if others else []
    kept = None if save == "input" else y, None if save == "output" else x
    ctx.save_for_backward(*kept, gain, bias, moments, means_nc, keep, *se, *others)


def differentiate_join(ctx, grad, *_):
    y, x, gain, bias, moments, means_nc, keep, *rest = ctx.saved_tensors
    se_size, other_size = ctx.sizes
    se, other = rest[:se_size], rest[se_size:] or [y] * other_size
    of_x, of_gain, of_bias, *of_rest = join_backward(
        grad, y, x, gain, bias, moments, means_nc, se, keep, other, ctx.slope, ctx.eps, ctx.group
    )
    of_se, of_other = of_rest[:se_size], of_rest[se_size:]
    return (
        of_x,
        of_gain,
        of_bias,
        None,
        of_se,
        None,
        [*of_other, *[None] * (other_size > 1)],
        *[None] * 4,
    )


join.register_autograd(differentiate_join, setup_context=keep_for_join)


@custom_op("fullstride::rejoin", mutates_args=())
@precise
def rejoin(
    codes: Tensor,
    gain: Tensor,
    bias: Tensor,
    moments: Tensor,
    means_nc: Tensor,
    se: Sequence[Tensor],
    keep: Tensor | None,
    other: Sequence[Tensor],
    slope: float | None,
    eps: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """Nearly what `join` gave, of the codes that it gave, with `other` as of its gradient: for `compiled`."""
    norm = Norm.of(moments[0], gain, bias, eps[0])
    factor, gate = scaling(norm, means_nc, se, keep)
    shortcut, shortcut_affine = other[0] if other else None, None
    if len(other) > 1:
        shortcut_affine = affine_as(other[0], Norm.of(moments[1], other[1], other[2], eps[1]))
    affine = affine_as(codes, norm, factor * gate.out_nc if gate else factor)
    kernels = choose(codes.new_empty(0, dtype=dtype))
    return laid(kernels.join(codes, affine, shortcut, shortcut_affine, slope, dtype), codes)


@rejoin.register_fake
def _(codes, gain, bias, moments, means_nc, se, keep, other, slope, eps, dtype):
    return like(codes, dtype=dtype)


# ---- gate * act(norm(x)): `abn_se`.


@custom_op("fullstride::gate", mutates_args=())
@precise
def gate(
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    pivot: Tensor,
    se: Sequence[Tensor],
    slope: float,
    eps: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the moments, and the means that the gate sees (N, C)."""
    moments, _ = statistics(x, pivot, group)
    affine = Norm.of(moments, gain, bias, eps).affine()
    seen_nc = choose(x).squeezed(x, affine, slope)
    gate_nc = Gate.of(seen_nc, se).out_nc.clamp(min=LEAST_GATE)
    return laid(choose(x).gated(x, affine, gate_nc, slope), x), moments, seen_nc


@gate.register_fake
def _(x, gain, bias, pivot, se, slope, eps, group):
    n, c = x.shape[:2]
    return like(x), numbers(x, 3, c), numbers(x, n, c)


@custom_op("fullstride::gate_backward", mutates_args=())
@precise
def gate_backward(
    grad: Tensor,
    y: Tensor,
    gain: Tensor,
    bias: Tensor,
    moments: Tensor,
    seen_nc: Tensor,
    se: Sequence[Tensor],
    slope: float,
    eps: float,
    group: str,
) -> list[Tensor]:
    """Gradients of x, gain, bias and `se`."""
    kernels = choose(y)
    norm = Norm.of(moments, gain, bias, eps)
    affine = norm.inverse()
    gated = Gate.of(seen_nc, se)
    gate_nc = gated.out_nc.clamp(min=LEAST_GATE)
    of_gate, d_nc, d_x_nc, steep_nc, steep_x_nc = kernels.gated_sums(
        grad, y, affine, gate_nc, slope
    )
    of_seen, of_se = gated.gradients(of_gate, se)
    squeeze_nc = of_seen / (y.shape[2] * y.shape[3])
    first_nc, second_nc = (
        gate_nc * d_nc + squeeze_nc * steep_nc,
        gate_nc * d_x_nc + squeeze_nc * steep_x_nc,
    )
    of_gain, of_bias, slopes = norm.gradients(first_nc, second_nc, group)
    of_x = kernels.gated_gradients(grad, y, affine, gate_nc, squeeze_nc, slopes, slope)
    return [laid(of_x, y), of_gain.to(gain.dtype), of_bias.to(bias.dtype), *of_se]


@gate_backward.register_fake
def _(grad, y, gain, bias, moments, seen_nc, se, slope, eps, group):
    weights = (
        torch.empty_like(weight, memory_format=torch.contiguous_format)
        for weight in (gain, bias, *se)
    )
    return [like(y), *weights]


def keep_for_gate(ctx, inputs, output) -> None:
    _, gain, bias, _, se, ctx.slope, ctx.eps, ctx.group = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output, gain, bias, *se)


def differentiate_gate(ctx, grad, *_):
    y, moments, seen_nc, gain, bias, *se = ctx.saved_tensors
    of_x, of_gain, of_bias, *of_se = gate_backward(
        grad, y, gain, bias, moments, seen_nc, se, ctx.slope, ctx.eps, ctx.group
    )
    return of_x, of_gain, of_bias, None, of_se, None, None, None


gate.register_autograd(differentiate_gate, setup_context=keep_for_gate)
