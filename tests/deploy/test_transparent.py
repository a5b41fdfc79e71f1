"""Transparent pictures are read over one colour: in training, and by what training gives."""

from dataclasses import replace

import numpy as np
import pytest
from bundles import COLOUR, make_bundle
from PIL import Image, ImageColor

from fullstride import cli, tasks
from fullstride.autofit.data_report import inspect
from fullstride.data.dataset import open_data
from fullstride.data.pack import Encoding, pack
from fullstride.data.readers.decode import decode
from fullstride.data.transforms import opencv
from fullstride.data.transforms.boxes import BoxTestView, BoxTrainView, Objects
from fullstride.data.transforms.crop import Augmentation, test_view, train_view
from fullstride.data.transforms.masks import MaskTestView, MaskTrainView
from fullstride.deploy.comparison import ComparisonImages, readable
from fullstride.deploy.export import export
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import predict, probabilities
from fullstride.deploy.settings import ExportOptions
from fullstride.nets.preprocessing import Preprocessing

GREEN = "#20c040"
PRE = replace(COLOUR, background=GREEN)


def read(path) -> Image.Image:
    with Image.open(path) as image:
        return image.copy()


def composed(path) -> Image.Image:
    image = read(path)
    return Image.alpha_composite(Image.new("RGBA", image.size, GREEN), image).convert("RGB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of pictures with transparent parts, and two without."""
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(24):
        picture = random.integers(256, size=(96, 96, 4), dtype=np.uint8)
        picture[:, :40, 3] = 0
        if number < 2:
            picture[:, :, 3] = 255
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(picture).save(path)
    return folder


@pytest.fixture
def path(folder):
    return folder / "a" / "2.png"


def views(source, pre, seed=3):
    """The view of every decoder and task that reads files, of the same draws."""
    one = Augmentation(scale=(0.5, 0.5), hflip_prob=0)
    objects = Objects(boxes=((10, 10, 60, 60),), labels=(0,), difficult=(False,))
    square = replace(pre, resolution=64)
    yield test_view(source, pre)
    for view in (train_view, opencv.fast_train_view):
        yield view(source, pre, one, np.random.default_rng(seed))
    for view in (BoxTrainView(square, one), BoxTestView(square)):
        yield view(source, objects, np.random.default_rng(seed))[0]


@pytest.mark.parametrize("draft", [False, True])
def test_every_view_puts_transparent_pixels_on_the_background(path, draft):
    pre = replace(PRE, draft=draft)
    for view, expected in zip(views(path, pre), views(composed(path), pre), strict=True):
        assert np.array_equal(view, expected)
    white = views(path, replace(pre, background="white"))
    assert not any(map(np.array_equal, views(path, pre), white))


class AnyMap:
    """A map of one class, of the size of the pictures."""

    name = "map.png"

    def read(self) -> np.ndarray:
        return np.zeros((96, 96), np.uint8)


@pytest.mark.parametrize("kind", [MaskTrainView, MaskTestView])
def test_pictures_with_maps_are_loaded_over_the_background(kind, folder):
    pre = replace(PRE, resolution=64, fit="squish")
    view = kind(pre, Augmentation(hflip_prob=0)) if kind is MaskTrainView else kind(pre)
    images = open_data(str(folder)).train
    number = images.names.index("a/2.png")
    for background in (GREEN, "white"):
        own = replace(view, pre=replace(pre, background=background))
        pixels, _ = own(images.source(number), AnyMap(), np.random.default_rng(0))
        assert (pixels[:, 5] == ImageColor.getrgb(background)).all()


@pytest.mark.parametrize("kind", ["normalised", "pixels", "pictures"])
def test_a_bundle_and_its_files_read_pictures_over_the_background(kind, path, folder, tmp_path):
    bundle, expected = make_bundle("genet_tiny", PRE), composed(path)
    export(
        bundle,
        tmp_path / "model.onnx",
        ComparisonImages([expected]),
        ExportOptions(format="onnx", input_kind=kind),
    )
    file = open_file(tmp_path / "model.onnx")
    assert file.preprocessing == PRE
    for model in (bundle, file):
        (row,) = probabilities(model, [expected])
        for picture in (path, read(path), np.asarray(read(path))):
            (prediction,) = predict(model, picture, top=10)
            shares = {guess.label: guess.probability for guess in prediction.guesses}
            assert [shares[name] for name in bundle.classes] == pytest.approx(row.tolist())
    images = open_data(str(folder)).train
    for sample, name in zip(readable(file, images), images.names, strict=True):
        if kind == "pictures":
            assert np.array_equal(sample.view, composed(folder / name))


def test_the_background_of_a_recipe_is_kept_by_what_is_trained(folder, tmp_path, capsys):
    words = f"train {folder} --model genet_tiny --device cpu --recipe.epochs 1"
    words += " --recipe.warmup-epochs 0 --recipe.resolution 32 --batch-size 8 --workers 0"
    out = tmp_path / "run"
    assert cli.run([*words.split(), "--background", GREEN, "--out", str(out)]) == 0
    first = tasks.load(str(out))
    assert first.preprocessing.background == GREEN
    again = [*words.split(), "--weights", str(out), "--out", str(tmp_path / "again")]
    assert cli.run(again) == 0
    assert tasks.load(str(tmp_path / "again")).preprocessing.background == GREEN


def test_the_report_of_the_data_counts_transparent_images_and_names_the_background(folder):
    def note(data) -> str:
        report, steps = None, inspect(data, 0)
        while report is None:
            try:
                next(steps)
            except StopIteration as stop:
                report = stop.value
        return "; ".join(note for note in report.notes if "transparent" in note)

    data = open_data(str(folder))
    assert note(data) == (
        "22 images have transparent pixels, which are put on white; --background sets another "
        "colour"
    )
    assert "put on #20c040" in note(data.over(GREEN))


def test_white_drawings_differ_over_another_background(tmp_path):
    for number, split in enumerate(("train", "test")):
        for name in "ab":
            picture = np.full((64, 64, 4), 255, np.uint8)
            rows = slice(20 * number, 20 * number + 10 + 10 * (name == "b"))
            picture[rows, :, 3] = 0
            path = tmp_path / split / name / "1.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(picture).save(path)
    data = open_data(str(tmp_path))
    images = [data.train.picture(0), data.test.picture(0)]
    assert np.array_equal(*images)  # all white
    over = data.over("black")
    assert not np.array_equal(over.train.picture(0), over.test.picture(0))


def test_packed_jpegs_are_over_the_background_and_copied_files_keep_theirs(folder, tmp_path):
    data = open_data(str(folder))
    list(pack(data, tmp_path / "small", Encoding(long_side=96, quality=95, background=GREEN)))
    packed = open_data(str(tmp_path / "small")).train
    left = np.asarray(packed.picture(packed.names.index("a/2.png")), np.float32)[:, :32]
    assert np.abs(left - (0x20, 0xC0, 0x40)).mean() < 3
    with pytest.raises(ValueError, match="background black: files are copied .*--long-side"):
        Encoding(background="black")


@pytest.mark.parametrize("colour", ["", "whit", "#12", "#00000080", "rgb(300)"])
def test_what_is_no_opaque_colour_is_refused_in_one_line(colour, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"background .* is no colour: use white, black") as error:
        Preprocessing(background=colour)
    assert "\n" not in str(error.value)
    words = ["train", "digits", "--model", "genet_tiny", "--out", str(tmp_path / "run")]
    assert cli.run([*words, "--background", colour]) == 2
    assert "recipe.background" in capsys.readouterr().err


def test_a_background_other_than_white_is_in_the_words_of_a_preprocessing():
    assert str(PRE) == "40 pixels, center crop of 0.9, on #20c040"
    assert str(COLOUR) == "40 pixels, center crop of 0.9"


def test_clips_have_no_background():
    with pytest.raises(ValueError, match="background 'black' is for pictures"):
        Preprocessing(background="black", frames=8)


def test_half_transparent_gray_is_blended(tmp_path):
    Image.new("LA", (4, 4), (100, 51)).save(tmp_path / "a.png")
    for colour, expected in (("black", 20), ("white", 224)):
        pixels = np.asarray(decode(tmp_path / "a.png", 1, background=colour))
        assert np.abs(pixels.astype(int) - expected).max() <= 1
