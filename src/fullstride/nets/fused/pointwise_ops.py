"""Computes the fused operators without a convolution, and their gradients.

They implement `batch_norm.bn_add_relu`, `bn_act` and `bn_act_se`, registered with torch. Each is
functional, has a fake implementation, and its gradient is an operator too, so that torch.compile
keeps both as they are. A gradient is one pass over the maps for sums, arithmetic on numbers per
image and channel (N, C) or per channel (C,), and one pass for results (see `reference`).

Every operator computes batch statistics and returns them: `batch_stats`, (3, C), are the number of
values, the mean and the biased variance.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullstride.nets.fused.operators import choose, in_format_of, operator, set_gradient
from fullstride.nets.fused.reference import INT8_MAX, Affine, Slopes, Term
from fullstride.nets.fused.statistics import Gate, Norm, statistics

LIMIT = 6.0  # standard deviations; int8 clamps values beyond
STEP = LIMIT / INT8_MAX  # standard deviations in one step


@operator(
    "join",
    "(Tensor x, Tensor gain, Tensor bias, Tensor[] se, Tensor[] other, Tensor? mask, float? slope,"
    " float[] eps, str save, str group)"
    " -> (Tensor y, Tensor batch_stats, Tensor means_nc, Tensor x_int8, Tensor other_int8)",
)
def bn_add_act(x, gain, bias, se, other, mask, slope, eps, save, group):
    """act(mask * gate * norm(x) + other).

    `other` is empty, a map, or a map with the gain and bias of its norm. Returns the result, the
    batch statistics of one or two norms (norms, 3, C), with a gate the means of x - mean (N, C),
    and if `save` is "int8" the normalised x, and an `other` with a norm, as int8.
    """
    int8 = save == "int8"
    batch_stats, means_nc = statistics(x, group)
    both = [batch_stats]
    theirs = Term(other[0]) if other else None
    if len(other) > 1:
        both.append(statistics(other[0], group)[0])
        shortcut = Norm.of(both[1], other[1], other[2], eps[1])
        theirs = Term(other[0], shortcut.affine(), rate_c=shortcut.rstd / STEP if int8 else None)
    norm = Norm.of(batch_stats, gain, bias, eps[0])
    _, _, factor = scaling(norm, means_nc, se, mask)
    ours = Term(x, norm.affine(factor), rate_c=norm.rstd / STEP if int8 else None)
    y, *int8_maps = choose(x).bn_add_act(ours, theirs, slope)
    empty = x.new_empty(0, dtype=torch.int8)  # stands for None: operators return only tensors
    return (
        in_format_of(y, x),
        torch.stack(both),
        means_nc if se else means_nc.new_empty(0),
        *(empty.clone() if each is None else in_format_of(each, x) for each in int8_maps),
    )


def scaling(
    norm: Norm, means_nc: Tensor, se: Sequence[Tensor], mask: Tensor | None
) -> tuple[Any, Gate | None, Any]:
    """The factors of a branch: the mask (N, 1), the gate, and their product."""
    factor = 1.0 if mask is None else mask.to(norm.mean.dtype).flatten(1)
    if not se:
        return factor, None, factor
    gate = Gate.of(norm.gain * norm.rstd * means_nc + norm.bias, se)
    return factor, gate, factor * gate.out_nc


def affine_for(saved: Tensor, norm: Norm, factor: Tensor | float = 1.0) -> Affine:
    """The affine of factor * norm for a map that is saved as floats or as int8."""
    affine = norm.affine(factor)
    if saved.is_floating_point():
        return affine
    zero_c, scale_nc = torch.zeros_like(affine.pivot_c), per_step(affine.scale_nc, norm, saved)
    return Affine(zero_c, scale_nc, affine.shift_nc)


def saved_shortcut(
    other: Sequence[Tensor], batch_stats: Tensor, eps: Sequence[float]
) -> tuple[Term | None, Norm | None]:
    """The term of `other`, if there is one, and its norm, if it has one."""
    norm = Norm.of(batch_stats[1], other[1], other[2], eps[1]) if len(other) > 1 else None
    return (Term(other[0], norm and affine_for(other[0], norm)) if other else None), norm


def per_step(numbers: Tensor, norm: Norm, saved: Tensor | None) -> Tensor:
    """Sums, slopes or scales of a map, converted to its steps if it is saved as int8."""
    is_map = saved is None or saved.is_floating_point()
    return numbers if is_map else numbers * (STEP / norm.rstd)


@operator(
    "join_backward",
    "(Tensor grad, Tensor? y, Tensor? x, Tensor gain, Tensor bias, Tensor batch_stats,"
    " Tensor means_nc, Tensor[] se, Tensor[] other, Tensor? mask, float? slope, float[] eps,"
    " str group) -> Tensor[]",
)
def bn_add_act_backward(
    grad, y, x, gain, bias, batch_stats, means_nc, se, other, mask, slope, eps, group
):
    """Gradients of x, gain, bias, `se` and `other`. Either y or x may be None.

    x, and an `other` that has a norm, may be int8.
    """
    kernels, saved = choose(grad), x if y is None else y
    norm = Norm.of(batch_stats[0], gain, bias, eps[0])
    ours = Term(x, norm.inverse() if x is None else affine_for(x, norm))
    theirs, shortcut = saved_shortcut(other, batch_stats, eps)
    factor, gate, product = scaling(norm, means_nc, se, mask)
    if y is None:
        y, *_ = kernels.bn_add_act(Term(x, norm.affine(product)), theirs, slope)
    d_nc, d_x_nc, d_other_nc = kernels.bn_add_act_sums(grad, y, ours, theirs, slope)
    d_x_nc = per_step(d_x_nc, norm, x)

    squeeze_nc, squeeze_x_nc, grad_se = 0.0, 0.0, []
    if gate:
        squeeze_nc, grad_se = gate.gradients(
            factor * (norm.gain * norm.rstd * d_x_nc + norm.bias * d_nc), se
        )
        squeeze_x_nc = squeeze_nc * means_nc
    grad_gain, grad_bias, (scale, constant, linear) = norm.gradients(
        product * d_nc + squeeze_nc, product * d_x_nc + squeeze_x_nc, group
    )
    constant = constant + scale * squeeze_nc / (saved.shape[2] * saved.shape[3])
    ours = ours._replace(slopes=Slopes(scale * product, constant, per_step(linear, norm, x)))
    grad_other = []
    if theirs and shortcut:
        d_other_nc = per_step(d_other_nc, shortcut, other[0])
        *grads, (scale, constant, linear) = shortcut.gradients(d_nc, d_other_nc, group)
        slopes = Slopes(scale, constant, per_step(linear, shortcut, other[0]))
        theirs = theirs._replace(slopes=slopes)
        grad_other = [grad.to(weight.dtype) for grad, weight in zip(grads, other[1:], strict=True)]
    grad_x, grad_shortcut = kernels.bn_add_act_gradients(grad, y, ours, theirs, slope)
    if grad_shortcut is not None:
        grad_other.insert(0, in_format_of(grad_shortcut, other[0]))
    grad_norm = grad_gain.to(gain.dtype), grad_bias.to(bias.dtype)
    return [in_format_of(grad_x, saved), *grad_norm, *grad_se, *grad_other]


def select_saved(values: dict[str, Any]) -> None:
    """Select the saved maps by `save`.

    The gradient of an `other` without a norm needs only its shape, so y stands for it.
    """
    y, save, other = values["y"], values["save"], values["other"]
    if save == "int8":
        values["x"] = values["x_int8"]
        other = [values["other_int8"], *other[1:]]
    if len(values["other"]) < 2 and save != "input":
        other = [y for _ in values["other"]]
    values["y"], values["other"] = None if save == "input" else y, list(other)
    values["x"] = None if save == "output" else values["x"]


set_gradient("join", select_saved)


@operator(
    "rejoin",
    "(Tensor x_int8, Tensor gain, Tensor bias, Tensor batch_stats, Tensor means_nc, Tensor[] se,"
    " Tensor[] other, Tensor? mask, float? slope, float[] eps, ScalarType dtype) -> Tensor",
)
def recompute_from_int8(
    x_int8, gain, bias, batch_stats, means_nc, se, other, mask, slope, eps, dtype
):
    """The result of `bn_add_act` from its int8 output, for `fused.compile`.

    `other` is as in the backward pass. The result is equal up to rounding, with the same sign.
    """
    norm = Norm.of(batch_stats[0], gain, bias, eps[0])
    _, _, factor = scaling(norm, means_nc, se, mask)
    theirs, _ = saved_shortcut(other, batch_stats, eps)
    ours = Term(x_int8, affine_for(x_int8, norm, factor))
    kernels = choose(x_int8.new_empty(0, dtype=dtype))
    return in_format_of(kernels.bn_add_act(ours, theirs, slope, dtype)[0], x_int8)


@operator(
    "gate",
    "(Tensor x, Tensor gain, Tensor bias, Tensor[] se, float slope, float eps, str group)"
    " -> (Tensor y, Tensor batch_stats, Tensor steep_nc, Tensor steep_x_nc)",
)
def bn_act_se(x, gain, bias, se, slope, eps, group):
    """gate * act(norm(x)), which is act(gate * norm(x)): a gate is positive.

    Returns the result, the batch statistics, and the means of act' and act' * (x - mean), each
    (N, C).
    """
    norm = Norm.of(batch_stats := statistics(x, group)[0], gain, bias, eps)
    steep = choose(x).slope_means(Term(x, norm.affine()), slope)
    gate_nc = Gate.of(norm.affine().of_sums(*steep), se).positive_nc
    y, *_ = choose(x).bn_add_act(Term(x, norm.affine(gate_nc)), None, slope)
    return in_format_of(y, x), batch_stats, *steep


@operator(
    "gate_backward",
    "(Tensor grad, Tensor y, Tensor gain, Tensor bias, Tensor batch_stats, Tensor steep_nc,"
    " Tensor steep_x_nc, Tensor[] se, float slope, float eps, str group) -> Tensor[]",
)
def bn_act_se_backward(
    grad, y, gain, bias, batch_stats, steep_nc, steep_x_nc, se, slope, eps, group
):
    """Gradients of x, gain, bias and `se`."""
    kernels, norm = choose(y), Norm.of(batch_stats, gain, bias, eps)
    gate = Gate.of(norm.affine().of_sums(steep_nc, steep_x_nc), se)
    gate_nc = gate.positive_nc
    term = Term(None, norm.inverse(gate_nc))
    d_nc, d_x_nc, _ = kernels.bn_add_act_sums(grad, y, term, None, slope)
    grad_means_nc, grad_se = gate.gradients(norm.inverse().of_sums(d_nc, d_x_nc), se)
    grad_gain, grad_bias, slopes = norm.gradients(
        gate_nc * d_nc + grad_means_nc * steep_nc,
        gate_nc * d_x_nc + grad_means_nc * steep_x_nc,
        group,
    )
    term = term._replace(slopes=slopes._replace(scale_nc=slopes.scale_nc * gate_nc))
    squeeze_nc = grad_means_nc / (y.shape[2] * y.shape[3]) / gate_nc
    grad_x, _ = kernels.bn_add_act_gradients(grad, y, term, None, slope, squeeze_nc)
    return [in_format_of(grad_x, y), grad_gain.to(gain.dtype), grad_bias.to(bias.dtype), *grad_se]


set_gradient("gate")
