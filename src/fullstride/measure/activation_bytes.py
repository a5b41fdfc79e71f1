"""Counts the bytes of activations that a training step saves for its backward pass.

Exact, per image and by stage. The largest batch of a GPU is nearly its memory divided by this.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from fullstride.measure.tracer import Net, Place, copy_with, followed, on_meta, unfit_image
from fullstride.measure.workload import Precision
from fullstride.nets.backbone import Backbone, batch_shape
from fullstride.nets.network import Network

# Fraction of all modules. The children of a child that holds more are stages, not the child.
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
        children = top_level(net, MAX_STAGE_SHARE * len([*net.modules()]))
    if task_head is not None:
        children["task_head"] = task_head
    # Hooks of a Sequential do not run where its blocks are called one by one, with their masks.
    return {
        name: [*module.children()] if type(module) is nn.Sequential and [*module] else [module]
        for name, module in children.items()
    }


def top_level(net: nn.Module, limit: float, prefix: str = "") -> dict[str, nn.Module]:
    """The children by path; a child with over `limit` modules is replaced by its own children."""
    modules: dict[str, nn.Module] = {}
    for name, child in net.named_children():
        large = [*child.children()] and len([*child.modules()]) > limit
        path = f"{prefix}{name}"
        modules |= top_level(child, limit, f"{path}.") if large else {path: child}
    return modules


# Images of two batches. Bytes that grow with the batch are per image, others are fixed.
FEW, MORE = 2, 4


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """The saved tensors of one training step, without weights and running statistics."""

    bytes_per_image: int
    # Bytes per image by stage, with the sum `bytes_per_image`. A tensor of two stages counts for
    # the first.
    by_stage: dict[str, int]
    by_layer: dict[str, int]  # bytes per image by path of the innermost module, "" for the loss
    fixed_bytes: int  # for any batch: weights cast to the precision
    largest_map: int  # elements per image of the largest saved tensor
    resolution: int  # pixels per side
    precision: Precision


class SavedStorage(NamedTuple):
    """A storage that autograd saves, with the place where it is first saved."""

    stage: str
    layer: str
    size_bytes: int
    elements: int


def activation_bytes(
    net: Net,
    resolution: int,
    precision: Precision = "bfloat16",
    in_channels: int = 3,
    *,
    device: Literal["cuda", "cpu"] = "cuda",
) -> ActivationBytes:
    """Count the saved tensors of an eager training step of `net` with the loss.

    The loss is the cross-entropy over the last axis of each output, as a head may have several.

    `device` decides on the rules of autocast to `precision`; a GPU need not be present. Raises
    ValueError for images that the network does not accept.
    """
    net = on_meta(net).train()
    size = resolution, precision, in_channels, device
    few_and_more = (saved_storages(net, batch, *size) for batch in (FEW, MORE))
    pairs = [*zip(*few_and_more, strict=True)]
    by_stage: Counter[str] = Counter()
    by_layer: Counter[str] = Counter()
    for few, more in pairs:
        growth = (more.size_bytes - few.size_bytes) // (MORE - FEW)
        by_stage[few.stage] += growth
        by_layer[few.layer] += growth
    per_image = by_stage.total()
    return ActivationBytes(
        bytes_per_image=per_image,
        by_stage={stage: size for stage, size in by_stage.items() if size},
        by_layer={layer: size for layer, size in by_layer.items() if size},
        fixed_bytes=sum(few.size_bytes for few, _ in pairs) - FEW * per_image,
        largest_map=max((more.elements - few.elements for few, more in pairs), default=0)
        // (MORE - FEW),
        resolution=resolution,
        precision=precision,
    )


def saved_storages(
    net: nn.Module, batch: int, resolution: int, precision: Precision, in_channels: int, device: str
) -> list[SavedStorage]:
    """The storages that the forward pass of a training step saves, in order, each once."""
    storages: dict[int, tuple[SavedStorage, object]] = {}

    def blank(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in storages:
            entry = SavedStorage(*location[-1][:2], storage.nbytes(), tensor.numel())
            storages[storage._cdata] = entry, storage  # a reference, so that no address is reused
        return tensor

    with FakeTensorMode():
        net = copy_with(net, blank)
        own = {tensor.untyped_storage()._cdata for tensor in (*net.parameters(), *net.buffers())}
        location = followed(net, stages(net))
        images = torch.empty(batch_shape(net, batch, in_channels, resolution), device=device)
        with (
            unfit_image(images),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            autocast(device, precision),
        ):
            outputs = [
                leaf for leaf in tree_leaves(net(images)) if getattr(leaf, "requires_grad", False)
            ]
            location.append(Place("loss", "", None))
            for rows in (leaf.float().reshape(-1, leaf.shape[-1]) for leaf in outputs):
                targets = torch.zeros(len(rows), dtype=torch.long, device=device)
                F.cross_entropy(rows, targets)
    return [entry for entry, _ in storages.values()]


@contextmanager
def autocast(device: str, precision: Precision) -> Iterator[None]:
    """`torch.autocast` that also works for a GPU that is not present."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    try:
        torch.set_autocast_enabled(device, precision != "float32")
        torch.set_autocast_dtype(device, getattr(torch, precision))
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
