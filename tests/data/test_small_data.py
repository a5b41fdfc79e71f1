"""Data with few images, classes missing or no test: what is told beside a score, and where."""

import pytest
from PIL import Image

from fullstride import cli
from fullstride.report.console_lines import doubts


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a folder with train/ and val/, whose val/ lacks a class."""
    root = tmp_path_factory.mktemp("data")
    for split, classes, count in (("train", "abc", 8), ("val", "ab", 3)):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                colour = ("abc".index(name) * 90, number * 9, 50)
                Image.new("RGB", (12, 12), colour).save(root / split / name / f"{number}.png")
    (root / "train/a/9.heic").touch()
    out = tmp_path_factory.mktemp("runs") / "run"
    words = ["train", str(root), "--model", "genet_tiny", "--recipe", "digits", "--out", str(out)]
    short = ["--recipe.epochs", "1", "--recipe.resolution", "32", "--recipe.batch-size", "8"]
    assert cli.run([*words, *short, "--device", "cpu"]) == 0
    return out


@pytest.mark.parametrize("words", [["validate"], ["validate", "--split", "val"]])
def test_without_a_test_the_score_is_of_the_val_and_says_what_makes_it_weak(run, words, capsys):
    assert cli.run([*words, str(run), "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    (line,) = (row for row in captured.out.splitlines() if row.startswith("val top-1"))
    assert "on 6 images (fewer than 30" in line
    assert "no image of 1 class: c" in line
    assert "not used: 1 .heic" in captured.err


def test_a_split_without_images_is_refused_and_a_page_says_which_images_scores_are_on(
    run, tmp_path, capsys
):
    assert cli.run(["validate", str(run), "--split", "test", "--device", "cpu"]) == 2
    assert "no images for the test" in capsys.readouterr().err
    assert cli.run(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "on 6 val images" in page
    assert "No val image is of the classes: c." in page
    assert "Test images were used once" not in page


def test_a_score_on_enough_images_of_all_classes_is_told_without_doubts():
    assert doubts(30, ()) == ""
    assert "29" not in doubts(29, ())
    assert "fewer than 30" in doubts(29, ())
    assert "2 classes: a, b" in doubts(500, ("a", "b"))
