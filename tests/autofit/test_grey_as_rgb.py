"""Gray images are read as RGB where weights for RGB are given, with the same bits as RGB files."""

import csv
import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fullstride import zoo
from fullstride.autofit.fit import FIT
from fullstride.autofit.settings import FitSettings
from fullstride.data.dataset import DataSet, open_data
from fullstride.data.readers.splits import SplitRule
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import predict
from fullstride.nets.bundle import Bundle
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.study.driver import run_study
from fullstride.study.settings import StudyOptions
from fullstride.tasks import find_task
from fullstride.train import run_folder
from fullstride.train.batches import BatchOptions
from fullstride.train.distill import matching_teacher
from fullstride.train.recipes.choice import RecipeChoice, RunOptions
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.run import train
from fullstride.train.scoring import images_to_score, score_images

COUNTS = {"train": 48, "t10k": 24}
RECIPE = Recipe(epochs=2, batch_size=16, lr=0.05, resolution=24, hflip_prob=0, random_kernel=True)


def write_idx(folder: Path) -> Path:
    """The first digits as IDX files."""
    folder.mkdir()
    digits = open_data("digits").train
    for split, count in COUNTS.items():
        first = 0 if split == "train" else COUNTS["train"]
        images = np.stack([np.asarray(digits.picture(first + n)) for n in range(count)])
        labels = np.array(digits.targets[first : first + count], np.uint8)
        for kind, values in (("images", images), ("labels", labels)):
            head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            path = folder / f"{split}-{kind}-idx{values.ndim}-ubyte"
            path.write_bytes(head + values.tobytes())
    return folder


def as_rgb_files(data: DataSet, folder: Path) -> DataSet:
    """The same images as RGB PNG files, listed in a table with the same splits."""
    folder.mkdir()
    with (folder / "table.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("path", "label", "split"))
        for split in ("train", "val", "test"):
            images = getattr(data, split)
            for index, target in enumerate(images.targets):
                gray = np.asarray(images.picture(index))
                path = folder / f"{split}{index:03}.png"
                Image.fromarray(np.stack([gray, gray, gray], 2)).save(path)
                table.writerow((path.name, data.classes[target], {"val": "val"}.get(split, split)))
    return open_data(str(folder / "table.csv"), SplitRule(keep_duplicates=True))


@pytest.fixture(scope="module")
def gray(tmp_path_factory) -> DataSet:
    return open_data(str(write_idx(tmp_path_factory.mktemp("idx") / "digits")))


@pytest.fixture(scope="module")
def rgb(gray, tmp_path_factory) -> DataSet:
    data = as_rgb_files(gray, tmp_path_factory.mktemp("rgb") / "png")
    assert [len(getattr(data, part)) for part in ("train", "val", "test")] == [
        len(getattr(gray, part)) for part in ("train", "val", "test")
    ]
    return replace(data, mirror=gray.mirror)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Weights of a network for RGB with other classes, as those of ImageNet."""
    torch.manual_seed(1)
    net = Network(replace(zoo.spec("genet_tiny"), classes=7, in_channels=3))
    folder = tmp_path_factory.mktemp("weights") / "genet"
    Bundle(
        net, name="genet", classes=tuple("abcdefg"), preprocessing=Preprocessing(resolution=32)
    ).save(folder)
    return folder


@pytest.fixture(scope="module")
def runs(gray, rgb, weights, tmp_path_factory) -> dict[str, Path]:
    """A run on the IDX files and one on the RGB files."""
    folders = {}
    for name, data in (("gray", gray), ("rgb", rgb)):
        folders[name] = tmp_path_factory.mktemp("runs") / name
        list(train(folders[name], "genet_tiny", data, RECIPE, RunOptions(weights=str(weights))))
    return folders


def test_training_on_gray_images_is_that_on_the_same_images_as_rgb_files(runs):
    one, other = (load_file(runs[name] / "bundle/weights.safetensors") for name in runs)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    logs = [
        [json.loads(row) for row in (runs[name] / run_folder.LOG).read_text().splitlines()]
        for name in runs
    ]
    for key in ("loss", "val/top1"):
        assert [row[key] for row in logs[0]] == [row[key] for row in logs[1]]
    assert Bundle.load(runs["gray"] / "bundle").preprocessing.channels == 3


def test_scores_and_predictions_of_gray_images_are_those_of_rgb_files(runs, gray, rgb):
    bundle = Bundle.load(runs["gray"] / "bundle")
    task = find_task().for_data(gray)
    ours = images_to_score(str(runs["gray"]), bundle, gray.where)
    assert ours.images.names == gray.test.names
    scores = [
        score_images(bundle.net, task, images, BatchOptions(bundle.preprocessing, "cpu")).scores
        for images in (ours.images, rgb.test)
    ]
    assert scores[0] == scores[1]
    for index in range(3):
        pictures = gray.test.picture(index), rgb.test.picture(index)
        one, other = predict(bundle, pictures)
        assert one == other


def test_a_run_on_gray_images_as_rgb_resumes(runs, gray, weights, tmp_path):
    part = tmp_path / "run"
    rows = train(part, "genet_tiny", gray, RECIPE, RunOptions(weights=str(weights)))
    next(rows)
    rows.close()
    list(train(part, "genet_tiny", gray, RECIPE, RunOptions(weights=str(weights))))
    one, other = (load_file(path / "bundle/weights.safetensors") for path in (part, runs["gray"]))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_teacher_for_rgb_sees_a_gray_student_images_in_three_equal_channels(runs, gray):
    bundle = Bundle.load(runs["gray"] / "bundle")
    student = replace(bundle.preprocessing, mean=(0.3,), std=(0.7,))
    teacher = matching_teacher(bundle, "it", gray.classes, student)
    pixels = torch.rand(4, 1, 24, 24)
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in (bundle.preprocessing.mean, bundle.preprocessing.std)
    )
    with torch.inference_mode():
        expected = bundle.net.eval()((pixels.expand(4, 3, 24, 24) - mean) / std).softmax(1)
    torch.testing.assert_close(teacher((pixels - 0.3) / 0.7), expected, rtol=1e-4, atol=1e-5)


def test_weights_and_teachers_for_gray_images_are_refused_for_rgb_ones(runs, gray, rgb, tmp_path):
    list(train(tmp_path / "gray", "genet_tiny", gray, replace(RECIPE, epochs=1)))
    with pytest.raises(ValueError, match="3 input channels"):
        next(
            train(
                tmp_path / "run",
                "genet_tiny",
                rgb,
                RECIPE,
                RunOptions(weights=str(tmp_path / "gray")),
            )
        )
    recipe = replace(RECIPE, teacher=str(tmp_path / "gray"))
    with pytest.raises(ValueError, match="takes gray images, the student RGB"):
        next(train(tmp_path / "run", "genet_tiny", rgb, recipe))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_fit_of_idx_files_begins_with_weights_for_rgb(gray, rgb, weights, tmp_path):
    settings = FitSettings(
        budget_ms=1000,
        weights=str(weights.parent),
        licence="any",  # of weights that a bundle does not name
        resolutions=(24,),
        formats=("onnx",),
        precisions=("fp32",),
    )
    recipe = RecipeChoice(changes={"epochs": 1.0, "batch_size": 16})
    options = StudyOptions(device="cpu", workers=0)
    *_, last = run_study(FIT, gray, tmp_path / "fit", settings, recipe, options)
    (candidate,) = last.result.candidates
    assert (candidate.channels, candidate.weights) == (3, str(weights))
    file = open_file(tmp_path / "fit" / last.result.shipment.model)
    assert file.preprocessing.channels == 3
    bundle = Bundle.load(tmp_path / "fit" / last.result.shipment.bundle)
    for picture in (gray.test.picture(0), rgb.test.picture(0)):
        (theirs,) = predict(file, picture, top=10)
        probabilities = {each.label: each.probability for each in theirs.guesses}
        ours = next(predict(bundle, picture, top=10)).guesses
        assert {each.label: each.probability for each in ours} == pytest.approx(
            probabilities, abs=1e-4
        )
