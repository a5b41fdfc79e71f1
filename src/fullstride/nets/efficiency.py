"""How is a training step computed? By plain or fused modules, eagerly or compiled."""

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


def is_fused(efficiency: str) -> bool:
    return efficiency in ("fused", "fused_compiled")


def is_compiled(efficiency: str) -> bool:
    return efficiency in ("plain_compiled", "fused_compiled")
