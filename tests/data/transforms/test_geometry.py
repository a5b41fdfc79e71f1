"""Where in the view is a pixel of the picture? Compared with pictures that hold coordinates."""

import numpy as np
import pytest
from PIL import Image

from fullstride.data.transforms.crop import test_view as view_of
from fullstride.data.transforms.crop import view_geometry
from fullstride.nets.preprocessing import Preprocessing

SIZES = [(97, 61), (40, 120), (64, 64), (33, 31), (7, 500)]


def padded(picture: Image.Image, pre: Preprocessing) -> np.ndarray:
    """The slow obvious version: resize the whole, and copy it pixel by pixel."""
    w, h = picture.size
    shrink = pre.resolution / max(w, h)
    new = max(1, int(w * shrink + 0.5)), max(1, int(h * shrink + 0.5))
    small = picture.resize(new, Image.Resampling.BILINEAR)
    result = np.empty((pre.resolution, pre.resolution, 3), np.uint8)
    for y in range(pre.resolution):
        for x in range(pre.resolution):
            inside = x < new[0] and y < new[1]
            result[y, x] = small.getpixel((x, y)) if inside else (124, 116, 104)
    return result


@pytest.mark.parametrize("size", SIZES)
def test_pad_is_the_whole_picture_and_the_mean_colour(size):
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    pre, picture = Preprocessing(resolution=64, fit="pad"), Image.fromarray(noise)
    assert np.array_equal(view_of(picture, pre), padded(picture, pre))


@pytest.mark.parametrize("fit", ["crop", "squish", "pad"])
@pytest.mark.parametrize("size", SIZES[:3])
def test_a_point_of_the_picture_is_where_the_geometry_says(size, fit):
    w, h = size
    y, x = np.mgrid[:h, :w]
    picture = Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8))
    pre = Preprocessing(resolution=96, fit=fit, crop=0.9)
    geometry, pixels = view_geometry(size, pre), view_of(picture, pre)
    for point in ((w / 2, h / 2), (w / 2 + 9.3, h / 2 - 6.1)):
        ((u, v),) = geometry.to_view([point])
        coordinates = pixels[int(v), int(u), :2] + 0.5
        # a view's pixel is 1 / scale pixels of the picture wide
        assert coordinates == pytest.approx(point, abs=0.6 + 1 / min(geometry[:2]))
        assert geometry.to_picture([(u, v)])[0] == pytest.approx(point)


def test_the_corners_of_a_padded_picture_are_inside_the_view():
    geometry = view_geometry((200, 100), Preprocessing(resolution=64, fit="pad"))
    assert geometry.to_view([(0, 0), (200, 100)]) == [(0, 0), (64, 32)]
