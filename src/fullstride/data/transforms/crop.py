"""Which pixels of a picture does the network see? A random part while learning, the middle when it counts."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fullstride.data.transforms.policies import (
    AutoAugment,
    Cutout,
    RandAugment,
    RandomErasing,
    Steps,
)
from fullstride.nets.preprocessing import Preprocessing

KERNELS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
MOST_PIXELS = (
    64 * 2**20
)  # a resized picture above this, from a very long and thin one, is never made whole


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What chance may do to a training picture: cut out a part, bend it a little, turn it, flip it.

    Then what the policies do, in the order of the fields: AutoAugment, RandAugment, Cutout, erasing.
    """

    scale: tuple[float, float] = (
        0.08,
        1.0,
    )  # the part's share of the area; above 1 the picture lies on black
    ratio: tuple[float, float] = (
        3 / 4,
        4 / 3,
    )  # the part's width / height, before it becomes a square
    rotation_degrees: float = 0.0  # degrees, at most, to either side; the corners become black
    hflip_prob: float = 0.5  # probability of a flip left to right
    auto_augment: bool = False  # one of AutoAugment's 25 pairs of operations
    rand_layers: int = 0  # operations of RandAugment; 0: off
    rand_magnitude: float = 10  # their level from 0 to 30; 10 is full
    rand_increasing: bool = False  # each does more as the level rises (timm's "inc1")
    rand_std: float = (
        0.0  # of a level drawn anew for each operation (timm's "mstd"); 0: always the same
    )
    rand_probability: float = 1.0  # of each chosen operation; timm's is 0.5
    cutout: float = 0.0  # a gray patch's side as a share of the picture's; 0: off
    random_erasing_prob: float = 0.0  # probability of a rectangle of noise

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 4:
            raise ValueError(
                f"scale {self.scale}: use two rising shares of the area, above 0 and up to 4"
            )
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise ValueError(
                f"ratio {self.ratio}: use two rising numbers above 0, such as (0.75, 1.33)"
            )
        if not 0 <= self.rotation_degrees <= 180:
            raise ValueError(f"rotation_degrees {self.rotation_degrees}: use degrees from 0 to 180")
        if not 0 <= self.hflip_prob <= 1:
            raise ValueError(f"hflip_prob {self.hflip_prob}: use a probability from 0 to 1")
        _ = (
            self._rand_augment(),
            Cutout(self.cutout),
            self.erasing(),
        )  # they refuse what they cannot do

    def steps(self) -> list[Steps]:
        """The policies that are on, first to last, without erasing, which works on pixels and comes at the end."""
        steps: list[Steps] = []
        if self.auto_augment:
            steps.append(AutoAugment())
        if self.rand_layers:
            steps.append(self._rand_augment())
        if self.cutout:
            steps.append(Cutout(self.cutout))
        return steps

    def erasing(self) -> RandomErasing:
        return RandomErasing(probability=self.random_erasing_prob)

    def _rand_augment(self) -> RandAugment:
        return RandAugment(
            layers=self.rand_layers,
            magnitude=self.rand_magnitude,
            increasing=self.rand_increasing,
            magnitude_std=self.rand_std,
            probability=self.rand_probability,
        )


def train_view(
    picture: Image.Image, pre: Preprocessing, augmentation: Augmentation, rng: np.random.Generator
) -> np.ndarray:
    """A random part, resized to the network's square, turned, flipped, and what the policies do: uint8 (H, W, C)."""
    left, top, right, bottom = random_part(picture.size, augmentation, rng)
    outside = math.ceil(max(-left, -top, right - picture.width, bottom - picture.height, 0))
    if outside:
        picture = ImageOps.expand(picture, outside)
    box = (left + outside, top + outside, right + outside, bottom + outside)
    part = _resized(picture, (pre.resolution, pre.resolution), pre, box)
    if augmentation.rotation_degrees:
        part = part.rotate(
            rng.uniform(-augmentation.rotation_degrees, augmentation.rotation_degrees),
            Image.Resampling.BILINEAR,
        )
    if rng.random() < augmentation.hflip_prob:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for policy in augmentation.steps():
        part = policy(part, rng)
    pixels = _pixels(part)
    if augmentation.random_erasing_prob:
        augmentation.erasing().erase(pixels, rng)
    return pixels


def test_view(picture: Image.Image, pre: Preprocessing) -> np.ndarray:
    """The whole picture bent to a square, or its middle in true proportions: uint8 (H, W, C).

    The middle is torchvision's Resize and CenterCrop, with timm's floor(resolution / crop) as the shorter side.
    """
    side = pre.resolution
    if pre.fit == "squish":
        return _pixels(_resized(picture, (side, side), pre))
    shorter = math.floor(side / pre.crop)
    w, h = picture.size
    new_w, new_h = (shorter, int(shorter * h / w)) if w <= h else (int(shorter * w / h), shorter)
    left, top = round((new_w - side) / 2), round((new_h - side) / 2)
    if new_w * new_h <= MOST_PIXELS:
        return _pixels(
            _resized(picture, (new_w, new_h), pre).crop((left, top, left + side, top + side))
        )
    box = (left * w / new_w, top * h / new_h, (left + side) * w / new_w, (top + side) * h / new_h)
    return _pixels(_resized(picture, (side, side), pre, box))


test_view.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]  # its name makes pytest take it for a test


def to_input(pixels_nhwc: Tensor, pre: Preprocessing) -> Tensor:
    """uint8 (N, H, W, C) -> float32 (N, C, H, W), channels last in memory, on the same device."""

    def per_channel(values: tuple[float, ...]) -> Tensor:
        # not waiting for the copy: waiting would stall a GPU once per batch
        return torch.tensor(values).view(-1, 1, 1).to(pixels_nhwc.device, non_blocking=True)

    x = pixels_nhwc.permute(0, 3, 1, 2).to(torch.float32)
    # On a GPU, by 255 alone would be a product with its reciprocal, and some values would differ in the last bit.
    return x.div_(per_channel((255.0,))).sub_(per_channel(pre.mean)).div_(per_channel(pre.std))


def random_part(
    size: tuple[int, int], augmentation: Augmentation, rng: np.random.Generator
) -> tuple[float, float, float, float]:
    """(left, top, right, bottom): torchvision's RandomResizedCrop, but of fractions of pixels.

    Whole pixels would leave small pictures with a handful of different parts. A part that is larger than the
    picture contains it.
    """
    w, h = size
    (least, most), (low, high) = augmentation.scale, augmentation.ratio
    for _ in range(10):
        area = w * h * rng.uniform(least, most)
        ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
        width, height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if most > 1 or (width <= w and height <= h):
            left, top = (free * rng.random() for free in (w - width, h - height))
            right, bottom = left + width, top + height
            # rounding may not reach over the border, where Pillow refuses to look
            return (
                left,
                top,
                min(right, w) if width <= w else right,
                min(bottom, h) if height <= h else bottom,
            )
    width, height = min(w, h * high), min(h, w / low)  # the largest middle part
    return (w - width) / 2, (h - height) / 2, (w + width) / 2, (h + height) / 2


def _resized(
    picture: Image.Image,
    size: tuple[int, int],
    pre: Preprocessing,
    box: tuple[float, float, float, float] | None = None,
) -> Image.Image:
    return in_mode(picture, pre.channels).resize(size, KERNELS[pre.kernel], box)


def in_mode(picture: Image.Image, channels: int) -> Image.Image:
    """A decoded picture as "L" (1 channel) or "RGB" (3)."""
    if picture.mode not in ("L", "RGB"):
        raise ValueError(f"a picture of mode {picture.mode!r}: decode() gives 'L' or 'RGB'")
    mode = "L" if channels == 1 else "RGB"
    return picture if picture.mode == mode else picture.convert(mode)


def _pixels(picture: Image.Image) -> np.ndarray:
    pixels = np.array(picture)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels
