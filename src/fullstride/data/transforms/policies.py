"""Which augmentation policies are there? RandAugment, AutoAugment, Cutout and random erasing.

A policy is a function of an image and a random generator. The first three draw a list of
operations with their values, so that OpenCV can apply the same list with its own operations.

The level is the strength of an operation: 0 is the identity for most, 10 is TensorFlow's maximum,
30 is ours. Values follow from levels by TensorFlow's rules, unless a rule names another source
(tensorflow/tpu, models/official/efficientnet/autoaugment.py), since ResNet-RS was trained with
them. Some of these weaken as the level rises: posterize keeps 4 bits at level 10 and 1 bit at 2.5.
`increasing` takes timm's rules for these, which strengthen (timm/data/auto_augment.py, "inc1").
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from fullstride.data.transforms import image_ops as op
from fullstride.nets.preprocessing import IMAGENET_MEAN, IMAGENET_STD

MAX_LEVEL = 30
Operation = Callable[..., Image.Image]
Step = tuple[Operation, tuple[float, ...]]
Rule = Callable[[float, np.random.Generator], tuple[float, ...]]

MEAN, STD = (255 * np.array(each, np.float32) for each in (IMAGENET_MEAN, IMAGENET_STD))


def _nothing(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    return ()


def _signed(full: float) -> Rule:
    """`full` at level 10, with a random sign."""

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
    change = 0.9 * level / 10
    return (1 + change if rng.random() < 0.5 else max(0.1, 1 - change),)


def _bits(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    """4 at level 10, more above; at least 1, where TensorFlow's rule gives 0."""
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
    """256 at level 0, and 0, which inverts all values, from level 10: timm's rule."""
    return (256 - min(256, int(256 * level / 10)),)


def _added(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    return (int(110 * level / 10),)


# In TensorFlow's order. Its translation at level 10 is 100 pixels of 224; here a share of the side.
RULES: dict[Operation, Rule] = {
    op.auto_contrast: _nothing,
    op.equalize: _nothing,
    op.invert: _nothing,
    op.rotate: _signed(30),
    op.posterize: _bits,
    op.solarize: _threshold,
    op.colour: _factor,
    op.contrast: _factor,
    op.brightness: _factor,
    op.sharpness: _factor,
    op.shear_x: _signed(0.3),
    op.shear_y: _signed(0.3),
    op.translate_x: _signed(100 / 224),
    op.translate_y: _signed(100 / 224),
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

SubPolicy = tuple[Operation, float, float]  # operation, probability, level
# AutoAugment's Table 9, for ImageNet (arXiv:1805.09501); 0 for operations without a level.
IMAGENET: tuple[tuple[SubPolicy, SubPolicy], ...] = (
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


class Policy:
    """A policy that applies the operations of `draw` in order."""

    def draw(self, rng: np.random.Generator) -> list[Step]:
        raise NotImplementedError

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        for operation, values in self.draw(rng):
            image = operation(image, *values)
        return image


@dataclass(frozen=True, kw_only=True)
class RandAugment(Policy):
    """`layers` operations of 16 with equal probability, all at one level (arXiv:1909.13719)."""

    layers: int = 2
    magnitude: float = 10  # level from 0 to 30; 10 is full
    increasing: bool = False  # the strength of every operation rises with the level
    magnitude_std: float = 0.0  # of the level, drawn for each operation; 0: constant
    probability: float = 1.0  # of each chosen operation; timm's is 0.5

    def __post_init__(self) -> None:
        if self.layers < 0:
            raise ValueError(f"{self.layers} layers of RandAugment: use 0 or more")
        if not 0 <= self.magnitude <= MAX_LEVEL:
            raise ValueError(
                f"magnitude {self.magnitude} of RandAugment: use a level from 0 to "
                f"{MAX_LEVEL}; 10 is full"
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
                level = min(max(rng.normal(level, self.magnitude_std), 0), MAX_LEVEL)
            operation = tuple(rules)[choice]
            steps.append((operation, rules[operation](level, rng)))
        return steps


@dataclass(frozen=True)
class AutoAugment(Policy):
    """One of the 25 pairs of operations searched on ImageNet (arXiv:1805.09501).

    Each operation has its own probability. Levels are tenths of the ranges in the paper's Table 6,
    in which posterize and solarize weaken as the level rises.
    """

    def draw(self, rng: np.random.Generator) -> list[Step]:
        pair = IMAGENET[rng.integers(len(IMAGENET))]
        return [
            (operation, PAPER[operation](level, rng))
            for operation, probability, level in pair
            if rng.random() < probability
        ]


@dataclass(frozen=True)
class Cutout(Policy):
    """A gray patch with a random center (arXiv:1708.04552)."""

    side: float  # of the patch / that of the image

    def __post_init__(self) -> None:
        if not 0 <= self.side <= 1:
            raise ValueError(f"cutout of {self.side}: use a share of the side from 0 to 1")

    def draw(self, rng: np.random.Generator) -> list[Step]:
        return [(op.cutout, (self.side, rng.random(), rng.random()))]


@dataclass(frozen=True, kw_only=True)
class RandomErasing:
    """A rectangle of noise, drawn for each pixel (arXiv:1708.04896; timm's ranges, mode "pixel").

    timm draws normal noise for normalised inputs. Here it becomes bytes with ImageNet's mean and
    deviation; values outside of 0..255, about 3 %, are clipped.
    """

    probability: float
    area: tuple[float, float] = (0.02, 1 / 3)  # shares of the image
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

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        pixels = np.array(image)
        self.erase(pixels if pixels.ndim == 3 else pixels[:, :, None], rng)
        return Image.fromarray(pixels)

    def erase(self, pixels: np.ndarray, rng: np.random.Generator) -> None:
        """The same in place, for uint8 (H, W, C)."""
        if rng.random() >= self.probability:
            return
        h, w, c = pixels.shape
        for _ in range(10):  # attempts, as in timm, until a shape fits
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
