"""Computes statistics, gates and their gradients, between two passes over the maps."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fullstride.nets.fused.operators import choose, precision
from fullstride.nets.fused.reference import Affine, Slopes

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
