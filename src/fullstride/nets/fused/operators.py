"""Registers the fused operators with torch, and chooses Triton or PyTorch for their passes."""

import os
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import is_fake
from torch.library import custom_op, register_autograd

from fullstride.nets.fused import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(x: Tensor) -> ModuleType:
    """`triton.passes` for maps like x on a GPU, if Triton is installed, else `reference`.

    Maps without values, in a compiler or on the meta device, also use `reference`.
    """
    device = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    takes = device and x.dtype in DTYPES and not (x.is_meta or is_fake(x))
    return in_triton() or reference if takes else reference


@cache
def in_triton() -> ModuleType | None:
    if not find_spec("triton"):
        return None
    from fullstride.nets.fused.triton import passes

    return passes


def operator(name: str, schema: str) -> Callable[[Callable], CustomOpDef]:
    """Register a function as `fullstride::NAME`, with a schema in place of annotations.

    Autocast is disabled inside: it would round the statistics between the passes. The function
    also gives the shapes and strides of results, from maps without values, as on one process.
    """

    def register(function: Callable) -> CustomOpDef:
        @wraps(function)
        def run(x: Tensor, *rest: Any) -> Any:
            with torch.autocast(x.device.type, enabled=False):
                return function(x, *rest)

        def without_values(*arguments: Any) -> Any:
            return function(*arguments[:-1], "") if "str group" in schema else function(*arguments)

        registered = custom_op(f"fullstride::{name}", run, mutates_args=(), schema=schema)
        registered.register_fake(without_values)
        return registered

    return register


def set_gradient(name: str, select: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    """Let `fullstride::NAME_backward` compute the gradient of `fullstride::NAME`.

    The arguments of the backward operator are gradients of the first results, whose names begin
    with "grad", then saved arguments and results of the operator, by the names in its schema. It
    returns the gradients of the first arguments, with lists of tensors flattened. `select` may
    replace saved values by name.
    """
    schema, backward = (
        getattr(torch.ops.fullstride, each).default._schema for each in (name, f"{name}_backward")
    )
    names = [each.name for each in (*schema.arguments, *schema.returns)]
    kinds = {each.name: str(each.type) for each in (*backward.arguments, *schema.arguments)}
    saved = [each.name for each in backward.arguments if not each.name.startswith("grad")]
    count = len(backward.arguments) - len(saved)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*results[count:])
        values = dict(zip(names, (*inputs, *results), strict=True))
        ctx.sizes = {key: len(values[key]) for key in values if kinds.get(key) == "List[Tensor]"}
        select(values)
        ctx.constants = {key: values[key] for key in saved if "Tensor" not in kinds[key]}
        tensors = (values[key] for key in saved if key not in ctx.constants)
        ctx.save_for_backward(
            *(each for value in tensors for each in (value if isinstance(value, list) else [value]))
        )

    def differentiate(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        def take(values: Any, key: str) -> Any:
            """The value of an argument; a list of its length, if it is a list of tensors."""
            size = ctx.sizes.get(key)
            return next(values, None) if size is None else [next(values) for _ in range(size)]

        tensors = iter(ctx.saved_tensors)
        rest = [ctx.constants[key] if key in ctx.constants else take(tensors, key) for key in saved]
        operator = getattr(torch.ops.fullstride, f"{name}_backward")
        results = operator(*gradients[:count], *rest)
        results = iter([results] if isinstance(results, Tensor) else results)
        return tuple(take(results, each.name) for each in schema.arguments)

    register_autograd(f"fullstride::{name}", differentiate, setup_context=save)


def memory_format(x: Tensor) -> torch.memory_format:
    last = x.stride(1) == 1 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def in_format_of(y: Tensor, x: Tensor) -> Tensor:
    """y, in the memory format of x."""
    return y.contiguous(memory_format=memory_format(x))


def precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
