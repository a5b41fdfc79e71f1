"""Describes the form of a training step, and names precisions.

Apart from `nets.compile`, whose imports take seconds.
"""

from dataclasses import dataclass
from typing import Literal

# plain: eager. plain_compiled: by torch.compile, with recomputation (see `nets.compile`).
Efficiency = Literal["plain", "plain_compiled"]


@dataclass(frozen=True, kw_only=True)
class TrainingForm:
    """The settings that change the tensors saved for the backward pass."""

    efficiency: Efficiency = "plain"
    padded: bool = False  # channels padded to multiples of 8
    drop_path: float = 0.0  # as in `Backbone.regularise`
    drop_path_by: Literal["block", "stage"] = "block"
    dropout: float = 0.0


PLAIN = TrainingForm()


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """The settings of a recipe for one training step."""

    resolution: int | None = None  # pixels a side; None: the network's own
    precision: str = "bf16"
    layout: Literal["nchw", "nhwc"] = "nchw"
    form: TrainingForm = PLAIN


def is_compiled(efficiency: str) -> bool:
    return efficiency == "plain_compiled"


Precision = Literal["fp32", "bf16", "fp16", "int8"]  # that exported files compute in

# PyTorch's names, which are accepted too, and are in the files of measurements.
SPELLINGS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def short_precision(name: str) -> str:
    """float32 -> fp32; a short name stays."""
    return SPELLINGS.get(name, name)
