"""PyTorch's preparation of a graph for ONNX, which no weight changes, once for equal graphs.

Decomposition and the promotion of types take most of an export, and tests export the same few
networks with other weights or to other formats.
"""

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram


def once_for_equal_graphs(prepare: Callable[..., ExportedProgram]) -> Callable[..., Any]:
    """For `_prepare_exported_program_for_export` of `torch.onnx`."""
    prepared: dict[str, ExportedProgram] = {}

    def run(program: ExportedProgram, *, registry: Any) -> ExportedProgram:
        key = digest(program)
        if key not in prepared:
            prepared[key] = prepare(program, registry=registry)
            prepared[key]._state_dict = dict.fromkeys(prepared[key].state_dict)
        result = copy.copy(prepared[key])
        result._state_dict = {name: program.state_dict[name] for name in result.state_dict}
        return result

    return run


def once_for_equal_operators(materialise: Callable[[], None]) -> Callable[[], None]:
    """For `_materialize_cpp_cia_ops`, which a decomposition calls 56 times for the same list."""
    last: list[list[str]] = []

    def run() -> None:
        names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if [names] != last:
            materialise()
            last[:] = [names]

    return run


def digest(program: ExportedProgram) -> str:
    """Of all but the weights: operators, shapes, types, strides, names, sources and constants."""
    graph = hashlib.sha256()
    parts = (program.graph_signature, program.range_constraints, program.example_inputs)
    for part in parts:
        graph.update(repr(part).encode())
    for name, constant in program.constants.items():
        graph.update(f"{name} {described(constant)} {constant.tolist()}".encode())
    for node in program.graph.nodes:
        words = (node.name, node.op, node.target, node.args, node.kwargs)
        graph.update(repr((*map(str, words), described(node.meta.get("val")))).encode())
        graph.update(
            repr([node.meta.get(key) for key in ("nn_module_stack", "stack_trace")]).encode()
        )
    return graph.hexdigest()


def described(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return value
