"""Decodes and augments training images in half the time, by simplejpeg and OpenCV.

The random draws are the same as in `crop.py`, and so are crop and operations; pixels differ
slightly, within the bounds of tests/data/test_fast.py. For training only: evaluation always uses
Pillow.

Needs the extra `fast`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from fullstride.data.readers.decode import EXIF_ORIENTATION, Box, Crop, Size, decode, file_bytes
from fullstride.data.transforms import image_ops as op
from fullstride.data.transforms.crop import (
    TRAINING_OVERSAMPLING,
    Augmentation,
    Source,
    decode_source,
    draw_kernel,
    in_mode,
    random_crop_box,
)
from fullstride.data.transforms.image_ops import TENSORFLOW, Sampling
from fullstride.data.transforms.policies import augmented, erase_at_random
from fullstride.nets.preprocessing import Preprocessing

# ---- the operations of augmentation policies that OpenCV computes in its own way


KERNELS = {"nearest": cv2.INTER_NEAREST, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
BLUR = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13  # Pillow's ImageFilter.SMOOTH


@op.by_table.register
def _by_table(pixels: np.ndarray, table: np.ndarray) -> np.ndarray:
    return cv2.LUT(pixels, table)


@op.mean_gray.register
def _mean_gray(pixels: np.ndarray) -> int:
    return int(cv2.mean(_grays(pixels))[0] + 0.5)


def _grays(pixels: np.ndarray) -> np.ndarray:
    return pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)


@op.patched.register
def _patched(pixels: np.ndarray, patch: op.Patch) -> np.ndarray:
    left, top, right, bottom = patch
    changed = pixels.copy()
    changed[top:bottom, left:right] = op.GRAY
    return changed


@op.auto_contrast.register
def _auto_contrast(pixels: np.ndarray) -> np.ndarray:
    def table(counts: np.ndarray) -> np.ndarray:
        low, high = counts.nonzero()[0][[0, -1]]
        return (op.VALUES - low) * (255 / (high - low)) if high > low else op.VALUES

    return _by_histogram(pixels, table)


@op.equalize.register
def _equalize(pixels: np.ndarray) -> np.ndarray:
    """By Pillow's rule the count of the brightest value is left out, so that it stays brightest."""

    def table(counts: np.ndarray) -> np.ndarray:
        used = counts.nonzero()[0]
        step = (counts.sum() - counts[used[-1]]) // 255
        if len(used) < 2 or not step:
            return op.VALUES
        return (step // 2 + np.cumsum(counts) - counts) // step

    return _by_histogram(pixels, table)


def _by_histogram(pixels: np.ndarray, table: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Map each channel by the table that `table` makes of its histogram."""
    tables = []
    for channel in range(pixels.shape[2] if pixels.ndim == 3 else 1):
        counts = cv2.calcHist([pixels], [channel], None, [256], [0, 256]).ravel()
        tables.append(np.clip(table(counts.astype(np.int64)), 0, 255).astype(np.uint8))
    return cv2.LUT(pixels, np.stack(tables, axis=1)[:, None, :])


@op.colour.register
def _colour(pixels: np.ndarray, factor: float) -> np.ndarray:
    if pixels.ndim == 2:
        return pixels
    return _blended(cv2.cvtColor(_grays(pixels), cv2.COLOR_GRAY2RGB), pixels, factor)


@op.sharpness.register
def _sharpness(pixels: np.ndarray, factor: float) -> np.ndarray:
    if min(pixels.shape[:2]) < 3:
        return pixels
    changed = _blended(cv2.filter2D(pixels, -1, BLUR), pixels, factor)
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):  # unchanged in Pillow
        changed[edge] = pixels[edge]
    return changed


def _blended(zero: np.ndarray, one: np.ndarray, factor: float) -> np.ndarray:
    """`zero` at a factor of 0 and `one` at 1, truncated to bytes, as in Pillow."""
    return cv2.addWeighted(one, factor, zero, 1 - factor, -0.5)


@op.rotate.register
def _rotate(pixels: np.ndarray, degrees: float, sampling: Sampling = TENSORFLOW) -> np.ndarray:
    return _moved(pixels, cv2.invertAffineTransform(_rotation(pixels, degrees)), sampling)


def _rotation(pixels: np.ndarray, degrees: float) -> np.ndarray:
    h, w = pixels.shape[:2]
    return cv2.getRotationMatrix2D(((w - 1) / 2, (h - 1) / 2), degrees, 1)


@op.affine.register
def _affine(pixels: np.ndarray, matrix: tuple[float, ...], sampling: Sampling) -> np.ndarray:
    a, b, c, d, e, f = matrix
    if (a, b, d, e) != (1, 0, 0, 1) or c != int(c) or f != int(f):
        # Pillow's coordinates are of pixel corners
        centred = np.array([[a, b, c + (a - 1) / 2 + b / 2], [d, e, f + d / 2 + (e - 1) / 2]])
        return _moved(pixels, centred, sampling)
    h, w = pixels.shape[:2]
    x, y = min(max(int(c), -w), w), min(max(int(f), -h), h)
    shifted = np.full_like(pixels, _color(pixels, sampling))
    shifted[max(-y, 0) : h - max(y, 0), max(-x, 0) : w - max(x, 0)] = pixels[
        max(y, 0) : h - max(-y, 0), max(x, 0) : w - max(-x, 0)
    ]
    return shifted


def _moved(pixels: np.ndarray, matrix: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Warp by `matrix`, from pixels of the result to pixels of the input."""
    h, w = pixels.shape[:2]
    # As in Pillow, pixels near the border are not blended with the fill.
    mode = cv2.BORDER_CONSTANT if sampling.kernel == "nearest" else cv2.BORDER_REPLICATE
    flags = KERNELS[sampling.kernel] | cv2.WARP_INVERSE_MAP
    fill = sampling.color(3)
    moved = cv2.warpAffine(pixels, matrix, (w, h), flags=flags, borderMode=mode, borderValue=fill)
    if sampling.kernel != "nearest":
        x, y = np.meshgrid(np.arange(w), np.arange(h), copy=False)
        from_x, from_y = (row[0] * x + row[1] * y + row[2] for row in matrix)
        inside = (from_x >= -0.5) & (from_x < w - 0.5) & (from_y >= -0.5) & (from_y < h - 0.5)
        moved[~inside] = _color(pixels, sampling)
    return moved


def _color(pixels: np.ndarray, sampling: Sampling) -> tuple[int, ...]:
    return sampling.color(1 if pixels.ndim == 2 else 3)


# ---- the training view


cv2.setNumThreads(1)  # the loader's workers share the cores

SMOOTH_ABOVE, AREA_ABOVE = 1.4, 2.0  # factors by which a side shrinks
# Weights of 3 neighbours, before a linear resize that would skip pixels. Between the two factors
# this is nearer to Pillow's antialiasing than INTER_AREA, 46 and 42 dB at 1.6, in a third of the
# time (measured).
SMOOTHING, AS_IS = np.array([1, 4, 1], np.float32) / 6, np.ones(1, np.float32)
# A crop of this many pixels a side is rounded to whole pixels: a resize takes half a warp's time.
ROUND_ABOVE = 64
FACTORS = (8, 4, 2)  # the decoder saves time with these, and not with its others (measured)
ROWS_BELOW = 4  # decoded below a crop, as the colours of its last row depend on them

# Bytes of a JPEG, ITU-T T.81
START, END = b"\xff\xd8\xff", b"\xff\xd9"
MARKER, SCAN, EXIF = 0xFF, 0xDA, 0xE1
SEQUENTIAL = (0xC0, 0xC1)
OTHER_FRAMES = (0xC2, 0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))


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

    `resized` interpolates; `pre.kernel` is ignored. Raises UnreadableImage.
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
        image, (box, _) = decode_source(source, pre, choose, TRAINING_OVERSAMPLING)
        pixels = np.asarray(in_mode(image, pre.channels))
    draw_kernel(pre, augmentation, rng)  # keeps the draws equal to Pillow's
    pixels = resized(pixels, box, side)
    if augmentation.rotation_degrees:
        degrees = rng.uniform(-augmentation.rotation_degrees, augmentation.rotation_degrees)
        pixels = cv2.warpAffine(pixels, _rotation(pixels, degrees), pixels.shape[1::-1])
    if rng.random() < augmentation.hflip_prob:
        pixels = cv2.flip(pixels, 1)
    pixels = augmented(pixels, augmentation, rng)
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    erase_at_random(pixels, augmentation, rng)
    return pixels


def find_jpeg(data: bytes) -> Jpeg | None:
    """The JPEG in `data`; None for any other file, which `decode` reads or refuses."""
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
    """Decode the first `rows`, or all, with sides divided by `factor`: uint8 (H, W, 3) or (H, W).

    `factor` is 1, 2, 4 or 8. In a sequential file the rows below are not decoded: with a lower
    height in the header the decoder ignores the rest of the file. A file with a broken middle is
    then read, as Pillow does.
    """
    data, h = jpeg.data, jpeg.height
    if rows is not None and jpeg.height_at and rows + ROWS_BELOW * factor < h:
        h = rows + ROWS_BELOW * factor
        data = b"".join((data[: jpeg.height_at], h.to_bytes(2), data[jpeg.height_at + 2 :]))
    least = {}
    if factor > 1:  # simplejpeg shrinks only with all three
        least = {"min_height": h // factor, "min_width": jpeg.width // factor, "min_factor": factor}
    try:
        space = "GRAY" if channels == 1 else "RGB"
        pixels = simplejpeg.decode_jpeg(data, space, strict=h == jpeg.height, **least)
    except ValueError:
        image = decode(jpeg.data, channels)  # raises the same errors for broken files
        return np.asarray(image.resize((-(-jpeg.width // factor), -(-jpeg.height // factor))))
    return pixels[:, :, 0] if channels == 1 else pixels


def resized(pixels: np.ndarray, box: Box, side: int) -> np.ndarray:
    """Resize the crop (left, top, right, bottom), in fractions of pixels; black outside."""
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
    # the center of the result's first pixel is half a step inside the crop
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
    """The byte of the height; 0 for a progressive JPEG, None for an image that is not upright.

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
    # a scan of fewer channels than the image is followed by another scan
    if height_at and data[at + 4] != data[height_at + 4]:
        return 0
    return height_at
