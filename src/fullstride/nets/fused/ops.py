"""Computes the fused operators and their gradients.

They implement the functions of `batch_norm`, registered with torch. Each is functional, has a fake
implementation, and its gradient is an operator too, so that torch.compile keeps both as they are. A
gradient is one pass over the maps for sums, arithmetic on numbers per image and channel (N, C) or
per channel (C,), and one pass for results (see `reference`).

Every operator computes batch statistics and returns them: `batch_stats`, (3, C), are the number of
values, the mean and the biased variance.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fullstride.nets.fused.operators import choose, in_format_of, operator, precision, set_gradient
from fullstride.nets.fused.reference import INT8_MAX, Affine, Slopes, Term

# Statistics, gates and their gradients, between two passes over the maps.


# The smallest |gain| to divide by: an input recomputed with less is finite, but not exact.
MIN_DIVISOR = 1e-5
MIN_GATE = 1e-20  # the smallest gate to divide by


class Norm(NamedTuple):
    """Batch norm by batch statistics: gain * rstd * (x - mean) + bias."""

    size: Tensor  # values per channel, of all processes
    mean: Tensor
    rstd: Tensor
    gain: Tensor
    bias: Tensor

    @staticmethod
    def of(batch_stats: Tensor, gain: Tensor, bias: Tensor, eps: float) -> "Norm":
        size, mean, variance = batch_stats
        return Norm(size, mean, (variance + eps).rsqrt(), gain.to(mean.dtype), bias.to(mean.dtype))

    def affine(self, factor: Tensor | float = 1.0) -> Affine:
        """The affine of factor * norm; the factor may be (N, C)."""
        return Affine(self.mean, factor * (self.gain * self.rstd)[None], factor * self.bias[None])

    def inverse(self, factor: Tensor | float = 1.0) -> Affine:
        """The affine for recomputing an input from its output; no gain is zero."""
        away = torch.where(self.gain < 0, -MIN_DIVISOR, MIN_DIVISOR).to(self.gain.dtype)
        gain = torch.where(self.gain.abs() < MIN_DIVISOR, away, self.gain)
        return self._replace(gain=gain).affine(factor)

    def gradients(
        self, first_nc: Tensor, second_nc: Tensor, group: str
    ) -> tuple[Tensor, Tensor, Slopes]:
        """Gradients of gain and bias, and the slopes for the gradient of the input.

        Computed from the sums over the pixels of dz and dz * (x - mean), where dz is the gradient
        of the output.
        """
        grad_bias, grad_gain = first_nc.sum(0), second_nc.sum(0) * self.rstd
        sums = torch.stack([grad_bias, grad_gain])
        shares = (all_gather(sums, group).sum(0) if group else sums) / self.size
        scale = self.gain * self.rstd
        slopes = Slopes(
            scale[None], (-scale * shares[0])[None], (-scale * self.rstd * shares[1])[None]
        )
        return grad_gain, grad_bias, slopes


def statistics(x: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Count, mean and variance per channel (3, C), and the mean of x - mean per image (N, C)."""
    pivot_c = one_value(x)
    first_nc, second_nc = choose(x).stats(x, pivot_c)
    pixels, images = x.shape[2] * x.shape[3], max(x.shape[0], 1)
    mean = first_nc.sum(0) / images
    centred_nc = first_nc - mean
    spread = pixels * ((second_nc - first_nc.square()).clamp(min=0) + centred_nc.square()).sum(0)
    count = torch.full_like(mean, x.shape[0] * pixels)
    if not group:
        variance = spread / max(x.shape[0] * pixels, 1)
        return torch.stack([count, pivot_c + mean, variance]), centred_nc
    parts = all_gather(torch.stack([count, pivot_c + mean, spread]), group)
    counts, means, spreads = parts.unbind(1)
    total = counts.sum(0).clamp(min=1)
    whole = (counts * means).sum(0) / total
    variance = (spreads + counts * (means - whole).square()).sum(0) / total
    return torch.stack([total, whole, variance]), centred_nc + (pivot_c + mean - whole)


def one_value(x: Tensor) -> Tensor:
    """The central value of each channel of the first image (C,); 0 without images.

    Sums of squares about this value lose no digits to a mean that is large compared with the
    deviation, as any value is about one deviation from the mean. Running statistics can be stale.
    """
    row, column = x.shape[2] // 2, x.shape[3] // 2
    return x[:1, :, row, column].sum(0, dtype=precision(x))


def all_gather(part: Tensor, group: str) -> Tensor:
    """The tensors of all processes of the group, stacked in the order of their ranks."""
    from torch.distributed import distributed_c10d as c10d  # missing in some builds of PyTorch

    members = c10d._resolve_process_group(group)  # pyright: ignore
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(members))]
    dist.all_gather(parts, part, members)
    return torch.stack(parts)


class Gate(NamedTuple):
    """The gate of squeeze-and-excitation."""

    gate_input_nc: Tensor
    inside: Tensor  # between the two layers, (N, reduced channels)
    out_nc: Tensor

    @staticmethod
    def of(gate_input_nc: Tensor, se: Sequence[Tensor]) -> "Gate":
        reduce, reduce_bias, expand, expand_bias = (weight.to(gate_input_nc.dtype) for weight in se)
        inside = F.linear(gate_input_nc, reduce.flatten(1), reduce_bias).relu()
        return Gate(
            gate_input_nc, inside, F.linear(inside, expand.flatten(1), expand_bias).sigmoid()
        )

    @property
    def positive_nc(self) -> Tensor:
        return self.out_nc.clamp(min=MIN_GATE)

    def gradients(self, grad_out: Tensor, se: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Gradients of the gate's input, and of the weights and biases."""
        reduce, _, expand, _ = (weight.to(self.gate_input_nc.dtype) for weight in se)
        grad_expanded = grad_out * self.out_nc * (1 - self.out_nc)
        grad_reduced = (grad_expanded @ expand.flatten(1)) * (self.inside > 0)
        grads = (
            grad_reduced.T @ self.gate_input_nc,
            grad_reduced.sum(0),
            grad_expanded.T @ self.inside,
            grad_expanded.sum(0),
        )
        grad_se = [
            grad.reshape(weight.shape).to(weight.dtype)
            for grad, weight in zip(grads, se, strict=True)
        ]
        return grad_reduced @ reduce.flatten(1), grad_se


# Operators without a convolution.


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


# Operators over several pixels.

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
