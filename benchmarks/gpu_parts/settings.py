"""What do all parts of `benchmarks/gpu.py` share?"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
FORMATS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}
TIME_SHARE = 0.9  # of a part's minutes, after which no more work starts


@dataclass(frozen=True, kw_only=True)
class Settings:
    device: torch.device
    tiny: bool
    out: Path
    seconds: float  # limit of the part

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"


Result = dict[str, Any]  # JSON; "summary" is its line, "ok" says whether it passes
Work = tuple[str, Callable[[], Result]]  # a name and what to run


def size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
