"""Test images of another kind than those for training: what is said of them, and when."""

import re
from dataclasses import replace

import pytest
from PIL import ImageOps

from fullstride.autofit.fit import FIT
from fullstride.autofit.settings import FitSettings
from fullstride.data.dataset import open_data
from fullstride.io.console import Bar
from fullstride.nets.bundle import Bundle
from fullstride.report.training_progress import TrainingProgress, shift_lines
from fullstride.study.driver import run_study
from fullstride.study.settings import StudyOptions
from fullstride.tasks.classify import Classify
from fullstride.train import run_folder
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.run import train
from fullstride.train.scoring import load_scores

RECIPE = Recipe(epochs=8, batch_size=32, lr=0.1, resolution=16, hflip_prob=0.0, scale=(0.8, 1.2))
HOW = StudyOptions(device="cpu", workers=0)
OTHERS = 5  # classes of which the test has negatives


class PartlyNegative:
    """Reads images, some of them as negatives."""

    def __init__(self, read, names):
        self.read, self.names = read, names

    def __call__(self, name):
        picture = self.read(name)
        return ImageOps.invert(picture) if name in self.names else picture


@pytest.fixture(scope="module")
def shifted():
    """Digits whose test has half of the classes as negatives."""
    data = open_data("digits")
    test = data.test.subset(range(100))
    negatives = {
        name for name, target in zip(test.names, test.targets, strict=True) if target < OTHERS
    }
    return replace(
        data,
        train=data.train.subset(range(600)),
        val=data.val.subset(range(100)),
        test=replace(test, read=PartlyNegative(test.read, negatives)),
    ), negatives


@pytest.fixture(scope="module")
def run(shifted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shift") / "run"
    list(train(folder, "resnet_rs_tiny", shifted[0], RECIPE))
    return folder


def test_a_test_of_another_kind_is_told_with_its_classes_and_images(run, shifted):
    data, negatives = shifted
    shift, classes, images, advice = shift_lines(run, data)
    scores = Bundle.load(run / run_folder.BUNDLE).scores
    low = float(shift.split("validation, ")[1].split()[0])
    assert low < scores["val"]["top1"]
    assert f"{low - scores['test']['top1']:.1f} points below" in shift
    named = re.findall(r"(\d) \(", classes)
    assert {int(each) for each in named} <= set(range(OTHERS))
    assert len(named) == 3
    assert {each.strip() for each in images.split(":")[1].split(",")} <= negatives
    assert "val/" in advice
    assert "--group" in advice


def test_no_test_and_one_that_is_as_good_or_too_small_to_tell_are_not_told(run, shifted):
    data, _ = shifted
    assert not shift_lines(run, replace(data, test=data.test.subset([])))
    assert not shift_lines(run, data, of_share(run, 1.0, 100))
    assert not shift_lines(run, data, of_share(run, 0.75, 4))
    assert shift_lines(run, data, of_share(run, 0.75, 400))


def test_images_are_named_by_their_letters_alone(run, shifted):
    data, test = shifted[0], shifted[0].test
    names = tuple(f"\x1b{name}" for name in test.names)
    hostile = replace(test, names=names, read=lambda name: test.read(name[1:]))
    assert r"\x1b" in shift_lines(run, replace(data, test=hostile))[2]


def of_share(run, share, images):
    """The scores of a test with so many images, of which that share is classified correctly."""
    test = load_scores(run / run_folder.SCORES).splits["test"]
    return replace(test, scores={"top1": 100 * share, "images": images})


@pytest.mark.slow
def test_the_command_and_a_fit_end_with_it(run, shifted, tmp_path, capsys):
    data, _ = shifted
    lines = shift_lines(run, data)
    with Bar(shown=True) as bar:
        TrainingProgress(bar, Classify.metric).end(run, data, RECIPE)
    printed = " ".join(capsys.readouterr().out.split())
    assert " ".join(lines[0].split()) in printed
    settings = FitSettings(
        budget_ms=1000,
        weights="none",
        candidates=("resnet_rs_tiny",),
        resolutions=(16,),
        formats=("onnx",),
        precisions=("fp32",),
    )
    choice = RecipeChoice(changes={"epochs": 12.0, "batch_size": 32, "lr": 0.1})
    events = list(run_study(FIT, data, tmp_path / "fit", settings, choice, HOW))
    notes = events[-1].result.shipment.notes
    assert any(" points below the interval of the validation" in note for note in notes)
