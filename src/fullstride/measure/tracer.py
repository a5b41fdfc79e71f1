"""Records which operators a module runs, and what its layers cost, on the meta device.

FLOPs are 2 x MACs. TResNet and GENet print MACs under the name FLOPs, ResNet-RS prints 2 x MACs.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fullstride.io.records import check_range
from fullstride.measure.operators import (
    AFTER_PRODUCT,
    ALONE,
    CHAINED,
    CONVOLUTIONS,
    IN_CHAIN,
    IN_OTHER_CHAIN,
    JOINING,
    KIND,
    PRODUCTS,
    OperatorRow,
    Operators,
    convolution,
    elementwise,
    linear,
)
from fullstride.nets.backbone import batch_shape
from fullstride.nets.spec import MOST_CHANNELS

COUNTED = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear


@dataclass(frozen=True)
class Cost:
    """The cost of one image in a whole network."""

    params: int  # without running statistics and fixed filters
    macs: int  # convolutions, with fixed blur filters, and matrix products; FLOPs are 2 x MACs
    activations: int  # output elements of convolutions and linear layers, like memory traffic
    resolution: int  # pixels a side


@dataclass(frozen=True)
class LayerCost:
    """The cost of one image in one convolution or linear layer."""

    name: str
    shape_in: tuple[int, ...]  # without the image dimension
    shape_out: tuple[int, ...]
    params: int
    macs: int  # multiply-adds
    activations: int  # output elements


Net = nn.Module | Callable[[], nn.Module]  # a network, or a function that builds it


def cost(net: Net, resolution: int, in_channels: int = 3) -> Cost:
    """Count the cost of a network for one square image; FLOPs are 2 x MACs.

    Runs on the meta device, so nothing is computed. Raises ValueError for an image that the network
    does not accept.

    Examples:
        >>> import fullstride
        >>> fullstride.cost(fullstride.zoo.create("resnet50"), resolution=224).macs
        4089184256
    """
    net = on_meta(net)
    with FlopCounterMode(display=False) as counter:
        rows = layer_costs(net, resolution, in_channels)
    return Cost(
        params=sum(p.numel() for p in net.parameters()),
        macs=counter.get_total_flops() // 2,
        activations=sum(row.activations for row in rows),
        resolution=resolution,
    )


def layer_costs(net: Net, resolution: int, in_channels: int = 3) -> list[LayerCost]:
    """Return one row per call of a convolution or linear layer, in the order of the forward pass.

    `cost` also counts the MACs of fixed filters (TResNet's blurs) and of products of two
    activations (attention), which are not layers.
    """
    net = on_meta(net)
    rows: list[LayerCost] = []

    def count(name: str, layer: Any, inputs: Any, out: Tensor) -> None:
        shapes = tuple(inputs[0].shape[1:]), tuple(out.shape[1:])
        params = sum(p.numel() for p in layer.parameters())
        macs = out.numel() * layer.weight[0].numel()
        rows.append(LayerCost(name, *shapes, params, macs, out.numel()))

    for name, layer in net.named_modules():
        if isinstance(layer, COUNTED):
            layer.register_forward_hook(partial(count, name))
    image = meta_image(net, resolution, in_channels)
    with unfit_image(image), torch.inference_mode():
        net(image)
    return rows


def on_meta(net: Net) -> nn.Module:
    """Copy the network to the meta device, in evaluation mode."""
    if isinstance(net, nn.Module):
        return copy_with(net, lambda tensor: tensor.to("meta")).eval()
    with torch.device("meta"):
        return net().eval()


def copy_with(net: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy the network with converted tensors; no weight is duplicated."""
    memo: dict[int, object] = {  # deepcopy uses these tensors instead of copies
        id(p): nn.Parameter(convert(p), p.requires_grad) for p in net.parameters()
    }
    memo |= {id(b): convert(b) for b in net.buffers()}
    return copy.deepcopy(net, memo)


def meta_image(net: nn.Module, resolution: int, in_channels: int) -> Tensor:
    return torch.empty(batch_shape(net, 1, in_channels, resolution), device="meta")


def without_unused(build: Callable[[], nn.Module], resolution: int, in_channels: int) -> nn.Module:
    """Build the network on the meta device, without parameters that its outputs do not depend on.

    Beside the head of a task, the classifier is unused, and exported files lack it. Raises
    ValueError for an image that the network does not accept.
    """
    with torch.device("meta"):
        net = build().eval().requires_grad_()
    image = meta_image(net, resolution, in_channels)
    with unfit_image(image):
        outputs = [leaf for leaf in tree_leaves(net(image)) if leaf.requires_grad]
    parameters = dict(net.named_parameters())
    gradients = torch.autograd.grad(
        [leaf.sum() for leaf in outputs], list(parameters.values()), allow_unused=True
    )
    for path, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            layer, _, name = path.rpartition(".")
            setattr(net.get_submodule(layer), name, None)
    return net


@contextmanager
def unfit_image(image: torch.Tensor) -> Iterator[None]:
    """Turn the error of a network that does not accept `image` into a ValueError of one line."""
    try:
        yield
    except (RuntimeError, AssertionError, ValueError) as error:
        shape = " x ".join(map(str, image.shape[1:]))
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"the network takes no {shape} image: {reason}") from None


class Place(NamedTuple):
    """Where in a network an operator runs."""

    stage: str
    path: str  # of the innermost module
    module: nn.Module | None


Location = list[Place]  # a stack; the last place is the innermost
REST = "between stages"  # operators outside of all stages
NOWHERE = [Place(REST, "", None)]


StagesOf = Callable[[nn.Module], Mapping[str, Iterable[nn.Module]]]


def followed(net: nn.Module, stages: Mapping[str, Iterable[nn.Module]]) -> Location:
    """The current place in the network, which hooks on its modules update while it runs."""
    location = [Place(REST, "", net)]
    stage_of = {id(module): stage for stage, modules in stages.items() for module in modules}

    def enter(path: str, module: nn.Module, _: object) -> None:
        location.append(Place(stage_of.get(id(module), location[-1].stage), path, module))

    for path, module in net.named_modules():
        module.register_forward_pre_hook(partial(enter, path))
        module.register_forward_hook(lambda *_: location.pop() and None)
    return location


def traced_with_names(
    net: Net, resolution: int, in_channels: int = 3
) -> tuple[Operators, frozenset[str]]:
    """The operators of `traced`, and the ATen names of all operators that ran."""
    tracer = trace(net, resolution, in_channels)
    return Operators.of(tracer.rows), frozenset(tracer.names)


def traced(net: Net, resolution: int, in_channels: int = 3) -> Operators:
    """The operators of a network in evaluation mode, in order.

    Runs on the meta device, so nothing is computed. Raises ValueError for an image that the network
    does not accept.
    """
    return traced_with_names(net, resolution, in_channels)[0]


def trace(net: Net, resolution: int, in_channels: int, stages: StagesOf | None = None) -> "Tracer":
    """Trace one forward pass; with `stages`, the tracer knows the places of its rows."""
    check_range("resolution", resolution, MOST_CHANNELS)
    net = on_meta(net)
    image = meta_image(net, resolution, in_channels)
    tracer = Tracer(image, followed(net, stages(net)) if stages else NOWHERE)
    # Not inference_mode, which would hide the parts of composite operators.
    with unfit_image(image), torch.no_grad(), Attention(tracer), tracer:
        net(image)
    return tracer


# Names of ATen operators, or prefixes of names.
NORMS = (
    "native_batch_norm",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "_batch_norm_no_update",
)
STATISTICS = ("native_layer_norm", "_softmax", "_safe_softmax", "linalg_vector_norm", "var_mean")
REDUCTIONS = ("mean", "sum", "amax", "var", "std", "argmax")
REDUCTIONS += ("_adaptive_avg_pool2d", "adaptive_max_pool2d")
POOLS = ("max_pool2d_with_indices", "avg_pool2d", "upsample", "_upsample", "grid_sampler", "im2col")
POOLS += ("max_pool3d_with_indices", "avg_pool3d")
COPIES = ("cat", "stack", "clone", "copy_", "_to_copy", "pad", "roll", "index", "gather", "repeat")
COPIES += ("flip", "unfold")
MATRICES = ("addmm", "mm", "bmm", "baddbmm")
CREATION = ("empty", "new_empty", "zeros", "ones", "full", "detach")


@dataclass
class TensorState:
    """An activation of the forward pass."""

    tensor: Tensor  # a reference, so that no other tensor reuses its storage
    order: int
    kind: str  # of the operator that computed the tensor; "" for the image
    chain: int
    read: bool = False  # whether an operator has read it


class Tracer(TorchDispatchMode):
    """Records every operator that touches memory.

    Tensors are identified by their storage, so a view is the tensor that it views. Within
    `Attention`, attention is one operator, as on a GPU: the meta device would compute all products
    of tokens.
    """

    def __init__(self, image: Tensor, location: Location = NOWHERE):
        super().__init__()
        self.rows: list[OperatorRow] = []
        self.location = location
        self.places: list[Place] = []  # one per row
        self.states = {storage(image): TensorState(image, 0, "", ALONE)}
        # Tensors computed from parameters must not free their storage for activations.
        self.references: list[Tensor] = []
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        outs = tensors_in([out])
        tensors = tensors_in(args)
        if not tensors or not outs:
            return out
        self.references += outs
        inplace = name.endswith("_") and not name.startswith("as_strided")
        first = outs[0]
        if not inplace and any(storage(first) == storage(t) for t in tensors):
            return out  # a view
        if not name.startswith(CREATION):
            self.names.add(name)
            self.record(name.rstrip("_") if name != "copy_" else name, tensors, first, args)
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention without dropout: (..., tokens, channels of the value)."""
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        operands = tensors_in([query, key, value, mask])
        images = [t for t in operands if storage(t) in self.states]
        for t in images:
            self.states[storage(t)].read = True
        row = OperatorRow(
            KIND["product"],
            macs=(query.numel() + out.numel()) * key.shape[-2],
            read=sum(t.numel() for t in images),
            written=out.numel(),
            weights=sum(t.numel() for t in operands if storage(t) not in self.states),
            c_in=query.shape[-1],
            c_out=key.shape[-2],
            groups=1,
        )
        self.add(row)
        self.names.add("scaled_dot_product_attention")
        self.references.append(out)
        self.states[storage(out)] = TensorState(out, len(self.rows), "product", ALONE)
        return out

    def add(self, row: OperatorRow) -> None:
        self.rows.append(row)
        self.places.append(self.location[-1])

    def record(self, name: str, tensors: list[Tensor], out: Tensor, args: Any) -> None:
        images = [t for t in tensors if storage(t) in self.states]
        fixed = sum(t.numel() for t in tensors if storage(t) not in self.states)
        if not images:  # only parameters: as costly for one image as for a hundred
            self.add(elementwise("activation", 0, 0, fixed + out.numel()))
            return
        operand = max(images, key=lambda t: (t.numel(), self.states[storage(t)].order))
        kind = self.kind(name, images, operand, args)
        chain = self.chain(kind, operand, images)
        self.add(self.row(name, kind, chain, images, fixed, out, args))
        for t in images:
            self.states[storage(t)].read = True
        self.states[storage(out)] = TensorState(out, len(self.rows), kind, chain)

    def kind(self, name: str, images: list[Tensor], operand: Tensor, args: Any) -> str:
        if name == "convolution":
            weight, groups = args[1], args[8]
            if groups > 1:
                return "depthwise" if weight.shape[1] == 1 else "grouped"
            return "1x1" if weight[0, 0].numel() == 1 else "dense"
        if name.startswith(MATRICES):
            return "linear" if len(images) == 1 else "product"
        if name.startswith(NORMS):
            source = self.states[storage(operand)]
            return "batch_norm" if source.kind in CONVOLUTIONS and not source.read else "norm"
        if name == "native_group_norm":
            return "group_norm"
        for kind, starts in (("statistics", STATISTICS), ("reduce", REDUCTIONS), ("pool", POOLS)):
            if name.startswith(starts):
                return kind
        if name.startswith(COPIES) or name.endswith("_pad2d") or name.endswith("_pad_nd"):
            return "copy"
        if len(images) > 1:
            return "add" if all(t.shape == operand.shape for t in images) else "scale"
        return "silu" if name == "silu" else "activation"

    def chain(self, kind: str, operand: Tensor, images: list[Tensor]) -> int:
        source = self.states[storage(operand)]
        if kind not in CHAINED or source.read:
            return ALONE
        if source.kind in PRODUCTS:
            return AFTER_PRODUCT
        if source.kind not in CHAINED:
            return ALONE
        if kind == "add":
            others = [self.states[storage(t)] for t in images if storage(t) != storage(operand)]
            if any(other.kind in CHAINED and not other.read for other in others):
                return JOINING
        return IN_CHAIN if source.chain in (AFTER_PRODUCT, IN_CHAIN, JOINING) else IN_OTHER_CHAIN

    def row(
        self,
        name: str,
        kind: str,
        chain: int,
        images: list[Tensor],
        fixed: int,
        out: Tensor,
        args: Any,
    ) -> OperatorRow:
        if name == "convolution":
            x, weight, bias, transposed, groups = args[0], args[1], args[2], args[6], args[8]
            c_in, c_out = x.shape[1], out.shape[1]
            if transposed:  # each input pixel is spread over the kernel
                macs = x.numel() * weight[0].numel()
                sizes = c_in // groups, c_out // groups, groups
                return OperatorRow(KIND[kind], macs, x.numel(), out.numel(), fixed, *sizes)
            pixels = x[0, 0].numel(), out[0, 0].numel()
            return convolution(c_in, c_out, weight[0, 0].numel(), *pixels, groups, bias is not None)
        if name.startswith(MATRICES):
            has_bias = name in ("addmm", "baddbmm")
            a, b = tensors_in(args)[-2:] if has_bias else args[:2]
            if kind == "linear":
                return linear(a.shape[-1], b.shape[-1], a[..., 0].numel(), bias=name == "addmm")
            macs, read = out.numel() * a.shape[-1], a.numel() + b.numel()
            sizes = a.shape[-1], out.shape[-1], 1
            return OperatorRow(KIND[kind], macs, read, out.numel(), 0, *sizes)
        return elementwise(kind, sum(t.numel() for t in images), out.numel(), fixed, chain)


class Attention(TorchFunctionMode):
    """Passes calls of attention to a tracer before PyTorch divides them into products."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask")
        operands = dict(zip(names, args, strict=False)) | kwargs
        return self.tracer.attend(*(operands.get(name) for name in names))  # pyright: ignore


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among the values and inside lists of values."""
    lists = (value if isinstance(value, tuple | list) else [value] for value in values)
    return [t for values in lists for t in values if isinstance(t, Tensor)]


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
