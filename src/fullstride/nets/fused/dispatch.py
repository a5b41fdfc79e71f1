"""Which implementation computes the passes over maps: Triton or PyTorch?"""

import os
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from fullstride.nets.fused import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(x: Tensor) -> ModuleType:
    """`triton.passes` for maps like x on a GPU, if Triton is installed, else `reference`."""
    device = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return in_triton() or reference if device and x.dtype in DTYPES else reference


@cache
def in_triton() -> ModuleType | None:
    if not find_spec("triton"):
        return None
    from fullstride.nets.fused.triton import passes

    return passes
