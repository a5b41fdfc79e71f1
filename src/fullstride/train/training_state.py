"""What is in a checkpoint of training? Its types, and whether its tensors fit a network."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from fullstride.strict_json import Bounds, from_json

Count = Annotated[int, Bounds(ge=0)]
Positive = Annotated[float, Bounds(gt=0)]

# What each optimizer has of a parameter, in the order of the library.
OPTIMIZER_TENSORS = {
    "SGD": ("momentum_buffer",),
    "SGDW": ("momentum_buffer",),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Lamb": ("exp_avg", "exp_avg_sq"),
    "RMSpropTF": ("step", "square_avg", "momentum_buffer"),
}


@dataclass(frozen=True)
class OptimizerState:
    state: Mapping[int, Mapping[str, Tensor | None]]
    param_groups: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class TrainingState:
    """The state after `epochs` whole epochs and `index` steps of the next."""

    epochs: Count
    index: Count
    losses: Tensor  # of these steps
    net: Mapping[str, Tensor]
    average: Mapping[str, Tensor]
    optimizer: OptimizerState
    scaler: Mapping[str, float]  # empty unless the precision is fp16
    saves: tuple[str, ...]  # of each fused batch norm, the tensors that it saves
    # Of `divergence.Divergence`.
    first_loss: float | None = None
    high_losses: Count = 0


@dataclass(frozen=True)
class ScalerState:
    scale: Positive
    growth_factor: Positive
    backoff_factor: Positive
    growth_interval: Annotated[int, Bounds(ge=1)]
    _growth_tracker: Count


def read_state(data: Any, where: str) -> TrainingState:
    """The state in a checkpoint. Raises ValueError, in one line, for any other data."""
    state = from_json(TrainingState, data, where)
    if state.losses.shape != (state.index,) or not is_finite(state.losses):
        raise ValueError(f"{where}: losses has {state.losses.numel()} values for {state.index}")
    return state


def load_optimizer(
    optimizer: torch.optim.Optimizer, saved: OptimizerState, names: list[str], where: str
) -> None:
    """Load what was saved of each parameter; rates and the like are those of `optimizer`.

    `names` are those of its parameters, in order. Raises ValueError, in one line, for tensors of
    another optimizer or of other shapes.
    """
    own = optimizer.state_dict()["param_groups"]
    indices = [
        list(from_json(tuple[int, ...], group.get("params"), f"{where}: params"))
        for group in saved.param_groups
    ]
    if indices != [group["params"] for group in own]:
        raise ValueError(f"{where}: param_groups: these are not the parameters of this network")
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    allowed = OPTIMIZER_TENSORS[type(optimizer).__name__]
    required = set(allowed) - ({"momentum_buffer"} if not own[0].get("momentum") else set())
    for index, values in saved.state.items():
        if not 0 <= index < len(parameters):
            raise ValueError(f"{where}: state[{index}] is of no parameter")
        if set(values) - set(allowed) or required - set(values):
            raise ValueError(
                f"{where}: {', '.join(values)} of {names[index]}: this optimizer has "
                f"{', '.join(allowed)}"
            )
        for name, value in values.items():
            shape = () if name == "step" else tuple(parameters[index].shape)
            if value is None and name not in required:
                continue
            if value is None or tuple(value.shape) != shape or not is_finite(value):
                raise ValueError(
                    f"{where}: {name} of {names[index]}: use finite floats of shape {shape}"
                )
    if type(optimizer).__name__ == "Lamb":
        steps = [lamb_step(group, where) for group in saved.param_groups]
        own = [{**group, "step": step} for group, step in zip(own, steps, strict=True)]
    optimizer.load_state_dict({"state": dict(saved.state), "param_groups": own})


def lamb_step(group: Mapping[str, Any], where: str) -> Tensor:
    """The number of steps so far, which timm's LAMB counts for each group of parameters."""
    step = from_json(Tensor, group.get("step"), f"{where}: step")
    if step.shape != () or not is_finite(step) or step < 0:
        raise ValueError(f"{where}: step of the optimizer: use a number of steps")
    return step.clone()


def is_finite(value: Tensor) -> bool:
    return value.is_floating_point() and bool(value.isfinite().all())


def load_scaler(scaler: torch.amp.GradScaler, saved: Mapping[str, float], where: str) -> None:
    """Load the scale of the losses, if there is one. Raises ValueError for other data."""
    if scaler.is_enabled():
        from_json(ScalerState, saved, f"{where}: scaler")
        scaler.load_state_dict(dict(saved))
