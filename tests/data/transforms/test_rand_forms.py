"""Are the forms of RandAugment those of their sources, and TrivialAugment that of torchvision?"""

import math
import random
from itertools import product

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image
from timm.data import auto_augment as timm
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import TrivialAugmentWide, _apply_op

from fullstride.data.transforms import image_ops as op
from fullstride.data.transforms.crop import Augmentation, train_view
from fullstride.data.transforms.policies import (
    RULES,
    TIMM,
    TIMM_INCREASING,
    TIMM_SAMPLINGS,
    TPU,
    UNCHANGED,
    WIDE,
    draw_steps,
    erase,
)
from fullstride.nets.preprocessing import Preprocessing

SIDE = 160  # where pixels and shares of the side differ from 224


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return Image.fromarray(load_sample_image("flower.jpg")).resize((SIDE, SIDE))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# Slow versions of TensorFlow's operations, pixel by pixel or in float64, for a level.


def blended(zero, one, factor):
    """Truncated to bytes, as TensorFlow casts."""
    return np.clip(zero + np.float32(factor) * (one - zero).astype(np.float32), 0, 255).astype(int)


def from_where(x, rows_from, columns_from):
    """Each pixel from the nearest one of a place in the image, or gray."""
    h, w, _ = x.shape
    result = np.full_like(x, 128)
    for row, column in product(range(h), range(w)):
        r = math.floor(rows_from(row, column) + 0.5)
        c = math.floor(columns_from(row, column) + 0.5)
        if 0 <= r < h and 0 <= c < w:
            result[row, column] = x[r, c]
    return result


def slow_solarize(x, level):
    threshold = np.array(int(25.6 * level)).astype(np.uint8)
    return np.where(x.astype(np.uint8) < threshold, x, 255 - x)


def slow_solarize_add(x, level):
    return np.where(x < 128, np.clip(x + int(11 * level), 0, 255), x)


def slow_posterize(x, level):
    shift = 8 - int(level * 0.4)
    return (x >> shift) << shift


def slow_contrast(x, level):
    gray = min(255, x.shape[0] * x.shape[1] // 256)
    return blended(np.full_like(x, gray), x, 0.1 + 0.18 * level)


def slow_brightness(x, level):
    return blended(np.zeros_like(x), x, 0.1 + 0.18 * level)


def slow_translations(x, level):
    by = 10 * level
    along_x = [from_where(x, lambda r, c: r, lambda r, c, b=b: c + b) for b in (by, -by)]
    along_y = [from_where(x, lambda r, c, b=b: r + b, lambda r, c: c) for b in (by, -by)]
    return along_x, along_y


def slow_cutout(x, level, row, column):
    half, result = int(4 * level), x.copy()
    for r, c in product(range(x.shape[0]), range(x.shape[1])):
        if row - half <= r < row + half and column - half <= c < column + half:
            result[r, c] = 128
    return result


VALUES = {
    op.solarize: slow_solarize,
    op.solarize_add: slow_solarize_add,
    op.posterize: slow_posterize,
    op.contrast_to_size: slow_contrast,
    op.brightness: slow_brightness,
}


@pytest.mark.parametrize("level", [5, 10, 15, 20])
@pytest.mark.parametrize("operation", VALUES)
def test_an_operation_on_values_is_that_of_the_tpu_code(photo, operation, level):
    before = np.asarray(photo, int)
    ours = operation(photo, *TPU[operation](level, rng()))
    assert np.array_equal(ours, VALUES[operation](before, level))


def test_the_tpu_codes_threshold_wraps_around(photo):
    before = np.asarray(photo)
    at = {
        level: np.asarray(op.solarize(photo, *TPU[op.solarize](level, rng()))) for level in (10, 15)
    }
    assert np.array_equal(at[10], 255 - before)
    assert np.array_equal(at[15], np.where(before < 128, before, 255 - before))
    assert np.array_equal(op.solarize(photo, *RULES[op.solarize](10, rng())), before)


@pytest.mark.parametrize("level", [10, 15])
def test_the_tpu_codes_distances_are_in_pixels(photo, level):
    before = np.asarray(photo, int)
    for operation, slow in zip(
        (op.shift_x, op.shift_y), slow_translations(before, level), strict=True
    ):
        ours = {operation(photo, *TPU[operation](level, rng(seed))).tobytes() for seed in range(9)}
        assert ours == {each.astype(np.uint8).tobytes() for each in slow}
    for seed in range(5):
        half, x, y = TPU[op.cutout_pixels](level, rng(seed))
        slow = slow_cutout(before, level, int(y * SIDE), int(x * SIDE))
        assert np.array_equal(op.cutout_pixels(photo, half, x, y), slow)


def test_the_tpu_form_has_the_same_16_operations_and_otherwise_the_same_values():
    assert len(TPU) == len(RULES) == 16
    for (ours, rule), (common, other) in zip(TPU.items(), RULES.items(), strict=True):
        if ours is common and ours is not op.solarize:
            assert rule(15, rng()) == other(15, rng())


def different(images):
    return [np.asarray(image, int) for image in {each.tobytes(): each for each in images}.values()]


@pytest.mark.parametrize("increasing", [False, True])
def test_an_operation_of_the_timm_form_is_timms(photo, increasing):
    names = timm._RAND_INCREASING_TRANSFORMS if increasing else timm._RAND_TRANSFORMS
    rules = TIMM_INCREASING if increasing else TIMM
    ours_by_name = {
        "AutoContrast": op.auto_contrast,
        "Equalize": op.equalize,
        "Invert": op.invert,
        "Rotate": op.rotate,
        "Posterize": op.posterize,
        "Solarize": op.solarize,
        "SolarizeAdd": op.solarize_add,
        "Color": op.colour,
        "Contrast": op.contrast,
        "Brightness": op.brightness,
        "Sharpness": op.sharpness,
        "ShearX": op.shear_x,
        "ShearY": op.shear_y,
        "TranslateXRel": op.translate_x,
        "TranslateYRel": op.translate_y,
    }
    assert [ours_by_name[name.removesuffix("Increasing")] for name in names] == sorted(
        rules, key=[ours_by_name[name.removesuffix("Increasing")] for name in names].index
    )
    for name, level in product(names, (0, 3.3, 7, 9)):
        operation = ours_by_name[name.removesuffix("Increasing")]
        if operation is op.posterize and not increasing and level == 0:
            continue  # 0 bits, which Pillow refuses
        theirs = timm.AugmentOp(
            name, prob=1, magnitude=level, hparams={"img_mean": (124, 116, 104)}
        )
        random.seed(0)
        expected = different(theirs(photo) for _ in range(24))
        ours = different(
            operation(photo, *rules[operation](level, rng(seed))) for seed in range(24)
        )
        assert len(ours) == len(expected), (name, level)
        for each in ours:  # the last bit of a value may round a few pixels otherwise
            differ = min((np.abs(each - other) > 1).any(2).mean() for other in expected)
            assert differ < 0.005, (name, level)


def test_a_level_of_the_timm_form_is_at_most_10():
    for magnitude, std in ((15, 0.0), (9.5, 0.5)):
        settings = dict(rand_form="timm", rand_layers=40, rand_magnitude=magnitude, rand_std=std)
        policy = Augmentation(**settings)
        steps = [step for seed in range(40) for step in draw_steps(policy, rng(seed))]
        degrees = [abs(values[0]) for operation, values in steps if operation is op.rotate]
        assert max(degrees) == pytest.approx(30)
        kernels = {values[1] for operation, values in steps if operation is op.rotate}
        assert kernels == set(TIMM_SAMPLINGS)


def test_each_operation_of_trivial_augment_is_torchvisions_at_every_strength(photo):
    space = TrivialAugmentWide()._augmentation_space(31)
    assert len(space) == len(WIDE) == 14
    for (name, (magnitudes, signed)), (operation, (has_sign, values)) in zip(
        space.items(), WIDE.items(), strict=True
    ):
        assert signed == has_sign
        # not the middle: torchvision's 16 pixels are a little less in float32, and truncated
        for index in range(0, 31, 2 if magnitudes.ndim else 31):
            magnitude = float(magnitudes[index]) if magnitudes.ndim else 0.0
            signs = (1, -1) if signed else (1,)
            theirs = [
                np.asarray(
                    _apply_op(photo, name, sign * magnitude, InterpolationMode.BILINEAR, None), int
                )
                for sign in (signs[::-1] if name.startswith("Translate") else signs)
            ]
            ours = [np.asarray(operation(photo, *values(sign * index / 30)), int) for sign in signs]
            # a last bit of the matrix may round a few pixels otherwise
            differ = [(np.abs(a - b) > 1).any(2).mean() for a, b in zip(ours, theirs, strict=True)]
            assert max(differ) < 0.005, (name, index)


def test_the_14_operations_of_trivial_augment_are_equally_likely_at_31_strengths():
    policy, draws = Augmentation(trivial_augment=True), rng()
    drawn = [draw_steps(policy, draws) for _ in range(7000)]
    counts = dict.fromkeys(WIDE, 0)
    for steps in drawn:
        counts[steps[0][0] if steps else UNCHANGED] += 1
    assert min(counts.values()) > 420
    assert max(counts.values()) < 580
    degrees = {steps[0][1][0] for steps in drawn if steps and steps[0][0] is op.rotate}
    assert len(degrees) == 61  # 31 with both signs, 0 once


def test_an_erased_rectangle_can_have_the_mean(photo):
    erased = np.array(photo)
    erase(erased, "mean", rng())
    changed = (erased != np.asarray(photo)).any(2)
    assert changed.any()
    assert (erased[changed] == (124, 116, 104)).all()


def test_a_resize_draws_its_kernel_where_that_is_random(photo):
    plain = Augmentation(scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip_prob=0.0)
    expected = {
        train_view(photo, Preprocessing(resolution=48, kernel=kernel), plain, rng()).tobytes()
        for kernel in ("bilinear", "bicubic")
    }
    drawn = Augmentation(scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip_prob=0.0, random_kernel=True)
    pre = Preprocessing(resolution=48, kernel="lanczos")
    assert {train_view(photo, pre, drawn, rng(seed)).tobytes() for seed in range(9)} == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rand_form": "tensor"}, "rand_form 'tensor': use relative or tpu or timm"),
        ({"rand_form": "tpu", "rand_increasing": True}, "use the form timm"),
    ],
)
def test_an_impossible_form_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**fields)
