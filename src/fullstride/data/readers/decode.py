"""How is an image file decoded? To an upright 8-bit gray or RGB image, or to UnreadableImage."""

import warnings
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

# Pillow's other readers are not used: EPS starts a program, and no suffix of a folder's images
# needs one.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
EXIF_ORIENTATION = 0x0112


class UnreadableImage(ValueError):  # noqa: N818
    """An image that cannot be decoded: its name, and the reason in one line."""

    def __init__(self, name: str, reason: str):
        super().__init__(name, reason)  # both, so that the error survives pickling
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"cannot read {self.name!r}: {self.reason}"


def decode(source: Path | bytes, channels: int) -> Image.Image:
    """The first frame of an image file, as mode "L" (1 channel) or "RGB" (3).

    Transparent pixels are blended with white. 16-bit gray is scaled from 0..65535; floats, and
    integers outside of that range, from the image's own minimum and maximum. Raises UnreadableImage
    for a broken file, also where only its end is missing.
    """
    if channels not in (1, 3):
        raise ValueError(f"{channels} channels: use 1 for gray or 3 for RGB")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(
                BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS
            ) as file:
                file.load()
                return _to_mode(_upright(file), "L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow raises a dozen kinds on a broken file
        name = "image bytes" if isinstance(source, bytes) else str(source)
        raise UnreadableImage(name, _reason(source, error)) from error


def _reason(source: Path | bytes, error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        empty = not source if isinstance(source, bytes) else source.stat().st_size == 0
        return "it is empty" if empty else "it is not a JPEG, PNG, BMP, GIF, TIFF or WebP image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _upright(image: Image.Image) -> Image.Image:
    # The pixels are whole even where the EXIF block is damaged. Where only writing it without the
    # orientation fails, the pixels are upright already.
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _to_mode(image: Image.Image, mode: str) -> Image.Image:
    """An 8-bit copy of an image of any mode, without metadata: nothing rotates it again."""
    if image.mode == "F" or image.mode.startswith("I"):
        image = _eight_bits(image)
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    copy = image.convert(mode)
    copy.info = {}
    return copy


def _eight_bits(image: Image.Image) -> Image.Image:
    """Gray of more than 8 bits, scaled: Pillow's own conversion clips all above 255 to white."""
    values = np.asarray(image).astype(np.float32)
    finite = np.isfinite(values)
    if not finite.any():
        raise ValueError("no pixel has a finite value")
    low, high = values[finite].min(), values[finite].max()
    if image.mode != "F" and low >= 0 and high <= 65535:
        low, high = 0, 65535
    shares = (np.where(finite, values, low) - low) / ((high - low) or 1)
    return Image.fromarray(np.rint(shares * 255).astype(np.uint8))
