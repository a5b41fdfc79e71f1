"""Views of pictures with a mask or depth map, which share one geometry."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from fullstride.data.readers.decode import Size, UnreadableImage, image_size
from fullstride.data.readers.masks import MapFile
from fullstride.data.transforms.crop import (
    Augmentation,
    Source,
    check_geometric,
    check_sides,
    decode_whole,
    in_mode,
    pad_to,
    pre_at,
    test_view,
    view_geometry,
)
from fullstride.data.transforms.image_ops import KERNELS
from fullstride.nets.preprocessing import Preprocessing


@dataclass(frozen=True)
class MaskTrainView:
    """Scale jitter, a random crop or padding at the right and below, and a horizontal flip.

    The longer side is resized to the view's, times a factor that is drawn uniformly. The picture is
    resized by the network's interpolation, and the map takes the nearest values. Only the flip of
    `augmentation` is used.
    """

    pre: Preprocessing
    augmentation: Augmentation
    jitter: tuple[float, float] = (1.0, 1.0)  # the least and the largest factor
    sides: tuple[int, ...] = ()  # pixels a side in the first epochs; later `pre.resolution`
    outside: float = 255  # the map's value where there is no picture
    divides: bool = False  # divide the map's values by the factor: enlarged pictures look nearer

    def __post_init__(self) -> None:
        check_sides((self.pre.resolution, *self.sides))
        check_geometric(self.augmentation)

    def __call__(
        self, image: Source, target: MapFile, rng: np.random.Generator, epoch: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """An image and its map -> uint8 (H, W, C), and uint8 or float32 (H, W)."""
        image, pre = decode_whole(image, self.pre), pre_at(self.pre, self.sides, epoch)
        values = read_map(target, image.size)
        zoom = rng.uniform(*self.jitter)
        pixels, values = random_window(image, values, zoom, pre, self.outside, rng)
        if self.divides:
            values = np.where(values > 0, values / np.float32(zoom), values)
        if rng.random() < self.augmentation.hflip_prob:
            pixels, values = pixels[:, ::-1], values[:, ::-1]
        return np.ascontiguousarray(pixels), np.ascontiguousarray(values)


@dataclass(frozen=True)
class MaskTestView:
    """The pixels of `test_view`, and the nearest values of the map."""

    pre: Preprocessing
    outside: float = 255  # the map's value where there is no picture

    def __post_init__(self) -> None:
        check_sides((self.pre.resolution,))

    def __call__(
        self, image: Source, target: MapFile, rng: np.random.Generator, epoch: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        size = image.size if isinstance(image, Image.Image) else image_size(image)
        values = read_map(target, size)
        side = self.pre.resolution
        geometry = view_geometry(size, self.pre)
        centres = np.arange(side) + 0.5
        columns = (centres + geometry.left) / geometry.scale_x
        rows = (centres + geometry.top) / geometry.scale_y
        return test_view(image, self.pre), nearest(values, rows, columns, self.outside)


def read_map(target: MapFile, size: Size) -> np.ndarray:
    """The map (H, W) of a picture of `size`. Raises UnreadableImage for another size."""
    values = target.read()
    if values.shape[::-1] != size:
        (h, w), (width, height) = values.shape, size
        raise UnreadableImage(
            target.name, f"it has {w} x {h} pixels, its picture {width} x {height}"
        )
    return values


def random_window(
    image: Image.Image,
    values: np.ndarray,
    zoom: float,
    pre: Preprocessing,
    outside: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """A random window of the picture resized to a longer side of `zoom` times the resolution.

    The pixels are at the top left of a square of the mean colour, uint8 (side, side, C); the map,
    (side, side), has the nearest values.
    """
    (w, h), side = image.size, pre.resolution
    factor = zoom * side / max(w, h)
    new_w, new_h = (max(1, round(each * factor)) for each in (w, h))
    left, top = (int(rng.integers(max(new - side, 0) + 1)) for new in (new_w, new_h))
    width, height = min(side, new_w), min(side, new_h)
    right, bottom = min((left + width) * w / new_w, w), min((top + height) * h / new_h, h)
    box = (left * w / new_w, top * h / new_h, right, bottom)
    part = in_mode(image, pre.channels).resize((width, height), KERNELS[pre.kernel], box)
    pixels = np.array(pad_to(part, (side, side), pre)).reshape(side, side, pre.channels)
    columns, rows = np.full(side, -1.0), np.full(side, -1.0)
    columns[:width] = (np.arange(width) + left + 0.5) * w / new_w
    rows[:height] = (np.arange(height) + top + 0.5) * h / new_h
    return pixels, nearest(values, rows, columns, outside)


def nearest(
    values: np.ndarray, rows: np.ndarray, columns: np.ndarray, outside: float
) -> np.ndarray:
    """The values (H, W) at a grid of points, in pixels from the upper left corner.

    Returns (len(rows), len(columns)), with `outside` for points that are not on the map.
    """
    h, w = values.shape
    y, x = np.floor(rows).astype(int), np.floor(columns).astype(int)
    taken = values[np.clip(y, 0, h - 1)][:, np.clip(x, 0, w - 1)]
    inside = ((y >= 0) & (y < h))[:, None] & ((x >= 0) & (x < w))
    return np.where(inside, taken, values.dtype.type(outside))
