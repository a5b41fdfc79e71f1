"""Tells torch.compile which fused operators to recompute: cheap ones, by the ends of blocks.

Int8 activations can stand in for recomputed results. Names are from the schemas in `torch.library`
(`fullstride::join` ends a residual block).
"""

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from fullstride.nets.compile import CustomOperators

# The fused operators without a convolution.
CHEAP = ("fullstride::join", "fullstride::rejoin", "fullstride::gate", "fullstride::blur")


def is_cheap(node: Node) -> bool:
    """Whether an operator is one of `CHEAP` and does not communicate with other processes."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema
    distributed = schema.arguments[-1].name == "group" and bool(node.args[-1])
    return schema.name in CHEAP and not distributed


def residual_blocks(graph: Graph) -> dict[Node, Node | None]:
    """The operator at the end of each residual block -> the operator of its identity shortcut.

    The value is None where the shortcut is no earlier block.
    """
    ends: dict[Node, Node | None] = {}
    for node in graph.nodes:
        if node.target is torch.ops.fullstride.join.default:
            shortcut = node.args[4]
            identity = len(shortcut) == 1 and shortcut[0].target is operator.getitem
            source = shortcut[0].args[0] if identity else None
            ends[node] = source if source in ends else None
    return ends


def recompute_from_int8(graph: Graph, checkpoints: Sequence[Node]) -> None:
    """Let the backward pass use the int8 form of each block result that is not a checkpoint.

    Otherwise it would recompute the result from the convolution's output, which is twice as large,
    and save the int8 activations too. The int8 form has the sign of the result, which the
    activation's gradient needs near zero.
    """
    backward: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if tangent or backward & set(node.all_input_nodes):
            backward.add(node)
    restored: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if (
            node.target is not torch.ops.fullstride.join.default
            or node.args[8] != "int8"
            or node in checkpoints
        ):
            continue
        _, gain, bias, se, shortcut, mask, slope, eps, *_ = node.args
        (y,) = (user for user in node.users if user.args[1] == 0)
        outputs = [node]
        for number, value in enumerate(node.meta["val"][1:], 1):
            with graph.inserting_after(outputs[-1]):
                outputs.append(graph.call_function(operator.getitem, (node, number)))
            outputs[-1].meta = node.meta | {"val": value}
        _, statistics, means, int8, shortcut_int8 = outputs
        if len(shortcut) > 1:
            shortcuts = [shortcut_int8, *shortcut[1:]]
        else:
            shortcuts = [restored.get(each, each) for each in shortcut]
        arguments = (int8, gain, bias, statistics, means, se, shortcuts, mask, slope, eps)
        with graph.inserting_after(outputs[-1]):
            restored[y] = graph.call_function(
                torch.ops.fullstride.rejoin.default, (*arguments, y.meta["val"].dtype)
            )
        restored[y].meta = dict(y.meta)
        y.replace_all_uses_with(restored[y], lambda user: user in backward and user.op != "output")


FUSED = CustomOperators(is_cheap, residual_blocks, recompute_from_int8, __file__)
