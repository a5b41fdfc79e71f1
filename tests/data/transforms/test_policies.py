"""Is every operation what others mean by its name, as strong as its source says, and drawn from one
generator?"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from math import atan, degrees

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image
from timm.data import auto_augment as timm
from torchvision.transforms import AutoAugment as TheirAutoAugment
from torchvision.transforms import AutoAugmentPolicy
from torchvision.transforms import functional as F

from fullstride.data.transforms import image_ops as op
from fullstride.data.transforms.crop import Augmentation, random_crop_box, train_view
from fullstride.data.transforms.policies import (
    IMAGENET,
    INCREASING,
    PAPER,
    RULES,
    augmented,
    draw_steps,
    erase,
    erase_at_random,
)
from fullstride.nets.preprocessing import Preprocessing

FORMS_OF_RAND_AUGMENT = [("relative", False), ("relative", True), ("timm", False), ("timm", True)]
FORMS_OF_RAND_AUGMENT += [("tpu", False)]
TIMM = {
    op.rotate: "Rotate",
    op.posterize: "Posterize",
    op.solarize: "Solarize",
    op.colour: "Color",
    op.contrast: "Contrast",
    op.brightness: "Brightness",
    op.sharpness: "Sharpness",
    op.shear_x: "ShearX",
    op.shear_y: "ShearY",
    op.solarize_add: "SolarizeAdd",
}
TORCHVISION = {
    "Posterize": op.posterize,
    "Rotate": op.rotate,
    "Solarize": op.solarize,
    "AutoContrast": op.auto_contrast,
    "Equalize": op.equalize,
    "Color": op.colour,
    "Invert": op.invert,
    "Contrast": op.contrast,
    "Sharpness": op.sharpness,
    "ShearX": op.shear_x,
}


def policy_of(**settings):
    """The policies of an augmentation with these settings, as a function of image and generator."""
    return lambda image, draws: augmented(image, Augmentation(**settings), draws)


def erased(fill):
    """Erasing as a function of an image of Pillow."""

    def apply(image: Image.Image, draws: np.random.Generator) -> Image.Image:
        pixels = np.array(image)
        erase(pixels if pixels.ndim == 3 else pixels[:, :, None], fill, draws)
        return Image.fromarray(pixels)

    return apply


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return Image.fromarray(load_sample_image("flower.jpg")).crop((150, 90, 301, 200))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def theirs(operation: Callable, picture: Image.Image, value: float) -> Image.Image:
    """torchvision's function for the same."""
    fill = [op.GRAY] * len(picture.getbands())
    still = dict(angle=0.0, scale=1.0, fill=fill)
    w, h = picture.size
    return {
        op.auto_contrast: lambda: F.autocontrast(picture),
        op.equalize: lambda: F.equalize(picture),
        op.invert: lambda: F.invert(picture),
        op.posterize: lambda: F.posterize(picture, int(value)),
        op.solarize: lambda: F.solarize(picture, value),
        op.colour: lambda: F.adjust_saturation(picture, value),
        op.contrast: lambda: F.adjust_contrast(picture, value),
        op.brightness: lambda: F.adjust_brightness(picture, value),
        op.sharpness: lambda: F.adjust_sharpness(picture, value),
        op.rotate: lambda: F.rotate(picture, value, fill=fill),
        op.shear_x: lambda: F.affine(
            picture, translate=[0, 0], shear=[degrees(atan(value)), 0.0], center=[0, 0], **still
        ),
        op.shear_y: lambda: F.affine(
            picture, translate=[0, 0], shear=[0.0, degrees(atan(value))], center=[0, 0], **still
        ),
        op.translate_x: lambda: F.affine(
            picture, translate=[-int(value * w), 0], shear=[0.0, 0.0], **still
        ),
        op.translate_y: lambda: F.affine(
            picture, translate=[0, -int(value * h)], shear=[0.0, 0.0], **still
        ),
    }[operation]()


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize(
    ("operation", "values"),
    [
        (op.auto_contrast, [0]),
        (op.equalize, [0]),
        (op.invert, [0]),
        (op.posterize, range(1, 9)),
        (op.solarize, [0, 1, 100, 255, 256]),
        (op.colour, [0.1, 0.7, 1, 1.9, 5.5]),
        (op.contrast, [0.1, 0.7, 1, 1.9, 5.5]),
        (op.brightness, [0.1, 0.7, 1, 1.9, 5.5]),
        (op.sharpness, [0.1, 0.7, 1, 1.9, 5.5]),
        (op.rotate, [-90, -30, -7.3, 0, 13, 30]),
        (op.shear_x, [-0.9, -0.3, -0.11, 0, 0.2, 0.3]),
        (op.shear_y, [-0.9, -0.3, -0.11, 0, 0.2, 0.3]),
        (op.translate_x, [-1.4, -0.446, -0.1, 0, 0.446, 1]),
        (op.translate_y, [-1.4, -0.446, -0.1, 0, 0.446, 1]),
    ],
)
def test_an_operation_is_torchvisions_bit_for_bit(photo, mode, operation, values):
    picture = photo.convert(mode)
    before = picture.tobytes()
    for value in values:
        ours = operation(picture, value) if len(values) > 1 else operation(picture)
        assert (ours.mode, ours.size) == (mode, picture.size)
        assert np.array_equal(ours, theirs(operation, picture, value)), value
    assert picture.tobytes() == before


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_the_two_that_torchvision_lacks_do_what_they_say(photo, mode):
    picture = photo.convert(mode)
    before = np.array(picture)
    for added in (0, 50, 110, 330):
        expected = np.where(before < 128, np.minimum(before.astype(int) + added, 255), before)
        assert np.array_equal(op.solarize_add(picture, added), expected)
    patched = np.array(op.cutout(picture, 0.5, 0.9, 0.25))
    patch = np.zeros(before.shape[:2], bool)
    patch[0:55, 98:151] = (
        True  # 151 x 110 pixels: columns from 98.15 to over the border, rows from 0 to 55
    )
    assert (patched[patch] == op.GRAY).all()
    assert np.array_equal(patched[~patch], before[~patch])
    assert np.array_equal(picture, before)


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("operation", TIMM)
def test_a_level_means_what_it_means_in_timm(operation, increasing):
    name = TIMM[operation]
    rule = (
        timm.LEVEL_TO_ARG.get(f"{name}Increasing" if increasing else name)
        or timm.LEVEL_TO_ARG[name]
    )
    for level in np.arange(0, 30.01, 0.5):
        random.seed(0)
        expected = {abs(rule(float(level), {})[0]) for _ in range(20)}
        if operation is op.posterize:  # ours keeps one bit, and no more than there are
            expected = {min(max(rule(level, {})[0], 1), 8)}
        if operation is op.solarize_add:  # timm stops at 128
            expected = {int(level * 11)}
        ours = {
            abs((INCREASING if increasing else RULES)[operation](level, rng(seed))[0])
            for seed in range(20)
        }
        assert sorted(ours) == pytest.approx(sorted(expected)), level


def test_autoaugment_has_the_25_pairs_that_torchvision_lists_too():
    listed = TheirAutoAugment()._get_policies(AutoAugmentPolicy.IMAGENET)
    assert (
        tuple(tuple((TORCHVISION[n], p, level or 0) for n, p, level in pair) for pair in listed)
        == IMAGENET
    )


def test_autoaugment_posterizes_to_4_to_8_bits_as_the_paper_does():
    assert [PAPER[op.posterize](level, rng())[0] for level in (0, 5, 6, 7, 8, 10)] == [
        4,
        6,
        6,
        6,
        7,
        8,
    ]


def test_no_level_and_no_shape_makes_a_policy_fail(photo):
    draws = rng()
    for size in ((1, 1), (1, 9), (9, 2), (40, 30)):
        for mode in ("L", "RGB"):
            picture = photo.resize(size).convert(mode)
            for level in (*range(31), 2.4, 29.9):
                for form, increasing in FORMS_OF_RAND_AUGMENT:
                    settings = dict(rand_form=form, rand_layers=6, rand_increasing=increasing)
                    policy = policy_of(**settings, rand_magnitude=level, rand_std=1)
                    changed = policy(picture, draws)
                    assert (changed.mode, changed.size) == (mode, size)
            for policy in (
                policy_of(auto_augment=True),
                policy_of(trivial_augment=True),
                policy_of(cutout=0.5),
                erased("noise"),
                erased("mean"),
            ):
                for _ in range(30):
                    changed = policy(picture, draws)
                    assert (changed.mode, changed.size) == (mode, size)


@pytest.mark.parametrize("operation", [o for o in INCREASING if INCREASING[o] is not RULES[o]])
def test_with_increasing_every_operation_does_more_at_a_higher_level(photo, operation):
    before = np.asarray(photo, int)

    def change(level: float) -> float:
        changed = [operation(photo, *INCREASING[operation](level, rng(seed))) for seed in range(8)]
        return float(np.mean([np.abs(np.asarray(each, int) - before).mean() for each in changed]))

    changes = [change(level) for level in (0, 2.5, 5, 7.5, 10)]
    assert changes == sorted(changes)
    assert changes[-1] > changes[0] + 1


def test_the_16_operations_are_equally_likely_and_each_layer_takes_one():
    policy, draws = Augmentation(rand_layers=2), rng()
    drawn = [[operation for operation, _ in draw_steps(policy, draws)] for _ in range(4000)]
    assert all(len(steps) == 2 for steps in drawn)
    counts = [sum(steps.count(operation) for steps in drawn) for operation in RULES]
    assert len(counts) == 16
    assert min(counts) > 420
    assert max(counts) < 580
    half = replace(policy, rand_probability=0.5)
    assert 0.9 < np.mean([len(draw_steps(half, draws)) for _ in range(2000)]) < 1.1


def test_magnitude_std_spreads_the_level_around_the_magnitude():
    policy, draws = Augmentation(rand_layers=1, rand_magnitude=9, rand_std=0.5), rng()
    steps = [draw_steps(policy, draws)[0] for _ in range(6000)]
    levels = np.array([abs(values[0]) / 3 for operation, values in steps if operation is op.rotate])
    assert abs(levels.mean() - 9) < 0.1
    assert 0.42 < levels.std() < 0.58


@pytest.mark.parametrize(
    "policy",
    [
        policy_of(rand_layers=3, rand_std=2),
        policy_of(rand_form="timm", rand_layers=3),
        policy_of(auto_augment=True),
        policy_of(trivial_augment=True),
        policy_of(cutout=0.3),
        erased("noise"),
    ],
)
def test_a_policy_draws_from_its_generator_alone(photo, policy):
    states = random.getstate(), str(np.random.get_state())
    first = [policy(photo, rng(seed)).tobytes() for seed in range(6)]
    assert first == [policy(photo, rng(seed)).tobytes() for seed in range(6)]
    assert len(set(first)) > 2
    assert states == (random.getstate(), str(np.random.get_state()))


def test_an_erased_rectangle_has_the_area_the_shape_and_the_noise_asked_for():
    augmentation, draws = Augmentation(random_erasing_prob=0.5), rng()
    areas, ratios, noise = [], [], []
    for _ in range(600):
        pixels = np.full((96, 128, 3), 7, np.uint8)
        erase_at_random(pixels, augmentation, draws)
        changed = (pixels != 7).any(2)
        if not changed.any():
            continue
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        h, w = rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1
        areas.append(h * w / changed.size)
        ratios.append(h / w)
        noise.append(pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].reshape(-1, 3))
    assert 250 < len(areas) < 350
    assert 0.015 < min(areas) < 0.04
    assert 0.28 < max(areas) < 0.35
    assert 0.27 < min(ratios) < 0.5
    assert 2.2 < max(ratios) < 3.7
    values = np.concatenate(noise)
    assert values.mean(0) == pytest.approx([124, 116, 104], abs=2)
    assert values.std(0) == pytest.approx(
        [57, 56, 55], abs=2
    )  # a little less than before the cut to bytes
    assert (
        abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 0.02
    )  # another draw for each pixel


def test_a_view_without_policies_is_the_flipped_part_as_ever(photo):
    pre = Preprocessing(resolution=48)
    for seed in range(10):
        draws = rng(seed)
        part = photo.resize(
            (48, 48), Image.Resampling.BILINEAR, random_crop_box(photo.size, Augmentation(), draws)
        )
        expected = np.asarray(part)[:, ::-1] if draws.random() < 0.5 else np.asarray(part)
        assert np.array_equal(train_view(photo, pre, Augmentation(), rng(seed)), expected)


def test_a_view_takes_its_policies_one_after_the_other(photo):
    pre = Preprocessing(resolution=48)
    every = Augmentation(
        auto_augment=True,
        rand_layers=2,
        rand_magnitude=12,
        rand_std=1,
        cutout=0.3,
        random_erasing_prob=0.9,
    )
    for seed in range(20):
        draws = rng(seed)
        picture = photo.resize(
            (48, 48), Image.Resampling.BILINEAR, random_crop_box(photo.size, every, draws)
        )
        if draws.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        rand = dict(rand_layers=2, rand_magnitude=12, rand_std=1)
        for settings in (dict(auto_augment=True), rand, dict(cutout=0.3)):
            picture = policy_of(**settings)(picture, draws)
        pixels = np.array(picture)
        if draws.random() < 0.9:
            erase(pixels, "noise", draws)
        assert np.array_equal(train_view(photo, pre, every, rng(seed)), pixels)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rand_layers": -1}, "rand_layers -1: use a whole number, at least 0"),
        ({"rand_magnitude": 31}, "rand_magnitude 31: use .* at least 0 and at most 30"),
        ({"rand_magnitude": math.nan}, "rand_magnitude nan"),
        ({"rand_std": -1}, "rand_std -1: use .* at least 0"),
        ({"rand_probability": 2}, "rand_probability 2: use .* at least 0 and at most 1"),
        ({"cutout": 1.5}, "cutout 1.5: use .* at least 0 and at most 1"),
        ({"random_erasing_prob": 2}, "random_erasing_prob 2: use .* at least 0 and at most 1"),
    ],
)
def test_an_impossible_policy_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**fields)
