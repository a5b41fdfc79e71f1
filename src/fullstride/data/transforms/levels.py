"""What does the level of an augmentation operation mean? Rules from levels to its values.

The level is the strength of an operation: 0 is the identity for most, 10 is TensorFlow's maximum,
30 is ours. Values follow from levels by TensorFlow's rules, unless a rule names another source
(tensorflow/tpu, models/official/efficientnet/autoaugment.py), since ResNet-RS was trained with
them. Some of these weaken as the level rises: posterize keeps 4 bits at level 10 and 1 bit at 2.5.
Those of `INCREASING` strengthen, by timm's rules (timm/data/auto_augment.py, "inc1").

RandAugment has three forms:

- `relative`: TensorFlow's 16 operations, with distances in shares of the side.
- `tpu`: what TensorFlow's code computes. Distances are in pixels at any resolution, the threshold
  of solarize is a uint8, and contrast is relative to the number of pixels.
- `timm`: 15 operations, without Cutout. Levels are at most 10, empty pixels get ImageNet's mean,
  and each geometric operation draws bilinear or bicubic interpolation.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from fullstride.data.transforms import image_ops as op
from fullstride.data.transforms.image_ops import Sampling

MAX_LEVEL, TIMM_MAX_LEVEL = 30, 10
Operation = Callable[..., Image.Image]
Step = tuple[Operation, tuple[Any, ...]]
Rule = Callable[[float, np.random.Generator], tuple[Any, ...]]


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


def _byte_threshold(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    """As a uint8, as in the TPU code: 256 becomes 0, which inverts all values, 384 becomes 128."""
    return (int(256 * level / 10) % 256,)


def _pixel_square(level: float, rng: np.random.Generator) -> tuple[float, ...]:
    """TensorFlow's 80 pixels at level 10, anywhere; half of them to each side of the center."""
    return int(40 * level / 10), rng.random(), rng.random()


def _interpolated(rule: Rule) -> Rule:
    """`rule` and timm's fill, with bilinear or bicubic interpolation."""

    def sampled(level: float, rng: np.random.Generator) -> tuple[Any, ...]:
        return *rule(level, rng), TIMM_SAMPLINGS[rng.integers(2)]

    return sampled


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
RISING: dict[Operation, Rule] = {
    op.posterize: _rising_bits,
    op.solarize: _falling_threshold,
    op.colour: _rising_factor,
    op.contrast: _rising_factor,
    op.brightness: _rising_factor,
    op.sharpness: _rising_factor,
}
INCREASING = RULES | RISING
# AutoAugment's table of ranges
PAPER = RULES | {op.posterize: _paper_bits}

# What the TPU code computes: `_byte_threshold`, `op.contrast_to_size`, and pixels of any image.
_TPU: dict[Operation, tuple[Operation, Rule]] = {
    op.solarize: (op.solarize, _byte_threshold),
    op.contrast: (op.contrast_to_size, _factor),
    op.translate_x: (op.shift_x, _signed(100)),
    op.translate_y: (op.shift_y, _signed(100)),
    op.cutout: (op.cutout_pixels, _pixel_square),
}
TPU: dict[Operation, Rule] = dict(_TPU.get(each, (each, rule)) for each, rule in RULES.items())

# timm's fill is ImageNet's mean in bytes, and its translation 0.45 of the side at level 10.
TIMM_SAMPLINGS = tuple(Sampling(kernel, (124, 116, 104)) for kernel in ("bilinear", "bicubic"))
TIMM: dict[Operation, Rule] = {
    **{operation: rule for operation, rule in RULES.items() if operation is not op.cutout},
    op.rotate: _interpolated(_signed(30)),
    op.shear_x: _interpolated(_signed(0.3)),
    op.shear_y: _interpolated(_signed(0.3)),
    op.translate_x: _interpolated(_signed(0.45)),
    op.translate_y: _interpolated(_signed(0.45)),
}
TIMM_INCREASING = TIMM | RISING

# TrivialAugment's wide space (arXiv:2103.10158) as in torchvision, whose recipes fill with black
# and interpolate bilinearly: by strength from 0 to 1. Those with a sign get a random one.
BLACK = Sampling("bilinear", (0, 0, 0))
Strength = Callable[[float], tuple[Any, ...]]
UNCHANGED: Operation = Image.Image.copy
WIDE: dict[Operation, tuple[bool, Strength]] = {
    UNCHANGED: (False, lambda strength: ()),
    op.shear_x: (True, lambda strength: (0.99 * strength, BLACK)),
    op.shear_y: (True, lambda strength: (0.99 * strength, BLACK)),
    op.shift_x: (True, lambda strength: (int(32 * strength), BLACK)),
    op.shift_y: (True, lambda strength: (int(32 * strength), BLACK)),
    op.rotate: (True, lambda strength: (135 * strength, BLACK)),
    op.brightness: (True, lambda strength: (1 + 0.99 * strength,)),
    op.colour: (True, lambda strength: (1 + 0.99 * strength,)),
    op.contrast: (True, lambda strength: (1 + 0.99 * strength,)),
    op.sharpness: (True, lambda strength: (1 + 0.99 * strength,)),
    op.posterize: (False, lambda strength: (8 - round(6 * strength),)),
    op.solarize: (False, lambda strength: (math.ceil(255 - 255 * strength),)),
    op.auto_contrast: (False, lambda strength: ()),
    op.equalize: (False, lambda strength: ()),
}
