"""Are OpenCV's pixels close to Pillow's, of the same part of a picture, and is every odd file still
understood?"""

import pickle
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from sklearn.datasets import load_sample_image

from fullstride.data import loader
from fullstride.data.dataset import Images, open_data
from fullstride.data.loader import Batches, LoaderOptions, TrainView
from fullstride.data.readers.decode import UnreadableImage, decode
from fullstride.data.transforms import image_ops as op
from fullstride.data.transforms.crop import Augmentation, train_view
from fullstride.data.transforms.image_ops import Sampling
from fullstride.data.transforms.opencv import (
    Jpeg,
    fast_train_view,
    find_jpeg,
    read_jpeg,
    resized,
)
from fullstride.data.transforms.policies import FORMS, UNCHANGED, WIDE
from fullstride.nets.preprocessing import Preprocessing

VALUES = {
    op.rotate: [-90, -27, 0, 13.3],
    op.posterize: range(1, 9),
    op.solarize: [0, 100, 256],
    op.colour: [0.1, 0.7, 1, 1.9, 5.5],
    op.contrast: [0.1, 0.7, 1, 1.9, 5.5],
    op.brightness: [0.1, 0.7, 1, 1.9, 5.5],
    op.sharpness: [0.1, 0.7, 1, 1.9, 5.5],
    op.shear_x: [-0.9, -0.27, 0, 0.3],
    op.shear_y: [-0.9, -0.27, 0, 0.3],
    op.translate_x: [-1.4, -0.3, 0, 0.3, 1],
    op.translate_y: [-1.4, -0.3, 0, 0.3, 1],
    op.solarize_add: [0, 110, 330],
    op.contrast_to_size: [0.1, 0.7, 1, 1.9, 5.5],
    op.shift_x: [-150, -3, 0, 20, 100],
    op.shift_y: [-150, -3, 0, 20, 100],
}
GEOMETRIC = (
    op.rotate,
    op.shear_x,
    op.shear_y,
    op.translate_x,
    op.translate_y,
    op.shift_x,
    op.shift_y,
)
ROUNDED = (
    op.colour,
    op.sharpness,
    op.rotate,
    op.shear_x,
    op.shear_y,
)  # where OpenCV may round to the other side


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return Image.fromarray(load_sample_image("flower.jpg")).resize(
        (500, 375), Image.Resampling.BICUBIC
    )


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def saved(picture: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, kind, **{"quality": 95, **options})
    return file.getvalue()


def found(data: bytes) -> Jpeg:
    jpeg = find_jpeg(data)
    assert jpeg is not None
    return jpeg


def psnr(first, second) -> float:
    """In dB; 100 where nothing differs."""
    error = np.square(np.asarray(first, float) - np.asarray(second, float)).mean()
    return 10 * np.log10(255**2 / error) if error else 100.0


OPERATIONS = sorted(
    {each for rules in FORMS.values() for form in rules for each in form} | set(WIDE) - {UNCHANGED},
    key=lambda operation: operation.__name__,
)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_on_arrays_is_within_50_db_of_pillows(photo, mode, operation):
    sizes = (
        ((224, 224), (61, 37)) if operation in ROUNDED else ((224, 224), (61, 37), (1, 1), (2, 9))
    )
    patches = {op.cutout: (0.4, 0.9, 0.3), op.cutout_pixels: (40, 0.9, 0.3)}
    for size in sizes:
        picture = photo.resize(size).convert(mode)
        pixels = np.array(picture)
        before = pixels.copy()
        for value in VALUES.get(operation, [None]):
            values = patches.get(operation, ()) if value is None else (value,)
            theirs, ours = (
                np.asarray(operation(picture, *values)),
                operation(pixels, *values),
            )
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            if operation in ROUNDED:
                assert psnr(theirs, ours) > 50, (size, value)
            else:
                assert np.abs(theirs.astype(int) - ours).max() <= (operation is op.auto_contrast), (
                    size,
                    value,
                )
            assert np.array_equal(pixels, before)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize(("kernel", "least"), [("bilinear", 45), ("bicubic", 40)])
@pytest.mark.parametrize("operation", GEOMETRIC)
def test_a_geometric_operation_on_arrays_interpolates_and_fills_as_pillow_does(
    photo, operation, kernel, least, mode
):
    sampling = Sampling(kernel, (124, 116, 104))
    picture = photo.resize((224, 160)).convert(mode)
    pixels = np.array(picture)
    for value in VALUES[operation]:
        theirs = np.asarray(operation(picture, value, sampling))
        ours = operation(pixels, value, sampling)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert psnr(theirs, ours) > least, value


@pytest.mark.parametrize(
    ("shrink", "least"),
    [(0.5, 50), (1, 60), (1.3, 40), (1.5, 45), (1.67, 45), (1.9, 42), (2.5, 40), (5, 37)],
)
def test_a_resize_is_as_close_to_pillows_as_its_rule_promises(photo, shrink, least):
    side = 64 if shrink > 1.7 else 120
    edge = round(side * shrink)
    box = (40, 20, 40 + edge, 20 + edge)
    ours = resized(np.array(photo), box, side)
    assert psnr(ours, photo.resize((side, side), Image.Resampling.BILINEAR, box)) > least


def test_a_small_part_of_fractions_of_pixels_is_not_rounded(photo):
    for box in ((10.3, 20.7, 60.1, 70.4), (0.4, 0.2, 7.9, 7.7), (490.2, 330.1, 500, 375)):
        theirs = photo.resize((48, 48), Image.Resampling.BILINEAR, box)
        assert psnr(resized(np.array(photo), box, 48), theirs) > 45


def test_views_at_224_of_500_by_375_are_37_db_from_pillows(photo):
    """Most of it is the half pixel that a part's edges may move by: the resize alone is at 40 dB
    and more."""
    file, pre = saved(photo), Preprocessing()
    distances = []
    for seed in range(30):
        ours, theirs = rng(seed), rng(seed)
        pixels = fast_train_view(file, pre, Augmentation(), ours)
        assert (pixels.shape, pixels.dtype) == ((224, 224, 3), np.uint8)
        distances.append(psnr(pixels, train_view(decode(file, 3), pre, Augmentation(), theirs)))
        assert ours.random() == theirs.random()  # both drew as much
    assert np.mean(distances) > 37
    assert min(distances) > 32


@pytest.mark.parametrize(
    "policy",
    [
        dict(auto_augment=True, rand_layers=2, rand_increasing=True),
        dict(rand_layers=2, rand_form="tpu", rand_magnitude=15),
        dict(rand_layers=2, rand_form="timm", rand_increasing=True, random_kernel=True),
        dict(trivial_augment=True, random_erasing_fill="mean"),
    ],
)
def test_both_engines_take_the_same_steps(photo, policy):
    pre = Preprocessing(resolution=96)
    every = Augmentation(
        **policy,
        rotation_degrees=10,
        cutout=0.3,
        random_erasing_prob=0.5,
    )
    smooth = photo.resize((12, 9)).resize(
        photo.size, Image.Resampling.BICUBIC
    )  # where half a pixel is not seen
    distances = []
    for seed in range(40):
        ours, theirs = rng(seed), rng(seed)
        distances.append(
            psnr(fast_train_view(smooth, pre, every, ours), train_view(smooth, pre, every, theirs))
        )
        assert ours.random() == theirs.random()
    assert np.median(distances) > 32


def test_a_part_larger_than_the_picture_lies_on_black(photo):
    pre, larger = Preprocessing(resolution=96), Augmentation(scale=(1.5, 4))
    for seed in range(10):
        ours = fast_train_view(saved(photo), pre, larger, rng(seed))
        assert psnr(ours, train_view(photo, pre, larger, rng(seed))) > 28


def test_rows_below_the_part_are_left_out_and_the_others_are_the_same(photo):
    for options in (
        {},
        {"subsampling": 0},
        {"optimize": True},
        {"restart_marker_blocks": 3},
        {"progressive": True},
    ):
        for picture in (photo, photo.convert("L")):
            file = saved(picture, **options)
            whole = simplejpeg.decode_jpeg(file, "RGB")
            for rows in (1, 7, 100, 239, 240, 371, 375):
                pixels = read_jpeg(found(file), 3, rows=rows)
                assert np.array_equal(pixels[:rows], whole[:rows])
                assert len(pixels) == (375 if "progressive" in options else min(rows + 4, 375))


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("size", [(1600, 1200), (1111, 777)])
def test_a_large_part_is_shrunk_while_decoding(photo, factor, size):
    file = saved(photo.resize(size))
    small = read_jpeg(found(file), 3, factor=factor)
    w, h = (-(-side // factor) for side in size)
    assert small.shape == (h, w, 3)
    assert (
        psnr(small[: h - 1, : w - 1], np.asarray(decode(file, 3).reduce(factor))[: h - 1, : w - 1])
        > 30
    )
    rows = read_jpeg(found(file), 3, factor=factor, rows=300)
    assert len(rows) < h
    assert np.array_equal(rows[: 300 // factor], small[: 300 // factor])
    pre = Preprocessing(resolution=64)
    for seed in range(5):
        theirs = train_view(decode(file, 3), pre, Augmentation(scale=(0.5, 1)), rng(seed))
        assert (
            psnr(fast_train_view(file, pre, Augmentation(scale=(0.5, 1)), rng(seed)), theirs) > 30
        )


def test_any_other_file_is_read_by_pillow(photo):
    turned, upright = Image.Exif(), Image.Exif()
    turned[0x0112], upright[0x0112] = 6, 1
    gray, colour = (
        Preprocessing(resolution=64, mean=(0.5,), std=(0.5,)),
        Preprocessing(resolution=64),
    )
    files = {
        "png": (saved(photo, "PNG"), False),
        "webp": (saved(photo, "WEBP"), False),
        "turned": (saved(photo, exif=turned), False),
        "upright": (saved(photo, exif=upright), True),
        "cmyk": (saved(photo.convert("CMYK")), False),
        "gray": (saved(photo.convert("L")), True),
        "progressive": (saved(photo, progressive=True), True),
        "longer": (saved(photo) + b"more", False),
    }
    for name, (file, fast) in files.items():
        assert (find_jpeg(file) is not None) == fast, name
        for pre in (gray, colour):
            theirs = train_view(decode(file, pre.channels), pre, Augmentation(), rng(3))
            assert psnr(fast_train_view(file, pre, Augmentation(), rng(3)), theirs) > 28, name


def test_what_cannot_be_read_is_refused_in_the_same_words(photo):
    file = saved(photo)
    for broken in (
        b"",
        b"words",
        file[: len(file) // 2],
        file[:300],
        file[:20],
        file[:2] + b"\xff" * 50,
    ):
        with pytest.raises(UnreadableImage) as theirs:
            decode(broken, 3)
        with pytest.raises(UnreadableImage) as ours:
            fast_train_view(broken, Preprocessing(), Augmentation(), rng())
        assert str(ours.value) == str(theirs.value)


def test_a_lying_header_is_never_worse_than_an_error(photo):
    file = saved(photo.resize((64, 48)))
    draws = rng()
    for _ in range(300):
        spoiled = bytearray(file)
        for at in draws.integers(2, len(file) - 2, 3):
            spoiled[at] = draws.integers(256)
        try:
            pixels = fast_train_view(
                bytes(spoiled), Preprocessing(resolution=32), Augmentation(), rng()
            )
        except UnreadableImage:
            continue
        assert pixels.shape == (32, 32, 3)


@pytest.fixture
def folder(tmp_path, photo) -> Images:
    for top, name in enumerate(("train/a", "train/b", "val/a", "test/a")):
        (tmp_path / name).mkdir(parents=True)
        for number in range(4):
            part = photo.crop((number * 20, top, number * 20 + 90, top + 80))
            (tmp_path / name / f"{number}.jpg").write_bytes(saved(part))
    (tmp_path / "train/b/1.jpg").write_bytes(b"")
    return open_data(str(tmp_path)).train


def test_the_loader_hands_files_to_opencv_and_tells_of_broken_ones(folder):
    pre = Preprocessing(resolution=32)
    view = pickle.loads(pickle.dumps(TrainView(pre, Augmentation(), decoder="opencv")))
    epochs = []
    for workers in (0, 2):
        batches = Batches(folder, view, LoaderOptions(batch=4, shuffle=True, workers=workers))
        epochs.append(
            [batch.x.numpy().tobytes() for number in (0, 1) for batch in batches.epoch(number)]
        )
        assert list(batches.skipped.items()) == [("train/b/1.jpg", "it is empty")]
    assert epochs[0] == epochs[1]
    missing = Path(folder.names[0])
    gone = replace(folder, file=lambda name: missing)
    with pytest.raises(ValueError, match="none of the 8 images can be read.*No such file"):
        list(Batches(gone, view, LoaderOptions(batch=4, shuffle=True)).epoch(0))


def test_pictures_without_files_suit_opencv_too():
    digits = open_data("digits").train
    pre = Preprocessing(resolution=8, mean=(0.5,), std=(0.25,))
    views = [
        TrainView(pre, Augmentation(scale=(0.5, 1)), decoder) for decoder in ("pillow", "opencv")
    ]
    pillow, opencv = (
        next(iter(Batches(digits, view, LoaderOptions(batch=64, shuffle=True)).epoch(0))).x
        for view in views
    )
    assert psnr(pillow * 64, opencv * 64) > 38


def test_pillow_is_the_engine_unless_another_is_asked_for_and_here(monkeypatch):
    pre = Preprocessing()
    assert TrainView(pre).decoder == "pillow"
    with pytest.raises(ValueError, match="decoder 'fast': use 'pillow' or 'opencv'"):
        TrainView(pre, decoder="fast")  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"decoder 'opencv' needs cv2 and simplejpeg: pip install 'fullstride\[fast\]'",
    ):
        TrainView(pre, decoder="opencv")
    TrainView(pre)


def test_the_colour_of_a_gray_picture_cannot_be_changed(photo):
    pixels = np.asarray(photo.convert("L"))
    assert np.array_equal(op.colour(pixels, 1.9), pixels)
