"""The intrinsic rank of a network's kernels: singular values, compared with random matrices.

GENet, arXiv:2006.14090, section 3.3: a k x k kernel is read as a matrix (c_out, c_in k^2), and its
singular values are divided by the largest. Before training, their decay depends on the shape of the
matrix alone: to 0 for a 1 x 1 kernel with c_in = c_out, and to one half for a 3 x 3 kernel. Each
kernel is therefore compared with Gaussian matrices of the same shape.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from statistics import fmean

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from fullstride import tasks
from fullstride.measure.activation_bytes import stages
from fullstride.nets import zoo
from fullstride.nets.backbone import Backbone
from fullstride.nets.blocks import CONVOLUTIONS
from fullstride.report.plots import COLOURS, DASHES, INK, MARKERS, draw_legend, drawing

THRESHOLD = 0.5
# Small matrices are drawn several times, until there are this many values: shares are then exact to
# 2 %.
LEAST_VALUES = 128
SEED = 0
LAYER_COLUMNS = ("layer", "kernel", "stride", "kind", "rank", "chance", "relative")
STAGE_COLUMNS = ("stage", "kind", "layers", "rank", "chance", "relative", "lowest", "its relative")


@dataclass(frozen=True, kw_only=True)
class LayerRank:
    """The rank of one convolution; a grouped convolution has the values of all groups."""

    name: str
    stage: str
    shape: tuple[int, ...]  # of the kernel: c_out, c_in of one group, k, k; for clips frames, k, k
    stride: int
    groups: int
    values: tuple[float, ...]  # singular values / the largest, in descending order
    random_values: tuple[float, ...]  # the same for Gaussian matrices, mean of the draws
    rank: float  # share of the values above the threshold
    random_rank: float
    relative: float  # rank / random_rank

    @property
    def kind(self) -> str:
        """For example "3 x 3", "3 x 3 depthwise" or "3 x 3 in 32 groups"."""
        size = " x ".join(map(str, self.shape[2:]))
        if self.groups == 1:
            return size
        return f"{size} depthwise" if self.shape[1] == 1 else f"{size} in {self.groups} groups"

    def cells(self) -> list[str]:
        """The cells of `LAYER_COLUMNS`."""
        shape, numbers = " x ".join(map(str, self.shape)), cells_of(self)
        return [self.name, shape, str(self.stride), self.kind, *numbers]


@dataclass(frozen=True, kw_only=True)
class StageRank:
    """Means over the convolutions of one stage and kind, and its lowest relative rank."""

    stage: str
    kind: str
    layers: int
    rank: float
    random_rank: float
    relative: float
    lowest: LayerRank  # by `relative`

    def cells(self) -> list[str]:
        """The cells of `STAGE_COLUMNS`."""
        lowest = [self.lowest.name, f"{self.lowest.relative:.2f}"]
        return [self.stage, self.kind, str(self.layers), *cells_of(self), *lowest]


def cells_of(row: LayerRank | StageRank) -> list[str]:
    return [f"{value:.2f}" for value in (row.rank, row.random_rank, row.relative)]


def find_network(name: str, *, pretrained: bool = False) -> tuple[nn.Module, str]:
    """A network and the origin of its weights, by a run, a bundle, a file of weights or a name.

    A name has random weights, or with `pretrained` the released weights.
    """
    if pretrained or zoo.names_weights(name):
        bundle = tasks.load(name)
        return bundle.net, bundle.source or name
    return zoo.create(name), "fresh, so that ranks are by chance"


def ranks(net: nn.Module, threshold: float = THRESHOLD) -> list[LayerRank]:
    """One row per convolution, in the network's order. Batch norms are not folded.

    Values below 1e-7 of the largest are not exact. Raises ValueError for a threshold outside of
    (0, 1), a network without convolutions, and kernels that are not finite.
    """
    if not 0 < threshold < 1:
        raise ValueError(f"threshold {threshold:g}: use a number between 0 and 1, as {THRESHOLD}")
    prefix = f"{net.root}." if isinstance(net, Backbone) and net.root else ""
    parts = ((name, part) for name, part in net.named_modules() if isinstance(part, CONVOLUTIONS))
    convs = {name.removeprefix(prefix): part for name, part in parts}
    if not convs:
        raise ValueError(
            "this network has no convolutions, whose kernels have a rank: choose another network"
        )
    names = list(stages(net))
    return [
        layer_rank(name, stage_of(name, names), conv, threshold) for name, conv in convs.items()
    ]


def layer_rank(name: str, stage: str, conv: nn.Conv2d | nn.Conv3d, threshold: float) -> LayerRank:
    kernel = conv.weight.detach().cpu()
    if not kernel.isfinite().all():
        raise ValueError(f"the kernel of {name} is not finite: use other weights")
    matrices = kernel.reshape(conv.groups, len(kernel) // conv.groups, -1)
    values, random = spectrum(matrices), random_spectrum(*matrices.shape)
    rank, random_rank = (float((s > threshold).double().mean()) for s in (values, random))
    return LayerRank(
        name=name,
        stage=stage,
        shape=tuple(kernel.shape),
        stride=max(conv.stride),
        groups=conv.groups,
        values=tuple(values.tolist()),
        random_values=tuple(random.mean(0).tolist()),
        rank=rank,
        random_rank=random_rank,
        relative=rank / random_rank,
    )


def spectrum(matrices: Tensor) -> Tensor:
    """Singular values / the largest, descending: (..., groups, rows, columns) -> (..., values)."""
    m = matrices.double()
    # three to five times as fast as an SVD, and in float64 as exact as an SVD in float32
    gram = m @ m.mT if m.shape[-2] <= m.shape[-1] else m.mT @ m
    values, _ = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flatten(-2).sort(descending=True)
    return values / values[..., :1].clamp_min(torch.finfo(values.dtype).tiny)


@lru_cache(256)
def random_spectrum(groups: int, rows: int, columns: int) -> Tensor:
    """`spectrum` of Gaussian matrices, the same in every call: (draws, values)."""
    draws = max(1, LEAST_VALUES // min(rows, columns))
    generator = torch.Generator().manual_seed(SEED)
    return spectrum(
        torch.randn(draws, groups, rows, columns, dtype=torch.float64, generator=generator)
    )


def stage_of(name: str, names: Sequence[str]) -> str:
    """The stage of the layer `name`, or `name` if it is part of no stage."""
    return max(
        (stage for stage in names if f"{name}.".startswith(f"{stage}.")), key=len, default=name
    )


def by_stage(rows: Sequence[LayerRank]) -> list[StageRank]:
    """One row per stage and kind of kernel, in the network's order."""
    alike = defaultdict[tuple[str, str], list[LayerRank]](list)
    for row in rows:
        alike[row.stage, row.kind].append(row)
    return [
        StageRank(
            stage=stage,
            kind=kind,
            layers=len(part),
            rank=fmean(row.rank for row in part),
            random_rank=fmean(row.random_rank for row in part),
            relative=fmean(row.relative for row in part),
            lowest=min(part, key=lambda row: row.relative),
        )
        for (stage, kind), part in alike.items()
    ]


# Curves by stage, ratios by layer.

MOST_CURVES = 8  # the last ones are drawn, as late stages have most of the channels
SHARES = np.linspace(0, 1, 101)


def rank_figure(rows: Sequence[LayerRank], title: str) -> Figure:
    """Plot singular values and relative ranks.

    Left: mean singular values of each stage's k x k kernels, as in Figure 4 of arXiv:2006.14090, or
    of its 1 x 1 kernels if there are no larger ones; Gaussian matrices are thin lines. Right: each
    layer's rank / the rank of Gaussian matrices.
    """
    wide = [row for row in rows if max(row.shape[2:]) > 1] or list(rows)
    by_name = defaultdict[str, list[LayerRank]](list)
    kinds = defaultdict[str, dict[int, float]](dict)
    for row in wide:
        by_name[f"{row.stage}, {row.kind}"].append(row)
    for index, row in enumerate(rows):
        kinds[row.kind.split(" in ")[0]][index] = row.relative
    curves = list(by_name.items())
    with drawing(9.2, 4.8, 1, 2) as (figure, (spectra, layers)):
        figure.suptitle(title, fontsize=10, parse_math=False)
        for number, (name, part) in enumerate(curves[-MOST_CURVES:]):
            look = {"color": COLOURS[number % len(COLOURS)], "ls": DASHES[number // len(COLOURS)]}
            values = mean_curve([row.values for row in part])
            random = mean_curve([row.random_values for row in part])
            spectra.plot(SHARES, values, lw=1.8, label=f" {name}", **look)
            spectra.plot(SHARES, random, lw=0.8, alpha=0.7, **look)
        left = max(0, len(curves) - MOST_CURVES)
        note = f" (the first {left} curves left out)" if left else ""
        spectra.set_xlabel(f"share of the singular values{note}")
        spectra.set_ylabel("singular value / the largest")
        spectra.set_ylim(0, 1.02)
        gaussian = Line2D([], [], color=INK, lw=0.8, alpha=0.7, label=" Gaussian, same shape")
        handles = [*spectra.lines[::2], gaussian]
        draw_legend(figure, handles=handles, loc="outside lower center", ncols=4)
        looks = zip(kinds.items(), cycle(COLOURS), cycle(MARKERS), strict=False)
        for (kind, points), colour, marker in looks:
            xs, ys = [*points], [*points.values()]
            layers.plot(xs, ys, marker, color=colour, ls="", ms=5, label=kind)
        layers.axhline(1, color=INK, lw=0.8, alpha=0.7)
        layers.set_ylim(0, max(1.25, 1.05 * max(row.relative for row in rows)))
        layers.set_xlabel("layer")
        layers.set_ylabel("rank / rank of Gaussian")
        layers.xaxis.set_major_locator(MaxNLocator(integer=True))
        draw_legend(layers, fontsize=8)
    return figure


def mean_curve(curves: Sequence[Sequence[float]]) -> np.ndarray:
    """The mean of curves with different numbers of values, over the share of the values."""
    return np.mean(
        [np.interp(SHARES, np.linspace(0, 1, len(curve)), curve) for curve in curves], axis=0
    )
