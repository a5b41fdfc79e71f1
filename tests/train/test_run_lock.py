"""One process at a time trains in the folder of a run, and a killed one's lock is taken over."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from PIL import Image

from fullstride import cli
from fullstride.io.locks import RUN_LOCK, LockedError, find_holder, hold
from fullstride.train import run
from fullstride.train.recipes.named import DIGITS

WORDS = ["train", "digits", "--model", "genet_tiny", "--resolution", "16", "--batch-size", "64"]
SHORT = replace(DIGITS, steps=2, resolution=16, batch_size=16)


def test_a_second_training_is_one_line_and_a_killed_one_is_taken_over(tmp_path, capsys):
    out = tmp_path / "run"
    words = [*WORDS, "--epochs", "1", "--out", str(out)]
    # stopped where it would train for an hour
    first = subprocess.Popen(
        [sys.executable, "-m", "fullstride", *WORDS, "--epochs", "500", "--out", str(out)],
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not (out / "log.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert cli.run(words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"process {first.pid} of" in error
        assert str(out) in error
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert cli.run(words) == 2
    assert "has another run: recipe.epochs" in capsys.readouterr().err  # and is not locked
    assert find_holder(out / RUN_LOCK) is None


def test_a_run_of_other_images_is_refused_in_these_words(tmp_path, capsys):
    photos = tmp_path / "photos"
    for name, level in (("dark", 20), ("light", 220)):
        (photos / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (16, 16), (level, number, 0)).save(photos / name / f"{number}.png")
    words = [
        "train",
        str(photos),
        *WORDS[2:],
        "--recipe.steps",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    assert cli.run(words) == 0
    (photos / "dark" / "0.png").unlink()
    capsys.readouterr()
    assert cli.run(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "has another run: its images or labels are others. Give another --out" in error


def test_a_trial_trains_in_the_folder_that_it_has_locked(few_digits, tmp_path):
    with hold(tmp_path / "run" / RUN_LOCK, lends=True):
        assert len(list(run.train(tmp_path / "run", "genet_tiny", few_digits, SHORT))) == 1
    assert not list((tmp_path / "run").glob(f"{RUN_LOCK}*"))


def test_a_training_that_is_not_closed_keeps_its_folder(few_digits, tmp_path):
    rows = run.train(tmp_path / "run", "genet_tiny", few_digits, SHORT)
    next(rows)
    with pytest.raises(LockedError, match=r"process \d+ of .* works in"):
        next(run.train(tmp_path / "run", "genet_tiny", few_digits, SHORT))
    rows.close()
    assert len(list(run.train(tmp_path / "run", "genet_tiny", few_digits, SHORT))) == 1
