"""Large images are decoded at a fraction of their size, and look the same; bombs are refused."""

import zlib
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from bundles import small_bundle
from covers import pairwise_cover
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_sample_image

from fullstride.data.dataset import open_data
from fullstride.data.pack import Encoding, pack
from fullstride.data.readers.decode import (
    Crop,
    OversizedImage,
    UnreadableImage,
    decode,
    decode_crop,
)
from fullstride.data.transforms.crop import Augmentation, test_view, train_view
from fullstride.deploy.predict import predict
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.train import run
from fullstride.train.recipes.recipe import Recipe

ORIENTATION = 0x0112
WHOLE = Preprocessing(resolution=40)
DRAFT = Preprocessing(resolution=40, draft=True)


@cache
def photo(name: str, width: int, height: int) -> Image.Image:
    picture = Image.fromarray(load_sample_image(f"{name}.jpg"))
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def saved(picture: Image.Image, suffix: str = "JPEG", **how) -> bytes:
    picture.save(buffer := BytesIO(), suffix, **how)
    return buffer.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def png_header(width: int, height: int) -> bytes:
    """A PNG that ends after its header."""
    header = b"IHDR" + width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0])
    chunk = (13).to_bytes(4) + header + zlib.crc32(header).to_bytes(4)
    return b"\x89PNG\r\n\x1a\n" + chunk + (0).to_bytes(4) + b"IDAT" + bytes(4)


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    error = np.square(one.astype(float) - other).mean()
    return 10 * np.log10(255**2 / error) if error else np.inf


def views(file: bytes, pre: Preprocessing, seeds: int = 3) -> list[np.ndarray]:
    augmentation = Augmentation(scale=(0.3, 1.0))
    random = [
        train_view(file, pre, augmentation, np.random.default_rng(seed)) for seed in range(seeds)
    ]
    return [test_view(file, pre), *random]


GRID = pairwise_cover(
    # odd sides, sides that 8 divides, one that is thin, one that is a line
    [(801, 643), (640, 960), (967, 1211), (1600, 130), (3, 2000), (2503, 1)],
    ["L", "RGB", "CMYK"],
    range(1, 9),  # EXIF orientations
    ["baseline", "progressive"],
    ["4:4:4", "4:2:0"],
    [1, 3],
    ["crop", "squish"],
)


@pytest.mark.parametrize(("size", "mode", "turn", "scans", "chroma", "channels", "fit"), GRID)
def test_views_of_a_reduced_jpeg_are_those_of_the_whole_one(
    size, mode, turn, scans, chroma, channels, fit
):
    how = {"subsampling": chroma} if mode == "RGB" else {}
    how |= {"exif": turned(turn), "progressive": scans == "progressive"}
    file = saved(photo("china", *size).convert(mode), quality=92, **how)
    gray = {"mean": (0.5,), "std": (0.5,)} if channels == 1 else {}
    whole, draft = (replace(pre, fit=fit, **gray) for pre in (WHOLE, DRAFT))
    for ours, theirs in zip(views(file, draft), views(file, whole), strict=True):
        assert ours.shape == (40, 40, channels)
        assert psnr(ours, theirs) > 40


@pytest.mark.parametrize("turn", range(1, 9))
def test_the_pixels_of_a_reduced_image_are_where_they_are_in_the_whole_one(turn):
    """A ramp of brightness: an image that is off by a pixel of the file is off by 2 levels."""
    ramp = (np.arange(93)[:, None] + np.arange(117)[None]).astype(np.uint8)
    file = saved(Image.fromarray(ramp), quality=100, exif=turned(turn))

    def part(size):
        return Crop((5.0, 3.0, size[0] - 4.5, size[1] - 2.25), (10, 10))

    whole = decode(file, 1)
    expected = whole.resize((10, 10), Image.Resampling.BILINEAR, part(whole.size).box)
    image, crop = decode_crop(file, 1, part, oversampling=1)
    assert max(image.size) == 15
    ours = image.resize((10, 10), Image.Resampling.BILINEAR, crop.box)
    inner = np.s_[1:-1, 1:-1]  # the kernel is cut off at the border of the image
    assert np.abs(np.asarray(ours).astype(int) - np.asarray(expected))[inner].max() <= 1


def test_a_jpeg_is_reduced_only_where_pixels_are_left_over():
    def side(width: int, part: float, size: int, oversampling: float) -> int:
        file = saved(photo("flower", width, width))
        crop = Crop((0, 0, part * width, part * width), (size, size))
        image, _ = decode_crop(file, 3, lambda _: crop, oversampling=oversampling)
        return image.width

    assert side(800, 1, 50, 2) == 100
    assert side(799, 1, 50, 2) == 200
    assert side(800, 0.5, 50, 2) == 200
    assert side(800, 1, 50, 3) == 200
    assert side(800, 1, 199, 2) == 400
    assert side(800, 1, 201, 2) == 800


def test_other_formats_and_small_jpegs_have_the_same_pixels_with_and_without():
    files = [saved(photo("china", 801, 643), suffix) for suffix in ("PNG", "BMP", "TIFF", "WEBP")]
    files += [saved(photo("china", 100, 79)), saved(photo("china", 150, 90).convert("P"), "GIF")]
    for file in files:
        for ours, theirs in zip(views(file, DRAFT), views(file, WHOLE), strict=True):
            assert np.array_equal(ours, theirs)
    for file in (Path(__file__), b"", files[0][:-99]):
        with pytest.raises(UnreadableImage) as ours:
            test_view(file, DRAFT)
        with pytest.raises(UnreadableImage) as theirs:
            test_view(file, WHOLE)
        assert ours.value.reason == theirs.value.reason


@pytest.mark.parametrize("sides", [(800, 640), (803, 641)])
def test_black_beside_an_image_begins_at_the_same_place(sides):
    file = saved(Image.new("RGB", sides, "white"), exif=turned(3))
    augmentation = Augmentation(scale=(2.0, 4.0))
    for seed in range(4):
        ours, theirs = (
            train_view(file, pre, augmentation, np.random.default_rng(seed))
            for pre in (DRAFT, WHOLE)
        )
        assert psnr(ours, theirs) > 45


@pytest.mark.parametrize("kernel", ["bilinear", "bicubic"])
def test_photographs_are_47_db_from_the_whole_in_training_and_50_in_evaluation(kernel):
    """Means; both kernels are 43 dB from each other. benchmarks/large_images.py has all numbers."""
    whole = Preprocessing(resolution=112, kernel=kernel)
    draft = replace(whole, draft=True)
    training, evaluation = [], []
    for name, width in (("china", 1997), ("flower", 2600)):
        pixels = np.asarray(photo(name, width, 1403))
        grain = np.random.default_rng(width).normal(0, 4, pixels.shape)
        file = saved(Image.fromarray(np.clip(pixels + grain, 0, 255).astype(np.uint8)), quality=90)
        pairs = [psnr(*pair) for pair in zip(views(file, draft), views(file, whole), strict=True)]
        evaluation.append(pairs[0])
        training += pairs[1:]
    assert np.mean(training) > 46
    assert np.mean(evaluation) > 50


def photo_folder(folder: Path) -> Path:
    for name in ("china", "flower"):
        for number in range(8):
            path = folder / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            photo(name, 401 + number, 303).save(path)
    return folder


@pytest.mark.slow
def test_a_run_is_trained_on_reduced_pixels_unless_its_recipe_says_otherwise(tmp_path):
    data = open_data(str(photo_folder(tmp_path / "data")))
    recipe = Recipe(epochs=2, batch_size=4, lr=0.05, resolution=32)

    def trained(name: str, recipe: Recipe) -> dict:
        list(run.train(tmp_path / name, "genet_tiny", data, recipe))
        return load_file(tmp_path / name / "bundle" / "weights.safetensors")

    whole, draft = (trained(f"{how}", replace(recipe, draft=how)) for how in (False, None))
    assert any(not torch.equal(draft[name], whole[name]) for name in whole)
    assert Bundle.load(tmp_path / "None" / "bundle").preprocessing.draft
    assert not Bundle.load(tmp_path / "False" / "bundle").preprocessing.draft


def test_a_pack_of_large_jpegs_has_the_pixels_of_whole_ones(tmp_path):
    data = open_data(str(photo_folder(tmp_path / "data")))
    list(pack(data, tmp_path / "packed", Encoding(long_side=60, quality=95)))
    packed = open_data(str(tmp_path / "packed"))
    for index in range(len(data.train)):
        theirs = data.train.picture(index)
        height = round(60 * theirs.height / theirs.width)
        theirs = theirs.resize((60, height), Image.Resampling.LANCZOS)
        theirs.save(buffer := BytesIO(), "JPEG", quality=95)
        ours = np.asarray(packed.train.picture(index))
        assert psnr(ours, np.asarray(Image.open(buffer))) > 40


# Large images


def uniform(width: int, height: int, mode: str = "L", suffix: str = "JPEG", **how) -> bytes:
    return saved(Image.new(mode, (width, height), (90,) * len(mode)), suffix, **how)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"progressive": True}], ids=["baseline", "progressive"])
def test_a_jpeg_of_200_megapixels_is_read(tmp_path, how):
    file = uniform(14_200, 14_200, **how) + bytes(100_000)  # not to look like a bomb
    for pixels in views(file, Preprocessing(draft=True), seeds=1):
        assert np.abs(pixels.astype(int) - 90).max() <= 1
    with pytest.raises(OversizedImage, match="201.6 megapixels, and 89"):
        test_view(file, Preprocessing())
    (tmp_path / "a.jpg").write_bytes(file)
    (answer,) = predict(small_bundle(), tmp_path / "a.jpg")
    assert answer.guesses


@pytest.mark.parametrize("suffix", ["PNG", "TIFF"])
def test_a_png_or_tiff_above_89_megapixels_is_read_whole(suffix):
    file = uniform(9_000, 10_000, suffix=suffix) + bytes(500_000)
    assert (test_view(file, replace(DRAFT, mean=(0.5,), std=(0.5,))) == 90).all()


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (lambda: uniform(9_000, 10_000, suffix="PNG"), "90.0 megapixels in .* bytes"),
        (lambda: png_header(20_000, 20_000) + bytes(10**7), "400.0 megapixels.* 1,526 MiB.* 1,024"),
        (lambda: png_header(2**31 - 1, 2**31 - 1), "megapixels in 45 bytes"),
        (lambda: uniform(9_000, 10_000, "RGB", "BMP"), "90.0 megapixels, and 89 .* of BMP"),
    ],
)
def test_what_looks_like_a_bomb_or_needs_too_much_memory_is_refused_by_its_header(file, reason):
    with pytest.raises(OversizedImage, match=reason):
        test_view(file(), DRAFT)


def test_memory_can_be_limited_and_a_jpeg_is_reduced_to_fit():
    whole = Crop((0, 0, 1600, 1200), (1600, 1200))
    file = saved(photo("china", 1600, 1200))
    sizes = [
        decode_crop(file, 3, lambda _: whole, oversampling=1, max_memory_mib=mib)[0].width
        for mib in (20, 10, 5.7)
    ]
    assert sizes == [1600, 800, 200]
    with pytest.raises(OversizedImage, match="1.9 megapixels.* 6 MiB .* and 5 MiB"):
        decode_crop(file, 3, lambda _: whole, oversampling=1, max_memory_mib=5)
