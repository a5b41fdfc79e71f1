"""Views of pictures with a mask or depth map, which share one geometry."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from fullstride.data.readers.decode import Size, UnreadableImage, image_size
from fullstride.data.readers.masks import MapFile
from fullstride.data.transforms.boxes import Region, random_placement, render, seeded
from fullstride.data.transforms.crop import (
    Augmentation,
    Source,
    check_geometric,
    check_sides,
    pre_at,
    test_view,
    view_geometry,
)
from fullstride.nets.preprocessing import Preprocessing


@dataclass(frozen=True)
class MaskTrainView:
    """A horizontal flip, scale jitter, and a random crop or padding at the right and below.

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
        pre = pre_at(self.pre, self.sides, epoch)
        size = image.size if isinstance(image, Image.Image) else image_size(image)
        values, side = read_map(target, size), pre.resolution
        with seeded(rng):
            flip = bool(torch.rand(()) < self.augmentation.hflip_prob)
            place = random_placement(Region(0, 0, *size), size, side, self.jitter, flip)
        pixels = render(image, size, place, pre, distort=False)
        columns, rows = (
            (np.arange(side) + 0.5 + offset) / scale
            for offset, scale in zip(place.offset, place.scale, strict=True)
        )
        values = nearest(values[:, ::-1] if flip else values, rows, columns, self.outside)
        if self.divides:
            zoom = max(place.scale[0] * size[0], place.scale[1] * size[1]) / side
            values = np.where(values > 0, values / np.float32(zoom), values)
        return pixels, values


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
