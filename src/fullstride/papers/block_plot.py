"""What do the times of blocks look like? Time and throughput over width for each resolution."""

from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from fullstride.papers.block_study import BlockTime
from fullstride.report.plots import COLOURS, DASHES, MARKERS, STYLE, plain_ticks


def block_figure(rows: Sequence[BlockTime], title: str) -> Figure:
    """Plot the time per image against width for each kind and ratio (arXiv:2006.14090, Figure 3).

    The lower row shows multiply-adds per second: a low line means an idle device. `title` says
    whether the times were measured or estimated, and on which device.
    """
    sides = sorted({row.resolution for row in rows}, reverse=True)
    if not sides:
        raise ValueError("no times to draw: give at least one")
    kinds = list(dict.fromkeys(row.kind for row in rows))
    with matplotlib.rc_context(STYLE):
        inches = max(5.2, 1.2 + 2.5 * len(sides))
        figure = Figure((inches, 5.6), layout="constrained")
        grid = figure.subplots(2, len(sides), sharex=True, sharey="row", squeeze=False)
        figure.suptitle(title, fontsize=10, parse_math=False)
        for side, (time, speed) in zip(sides, grid.T, strict=True):
            for number, kind in enumerate(kinds):
                ratios = sorted({row.ratio for row in rows if row.kind == kind})
                for ratio, dash in zip(ratios, DASHES * len(ratios), strict=False):
                    line = [
                        r for r in rows if (r.kind, r.ratio, r.resolution) == (kind, ratio, side)
                    ]
                    line.sort(key=lambda row: row.width)
                    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
                    look = dict(color=colour, ls=dash, marker=marker, ms=4, lw=1.5)
                    widths = [row.width for row in line]
                    time.plot(
                        widths,
                        [row.ms_per_image for row in line],
                        label=f"{kind} ratio {ratio:g}",
                        **look,
                    )
                    lows, highs = [row.ms_low for row in line], [row.ms_high for row in line]
                    time.fill_between(widths, lows, highs, color=colour, alpha=0.15, lw=0)
                    speed.plot(widths, [row.macs / row.ms_per_image / 1e6 for row in line], **look)
            time.set_title(f"{side} x {side}", fontsize=10)
            speed.set_xlabel("width (channels)")
        for axes in grid.flat:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            plain_ticks(axes.xaxis)
            plain_ticks(axes.yaxis)
            axes.set_xticks(sorted({row.width for row in rows}))
        grid[0, 0].set_ylabel("ms per image")
        grid[1, 0].set_ylabel("G multiply-adds / s")
        lines, names = grid[0, 0].get_legend_handles_labels()
        look = dict(ncols=int(inches / 1.7), handlelength=3.5, frameon=False, fontsize=9)
        figure.legend(lines, names, loc="outside lower center", **look)
    return figure
