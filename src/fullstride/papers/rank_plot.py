"""What does the kernel rank of a network look like? Curves by stage, ratios by layer."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fullstride.papers.kernel_rank import LayerRank
from fullstride.report.plots import COLOURS, DASHES, INK, MARKERS, STYLE

MOST_CURVES = 8  # of more, the last ones are drawn: the late stages have most of the channels
SHARES = np.linspace(0, 1, 101)


def rank_figure(rows: Sequence[LayerRank], title: str) -> Figure:
    """Plot singular values and relative ranks.

    Left: mean singular values of each stage's k x k kernels, as in Figure 4 of arXiv:2006.14090,
    and those of Gaussian matrices as thin lines; of 1 x 1 kernels where there are no larger ones.
    Right: each layer's rank divided by that of Gaussian matrices.
    """
    wide = [row for row in rows if max(row.shape[2:]) > 1] or list(rows)
    curves: dict[str, list[LayerRank]] = {}
    for row in wide:
        curves.setdefault(f"{row.stage}, {row.kind}", []).append(row)
    shown = dict(list(curves.items())[-MOST_CURVES:])
    with matplotlib.rc_context(STYLE):
        figure = Figure((9.2, 4.8), layout="constrained")
        spectra, layers = figure.subplots(1, 2)
        figure.suptitle(title, fontsize=10, parse_math=False)
        for number, (name, part) in enumerate(shown.items()):
            look = dict(color=COLOURS[number % len(COLOURS)], ls=DASHES[number // len(COLOURS)])
            spectra.plot(
                SHARES, mean_curve([row.values for row in part]), lw=1.8, label=f" {name}", **look
            )
            spectra.plot(
                SHARES, mean_curve([row.random_values for row in part]), lw=0.8, alpha=0.7, **look
            )
        left = len(curves) - len(shown)
        spectra.set_xlabel(
            "share of the singular values"
            + (f" (the first {left} curves left out)" if left else "")
        )
        spectra.set_ylabel("singular value / the largest")
        spectra.set_ylim(0, 1.02)
        gaussian = Line2D([], [], color=INK, lw=0.8, alpha=0.7, label=" Gaussian, same shape")
        handles = [*spectra.lines[::2], gaussian]
        legend = figure.legend(
            handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
        kinds = list(dict.fromkeys(row.kind.split(" in ")[0] for row in rows))
        for number, kind in enumerate(kinds):
            points = [
                (index, row.relative)
                for index, row in enumerate(rows)
                if row.kind.split(" in ")[0] == kind
            ]
            look = dict(color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)])
            layers.plot(*zip(*points, strict=True), ls="", ms=5, label=kind, **look)
        layers.axhline(1, color=INK, lw=0.8, alpha=0.7)
        layers.set_ylim(0, max(1.25, 1.05 * max(row.relative for row in rows)))
        layers.set_xlabel("layer")
        layers.set_ylabel("rank / rank of Gaussian")
        layers.xaxis.set_major_locator(MaxNLocator(integer=True))
        layers.legend(frameon=False, fontsize=8)
    return figure


def mean_curve(curves: Sequence[Sequence[float]]) -> np.ndarray:
    """The mean of curves with different numbers of values, over the share of the values."""
    return np.mean(
        [np.interp(SHARES, np.linspace(0, 1, len(curve)), curve) for curve in curves], axis=0
    )
