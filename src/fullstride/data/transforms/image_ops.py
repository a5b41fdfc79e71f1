"""Which single changes can be made to a picture? Each takes and gives one of mode "L" or "RGB", of any size.

What a geometric change uncovers becomes middle gray, and pixels are moved and never mixed, both as in TensorFlow's
code (tensorflow/tpu, models/official/efficientnet/autoaugment.py). A value may be as large as it likes.
"""

from PIL import Image, ImageEnhance, ImageOps

GRAY = 128  # TensorFlow's replace_value


def auto_contrast(picture: Image.Image) -> Image.Image:
    """Each channel stretched so that its darkest pixel is 0 and its brightest 255."""
    return ImageOps.autocontrast(picture)


def equalize(picture: Image.Image) -> Image.Image:
    """Each channel changed so that all its values are about equally frequent."""
    return ImageOps.equalize(picture)


def invert(picture: Image.Image) -> Image.Image:
    return ImageOps.invert(picture)


def solarize(picture: Image.Image, threshold: float) -> Image.Image:
    """Invert what is at least as bright as `threshold`; 256 changes nothing."""
    return ImageOps.solarize(picture, round(threshold))


def solarize_add(picture: Image.Image, added: float) -> Image.Image:
    """Brighten what is darker than the middle."""
    table = [min(255, value + round(added)) if value < GRAY else value for value in range(256)]
    return picture.point(table * len(picture.getbands()))


def posterize(picture: Image.Image, bits: float) -> Image.Image:
    """Keep the upper `bits` of each value: at least 1, because of 0 nothing would be left, and Pillow refuses it."""
    return ImageOps.posterize(picture, min(max(round(bits), 1), 8))


def contrast(picture: Image.Image, factor: float) -> Image.Image:
    """0: even gray, 1: unchanged, above 1: stronger; so for the next three with black, gray tones and a blur at 0."""
    return ImageEnhance.Contrast(picture).enhance(factor)


def brightness(picture: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Brightness(picture).enhance(factor)


def colour(picture: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Color(picture).enhance(factor)


def sharpness(picture: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Sharpness(picture).enhance(factor)


def rotate(picture: Image.Image, degrees: float) -> Image.Image:
    return picture.rotate(degrees, Image.Resampling.NEAREST, fillcolor=_gray(picture))


def shear_x(picture: Image.Image, slope: float) -> Image.Image:
    """Row y moves to the left by slope * y."""
    return _affine(picture, (1, slope, 0, 0, 1, 0))


def shear_y(picture: Image.Image, slope: float) -> Image.Image:
    """Column x moves up by slope * x."""
    return _affine(picture, (1, 0, 0, slope, 1, 0))


def translate_x(picture: Image.Image, share: float) -> Image.Image:
    """Move to the left by a share of the width, in whole pixels."""
    return _affine(picture, (1, 0, int(share * picture.width), 0, 1, 0))


def translate_y(picture: Image.Image, share: float) -> Image.Image:
    """Move up by a share of the height, in whole pixels."""
    return _affine(picture, (1, 0, 0, 0, 1, int(share * picture.height)))


def cutout(picture: Image.Image, share: float, x: float, y: float) -> Image.Image:
    """A gray patch of that share of each side, around (x, y) in shares of the sides; what hangs over is cut off."""
    changed = picture.copy()
    changed.paste(_gray(picture), hole(picture.size, share, x, y))
    return changed


def hole(size: tuple[int, int], share: float, x: float, y: float) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of that patch in pixels, inside a picture of (width, height)."""
    (left, right), (top, bottom) = (
        (max(0, round((middle - share / 2) * side)), min(side, round((middle + share / 2) * side)))
        for side, middle in zip(size, (x, y), strict=True)
    )
    return left, top, max(left, right), max(top, bottom)


def _affine(picture: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    kind, nearest = Image.Transform.AFFINE, Image.Resampling.NEAREST
    return picture.transform(picture.size, kind, matrix, nearest, fillcolor=_gray(picture))


def _gray(picture: Image.Image) -> tuple[int, ...]:
    return (GRAY,) * len(picture.getbands())
