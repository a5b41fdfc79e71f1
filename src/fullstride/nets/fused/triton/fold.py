"""The first pass over the pixels in Triton: bytes to values and patches to channels. Defined in `plain.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullstride.nets.fused.triton.tiles import BLOCK, SIZES, run


def fold(
    pixels_nhwc: Tensor, patch: int, mean_c: Tensor, std_c: Tensor, dtype: torch.dtype
) -> Tensor:
    n, h, w, c = pixels_nhwc.shape
    pixels_nhwc = pixels_nhwc.contiguous()
    y = torch.empty(
        (n, h // patch, w // patch, patch * patch * c), dtype=dtype, device=pixels_nhwc.device
    )
    block_k = triton.next_power_of_2(patch * patch * c)
    block_p = max(BLOCK // block_k, 1)
    numbers = mean_c.float().contiguous(), std_c.float().contiguous()
    sizes = dict(patch=patch, c=c, block_p=block_p, block_k=block_k)
    arguments = y, pixels_nhwc, *numbers, y.shape[:3].numel(), y.shape[2]
    run(fold_kernel, triton.cdiv(y.shape[:3].numel(), block_p), arguments, sizes)
    return y.permute(0, 3, 1, 2)


@triton.jit(do_not_specialize=("patches", *SIZES))
def fold_kernel(
    y,
    pixels,
    mean,
    std,
    patches,
    width,
    patch: tl.constexpr,
    c: tl.constexpr,
    block_p: tl.constexpr,
    block_k: tl.constexpr,
):
    """All images' patches are in line, `width` side by side."""
    k = tl.arange(0, block_k)
    p = tl.program_id(0).to(tl.int64) * block_p + tl.arange(0, block_p)
    mask = (p < patches)[:, None] & (k < patch * patch * c)[None, :]
    line = patch * c  # bytes of a patch that are side by side
    byte = (p // width * patch * width + p % width) * line
    byte = byte[:, None] + (k // line * width * line + k % line)[None, :]
    mean = tl.load(mean + k % c)[None, :]
    std = tl.load(std + k % c)[None, :]
    value = tl.div_rn(tl.load(pixels + byte, mask=mask, other=0).to(tl.float32), 255.0)
    value = tl.div_rn(value - mean, std)
    tl.store(y + p[:, None] * (patch * patch * c) + k[None, :], value, mask=mask)
