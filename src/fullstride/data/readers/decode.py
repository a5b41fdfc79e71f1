"""Decodes image files to upright 8-bit gray or RGB images, or raises UnreadableImage."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile, get_sampling

from fullstride.io.console import reason, without_native_lines
from fullstride.io.writing import open_regular, read_regular
from fullstride.nets.preprocessing import WHITE

EXIF_ORIENTATION = 0x0112
STRIP_PIXELS = 2**20  # converted at a time
HAD_ALPHA = "had_alpha"  # in `info` of a decoded image that had transparent pixels


def plain_image(image: Image.Image, channels: int, background: str = WHITE) -> Image.Image:
    """An upright copy of an image of any mode as "L" (1 channel) or "RGB" (3), like `decode`'s.

    The copy has no metadata, so that nothing rotates it again.
    """
    return to_mode(upright(image), pixel_mode(channels), background)


def pixel_mode(channels: int) -> str:
    if channels not in (1, 3):
        raise ValueError(f"{channels} channels: use 1 for gray or 3 for RGB")
    return "L" if channels == 1 else "RGB"


def orientation(image: Image.Image) -> int:
    """The EXIF orientation by which `upright` will turn the image; 1 where it will not.

    The orientation of a PNG counts only if it is before the pixels, which Pillow else decodes.
    """
    with suppress(Exception):
        if image.format == "PNG" and "exif" not in image.info:
            return 1
        return image.getexif().get(EXIF_ORIENTATION, 1)
    return 1


def upright(image: Image.Image) -> Image.Image:
    # A damaged EXIF block leaves the pixels whole. If only writing it without the orientation
    # fails, the pixels are upright already.
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    return image


def to_mode(image: Image.Image, mode: str, background: str = WHITE) -> Image.Image:
    """An 8-bit copy of an image of any mode, without metadata except `HAD_ALPHA`."""
    if image.mode == "F" or image.mode.startswith("I"):
        copy = _eight_bits(image, mode)
    elif image.has_transparency_data:
        return _over_background(image, mode, background)
    else:
        copy = image.convert(mode)
    copy.info = {}
    return copy


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Strips of an image with their first rows: converting strips needs little extra memory."""
    rows = max(1, STRIP_PIXELS // max(1, image.width))
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _over_background(image: Image.Image, mode: str, background: str) -> Image.Image:
    copy = Image.new(mode, image.size)
    for top, strip in _strips(image):
        strip = strip.convert("RGBA")
        if cast(tuple[int, int], strip.getchannel("A").getextrema())[0] < 255:
            copy.info[HAD_ALPHA] = True
        strip = Image.alpha_composite(Image.new("RGBA", strip.size, background), strip)
        copy.paste(strip.convert(mode), (0, top))
    return copy


def _eight_bits(image: Image.Image, mode: str) -> Image.Image:
    """Scale gray of more than 8 bits: Pillow's own conversion clips values above 255 to white."""
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


# Pillow's other readers are not used: EPS starts a program, and none of `SUFFIXES` needs them.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
MAX_FILE_BYTES = 2**30  # of an image; 89 megapixels have at most 712 MB
MAX_MEGAPIXELS = 89.0  # of an image that is decoded whole; Pillow takes more for a bomb

# Images above `MAX_MEGAPIXELS` are decoded within this memory or not at all.
MAX_MEMORY_MIB = 1024
LARGE_FORMATS = ("JPEG", "MPO", "PNG", "TIFF")
# Bytes of pixels / bytes of the file: 192 in a JPEG of one colour, up to 1030 in zlib's formats.
MAX_COMPRESSION = 250
FACTORS = (8, 4, 2)  # a JPEG can be reduced by these while it is decoded
MODE_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2}  # of a pixel in memory; others: 4
CHANNELS_BY_SAMPLING = {0: 3.0, 1: 2.0, 2: 1.5}  # of the size of the image: 4:4:4, 4:2:2, 4:2:0
# The sides of a reduced image are rounded up, so that its last pixels are partly outside of the
# image. EXIF orientation -> the stored side (0: width, 1: height) whose last pixel is at the left
# of the upright image, and the one whose last pixel is at its top.
LAST_FIRST = ({2: 0, 3: 0, 6: 1, 7: 1}, {3: 1, 4: 1, 7: 0, 8: 0})

SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that exchange width and height

Size = tuple[int, int]  # width, height
Box = tuple[float, float, float, float]  # left, top, right, bottom


class Crop(NamedTuple):
    """A box of an upright image, and the size to resize it to."""

    box: Box
    size: Size


class UnreadableImage(ValueError):  # noqa: N818
    """An image that cannot be decoded: its name, and the reason in one line."""

    def __init__(self, name: str, reason: str):
        super().__init__(name, reason)  # both, so that the error survives pickling
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"cannot read {self.name!r}: {self.reason}"


class OversizedImage(UnreadableImage):
    """An image whose header states more pixels than the limit; nothing was decoded."""


def file_bytes(source: Path | bytes) -> bytes:
    """The bytes of an image file, undecoded. Raises UnreadableImage."""
    if isinstance(source, bytes):
        return source
    try:
        return read_regular(source, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise UnreadableImage(str(source), _reason(source, error)) from error


def image_format(source: Path | bytes) -> str:
    """Pillow's name of an image file's format, from the header. Raises UnreadableImage."""
    with _opened(source) as (image, _):
        return image.format or ""


def image_size(source: Path | bytes) -> Size:
    """Width and height of the upright image, from the file's header. Raises UnreadableImage."""
    with _opened(source) as (image, _):
        w, h = image.size
        return (h, w) if orientation(image) in SIDEWAYS else (w, h)


def decode(
    source: Path | bytes,
    channels: int,
    *,
    max_megapixels: float = MAX_MEGAPIXELS,
    background: str = WHITE,
) -> Image.Image:
    """The first frame of an image file, as mode "L" (1 channel) or "RGB" (3).

    Transparent pixels are blended with `background`. 16-bit gray is scaled from 0..65535; floats,
    and integers outside of this range, from the image's own minimum and maximum.

    Raises UnreadableImage for a broken file, also where only its end is missing, and OversizedImage
    above `max_megapixels`.
    """
    mode = pixel_mode(channels)
    with _opened(source) as (image, _):
        megapixels = image.width * image.height / 1e6
        if megapixels > max_megapixels:
            limit = f"{max_megapixels:g} megapixels are the limit"
            raise OversizedImage(_name(source), f"it has {megapixels:,.1f} megapixels, and {limit}")
        _load(image)
        return to_mode(upright(image), mode, background)


def decode_crop(
    source: Path | bytes,
    channels: int,
    crop: Callable[[Size], Crop],
    *,
    oversampling: float,
    max_memory_mib: float | None = None,
    background: str = WHITE,
) -> tuple[Image.Image, Crop]:
    """Decode an image file as far as a crop needs; also returns the crop in the decoded pixels.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the box still has at least `oversampling`
    times the pixels of the result along each side. All other images are decoded whole.

    `crop` is a function from the size of the upright image to a crop. `max_memory_mib` limits the
    memory for decoding, to which JPEGs are reduced further; None: `MAX_MEMORY_MIB` for images above
    `MAX_MEGAPIXELS`, no limit for others.

    Raises UnreadableImage and OversizedImage, as `decode` does.
    """
    mode = pixel_mode(channels)
    with _opened(source) as (image, bytes_in):
        stored, turn = image.size, orientation(image)
        if max_memory_mib is None and stored[0] * stored[1] > 1e6 * MAX_MEGAPIXELS:
            max_memory_mib = MAX_MEMORY_MIB
            _check_large(image, bytes_in, _name(source))
        chosen, factor = None, 1
        if isinstance(image, JpegImageFile):
            size = (stored[1], stored[0]) if turn in SIDEWAYS else stored
            chosen = crop(size)
            factor = _factor(size, chosen, oversampling)
        if max_memory_mib is not None:
            factor = _fitting_factor(image, mode, factor, max_memory_mib, _name(source))
        if factor > 1:
            image.draft(None, (max(1, stored[0] // factor), max(1, stored[1] // factor)))
        _load(image)
        image = upright(image)
        if image.mode != mode or image.has_transparency_data:
            image = to_mode(image, mode, background)
        else:
            image.info = {}
        (left, top, right, bottom), size = chosen or crop(image.size)
        x, y = (-stored[last[turn]] % factor if turn in last else 0 for last in LAST_FIRST)
        box = ((left + x) / factor, (top + y) / factor, (right + x) / factor, (bottom + y) / factor)
        return image, Crop(box, size)


@contextmanager
def _opened(source: Path | bytes) -> Iterator[tuple[Image.Image, int]]:
    """Open an image, reading the header only; also yields the file's bytes. UnreadableImage."""
    try:
        with (
            warnings.catch_warnings(),
            BytesIO(source) if isinstance(source, bytes) else open_regular(source) as file,
        ):
            warnings.simplefilter("ignore")
            bytes_in = len(source) if isinstance(source, bytes) else os.fstat(file.fileno()).st_size
            with _open(file) as image:
                yield image, bytes_in
    except UnreadableImage:
        raise
    except Image.DecompressionBombError as error:
        limit = f"{MAX_MEGAPIXELS:g} megapixels are the limit"
        raise OversizedImage(_name(source), f"it has too many pixels, and {limit}") from error
    except Exception as error:  # Pillow raises a dozen kinds on a broken file
        raise UnreadableImage(_name(source), _reason(source, error)) from error


def _open(file: BinaryIO) -> Image.Image:
    try:
        return Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError:  # above twice Pillow's limit, which is global
        file.seek(0)
        start = file.read(16)
        for factory, accept in (Image.OPEN[name] for name in FORMATS if name in LARGE_FORMATS):
            if accept and accept(start) is True:
                file.seek(0)
                return factory(file, "")
        raise


def _load(image: Image.Image) -> None:
    # libtiff prints a line for each damaged strip
    with without_native_lines() if image.format == "TIFF" else nullcontext():
        image.load()


def _factor(image: Size, crop: Crop, oversampling: float) -> int:
    (left, top, right, bottom), (width, height) = crop
    shrink = min((right - left) / width, (bottom - top) / height)
    # the black beside an image must not begin later
    is_inside = min(left, top) >= 0 and right <= image[0] and bottom <= image[1]
    for factor in FACTORS:
        is_exact = is_inside or not any(side % factor for side in image)
        if factor * oversampling <= shrink and is_exact:
            return factor
    return 1


def _fitting_factor(
    image: Image.Image, mode: str, factor: int, max_memory_mib: float, name: str
) -> int:
    """The smallest factor, at least `factor`, that decodes an image within `max_memory_mib`."""
    factors = [factor]
    if isinstance(image, JpegImageFile):
        factors = [each for each in (1, *reversed(FACTORS)) if each >= factor]
    needs = [_memory_mib(image, mode, each) for each in factors]
    for each, need in zip(factors, needs, strict=True):
        if need <= max_memory_mib:
            return each
    raise OversizedImage(
        name,
        f"it has {image.width * image.height / 1e6:,.1f} megapixels, which need {needs[-1]:,.0f} "
        f"MiB to be decoded, and {max_memory_mib:,.0f} MiB are the limit",
    )


def _memory_mib(image: Image.Image, mode: str, factor: int) -> float:
    """The peak memory of decoding at 1/`factor` and converting to `mode`."""
    stored = MODE_BYTES.get(image.mode, 4)
    is_plain = image.mode == mode and not image.has_transparency_data
    pixel = stored if is_plain else stored + MODE_BYTES.get(mode, 4)
    if orientation(image) != 1:
        pixel = max(pixel, 2 * stored)
    pixels = image.width * image.height
    needed = pixel * pixels / factor**2
    channels = len(image.getbands())
    if isinstance(image, JpegImageFile):  # a progressive JPEG is held as 16-bit coefficients
        needed += 2 * pixels * CHANNELS_BY_SAMPLING.get(get_sampling(image), channels)
    elif image.format == "TIFF":  # one strip may have all rows
        needed += channels * pixels
    return needed / 2**20


def _check_large(image: Image.Image, bytes_in: int, name: str) -> None:
    """Raise OversizedImage for a large image in another format, or for a decompression bomb."""
    megapixels = f"it has {image.width * image.height / 1e6:,.1f} megapixels"
    if image.format not in LARGE_FORMATS:
        limit = f"{MAX_MEGAPIXELS:g} megapixels are the limit of {image.format} images"
        raise OversizedImage(name, f"{megapixels}, and {limit}")
    bits = 1 if image.mode == "1" else 8 * len(image.getbands())
    if image.width * image.height * bits / 8 > MAX_COMPRESSION * bytes_in:
        raise OversizedImage(
            name,
            f"{megapixels} in {bytes_in:,} bytes, which is less than 1/{MAX_COMPRESSION} of its "
            "pixels, as of a decompression bomb",
        )


def _name(source: Path | bytes) -> str:
    return "image bytes" if isinstance(source, bytes) else str(source)


def _reason(source: Path | bytes, error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        empty = not source if isinstance(source, bytes) else source.stat().st_size == 0
        return "it is empty" if empty else "it is not a JPEG, PNG, BMP, GIF, TIFF or WebP image"
    return reason(error, _name(source))
