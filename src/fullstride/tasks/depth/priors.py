"""What is the depth of a pixel without looking at the picture? That of training, and of its row."""

from typing import NamedTuple

import numpy as np

from fullstride.data.dataset import Images
from fullstride.data.readers.map_files import UnreadableImage

MAPS = 500  # at most, that the priors are the medians of
SAMPLES = 64  # rows and columns of a map that are read off


class Priors(NamedTuple):
    """Medians of the depths of training maps, in metres."""

    constant: float  # of all pixels
    rows: tuple[float, ...]  # of each of `SAMPLES` rows, from top to bottom


def fit_priors(images: Images, max_depth: float = 0.0) -> Priors:
    """The medians of at most `MAPS` of the images' maps, which are at equal distances in the list.

    Depths above `max_depth` are left out, if that is not 0; so are maps that cannot be read. A row
    without depth has the median of all. Raises ValueError where there is no depth at all.
    """
    number = min(len(images), MAPS)
    samples = []
    for index in range(number):
        try:
            metres = images.targets[index * len(images) // number].read()
        except UnreadableImage:
            continue
        rows, columns = (
            ((np.arange(SAMPLES) + 0.5) * side / SAMPLES).astype(int) for side in metres.shape
        )
        samples.append(metres[rows][:, columns])
    depths = np.stack(samples, 1) if samples else np.zeros((SAMPLES, 0, SAMPLES), np.float32)
    valid = is_valid(depths, max_depth)
    if not valid.any():
        raise ValueError("no training image has a depth: give maps with metres above 0")
    constant = float(np.median(depths[valid]))
    by_row = zip(depths, valid, strict=True)
    rows = (float(np.median(each[has])) if has.any() else constant for each, has in by_row)
    return Priors(constant, tuple(rows))


def is_valid(metres: np.ndarray, max_depth: float) -> np.ndarray:
    return (metres > 0) & ((metres <= max_depth) if max_depth else True)


def row_numbers(inside_h: np.ndarray, rows: int) -> np.ndarray:
    """For each of H rows of a view the number of its prior, of so many from top to bottom.

    `inside_h` says which rows show the picture, its first one to its last one.
    """
    shown = np.flatnonzero(inside_h)
    first, count = (int(shown[0]), len(shown)) if len(shown) else (0, 1)
    shares = (np.arange(len(inside_h)) - first + 0.5) / count
    return np.clip((shares * rows).astype(int), 0, rows - 1)
