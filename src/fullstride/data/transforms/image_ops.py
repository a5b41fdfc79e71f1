"""Which operations do augmentation policies use? Functions of Pillow images of mode "L" or "RGB".

Geometric operations fill with middle gray and take the nearest pixel, both as in TensorFlow's code
(tensorflow/tpu, models/official/efficientnet/autoaugment.py). Values of any size are accepted.
"""

from PIL import Image, ImageEnhance, ImageOps

GRAY = 128  # TensorFlow's replace_value


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


def brightness(image: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(factor)


def colour(image: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Color(image).enhance(factor)


def sharpness(image: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(factor)


def rotate(image: Image.Image, degrees: float) -> Image.Image:
    return image.rotate(degrees, Image.Resampling.NEAREST, fillcolor=_gray(image))


def shear_x(image: Image.Image, slope: float) -> Image.Image:
    """Row y moves to the left by slope * y."""
    return _affine(image, (1, slope, 0, 0, 1, 0))


def shear_y(image: Image.Image, slope: float) -> Image.Image:
    """Column x moves up by slope * x."""
    return _affine(image, (1, 0, 0, slope, 1, 0))


def translate_x(image: Image.Image, share: float) -> Image.Image:
    """Move to the left by a share of the width, in whole pixels."""
    return _affine(image, (1, 0, int(share * image.width), 0, 1, 0))


def translate_y(image: Image.Image, share: float) -> Image.Image:
    """Move up by a share of the height, in whole pixels."""
    return _affine(image, (1, 0, 0, 0, 1, int(share * image.height)))


def cutout(image: Image.Image, share: float, x: float, y: float) -> Image.Image:
    """A gray patch of a share of each side, centered at (x, y) in shares of the sides, clipped."""
    changed = image.copy()
    changed.paste(_gray(image), patch_box(image.size, share, x, y))
    return changed


def patch_box(size: tuple[int, int], share: float, x: float, y: float) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of that patch in pixels, in an image of `size` (width, height)."""
    (left, right), (top, bottom) = (
        (max(0, round((middle - share / 2) * side)), min(side, round((middle + share / 2) * side)))
        for side, middle in zip(size, (x, y), strict=True)
    )
    return left, top, max(left, right), max(top, bottom)


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    kind, nearest = Image.Transform.AFFINE, Image.Resampling.NEAREST
    return image.transform(image.size, kind, matrix, nearest, fillcolor=_gray(image))


def _gray(image: Image.Image) -> tuple[int, ...]:
    return (GRAY,) * len(image.getbands())
