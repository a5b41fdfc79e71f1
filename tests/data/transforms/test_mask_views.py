"""A picture and its map go through one geometry, in training and in evaluation."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from PIL import Image

from fullstride.data.readers.decode import UnreadableImage
from fullstride.data.transforms.crop import Augmentation
from fullstride.data.transforms.crop import test_view as seen
from fullstride.data.transforms.masks import MaskTestView, MaskTrainView
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.dense import on_picture

PRE = Preprocessing(resolution=64, mean=(0.2, 0.4, 0.6), fit="pad")
PLAIN = Augmentation(hflip_prob=0.0)


@dataclass(frozen=True)
class Values:
    """A map without a file."""

    values: np.ndarray
    name: str = "map.png"

    def read(self):
        return self.values


def blocks(width, height, block=8):
    """A picture of blocks of colours, and which block each pixel is of: 1 to 96."""
    rng = np.random.default_rng(0)
    classes = rng.integers(1, 97, (height // block, width // block)).astype(np.uint8)
    classes = classes.repeat(block, 0).repeat(block, 1)
    colours = np.stack([classes * 2, 255 - classes * 2, classes], -1).astype(np.uint8)
    return Image.fromarray(colours), Values(classes)


def colours_of(classes):
    return np.stack([classes * 2.0, 255 - classes * 2.0, classes * 1.0], -1)


def inner(classes, border):
    """Pixels all of whose neighbours are of one block: resizing does not blend their colours."""
    same = np.ones(classes.shape, bool)
    for dy in range(-border, border + 1):
        for dx in range(-border, border + 1):
            same &= np.roll(classes, (dy, dx), (0, 1)) == classes
    return same & (classes != 255)


@pytest.mark.parametrize("size", [(96, 64), (64, 96), (48, 48), (80, 40)])
@pytest.mark.parametrize("jitter", [(1.0, 1.0), (0.5, 2.0)])
def test_each_pixel_of_50_random_views_has_the_class_of_its_colour(size, jitter):
    image, target = blocks(*size)
    view = MaskTrainView(PRE, Augmentation(hflip_prob=0.5), jitter)
    compared, padded, mirrored = 0, 0, set()
    for seed in range(50):
        pixels, classes = view(image, target, np.random.default_rng(seed))
        assert pixels.shape == (64, 64, 3)
        assert classes.shape == (64, 64)
        assert classes.dtype == pixels.dtype == np.uint8
        where = inner(classes, 2)
        difference = np.abs(pixels[where] - colours_of(classes)[where])
        assert difference.max(initial=0) <= 2
        outside = classes == 255
        assert (pixels[outside] == (51, 102, 153)).all()
        compared += where.sum()
        padded += outside.sum()
        mirrored.add(bool(outside[:, 0].all()))
    assert compared > 1000
    assert padded > 0 or (size == (48, 48) and jitter == (1.0, 1.0))


def test_the_factor_of_the_jitter_is_that_of_the_blocks():
    image, target = blocks(64, 64)
    for zoom in (0.5, 1.0, 2.0):
        view = MaskTrainView(PRE, PLAIN, (zoom, zoom))
        _, classes = view(image, target, np.random.default_rng(0))
        assert (classes != 255).sum() == min(1, zoom) ** 2 * 64**2
        edges = (np.diff(classes.astype(int), axis=1) != 0)[: int(64 * min(1, zoom))]
        assert edges.any(0).sum() == pytest.approx(8 if zoom <= 1 else 4, abs=1)


def test_enlarged_pictures_are_nearer():
    image, target = blocks(64, 64)
    metres = Values(target.values.astype(np.float32))
    metres.values[:2] = 0
    view = MaskTrainView(PRE, PLAIN, (0.5, 0.5), outside=-1, divides=True)
    _, depths = view(image, metres, np.random.default_rng(0))
    assert depths.dtype == np.float32
    np.testing.assert_array_equal(depths[4:32, :32], 2 * metres.values[8::2, ::2])
    assert (depths[0, :32] == 0).all()
    assert (depths[32:] == -1).all()


@pytest.mark.parametrize("fit", ["pad", "squish", "crop"])
@pytest.mark.parametrize("size", [(96, 64), (40, 80), (64, 64)])
def test_evaluation_pairs_each_pixel_with_its_class_and_back(fit, size):
    image, target = blocks(*size)
    pre = Preprocessing(resolution=64, mean=(0.2, 0.4, 0.6), fit=fit, crop=1.0)
    pixels, classes = MaskTestView(pre)(image, target, np.random.default_rng(0))
    where = inner(classes, 2)
    assert where.any()
    assert np.abs(pixels[where] - colours_of(classes)[where]).max() <= 2
    back = on_picture(classes, size, pre, 255)
    assert back.shape == (size[1], size[0])
    known = back != 255
    assert known.all() or fit == "crop"
    assert (back == target.values)[known & inner(target.values, 2)].all()


def test_a_jpeg_is_decoded_at_a_fraction_in_training_and_in_evaluation_as_in_predictions(tmp_path):
    image, target = blocks(1024, 768)
    path, pre, rng = tmp_path / "a.jpg", replace(PRE, draft=True), np.random.default_rng(0)
    image.save(path)
    found, classes = MaskTestView(pre)(path, target, rng)
    whole, expected = MaskTestView(PRE)(path, target, rng)
    assert np.array_equal(found, seen(path, pre))
    assert not np.array_equal(found, whole)
    assert np.array_equal(classes, expected)
    views = [MaskTrainView(each, PLAIN)(path, target, rng) for each in (pre, PRE)]
    assert not np.array_equal(views[0][0], views[1][0])
    assert np.array_equal(views[0][1], views[1][1])


def test_a_map_of_another_size_is_refused_by_the_name_of_its_file():
    image, _ = blocks(96, 64)
    for view in (MaskTrainView(PRE, PLAIN), MaskTestView(PRE)):
        with pytest.raises(UnreadableImage, match=r"map\.png.*64 x 96.*96 x 64"):
            view(image, blocks(64, 96)[1], np.random.default_rng(0))


def test_sides_that_maps_do_not_divide_and_what_moves_pixels_alone_are_refused():
    with pytest.raises(ValueError, match=r"100 pixels.*multiples of 32.*such as 96"):
        MaskTestView(Preprocessing(resolution=100))
    with pytest.raises(ValueError, match="40 pixels"):
        MaskTrainView(PRE, PLAIN, sides=(40,))
    with pytest.raises(ValueError, match=r"recipe\.rotation_degrees 10"):
        MaskTrainView(PRE, Augmentation(rotation_degrees=10))
