"""Which operators does a network run, and how much does each compute and move? For one image, as columns of numbers.

`traced` watches any module on the meta device. Whoever has no module builds the same columns with `convolution`,
`linear` and `elementwise`, in the order of the forward pass; `merged` makes the two comparable.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride.measure.cost.flops import on_meta
from fullstride.nets.spec import MOST_CHANNELS, check_range

KINDS = (
    "dense",  # k x k convolution that sees all channels
    "1x1",
    "depthwise",  # fixed blur filters among them
    "grouped",
    "linear",
    "product",  # of two activations, as in attention
    "batch_norm",  # right behind a convolution, into which it can be folded
    "norm",  # batch norm anywhere else
    "group_norm",
    "statistics",  # what else needs them before it can begin: layer norm, softmax
    "activation",  # element by element from one tensor
    "silu",
    "add",  # element by element from two tensors of one size
    "scale",  # by a smaller tensor, as in squeeze-and-excitation
    "pool",  # maximum or average of neighbours, resizing
    "reduce",  # over whole maps
    "copy",  # joining, padding, reordering
)
KIND = {name: number for number, name in enumerate(KINDS)}
CONVOLUTIONS = ("dense", "1x1", "depthwise", "grouped")
PRODUCTS = (*CONVOLUTIONS, "linear", "product")
CHAINED = (
    "batch_norm",
    "norm",
    "activation",
    "silu",
    "add",
    "scale",
)  # compilers join these into one kernel

# Where an element-by-element operator stands. Its operand: the larger one, of two of one size the one made last.
ALONE = 0  # the operand was read before, or comes from something else than the two below
AFTER_PRODUCT = 1  # a convolution or a linear layer made the operand for it alone
IN_CHAIN = (
    2  # another such operator did, in a chain that began behind a convolution or a linear layer
)
IN_OTHER_CHAIN = 3  # the same, but the chain began elsewhere
JOINING = 4  # two operands of one size come out of such chains, for it alone


Size = Any  # a number, or an array of them
where: Callable[..., Any] = np.where


class Row(NamedTuple):
    """One operator, for one image."""

    kind: int  # into KINDS
    macs: float = 0  # multiply-adds
    read: float = 0  # elements of activations
    written: float = 0  # the same
    weights: float = 0  # elements that are read and written however many images there are
    c_in: float = 0  # of a convolution or product: channels that each output is a sum over, kernel not counted
    c_out: float = 0  # the same: channels put out, per group
    groups: float = 0  # the same
    chain: int = ALONE
    count: float = 1  # how often it runs  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclass(frozen=True)
class Operators:
    """The operators of one image through a network, as equally long columns. What each holds: see `Row`."""

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
    def of(cls, rows: Sequence[Row]) -> "Operators":
        if not rows:
            raise ValueError("no operators: the network runs none")
        columns = np.array(rows, dtype=np.float64).T.copy()
        return cls(
            *(
                c.astype(np.int64) if n in ("kind", "chain") else c
                for n, c in zip(NAMES, columns, strict=True)
            )
        )

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def total_macs(self) -> float:
        return float((self.macs * self.count).sum())

    @property
    def total_weights(self) -> float:
        """Elements of weights of all convolutions and linear layers."""
        return float(
            (self.weights * self.count)[np.isin(self.kind, [KIND[k] for k in PRODUCTS])].sum()
        )

    def merged(self) -> "Operators":
        """Equal operators in one row, sorted: the same for two networks exactly when they run the same operators."""
        table = np.stack([getattr(self, name) for name in NAMES[:-1]], axis=1).astype(np.float64)
        rows, place = np.unique(table, axis=0, return_inverse=True)
        count = np.bincount(place.reshape(-1), weights=self.count, minlength=len(rows))
        return Operators.of([Row(*row) for row in np.column_stack([rows, count])])


NAMES = tuple(field.name for field in fields(Operators))


def joined(networks: Iterable[Operators]) -> Operators:
    """All their rows, one network after the other."""
    networks = list(networks)
    return Operators(*(np.concatenate([getattr(net, name) for net in networks]) for name in NAMES))


def convolution(
    c_in: Size,
    c_out: Size,
    kernel: Size,
    pixels_in: Size,
    pixels_out: Size,
    groups: Size = 1,
    bias: bool = False,
) -> Row:
    """`kernel`: weights a channel pair has (9 for 3 x 3); `pixels_in`, `pixels_out`: of the maps.

    A kernel smaller than the stride reads only the pixels that it uses.
    """
    plain = where(kernel == 1, KIND["1x1"], KIND["dense"])
    kind = where(groups == 1, plain, where(groups == c_in, KIND["depthwise"], KIND["grouped"]))
    a, b = c_in // groups, c_out // groups
    read = c_in * np.minimum(pixels_in, pixels_out * kernel)
    written, weights = c_out * pixels_out, c_out * a * kernel
    return Row(kind, written * a * kernel, read, written, weights + bias * c_out, a, b, groups)


def linear(c_in: int, c_out: int, rows: float = 1, bias: bool = True) -> Row:
    """`rows`: vectors an image has."""
    weights = c_in * c_out + bias * c_out
    return Row(
        KIND["linear"], rows * c_in * c_out, rows * c_in, rows * c_out, weights, c_in, c_out, 1
    )


def elementwise(
    kind: str, read: float, written: float, weights: float = 0, chain: int = ALONE
) -> Row:
    """Every other operator: what it reads and writes. `weights`: its parameters (a batch norm over C channels: 4 C)."""
    return Row(KIND[kind], 0, read, written, weights, chain=chain)


def traced(
    net: nn.Module | Callable[[], nn.Module], resolution: int, in_channels: int = 3
) -> Operators:
    """The operators of a network, or of what a function builds, in evaluation, in the order they run.

    Nothing is computed: it runs on the meta device. Raises ValueError where it does not take such an image.
    """
    check_range("resolution", resolution, MOST_CHANNELS)
    net = on_meta(net)
    image = torch.empty(1, in_channels, resolution, resolution, device="meta")
    tracer = Tracer(image)
    try:
        with (
            torch.no_grad(),
            tracer,
        ):  # inference_mode would hide what composite operators are made of
            net(image)
    except (RuntimeError, AssertionError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the network takes no {in_channels} x {resolution} x {resolution} image: {why}"
        ) from None
    return Operators.of(tracer.rows)


NORMS = (
    "native_batch_norm",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "_batch_norm_no_update",
)
STATISTICS = ("native_layer_norm", "_softmax", "_safe_softmax", "linalg_vector_norm", "var_mean")
REDUCING = (
    "mean",
    "sum",
    "amax",
    "var",
    "std",
    "_adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "argmax",
)
POOLING = (
    "max_pool2d_with_indices",
    "avg_pool2d",
    "upsample",
    "_upsample",
    "grid_sampler",
    "im2col",
)
COPYING = (
    "cat",
    "stack",
    "clone",
    "copy_",
    "_to_copy",
    "pad",
    "roll",
    "index",
    "gather",
    "repeat",
    "flip",
    "unfold",
)
MATRICES = ("addmm", "mm", "bmm", "baddbmm", "_scaled_dot_product")


@dataclass
class Made:
    """What is known of a tensor of the forward pass."""

    tensor: Tensor  # kept, so that no other tensor takes its storage's place
    order: int
    kind: str  # of the operator that made it; "" for the image
    chain: int
    read: bool = False  # by an operator


class Tracer(TorchDispatchMode):
    """Notes every operator that touches memory. Tensors are known by their storage, so a view is what it views."""

    def __init__(self, image: Tensor):
        super().__init__()
        self.rows: list[Row] = []
        self.made = {storage(image): Made(image, 0, "", ALONE)}
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        outs = [
            t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)
        ]
        tensors = [
            t
            for a in args
            for t in (a if isinstance(a, tuple | list) else [a])
            if isinstance(t, Tensor)
        ]
        if not tensors or not outs:
            return out
        self.kept += (
            outs  # parameters made on the way must not lend their storage to activations either
        )
        inplace = name.endswith("_") and not name.startswith("as_strided")
        first = outs[0]
        if not inplace and any(storage(first) == storage(t) for t in tensors):
            return out  # a view
        if name.startswith(("empty", "new_empty", "zeros", "ones", "full", "detach")):
            return out
        self.note(name.rstrip("_") if name != "copy_" else name, tensors, first, args)
        return out

    def note(self, name: str, tensors: list[Tensor], out: Tensor, args: Any) -> None:
        images = [t for t in tensors if storage(t) in self.made]
        fixed = sum(t.numel() for t in tensors if storage(t) not in self.made)
        if not images:  # made of parameters alone: as costly for one image as for a hundred
            self.rows.append(elementwise("activation", 0, 0, fixed + out.numel()))
            return
        operand = max(images, key=lambda t: (t.numel(), self.made[storage(t)].order))
        kind = self.kind(name, images, operand, args)
        chain = self.chain(kind, operand, images)
        self.rows.append(self.row(name, kind, chain, images, fixed, out, args))
        for t in images:
            self.made[storage(t)].read = True
        self.made[storage(out)] = Made(out, len(self.rows), kind, chain)

    def kind(self, name: str, images: list[Tensor], operand: Tensor, args: Any) -> str:
        if name == "convolution":
            weight, groups = args[1], args[8]
            if groups > 1:
                return "depthwise" if weight.shape[1] == 1 else "grouped"
            return "1x1" if weight[0, 0].numel() == 1 else "dense"
        if name.startswith(MATRICES):
            return "linear" if len(images) == 1 else "product"
        if name.startswith(NORMS):
            maker = self.made[storage(operand)]
            return "batch_norm" if maker.kind in CONVOLUTIONS and not maker.read else "norm"
        if name == "native_group_norm":
            return "group_norm"
        for kind, starts in (("statistics", STATISTICS), ("reduce", REDUCING), ("pool", POOLING)):
            if name.startswith(starts):
                return kind
        if name.startswith(COPYING) or name.endswith("_pad2d") or name.endswith("_pad_nd"):
            return "copy"
        if len(images) > 1:
            return "add" if all(t.shape == operand.shape for t in images) else "scale"
        return "silu" if name == "silu" else "activation"

    def chain(self, kind: str, operand: Tensor, images: list[Tensor]) -> int:
        maker = self.made[storage(operand)]
        if kind not in CHAINED or maker.read:
            return ALONE
        if maker.kind in PRODUCTS:
            return AFTER_PRODUCT
        if maker.kind not in CHAINED:
            return ALONE
        if kind == "add":
            others = [self.made[storage(t)] for t in images if storage(t) != storage(operand)]
            if any(other.kind in CHAINED and not other.read for other in others):
                return JOINING
        return IN_CHAIN if maker.chain in (AFTER_PRODUCT, IN_CHAIN, JOINING) else IN_OTHER_CHAIN

    def row(
        self,
        name: str,
        kind: str,
        chain: int,
        images: list[Tensor],
        fixed: int,
        out: Tensor,
        args: Any,
    ) -> Row:
        if name == "convolution":
            weight, bias, transposed, groups = args[1], args[2], args[6], args[8]
            x = args[0]
            pixels = x[0, 0].numel()
            c_out = out.shape[1]
            if transposed:  # each input pixel is spread over the kernel
                macs = x.numel() * weight[0].numel()
                sizes = x.shape[1] // groups, c_out // groups, groups
                return Row(KIND[kind], macs, x.numel(), out.numel(), fixed, *sizes)
            return convolution(
                x.shape[1],
                c_out,
                weight[0, 0].numel(),
                pixels,
                out[0, 0].numel(),
                groups,
                bias is not None,
            )
        if name.startswith(MATRICES):
            a, b = (
                [t for t in args if isinstance(t, Tensor)][-2:]
                if name in ("addmm", "baddbmm")
                else args[:2]
            )
            if kind == "linear":
                return linear(a.shape[-1], b.shape[-1], a[..., 0].numel(), bias=name == "addmm")
            macs = out.numel() * a.shape[-1]
            return Row(
                KIND[kind],
                macs,
                a.numel() + b.numel(),
                out.numel(),
                0,
                a.shape[-1],
                out.shape[-1],
                1,
            )
        return elementwise(kind, sum(t.numel() for t in images), out.numel(), fixed, chain)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
