"""A disk that is full ends training in one line; the same command goes on when there is room."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fullstride import cli
from fullstride.autofit.fit import FIT
from fullstride.autofit.settings import FitSettings
from fullstride.io import writing
from fullstride.nets.bundle import Bundle
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.study.driver import Event, run_study
from fullstride.study.settings import StudyOptions
from fullstride.train import run, run_folder
from fullstride.train.distill import CachedTeacher, Teacher, allocate
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.train.recipes.named import DIGITS
from fullstride.train.run_folder import open_board

MIB = 2**20
SHORT = replace(DIGITS, epochs=2, warmup_epochs=1, resolution=16, batch_size=16)
WORDS = "train digits --model genet_tiny --recipe.steps 2 --recipe.warmup-epochs 0"
WORDS += " --recipe.resolution 16 --recipe.batch-size 64"


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A disk of 64 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a disk cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def teacher(tmp_path) -> Path:
    torch.manual_seed(0)
    spec = replace(SPECS["genet_tiny"], in_channels=1, classes=10)
    pixels = Preprocessing(resolution=16, mean=(0.5,), std=(0.5,))
    Bundle(
        Network(spec), name="teacher", classes=tuple(map(str, range(10))), preprocessing=pixels
    ).save(tmp_path / "teacher")
    return tmp_path / "teacher"


def test_wherever_the_disk_is_full_the_same_run_goes_on(few_digits, tmp_path, monkeypatch):
    whole = [row["loss"] for row in run.train(tmp_path / "whole", "genet_tiny", few_digits, SHORT)]
    folder, sync = tmp_path / "run", writing._sync
    # in the order in which they are written
    names = ("run.json", "best", "log.jsonl", "checkpoint.pt", "scores.json", "bundle")
    assert {*names, "probe"} == run_folder.OUTPUTS.keys()  # that is a bundle too, before training
    for name in names:

        def full(path: Path, name: str = name) -> None:
            if path.name.startswith(f".{name}."):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(path)

        monkeypatch.setattr(writing, "_sync", full)
        with pytest.raises(OSError, match="No space") as caught:
            list(run.train(folder, "genet_tiny", few_digits, SHORT))
        assert caught.value.filename == str(folder / name)
        files = {each.name for each in folder.iterdir()} if folder.exists() else set()
        assert files <= set(names) - {name}
    monkeypatch.setattr(writing, "_sync", sync)
    again = [row["loss"] for row in run.train(folder, "genet_tiny", few_digits, SHORT)]
    assert again == whole


# Files of a fit in the order in which they are written: some of every stage.
OF_FIT = (
    "fit_config.json",
    "seconds.json",
    "data.json",
    "candidates.json",
    "times/genet_tiny-16.json",
    "times.json",
    "budget.png",
    "training_times/genet_tiny-16.json",
    "plan.json",
    "trials/genet_tiny-16/run.json",
    "trials/genet_tiny-16/checkpoint.pt",
    "trials/genet_tiny-16/bundle",
    "rungs/1/genet_tiny-16.json",
    "training.json",
    "ship/times.json",
    "shipping.json",
    "fit.json",
    "report.html",
    "files.png",
)


@pytest.mark.slow
def test_wherever_the_disk_is_full_the_same_fit_goes_on(few_digits, tmp_path, monkeypatch):
    settings = FitSettings(
        budget_ms=1000,
        weights="none",
        candidates=("genet_tiny",),
        resolutions=(16,),
        formats=("onnx",),
        precisions=("fp32",),
    )
    recipe = RecipeChoice(changes={"epochs": 1.0, "batch_size": 32})
    options = StudyOptions(device="cpu", workers=0)
    folder, sync, full_at = tmp_path / "fit", writing._sync, list[str]()

    def full(path: Path) -> None:
        place = path.relative_to(folder).parent / path.name.split(".new")[0].lstrip(".")
        if any(place.as_posix().startswith(f"{name}.") for name in full_at):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    def events() -> list[Event]:
        return [*run_study(FIT, few_digits, folder, settings, recipe, options)]

    monkeypatch.setattr(writing, "_sync", full)
    for name in OF_FIT:
        full_at[:] = [name]
        with pytest.raises(OSError, match="No space") as caught:
            events()
        assert caught.value.filename == str(folder / name)
        assert not (folder / name).exists() or name == "seconds.json"
    full_at.clear()
    result = events()[-1].result
    assert (folder / result.shipment.model).exists()
    assert [score.epochs for score in result.outcome.scores] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("free_mib", [0, 1, 3, 7])
def test_on_a_full_disk_a_command_ends_in_one_line_and_goes_on_when_there_is_room(
    free_mib, disk, teacher, capsys
):
    filler = disk / "filler"
    filler.write_bytes(bytes(64 * MIB - free_mib * MIB))
    words = [*WORDS.split(), "--out", str(disk / "run"), "--recipe.teacher", str(teacher)]
    words += ["--teacher-cache", str(disk / "cache")]
    assert cli.run(words) in (1, 2)
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert str(disk) in error
    filler.unlink()
    assert cli.run(words) == 0


def test_a_log_for_tensorboard_on_a_full_disk_is_an_error_of_its_path(disk, recwarn):
    board = open_board(disk)
    board({"epoch": 1, "loss": 1.0})
    (disk / "filler").write_bytes(bytes(63 * MIB))
    row = {"epoch": 2, **{f"{number:0500}": 1.0 for number in range(4000)}}
    with pytest.raises(OSError, match="events") as caught:
        board(row)
    assert caught.value.errno == errno.ENOSPC
    assert not recwarn.list  # of a thread


def test_the_file_of_a_cache_has_its_space_before_it_is_mapped(disk, tmp_path, monkeypatch):
    (disk / "filler").write_bytes(bytes(60 * MIB))
    path = disk / "a.f16"
    for way in ("posix_fallocate", "zeros"):
        path.write_bytes(b"mine")
        if way == "zeros":
            monkeypatch.delattr(os, "posix_fallocate")
        with pytest.raises(OSError, match="a.f16") as caught:
            allocate(path, 8 * MIB)
        assert caught.value.errno == errno.ENOSPC
        assert path.read_bytes()[:4] == b"mine"
        path.write_bytes(b"mine")
        allocate(path, 2 * MIB)
        assert path.read_bytes() == b"mine".ljust(2 * MIB, b"\0")
        assert path.stat().st_blocks * 512 >= 2 * MIB


def test_the_cache_of_a_teacher_has_no_holes_and_nothing_is_created_before_it_is_used(
    teacher, tmp_path
):
    bundle = Bundle.load(teacher)
    model = Teacher(bundle, bundle.preprocessing)
    cached = CachedTeacher(model, tmp_path / "a" / "cache", 10_000, {"data": "a"}, 2)
    assert not (tmp_path / "a").exists()
    assert cached(torch.zeros(2, 1, 16, 16), 0, torch.tensor([0, 9_999])).shape == (2, 10)
    (file,) = cached.folder.glob("*.f16")
    assert file.stat().st_blocks * 512 >= file.stat().st_size == 2 * 10_000 * 10
    key = cached.folder / "about.json"
    key.write_text("another program's")
    with pytest.raises(ValueError, match="about.json"):
        CachedTeacher(model, tmp_path / "a" / "cache", 10_000, {"data": "a"}, 2)
    assert key.read_text() == "another program's"
