"""Does the network see the pixels that published accuracies were measured on, and chance do what it
is told?"""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torchvision.transforms import CenterCrop, InterpolationMode, Resize
from torchvision.transforms.v2 import functional

import fullstride.data.transforms.crop as augment
from fullstride.data.transforms.crop import Augmentation, test_view, to_input, train_view
from fullstride.nets.preprocessing import Preprocessing


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return Image.fromarray(load_sample_image("flower.jpg"))


@pytest.fixture(scope="module")
def coordinates() -> Image.Image:
    """Red tells the column and green the row."""
    column, row = np.meshgrid(np.arange(256), np.arange(256))
    return Image.fromarray(np.dstack([column, row, 0 * row]).astype(np.uint8))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("kernel", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_the_middle_is_torchvisions_resize_and_center_crop_bit_for_bit(photo, kernel, mode):
    draw = rng()
    for _ in range(40):
        w, h = (int(side) for side in draw.integers(1, 400, 2))
        resolution, crop = int(draw.integers(1, 160)), float(draw.uniform(0.3, 1))
        picture = photo.crop((0, 0, w, h)).convert(mode)
        mean = (0.5,) * len(mode)
        pre = Preprocessing(resolution=resolution, mean=mean, std=mean, kernel=kernel, crop=crop)
        theirs = Resize(math.floor(resolution / crop), InterpolationMode(kernel))(picture)
        theirs = np.asarray(CenterCrop(resolution)(theirs)).reshape(resolution, resolution, -1)
        ours = test_view(picture, pre)
        assert ours.dtype == np.uint8
        assert np.array_equal(ours, theirs), (w, h, resolution, crop)


def test_the_middle_of_a_long_thin_picture_is_the_same_without_the_rest(photo, monkeypatch):
    pictures = [
        photo.crop((0, 0, w, h)) for w, h in ((300, 40), (40, 300), (123, 77), (64, 64), (5, 9))
    ]
    pre = Preprocessing(resolution=48, crop=0.8)
    whole = [test_view(picture, pre).astype(int) for picture in pictures]
    monkeypatch.setattr(augment, "MAX_PIXELS", 0)
    assert (
        max(
            np.abs(test_view(picture, pre) - each).max()
            for picture, each in zip(pictures, whole, strict=True)
        )
        <= 1
    )


@pytest.mark.parametrize("size", [(300, 20), (20, 300), (123, 77)])
def test_a_padded_crop_is_the_same_where_the_image_is_reduced_before(photo, size, monkeypatch):
    picture = photo.resize(size)
    pre, augmentation = Preprocessing(resolution=16), Augmentation(scale=(3, 4), hflip_prob=0)
    whole = [train_view(picture, pre, augmentation, rng(seed)).astype(int) for seed in range(5)]
    monkeypatch.setattr(augment, "MAX_PIXELS", 64 * 64)
    for seed, each in enumerate(whole):
        small = train_view(picture, pre, augmentation, rng(seed))
        assert np.abs(small - each).mean() < 3, seed


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("fit", ["crop", "squish"])
def test_a_picture_of_any_shape_fills_the_square(size, fit):
    picture = Image.new("RGB", size, (10, 20, 30))
    pre = Preprocessing(resolution=224, fit=fit)
    for pixels in (test_view(picture, pre), train_view(picture, pre, Augmentation(), rng())):
        assert pixels.shape == (224, 224, 3)
        assert (pixels == (10, 20, 30)).all()


def test_squish_keeps_every_border_and_bends(coordinates):
    pixels = test_view(coordinates.resize((300, 100)), Preprocessing(resolution=64, fit="squish"))
    assert pixels[:, 0, 0].max() < 6
    assert pixels[:, -1, 0].min() > 249
    assert pixels[0, :, 1].max() < 6
    assert pixels[-1, :, 1].min() > 249


def test_a_random_part_has_the_area_and_the_shape_asked_for(coordinates):
    pre = Preprocessing(resolution=128)
    limits = Augmentation(scale=(0.2, 0.5), ratio=(0.5, 2.0), hflip_prob=0)
    areas, ratios, middles = [], [], []
    for seed in range(300):
        pixels = train_view(coordinates, pre, limits, rng(seed)).astype(float)
        left, right, top, bottom = (
            pixels[:, 0, 0],
            pixels[:, -1, 0],
            pixels[0, :, 1],
            pixels[-1, :, 1],
        )
        w, h = ((last - first).mean() * 128 / 127 for first, last in ((left, right), (top, bottom)))
        areas.append(w * h / 256**2)
        ratios.append(w / h)
        middles.append((left + right).mean() / 2)
    assert 0.18 < min(areas) < 0.23
    assert 0.46 < max(areas) < 0.52
    assert 0.48 < min(ratios) < 0.6
    assert 1.7 < max(ratios) < 2.1
    assert abs(np.log(ratios).mean()) < 0.1
    assert abs(np.mean(middles) - 127.5) < 8


def test_where_no_part_fits_the_largest_middle_one_is_taken():
    wide = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (10, 1)))
    pre = Preprocessing(resolution=20, mean=(0.5,), std=(0.5,))
    pixels = train_view(wide, pre, Augmentation(scale=(1, 1), hflip_prob=0), rng())
    assert pixels.shape == (20, 20, 1)
    assert (pixels[0, 0, 0], pixels[0, -1, 0]) == (
        93,
        106,
    )  # 13.3 columns in the middle, from 93.3 to 106.7


def test_a_part_is_flipped_as_often_as_asked(coordinates):
    pre = Preprocessing(resolution=32)
    plain, turned = (
        train_view(coordinates, pre, Augmentation(hflip_prob=flip), rng(5)) for flip in (0, 1)
    )
    assert np.array_equal(plain[:, ::-1], turned)
    flips = [
        bool(pixels[0, 0, 0] > pixels[0, -1, 0])
        for pixels in (
            train_view(coordinates, pre, Augmentation(hflip_prob=0.25), rng(seed))
            for seed in range(400)
        )
    ]
    assert 70 < sum(flips) < 130


def test_the_same_draws_give_the_same_part(photo):
    pre = Preprocessing(resolution=32)
    first, again, other = (train_view(photo, pre, Augmentation(), rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_input_is_torchvisions_normalized_one(photo):
    pixels_nhwc = torch.from_numpy(np.stack([test_view(photo, Preprocessing(resolution=40))] * 3))
    pre = Preprocessing(resolution=40, mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.3))
    x = to_input(pixels_nhwc, pre)
    floats = functional.to_dtype(pixels_nhwc.permute(0, 3, 1, 2), torch.float32, scale=True)
    torch.testing.assert_close(x, functional.normalize(floats, list(pre.mean), list(pre.std)))
    assert x.shape == (3, 3, 40, 40)
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_gray_and_colour_pictures_suit_either_network(photo):
    gray, colour = (
        Preprocessing(resolution=16, mean=(0.5,), std=(0.5,)),
        Preprocessing(resolution=16),
    )
    for picture in (photo, photo.convert("L")):
        assert test_view(picture, gray).shape == (16, 16, 1)
        assert test_view(picture, colour).shape == (16, 16, 3)
    with pytest.raises(ValueError, match=r"an image of mode 'RGBA': decode\(\) gives 'L' or 'RGB'"):
        test_view(photo.convert("RGBA"), colour)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale": (0, 1)}, "scale 0: use .* above 0 and at most 4"),
        ({"scale": (0.5, 0.4)}, r"scale \(0.5, 0.4\): use two rising numbers"),
        ({"scale": (0.5, 4.1)}, "scale"),
        ({"scale": (math.nan, 1)}, "scale"),
        ({"ratio": (2, 1)}, "ratio"),
        ({"ratio": (1, math.inf)}, "ratio"),
        ({"hflip_prob": 1.5}, "hflip_prob 1.5: use .* at most 1"),
    ],
)
def test_an_impossible_augmentation_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**fields)


def test_turning_moves_a_bar_and_leaves_a_disc():
    rows, columns = np.mgrid[:64, :64] - 31.5
    disc = Image.fromarray((255 * (rows**2 + columns**2 < 20**2)).astype(np.uint8))
    bar = Image.fromarray((255 * (abs(columns) < 4)).astype(np.uint8))
    pre = Preprocessing(resolution=64, mean=(0.0,), std=(1.0,))
    still = Augmentation(scale=(1, 1), ratio=(1, 1), hflip_prob=0)
    turning = Augmentation(scale=(1, 1), ratio=(1, 1), hflip_prob=0, rotation_degrees=20)
    for seed in range(5):
        for picture, moved in ((disc, False), (bar, True)):
            plain, turned = (
                train_view(picture, pre, how, rng(seed)).astype(float) for how in (still, turning)
            )
            assert (abs(plain - turned).mean() > 5) == moved
    assert Augmentation().rotation_degrees == 0


def test_a_part_larger_than_the_picture_shows_all_of_it_on_black():
    white = Image.new("L", (40, 40), 255)
    pre = Preprocessing(resolution=80, mean=(0.0,), std=(1.0,))
    larger = Augmentation(scale=(4, 4), ratio=(1, 1), hflip_prob=0)
    corners = set()
    for seed in range(20):
        seen = train_view(white, pre, larger, rng(seed))[..., 0] > 127
        rows, columns = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
        assert abs(len(rows) - 40) <= 1
        assert abs(len(columns) - 40) <= 1
        corners.add((rows[0], columns[0]))
    assert len(corners) > 10
