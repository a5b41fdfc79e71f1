"""Where in the view is a pixel of the picture? Every fit scales along each axis and moves."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from fullstride.nets.preprocessing import Preprocessing

STRIDE = 32  # of the deepest maps: sides of views with boxes or maps are multiples of it


class Geometry(NamedTuple):
    """view = picture * scale - (left, top), in coordinates that are 0 at the corner of a pixel."""

    scale_x: float
    scale_y: float
    left: float = 0
    top: float = 0

    def to_view(self, points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        """Points (x, y) of the picture in the view."""
        return [(x * self.scale_x - self.left, y * self.scale_y - self.top) for x, y in points]

    def to_picture(self, points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        """Points (x, y) of the view in the picture."""
        return [((x + self.left) / self.scale_x, (y + self.top) / self.scale_y) for x, y in points]


def resized_size(size: tuple[int, int], pre: Preprocessing) -> tuple[int, int]:
    """The size (width, height) that the whole picture of `size` is resized to, before the crop."""
    (w, h), side = size, pre.resolution
    if pre.fit == "squish":
        return side, side
    if pre.fit == "pad":
        longer = max(w, h)
        return max(1, math.floor(side * w / longer + 0.5)), max(
            1, math.floor(side * h / longer + 0.5)
        )
    shorter = math.floor(side / pre.crop)
    return (shorter, int(shorter * h / w)) if w <= h else (int(shorter * w / h), shorter)


def view_geometry(size: tuple[int, int], pre: Preprocessing) -> Geometry:
    """Where the view of evaluation, `test_view`, has the pixels of a picture of `size` (w, h)."""
    new_w, new_h = resized_size(size, pre)
    left, top = view_offset((new_w, new_h), pre)
    return Geometry(new_w / size[0], new_h / size[1], left, top)


def view_offset(resized: tuple[int, int], pre: Preprocessing) -> tuple[int, int]:
    """The pixels of the resized picture left of the view and above it."""
    if pre.fit == "pad":
        return 0, 0
    left, top = (round((length - pre.resolution) / 2) for length in resized)
    return left, top


def check_sides(sides: Iterable[int]) -> None:
    """Raises ValueError for a side of a view that the maps of a network do not divide."""
    for side in sides:
        if side % STRIDE:
            raise ValueError(
                f"{side} pixels a side: a network for boxes or pixels takes multiples of {STRIDE}, "
                f"so set --resolution, such as {max(STRIDE, STRIDE * round(side / STRIDE))}"
            )


def check_decoder(decoder: str) -> None:
    """Raises ValueError for a decoder whose transforms move no targets."""
    if decoder != "pillow":
        raise ValueError(
            f"recipe.decoder {decoder} cannot move boxes or maps with the pixels: use pillow"
        )
