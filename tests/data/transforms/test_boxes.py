"""Do boxes move with the pixels? A white rectangle is searched in every view."""

from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image

from fullstride.data.readers.listing import Objects
from fullstride.data.transforms.boxes import BoxTestView, BoxTrainView
from fullstride.data.transforms.crop import Augmentation
from fullstride.data.transforms.masks import MaskTrainView
from fullstride.nets.preprocessing import Preprocessing

SIDE = 96
PRE = Preprocessing(resolution=SIDE, mean=(0.0,) * 3, std=(1.0,) * 3, fit="pad")


def rectangle(size: tuple[int, int], box: tuple[int, int, int, int]) -> Image.Image:
    picture = Image.new("RGB", size)
    picture.paste((255, 255, 255), box)
    return picture


def extent(pixels: np.ndarray) -> list[int]:
    """(left, top, right, bottom) of the bright pixels."""
    gray = pixels.astype(float).mean(2)
    bright = gray > 0.55 * gray.max()
    columns, rows = bright.any(0).nonzero()[0], bright.any(1).nonzero()[0]
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def one(box: tuple[float, ...]) -> Objects:
    return Objects((box,), (3,), (True,))  # pyright: ignore


@pytest.mark.parametrize(
    ("kind", "jitter", "size"),
    list(product(("flip", "ssd"), ((1, 1), (0.5, 2)), ((150, 90), (60, 130)))),
)
def test_boxes_and_pixels_move_together(kind, jitter, size):
    view = BoxTrainView(PRE, Augmentation(hflip_prob=0.5), kind, jitter)
    box = (20, 30, 45, 70)
    picture, seen, places = rectangle(size, box), 0, set()
    for seed in range(50):
        pixels, targets = view(picture, one(box), np.random.default_rng(seed))
        assert pixels.shape == (SIDE, SIDE, 3)
        if len(targets["boxes"]):
            seen += 1
            places.add(tuple(targets["boxes"][0].round().tolist()))
            assert targets["boxes"][0].tolist() == pytest.approx(extent(pixels), abs=1.3), seed
            assert (targets["labels"].tolist(), targets["difficult"].tolist()) == ([3], [True])
    assert seen >= 35
    assert len(places) >= (2 if (kind, jitter) == ("flip", (1, 1)) else 20)


@pytest.mark.parametrize(
    "change",
    [
        dict(rotation_degrees=30),
        dict(rand_layers=2),
        dict(random_erasing_prob=1),
        dict(auto_augment=True),
        dict(trivial_augment=True),
        dict(cutout=0.5),
        dict(random_kernel=True),
    ],
    ids=str,
)
def test_settings_that_boxes_do_not_follow_are_refused_as_for_maps(change):
    (name,) = change
    for view in (BoxTrainView, MaskTrainView):
        with pytest.raises(ValueError, match=rf"recipe\.{name} .*leave it out"):
            view(PRE, Augmentation(**change))


@pytest.mark.parametrize("fit", ["pad", "squish", "crop"])
def test_the_view_of_evaluation_has_all_objects_where_they_are(fit, tmp_path):
    box = (60, 30, 100, 60)
    rectangle((160, 90), box).save(tmp_path / "a.png")
    view = BoxTestView(Preprocessing(resolution=SIDE, fit=fit))
    pixels, targets = view(tmp_path / "a.png", one(box), np.random.default_rng(0))
    assert targets["boxes"][0].tolist() == pytest.approx(extent(pixels), abs=1)
    area = targets["boxes"][0, 2:] - targets["boxes"][0, :2]
    assert targets["scale"].item() ** 2 == pytest.approx(area.prod().item() / (40 * 30), rel=1e-5)


def test_a_turned_photograph_has_its_boxes_upright(tmp_path):
    upright, box = rectangle((60, 120), (10, 20, 30, 90)), (10, 20, 30, 90)
    stored, exif = upright.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6  # to be turned by 270 degrees
    stored.save(tmp_path / "a.jpg", exif=exif, quality=95)
    for view in (BoxTrainView(PRE, Augmentation(hflip_prob=0)), BoxTestView(PRE)):
        pixels, targets = view(tmp_path / "a.jpg", one(box), np.random.default_rng(0))
        assert targets["boxes"][0].tolist() == pytest.approx(extent(pixels), abs=1.3)


def test_a_view_is_a_function_of_its_generator_alone():
    view = BoxTrainView(PRE, Augmentation(), "ssd", (0.5, 2.0))
    picture, objects = rectangle((150, 90), (20, 30, 45, 70)), one((20, 30, 45, 70))
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first, targets = view(picture, objects, np.random.default_rng(5))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    second, others = view(picture, objects, np.random.default_rng(5))
    assert np.array_equal(first, second)
    assert all(torch.equal(targets[name], others[name]) for name in targets)


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (400, 2), (2, 400)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_of_any_shape_without_objects_has_views(size, channels):
    pre = Preprocessing(resolution=64, mean=(0.5,) * channels, std=(0.5,) * channels, fit="pad")
    for kind, seed in product(("flip", "ssd"), range(12)):
        view = BoxTrainView(pre, Augmentation(), kind, (0.3, 2.0))
        nothing = Objects((), (), ())
        pixels, targets = view(Image.new("L", size), nothing, np.random.default_rng(seed))
        assert pixels.shape == (64, 64, channels)
        assert targets["boxes"].shape == (0, 4)
        whole = one((0, 0, *size))
        pixels, targets = view(Image.new("RGB", size), whole, np.random.default_rng(seed))
        assert len(targets["boxes"]) == len(targets["labels"])


def test_objects_that_an_iou_crop_cuts_off_are_left_out():
    box = (0, 0, 10, 10)
    objects = Objects((box, (100, 60, 140, 85)), (0, 1), (False, False))
    view = BoxTrainView(PRE, Augmentation(hflip_prob=0), "ssd")
    counts = [
        len(view(rectangle((150, 90), box), objects, np.random.default_rng(seed))[1]["boxes"])
        for seed in range(40)
    ]
    assert {*counts} == {1, 2}


def test_a_side_that_the_maps_do_not_divide_is_one_line():
    with pytest.raises(ValueError, match=r"100 pixels.*multiples of 32.*such as 96"):
        BoxTestView(Preprocessing(resolution=100))
    with pytest.raises(ValueError, match="40 pixels"):
        BoxTrainView(PRE, sides=(40,))
