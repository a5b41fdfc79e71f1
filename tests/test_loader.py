"""Is every batch what seed and epoch say, whoever decodes it, and is every image that was left out told of?"""

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fullstride.data.augment import Augmentation, to_input
from fullstride.data.images import Images, open_data
from fullstride.data.loader import Batch, Batches, TestView, TrainView
from fullstride.nets.preprocessing import Preprocessing

GRAY = Preprocessing(resolution=8, mean=(0.5,), std=(0.25,), crop=1.0)
TRAIN = TrainView(GRAY, Augmentation(scale=(0.5, 1.0)))
TEST = TestView(GRAY)


def digits(count: int) -> Images:
    images = open_data("digits").train
    return replace(images, names=images.names[:count], labels=images.labels[:count])


def same(first: list[Batch], second: list[Batch]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.fixture
def spoiled(tmp_path) -> Images:
    """Training images of two classes, b/0 and the last two of which cannot be read."""
    for name in ("train/a", "train/b", "val/a", "test/a"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (9, 9), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "train/b/0.png").write_bytes(b"")
    for number in (3, 4):
        (tmp_path / f"train/b/{number}.png").write_bytes(b"words")
    return open_data(str(tmp_path)).train


def test_workers_change_no_pixel_in_any_epoch():
    epochs = []
    for workers in (0, 1, 2):
        batches = Batches(digits(70), TRAIN, batch=16, seed=3, shuffle=True, workers=workers)
        epochs.append([batch for number in (0, 1, 0) for batch in batches.epoch(number)])
    assert len(epochs[0]) == 12
    assert same(epochs[0], epochs[1])
    assert same(epochs[0], epochs[2])


def test_an_epoch_is_a_function_of_seed_and_number():
    def epoch(seed: int, number: int) -> list[Batch]:
        return list(Batches(digits(64), TRAIN, batch=64, seed=seed, shuffle=True).epoch(number))

    assert same(epoch(1, 2), epoch(1, 2))
    orders = {tuple(epoch(seed, number)[0].indices.tolist()) for seed, number in ((1, 2), (1, 3), (2, 2))}
    assert len(orders) == 3
    assert all(sorted(order) == list(range(64)) for order in orders)


def test_an_image_is_changed_by_its_own_draws_whatever_comes_before_it():
    def by_image(batch: int, shuffle: bool) -> torch.Tensor:
        epoch = list(Batches(digits(48), TRAIN, batch=batch, seed=5, shuffle=shuffle).epoch(7))
        return torch.cat([each.x for each in epoch])[torch.cat([each.indices for each in epoch]).argsort()]

    assert torch.equal(by_image(48, True), by_image(7, False))


def test_loading_draws_nothing_from_the_global_generators():
    def states() -> tuple[bytes, bytes, bytes]:
        return (
            torch.get_rng_state().numpy().tobytes(),
            pickle.dumps(np.random.get_state()),
            pickle.dumps(random.getstate()),
        )

    before = states()
    for workers in (0, 1):
        batches = Batches(digits(20), TRAIN, batch=8, shuffle=True, workers=workers)
        assert [len(list(batches.epoch(number))) for number in (0, 1)] == [2, 2]
    assert states() == before


def test_scoring_keeps_every_image_in_order_and_training_drops_the_rest():
    scoring = Batches(digits(20), TEST, batch=8)
    assert len(scoring) == 3
    assert [batch.indices.tolist() for batch in scoring.epoch(0)] == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    training = Batches(digits(20), TRAIN, batch=8, shuffle=True)
    assert len(training) == 2
    assert [len(batch.x) for batch in training.epoch(0)] == [8, 8]
    small = Batches(digits(5), TRAIN, batch=8, shuffle=True)
    assert len(small) == 1
    assert [len(batch.x) for batch in small.epoch(0)] == [5]


def test_a_batch_holds_the_views_as_input_and_their_labels():
    images = digits(10)
    (batch,) = Batches(images, TEST, batch=10, device=torch.device("cpu")).epoch(0)
    pixels_nhwc = torch.from_numpy(np.stack([np.asarray(images.picture(i))[:, :, None] for i in range(10)]))
    assert torch.equal(batch.x, to_input(pixels_nhwc, GRAY))
    assert batch.labels.tolist() == list(images.labels)
    assert (batch.x.dtype, batch.labels.dtype) == (torch.float32, torch.int64)
    (other,) = Batches(images, TEST, batch=10, pre=replace(GRAY, std=(0.5,))).epoch(0)
    torch.testing.assert_close(other.x * 2, batch.x)


@pytest.mark.parametrize("workers", [0, 2])
def test_scoring_leaves_unreadable_images_out_and_says_which(spoiled, workers):
    batches = Batches(spoiled, TestView(Preprocessing(resolution=8)), batch=2, workers=workers)
    for _ in range(2):
        assert [batch.indices.tolist() for batch in batches.epoch(0)] == [[0, 1], [2, 3], [4], [6, 7]]
        assert batches.skipped == {
            "train/b/0.png": "it is empty",
            "train/b/3.png": "it is not a JPEG, PNG, BMP, GIF, TIFF or WebP image",
            "train/b/4.png": "it is not a JPEG, PNG, BMP, GIF, TIFF or WebP image",
        }


@pytest.mark.parametrize("workers", [0, 2])
def test_training_takes_the_next_image_for_an_unreadable_one(spoiled, workers):
    view = TrainView(Preprocessing(resolution=8))
    batches = Batches(spoiled, view, batch=5, shuffle=True, workers=workers)
    order = Batches(spoiled, view, batch=10, shuffle=True)._order
    for number in range(3):
        order.epoch = number
        wanted = [{5: 6, 8: 0, 9: 0}.get(index, index) for _, index in next(iter(order))]
        epoch = list(batches.epoch(number))
        assert torch.cat([batch.indices for batch in epoch]).tolist() == wanted
        assert torch.cat([batch.labels for batch in epoch]).tolist() == [spoiled.labels[index] for index in wanted]
        assert torch.cat([batch.x[:, 0] for batch in epoch]).shape == (10, 8, 8)
    assert sorted(batches.skipped) == ["train/b/0.png", "train/b/3.png", "train/b/4.png"]


@pytest.mark.parametrize("shuffle", [True, False])
def test_where_no_image_can_be_read_one_line_says_so(spoiled, shuffle):
    images = replace(spoiled, names=spoiled.names[8:], labels=spoiled.labels[8:])
    batches = Batches(images, TestView(Preprocessing(resolution=8)), batch=1, shuffle=shuffle)
    with pytest.raises(
        ValueError, match=r"^none of the 2 images can be read; the first, 'train/b/[34].png': it is not a"
    ):
        list(batches.epoch(0))


def test_an_epoch_left_early_does_not_disturb_the_next():
    batches = Batches(digits(64), TRAIN, batch=4, shuffle=True, workers=2)
    whole = list(batches.epoch(1))
    next(batches.epoch(0))
    assert same(whole, list(batches.epoch(1)))


def test_images_and_views_pickle(spoiled):
    for thing in (spoiled, digits(3), TRAIN, TEST):
        assert pickle.loads(pickle.dumps(thing)) == thing


def test_impossible_batches_are_refused():
    with pytest.raises(ValueError, match="no images"):
        Batches(digits(0), TEST, batch=1)
    with pytest.raises(ValueError, match="batch 0 and workers 0: use"):
        Batches(digits(3), TEST, batch=0)


@pytest.mark.skipif(sys.platform == "win32", reason="signals to a process group")
def test_ctrl_c_is_heard_once_and_ends_the_workers(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(
        "from fullstride.data.loader import *\n"
        "from fullstride.data.images import open_data\n"
        "pre = Preprocessing(resolution=8, mean=(0.5,), std=(0.5,))\n"
        "batches = Batches(open_data('digits').train, TrainView(pre), batch=4, shuffle=True, workers=2)\n"
        "for number in range(10**6):\n"
        "    for batch in batches.epoch(number):\n"
        "        print(number, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")},
    )
    assert process.stdout
    assert process.stdout.readline() == "0\n"
    started = time.perf_counter()
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert time.perf_counter() - started < 10
    assert said.count("KeyboardInterrupt") == 1
    assert said.strip().endswith("KeyboardInterrupt")
