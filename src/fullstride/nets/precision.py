"""How are precisions spelled for people? fp32, tf32, bf16, fp16 and int8."""

from typing import Literal

Precision = Literal["fp32", "bf16", "fp16", "int8"]  # that exported files compute in

# PyTorch's names, which are read too, and stand in the files of measurements.
SPELLINGS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def short_precision(name: str) -> str:
    """float32 -> fp32; a name that is short already stays."""
    return SPELLINGS.get(name, name)
