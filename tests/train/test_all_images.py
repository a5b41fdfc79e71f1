"""Which images a network is trained and scored on, a last training on all images, and what is said
about both."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import bundles
import pytest
import torch
from PIL import Image

from fullstride import cli, tasks
from fullstride.data.dataset import open_data
from fullstride.data.readers.splits import SplitRule
from fullstride.deploy.export_runs import comparison_images
from fullstride.report.plots import learning_curves
from fullstride.report.training_progress import epoch_line
from fullstride.tasks import find_task
from fullstride.train import run, run_folder
from fullstride.train.recipes.named import RECIPES
from fullstride.train.recipes.recipe import Recipe
from fullstride.train.scoring import images_to_score, matching_data

RECIPE = Recipe(epochs=2, batch_size=512, lr=0.1, warmup_epochs=0, resolution=16, precision="fp32")


@pytest.fixture(scope="module")
def last(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "last"
    data = open_data("digits", SplitRule(val=0, test=0))
    return folder, [*run.train(folder, "genet_tiny", data, RECIPE)]


def test_all_images_are_trained_on_and_nothing_is_scored(last):
    folder, rows = last
    config = json.loads((folder / run_folder.RUN_CONFIG).read_text())
    assert (config["val"], config["test"]) == (0, 0)
    assert not (folder / run_folder.BEST).exists()
    bundle = run_folder.bundle.read_metadata(folder / run_folder.BUNDLE)
    assert bundle.scores == {}
    assert not any("val" in key for row in rows for key in row)
    metric = find_task().metric
    assert run_folder.read_log(folder, metric) == rows
    assert "val" not in epoch_line(rows[0], metric)
    assert learning_curves({"last": rows, "other": []}, metric).startswith("<svg")


def test_a_run_on_all_images_resumes_to_the_same_weights(last, tmp_path, monkeypatch):
    folder, rows = last
    data = open_data("digits", SplitRule(val=0, test=0))
    stopped = run.train(tmp_path / "run", "genet_tiny", data, RECIPE)
    next(stopped)
    stopped.close()
    again = [*run.train(tmp_path / "run", "genet_tiny", data, RECIPE)]
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]
    states = [run_folder.load_checkpoint(each) for each in (folder, tmp_path / "run")]
    for name, value in states[0]["average"].items():  # type: ignore[index]
        assert torch.equal(value, states[1]["average"][name])  # type: ignore[index]
    with pytest.raises(ValueError, match=r"val is 0\.0 there and None now"):
        next(run.train(folder, "genet_tiny", open_data("digits", SplitRule(test=0)), RECIPE))


def test_early_stopping_without_a_val_is_refused_before_a_folder_is_made(tmp_path, capsys):
    words = ["train", "digits", "--model", "genet_tiny", "--out", str(tmp_path / "run")]
    words += ["--val", "0", "--recipe.early-stop-patience", "3", "--device", "cpu"]
    assert cli.run(words) == 2
    assert "early_stop_patience 3 needs validation images" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_commands_say_that_there_is_no_score(last, tmp_path, capsys):
    folder, _ = last
    assert cli.run(["validate", str(folder), "--device", "cpu"]) == 2
    assert "trained on all images" in capsys.readouterr().err
    assert cli.run(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 2
    assert "has no score: give images" in capsys.readouterr().err
    words = ["train", "digits", "--model", "genet_tiny", "--out", str(tmp_path / "run")]
    words += ["--val", "0", "--test", "0", "--epochs", "1", "--batch-size", "900"]
    assert cli.run([*words, "--resolution", "16", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out
    assert "1,797 train, 0 val, 0 test" in lines
    assert "no validation split: no epoch is chosen" in lines
    assert "no score, as all images were trained on" in lines


def test_a_run_whose_test_images_cannot_be_read_has_a_bundle_without_test_scores(tmp_path, capsys):
    for number, split in enumerate(("train", "val", "test")):
        write(tmp_path / "data" / split, 4, first=10 * number)
    for file in (tmp_path / "data" / "test").glob("*/*"):
        file.write_bytes(f"{file}".encode())
    folder = tmp_path / "run"
    words = ["train", f"{tmp_path}/data", "--model", "genet_tiny", "--out", f"{folder}"]
    words += ["--epochs", "1", "--batch-size", "4", "--resolution", "16", "--device", "cpu"]
    assert cli.run(words) == 0
    out, err = capsys.readouterr()
    assert f"no score, as no test image could be scored; bundle in {folder}" in out
    assert f"{folder} has no test scores: none of the 8 images can be read" in err
    assert [*run_folder.bundle.read_metadata(folder / run_folder.BUNDLE).scores] == ["val"]
    assert cli.run(words) == 0  # a finished run


def test_a_file_of_such_a_run_is_compared_on_training_images(last):
    folder, _ = last
    images = comparison_images(str(folder), tasks.load(str(folder)))
    assert len(images.pictures) > 100


BUNDLE = replace(bundles.small_bundle(), classes=("a", "b"))


def write(root: Path, each: int, first: int = 0) -> Path:
    for label in "ab":
        (root / label).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            pixel = (first + number, "ab".index(label), 7)
            Image.new("RGB", (4, 4), pixel).save(root / label / f"{number:03}.png")
    return root


def run_on(folder: Path, where: str, **how) -> str:
    """A folder with the configuration of a run on the data at `where`."""
    data = open_data(where, SplitRule(**how))
    recipe = asdict(RECIPES["digits"])
    config = dict(model="x", weights="", data=data.where, fingerprint=data.fingerprint)
    config |= dict(classes=data.classes, spec={}, recipe=recipe)
    config |= dict(preprocessing=asdict(BUNDLE.preprocessing), efficiency="plain")
    config |= dict(score_every_epochs=1, precision="fp32", channels_last=True, grad_accum_steps=1)
    folder.mkdir(parents=True)
    (folder / run_folder.RUN_CONFIG).write_text(json.dumps(config | asdict(data.rule)))
    return str(folder)


@pytest.mark.parametrize("how", [{"val": 0.4}, {"group": r"(\d\d)\.png"}, {"test": 0.3}, {}])
def test_the_splits_of_a_run_travel_with_it_to_the_same_data_wherever_they_are(tmp_path, how):
    where = str(write(tmp_path / "data", 60))
    shutil.copy(f"{where}/a/000.png", f"{where}/a/copy99.png")
    run, data = run_on(tmp_path / "run", where, **how), open_data(where, SplitRule(**how))
    shutil.copytree(where, tmp_path / "moved")
    assert BUNDLE.classes == data.classes
    for given in ("", where, f"{where}/../data", str(tmp_path / "moved")):
        for split in ("val", "test"):
            on = images_to_score(run, BUNDLE, given, split)
            assert on.images.names == getattr(data, split).names
            assert on.notes == ()
        assert images_to_score(run, BUNDLE, given).split == "test"
    (tmp_path / "run/bundle").mkdir()
    for name in ("bundle", "best", "probe", "soup/1"):
        inside = images_to_score(f"{run}/{name}", BUNDLE, where, "val")
        assert inside.images.names == data.val.names
    assert matching_data(run, BUNDLE, where).train.names == data.train.names


def test_of_other_data_without_splits_all_images_are_scored_and_it_is_said(tmp_path):
    run = run_on(tmp_path / "run", str(write(tmp_path / "data", 30)))
    other = str(write(tmp_path / "other", 1, first=100))
    for where in (run, "no/run"):
        for split in (None, "all"):
            on = images_to_score(where, BUNDLE, other, split)
            assert (on.split, len(on.images), on.missing) == ("all", 2, ())
            assert any("all images of other" in note for note in on.notes) == (split is None)
            unknown = any("does not say which" in note for note in on.notes)
            assert unknown == (split is None and where == "no/run")
    with pytest.raises(ValueError, match="too few images"):
        images_to_score(run, BUNDLE, other, "test")
    given = tmp_path / "given"
    for number, split in enumerate(("train", "val")):
        write(given / split, 3, first=100 + 10 * number)
    assert images_to_score(run, BUNDLE, str(given)).split == "val"
    on = images_to_score(run, BUNDLE, str(given), "all")
    assert (len(on.images), on.notes) == (12, ())


def test_images_that_were_trained_on_are_counted_and_named(tmp_path):
    where = str(write(tmp_path / "data", 40))
    run, data = run_on(tmp_path / "run", where), open_data(where)
    other = write(tmp_path / "other", 5, first=200)
    for number, name in enumerate(data.train.names[:3]):
        shutil.copy(tmp_path / "data" / name, other / name[0] / f"copy{number}.png")
    shutil.copy(tmp_path / "data" / data.test.names[0], other / "a" / "test.png")
    (note,) = [n for n in images_to_score(run, BUNDLE, str(other)).notes if "trained on" in n]
    assert note.startswith("3 of the 14 images")
    assert "'a/copy0.png'" in note
    on = images_to_score(run, BUNDLE, where, "all")
    assert len(on.images) == 80
    assert any(n.startswith(f"{len(data.train)} of the 80 images") for n in on.notes)
    shutil.rmtree(where)  # nothing to compare with
    assert len(images_to_score(run, BUNDLE, str(other)).notes) == 1


def test_a_run_on_all_images_has_none_to_be_scored_on(tmp_path):
    where = str(write(tmp_path / "data", 10))
    run = run_on(tmp_path / "run", where, val=0, test=0)
    with pytest.raises(ValueError, match="trained on all images: give others by --data"):
        images_to_score(run, BUNDLE)
    on = images_to_score(run, BUNDLE, split="train")
    assert len(on.images) == 20
    assert on.notes[0].startswith("20 of the 20 images were trained on")


def test_a_class_whose_training_images_are_all_copies_can_still_be_scored(tmp_path, capfd):
    """Nothing is trained there: what training refuses is a note."""
    for split in ("train", "test"):
        write(tmp_path / "data" / split, 4)
    with pytest.raises(ValueError, match="copies"):
        open_data(str(tmp_path / "data"))
    where = str(tmp_path / "data")
    sizes = [len(images_to_score(str(tmp_path), BUNDLE, where, s).images) for s in ("test", "all")]
    assert sizes == [8, 16]
    assert "'a'" in capfd.readouterr().err
    assert len(matching_data(str(tmp_path), BUNDLE, where).test) == 8
