"""Augmentation policies: RandAugment, AutoAugment, TrivialAugment, Cutout and random erasing.

All policies except random erasing draw a list of operations with their values, which are applied
to an image, Pillow's or an array.

The level is the strength of an operation: 0 is the identity for most operations, 10 is TensorFlow's
maximum, 30 is ours. Values follow from levels by TensorFlow's rules (tensorflow/tpu,
models/official/efficientnet/autoaugment.py), which ResNet-RS was trained with, unless a rule names
another source. Some operations weaken as the level rises: posterize keeps 4 bits at level 10 and 1
bit at 2.5. In `INCREASING` they strengthen, by timm's rules (timm/data/auto_augment.py, "inc1").

RandAugment has three forms:

- `relative`: TensorFlow's 16 operations, with distances in shares of the side.
- `tpu`: as TensorFlow's code computes. Distances are in pixels at any resolution, the threshold
  of solarize is a uint8, and contrast is relative to the number of pixels.
- `timm`: 15 operations, without Cutout. Levels are at most 10, empty pixels get ImageNet's mean,
  and each geometric operation draws bilinear or bicubic interpolation.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from fullstride.data.transforms import image_ops as op
from fullstride.data.transforms.image_ops import Sampling
from fullstride.data.transforms.settings import MAX_LEVEL, Augmentation, Fill
from fullstride.nets.preprocessing import IMAGENET_MEAN, IMAGENET_STD

TIMM_MAX_LEVEL = 10
MEAN, STD = (255 * np.array(each, np.float32) for each in (IMAGENET_MEAN, IMAGENET_STD))
Picture = TypeVar("Picture", Image.Image, np.ndarray)
Operation = Callable[..., Any]
Step = tuple[Operation, tuple[Any, ...]]
Rule = Callable[[float, np.random.Generator], tuple[Any, ...]]  # level -> values of an operation


# ---- rules from levels to values


def _value(of_level: Callable[[float], float]) -> Rule:
    return lambda level, rng: (of_level(level),)


def _signed(full: float) -> Rule:
    """`full` at level 10, with a random sign."""

    def rule(level: float, rng: np.random.Generator) -> tuple[float, ...]:
        value = full * level / 10
        return (value if rng.random() < 0.5 else -value,)

    return rule


def _placed(size: Callable[[float], float]) -> Rule:
    """A size that depends on the level, and a random position."""
    return lambda level, rng: (size(level), rng.random(), rng.random())


def _rising_factor(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    """1 plus or minus 0.9 at level 10, at least 0.1: timm's rule."""
    change = 0.9 * level / 10
    return (1 + change if rng.random() < 0.5 else max(0.1, 1 - change),)


def _interpolated(rule: Rule) -> Rule:
    """`rule` and timm's fill, with bilinear or bicubic interpolation."""
    return lambda level, rng: (*rule(level, rng), TIMM_SAMPLINGS[rng.integers(2)])


# from 0.1 to 1.9 at level 10; around level 5 nothing changes
_factor = _value(lambda level: 0.1 + 1.8 * level / 10)
# In TensorFlow's order. Translation at level 10 is TensorFlow's 100 pixels of 224, as a share.
RULES: dict[Operation, Rule] = {
    **dict.fromkeys((op.auto_contrast, op.equalize, op.invert), lambda level, rng: ()),
    op.rotate: _signed(30),
    # 4 bits at level 10, more above; at least 1, where TensorFlow's rule gives 0
    op.posterize: _value(lambda level: min(8, max(1, int(4 * level / 10)))),
    # 256, which changes nothing, from level 10
    op.solarize: _value(lambda level: min(256, int(256 * level / 10))),
    **dict.fromkeys((op.colour, op.contrast, op.brightness, op.sharpness), _factor),
    **dict.fromkeys((op.shear_x, op.shear_y), _signed(0.3)),
    **dict.fromkeys((op.translate_x, op.translate_y), _signed(100 / 224)),
    op.cutout: _placed(lambda level: 80 / 224 * level / 10),  # TensorFlow's 80 pixels of 224
    op.solarize_add: _value(lambda level: int(110 * level / 10)),
}
RISING: dict[Operation, Rule] = {  # timm's
    # 4 bits at level 0 and 1 from level 7.5: Pillow refuses timm's 0 bits at level 10
    op.posterize: _value(lambda level: max(1, 4 - int(4 * level / 10))),
    # 256 at level 0, and 0, which inverts all values, from level 10
    op.solarize: _value(lambda level: 256 - min(256, int(256 * level / 10))),
    **dict.fromkeys((op.colour, op.contrast, op.brightness, op.sharpness), _rising_factor),
}
INCREASING = RULES | RISING
# 4 to 8 bits, the range of AutoAugment's Table 6 (arXiv:1805.09501)
PAPER = RULES | {op.posterize: _value(lambda level: min(8, 4 + int(4 * level / 10)))}

# The TPU code's computation: distances in pixels, and `op.contrast_to_size`.
_TPU: dict[Operation, tuple[Operation, Rule]] = {
    # as a uint8: 256 becomes 0, which inverts all values, 384 becomes 128
    op.solarize: (op.solarize, _value(lambda level: int(256 * level / 10) % 256)),
    op.contrast: (op.contrast_to_size, _factor),
    op.translate_x: (op.shift_x, _signed(100)),
    op.translate_y: (op.shift_y, _signed(100)),
    # 80 pixels at level 10, half of them to each side of the center
    op.cutout: (op.cutout_pixels, _placed(lambda level: int(40 * level / 10))),
}
TPU: dict[Operation, Rule] = dict(_TPU.get(each, (each, rule)) for each, rule in RULES.items())

# timm's fill is ImageNet's mean in bytes, and its translation 0.45 of the side at level 10.
TIMM_SAMPLINGS = tuple(Sampling(kernel, (124, 116, 104)) for kernel in ("bilinear", "bicubic"))
TIMM: dict[Operation, Rule] = {
    **{operation: rule for operation, rule in RULES.items() if operation is not op.cutout},
    op.rotate: _interpolated(_signed(30)),
    **dict.fromkeys((op.shear_x, op.shear_y), _interpolated(_signed(0.3))),
    **dict.fromkeys((op.translate_x, op.translate_y), _interpolated(_signed(0.45))),
}
TIMM_INCREASING = TIMM | RISING
# The operations and rules of each form of RandAugment: the usual ones, and the increasing ones.
FORMS = {"relative": (RULES, INCREASING), "tpu": (TPU, TPU), "timm": (TIMM, TIMM_INCREASING)}

# TrivialAugment's wide space (arXiv:2103.10158) as in torchvision, whose recipes fill with black
# and interpolate bilinearly: operation -> (whether the sign is random, values by strength 0 to 1).
BLACK = Sampling("bilinear", (0, 0, 0))
Strength = Callable[[float], tuple[Any, ...]]
WIDE_BINS = 31  # strengths
UNCHANGED: Operation = Image.Image.copy
WIDE: dict[Operation, tuple[bool, Strength]] = {
    UNCHANGED: (False, lambda strength: ()),
    **dict.fromkeys((op.shear_x, op.shear_y), (True, lambda strength: (0.99 * strength, BLACK))),
    **dict.fromkeys((op.shift_x, op.shift_y), (True, lambda strength: (int(32 * strength), BLACK))),
    op.rotate: (True, lambda strength: (135 * strength, BLACK)),
    **dict.fromkeys(
        (op.brightness, op.colour, op.contrast, op.sharpness),
        (True, lambda strength: (1 + 0.99 * strength,)),
    ),
    op.posterize: (False, lambda strength: (8 - round(6 * strength),)),
    op.solarize: (False, lambda strength: (math.ceil(255 - 255 * strength),)),
    **dict.fromkeys((op.auto_contrast, op.equalize), (False, lambda strength: ())),
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


# ---- policies: which operations an image gets, with their values


def augmented(image: Picture, augmentation: Augmentation, rng: np.random.Generator) -> Picture:
    """The image after all active policies, without random erasing, which comes last."""
    for operation, values in draw_steps(augmentation, rng):
        image = operation(image, *values)
    return image


def draw_steps(augmentation: Augmentation, rng: np.random.Generator) -> list[Step]:
    """The operations of all active policies, in order."""
    steps: list[Step] = []
    if augmentation.auto_augment:
        steps += auto_augment(rng)
    if augmentation.trivial_augment:
        steps += trivial_augment(rng)
    if augmentation.rand_layers:
        steps += rand_augment(augmentation, rng)
    if augmentation.cutout:  # a gray patch with a random center (arXiv:1708.04552)
        steps.append((op.cutout, (augmentation.cutout, rng.random(), rng.random())))
    return steps


def rand_augment(augmentation: Augmentation, rng: np.random.Generator) -> list[Step]:
    """`rand_layers` operations with equal probability, all at one level (arXiv:1909.13719)."""
    rules = FORMS[augmentation.rand_form][augmentation.rand_increasing]
    magnitude, std = augmentation.rand_magnitude, augmentation.rand_std
    highest = TIMM_MAX_LEVEL if augmentation.rand_form == "timm" else MAX_LEVEL
    steps = []
    for choice in rng.integers(len(rules), size=augmentation.rand_layers):
        if augmentation.rand_probability < 1 and rng.random() >= augmentation.rand_probability:
            continue
        level = min(magnitude, highest)
        if std:
            level = min(max(rng.normal(magnitude, std), 0), highest)
        operation = tuple(rules)[choice]
        steps.append((operation, rules[operation](level, rng)))
    return steps


def auto_augment(rng: np.random.Generator) -> list[Step]:
    """One of the 25 pairs of operations searched on ImageNet (arXiv:1805.09501).

    Each operation has its own probability. Levels are tenths of the ranges in the paper's Table 6,
    in which posterize and solarize weaken as the level rises.
    """
    pair = IMAGENET[rng.integers(len(IMAGENET))]
    return [
        (operation, PAPER[operation](level, rng))
        for operation, probability, level in pair
        if rng.random() < probability
    ]


def trivial_augment(rng: np.random.Generator) -> list[Step]:
    """One of 14 operations, at one of 31 strengths with equal probability (arXiv:2103.10158)."""
    operation = tuple(WIDE)[rng.integers(len(WIDE))]
    has_sign, values = WIDE[operation]
    strength = rng.integers(WIDE_BINS) / (WIDE_BINS - 1)
    sign = -1 if rng.random() < 0.5 and has_sign else 1
    return [] if operation is UNCHANGED else [(operation, values(sign * strength))]


# ---- random erasing, of arrays

ERASED_AREA = (0.02, 1 / 3)  # least and largest share of the image
ERASED_RATIO = (0.3, 3.3)  # least and largest height / width; the logarithm is drawn uniformly


def erase_at_random(
    pixels: np.ndarray, augmentation: Augmentation, rng: np.random.Generator
) -> None:
    if augmentation.random_erasing_prob and rng.random() < augmentation.random_erasing_prob:
        erase(pixels, augmentation.random_erasing_fill, rng)


def erase(pixels: np.ndarray, fill: Fill, rng: np.random.Generator) -> None:
    """Replace a random rectangle of uint8 (H, W, C) by noise or the mean, in place.

    The source is arXiv:1708.04896, with the ranges of timm and torchvision. timm's mode "pixel"
    draws normal noise for normalised inputs. Here it becomes bytes with ImageNet's mean and
    deviation; values outside of 0..255, about 3 %, are clipped. torchvision's default is 0 for
    normalised inputs, which is the mean.
    """
    h, w, c = pixels.shape
    for _ in range(10):  # attempts, as in timm, until a shape fits
        area = h * w * rng.uniform(*ERASED_AREA)
        least, largest = map(math.log, ERASED_RATIO)
        ratio = math.exp(rng.uniform(least, largest))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < height < h and 0 < width < w:
            top, left = rng.integers(h - height + 1), rng.integers(w - width + 1)
            mean, std = (MEAN, STD) if c == 3 else (MEAN.mean(), STD.mean())
            color = np.round(mean)
            if fill == "noise":
                noise = rng.standard_normal((height, width, c), np.float32)
                color = np.clip(noise * std + mean, 0, 255)
            pixels[top : top + height, left : left + width] = color
            return
