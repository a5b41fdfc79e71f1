"""Which pixels are scenes made of? Digits and photographs, others for the test."""

from functools import cache
from typing import NamedTuple

import numpy as np

from fullstride.data.dataset import open_data

SPLITS = {"train": "train", "val": "minival", "test": "test"}  # -> of the digits
# by the functions of skimage.data, and the files of sklearn.datasets.load_sample_image
TRAINING_PHOTOGRAPHS = (
    "brick",
    "grass",
    "coffee",
    "chelsea",
    "immunohistochemistry",
    "rocket",
    "astronaut",
    "coins",
    "camera",
    "clock",
    "hubble_deep_field",
    "retina",
    "page",
    "text",
    "stereo_motorcycle",
)
TEST_PHOTOGRAPHS = ("gravel", "moon", "china.jpg", "flower.jpg")


class Digits(NamedTuple):
    images: np.ndarray  # uint8 (N, 8, 8)
    labels: np.ndarray  # int (N,)


@cache
def load_digits(split: str) -> Digits:
    """The digits of a split of scenes."""
    images = getattr(open_data("digits"), SPLITS[split])
    pictures = [np.asarray(images.picture(index)) for index in range(len(images))]
    return Digits(np.stack(pictures), np.array(images.targets))


@cache
def load_photographs(split: str) -> tuple[np.ndarray, ...]:
    """Photographs (H, W, 3) uint8; those of the test are not those of the training.

    Raises ValueError without the extra `examples`.
    """
    names = TEST_PHOTOGRAPHS if split == "test" else TRAINING_PHOTOGRAPHS
    return tuple(map(_photograph, names))


def _photograph(name: str) -> np.ndarray:
    try:
        import skimage.data
        from sklearn.datasets import load_sample_image
    except ImportError:
        raise ValueError(
            "scenes need photographs of scikit-image and scikit-learn: pip install "
            "'fullstride[examples]'"
        ) from None
    pixels = load_sample_image(name) if "." in name else getattr(skimage.data, name)()
    if isinstance(pixels, tuple):  # of two eyes, and their disparity
        pixels = pixels[0]
    return pixels if pixels.ndim == 3 else np.stack([pixels] * 3, 2)
