"""How is a convolution's output normalised, activated, gated and joined while little of it is kept for the gradient?

Batch norm in training and all that stands between it and the next convolution, in few passes over the maps; what each
function keeps is said at it. Gains are folded with the squeeze-and-excitation gate and the mask into one scale and one
shift for each image and channel, and the mean that the gate sees is that of the input, scaled and shifted. The
operators behind the functions change nothing; the running statistics move here, as those of `nn.BatchNorm2d` do. In
evaluation, that module itself is right.

Activations are given by their slope for negative values: 0 is ReLU, None is no activation. `group` names processes that
take their statistics together; "" means each its own.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.nets.fused import pointwise_ops, spatial_ops

LARGEST_OFFSET = 8.0  # |bias / gain| up to which an input is made again of its output: 2^-6 of its deviation in bf16
LEAST_GAIN = 1e-3  # the same, where float16 runs out of digits


def tail(
    x: Tensor,
    norm: nn.BatchNorm2d,
    shortcut: Tensor | None = None,
    shortcut_norm: nn.BatchNorm2d | None = None,
    *,
    se: Sequence[Tensor] = (),
    keep: Tensor | None = None,
    slope: float | None = 0.0,
    save: Literal["both", "input"] = "both",
    group: str = "",
    int8: bool = False,
) -> Tensor:
    """The end of a block: act(keep * gate * norm(x) + shortcut), or + shortcut_norm(shortcut).

    `se`: the weights of `SqueezeExcite.weights`; `keep`: (N, 1, 1, 1). Keeps x, a shortcut that has a norm of its own,
    and the result, which the next convolution keeps anyway; "input" is for where none follows: any shortcut, and the
    gradient makes the result again. Right at any gain, also at zero.

    With `int8`, "both" keeps in place of x, and of such a shortcut, codes of a byte for each value: the normalised one,
    up to 6 deviations, in steps of 0.047, of which x has every second one: odd where the result is positive. The result
    is the same; gradients of the norms move by the rounding.
    """
    check(x, norm, group)
    other = []
    if shortcut is not None:
        other.append(shortcut.to(x.dtype))
    if shortcut is not None and shortcut.shape != x.shape:
        raise ValueError(
            f"a branch of {tuple(x.shape)} and a shortcut of {tuple(shortcut.shape)} do not fit together"
        )
    if shortcut is not None and shortcut_norm is not None:
        check(shortcut, shortcut_norm, group)
        other += [gain(shortcut_norm), shortcut_norm.bias, shortcut_norm.running_mean]
    eps = [norm.eps] if shortcut_norm is None else [norm.eps, shortcut_norm.eps]
    kept = "codes" if int8 and save == "both" else save
    y, moments, *_ = pointwise_ops.join(
        x, gain(norm), norm.bias, norm.running_mean, list(se), keep, other, slope, eps, kept, group
    )
    track(norm, moments[0], x, group)
    if shortcut_norm is not None:
        track(shortcut_norm, moments[1], x, group)
    return y


def abn(
    x: Tensor,
    norm: nn.BatchNorm2d,
    slope: float | None,
    *,
    save: Literal["both", "input", "output"] = "both",
    group: str = "",
) -> Tensor:
    """act(norm(x)), keeping x and the result, or one of the two, of which the gradient makes the other again.

    "both" costs one map where the next layer keeps the result anyway. See `invertible` for when "output" may be chosen.
    """
    if save == "output" and slope is not None and not slope > 0:
        raise ValueError(f'slope {slope} cannot be inverted: use save="both", or a slope above 0')
    check(x, norm, group)
    y, moments, *_ = pointwise_ops.join(
        x, gain(norm), norm.bias, norm.running_mean, [], None, [], slope, [norm.eps], save, group
    )
    track(norm, moments[0], x, group)
    return y


def abn_conv(
    x: Tensor, norm: nn.BatchNorm2d, slope: float | None, conv: nn.Conv2d, *, group: str = ""
) -> Tensor:
    """conv(act(norm(x))), keeping x alone: the gradient makes the convolution's input again, exactly, in one more pass.

    For a convolution without bias that pads with zeros.
    """
    check(x, norm, group)
    weight = conv.weight.to(x.dtype)  # as autocast would
    assert isinstance(conv.padding, tuple)
    geometry = [*conv.stride, *conv.padding, conv.groups]
    y, moments = spatial_ops.conv(
        x, gain(norm), norm.bias, norm.running_mean, weight, geometry, slope, norm.eps, group
    )
    track(norm, moments, x, group)
    return y


def pool_conv(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """conv(the 2 x 2 average of x) as of `average_pool`, for a 1 x 1 convolution: keeps x, not its average."""
    return spatial_ops.pool(x, conv.weight.to(x.dtype))


def abn_se(
    x: Tensor, norm: nn.BatchNorm2d, se: Sequence[Tensor], slope: float, *, group: str = ""
) -> Tensor:
    """gate * act(norm(x)), where the gate sees the mean of what it scales. Keeps the result alone, as `abn` can."""
    if not slope > 0:
        raise ValueError(
            f"slope {slope} cannot be inverted: use abn and SqueezeExcite, or a slope above 0"
        )
    check(x, norm, group)
    y, moments, _ = pointwise_ops.gate(
        x, gain(norm), norm.bias, norm.running_mean, list(se), slope, norm.eps, group
    )
    track(norm, moments, x, group)
    return y


def abn_blur(
    x: Tensor, norm: nn.BatchNorm2d, slope: float | None, *, group: str = ""
) -> tuple[Tensor, Tensor]:
    """blur(act(norm(x))) as by `BlurPool`, and its means (N, C) for a gate behind it. Keeps x alone."""
    check(x, norm, group)
    y, means, moments = spatial_ops.blur(
        x, gain(norm), norm.bias, norm.running_mean, slope, norm.eps, group
    )
    track(norm, moments, x, group)
    return y, means


def invertible(norm: nn.BatchNorm2d) -> Tensor:
    """Whether an input can be made again from its output: one truth value, on the device.

    The normalised input comes back with an error of 2^-9 * |it + bias / gain| in bf16, so no channel's |bias / gain|
    may be above `LARGEST_OFFSET`, and no |gain| below `LEAST_GAIN`. A layer that fails keeps its input.
    """
    size = gain(norm).detach().abs()
    return ((norm.bias.detach().abs() <= LARGEST_OFFSET * size) & (size >= LEAST_GAIN)).all()


class MagnitudeNorm(nn.BatchNorm2d):
    """Batch norm with the gain |weight| + 1e-5, never negative, as of in-place activated batch norm.

    A weight of zero counts as positive, also in its gradient. For weights that were trained so and go on being so.
    """

    def gain(self) -> Tensor:
        return torch.where(self.weight < 0, -self.weight, self.weight) + 1e-5

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        return F.batch_norm(
            input,
            *statistics,
            self.gain(),
            self.bias,
            self.training,
            self.momentum or 0.0,
            self.eps,
        )


def gain(norm: nn.BatchNorm2d) -> Tensor:
    return norm.gain() if isinstance(norm, MagnitudeNorm) else norm.weight


def check(x: Tensor, norm: nn.BatchNorm2d, group: str) -> None:
    """Raises ValueError for what cannot be normalised by its batch."""
    if norm.momentum is None or norm.running_mean is None or norm.weight is None:
        raise ValueError(
            "this batch norm has no gain, running statistics or momentum: build it with PyTorch's defaults"
        )
    if not x.is_floating_point():
        raise ValueError(
            f"batch norm of a map of {x.dtype}: give one of floating point, as float32"
        )
    if x.dim() != 4 or x.shape[1] != norm.num_features:
        raise ValueError(f"a map of {tuple(x.shape)}: give one of (N, {norm.num_features}, H, W)")
    if x.device != norm.weight.device:
        raise ValueError(
            f"a map on {x.device} and batch norm on {norm.weight.device}: move one to the other's device"
        )
    if not group and x.numel() == x.shape[1]:
        raise ValueError(
            f"a map of {tuple(x.shape)} has one value per channel: train with more images or larger ones"
        )


@torch.no_grad()
def track(norm: nn.BatchNorm2d, moments: Tensor, x: Tensor, group: str) -> None:
    """Move the running statistics towards the batch's, as `nn.BatchNorm2d` does."""
    assert norm.momentum is not None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    if x.numel() == 0 and not group:
        return
    count, mean, variance = moments.to(norm.running_mean.dtype)
    norm.running_mean.lerp_(mean, norm.momentum)
    norm.running_var.lerp_(variance * count / (count - 1).clamp(min=1), norm.momentum)
