"""Which way does a digit move? Clips of four classes that no frame tells apart.

A digit moves by whole pixels before a photograph and comes back on the other side. Its first place
is uniform, so that each single frame has the same distribution in all four classes. Played
backwards a clip is one of the opposite direction: whoever sees the frames as a set can know
horizontal from vertical motion, and so have half of the clips right, but no more.
"""

from typing import NamedTuple

import numpy as np

from fullstride.data.scenes.scene import photograph_square, resized, tinted
from fullstride.data.scenes.sources import SPLITS, load_digits, load_photographs

STEPS = {"down": (1, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0)}  # rows and columns
FRAMES = 16
SIDES = (0.4, 0.7)  # of a digit, as shares of the clip's
DIMMED = np.float32(0.4)  # brightness of the photograph
BRIGHT = (150, 256)  # of each channel of a digit; exclusive
SPEEDS = (1, 2)  # pixels from a frame to the next one


class Clip(NamedTuple):
    pixels: np.ndarray  # uint8 (T, side, side, 3)
    direction: str  # of `STEPS`


def split_clip(number: int, side: int, seed: int, split: str, frames: int = FRAMES) -> Clip:
    """Clip `number` of a split, a function of the arguments. Directions follow in turn."""
    rng = np.random.default_rng([seed, [*SPLITS].index(split), number])
    digits = load_digits(split)
    background = DIMMED * tinted(rng, photograph_square(rng, load_photographs(split), side))
    low, high = (round(share * side) for share in SIDES)
    digit = digits.images[rng.integers(len(digits.labels))]
    alpha = resized(digit, int(rng.integers(low, high + 1)))
    colour = rng.integers(*BRIGHT, 3)
    first, speed = rng.integers(0, side, 2), rng.integers(SPEEDS[0], SPEEDS[1] + 1)
    direction = [*STEPS][number % len(STEPS)]
    step = speed * np.array(STEPS[direction])
    return Clip(moving(background, alpha, colour, first, step, frames), direction)


def moving(
    background: np.ndarray,
    alpha: np.ndarray,
    colour: np.ndarray,
    first: np.ndarray,
    step: np.ndarray,
    frames: int,
) -> np.ndarray:
    """A digit over a background, (H, W, 3), that begins at `first` and moves by `step` a frame.

    `alpha` is (h, w), 0..1; places are (row, column). Beyond one side it comes back on the other.
    """
    whole = np.zeros(background.shape[:2])
    whole[: len(alpha), : alpha.shape[1]] = alpha
    pixels = np.empty((frames, *background.shape), np.uint8)
    for number in range(frames):
        row, column = first + number * step
        at = np.roll(whole, (int(row), int(column)), (0, 1))[..., None]
        pixels[number] = background + at * (colour - background)
    return pixels
