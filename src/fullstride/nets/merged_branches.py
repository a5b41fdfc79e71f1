"""Which network ships? The trained one, with branches that only training needs merged into one.

Inference is measured, estimated and exported in this form; a training step has all branches.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

METHODS = ("fuse", "reparameterize", "switch_to_deploy")  # of timm's modules, which merge them


def has_branches(net: nn.Module) -> bool:
    """Whether timm has another form of one of its modules for inference, as of MobileOne's."""
    return any(
        type(module).__module__.startswith("timm.") and any(hasattr(module, m) for m in METHODS)
        for module in net.modules()
    )


@torch.no_grad()
def merge_branches(net: nn.Module) -> nn.Module:
    """The network as it ships, changed in place; it is in evaluation mode and computes the same.

    Parallel convolutions with their batch norms become one (RepVGG, arXiv:2101.03697), as do
    classifiers of a distillation that are averaged. Others than timm's networks stay as they are.
    """
    net.eval()
    if not has_branches(net):
        return net
    from timm.utils.model import reparameterize_model

    with creating_like(next(net.parameters())):
        return reparameterize_model(net, inplace=True)


@contextmanager
def creating_like(weight: torch.Tensor) -> Iterator[None]:
    """timm's modules create the merged layers on the default device and in the default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(weight.dtype)
    try:
        with torch.device(weight.device):
            yield
    finally:
        torch.set_default_dtype(before)
