"""Rewrites networks for the runtimes of phones and boards, which support few operators well.

Their files take one image of one size per call. Operators that these runtimes lack, or compute
outside their kernels, are replaced, with the same outputs up to rounding.
"""

import copy
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.deploy.formats.base import last_line
from fullstride.deploy.job import ExportJob
from fullstride.nets.layers import SpaceToDepth

aten = torch.ops.aten


def program(job: ExportJob) -> torch.export.ExportedProgram:
    """The float32 graph of the job's module for one image, with well supported operators."""
    return of_one_image(job).program(batch=1).run_decompositions(DECOMPOSITIONS)


def of_one_image(job: ExportJob) -> ExportJob:
    net = with_patch_convolutions(job.net, job.metadata.preprocessing.channels)
    return replace(job, net=net, example=job.example[:1])


def run_converter(
    runtime: str, *words: str | Path, environment: Mapping[str, str] | None = None
) -> None:
    """Run a program. Raises ValueError with its last printed line if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode:
        why = last_line(ValueError(done.stderr or done.stdout))
        raise ValueError(f"the converter of {runtime} failed ({done.returncode}): {why}")


def with_patch_convolutions(net: nn.Module, channels: int) -> nn.Module:
    """Copy `net` with a convolution in place of each space-to-depth of an image, ours or timm's."""
    from timm.layers.space_to_depth import SpaceToDepth as TimmSpaceToDepth

    net = copy.deepcopy(net)
    for name, module in [*net.named_modules()]:
        if isinstance(module, SpaceToDepth | TimmSpaceToDepth):
            net.set_submodule(name, PatchConvolution(channels))
    return net


class PatchConvolution(nn.Module):
    """`SpaceToDepth` as a convolution with constant weights: (N, C, H, W) -> (N, 16C, H/4, W/4).

    Runtimes lack the six-dimensional transpose that moves the pixels.
    """

    weight: Tensor

    def __init__(self, channels: int):
        super().__init__()
        p = SpaceToDepth.patch
        # output (row, column, c) is channel c of the pixel at this row and column of a patch
        weight = torch.eye(p * p * channels).view(-1, p, p, channels).permute(0, 3, 1, 2)
        self.register_buffer("weight", weight.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        p = SpaceToDepth.patch
        if x.shape[2] % p or x.shape[3] % p:
            x = F.pad(x, (0, -x.shape[3] % p, 0, -x.shape[2] % p))
        return F.conv2d(x, self.weight, stride=p)


class Planes(nn.Module):
    """Gives a module of pixels (N, H, W, C) the form that `planes` makes of them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.permute(0, 2, 3, 1).clone())


def planes(pixels: Tensor) -> Tensor:
    """What runtimes make of an image: uint8 (N, H, W, C) -> float32 (N, C, H, W), 0 to 255."""
    return pixels.movedim(-1, 1).float().contiguous()


def pad(x: Tensor, padding: list[int], mode: str = "constant", value: float | None = None) -> Any:
    """Reflection of one pixel on each side, as slices and a concatenation."""
    if mode != "reflect" or list(padding) != [1, 1, 1, 1]:
        return NotImplemented
    x = torch.cat([x[:, :, 1:2], x, x[:, :, -2:-1]], 2)
    return torch.cat([x[..., 1:2], x, x[..., -2:-1]], 3)


def avg_pool2d(
    x: Tensor,
    kernel: list[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Any:
    """Pooling of disjoint 2 x 2 pixels with ceil_mode, by repeating the last odd pixels."""
    pairs = {tuple(kernel), tuple(stride or kernel)} == {(2, 2)}
    if not (pairs and ceil_mode and not any(padding) and divisor is None):
        return NotImplemented
    if x.shape[2] % 2:
        x = torch.cat([x, x[:, :, -1:]], 2)
    if x.shape[3] % 2:
        x = torch.cat([x, x[..., -1:]], 3)
    return aten.avg_pool2d.default(x, [2, 2], [2, 2])


def mean(x: Tensor, dims: list[int] | None, keepdim: bool = False, **types: Any) -> Any:
    """A mean over rows and columns that keeps the dimensions, then flattens."""
    if keepdim or x.ndim != 4 or sorted(dim % 4 for dim in dims or ()) != [2, 3]:
        return NotImplemented
    return aten.mean.dim(x, [2, 3], True, **types).flatten(1)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.pad.default: pad,
    aten.avg_pool2d.default: avg_pool2d,
    aten.mean.dim: mean,
}
