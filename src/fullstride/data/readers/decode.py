"""What does the file show? `decode` gives an upright 8-bit gray or RGB picture, or says why it cannot."""

import warnings
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

# PIL's other readers stay shut: EPS starts a program, and none is needed for the suffixes that folders are read by.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
EXIF_ORIENTATION = 0x0112


class UnreadableImage(ValueError):  # noqa: N818
    """A picture that cannot be decoded: its name, and the reason in one line."""

    def __init__(self, name: str, reason: str):
        super().__init__(name, reason)  # both, so that the error survives pickling
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"cannot read {self.name!r}: {self.reason}"


def decode(source: Path | bytes, channels: int) -> Image.Image:
    """The first frame of an image file, as mode "L" (1 channel) or "RGB" (3).

    Transparent pixels lie over white. Gray of 16 bits is scaled from 0..65535; gray of floats, and integers outside of
    that range, from the picture's own smallest and largest value. A file cut short is an error, never a gray rest.
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
                return _plain(_upright(file), "L" if channels == 1 else "RGB")
    except Exception as error:  # PIL's readers raise a dozen kinds on a broken file
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


def _plain(image: Image.Image, mode: str) -> Image.Image:
    """An 8-bit copy of any kind of picture, without metadata, so that nobody turns it a second time."""
    if image.mode == "F" or image.mode.startswith("I"):
        image = _eight_bits(image)
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    plain = image.convert(mode)
    plain.info = {}
    return plain


def _eight_bits(image: Image.Image) -> Image.Image:
    """Gray of more than 8 bits, scaled; PIL's own conversion would turn all above 255 white."""
    values = np.asarray(image).astype(np.float32)
    finite = np.isfinite(values)
    if not finite.any():
        raise ValueError("no pixel has a finite value")
    low, high = values[finite].min(), values[finite].max()
    if image.mode != "F" and low >= 0 and high <= 65535:
        low, high = 0, 65535
    shares = (np.where(finite, values, low) - low) / ((high - low) or 1)
    return Image.fromarray(np.rint(shares * 255).astype(np.uint8))
