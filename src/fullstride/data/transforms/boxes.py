"""Views of pictures with boxes: random views for training, and the view of evaluation.

A training view is one resize of a part of the picture: flips, zoom-out, crops and scale jitter only
draw where the part is, and pixels are read once.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fullstride.data.readers.decode import Crop, Size, image_size
from fullstride.data.readers.listing import Objects
from fullstride.data.transforms.crop import (
    TRAINING_OVERSAMPLING,
    Augmentation,
    Source,
    check_geometric,
    check_sides,
    decode_source,
    in_mode,
    pad_to,
    pre_at,
    test_view,
    view_geometry,
)
from fullstride.data.transforms.image_ops import KERNELS
from fullstride.nets.preprocessing import Preprocessing

MIN_SIDE = 1.0  # pixels; clipped boxes with a smaller side in a training view are left out
MIN_VISIBLE = 0.75  # pixels; a smaller visible part of a picture is not drawn
MIN_CROP_SIDE = 8  # pixels; IoU crops of a smaller picture could be empty


class Region(NamedTuple):
    """A rectangle (left, top, width, height) in pixels of a picture; it may exceed the picture."""

    left: float
    top: float
    width: float
    height: float


class Placement(NamedTuple):
    """view = (picture - corner of region) * scale - offset, after a flip of the picture."""

    region: Region
    scale: tuple[float, float]
    offset: tuple[float, float]  # pixels of the view
    flip: bool


@dataclass(frozen=True)
class BoxTrainView:
    """A random view of a picture and its objects, padded to a square with the mean colour.

    The targets are a dict: `boxes` float32 (n, 4), in pixels of the view, `labels` int64 (n,),
    `difficult` bool (n,), and `scale` float32 (), pixels of the view / pixels of the picture. Boxes
    are clipped to the visible part of the picture; objects whose centre an IoU crop cuts off, and
    objects below a pixel, are left out.

    The rules of flips, zoom-out, IoU crops and photometric distortion are torchvision's.
    """

    pre: Preprocessing
    augmentation: Augmentation = Augmentation()  # only `hflip_prob` is used
    kind: Literal["flip", "ssd"] = "flip"
    jitter: tuple[float, float] = (1.0, 1.0)
    sides: tuple[int, ...] = ()  # pixels a side in the first epochs; later `pre.resolution`

    def __post_init__(self) -> None:
        check_sides((self.pre.resolution, *self.sides))
        check_geometric(self.augmentation)

    def __call__(
        self, image: Source, target: Objects, rng: np.random.Generator, epoch: int = 0
    ) -> tuple[np.ndarray, dict[str, Tensor]]:
        pre = pre_at(self.pre, self.sides, epoch)
        side = pre.resolution
        size = image.size if isinstance(image, Image.Image) else image_size(image)
        boxes = torch.tensor(target.boxes, dtype=torch.float32).reshape(-1, 4)
        with seeded(rng):
            flip = bool(torch.rand(()) < self.augmentation.hflip_prob)
            if flip:
                boxes = mirrored(boxes, size[0])
            region, inside = ssd_region(boxes, size) if self.kind == "ssd" else (None, None)
            place = random_placement(region or Region(0, 0, *size), size, side, self.jitter, flip)
            pixels = render(image, size, place, pre, distort=self.kind == "ssd")
        moved, visible = to_view(boxes, size, place, side)
        if inside is not None:
            visible &= inside
        return pixels, as_targets(moved, target, place.scale, visible)


@dataclass(frozen=True)
class BoxTestView:
    """The view of evaluation by `pre.fit`, with all objects, even outside of the view."""

    pre: Preprocessing

    def __post_init__(self) -> None:
        check_sides((self.pre.resolution,))

    def __call__(
        self, image: Source, target: Objects, rng: np.random.Generator, epoch: int = 0
    ) -> tuple[np.ndarray, dict[str, Tensor]]:
        size = image.size if isinstance(image, Image.Image) else image_size(image)
        geometry = view_geometry(size, self.pre)
        corners = [corner for x, y, u, v in target.boxes for corner in ((x, y), (u, v))]
        boxes = torch.tensor(geometry.to_view(corners), dtype=torch.float32).reshape(-1, 4)
        keep = torch.ones(len(boxes), dtype=torch.bool)
        return test_view(image, self.pre), as_targets(boxes, target, geometry[:2], keep)


@contextmanager
def seeded(rng: np.random.Generator) -> Iterator[None]:
    """Seed PyTorch's global generator, which torchvision draws from, by `rng` in the body."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.integers(2**62)))  # not the GPUs' generators
        yield


def as_targets(
    boxes: Tensor, target: Objects, scale: tuple[float, float], keep: Tensor
) -> dict[str, Tensor]:
    """The targets of a view, for the objects in `keep`."""
    return {
        "boxes": boxes[keep],
        "labels": torch.tensor(target.labels, dtype=torch.long)[keep],
        "difficult": torch.tensor(target.difficult, dtype=torch.bool)[keep],
        "scale": torch.tensor(math.sqrt(scale[0] * scale[1]), dtype=torch.float32),
    }


# ---- where the pixels of a training view come from


def mirrored(boxes: Tensor, width: float) -> Tensor:
    left, top, right, bottom = boxes.unbind(1)
    return torch.stack([width - right, top, width - left, bottom], 1)


def ssd_region(boxes: Tensor, size: Size) -> tuple[Region, Tensor | None]:
    """The part of a picture that torchvision's zoom-out and IoU crop choose by its boxes.

    The second result says for each box whether its centre is inside; None if there is no crop.
    """
    from torchvision.transforms import v2  # takes seconds to import

    (w, h), left, top = size, 0, 0
    if torch.rand(()) < 0.5:
        canvas = _bounding_boxes(boxes, size)
        left, top, right, bottom = v2.RandomZoomOut().make_params([canvas])["padding"]
        w, h = w + left + right, h + top + bottom
    if not len(boxes) or min(w, h) < MIN_CROP_SIDE:
        return Region(-left, -top, w, h), None
    shift = torch.tensor([left, top, left, top])
    crop = v2.RandomIoUCrop().make_params([_bounding_boxes(boxes + shift, (w, h))])
    if not crop:
        return Region(-left, -top, w, h), None
    region = Region(crop["left"] - left, crop["top"] - top, crop["width"], crop["height"])
    return region, crop["is_within_crop_area"]


def _bounding_boxes(boxes: Tensor, size: Size) -> Any:
    from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat

    kind, canvas = BoundingBoxFormat.XYXY, (size[1], size[0])
    return BoundingBoxes(boxes, format=kind, canvas_size=canvas)  # pyright: ignore[reportCallIssue]


def random_placement(
    region: Region, size: Size, side: int, jitter: tuple[float, float], flip: bool
) -> Placement:
    """Place the region at the top left of the view, its longer side `side` times a random factor.

    The view shows a random part of a region that is larger than the view.
    """
    low, high = jitter
    factor = low + (high - low) * torch.rand(()).item() if low < high else low
    ratio = side * factor / max(region.width, region.height)
    new_w, new_h = (max(1, math.floor(each * ratio + 0.5)) for each in region[2:])
    free_x, free_y = max(0, new_w - side), max(0, new_h - side)
    offset = (float(torch.randint(free_x + 1, ())), float(torch.randint(free_y + 1, ())))
    return Placement(region, (new_w / region.width, new_h / region.height), offset, flip)


def visible_part(size: Size, place: Placement, side: int) -> tuple[float, float, float, float]:
    """The part of the view that shows the picture: (left, top, right, bottom)."""
    edges = []
    for axis in (0, 1):
        start, length, scale = place.region[axis], place.region[2 + axis], place.scale[axis]
        origin = -place.offset[axis]
        first = max(0.0, origin, origin - start * scale)
        last = min(side, origin + length * scale, origin + (size[axis] - start) * scale)
        edges.append((first, last))
    (left, right), (top, bottom) = edges
    return left, top, right, bottom


def to_view(boxes: Tensor, size: Size, place: Placement, side: int) -> tuple[Tensor, Tensor]:
    """Boxes of the mirrored picture in the view, clipped to the visible part; and which are."""
    start = torch.tensor(place.region[:2] * 2)
    scale, offset = torch.tensor(place.scale * 2), torch.tensor(place.offset * 2)
    moved = (boxes - start) * scale - offset
    left, top, right, bottom = visible_part(size, place, side)
    x = moved[:, 0::2].clamp(left, max(left, right))
    y = moved[:, 1::2].clamp(top, max(top, bottom))
    moved = torch.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], 1)
    return moved, (x.diff()[:, 0] >= MIN_SIDE) & (y.diff()[:, 0] >= MIN_SIDE)


def render(
    image: Source, size: Size, place: Placement, pre: Preprocessing, distort: bool
) -> np.ndarray:
    """The pixels of a training view: uint8 (H, W, C). Raises UnreadableImage."""
    side, (w, h) = pre.resolution, size
    edges = visible_part(size, place, side)
    if min(edges[2] - edges[0], edges[3] - edges[1]) < MIN_VISIBLE:
        return np.full((side, side, pre.channels), pre.fill, np.uint8)
    left, top = (min(side - 1, math.floor(edge + 0.5)) for edge in edges[:2])
    right, bottom = (
        max(first + 1, math.floor(edge + 0.5))
        for first, edge in zip((left, top), edges[2:], strict=True)
    )

    def source(x: int, y: int) -> tuple[float, float]:
        """The point of the mirrored picture at a point of the view."""
        u = (x + place.offset[0]) / place.scale[0] + place.region.left
        v = (y + place.offset[1]) / place.scale[1] + place.region.top
        return min(max(u, 0.0), float(w)), min(max(v, 0.0), float(h))

    (x1, y1), (x2, y2) = source(left, top), source(right, bottom)
    box = (w - x2, y1, w - x1, y2) if place.flip else (x1, y1, x2, y2)
    part = (right - left, bottom - top)
    picture, (box, _) = decode_source(image, pre, lambda _: Crop(box, part), TRAINING_OVERSAMPLING)
    content = in_mode(picture, pre.channels).resize(part, KERNELS[pre.kernel], box)
    if place.flip:
        content = content.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if distort:
        content = _distorted(content)
    whole = pad_to(content, (side, side), pre, (left, top))
    return np.array(whole).reshape(side, side, pre.channels)


def _distorted(image: Image.Image) -> Image.Image:
    from torchvision.transforms import v2

    x = v2.functional.pil_to_tensor(image)
    return v2.functional.to_pil_image(v2.RandomPhotometricDistort()(x))
