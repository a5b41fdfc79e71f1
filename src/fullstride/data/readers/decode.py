"""How is an image file decoded? To an upright 8-bit gray or RGB image, or to UnreadableImage."""

import warnings
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fullstride.console import without_native_lines
from fullstride.storage import open_regular, read_regular

# Pillow's other readers are not used: EPS starts a program, and no suffix of a folder's images
# needs one.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
EXIF_ORIENTATION = 0x0112
MAX_FILE_BYTES = 2**30  # of an image; 89 megapixels have at most 712 MB
MAX_MEGAPIXELS = 89.0  # of an image; more are a decompression bomb to Pillow
STRIP_PIXELS = 2**20  # converted at a time


class UnreadableImage(ValueError):  # noqa: N818
    """An image that cannot be decoded: its name, and the reason in one line."""

    def __init__(self, name: str, reason: str):
        super().__init__(name, reason)  # both, so that the error survives pickling
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"cannot read {self.name!r}: {self.reason}"


class OversizedImage(UnreadableImage):
    """An image of more pixels than the limit, by its header; nothing was decoded."""


def file_bytes(source: Path | bytes) -> bytes:
    """The bytes of an image file, undecoded. Raises UnreadableImage."""
    if isinstance(source, bytes):
        return source
    try:
        return read_regular(source, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise UnreadableImage(str(source), _reason(source, error)) from error


def decode(
    source: Path | bytes,
    channels: int,
    *,
    resized_to: int = 0,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> Image.Image:
    """The first frame of an image file, as mode "L" (1 channel) or "RGB" (3).

    Transparent pixels are blended with white. 16-bit gray is scaled from 0..65535; floats, and
    integers outside of that range, from the image's own minimum and maximum.

    Args:
        source: The path of a regular file, or its bytes.
        channels: 1 or 3.
        resized_to: Pixels of the shorter side that the image will be resized to. A large JPEG is
            then decoded at 1/2, 1/4 or 1/8 of its size, with sides of twice as many pixels or more
            (54 dB or more between the results of both ways for photographs of 24 megapixels).
        max_megapixels: The largest image to decode.

    Raises UnreadableImage for a broken file, also where only its end is missing, and
    OversizedImage.
    """
    if channels not in (1, 3):
        raise ValueError(f"{channels} channels: use 1 for gray or 3 for RGB")
    name = "image bytes" if isinstance(source, bytes) else str(source)
    try:
        with (
            warnings.catch_warnings(),
            BytesIO(source) if isinstance(source, bytes) else open_regular(source) as file,
        ):
            warnings.simplefilter("ignore")
            with Image.open(file, formats=FORMATS) as image:
                megapixels = image.width * image.height / 1e6
                if megapixels > max_megapixels:
                    raise OversizedImage(name, _too_large(megapixels, max_megapixels))
                if resized_to:
                    _reduce(image, 2 * resized_to)
                # libtiff prints a line for each damaged strip
                with without_native_lines() if image.format == "TIFF" else nullcontext():
                    image.load()
                return plain_image(image, channels)
    except OversizedImage:
        raise
    except Image.DecompressionBombError as error:
        raise OversizedImage(name, _too_large(None, max_megapixels)) from error
    except Exception as error:  # Pillow raises a dozen kinds on a broken file
        raise UnreadableImage(name, _reason(source, error)) from error


def plain_image(image: Image.Image, channels: int) -> Image.Image:
    """An upright copy of an image of any mode as "L" (1 channel) or "RGB" (3), as `decode` gives.

    It has no metadata, so that nothing rotates it again.
    """
    return _to_mode(_upright(image), "L" if channels == 1 else "RGB")


def _reduce(image: Image.Image, least: int) -> None:
    """Let a JPEG be decoded at a fraction of its size, with sides of at least `least` pixels.

    Sides that a fraction does not divide would be rounded up, which moves all pixels a little.
    """
    for factor in (8, 4, 2):
        if min(image.size) >= factor * least and not any(side % factor for side in image.size):
            image.draft(None, (image.width // factor, image.height // factor))
            return


def _too_large(megapixels: float | None, most: float) -> str:
    size = "too many pixels" if megapixels is None else f"{megapixels:,.1f} megapixels"
    return f"it has {size}, and {most:g} megapixels are the limit"


def _reason(source: Path | bytes, error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        empty = not source if isinstance(source, bytes) else source.stat().st_size == 0
        return "it is empty" if empty else "it is not a JPEG, PNG, BMP, GIF, TIFF or WebP image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    if text.startswith(f"{source} "):  # of `open_regular`
        text = f"it{text.removeprefix(str(source))}"
    return " ".join(text.split()) or type(error).__name__


def _upright(image: Image.Image) -> Image.Image:
    # The pixels are whole even where the EXIF block is damaged. Where only writing it without the
    # orientation fails, the pixels are upright already.
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _to_mode(image: Image.Image, mode: str) -> Image.Image:
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
