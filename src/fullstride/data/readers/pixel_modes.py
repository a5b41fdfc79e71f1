"""How does a decoded image of any mode become 8-bit gray or RGB, and upright?"""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from PIL import Image, ImageOps

EXIF_ORIENTATION = 0x0112
STRIP_PIXELS = 2**20  # converted at a time


def plain_image(image: Image.Image, channels: int) -> Image.Image:
    """An upright copy of an image of any mode as "L" (1 channel) or "RGB" (3), as `decode` gives.

    It has no metadata, so that nothing rotates it again.
    """
    return to_mode(upright(image), pixel_mode(channels))


def pixel_mode(channels: int) -> str:
    if channels not in (1, 3):
        raise ValueError(f"{channels} channels: use 1 for gray or 3 for RGB")
    return "L" if channels == 1 else "RGB"


def orientation(image: Image.Image) -> int:
    """The EXIF orientation by which `upright` will turn the image; 1 where it will not.

    Of a PNG only if it is before the pixels: Pillow decodes them to find out.
    """
    with suppress(Exception):
        if image.format == "PNG" and "exif" not in image.info:
            return 1
        return image.getexif().get(EXIF_ORIENTATION, 1)
    return 1


def upright(image: Image.Image) -> Image.Image:
    # The pixels are whole even where the EXIF block is damaged. Where only writing it without the
    # orientation fails, the pixels are upright already.
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    return image


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """An 8-bit copy of an image of any mode, without metadata."""
    if image.mode == "F" or image.mode.startswith("I"):
        copy = _eight_bits(image, mode)
    elif image.has_transparency_data:
        copy = _over_white(image, mode)
    else:
        copy = image.convert(mode)
    copy.info = {}
    return copy


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Rows of an image, from each first row: a conversion holds little beside the whole image."""
    rows = max(1, STRIP_PIXELS // max(1, image.width))
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _over_white(image: Image.Image, mode: str) -> Image.Image:
    copy = Image.new(mode, image.size)
    for top, strip in _strips(image):
        strip = strip.convert("RGBA")
        strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
        copy.paste(strip.convert(mode), (0, top))
    return copy


def _eight_bits(image: Image.Image, mode: str) -> Image.Image:
    """Gray of more than 8 bits, scaled: Pillow's own conversion clips all above 255 to white."""
    low, high = np.float32(np.inf), np.float32(-np.inf)
    for _, strip in _strips(image):
        values = np.asarray(strip).astype(np.float32)
        finite = values[np.isfinite(values)]
        if finite.size:
            low, high = min(low, finite.min()), max(high, finite.max())
    if low > high:
        raise ValueError("no pixel has a finite value")
    if image.mode != "F" and low >= 0 and high <= 65535:
        low, high = 0, 65535
    copy = Image.new(mode, image.size)
    for top, strip in _strips(image):
        values = np.asarray(strip).astype(np.float32)
        shares = (np.where(np.isfinite(values), values, low) - low) / ((high - low) or 1)
        gray = Image.fromarray(np.rint(shares * 255).astype(np.uint8))
        copy.paste(gray.convert(mode), (0, top))
    return copy
