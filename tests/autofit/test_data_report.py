"""A look at the data names images that are in two splits or classes, and such as cannot be read."""

import json
import re
from collections.abc import Generator
from dataclasses import replace
from io import BytesIO
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from scipy.fft import dctn

from fullstride.autofit.data_report import DataReport, inspect, report_lines, without_duplicates
from fullstride.data.dataset import DataSet, Images, open_data
from fullstride.io.records import from_json, to_json
from fullstride.nets import zoo
from fullstride.train import run
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import matching_data


def report_of(data: DataSet, workers: int = 0) -> DataReport:
    return result_of(inspect(data, workers))


def result_of(stage: Generator[str, None, DataReport]) -> DataReport:
    while True:
        try:
            assert "\n" not in next(stage)
        except StopIteration as stop:
            return stop.value


def photograph(number: int, size: tuple[int, int] = (120, 90)) -> Image.Image:
    """Random shades, as smooth as a photograph that is out of focus."""
    rng = np.random.default_rng(number)
    shades = [Image.fromarray(rng.integers(0, 256, (n, n, 3), np.uint8)) for n in (5, 16)]
    return Image.blend(*(each.resize(size, Image.Resampling.BICUBIC) for each in shades), 0.45)


def encoded(image: Image.Image, quality: int) -> Image.Image:
    file = BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(BytesIO(file.getvalue()))


def write(root: Path, pictures: dict[str, Image.Image]) -> Path:
    for name, image in pictures.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / name)
    return root


def plain(count: int = 24) -> dict[str, Image.Image]:
    """Different photographs in three splits and two classes."""
    splits = ("train", "train", "val", "test")
    return {f"{splits[i % 4]}/{'ab'[i // 4 % 2]}/{i:03}.png": photograph(i) for i in range(count)}


COPIES = {
    "another quality": lambda image: encoded(image, 40),
    "half the size": lambda image: encoded(image.resize((60, 45)), 75),
    "three times the size": lambda image: image.resize((360, 270)),
    "brighter": lambda image: image.point(lambda value: min(255, value + 12)),
    "cropped": lambda image: image.crop((2, 1, 118, 89)),
    "cropped at one side": lambda image: image.crop((6, 0, 120, 90)),
    "mirrored": ImageOps.mirror,
}


@pytest.mark.parametrize("kind", COPIES)
def test_an_image_of_the_test_that_is_another_form_of_a_training_image_is_named(kind, tmp_path):
    copy = COPIES[kind](photograph(0))
    data = open_data(str(write(tmp_path, plain() | {"test/a/copy.png": copy})))
    report = report_of(data)
    (pair,) = report.across_splits
    assert pair.names == ("train/a/000.png", "test/a/copy.png")
    assert pair.splits == ("train", "test")
    assert pair.classes == ("a", "a")
    assert pair.mirrored == (kind == "mirrored")
    assert not pair.exact
    assert report.totals["test"] == 1
    assert report.duplicates == ("train/a/000.png",)
    assert any("1 of the" in line and "test/a/copy.png" in line for line in report_lines(report))


def test_the_same_pixels_in_another_format_are_an_exact_copy(tmp_path):
    pictures = plain() | {"val/a/copy.bmp": photograph(0), "train/b/copy.bmp": photograph(1)}
    report = report_of(open_data(str(write(tmp_path, pictures))))
    assert [(p.names, p.exact) for p in report.across_splits] == [
        (("train/a/000.png", "val/a/copy.bmp"), True)
    ]
    assert [(p.names, p.classes, p.exact) for p in report.across_classes] == [
        (("train/a/001.png", "train/b/copy.bmp"), ("a", "b"), True)
    ]
    # nobody knows which class is right
    assert {*report.duplicates} == {"train/a/000.png", "train/a/001.png", "train/b/copy.bmp"}


def test_near_copies_in_two_classes_are_named_and_stay(tmp_path):
    pictures = plain() | {"train/b/copy.jpg": photograph(0)}
    report = report_of(open_data(str(write(tmp_path, pictures))))
    (pair,) = report.across_classes
    assert pair.names == ("train/a/000.png", "train/b/copy.jpg")
    assert not pair.exact
    assert not report.duplicates
    assert any("train/b/copy.jpg" in line for line in report_lines(report))


def test_without_duplicates_the_data_set_is_another_one_that_opens_again(tmp_path):
    pictures = plain() | {
        "test/a/one.jpg": photograph(0),
        "val/a/two.jpg": photograph(1),
        "test/b/three.png": encoded(photograph(2), 60),
    }
    data = open_data(str(write(tmp_path, pictures)))
    report = report_of(data)
    rest = without_duplicates(data, report)
    left_out = {"train/a/000.png", "train/a/001.png", "val/a/002.png"}
    assert {*report.duplicates} == left_out
    before, after = ({*each.train.names, *each.val.names} for each in (data, rest))
    assert before - after == left_out
    assert rest.test.names == data.test.names
    assert rest.fingerprint != data.fingerprint
    assert without_duplicates(data, report) == rest
    again = open_data(rest.where, rest.rule)
    assert (again.fingerprint, again.train.names) == (rest.fingerprint, rest.train.names)
    assert not report_of(rest).duplicates


def test_a_run_without_duplicates_knows_its_images_and_goes_on(tmp_path):
    data = open_data(str(write(tmp_path / "data", plain() | {"test/a/0.jpg": photograph(0)})))
    rest = without_duplicates(data, report_of(data))
    recipe = Recipe(epochs=1, batch_size=4, lr=0.01, resolution=32)
    assert len(list(run.train(tmp_path / "run", "genet_tiny", rest, recipe))) == 1
    again = matching_data(str(tmp_path / "run"), zoo.load(tmp_path / "run"))
    assert again.fingerprint == rest.fingerprint
    assert again.train.names == rest.train.names
    assert len(list(run.train(tmp_path / "run", "genet_tiny", again, recipe))) == 1
    with pytest.raises(ValueError, match="its images or labels are others"):
        list(run.train(tmp_path / "run", "genet_tiny", data, recipe))


def test_a_class_that_would_lose_all_training_images_is_refused(tmp_path):
    pictures = plain() | {"train/c/0.png": photograph(99), "test/c/0.jpg": photograph(99)}
    data = open_data(str(write(tmp_path, pictures)))
    with pytest.raises(ValueError, match="'c'.*duplicates"):
        without_duplicates(data, report_of(data))


def test_unreadable_images_are_named_with_reasons_and_the_others_are_compared(tmp_path):
    root = write(tmp_path, plain() | {"test/a/copy.jpg": photograph(0)})
    (root / "train/a/empty.png").touch()
    (root / "train/b/text.jpg").write_text("no image")
    cut = (root / "train/a/001.png").read_bytes()
    (root / "train/a/cut.png").write_bytes(cut[: len(cut) // 2])
    report = report_of(open_data(str(root)))
    assert {*report.unreadable} == {"train/a/empty.png", "train/b/text.jpg", "train/a/cut.png"}
    assert "empty" in report.unreadable["train/a/empty.png"]
    assert report.totals["unreadable"] == 3
    assert report.across_splits[0].names == ("train/a/000.png", "test/a/copy.jpg")
    assert any("3 images cannot be read" in line for line in report_lines(report))


@pytest.mark.parametrize(("images", "points"), [(2, "50 points"), (500, "")])
@pytest.mark.parametrize("split", ["val", "test"])
def test_a_scored_split_of_few_images_is_a_warning_with_what_one_counts(split, images, points):
    report = DataReport(
        images=dict(train=600, val=200, test=200) | {split: images},
        classes=2,
        smallest=("a", 300),
        largest=("b", 300),
        sides=(40, 40, 40),
        channels=3,
        unreadable={},
        across_splits=(),
        across_classes=(),
    )
    warnings = [line for line in report_lines(report) if line.startswith("warning")]
    assert len(warnings) == bool(points)
    assert all(points in line and split in line for line in warnings)


def test_data_of_which_no_image_can_be_read_are_refused_in_one_line(tmp_path):
    root = write(tmp_path, plain(8))
    for path in root.rglob("*.png"):
        path.write_text(f"no image {path}")
    with pytest.raises(
        ValueError, match=r"none of the 8 images can be read.*'train/a/0"
    ) as failure:
        report_of(open_data(str(root)))
    assert "\n" not in str(failure.value)


def test_images_of_every_mode_and_of_one_colour_are_no_copies_of_each_other(tmp_path):
    modes = ("L", "RGBA", "P", "1", "LA", "CMYK")
    pictures = plain() | {
        f"{split}/a/{mode}{number}.{'tif' if mode == 'CMYK' else 'png'}": photograph(
            1000 + 10 * place + number
        ).convert(mode)
        for place, mode in enumerate(modes)
        for number, split in enumerate(("train", "test"))
    }
    pictures["train/a/wide.png"] = Image.fromarray(
        np.linspace(0, 65535, 80 * 60).reshape(60, 80).astype(np.uint16)
    )
    pictures |= {
        f"{split}/b/gray{level}.png": Image.new("L", (50, 40), level)
        for split, level in (("train", 100), ("test", 101), ("val", 102))
    }
    report = report_of(open_data(str(write(tmp_path, pictures))))
    assert not report.across_splits
    assert not report.across_classes
    assert not report.unreadable
    assert any("3 images are of one colour" in note for note in report.notes)


def test_the_numbers_of_images_classes_and_sides(tmp_path):
    pictures = plain(16) | {"train/b/small.png": photograph(50, (33, 200))}
    report = report_of(open_data(str(write(tmp_path, pictures))))
    assert report.images == {"train": 9, "val": 4, "test": 4}
    assert report.classes == 2
    assert (report.smallest, report.largest) == (("a", 4), ("b", 5))
    assert report.sides == (33, 90, 90)
    assert report.channels == 3
    assert from_json(DataReport, json.loads(to_json(report)), "data.json") == report


def in_memory(pictures: list[np.ndarray], targets: list[int], classes: int) -> DataSet:
    """Every third image is for the validation split, and as many are for the test."""

    def read(name: str) -> Image.Image:
        return Image.fromarray(pictures[int(name)])

    names = [str(i) for i in range(len(pictures))]
    splits = [Images(tuple(names[i::3]), tuple(targets[i::3]), read) for i in range(3)]
    class_names = tuple(map(str, range(classes)))
    return DataSet("memory", "memory", class_names, *splits, 1, False, "fingerprint")


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_hardly_any_images_of_forty_thousand_classes_are_enough(count):
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (9, 7), np.uint8) for _ in range(count)]
    report = report_of(in_memory(pictures, [7] * count, 40_000))
    assert report.classes == 40_000
    assert report.largest == ("7", -(-count // 3))
    assert report.smallest[1] == 0
    assert not report.across_splits
    assert all(len(line) < 400 for line in report_lines(report))


def test_a_thousand_copies_of_a_picture_are_one_pair_each_and_not_a_million():
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (8, 8), np.uint8)] * 3000
    report = report_of(in_memory(pictures, [0] * 3000, 2))
    assert report.totals["across_splits"] == 3 * 2000 - 3
    assert len(report.across_splits) == 1000
    assert (report.totals["val"], report.totals["test"]) == (1000, 1000)
    assert len(report.duplicates) == 2000


def test_frames_of_one_film_show_the_same_though_all_are_alike():
    rng = np.random.default_rng(0)
    scene = np.asarray(photograph(0, (32, 32)).convert("L"), np.float32)
    frames = [np.clip(scene + rng.normal(0, 2, (32, 32)), 0, 255) for _ in range(120)]
    report = report_of(in_memory([frame.astype(np.uint8) for frame in frames], [0] * 120, 2))
    assert (report.totals["val"], report.totals["test"]) == (40, 40)


def test_workers_see_the_same(tmp_path):
    pictures = {f"{i % 2}/{i}.png": photograph(i, (24, 24)) for i in range(300)}
    pictures |= {"0/copy.jpg": photograph(1, (24, 24))}
    data = open_data(str(write(tmp_path, pictures)))
    assert report_of(data, workers=2) == report_of(data)


def test_blocks_and_hashes_select_the_pairs_that_an_obvious_loop_does():
    """All pairs of 420 images, most of them alike, in three splits and four classes."""
    rng = np.random.default_rng(1)
    kinds = [photograph(i, (40, 40)).convert("L") for i in range(6)]
    pictures = []
    for number in range(300):
        own = np.asarray(photograph(100 + number, (40, 40)).convert("L"), np.float32)
        pictures.append(0.4 * np.asarray(kinds[number % 6], np.float32) + 0.6 * own)
    for number in range(60):  # copies of some, the more different the later
        pictures.append(pictures[5 * number + 1] + rng.normal(0, 1 + 0.2 * number, (40, 40)))
    for number in range(60):
        pictures.append(pictures[5 * number + 2][1:, : 40 - number % 3])
    order = rng.permutation(len(pictures))
    pictures = [np.clip(pictures[i], 0, 255).astype(np.uint8) for i in order]
    targets = rng.integers(0, 4, len(pictures)).tolist()
    data = replace(in_memory(pictures, targets, 4), mirror=True)
    report = report_of(data)
    same = obvious_pairs(pictures)
    split = [i % 3 for i in range(len(pictures))]
    across = {tuple(sorted(pair, key=lambda i: split[i])) for pair in same}
    across = {(a, b) for a, b in across if split[a] != split[b]}
    classes = {pair for pair in same if targets[pair[0]] != targets[pair[1]]}
    assert len(across) > 10
    assert len(classes) > 10
    assert {tuple(map(int, pair.names)) for pair in report.across_splits} == across
    pairs = {tuple(sorted(map(int, pair.names))) for pair in report.across_classes}
    assert pairs == {tuple(sorted(pair)) for pair in classes}
    assert {*map(int, report.duplicates)} == {a for a, _ in across}


def obvious_pairs(pictures: list[np.ndarray]) -> set[tuple[int, int]]:
    """Images that show the same, from all correlations at once."""
    images = [Image.fromarray(picture) for picture in pictures]
    images += [ImageOps.mirror(image) for image in images]
    signs, vectors = zip(*map(features, images), strict=True)
    count, distances = len(pictures), 1 - np.corrcoef(vectors)
    usual = np.sort(distances[:count, :count])[:, 19]  # of at most 20 images, or a fifth
    usual = np.maximum(usual, 0.05)
    pairs = set()
    for a in range(count):
        for b in range(2 * count):
            if b % count < a and (signs[a] != signs[b]).sum() <= 12:
                scale = min(usual[a], usual[b % count])
                distance = distances[a, b]
                if scale >= 0.3 and 0.04 < distance / scale <= 0.35:
                    both = (vectors[a], vectors[b]), (vectors[b], vectors[a])
                    distance = min(cropped_distance(*each) for each in both)
                if distance <= 0.04 * scale:
                    pairs.add((b % count, a))
    return pairs


def cropped_distance(a: np.ndarray, b: np.ndarray) -> float:
    image = Image.fromarray(a.reshape(16, 16).astype(np.float32))
    low, high = (0, 0.32, 0.64), (16, 15.68, 15.36)
    crops = (
        image.resize((16, 16), Image.Resampling.BILINEAR, box=box)
        for box in product(low, low, high, high)
    )
    return min(1 - np.corrcoef(np.ravel(crop), b)[0, 1] for crop in crops)


def features(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """The signs of 8 x 8 frequencies, and 16 x 16 pixels."""
    small = image.resize((32, 32), Image.Resampling.BILINEAR)
    pixels = np.asarray(small, np.float64)
    waves = dctn(pixels, norm="ortho")[:8, :8].ravel()[1:]
    pooled = [
        [pixels[y : y + 2, x : x + 2].mean() for x in range(0, 32, 2)] for y in range(0, 32, 2)
    ]
    return waves > np.median(waves), np.rint(np.ravel(pooled))


def test_one_image_of_each_kind_is_said_in_the_singular(tmp_path):
    one = DataReport(
        images={"train": 3, "val": 1, "test": 1},
        classes=1,
        smallest=("a", 1),
        largest=("b", 2),
        sides=(8, 8, 8),
        channels=3,
        unreadable={"a/x.png": "it is empty"},
        across_splits=(),
        across_classes=(),
        totals={"unreadable": 1, "val": 1, "test": 1, "across_classes": 1},
        duplicates=("a/x.png",),
    )
    lines = "\n".join(report_lines(one))
    assert lines.startswith("3 train, 1 val, 1 test image of 1 class; 8 pixels; RGB\n")
    assert "smallest class 'a': 1 training image; largest 'b': 2" in lines
    assert "1 image cannot be read and is skipped" in lines
    assert "1 of the 1 val image shows the same" in lines
    assert "1 pair of images shows the same in two classes" in lines
    assert not re.search(r"\b1 \w+ (are|have|show)\b", lines)
