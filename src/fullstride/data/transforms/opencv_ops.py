"""How does OpenCV compute the operations of augmentation policies? `OPENCV_OPS` has them.

Each takes the values of its twin in `image_ops`, for uint8 (H, W) or (H, W, 3). Needs the extra
`fast`.
"""

from collections.abc import Callable

import cv2
import numpy as np

from fullstride.data.transforms import image_ops as op
from fullstride.data.transforms.image_ops import TENSORFLOW, Sampling
from fullstride.data.transforms.levels import Operation

KERNELS = {"nearest": cv2.INTER_NEAREST, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}


def _auto_contrast(pixels: np.ndarray) -> np.ndarray:
    def table(counts: np.ndarray) -> np.ndarray:
        used = counts.nonzero()[0]
        low, high = int(used[0]), int(used[-1])
        return (
            _clipped((LEVELS - low) * (255 / (high - low)))
            if high > low
            else LEVELS.astype(np.uint8)
        )

    return _by_tables(pixels, table)


def _equalize(pixels: np.ndarray) -> np.ndarray:
    """Pillow's rule: the count of the brightest value is left out, so that it stays brightest."""

    def table(counts: np.ndarray) -> np.ndarray:
        used = counts.nonzero()[0]
        step = (counts.sum() - counts[used[-1]]) // 255
        if len(used) < 2 or not step:
            return LEVELS.astype(np.uint8)
        before = np.cumsum(counts) - counts
        return np.minimum((step // 2 + before) // step, 255).astype(np.uint8)

    return _by_tables(pixels, table)


def _invert(pixels: np.ndarray) -> np.ndarray:
    return cv2.bitwise_not(pixels)


def _solarize(pixels: np.ndarray, threshold: float) -> np.ndarray:
    bright = np.arange(256) >= round(threshold)
    return cv2.LUT(pixels, np.where(bright, 255 - LEVELS, LEVELS).astype(np.uint8))


def _solarize_add(pixels: np.ndarray, added: float) -> np.ndarray:
    table = np.where(LEVELS < op.GRAY, np.minimum(255, LEVELS + round(added)), LEVELS)
    return cv2.LUT(pixels, table.astype(np.uint8))


def _posterize(pixels: np.ndarray, bits: float) -> np.ndarray:
    mask = 0xFF & (0xFF << 8 - min(max(round(bits), 1), 8))
    return cv2.LUT(pixels, (LEVELS.astype(np.uint8) & mask))


def _contrast(pixels: np.ndarray, factor: float) -> np.ndarray:
    mean = int(cv2.mean(_grays(pixels))[0] + 0.5)
    return cv2.LUT(pixels, _from(mean, factor))


def _brightness(pixels: np.ndarray, factor: float) -> np.ndarray:
    return cv2.LUT(pixels, _from(0, factor))


def _colour(pixels: np.ndarray, factor: float) -> np.ndarray:
    if pixels.ndim == 2:
        return pixels
    return _blended(cv2.cvtColor(_grays(pixels), cv2.COLOR_GRAY2RGB), pixels, factor)


def _sharpness(pixels: np.ndarray, factor: float) -> np.ndarray:
    if min(pixels.shape[:2]) < 3:
        return pixels
    changed = _blended(cv2.filter2D(pixels, -1, BLUR), pixels, factor)
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):  # unchanged in Pillow
        changed[edge] = pixels[edge]
    return changed


def _contrast_to_size(pixels: np.ndarray, factor: float) -> np.ndarray:
    return cv2.LUT(pixels, _from(op.gray_by_size(pixels.shape[:2]), factor))


def _rotate(pixels: np.ndarray, degrees: float, sampling: Sampling = TENSORFLOW) -> np.ndarray:
    h, w = pixels.shape[:2]
    rotation = cv2.getRotationMatrix2D(((w - 1) / 2, (h - 1) / 2), degrees, 1)
    return _moved(pixels, cv2.invertAffineTransform(rotation), sampling)


def _shear_x(pixels: np.ndarray, slope: float, sampling: Sampling = TENSORFLOW) -> np.ndarray:
    # Pillow's coordinates are those of the pixels' corners
    return _moved(pixels, np.array([[1, slope, slope / 2], [0, 1, 0]]), sampling)


def _shear_y(pixels: np.ndarray, slope: float, sampling: Sampling = TENSORFLOW) -> np.ndarray:
    return _moved(pixels, np.array([[1, 0, 0], [slope, 1, slope / 2]]), sampling)


def _translate_x(pixels: np.ndarray, share: float, sampling: Sampling = TENSORFLOW) -> np.ndarray:
    return _shift_x(pixels, share * pixels.shape[1], sampling)


def _translate_y(pixels: np.ndarray, share: float, sampling: Sampling = TENSORFLOW) -> np.ndarray:
    return _shift_y(pixels, share * pixels.shape[0], sampling)


def _shift_x(pixels: np.ndarray, by: float, sampling: Sampling = TENSORFLOW) -> np.ndarray:
    by, w = op.whole(by, sampling), pixels.shape[1]
    if by != int(by):
        return _moved(pixels, np.array([[1, 0, by], [0, 1, 0]]), sampling)
    moved, by = _filled(pixels, sampling), min(max(int(by), -w), w)
    moved[:, max(-by, 0) : w - max(by, 0)] = pixels[:, max(by, 0) : w - max(-by, 0)]
    return moved


def _shift_y(pixels: np.ndarray, by: float, sampling: Sampling = TENSORFLOW) -> np.ndarray:
    by, h = op.whole(by, sampling), pixels.shape[0]
    if by != int(by):
        return _moved(pixels, np.array([[1, 0, 0], [0, 1, by]]), sampling)
    moved, by = _filled(pixels, sampling), min(max(int(by), -h), h)
    moved[max(-by, 0) : h - max(by, 0)] = pixels[max(by, 0) : h - max(-by, 0)]
    return moved


def _cutout(pixels: np.ndarray, share: float, x: float, y: float) -> np.ndarray:
    return _patched(pixels, op.patch_box((pixels.shape[1], pixels.shape[0]), share, x, y))


def _cutout_pixels(pixels: np.ndarray, half: float, x: float, y: float) -> np.ndarray:
    return _patched(pixels, op.pixel_box((pixels.shape[1], pixels.shape[0]), half, x, y))


OPENCV_OPS: dict[Operation, Callable[..., np.ndarray]] = {
    op.auto_contrast: _auto_contrast,
    op.equalize: _equalize,
    op.invert: _invert,
    op.rotate: _rotate,
    op.posterize: _posterize,
    op.solarize: _solarize,
    op.colour: _colour,
    op.contrast: _contrast,
    op.contrast_to_size: _contrast_to_size,
    op.brightness: _brightness,
    op.sharpness: _sharpness,
    op.shear_x: _shear_x,
    op.shear_y: _shear_y,
    op.translate_x: _translate_x,
    op.translate_y: _translate_y,
    op.shift_x: _shift_x,
    op.shift_y: _shift_y,
    op.cutout: _cutout,
    op.cutout_pixels: _cutout_pixels,
    op.solarize_add: _solarize_add,
}
LEVELS = np.arange(256)
BLUR = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13  # Pillow's ImageFilter.SMOOTH


def _by_tables(pixels: np.ndarray, table: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Map each channel by the table that `table` makes of its histogram."""
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    tables = [
        table(cv2.calcHist([pixels], [channel], None, [256], [0, 256]).ravel().astype(np.int64))
        for channel in range(channels)
    ]
    return cv2.LUT(pixels, np.stack(tables, axis=1)[:, None, :])


def _grays(pixels: np.ndarray) -> np.ndarray:
    return pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)


def _blended(zero: np.ndarray, one: np.ndarray, factor: float) -> np.ndarray:
    """`zero` at a factor of 0 and `one` at 1, truncated to bytes, as in Pillow."""
    return cv2.addWeighted(one, factor, zero, 1 - factor, -0.5)


def _from(zero: int, factor: float) -> np.ndarray:
    """The table of `_blended` for a uniform `zero`, in Pillow's precision."""
    return _clipped(np.float32(zero) + np.float32(factor) * (LEVELS - zero).astype(np.float32))


def _clipped(values: np.ndarray) -> np.ndarray:
    return np.clip(values, 0, 255).astype(np.uint8)


def _moved(pixels: np.ndarray, matrix: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Warp by `matrix`, from pixels of the result to those of the input."""
    h, w = pixels.shape[:2]
    # As in Pillow, pixels near the border are not blended with the fill.
    mode = cv2.BORDER_CONSTANT if sampling.kernel == "nearest" else cv2.BORDER_REPLICATE
    moved = cv2.warpAffine(
        pixels,
        matrix,
        (w, h),
        flags=KERNELS[sampling.kernel] | cv2.WARP_INVERSE_MAP,
        borderMode=mode,
        borderValue=sampling.color(3),
    )
    if sampling.kernel != "nearest":
        x, y = np.meshgrid(np.arange(w), np.arange(h), copy=False)
        from_x, from_y = (row[0] * x + row[1] * y + row[2] for row in matrix)
        inside = (from_x >= -0.5) & (from_x < w - 0.5) & (from_y >= -0.5) & (from_y < h - 0.5)
        moved[~inside] = sampling.color(1 if pixels.ndim == 2 else 3)
    return moved


def _filled(pixels: np.ndarray, sampling: Sampling) -> np.ndarray:
    return np.full_like(pixels, sampling.color(1 if pixels.ndim == 2 else 3))


def _patched(pixels: np.ndarray, box: tuple[int, int, int, int]) -> np.ndarray:
    left, top, right, bottom = box
    changed = pixels.copy()
    changed[top:bottom, left:right] = op.GRAY
    return changed
