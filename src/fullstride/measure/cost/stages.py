"""Which modules form the stages of a network?"""

from torch import nn

from fullstride.nets.backbone import Backbone
from fullstride.nets.network import Network

# Fraction of all modules. A child that holds more is not a stage: its children are stages.
MAX_STAGE_SHARE = 0.8


def stages(net: nn.Module) -> dict[str, list[nn.Module]]:
    """The modules of each stage: stem, stages and head of a `Network`, the top level of others."""
    task_head = net.task_head if isinstance(net, Backbone) else None
    if isinstance(net, Backbone):
        net = net.get_submodule(net.root)
    if isinstance(net, Network):
        children = {
            "stem": net.stem,
            **{f"stages.{i}": stage for i, stage in enumerate(net.stages)},
            "head": net.head,
        }
    else:
        children, limit = dict(net.named_children()), MAX_STAGE_SHARE * len([*net.modules()])
        while large := next((n for n, m in children.items() if is_large(m, limit)), None):
            inner = {f"{large}.{n}": m for n, m in children[large].named_children()}
            children = {
                name: module
                for n, m in children.items()
                for name, module in (inner if n == large else {n: m}).items()
            }
    if task_head is not None:
        children["task_head"] = task_head
    # Hooks of a Sequential do not run where its blocks are called one by one, with their masks.
    return {
        name: [*module.children()] if type(module) is nn.Sequential and [*module] else [module]
        for name, module in children.items()
    }


def is_large(module: nn.Module, limit: float) -> bool:
    return bool([*module.children()]) and len([*module.modules()]) > limit
