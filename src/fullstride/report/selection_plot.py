"""Which networks are worth their time? Accuracy against time, with the front and the budget."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fullstride.latency.select import Choice, Option
from fullstride.report.plots import COLOURS, INK, STYLE, scale_latency


def choice_figure(options: Sequence[Option], choice: Choice, title: str) -> Figure:
    """Plot published times as filled and estimated ones as hollow markers, with their intervals.

    Only networks on the front are labelled, above it, where no marker can be. `title` names the
    device and the batch size.
    """
    accuracies = [option.network.top1 for option in options]
    span = max(max(accuracies) - min(accuracies), 1.0)  # of the axis below its room for names
    with matplotlib.rc_context(STYLE):
        figure = Figure((9.2, 5.6), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, fontsize=10, parse_math=False)
        scale_latency(axes, [choice.budget.ms_per_image, *(option.ms for option in options)])
        axes.set_ylim(min(accuracies) - 0.06 * span, max(accuracies) + 0.5 * span)
        axes.set_xlabel("time of a call / its images (ms)")
        axes.set_ylabel("published top-1 on ImageNet (%)")
        axes.axvline(
            choice.budget.ms_per_image,
            color=COLOURS[1],
            lw=1.2,
            dashes=(4, 3),
            label=f"budget {choice.budget.ms_per_image:g} ms",
        )
        line = [(option.ms, option.network.top1) for option in choice.front]
        axes.step(*zip(*line, strict=True), where="post", color=COLOURS[0], lw=1.5, label="front")
        for option in options:
            place, own = (option.ms, option.network.top1), option in choice.front
            colour = COLOURS[0] if own else INK
            full = colour if option.by == "published" else "white"
            axes.plot(
                *place,
                "o",
                mec=colour,
                mfc=full,
                ms=7,
                alpha=1 if own else 0.4,
                zorder=3 if own else 2,
            )
            if own:
                name = f"{option.network.name} {option.network.resolution}"
                how: Any = dict(
                    rotation=-55, rotation_mode="anchor", ha="right", fontsize=8.5, color=colour
                )
                axes.annotate(
                    name, place, (-5, 6), textcoords="offset points", parse_math=False, **how
                )
            if own and option.by == "estimated":
                axes.plot(
                    (option.estimate.low, option.estimate.high),
                    [place[1]] * 2,
                    color=colour,
                    lw=4,
                    alpha=0.2,
                )
        axes.plot(
            choice.best.ms,
            choice.best.network.top1,
            "o",
            mec=COLOURS[1],
            mfc="none",
            ms=13,
            mew=2,
            label="best",
        )
        for by, colour in (("published", INK), ("estimated", "white")):
            if any(option.by == by for option in options):
                axes.plot([], [], "o", mec=INK, mfc=colour, ms=7, label=f"{by} time")
        axes.legend(loc="lower right", frameon=False, fontsize=9)
    return figure
