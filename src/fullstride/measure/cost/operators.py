"""Which operators does a network run, and how much does each compute and move? For one image.

`traced` records any module on the meta device. Without a module, `convolution`, `linear` and
`elementwise` build the same rows in the order of the forward pass; `merged` makes the two
comparable.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride.measure.cost.flops import on_meta, unfit_image
from fullstride.nets.spec import MOST_CHANNELS, check_range

OPERATOR_KINDS = (
    "dense",  # k x k convolution that sees all channels
    "1x1",
    "depthwise",  # fixed blur filters included
    "grouped",
    "linear",
    "product",  # of two activations, as in attention
    "batch_norm",  # right behind a convolution, into which it can be folded
    "norm",  # batch norm anywhere else
    "group_norm",
    "statistics",  # others that need statistics before they can begin: layer norm, softmax
    "activation",  # element by element from one tensor
    "silu",
    "add",  # element by element from two tensors of one size
    "scale",  # by a smaller tensor, as in squeeze-and-excitation
    "pool",  # maximum or average of neighbours, resizing
    "reduce",  # over whole maps
    "copy",  # concatenation, padding, reordering
)
KIND = {name: number for number, name in enumerate(OPERATOR_KINDS)}
CONVOLUTIONS = ("dense", "1x1", "depthwise", "grouped")
PRODUCTS = (*CONVOLUTIONS, "linear", "product")
CHAINED = ("batch_norm", "norm", "activation", "silu", "add", "scale")  # compilers merge these

# Where an element-by-element operator stands. Its operand: the larger one, of two of one size the
# one that was computed last.
ALONE = 0  # the operand was read before, or comes from an operator of another kind than below
AFTER_PRODUCT = 1  # the operand comes from a convolution or a linear layer, for this reader alone
IN_CHAIN = 2  # from another such operator, in a chain that began behind a convolution or linear
IN_OTHER_CHAIN = 3  # the same, but the chain began elsewhere
JOINING = 4  # two operands of one size come from such chains, for this reader alone


Size = Any  # a number, or an array of them
where: Callable[..., Any] = np.where


class OperatorRow(NamedTuple):
    """One operator, for one image."""

    kind: int  # into OPERATOR_KINDS
    macs: float = 0  # multiply-adds
    read: float = 0  # elements of activations
    written: float = 0  # elements of activations
    weights: float = 0  # elements that are read and written whatever the number of images
    c_in: float = 0  # of a convolution or product: channels that an output is a sum over
    c_out: float = 0  # of a convolution or product: output channels per group
    groups: float = 0  # of a convolution or product
    chain: int = ALONE
    count: float = 1  # repetitions  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclass(frozen=True)
class Operators:
    """The operators of one image through a network, as columns. Their content: `OperatorRow`."""

    kind: np.ndarray
    macs: np.ndarray
    read: np.ndarray
    written: np.ndarray
    weights: np.ndarray
    c_in: np.ndarray
    c_out: np.ndarray
    groups: np.ndarray
    chain: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[OperatorRow]) -> "Operators":
        if not rows:
            raise ValueError("no operators: the network runs none")
        return cls.of_columns(np.array(rows, dtype=np.float64).T.copy())

    @classmethod
    def of_columns(cls, table: np.ndarray) -> "Operators":
        """Of a (columns, operators) table."""
        columns = zip(COLUMNS, table, strict=True)
        return cls(*(c.astype(np.int64) if name in ("kind", "chain") else c for name, c in columns))

    def table(self) -> np.ndarray:
        """(columns, operators)."""
        return np.stack([getattr(self, name) for name in COLUMNS]).astype(np.float64)

    def rows(self) -> list[OperatorRow]:
        return [OperatorRow(*row) for row in self.table().T.tolist()]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def total_macs(self) -> float:
        return float((self.macs * self.count).sum())

    @property
    def total_weights(self) -> float:
        """Elements of weights of all convolutions and linear layers."""
        products = np.isin(self.kind, [KIND[kind] for kind in PRODUCTS])
        return float((self.weights * self.count)[products].sum())

    def merged(self) -> "Operators":
        """Equal operators in one row, sorted.

        Two networks have equal merged operators exactly when they run the same operators.
        """
        *columns, count = self.table()
        rows, place = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        count = np.bincount(place.reshape(-1), weights=count, minlength=len(rows))
        return Operators.of_columns(np.column_stack([rows, count]).T.copy())


COLUMNS = tuple(field.name for field in fields(Operators))


def concatenate(networks: Sequence[Operators]) -> Operators:
    """The rows of all networks, in order."""
    columns = ([getattr(net, name) for net in networks] for name in COLUMNS)
    return Operators(*map(np.concatenate, columns))


def convolution(
    c_in: Size,
    c_out: Size,
    kernel: Size,
    pixels_in: Size,
    pixels_out: Size,
    groups: Size = 1,
    bias: bool = False,
) -> OperatorRow:
    """`kernel`: weights per pair of channels (9 for 3 x 3); `pixels_in`, `pixels_out`: of maps.

    A kernel smaller than the stride reads only the pixels that it uses.
    """
    plain = where(kernel == 1, KIND["1x1"], KIND["dense"])
    kind = where(groups == 1, plain, where(groups == c_in, KIND["depthwise"], KIND["grouped"]))
    a, b = c_in // groups, c_out // groups
    read = c_in * np.minimum(pixels_in, pixels_out * kernel)
    written, weights = c_out * pixels_out, c_out * a * kernel
    return OperatorRow(
        kind, written * a * kernel, read, written, weights + bias * c_out, a, b, groups
    )


def linear(c_in: int, c_out: int, rows: float = 1, bias: bool = True) -> OperatorRow:
    """`rows`: vectors per image."""
    weights = c_in * c_out + bias * c_out
    return OperatorRow(
        KIND["linear"], rows * c_in * c_out, rows * c_in, rows * c_out, weights, c_in, c_out, 1
    )


def elementwise(
    kind: str, read: float, written: float, weights: float = 0, chain: int = ALONE
) -> OperatorRow:
    """Any other operator. `weights`: of its parameters (a batch norm over C channels: 4 C)."""
    return OperatorRow(KIND[kind], 0, read, written, weights, chain=chain)


def traced(
    net: nn.Module | Callable[[], nn.Module], resolution: int, in_channels: int = 3
) -> Operators:
    """The operators of a network in evaluation mode, or of a function that builds one, in order.

    It runs on the meta device, so that nothing is computed. Raises ValueError for an image that the
    network does not take.
    """
    check_range("resolution", resolution, MOST_CHANNELS)
    net = on_meta(net)
    image = torch.empty(1, in_channels, resolution, resolution, device="meta")
    tracer = Tracer(image)
    # Not inference_mode, which would hide the parts of composite operators.
    with unfit_image(image), torch.no_grad(), tracer:
        net(image)
    return Operators.of(tracer.rows)


# Names of ATen operators, or how they begin.
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
COPIES = ("cat", "stack", "clone", "copy_", "_to_copy", "pad", "roll", "index", "gather", "repeat")
COPIES += ("flip", "unfold")
MATRICES = ("addmm", "mm", "bmm", "baddbmm", "_scaled_dot_product")
CREATION = ("empty", "new_empty", "zeros", "ones", "full", "detach")


@dataclass
class TensorState:
    """An activation of the forward pass."""

    tensor: Tensor  # a reference, so that no other tensor reuses its storage
    order: int
    kind: str  # of the operator that computed it; "" for the image
    chain: int
    read: bool = False  # by an operator


class Tracer(TorchDispatchMode):
    """Records every operator that touches memory.

    Tensors are identified by their storage, so that a view is the tensor that it views.
    """

    def __init__(self, image: Tensor):
        super().__init__()
        self.rows: list[OperatorRow] = []
        self.states = {storage(image): TensorState(image, 0, "", ALONE)}
        # Parameters that are computed on the way must not free their storage for activations.
        self.references: list[Tensor] = []

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
            self.record(name.rstrip("_") if name != "copy_" else name, tensors, first, args)
        return out

    def record(self, name: str, tensors: list[Tensor], out: Tensor, args: Any) -> None:
        images = [t for t in tensors if storage(t) in self.states]
        fixed = sum(t.numel() for t in tensors if storage(t) not in self.states)
        if not images:  # of parameters alone: as costly for one image as for a hundred
            self.rows.append(elementwise("activation", 0, 0, fixed + out.numel()))
            return
        operand = max(images, key=lambda t: (t.numel(), self.states[storage(t)].order))
        kind = self.kind(name, images, operand, args)
        chain = self.chain(kind, operand, images)
        self.rows.append(self.row(name, kind, chain, images, fixed, out, args))
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


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values and in lists of them."""
    lists = (value if isinstance(value, tuple | list) else [value] for value in values)
    return [t for values in lists for t in values if isinstance(t, Tensor)]


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
