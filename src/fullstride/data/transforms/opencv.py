"""How are training images decoded and augmented in half of the time? With simplejpeg and OpenCV.

The random draws are those of `crop.py`, so both decoders have the same crop and operations; their
pixels differ slightly, within the bounds of tests/test_fast.py. For training only: evaluation
always uses Pillow.

Needs the extra `fast`.
"""

import math
from typing import NamedTuple

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from fullstride.data.readers.decode import Box, Crop, Size, decode, file_bytes
from fullstride.data.readers.pixel_modes import EXIF_ORIENTATION
from fullstride.data.transforms.crop import (
    TRAINING_OVERSAMPLING,
    Augmentation,
    Source,
    draw_kernel,
    in_mode,
    opened,
    random_crop_box,
)
from fullstride.data.transforms.opencv_ops import OPENCV_OPS
from fullstride.nets.preprocessing import Preprocessing

cv2.setNumThreads(1)  # the loader's workers share the cores

SMOOTH_ABOVE, AREA_ABOVE = 1.4, 2.0  # factor by which a side shrinks
# Weights of 3 neighbours, before a linear resize that would skip pixels. Between these two factors
# this is nearer to Pillow's antialiasing than INTER_AREA, 46 and 42 dB at 1.6, in a third of its
# time (measured).
SMOOTHING, AS_IS = np.array([1, 4, 1], np.float32) / 6, np.ones(1, np.float32)
# A crop of this many pixels a side is rounded to whole ones: a resize takes half of a warp's time.
ROUND_ABOVE = 64
FACTORS = (8, 4, 2)  # by which the decoder shrinks in less time; its others take longer (measured)
ROWS_BELOW = 4  # decoded below a crop: the colours of its last row depend on them

# Bytes of a JPEG, ITU-T T.81
START, END = b"\xff\xd8\xff", b"\xff\xd9"
MARKER, SCAN, EXIF = 0xFF, 0xDA, 0xE1
SEQUENTIAL, OTHER_FRAMES = (
    (0xC0, 0xC1),
    (0xC2, 0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)),
)


class Jpeg(NamedTuple):
    """An upright gray or RGB JPEG that has its end marker."""

    data: bytes
    width: int
    height: int
    height_at: int | None  # byte of the height in the header; None for a progressive JPEG


def fast_train_view(
    source: Source, pre: Preprocessing, augmentation: Augmentation, rng: np.random.Generator
) -> np.ndarray:
    """`train_view` of an image or of a file: uint8 (H, W, C).

    The interpolation is that of `resized`; `pre.kernel` is ignored. Raises UnreadableImage.
    """
    side = pre.resolution

    def choose(size: Size) -> Crop:
        return Crop(random_crop_box(size, augmentation, rng), (side, side))

    if not isinstance(source, Image.Image):
        source = file_bytes(source)
    jpeg = find_jpeg(source) if isinstance(source, bytes) else None
    if jpeg:
        box, _ = choose((jpeg.width, jpeg.height))
        shrink = min(box[2] - box[0], box[3] - box[1]) / side
        factor = next((factor for factor in FACTORS if factor <= shrink), 1)
        pixels = read_jpeg(jpeg, pre.channels, factor=factor, rows=math.ceil(box[3]))
        left, top, right, bottom = (edge / factor for edge in box)
        box = (left, top, right, bottom)
    else:
        image, (box, _) = opened(source, pre, choose, TRAINING_OVERSAMPLING)
        pixels = np.asarray(in_mode(image, pre.channels))
    draw_kernel(pre, augmentation, rng)  # as Pillow's view draws one
    pixels = resized(pixels, box, side)
    if augmentation.rotation_degrees:
        pixels = _rotated(
            pixels, rng.uniform(-augmentation.rotation_degrees, augmentation.rotation_degrees)
        )
    if rng.random() < augmentation.hflip_prob:
        pixels = cv2.flip(pixels, 1)
    for policy in augmentation.policies():
        for operation, values in policy.draw(rng):
            pixels = OPENCV_OPS[operation](pixels, *values)
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    if augmentation.random_erasing_prob:
        augmentation.erasing().erase(pixels, rng)
    return pixels


def find_jpeg(data: bytes) -> Jpeg | None:
    """None for all other files, which `decode` reads or refuses."""
    if not (data.startswith(START) and data.endswith(END)):
        return None
    try:
        height_at = _height_at(data)
        h, w, space, _ = simplejpeg.decode_jpeg_header(data)
        h, w = int(h), int(w)  # for the type checker
    except Exception:  # `decode` raises UnreadableImage for a broken file
        return None
    upright = height_at is not None and space.upper() in ("YCBCR", "RGB", "GRAY")
    if not upright or w * h > (Image.MAX_IMAGE_PIXELS or math.inf):
        return None
    return Jpeg(data, w, h, height_at or None)


def read_jpeg(jpeg: Jpeg, channels: int, *, factor: int = 1, rows: int | None = None) -> np.ndarray:
    """uint8 (H, W, 3) or (H, W) of the first `rows`, or of all, with each side divided by `factor`.

    `factor` is 1, 2, 4 or 8. In a sequential file the rows below are not decoded: with a lower
    height in the header the decoder ignores the rest of the file. A file with a broken middle is
    then read, as by Pillow.
    """
    data, h = jpeg.data, jpeg.height
    if rows is not None and jpeg.height_at and rows + ROWS_BELOW * factor < h:
        h = rows + ROWS_BELOW * factor
        data = b"".join((data[: jpeg.height_at], h.to_bytes(2), data[jpeg.height_at + 2 :]))
    # simplejpeg shrinks only with all three
    least = (
        {"min_height": h // factor, "min_width": jpeg.width // factor, "min_factor": factor}
        if factor > 1
        else {}
    )
    try:
        strict = h == jpeg.height
        pixels = simplejpeg.decode_jpeg(
            data, "GRAY" if channels == 1 else "RGB", strict=strict, **least
        )
    except ValueError:
        image = decode(jpeg.data, channels)  # raises the same errors for broken files
        return np.asarray(image.resize((-(-jpeg.width // factor), -(-jpeg.height // factor))))
    return pixels[:, :, 0] if channels == 1 else pixels


def resized(pixels: np.ndarray, box: Box, side: int) -> np.ndarray:
    """The crop (left, top, right, bottom), in fractions of pixels, as a square; black outside."""
    h, w = pixels.shape[:2]
    left, top, right, bottom = box
    outside = math.ceil(max(-left, -top, right - w, bottom - h, 0))
    if outside:
        pixels = cv2.copyMakeBorder(pixels, outside, outside, outside, outside, cv2.BORDER_CONSTANT)
        left, top, right, bottom = (edge + outside for edge in box)
    x, y = (right - left) / side, (bottom - top) / side
    area = max(x, y) > AREA_ABOVE and min(x, y) >= 1
    if area or min(right - left, bottom - top) >= ROUND_ABOVE:
        first_x, first_y = round(left), round(top)
        part = pixels[
            first_y : max(round(bottom), first_y + 1), first_x : max(round(right), first_x + 1)
        ]
        if area:
            return cv2.resize(part, (side, side), interpolation=cv2.INTER_AREA)
        return cv2.resize(_smoothed(part, x, y), (side, side), interpolation=cv2.INTER_LINEAR)
    first_x, first_y = max(math.floor(left) - 2, 0), max(math.floor(top) - 2, 0)
    part = _smoothed(pixels[first_y : math.ceil(bottom) + 2, first_x : math.ceil(right) + 2], x, y)
    # the center of the square's first pixel is half a step inside of the crop
    matrix = np.array([[x, 0, left - first_x + x / 2 - 0.5], [0, y, top - first_y + y / 2 - 0.5]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(part, matrix, (side, side), flags=flags, borderMode=cv2.BORDER_REPLICATE)


def _smoothed(pixels: np.ndarray, x: float, y: float) -> np.ndarray:
    """Blur before shrinking by x and y, along the sides where a linear resize would skip pixels."""
    if max(x, y) <= SMOOTH_ABOVE:
        return pixels
    along_x, along_y = (SMOOTHING if shrink > SMOOTH_ABOVE else AS_IS for shrink in (x, y))
    return cv2.sepFilter2D(pixels, -1, along_x, along_y, borderType=cv2.BORDER_REPLICATE)


def _height_at(data: bytes) -> int | None:
    """The byte of the height, 0 for a progressive JPEG, None for an image that is not upright.

    Walks the segments before the scan by their lengths.
    """
    at, height_at = 2, None
    while data[at] == MARKER and data[at + 1] != SCAN:
        kind, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4])
        if kind == EXIF and data[at + 4 : at + 10] == b"Exif\0\0":
            exif = Image.Exif()
            exif.load(data[at + 4 : at + 2 + length])
            if exif.get(EXIF_ORIENTATION, 1) != 1:
                return None
        elif kind in SEQUENTIAL:
            height_at = at + 5
        elif kind in OTHER_FRAMES:
            height_at = 0
        at += 2 + length
    # a scan of fewer channels than the image is followed by another
    if height_at and data[at + 4] != data[height_at + 4]:
        return 0
    return height_at


def _rotated(pixels: np.ndarray, degrees: float) -> np.ndarray:
    h, w = pixels.shape[:2]
    return cv2.warpAffine(
        pixels, cv2.getRotationMatrix2D(((w - 1) / 2, (h - 1) / 2), degrees, 1), (w, h)
    )
