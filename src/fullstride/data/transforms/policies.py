"""What else may chance do to a training picture? RandAugment, AutoAugment, Cutout and random erasing.

A policy is called with a picture and a generator, and draws from nothing else. What the first three draw is a list of
steps, operations with their values, so that another engine can take the same steps with its own operations.

A level says how strong: 0 is nothing for most operations, 10 is what TensorFlow calls full, and 30 is the end. The
rules that make a value of a level are TensorFlow's where nothing else is said (tensorflow/tpu,
models/official/efficientnet/autoaugment.py), because ResNet-RS was trained with them. Some of those do less as the
level rises: at level 10 posterize keeps 4 bits, at 2.5 it keeps 1. `increasing` takes timm's rules for these, which
rise throughout (timm/data/auto_augment.py, "inc1").
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from fullstride.data.transforms import image_ops as op
from fullstride.nets.preprocessing import IMAGENET_MEAN, IMAGENET_STD

MOST = 30  # the highest level
Operation = Callable[..., Image.Image]
Step = tuple[Operation, tuple[float, ...]]
Rule = Callable[[float, np.random.Generator], tuple[float, ...]]

MEAN, STD = (255 * np.array(each, np.float32) for each in (IMAGENET_MEAN, IMAGENET_STD))


def _nothing(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    return ()


def _either_way(full: float) -> Rule:
    """`full` at level 10, with a sign thrown like a coin."""

    def rule(level: float, rng: np.random.Generator) -> tuple[float, ...]:
        value = full * level / 10
        return (value if rng.random() < 0.5 else -value,)

    return rule


def _square(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    """TensorFlow's 80 pixels of 224 at level 10, anywhere."""
    return 80 / 224 * level / 10, rng.random(), rng.random()


def _factor(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    """From 0.1 to 1.9 at level 10; around level 5 nothing changes."""
    return (0.1 + 1.8 * level / 10,)


def _rising_factor(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    """1 plus or minus 0.9 at level 10, at least 0.1: timm's rule."""
    away = 0.9 * level / 10
    return (1 + away if rng.random() < 0.5 else max(0.1, 1 - away),)


def _bits(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    """4 at level 10, more above; at least 1, where TensorFlow's rule would leave none."""
    return (min(8, max(1, int(4 * level / 10))),)


def _rising_bits(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    """4 at level 0 and 1 from level 7.5: timm's rule, whose 0 bits at level 10 Pillow refuses."""
    return (max(1, 4 - int(4 * level / 10)),)


def _paper_bits(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    """4 to 8, the range of AutoAugment's Table 6 (arXiv:1805.09501)."""
    return (min(8, 4 + int(4 * level / 10)),)


def _threshold(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    """256, which changes nothing, from level 10."""
    return (min(256, int(256 * level / 10)),)


def _falling_threshold(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    """256 at level 0, and 0, which inverts all, from level 10: timm's rule."""
    return (256 - min(256, int(256 * level / 10)),)


def _added(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    return (int(110 * level / 10),)


# In TensorFlow's order. Its translations are of 100 pixels at level 10, for pictures of 224; here a share of the side.
RULES: dict[Operation, Rule] = {
    op.auto_contrast: _nothing,
    op.equalize: _nothing,
    op.invert: _nothing,
    op.rotate: _either_way(30),
    op.posterize: _bits,
    op.solarize: _threshold,
    op.colour: _factor,
    op.contrast: _factor,
    op.brightness: _factor,
    op.sharpness: _factor,
    op.shear_x: _either_way(0.3),
    op.shear_y: _either_way(0.3),
    op.translate_x: _either_way(100 / 224),
    op.translate_y: _either_way(100 / 224),
    op.cutout: _square,
    op.solarize_add: _added,
}
INCREASING = RULES | {
    op.posterize: _rising_bits,
    op.solarize: _falling_threshold,
    op.colour: _rising_factor,
    op.contrast: _rising_factor,
    op.brightness: _rising_factor,
    op.sharpness: _rising_factor,
}

Part = tuple[Operation, float, float]  # with its probability and its level
# AutoAugment's Table 9, for ImageNet (arXiv:1805.09501); the level of an operation that has none is left at 0.
IMAGENET: tuple[tuple[Part, Part], ...] = (
    ((op.posterize, 0.4, 8), (op.rotate, 0.6, 9)),
    ((op.solarize, 0.6, 5), (op.auto_contrast, 0.6, 0)),
    ((op.equalize, 0.8, 0), (op.equalize, 0.6, 0)),
    ((op.posterize, 0.6, 7), (op.posterize, 0.6, 6)),
    ((op.equalize, 0.4, 0), (op.solarize, 0.2, 4)),
    ((op.equalize, 0.4, 0), (op.rotate, 0.8, 8)),
    ((op.solarize, 0.6, 3), (op.equalize, 0.6, 0)),
    ((op.posterize, 0.8, 5), (op.equalize, 1.0, 0)),
    ((op.rotate, 0.2, 3), (op.solarize, 0.6, 8)),
    ((op.equalize, 0.6, 0), (op.posterize, 0.4, 6)),
    ((op.rotate, 0.8, 8), (op.colour, 0.4, 0)),
    ((op.rotate, 0.4, 9), (op.equalize, 0.6, 0)),
    ((op.equalize, 0.0, 0), (op.equalize, 0.8, 0)),
    ((op.invert, 0.6, 0), (op.equalize, 1.0, 0)),
    ((op.colour, 0.6, 4), (op.contrast, 1.0, 8)),
    ((op.rotate, 0.8, 8), (op.colour, 1.0, 2)),
    ((op.colour, 0.8, 8), (op.solarize, 0.8, 7)),
    ((op.sharpness, 0.4, 7), (op.invert, 0.6, 0)),
    ((op.shear_x, 0.6, 5), (op.equalize, 1.0, 0)),
    ((op.colour, 0.4, 0), (op.equalize, 0.6, 0)),
    ((op.equalize, 0.4, 0), (op.solarize, 0.2, 4)),
    ((op.solarize, 0.6, 5), (op.auto_contrast, 0.6, 0)),
    ((op.invert, 0.6, 0), (op.equalize, 1.0, 0)),
    ((op.colour, 0.6, 4), (op.contrast, 1.0, 8)),
    ((op.equalize, 0.8, 0), (op.equalize, 0.6, 0)),
)
PAPER = RULES | {op.posterize: _paper_bits}


class Steps:
    """A policy that is a list of steps: what `draw` gives, one after the other."""

    def draw(self, rng: np.random.Generator) -> list[Step]:
        raise NotImplementedError

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        for operation, values in self.draw(rng):
            picture = operation(picture, *values)
        return picture


@dataclass(frozen=True, kw_only=True)
class RandAugment(Steps):
    """`layers` operations of 16, each as likely as the others, all at one level (arXiv:1909.13719)."""

    layers: int = 2
    magnitude: float = 10  # level from 0 to 30; 10 is full
    increasing: bool = False  # every operation does more as the level rises
    magnitude_std: float = 0.0  # of a level drawn anew for each operation; 0: always the same
    probability: float = 1.0  # of each operation that was chosen; timm's is 0.5

    def __post_init__(self) -> None:
        if self.layers < 0:
            raise ValueError(f"{self.layers} layers of RandAugment: use 0 or more")
        if not 0 <= self.magnitude <= MOST:
            raise ValueError(
                f"magnitude {self.magnitude} of RandAugment: use a level from 0 to {MOST}; 10 is full"
            )
        if not 0 <= self.magnitude_std < math.inf:
            raise ValueError(
                f"magnitude_std {self.magnitude_std} of RandAugment: use a level of 0 or more"
            )
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability {self.probability} of RandAugment: use one from 0 to 1")

    def draw(self, rng: np.random.Generator) -> list[Step]:
        rules = INCREASING if self.increasing else RULES
        steps = []
        for choice in rng.integers(len(rules), size=self.layers):
            if self.probability < 1 and rng.random() >= self.probability:
                continue
            level = self.magnitude
            if self.magnitude_std:
                level = min(max(rng.normal(level, self.magnitude_std), 0), MOST)
            operation = tuple(rules)[choice]
            steps.append((operation, rules[operation](level, rng)))
        return steps


@dataclass(frozen=True)
class AutoAugment(Steps):
    """One of the 25 pairs that a search found for ImageNet, each half with its own probability (arXiv:1805.09501).

    Levels are tenths of the ranges in the paper's Table 6, whose posterize and solarize do less as the level rises.
    """

    def draw(self, rng: np.random.Generator) -> list[Step]:
        pair = IMAGENET[rng.integers(len(IMAGENET))]
        return [
            (which, PAPER[which](level, rng))
            for which, likely, level in pair
            if rng.random() < likely
        ]


@dataclass(frozen=True)
class Cutout(Steps):
    """A gray patch, its middle anywhere (arXiv:1708.04552)."""

    side: float  # of the patch, as a share of the picture's

    def __post_init__(self) -> None:
        if not 0 <= self.side <= 1:
            raise ValueError(f"cutout of {self.side}: use a share of the side from 0 to 1")

    def draw(self, rng: np.random.Generator) -> list[Step]:
        return [(op.cutout, (self.side, rng.random(), rng.random()))]


@dataclass(frozen=True, kw_only=True)
class RandomErasing:
    """A rectangle of noise, another draw for each pixel (arXiv:1708.04896; ranges and "pixel" mode are timm's).

    timm draws normal noise where inputs are normalised. Here it becomes bytes with ImageNet's mean and deviation, and
    what falls outside of 0..255, about 3 % of it, is cut off.
    """

    probability: float
    area: tuple[float, float] = (0.02, 1 / 3)  # shares of the picture
    ratio: tuple[float, float] = (0.3, 3.3)  # height / width, drawn by its logarithm

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(
                f"random_erasing_prob {self.probability}: use a probability from 0 to 1"
            )
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(
                f"area {self.area} to erase: use two rising shares above 0 and up to 1"
            )
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise ValueError(
                f"ratio {self.ratio} to erase: use two rising numbers above 0, such as (0.3, 3.3)"
            )

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        pixels = np.array(picture)
        self.erase(pixels if pixels.ndim == 3 else pixels[:, :, None], rng)
        return Image.fromarray(pixels)

    def erase(self, pixels: np.ndarray, rng: np.random.Generator) -> None:
        """The same for uint8 (H, W, C) in place."""
        if rng.random() >= self.probability:
            return
        h, w, c = pixels.shape
        for _ in range(10):  # tries, as in timm; a shape that does not fit is drawn again
            area = h * w * rng.uniform(*self.area)
            ratio = math.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < height < h and 0 < width < w:
                top, left = rng.integers(h - height + 1), rng.integers(w - width + 1)
                noise = rng.standard_normal((height, width, c), np.float32)
                mean, std = (MEAN, STD) if c == 3 else (MEAN.mean(), STD.mean())
                pixels[top : top + height, left : left + width] = np.clip(
                    noise * std + mean, 0, 255
                )
                return
