"""Which augmentation policies are there? RandAugment, AutoAugment, TrivialAugment, Cutout, erasing.

A policy is a function of an image and a random generator. All but random erasing draw a list of
operations with their values, so that OpenCV can apply the same list with its own operations.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from fullstride.data.transforms import image_ops as op
from fullstride.data.transforms.levels import (
    INCREASING,
    MAX_LEVEL,
    PAPER,
    RULES,
    TIMM,
    TIMM_INCREASING,
    TIMM_MAX_LEVEL,
    TPU,
    UNCHANGED,
    WIDE,
    Operation,
    Step,
)
from fullstride.nets.preprocessing import IMAGENET_MEAN, IMAGENET_STD

MEAN, STD = (255 * np.array(each, np.float32) for each in (IMAGENET_MEAN, IMAGENET_STD))
# The operations and rules of each form of RandAugment, see levels.py: as they are, and increasing.
FORMS = {"relative": (RULES, INCREASING), "tpu": (TPU, TPU), "timm": (TIMM, TIMM_INCREASING)}
RandForm = Literal["relative", "tpu", "timm"]
WIDE_BINS = 31  # strengths in TrivialAugment's wide space

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
    """`layers` operations with equal probability, all at one level (arXiv:1909.13719)."""

    form: RandForm = "relative"  # which operations, and what their levels mean: see levels.py
    layers: int = 2
    magnitude: float = 10  # level from 0 to 30; 10 is full
    increasing: bool = False  # the strength of every operation rises with the level
    magnitude_std: float = 0.0  # of the level, drawn for each operation; 0: constant
    probability: float = 1.0  # of each chosen operation; timm's is 0.5

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form {self.form!r} of RandAugment: use {', '.join(FORMS)}")
        if self.form == "tpu" and self.increasing:
            raise ValueError(
                "form 'tpu' of RandAugment has no increasing operations: leave rand_increasing "
                "out, or use the form 'timm'"
            )
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
        rules = FORMS[self.form][self.increasing]
        highest = TIMM_MAX_LEVEL if self.form == "timm" else MAX_LEVEL
        steps = []
        for choice in rng.integers(len(rules), size=self.layers):
            if self.probability < 1 and rng.random() >= self.probability:
                continue
            level = min(self.magnitude, highest)
            if self.magnitude_std:
                level = min(max(rng.normal(self.magnitude, self.magnitude_std), 0), highest)
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
class TrivialAugment(Policy):
    """One of 14 operations, at one of 31 strengths with equal probability (arXiv:2103.10158)."""

    def draw(self, rng: np.random.Generator) -> list[Step]:
        operation = tuple(WIDE)[rng.integers(len(WIDE))]
        has_sign, values = WIDE[operation]
        strength = rng.integers(WIDE_BINS) / (WIDE_BINS - 1)
        sign = -1 if rng.random() < 0.5 and has_sign else 1
        return [] if operation is UNCHANGED else [(operation, values(sign * strength))]


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
    """A rectangle of noise or of the mean (arXiv:1708.04896; ranges of timm and torchvision).

    timm's mode "pixel" draws normal noise for normalised inputs. Here it becomes bytes with
    ImageNet's mean and deviation; values outside of 0..255, about 3 %, are clipped. torchvision's
    default is 0 for normalised inputs, which is the mean.
    """

    probability: float
    fill: Literal["noise", "mean"] = "noise"
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
                mean, std = (MEAN, STD) if c == 3 else (MEAN.mean(), STD.mean())
                color = np.round(mean)
                if self.fill == "noise":
                    noise = rng.standard_normal((height, width, c), np.float32)
                    color = np.clip(noise * std + mean, 0, 255)
                pixels[top : top + height, left : left + width] = color
                return
