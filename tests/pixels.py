"""Tiny pictures with a class and a depth for each pixel, for tests."""

from pathlib import Path

import numpy as np
from PIL import Image


def picture_with_maps(seed, side=(64, 48)):
    """A bright rectangle on noise: pixels (H, W, 3), classes (H, W) 0 or 1, and metres (H, W).

    The depth is that of a floor, 1 m at the bottom and 4 m at the top, or a half or the double of
    it, which is darker or brighter; and 0.3 m on the rectangle.
    """
    rng = np.random.default_rng(seed)
    width, height = side
    level = rng.integers(0, 3)
    pixels = rng.integers(0, 60, (height, width, 3)).astype(np.uint8) + np.uint8(60 * level)
    left, top = rng.integers(0, width // 2), rng.integers(0, height // 2)
    inside = np.zeros((height, width), bool)
    inside[top : top + height // 2, left : left + width // 2] = True
    pixels[inside] = (220, 200, 60)
    metres = 2.0 ** (level - 1) * np.repeat(np.linspace(4, 1, height)[:, None], width, 1)
    metres = np.where(inside, 0.3, metres)
    return pixels, inside.astype(np.uint8), metres


def write_pictures(folder: Path, counts, side=(64, 48)):
    """SPLIT/NAME.png, masks/SPLIT/NAME.png and depth/SPLIT/NAME.png, by the counts of splits."""
    seed = 0
    for split, count in counts.items():
        for place in (folder / split, folder / "masks" / split, folder / "depth" / split):
            place.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels, classes, metres = picture_with_maps(seed, side)
            seed += 1
            name = f"{number:03}.png"
            Image.fromarray(pixels).save(folder / split / name)
            Image.fromarray(classes).save(folder / "masks" / split / name)
            millimetres = np.rint(1000 * metres).astype(np.uint16)
            Image.fromarray(millimetres).save(folder / "depth" / split / name)
    (folder / "masks" / "classes.txt").write_text("floor\nbox\n")
    return folder
