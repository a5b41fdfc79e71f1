"""Defines the operators that a network runs for an image, with their arithmetic and memory traffic.

`tracer.traced` records the operators of a module. Without a module, `convolution`, `linear` and
`elementwise` build the same rows in the order of the forward pass; `merged` makes both comparable.
Tables of operators can be read without importing PyTorch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

OPERATOR_KINDS = (
    "dense",  # k x k convolution that sees all channels
    "1x1",
    "depthwise",  # fixed blur filters included
    "grouped",
    "linear",
    "product",  # matrix product of two activations, as in attention
    "batch_norm",  # after a convolution that it can be folded into
    "norm",  # any other batch norm
    "group_norm",
    "statistics",  # other operators that compute statistics first: layer norm, softmax
    "activation",  # element-wise, of one tensor
    "silu",
    "add",  # element-wise, of two tensors of one size
    "scale",  # multiplication by a smaller tensor, as in squeeze-and-excitation
    "pool",  # maximum or average of neighbours, resizing
    "reduce",  # reduction of whole maps
    "copy",  # concatenation, padding, reordering
)
KIND = {name: number for number, name in enumerate(OPERATOR_KINDS)}
CONVOLUTIONS = ("dense", "1x1", "depthwise", "grouped")
PRODUCTS = (*CONVOLUTIONS, "linear", "product")
OF_FRAMES = "conv3d"  # networks of clips run it, networks of images do not
CHAINED = ("batch_norm", "norm", "activation", "silu", "add", "scale")  # compilers merge these
# The place of an element-wise operator, by its operand: the larger input, or the later computed one
# if both have one size.
ALONE = 0  # the operand was read before, or comes from an operator of no kind below
AFTER_PRODUCT = 1  # the operand comes from a convolution or a linear layer, for this reader alone
IN_CHAIN = 2  # from another element-wise operator, in a chain that began as AFTER_PRODUCT
IN_OTHER_CHAIN = 3  # the same, but the chain began elsewhere
JOINING = 4  # two operands of one size come from such chains, for this reader alone
Size = Any  # a number, or an array of them
where: Callable[..., Any] = np.where


class OperatorRow(NamedTuple):
    """One operator, for one image."""

    kind: int  # index into OPERATOR_KINDS
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
    """The operators of a network for one image, as columns with the fields of `OperatorRow`."""

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
        """Build from a table of shape (columns, operators)."""
        columns = zip(COLUMNS, table, strict=True)
        return cls(*(c.astype(np.int64) if name in ("kind", "chain") else c for name, c in columns))

    def table(self) -> np.ndarray:
        """All columns: (columns, operators)."""
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
        """Merge equal operators into one row, and sort the rows.

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
    """A convolution; `kernel`: weights per pair of channels (9 for 3 x 3); pixels are per map.

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
    """A linear layer; `rows`: vectors per image."""
    weights = c_in * c_out + bias * c_out
    return OperatorRow(
        KIND["linear"], rows * c_in * c_out, rows * c_in, rows * c_out, weights, c_in, c_out, 1
    )


def elementwise(
    kind: str, read: float, written: float, weights: float = 0, chain: int = ALONE
) -> OperatorRow:
    """Any other operator; `weights`: elements of its parameters (batch norm of C channels: 4 C)."""
    return OperatorRow(KIND[kind], 0, read, written, weights, chain=chain)
