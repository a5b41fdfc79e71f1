"""Views of pictures: a random crop in training, the center crop in evaluation."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fullstride.data.readers.decode import Box, Crop, Size, decode, decode_crop
from fullstride.data.transforms.image_ops import KERNELS
from fullstride.data.transforms.policies import augmented, erase_at_random
from fullstride.data.transforms.settings import Augmentation
from fullstride.nets.preprocessing import Kernel, Preprocessing

# ---- the position of a picture's pixels in the view: every fit scales along each axis and moves


STRIDE = 32  # of the deepest maps; sides of views with boxes or maps are multiples


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
    """The size (width, height) of a whole picture of `size` after the resize, before the crop."""
    (w, h), side = size, pre.resolution
    if pre.fit == "squish":
        return side, side
    if pre.fit == "pad":
        w, h = (max(1, math.floor(side * each / max(size) + 0.5)) for each in size)
        return w, h
    shorter = math.floor(side / pre.crop)
    return (shorter, int(shorter * h / w)) if w <= h else (int(shorter * w / h), shorter)


def view_geometry(size: tuple[int, int], pre: Preprocessing) -> Geometry:
    """The geometry of `test_view` for a picture of `size` (w, h)."""
    new_w, new_h = resized_size(size, pre)
    left, top = view_offset((new_w, new_h), pre)
    return Geometry(new_w / size[0], new_h / size[1], left, top)


def view_offset(resized: tuple[int, int], pre: Preprocessing) -> tuple[int, int]:
    """The pixels of the resized picture left of the view and above it."""
    if pre.fit == "pad":
        return 0, 0
    left, top = (round((length - pre.resolution) / 2) for length in resized)
    return left, top


def check_sides(sides: Iterable[int], flag: str = "--resolution") -> None:
    """Raise ValueError for a side of a view, set by `flag`, that is not a multiple of `STRIDE`."""
    for side in sides:
        if side % STRIDE:
            raise ValueError(
                f"{side} pixels a side: a network for boxes or pixels takes multiples of {STRIDE}, "
                f"so set {flag}, such as {max(STRIDE, STRIDE * round(side / STRIDE))}"
            )


def check_decoder(decoder: str) -> None:
    """Raise ValueError for a decoder whose transforms cannot move targets."""
    if decoder != "pillow":
        raise ValueError(
            f"recipe.decoder {decoder} cannot move boxes or maps with the pixels: use pillow"
        )


# Settings that move or replace pixels in a way that boxes and maps do not follow.
NOT_FOR_TARGETS = ("rotation_degrees", "auto_augment", "trivial_augment", "rand_layers", "cutout")
NOT_FOR_TARGETS += ("random_erasing_prob", "random_kernel")


def check_geometric(augmentation: Augmentation) -> None:
    """Raise ValueError for a setting of `NOT_FOR_TARGETS` that is not the default."""
    default = Augmentation()
    for name in NOT_FOR_TARGETS:
        if (value := getattr(augmentation, name)) != getattr(default, name):
            raise ValueError(
                f"recipe.{name} {value} would change pixels and not their boxes or map: leave it "
                "out"
            )


# The most pixels of a whole resized or padded image. Larger images, which are very long and thin,
# are cropped before they are resized, or reduced before they are padded.
MAX_PIXELS = 64 * 2**20
# With `Preprocessing.draft`: the least pixels of a box in a JPEG decoded at a fraction of its size
# / pixels of the resized box, along a side. At these limits, photographs are on average 47 and 51
# dB from the whole image (docs/log.md); two kernels are 43 dB apart.
TRAINING_OVERSAMPLING, TEST_OVERSAMPLING = 2.0, 3.0

Decoder = Literal["pillow", "opencv"]
Sides = tuple[int, ...]  # pixels a side in the first epochs, for resolutions that grow
Source = Image.Image | Path | bytes  # a decoded image, or the path or the bytes of a file
RandomBox = Callable[[Size, Augmentation, np.random.Generator], Box]  # draws the box of a crop


def random_crop_box(
    size: tuple[int, int], augmentation: Augmentation, rng: np.random.Generator
) -> Box:
    """(left, top, right, bottom) of torchvision's RandomResizedCrop, in fractions of pixels.

    With whole pixels small images would have few different crops. A crop that is larger than the
    image contains the image.
    """
    w, h = size
    (least, most), (low, high) = augmentation.scale, augmentation.ratio
    for _ in range(10):
        area = w * h * rng.uniform(least, most)
        ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
        width, height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if most > 1 or (width <= w and height <= h):
            left, top = (free * rng.random() for free in (w - width, h - height))
            # rounding must not exceed the border, which Pillow refuses
            right = min(left + width, w) if width <= w else left + width
            bottom = min(top + height, h) if height <= h else top + height
            return left, top, right, bottom
    width, height = min(w, h * high), min(h, w / low)  # the largest center crop
    return (w - width) / 2, (h - height) / 2, (w + width) / 2, (h + height) / 2


def train_view(
    source: Source,
    pre: Preprocessing,
    augmentation: Augmentation,
    rng: np.random.Generator,
    draw_box: RandomBox = random_crop_box,
) -> np.ndarray:
    """A random crop of an image at the network's resolution, augmented: uint8 (H, W, C).

    Raises UnreadableImage for a file that cannot be decoded.
    """
    square = (pre.resolution, pre.resolution)

    def choose(size: Size) -> Crop:
        return Crop(draw_box(size, augmentation, rng), square)

    image, (box, _) = decode_source(source, pre, choose, TRAINING_OVERSAMPLING)
    pre = replace(pre, kernel=draw_kernel(pre, augmentation, rng))
    image, box = _padded(image, box)
    crop = _resized(image, square, pre, box)
    if augmentation.rotation_degrees:
        crop = crop.rotate(
            rng.uniform(-augmentation.rotation_degrees, augmentation.rotation_degrees),
            Image.Resampling.BILINEAR,
        )
    if rng.random() < augmentation.hflip_prob:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = _pixels(augmented(crop, augmentation, rng))
    erase_at_random(pixels, augmentation, rng)
    return pixels


def test_view(
    source: Source,
    pre: Preprocessing,
    max_memory_mib: float | None = None,  # noqa: PT028
) -> np.ndarray:
    """The image squished or padded to a square, or its center crop, by `pre.fit`: uint8 (H, W, C).

    `view_geometry` says where the pixels of the image are. The center crop is torchvision's Resize
    and CenterCrop, with floor(resolution / crop) as the shorter side, as in timm. Raises
    UnreadableImage for a file that cannot be decoded. `max_memory_mib` limits the memory of a file
    with `pre.draft`, see `decode_crop`.
    """
    side = pre.resolution

    def choose(size: Size) -> Crop:
        w, h = size
        new_w, new_h = resized_size(size, pre)
        if new_w * new_h <= MAX_PIXELS:
            return Crop((0, 0, w, h), (new_w, new_h))
        left, top = view_offset((new_w, new_h), pre)
        right, bottom = left + side, top + side
        box = (left * w / new_w, top * h / new_h, right * w / new_w, bottom * h / new_h)
        return Crop(box, (side, side))

    image, (box, (w, h)) = decode_source(source, pre, choose, TEST_OVERSAMPLING, max_memory_mib)
    resized = _resized(image, (w, h), pre, box)
    if pre.fit == "pad":
        return _pixels(pad_to(resized, (side, side), pre))
    left, top = view_offset((w, h), pre)
    return _pixels(resized.crop((left, top, left + side, top + side)))


def pre_at(pre: Preprocessing, sides: Sides, epoch: int) -> Preprocessing:
    """The preprocessing with the resolution of an epoch."""
    return replace(pre, resolution=sides[epoch]) if epoch < len(sides) else pre


def decode_source(
    source: Source,
    pre: Preprocessing,
    choose: Callable[[Size], Crop],
    oversampling: float,
    max_memory_mib: float | None = None,
) -> tuple[Image.Image, Crop]:
    """Open an image, by `pre.draft`; also returns the crop that `choose` makes of its size."""
    if isinstance(source, Image.Image):
        return source, choose(source.size)
    if not pre.draft:
        image = decode(source, pre.channels, background=pre.background)
        return image, choose(image.size)
    return decode_crop(
        source,
        pre.channels,
        choose,
        oversampling=oversampling,
        max_memory_mib=max_memory_mib,
        background=pre.background,
    )


test_view.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]  # not a test of pytest


def to_input(pixels_nhwc: Tensor, pre: Preprocessing) -> Tensor:
    """uint8 (N, H, W, C) -> float32 (N, C, H, W), channels last in memory, on the same device.

    Clips, (N, T, H, W, C), become (N, C, T, H, W).
    """

    def per_channel(values: tuple[float, ...]) -> Tensor:
        # non_blocking: waiting for the copy would stall the GPU once per batch
        column = torch.tensor(values).view(-1, *[1] * (pixels_nhwc.ndim - 2))
        return column.to(pixels_nhwc.device, non_blocking=True)

    x = pixels_nhwc.movedim(-1, 1).to(torch.float32)
    # 255 as a tensor: a GPU multiplies by a number's reciprocal, which differs in the last bit.
    return x.div_(per_channel((255.0,))).sub_(per_channel(pre.mean)).div_(per_channel(pre.std))


def draw_kernel(pre: Preprocessing, augmentation: Augmentation, rng: np.random.Generator) -> Kernel:
    """The interpolation of a training view: the network's, or a random one, as timm's "random"."""
    return ("bilinear", "bicubic")[rng.integers(2)] if augmentation.random_kernel else pre.kernel


def _padded(image: Image.Image, box: Box) -> tuple[Image.Image, Box]:
    """Pad the image with black so that `box` is inside; also returns the box in the result."""
    (w, h), (left, top, right, bottom) = image.size, box
    outside = math.ceil(max(-left, -top, right - w, bottom - h, 0))
    if (w + 2 * outside) * (h + 2 * outside) > MAX_PIXELS and outside:
        # for a long and thin image this would be many times its pixels
        image, box = _reduced(image, box)
        left, top = math.floor(box[0]), math.floor(box[1])
        image = image.crop((left, top, math.ceil(box[2]), math.ceil(box[3])))
        return image, (box[0] - left, box[1] - top, box[2] - left, box[3] - top)
    if outside:
        image = ImageOps.expand(image, outside)
    return image, (left + outside, top + outside, right + outside, bottom + outside)


def _reduced(image: Image.Image, box: Box) -> tuple[Image.Image, Box]:
    """The part inside `box`, reduced by a whole factor so that the box has few pixels."""
    left, top, right, bottom = box
    factor = math.ceil(math.sqrt((right - left) * (bottom - top) / MAX_PIXELS))
    x, y = max(0, math.floor(left)), max(0, math.floor(top))
    inside = (x, y, min(image.width, math.ceil(right)), min(image.height, math.ceil(bottom)))
    small = image.crop(inside).reduce(factor)
    left, right = (left - x) / factor, (right - x) / factor
    top, bottom = (top - y) / factor, (bottom - y) / factor
    return small, (left, top, right, bottom)


def pad_to(
    image: Image.Image, size: Size, pre: Preprocessing, at: tuple[int, int] = (0, 0)
) -> Image.Image:
    """The image on a background of `size` in the mean colour, with its corner `at`."""
    whole = Image.new(image.mode, size, pre.fill if pre.channels > 1 else pre.fill[0])
    whole.paste(image, at)
    return whole


def _resized(image: Image.Image, size: Size, pre: Preprocessing, box: Box) -> Image.Image:
    return in_mode(image, pre.channels).resize(size, KERNELS[pre.kernel], box)


def in_mode(image: Image.Image, channels: int) -> Image.Image:
    """A decoded image as "L" (1 channel) or "RGB" (3)."""
    if image.mode not in ("L", "RGB"):
        raise ValueError(f"an image of mode {image.mode!r}: decode() gives 'L' or 'RGB'")
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _pixels(image: Image.Image) -> np.ndarray:
    pixels = np.array(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels
