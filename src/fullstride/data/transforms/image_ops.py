"""The operations of augmentation policies, each defined once for Pillow's images and for arrays.

An image is Pillow's, of mode "L" or "RGB", or uint8 (H, W) or (H, W, 3). Functions with
`singledispatch` compute the two in different ways: with Pillow here, and with OpenCV in
`opencv.py`, which must be imported for arrays.

Geometric operations fill with middle gray and take the nearest pixel, both as in TensorFlow's code
(tensorflow/tpu, models/official/efficientnet/autoaugment.py), unless their `Sampling` says
otherwise. Values of any size are accepted.
"""

from functools import singledispatch
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps, ImageStat

from fullstride.data.readers.decode import Size

GRAY = 128  # TensorFlow's replace_value
VALUES = np.arange(256)  # of a channel
Patch = tuple[int, int, int, int]  # left, top, right, bottom in pixels


class Sampling(NamedTuple):
    """The interpolation of a geometric operation, and the colour outside of the image."""

    kernel: Literal["nearest", "bilinear", "bicubic"] = "nearest"
    fill: tuple[int, int, int] = (GRAY, GRAY, GRAY)  # red, green, blue; their mean for gray images

    def color(self, channels: int) -> tuple[int, ...]:
        return self.fill if channels == 3 else (round(sum(self.fill) / 3),) * channels


TENSORFLOW = Sampling()
KERNELS = {
    name: Image.Resampling[name.upper()] for name in ("nearest", "bilinear", "bicubic", "lanczos")
}


# ---- operations that Pillow and OpenCV compute in different ways


@singledispatch
def by_table(image: Any, table: np.ndarray) -> Any:
    """Map each value by a table of 256."""
    return image.point(table.tolist() * len(image.getbands()))


@singledispatch
def mean_gray(image: Any) -> int:
    return int(ImageStat.Stat(image.convert("L")).mean[0] + 0.5)


@singledispatch
def affine(image: Any, matrix: tuple[float, ...], sampling: Sampling) -> Any:
    """Pixel (x, y) of the result is input pixel (ax + by + c, dx + ey + f), from pixel corners."""
    kind, kernel = Image.Transform.AFFINE, KERNELS[sampling.kernel]
    return image.transform(image.size, kind, matrix, kernel, fillcolor=_fill(image, sampling))


@singledispatch
def patched(image: Any, patch: Patch) -> Any:
    """A copy with a gray rectangle."""
    changed = image.copy()
    changed.paste(_fill(image, TENSORFLOW), patch)
    return changed


def _fill(image: Image.Image, sampling: Sampling) -> tuple[int, ...]:
    return sampling.color(len(image.getbands()))


@singledispatch
def auto_contrast(image: Any) -> Any:
    """Stretch each channel so that its darkest pixel is 0 and its brightest 255."""
    return ImageOps.autocontrast(image)


@singledispatch
def equalize(image: Any) -> Any:
    """Equalize the histogram of each channel."""
    return ImageOps.equalize(image)


@singledispatch
def colour(image: Any, factor: float) -> Any:
    """0: gray, 1: unchanged, above 1: stronger; the factors of `contrast` and others are alike."""
    return ImageEnhance.Color(image).enhance(factor)


@singledispatch
def sharpness(image: Any, factor: float) -> Any:
    return ImageEnhance.Sharpness(image).enhance(factor)


@singledispatch
def rotate(image: Any, degrees: float, sampling: Sampling = TENSORFLOW) -> Any:
    return image.rotate(degrees, KERNELS[sampling.kernel], fillcolor=_fill(image, sampling))


# ---- operations on values, by tables that equal Pillow's results


def invert(image: Any) -> Any:
    return by_table(image, (255 - VALUES).astype(np.uint8))


def solarize(image: Any, threshold: float) -> Any:
    """Invert values of at least `threshold`; 256 changes nothing."""
    below = round(threshold) > VALUES
    return by_table(image, np.where(below, VALUES, 255 - VALUES).astype(np.uint8))


def solarize_add(image: Any, added: float) -> Any:
    """Add to values below 128."""
    more = np.clip(VALUES + round(added), 0, 255)
    return by_table(image, np.where(VALUES < GRAY, more, VALUES).astype(np.uint8))


def posterize(image: Any, bits: float) -> Any:
    """Keep the upper `bits` of each value, from 1 to 8."""
    mask = 0xFF & (0xFF << 8 - min(max(round(bits), 1), 8))
    return by_table(image, (VALUES & mask).astype(np.uint8))


def brightness(image: Any, factor: float) -> Any:
    return by_table(image, _from(0, factor))


def contrast(image: Any, factor: float) -> Any:
    return by_table(image, _from(mean_gray(image), factor))


def contrast_to_size(image: Any, factor: float) -> Any:
    """Contrast as in TensorFlow's code, relative to the number of pixels / 256, not to the mean.

    The code sums the counts of the histogram and not the values. The gray is 100 for 160 x 160
    pixels, 196 for 224 x 224, and white from 256 x 256.
    """
    width, height = size_of(image)
    return by_table(image, _from(min(255, width * height // 256), factor))


def _from(gray: int, factor: float) -> np.ndarray:
    """The table from a uniform gray at a factor of 0 to the image at 1, in Pillow's precision."""
    values = np.float32(gray) + np.float32(factor) * (VALUES - gray).astype(np.float32)
    return np.clip(values, 0, 255).astype(np.uint8)


def size_of(image: Any) -> Size:
    return image.size if isinstance(image, Image.Image) else image.shape[1::-1]


# ---- geometric operations


def shear_x(image: Any, slope: float, sampling: Sampling = TENSORFLOW) -> Any:
    """Row y moves to the left by slope * y."""
    return affine(image, (1, slope, 0, 0, 1, 0), sampling)


def shear_y(image: Any, slope: float, sampling: Sampling = TENSORFLOW) -> Any:
    """Column x moves up by slope * x."""
    return affine(image, (1, 0, 0, slope, 1, 0), sampling)


def translate_x(image: Any, share: float, sampling: Sampling = TENSORFLOW) -> Any:
    """Move to the left by a share of the width; by whole pixels with the kernel nearest."""
    return shift_x(image, share * size_of(image)[0], sampling)


def translate_y(image: Any, share: float, sampling: Sampling = TENSORFLOW) -> Any:
    """Move up by a share of the height; by whole pixels with the kernel nearest."""
    return shift_y(image, share * size_of(image)[1], sampling)


def shift_x(image: Any, pixels: float, sampling: Sampling = TENSORFLOW) -> Any:
    """Move to the left by `pixels`; by whole pixels with the kernel nearest."""
    return affine(image, (1, 0, _whole(pixels, sampling), 0, 1, 0), sampling)


def shift_y(image: Any, pixels: float, sampling: Sampling = TENSORFLOW) -> Any:
    """Move up by `pixels`; by whole pixels with the kernel nearest."""
    return affine(image, (1, 0, 0, 0, 1, _whole(pixels, sampling)), sampling)


def _whole(pixels: float, sampling: Sampling) -> float:
    return int(pixels) if sampling.kernel == "nearest" else pixels


def cutout(image: Any, share: float, x: float, y: float) -> Any:
    """A gray patch of a share of each side, centered at (x, y) in shares of the sides, clipped."""
    (left, right), (top, bottom) = (
        (max(0, round((middle - share / 2) * side)), min(side, round((middle + share / 2) * side)))
        for side, middle in zip(size_of(image), (x, y), strict=True)
    )
    return patched(image, (left, top, max(left, right), max(top, bottom)))


def cutout_pixels(image: Any, half: float, x: float, y: float) -> Any:
    """A gray patch of 2 x `half` pixels, centered at the pixel at (x, y) of the sides, clipped."""
    (left, right), (top, bottom) = (
        (max(0, int(middle * side) - int(half)), min(side, int(middle * side) + int(half)))
        for side, middle in zip(size_of(image), (x, y), strict=True)
    )
    return patched(image, (left, top, right, bottom))
