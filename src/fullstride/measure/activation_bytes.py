"""How many bytes of activations does a training step save for its backward pass? Nothing is run.

Exact, per image and by stage. The largest batch of a GPU is nearly its memory divided by this.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fullstride.measure.tracer import on_meta
from fullstride.measure.workload import Precision
from fullstride.nets.backbone import Backbone, batch_shape
from fullstride.nets.network import Network

# Which modules form the stages of a network?


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


# Images of two batches. Bytes that grow from one to the other are per image, others are fixed.
FEW, MORE = 2, 4


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """The saved tensors of one training step, without weights and running statistics."""

    bytes_per_image: int
    # Bytes per image by stage; their sum is the total. A tensor of two stages counts for the first.
    by_stage: dict[str, int]
    by_layer: dict[str, int]  # the same by the path of the innermost module, "" for the loss
    fixed_bytes: int  # for any batch: weights cast to the precision
    largest_map: int  # elements per image of the largest saved tensor
    resolution: int  # pixels per side
    precision: Precision


class SavedStorage(NamedTuple):
    """A storage that autograd saves, and where it is saved first."""

    stage: str
    layer: str
    size_bytes: int
    elements: int


def activation_bytes(
    net: nn.Module | Callable[[], nn.Module],
    resolution: int,
    precision: Precision = "bfloat16",
    in_channels: int = 3,
    *,
    device: Literal["cuda", "cpu"] = "cuda",
) -> ActivationBytes:
    """Count the saved tensors of an eager training step of `net` with the loss.

    Args:
        net: A network, or the function that builds it.
        resolution: Pixels per side.
        precision: Of autocast.
        in_channels: Channels of an image.
        device: Whose autocast rules apply. A GPU need not be present.

    Raises ValueError for images that the network does not accept.
    """
    # On the meta device: in training mode, a fused network reads its weights.
    net = on_meta(net).train()
    few, more = (
        saved_storages(net, batch, resolution, precision, in_channels, device)
        for batch in (FEW, MORE)
    )
    by_stage: Counter[str] = Counter()
    by_layer: Counter[str] = Counter()
    for one, other in zip(few, more, strict=True):
        size = (other.size_bytes - one.size_bytes) // (MORE - FEW)
        by_stage[one.stage] += size
        by_layer[one.layer] += size
    per_image = by_stage.total()
    return ActivationBytes(
        bytes_per_image=per_image,
        by_stage={stage: size for stage, size in by_stage.items() if size},
        by_layer={layer: size for layer, size in by_layer.items() if size},
        fixed_bytes=sum(one.size_bytes for one in few) - FEW * per_image,
        largest_map=max(
            (b.elements - a.elements for a, b in zip(few, more, strict=True)), default=0
        )
        // (MORE - FEW),
        resolution=resolution,
        precision=precision,
    )


def saved_storages(
    net: nn.Module, batch: int, resolution: int, precision: Precision, in_channels: int, device: str
) -> list[SavedStorage]:
    """The storages that the forward pass of a training step saves, in order, each once."""
    storages: dict[int, tuple[SavedStorage, object]] = {}
    location = [("between stages", "")]  # a stack of stage and layer

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in storages:
            entry = SavedStorage(*location[-1], storage.nbytes(), tensor.numel())
            storages[storage._cdata] = entry, storage  # a reference, so that no address is reused
        return tensor

    with FakeTensorMode():
        net = fake_copy(net, device)
        own = {tensor.untyped_storage()._cdata for tensor in (*net.parameters(), *net.buffers())}
        stage_of = {
            id(module): stage for stage, modules in stages(net).items() for module in modules
        }
        for path, module in net.named_modules():
            module.register_forward_pre_hook(
                partial(enter, location, stage_of.get(id(module)), path)
            )
            module.register_forward_hook(partial(leave, location))
        images = torch.empty(batch_shape(net, batch, in_channels, resolution), device=device)
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                autocast(device, precision),
            ):
                logits = net(images)
                location.append(("loss", ""))
                F.cross_entropy(logits.float(), torch.zeros(batch, dtype=torch.long, device=device))
        except (RuntimeError, AssertionError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"the network takes no {in_channels} x {resolution} x {resolution} image: {reason}"
            ) from None
    return [entry for entry, _ in storages.values()]


def enter(location: list[tuple[str, str]], stage: str | None, path: str, *_: object) -> None:
    location.append((stage or location[-1][0], path))


def leave(location: list[tuple[str, str]], *_: object) -> None:
    location.pop()


def fake_copy(net: nn.Module, device: str) -> nn.Module:
    """A copy with fake tensors of `device`, without memory."""

    def blank(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    memo: dict[int, object] = {
        id(p): nn.Parameter(blank(p), p.requires_grad) for p in net.parameters()
    }
    memo |= {id(b): blank(b) for b in net.buffers()}
    return copy.deepcopy(net, memo)


@contextmanager
def autocast(device: str, precision: Precision) -> Iterator[None]:
    """`torch.autocast`, also for a GPU that is not present, where it would be off."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    try:
        torch.set_autocast_enabled(device, precision != "float32")
        torch.set_autocast_dtype(device, getattr(torch, precision))
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
