"""How a network computes: the form of a training step, and the names of precisions.

Apart from `nets.compile`, whose imports take seconds.
"""

from dataclasses import dataclass
from typing import Literal

# plain: PyTorch's modules. fused: the memory-efficient operators of `nets.fused`. Compiled: by
# torch.compile, with recomputation (see `nets.compile`).
Efficiency = Literal["plain", "fused", "plain_compiled", "fused_compiled"]


@dataclass(frozen=True, kw_only=True)
class TrainingForm:
    """What changes the tensors that a training step of a network saves for its backward pass."""

    efficiency: Efficiency = "plain"
    int8: bool = False  # batch-norm inputs as int8, where the efficiency is a fused one
    padded: bool = False  # channels padded to multiples of 8
    drop_path: float = 0.0  # as of `Backbone.regularise`
    drop_path_by: Literal["block", "stage"] = "block"
    dropout: float = 0.0


PLAIN = TrainingForm()


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """How a step trains a network, as a recipe says."""

    resolution: int | None = None  # pixels a side; None: the network's own
    precision: str = "bf16"
    layout: Literal["nchw", "nhwc"] = "nchw"
    form: TrainingForm = PLAIN


def is_fused(efficiency: str) -> bool:
    return efficiency in ("fused", "fused_compiled")


def is_compiled(efficiency: str) -> bool:
    return efficiency in ("plain_compiled", "fused_compiled")


Precision = Literal["fp32", "bf16", "fp16", "int8"]  # that exported files compute in

# PyTorch's names, which are read too, and stand in the files of measurements.
SPELLINGS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def short_precision(name: str) -> str:
    """float32 -> fp32; a name that is short already stays."""
    return SPELLINGS.get(name, name)
