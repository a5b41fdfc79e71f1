"""Several processes learn as one does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from fullstride.nets.bundle import Bundle

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAIN = [
    "train",
    "digits",
    "--model",
    "genet_tiny",
    "--recipe.warmup-epochs",
    "0",
    "--recipe.resolution",
    "16",
]


def test_two_processes_have_the_losses_the_average_and_the_score_of_one(tmp_path):
    script = str(Path(__file__).with_name("two_processes.py"))
    for name, words in (("one", [sys.executable]), ("two", TORCHRUN)):
        subprocess.run([*words, script, str(tmp_path / name)], check=True, capture_output=True)
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    assert two[0] == pytest.approx(one[0], rel=1e-9)  # losses
    assert two[1]["images"] == 21  # which two processes cannot halve
    assert two[1] == pytest.approx(one[1], rel=1e-6)  # scores are of float32
    assert two[2] == pytest.approx(one[2], rel=1e-9)  # weights of the average


def test_torchrun_needs_no_other_flag_and_every_image_is_scored_once(tmp_path):
    out = tmp_path / "run"
    words = [*TORCHRUN, "-m", "fullstride", *TRAIN, "--recipe.epochs", "2", "--out", str(out)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("epoch")] == [
        "1/2",
        "2/2",
    ]
    assert Bundle.load(out / "bundle").scores["test"]["images"] == 500
    again = subprocess.run(words, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == again.stdout.splitlines()[-1]


def test_a_batch_that_is_not_shared_out_evenly_is_refused_in_one_line(tmp_path):
    words = [
        *TORCHRUN,
        "-m",
        "fullstride",
        *TRAIN,
        "--recipe.batch",
        "33",
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("fullstride: ")]
    assert said == [
        "fullstride: recipe.batch 33 of 1037 images is not shared out evenly among 2 processes: "
        "set it to a multiple of 2 that is not above the number of images"
    ]
    assert not (tmp_path / "run").exists()


def test_what_goes_wrong_in_one_process_or_in_all_is_told_once(tmp_path):
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(8 if "train" in name else 1):
            Image.new("RGB", (9, 9), (number, 0, 0)).save(
                tmp_path / "photos" / name / f"{number}.png"
            )
    (tmp_path / "photos/val/b/0.png").write_bytes(
        b"words"
    )  # all that the second process has to score
    words = [
        *TORCHRUN,
        "-m",
        "fullstride",
        "train",
        str(tmp_path / "photos"),
        "--model",
        "genet_tiny",
    ]
    words += ["--recipe.warmup-epochs", "0", "--recipe.resolution", "16", "--recipe.batch", "4"]
    out = ["--out", str(tmp_path / "run")]
    done = subprocess.run(
        [*words, *out, "--recipe.steps", "2"], check=True, capture_output=True, text=True
    )
    assert "skipped 1 unreadable: val/b/0.png" in done.stderr
    assert "deprecated" not in done.stderr
    done = subprocess.run([*words, *out, "--recipe.steps", "3"], capture_output=True, text=True)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "fullstride: " in line]
    assert len(said) == 1
    assert f"{tmp_path / 'run'} holds another run: recipe.steps is 2 there and 3 now" in said[0]
    assert "[rank1]: Traceback" not in done.stderr


@pytest.mark.slow
def test_one_process_killed_ends_all_within_a_minute_and_the_folder_goes_on(tmp_path):
    out = tmp_path / "run"
    words = [*TORCHRUN, "-m", "fullstride", *TRAIN, "--recipe.epochs", "40", "--out", str(out)]
    started = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (out / "checkpoint.pt").exists():
        assert started.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    killed = time.monotonic()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, error = started.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert started.returncode != 0
    assert "SIGKILL" in error or "Signal 9" in error
    before = len((out / "log.jsonl").read_text().splitlines())
    assert 0 < before < 40
    assert not (out / "bundle").exists()
    done = subprocess.run([*words[:-1], str(out)], check=True, capture_output=True, text=True)
    assert done.stdout.count("epoch ") == 40
