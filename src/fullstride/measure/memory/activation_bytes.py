"""What does a training step keep for its backward pass? Bytes per image and stage, exactly, and nothing is computed.

The largest batch of a GPU is its memory divided by this number, nearly: it grows with every map that a layer
needs again for its gradient.
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

from fullstride.measure.cost.flops import on_meta
from fullstride.measure.workload import Precision
from fullstride.nets.backbone import Backbone
from fullstride.nets.network import Network

FEW, MORE = 2, 4  # images: what grows between these two batches is kept for each image
MOST = 0.8  # of all modules: a child that holds more of them is no stage, and its children are


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What one training step of a network keeps from forward to backward. Weights and running statistics are not in."""

    bytes_per_image: int
    by_stage: dict[
        str, int
    ]  # bytes per image: adds up to the whole; a map shared by two is of the first
    by_layer: dict[
        str, int
    ]  # the same by the path of the innermost module at work, "" for the loss
    fixed_bytes: int  # whatever the batch: weights cast to the precision
    largest_map: int  # elements per image of the largest tensor that is kept
    resolution: int  # pixels a side
    precision: Precision


class Kept(NamedTuple):
    """One storage that is kept."""

    stage: str
    layer: str
    size_bytes: int
    elements: int


def saved(
    net: nn.Module | Callable[[], nn.Module],
    resolution: int,
    precision: Precision = "bfloat16",
    in_channels: int = 3,
    *,
    device: Literal["cuda", "cpu"] = "cuda",
) -> Saved:
    """What a training step of `net`, eager and with the loss, keeps on a GPU, which need not be here, or on the CPU.

    They differ where autocast converts other operators. Raises ValueError for images that the network cannot take.
    """
    net = (
        on_meta(net).train()
    )  # here: a network may look at its weights then, which it cannot on a device that is not
    few, more = (
        kept(net, batch, resolution, precision, in_channels, device) for batch in (FEW, MORE)
    )
    by_stage: Counter[str] = Counter()
    by_layer: Counter[str] = Counter()
    for one, other in zip(few, more, strict=True):
        size = (other.size_bytes - one.size_bytes) // (MORE - FEW)
        by_stage[one.stage] += size
        by_layer[one.layer] += size
    per_image = by_stage.total()
    return Saved(
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


def kept(
    net: nn.Module, batch: int, resolution: int, precision: Precision, in_channels: int, device: str
) -> list[Kept]:
    """What the forward pass of a training step hands to autograd, in order and each storage once."""
    found: dict[int, tuple[Kept, object]] = {}
    where = [("between stages", "")]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in found:
            # the storage is held, so that no other can have its address
            found[storage._cdata] = Kept(*where[-1], storage.nbytes(), tensor.numel()), storage
        return tensor

    with FakeTensorMode():
        net = imagined(net, device)
        own = {tensor.untyped_storage()._cdata for tensor in (*net.parameters(), *net.buffers())}
        stage_of = {
            id(module): stage for stage, modules in stages(net).items() for module in modules
        }
        for path, module in net.named_modules():
            module.register_forward_pre_hook(partial(enter, where, stage_of.get(id(module)), path))
            module.register_forward_hook(partial(leave, where))
        images = torch.empty(batch, in_channels, resolution, resolution, device=device)
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                autocast(device, precision),
            ):
                logits = net(images)
                where.append(("loss", ""))
                F.cross_entropy(logits.float(), torch.zeros(batch, dtype=torch.long, device=device))
        except (RuntimeError, AssertionError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"the network takes no {in_channels} x {resolution} x {resolution} image: {why}"
            ) from None
    return [one for one, _ in found.values()]


def enter(where: list[tuple[str, str]], stage: str | None, path: str, *_: object) -> None:
    where.append((stage or where[-1][0], path))


def leave(where: list[tuple[str, str]], *_: object) -> None:
    where.pop()


def imagined(net: nn.Module, device: str) -> nn.Module:
    """A copy whose tensors say that they are on `device`, and are nowhere."""

    def blank(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    memo: dict[int, object] = {
        id(p): nn.Parameter(blank(p), p.requires_grad) for p in net.parameters()
    }
    memo |= {id(b): blank(b) for b in net.buffers()}
    return copy.deepcopy(net, memo)


def stages(net: nn.Module) -> dict[str, list[nn.Module]]:
    """Name -> modules that are called: stem, stages and head of our networks, the top level of others."""
    if isinstance(net, Backbone):
        net = net.get_submodule(net.root)
    if isinstance(net, Network):
        found = {
            "stem": net.stem,
            **{f"stages.{i}": s for i, s in enumerate(net.stages)},
            "head": net.head,
        }
    else:
        found, whole = dict(net.named_children()), len(list(net.modules()))
        while most := [
            n for n, m in found.items() if [*m.children()] and len([*m.modules()]) > MOST * whole
        ]:
            inside = {f"{most[0]}.{n}": m for n, m in found[most[0]].named_children()}
            found = {
                k: v
                for n, m in found.items()
                for k, v in (inside if n == most[0] else {n: m}).items()
            }
    # a Sequential is not always called itself: masks go to each of its blocks
    return {
        n: [*m.children()] if type(m) is nn.Sequential and [*m] else [m] for n, m in found.items()
    }


@contextmanager
def autocast(device: str, precision: Precision) -> Iterator[None]:
    """`torch.autocast`, also for a GPU that is not here, where that one would be off."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    try:
        torch.set_autocast_enabled(device, precision != "float32")
        torch.set_autocast_dtype(device, getattr(torch, precision))
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
