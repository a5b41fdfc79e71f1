"""Test-time augmentation: the mean of the probabilities of a picture and of its mirror image."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from bundles import GRAY, make_bundle
from PIL import Image, ImageOps

from fullstride import cli
from fullstride.data.dataset import open_data
from fullstride.data.transforms.crop import test_view as view_of
from fullstride.data.transforms.crop import to_input
from fullstride.deploy.comparison import ComparisonImages
from fullstride.deploy.export import export
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import predict, probabilities
from fullstride.deploy.settings import ExportOptions
from fullstride.train.scoring import score_bundle

SIDE = 32  # pixels, so that nothing is resized


@pytest.fixture
def pictures():
    pixels = np.random.default_rng(0).integers(0, 256, (6, SIDE, SIDE)).astype(np.uint8)
    return [Image.fromarray(each) for each in pixels]


@pytest.fixture
def bundle():
    return make_bundle("genet_tiny", replace(GRAY, resolution=SIDE), temperature=30.0)


def slow_mean(bundle, picture):
    """(K,): each of the two images through the network alone."""
    rows = []
    for each in (picture, ImageOps.mirror(picture)):
        pixels = view_of(each, bundle.preprocessing)
        x = to_input(torch.from_numpy(pixels)[None], bundle.preprocessing)
        with torch.inference_mode():
            rows.append((bundle.net(x)[0] / bundle.temperature).softmax(0).numpy())
    return (rows[0] + rows[1]) / 2


def test_the_mean_is_that_of_the_slow_way(bundle, pictures):
    expected = np.stack([slow_mean(bundle, each) for each in pictures])
    fast = probabilities(bundle, pictures, batch=4, tta="flip")
    np.testing.assert_allclose(fast, expected, atol=1e-5)
    assert np.abs(fast - probabilities(bundle, pictures)).max() > 1e-3
    best = [each.guesses[0].probability for each in predict(bundle, pictures, tta="flip")]
    np.testing.assert_allclose(best, expected.max(1), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normalised", "pixels", "pictures"])
def test_exported_files_average_too(kind, bundle, pictures, tmp_path):
    export(
        bundle, tmp_path / "net.onnx", ComparisonImages(pictures), ExportOptions(input_kind=kind)
    )
    rows = probabilities(open_file(tmp_path / "net.onnx"), pictures, tta="flip")
    np.testing.assert_allclose(rows, probabilities(bundle, pictures, tta="flip"), atol=1e-4)


def test_scores_with_mirror_images_are_those_of_the_mean(bundle):
    images = open_data("digits").test.subset(range(40))
    result = score_bundle(bundle, images, "cpu", mirrored=True)
    rows = np.stack([slow_mean(bundle, images.picture(index)) for index in range(40)])
    truth = np.array(images.targets)
    assert result.scores["top1"] == 100 * (rows.argmax(1) == truth).mean()
    loss = -np.log(rows[np.arange(40), truth]).mean()
    assert result.scores["loss"] == pytest.approx(loss, rel=1e-4)


def test_where_a_mirrored_image_may_be_of_another_class_it_is_refused(bundle, pictures, tmp_path):
    unflipped = replace(bundle, recipe={"hflip_prob": 0.0})
    for each in (replace(bundle, mirror=False), unflipped):
        with pytest.raises(ValueError, match="--tta flip"):
            next(predict(each, pictures, tta="flip"))
    images = ComparisonImages(pictures)
    export(unflipped, tmp_path / "net.onnx", images)
    with pytest.raises(ValueError, match="--tta flip"):
        next(predict(open_file(tmp_path / "net.onnx"), pictures, tta="flip"))


@pytest.mark.parametrize("wrong", [{"top": 0}, {"top": -1}, {"batch": 0}, {"tta": "flop"}])
def test_arguments_that_no_prediction_has_are_refused(bundle, pictures, wrong):
    with pytest.raises(ValueError, match=f"{[*wrong][0]} .*{[*wrong.values()][0]}"):
        next(predict(bundle, pictures, **wrong))


def test_a_path_in_place_of_a_network_is_refused_with_what_opens_it(pictures):
    with pytest.raises(ValueError, match=r"'runs/one' is a path: .*tasks\.load"):
        next(predict("runs/one", pictures))


def test_the_digits_are_not_mirrored(bundle, tmp_path, capsys):
    bundle.save(tmp_path / "bundle")
    words = ["validate", str(tmp_path / "bundle"), "--data", "digits", "--tta", "flip"]
    assert cli.run(words) == 2
    assert "--tta flip" in capsys.readouterr().err
