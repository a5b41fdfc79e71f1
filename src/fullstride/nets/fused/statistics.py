"""What is computed between two passes over the maps? Numbers for each image and channel, and where they are stored."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fullstride.nets.fused.dispatch import choose
from fullstride.nets.fused.reference import Affine, Slopes

LEAST_GAIN = 1e-5  # |gain| below which an input made of its output is finite but no longer right
LEAST_GATE = 1e-30  # that a gate's product can be divided by it


def precise(op: Callable) -> Callable:
    """Without autocast, which would round the numbers between the passes."""

    @wraps(op)
    def run(x: Tensor, *rest):
        with torch.autocast(x.device.type, enabled=False):
            return op(x, *rest)

    return run


def memory_format(x: Tensor) -> torch.memory_format:
    last = x.stride(1) == 1 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def laid(y: Tensor, x: Tensor) -> Tensor:
    """y in the memory format of x."""
    return y.contiguous(memory_format=memory_format(x))


def like(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty map in x's memory format, of x's shape and type unless others are given."""
    return torch.empty(
        shape or x.shape, dtype=dtype or x.dtype, device=x.device, memory_format=memory_format(x)
    )


def numbers(x: Tensor, *shape: int) -> Tensor:
    """Empty numbers, in the precision that sums of x are taken in."""
    return x.new_empty(shape, dtype=precision(x))


def precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Norm(NamedTuple):
    """Batch norm by a batch's own statistics: gain * rstd * (x - mean) + bias."""

    size: Tensor  # values per channel, of all processes
    mean: Tensor
    rstd: Tensor
    gain: Tensor
    bias: Tensor

    @staticmethod
    def of(moments: Tensor, gain: Tensor, bias: Tensor, eps: float) -> "Norm":
        size, mean, variance = moments
        return Norm(size, mean, (variance + eps).rsqrt(), gain.to(mean.dtype), bias.to(mean.dtype))

    def affine(self, factor: Tensor | float = 1.0) -> Affine:
        """Of factor * the norm; the factor may be (N, C)."""
        return Affine(self.mean, factor * (self.gain * self.rstd)[None], factor * self.bias[None])

    def inverse(self) -> Affine:
        """The affine to make an input again by; a gain of zero would divide by zero."""
        away = torch.where(self.gain < 0, -LEAST_GAIN, LEAST_GAIN).to(self.gain.dtype)
        return Norm(
            *self[:3], torch.where(self.gain.abs() < LEAST_GAIN, away, self.gain), self.bias
        ).affine()

    def gradients(
        self, first_nc: Tensor, second_nc: Tensor, group: str
    ) -> tuple[Tensor, Tensor, Slopes]:
        """Of gain and bias, and of the input where dz is the gradient of the norm's output.

        From sums over the pixels of dz and dz * (x - mean).
        """
        of_bias, of_gain = first_nc.sum(0), second_nc.sum(0) * self.rstd
        shares = together(torch.stack([of_bias, of_gain]), group) / self.size
        scale = self.gain * self.rstd
        slopes = Slopes(
            scale[None], (-scale * shares[0])[None], (-scale * self.rstd * shares[1])[None]
        )
        return of_gain, of_bias, slopes


def statistics(x: Tensor, pivot_c: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Count, mean and variance of each channel, (3, C), and the mean of x - mean of each image, (N, C)."""
    pivot_c = pivot_c.to(precision(x))
    first_nc, second_nc = choose(x).stats(x, pivot_c)
    pixels, images = x.shape[2] * x.shape[3], max(len(x), 1)
    mean = first_nc.sum(0) / images
    centred_nc = first_nc - mean
    spread = pixels * ((second_nc - first_nc.square()).clamp(min=0) + centred_nc.square()).sum(0)
    count = torch.full_like(mean, len(x) * pixels)
    if not group:
        return torch.stack([count, pivot_c + mean, spread / max(len(x) * pixels, 1)]), centred_nc
    parts = gathered(torch.stack([count, pivot_c + mean, spread]), group)
    counts, means, spreads = parts.unbind(1)
    total = counts.sum(0).clamp(min=1)
    whole = (counts * means).sum(0) / total
    variance = (spreads + counts * (means - whole).square()).sum(0) / total
    return torch.stack([total, whole, variance]), centred_nc + (pivot_c + mean - whole)


def gathered(part: Tensor, group: str) -> Tensor:
    """What each process of the group gives, in their order."""
    from torch.distributed import distributed_c10d as c10d  # PyTorch may be built without

    members = c10d._resolve_process_group(group)  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]
    found = [torch.empty_like(part) for _ in range(dist.get_world_size(members))]
    dist.all_gather(found, part, members)
    return torch.stack(found)


def together(part: Tensor, group: str) -> Tensor:
    """The sum over the processes of the group."""
    return gathered(part, group).sum(0) if group else part


class Gate(NamedTuple):
    """Squeeze-and-excitation on the means of a map."""

    seen_nc: Tensor
    inside: Tensor  # between its two layers, (N, reduced channels)
    out_nc: Tensor

    @staticmethod
    def of(seen_nc: Tensor, se: Sequence[Tensor]) -> "Gate":
        reduce, reduce_bias, expand, expand_bias = (weight.to(seen_nc.dtype) for weight in se)
        inside = F.linear(seen_nc, reduce.flatten(1), reduce_bias).relu()
        return Gate(seen_nc, inside, F.linear(inside, expand.flatten(1), expand_bias).sigmoid())

    def gradients(self, of_out: Tensor, se: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Of the means that it sees, and of its weights."""
        reduce, _, expand, _ = (weight.to(self.seen_nc.dtype) for weight in se)
        of_expanded = of_out * self.out_nc * (1 - self.out_nc)
        of_reduced = (of_expanded @ expand.flatten(1)) * (self.inside > 0)
        found = (
            of_reduced.T @ self.seen_nc,
            of_reduced.sum(0),
            of_expanded.T @ self.inside,
            of_expanded.sum(0),
        )
        of_se = [
            of.reshape(weight.shape).to(weight.dtype) for of, weight in zip(found, se, strict=True)
        ]
        return of_reduced @ reduce.flatten(1), of_se
