"""Which classes are taken for which? The confusion matrix as a heat map."""

import matplotlib
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure

from fullstride.report.plots import COLOURS, INK, STYLE, svg
from fullstride.tasks.confusion import ConfusionMatrix

BLUE = COLOURS[0]
MAX_CLASSES = 50  # in a heat map that can be read
MAX_NUMBERS = 20  # classes with numbers in the cells
MAX_NAME = 24  # characters


def heat_map(matrix: ConfusionMatrix, classes: tuple[str, ...]) -> str:
    """An SVG whose rows are the classes of images and whose columns are the predicted ones."""
    worst = [
        f"{classes[label]} as {classes[other]} {images} times"
        for label, other, images in matrix.most_confused(3)
    ]
    description = f"Confusion matrix; most often confused: {', '.join(worst) or 'none'}"
    return svg(heat_map_figure(matrix, classes), description)


def heat_map_figure(matrix: ConfusionMatrix, classes: tuple[str, ...]) -> Figure:
    images_kk, number = matrix.dense(), len(classes)
    share_kk = images_kk / images_kk.sum(1, keepdims=True).clip(1)
    names = [name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…" for name in classes]
    side = max(3.6, min(9.2, 1.6 + 0.36 * number))
    with matplotlib.rc_context(STYLE):
        figure = Figure((side + 1, side), layout="constrained")
        axes = figure.subplots()
        axes.pcolormesh(
            share_kk**0.5,  # so that rare confusions are seen
            cmap=LinearSegmentedColormap.from_list("share", [to_rgba(BLUE, 0), to_rgba(BLUE, 1)]),
            vmin=0,
            vmax=1,
            edgecolors=to_rgba("gray", 0.2),
            linewidth=0.4,
        )
        axes.invert_yaxis()
        axes.set_aspect("equal")
        axes.grid(visible=False)
        ticks = [index + 0.5 for index in range(number)]
        small = 9 if number <= MAX_NUMBERS else 6
        axes.set_xticks(ticks, names, rotation=90, fontsize=small, parse_math=False)
        axes.set_yticks(ticks, names, fontsize=small, parse_math=False)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("class of the image")
        if number <= MAX_NUMBERS:
            for label, other, images in zip(
                matrix.labels, matrix.predictions, matrix.images, strict=True
            ):
                colour = "white" if share_kk[label, other] > 0.4 else INK
                where = (other + 0.5, label + 0.5)
                axes.text(*where, f"{images}", ha="center", va="center", fontsize=8, color=colour)
    return figure
