"""Which operations do augmentation policies use? Functions of Pillow images of mode "L" or "RGB".

Geometric operations fill with middle gray and take the nearest pixel, both as in TensorFlow's code
(tensorflow/tpu, models/official/efficientnet/autoaugment.py), unless their `Sampling` says
otherwise. Values of any size are accepted.
"""

from typing import Literal, NamedTuple

from PIL import Image, ImageEnhance, ImageOps

GRAY = 128  # TensorFlow's replace_value


class Sampling(NamedTuple):
    """How a geometric operation reads between pixels, and what it sets outside of the image."""

    kernel: Literal["nearest", "bilinear", "bicubic"] = "nearest"
    fill: tuple[int, int, int] = (GRAY, GRAY, GRAY)  # red, green, blue; of gray images: their mean

    def color(self, channels: int) -> tuple[int, ...]:
        return self.fill if channels == 3 else (round(sum(self.fill) / 3),) * channels


TENSORFLOW = Sampling()
KERNELS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


def auto_contrast(image: Image.Image) -> Image.Image:
    """Stretch each channel so that its darkest pixel is 0 and its brightest 255."""
    return ImageOps.autocontrast(image)


def equalize(image: Image.Image) -> Image.Image:
    """Equalize the histogram of each channel."""
    return ImageOps.equalize(image)


def invert(image: Image.Image) -> Image.Image:
    return ImageOps.invert(image)


def solarize(image: Image.Image, threshold: float) -> Image.Image:
    """Invert values of at least `threshold`; 256 changes nothing."""
    return ImageOps.solarize(image, round(threshold))


def solarize_add(image: Image.Image, added: float) -> Image.Image:
    """Add to values below 128."""
    table = [min(255, value + round(added)) if value < GRAY else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def posterize(image: Image.Image, bits: float) -> Image.Image:
    """Keep the upper `bits` of each value, at least 1, since Pillow refuses 0."""
    return ImageOps.posterize(image, min(max(round(bits), 1), 8))


def contrast(image: Image.Image, factor: float) -> Image.Image:
    """0: uniform gray, 1: unchanged, above 1: stronger.

    The next three are alike, with black, a gray image and a blurred one at 0.
    """
    return ImageEnhance.Contrast(image).enhance(factor)


def contrast_to_size(image: Image.Image, factor: float) -> Image.Image:
    """Contrast as TensorFlow's code computes it, relative to pixels / 256 in place of their mean.

    It sums the counts of the histogram and not the values. The gray is 100 for 160 x 160 pixels,
    196 for 224 x 224, and white from 256 x 256.
    """
    gray = Image.new(image.mode, image.size, (gray_by_size(image.size),) * len(image.getbands()))
    return Image.blend(gray, image, factor)


def gray_by_size(size: tuple[int, int]) -> int:
    return min(255, size[0] * size[1] // 256)


def brightness(image: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(factor)


def colour(image: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Color(image).enhance(factor)


def sharpness(image: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(factor)


def rotate(image: Image.Image, degrees: float, sampling: Sampling = TENSORFLOW) -> Image.Image:
    return image.rotate(degrees, KERNELS[sampling.kernel], fillcolor=_fill(image, sampling))


def shear_x(image: Image.Image, slope: float, sampling: Sampling = TENSORFLOW) -> Image.Image:
    """Row y moves to the left by slope * y."""
    return _affine(image, (1, slope, 0, 0, 1, 0), sampling)


def shear_y(image: Image.Image, slope: float, sampling: Sampling = TENSORFLOW) -> Image.Image:
    """Column x moves up by slope * x."""
    return _affine(image, (1, 0, 0, slope, 1, 0), sampling)


def translate_x(image: Image.Image, share: float, sampling: Sampling = TENSORFLOW) -> Image.Image:
    """Move to the left by a share of the width; in whole pixels where the nearest one is taken."""
    return shift_x(image, share * image.width, sampling)


def translate_y(image: Image.Image, share: float, sampling: Sampling = TENSORFLOW) -> Image.Image:
    """Move up by a share of the height; in whole pixels where the nearest one is taken."""
    return shift_y(image, share * image.height, sampling)


def shift_x(image: Image.Image, pixels: float, sampling: Sampling = TENSORFLOW) -> Image.Image:
    """Move to the left by `pixels`; by whole ones where the nearest one is taken."""
    return _affine(image, (1, 0, whole(pixels, sampling), 0, 1, 0), sampling)


def shift_y(image: Image.Image, pixels: float, sampling: Sampling = TENSORFLOW) -> Image.Image:
    """Move up by `pixels`; by whole ones where the nearest one is taken."""
    return _affine(image, (1, 0, 0, 0, 1, whole(pixels, sampling)), sampling)


def whole(pixels: float, sampling: Sampling) -> float:
    return int(pixels) if sampling.kernel == "nearest" else pixels


def cutout(image: Image.Image, share: float, x: float, y: float) -> Image.Image:
    """A gray patch of a share of each side, centered at (x, y) in shares of the sides, clipped."""
    return _patched(image, patch_box(image.size, share, x, y))


def cutout_pixels(image: Image.Image, half: float, x: float, y: float) -> Image.Image:
    """A gray patch of 2 x `half` pixels, centered at the pixel at (x, y) of the sides, clipped."""
    return _patched(image, pixel_box(image.size, half, x, y))


def patch_box(size: tuple[int, int], share: float, x: float, y: float) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of that patch in pixels, in an image of `size` (width, height)."""
    (left, right), (top, bottom) = (
        (max(0, round((middle - share / 2) * side)), min(side, round((middle + share / 2) * side)))
        for side, middle in zip(size, (x, y), strict=True)
    )
    return left, top, max(left, right), max(top, bottom)


def pixel_box(size: tuple[int, int], half: float, x: float, y: float) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of the patch of `cutout_pixels`."""
    (left, right), (top, bottom) = (
        (max(0, int(middle * side) - int(half)), min(side, int(middle * side) + int(half)))
        for side, middle in zip(size, (x, y), strict=True)
    )
    return left, top, right, bottom


def _patched(image: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    changed = image.copy()
    changed.paste(_fill(image, TENSORFLOW), box)
    return changed


def _affine(image: Image.Image, matrix: tuple[float, ...], sampling: Sampling) -> Image.Image:
    kind, kernel = Image.Transform.AFFINE, KERNELS[sampling.kernel]
    return image.transform(image.size, kind, matrix, kernel, fillcolor=_fill(image, sampling))


def _fill(image: Image.Image, sampling: Sampling) -> tuple[int, ...]:
    return sampling.color(len(image.getbands()))
