"""Batches are functions of seed and epoch for any number of workers; skipped images are named."""

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fullstride.data.dataset import Images, open_data
from fullstride.data.loader import Batch, Batches, LoaderOptions, TestView, TrainView, to_device
from fullstride.data.transforms.crop import Augmentation, to_input, train_view
from fullstride.nets.preprocessing import Preprocessing

GRAY = Preprocessing(resolution=8, mean=(0.5,), std=(0.25,), crop=1.0)
TRAIN = TrainView(GRAY, Augmentation(scale=(0.5, 1.0)))
TEST = TestView(GRAY)


def digits(count: int) -> Images:
    images = open_data("digits").train
    return images.subset(range(count))


def same(first: list[Batch], second: list[Batch]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.fixture
def spoiled(tmp_path) -> Images:
    """Training images of two classes, b/0 and the last two of which cannot be read."""
    for folder, name in enumerate(("train/a", "train/b", "val/a", "test/a")):
        (tmp_path / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (9, 9), (number, folder, 0)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "train/b/0.png").write_bytes(b"")
    for number in (3, 4):
        (tmp_path / f"train/b/{number}.png").write_bytes(b"words")
    return open_data(str(tmp_path)).train


def test_workers_change_no_pixel_in_any_epoch():
    epochs = []
    for workers in (0, 1, 2):
        batches = Batches(
            digits(70), TRAIN, LoaderOptions(batch=16, seed=3, shuffle=True, workers=workers)
        )
        epochs.append([batch for number in (0, 1, 0) for batch in batches.epoch(number)])
    assert len(epochs[0]) == 12
    assert same(epochs[0], epochs[1])
    assert same(epochs[0], epochs[2])


def test_an_epoch_is_a_function_of_seed_and_number():
    def epoch(seed: int, number: int) -> list[Batch]:
        return list(
            Batches(digits(64), TRAIN, LoaderOptions(batch=64, seed=seed, shuffle=True)).epoch(
                number
            )
        )

    assert same(epoch(1, 2), epoch(1, 2))
    orders = {
        tuple(epoch(seed, number)[0].indices.tolist()) for seed, number in ((1, 2), (1, 3), (2, 2))
    }
    assert len(orders) == 3
    assert all(sorted(order) == list(range(64)) for order in orders)


def test_an_image_is_changed_by_its_own_draws_whatever_comes_before_it():
    def by_image(batch: int, shuffle: bool) -> torch.Tensor:
        epoch = list(
            Batches(digits(48), TRAIN, LoaderOptions(batch=batch, seed=5, shuffle=shuffle)).epoch(7)
        )
        return torch.cat([each.x for each in epoch])[
            torch.cat([each.indices for each in epoch]).argsort()
        ]

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
        batches = Batches(digits(20), TRAIN, LoaderOptions(batch=8, shuffle=True, workers=workers))
        assert [len(list(batches.epoch(number))) for number in (0, 1)] == [2, 2]
    assert states() == before


def test_scoring_keeps_every_image_in_order_and_training_drops_the_rest():
    scoring = Batches(digits(20), TEST, LoaderOptions(batch=8))
    assert len(scoring) == 3
    assert [batch.indices.tolist() for batch in scoring.epoch(0)] == [
        [*range(8)],
        [*range(8, 16)],
        [*range(16, 20)],
    ]
    training = Batches(digits(20), TRAIN, LoaderOptions(batch=8, shuffle=True))
    assert len(training) == 2
    assert [len(batch.x) for batch in training.epoch(0)] == [8, 8]
    small = Batches(digits(5), TRAIN, LoaderOptions(batch=8, shuffle=True))
    assert len(small) == 1
    assert [len(batch.x) for batch in small.epoch(0)] == [5]


def test_a_batch_holds_the_views_as_input_and_their_labels():
    images = digits(10)
    (batch,) = Batches(images, TEST, LoaderOptions(batch=10, device=torch.device("cpu"))).epoch(0)
    pixels_nhwc = torch.from_numpy(
        np.stack([np.asarray(images.picture(i))[:, :, None] for i in range(10)])
    )
    assert torch.equal(batch.x, to_input(pixels_nhwc, GRAY))
    assert batch.targets.tolist() == list(images.targets)
    assert (batch.x.dtype, batch.targets.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("workers", [0, 2])
def test_scoring_leaves_unreadable_images_out_and_says_which(spoiled, workers):
    batches = Batches(
        spoiled, TestView(Preprocessing(resolution=8)), LoaderOptions(batch=2, workers=workers)
    )
    for _ in range(2):
        assert [batch.indices.tolist() for batch in batches.epoch(0)] == [
            [0, 1],
            [2, 3],
            [4],
            [6, 7],
        ]
        assert batches.skipped == {
            "train/b/0.png": "it is empty",
            "train/b/3.png": "it is not a JPEG, PNG, BMP, GIF, TIFF or WebP image",
            "train/b/4.png": "it is not a JPEG, PNG, BMP, GIF, TIFF or WebP image",
        }


@pytest.mark.parametrize("workers", [0, 2])
def test_training_takes_the_next_image_for_an_unreadable_one(spoiled, workers):
    view = TrainView(Preprocessing(resolution=8))
    batches = Batches(spoiled, view, LoaderOptions(batch=5, shuffle=True, workers=workers))
    order = Batches(spoiled, view, LoaderOptions(batch=10, shuffle=True))._sampler
    for number in range(3):
        order.epoch = number
        wanted = [index for _, index, _ in next(iter(order))]
        shown = [{5: 6, 8: 0, 9: 0}.get(index, index) for index in wanted]
        epoch = list(batches.epoch(number))
        assert torch.cat([batch.indices for batch in epoch]).tolist() == wanted
        assert torch.cat([batch.targets for batch in epoch]).tolist() == [
            spoiled.targets[index] for index in shown
        ]
        red = torch.cat([batch.x[:, 0].mean((1, 2)) for batch in epoch])  # its place in its class
        places = torch.tensor([float(index % 5) for index in shown])
        torch.testing.assert_close(red, (places / 255 - 0.485) / 0.229)
    assert sorted(batches.skipped) == ["train/b/0.png", "train/b/3.png", "train/b/4.png"]


@pytest.mark.parametrize("shuffle", [True, False])
def test_where_no_image_can_be_read_one_line_says_so(spoiled, shuffle):
    images = spoiled.subset(range(8, len(spoiled)))
    batches = Batches(
        images, TestView(Preprocessing(resolution=8)), LoaderOptions(batch=1, shuffle=shuffle)
    )
    with pytest.raises(
        ValueError,
        match=r"^none of the 2 images can be read; the first, 'train/b/[34].png': it is not a",
    ):
        list(batches.epoch(0))


@pytest.mark.parametrize("decoder", ["pillow", "opencv"])
def test_what_stands_in_for_a_broken_image_is_the_same_when_it_is_met_again(tmp_path, decoder):
    rng = np.random.default_rng(0)
    for name in ("train/a", "train/b", "val/a", "test/a"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(2):
            pixels = rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.jpg", progressive=True)
    broken = tmp_path / "train/a/0.jpg"
    data = broken.read_bytes()
    second = data.index(
        b"\xff\xda", data.index(b"\xff\xda") + 2
    )  # scan: what comes before it looks right
    broken.write_bytes(data[:second] + b"\xff\xda\0\3\x09" + data[second:])
    view = TrainView(Preprocessing(resolution=8), decoder=decoder)
    batches = Batches(open_data(str(tmp_path)).train, view, LoaderOptions(batch=4, shuffle=True))
    assert same(list(batches.epoch(0)), list(batches.epoch(0)))
    assert list(batches.skipped) == ["train/a/0.jpg"]


def test_a_view_is_drawn_from_seed_epoch_and_index():
    images = digits(20)
    (batch,) = Batches(images, TRAIN, LoaderOptions(batch=20, seed=3, shuffle=True)).epoch(5)
    pixels = [
        train_view(
            images.picture(index), GRAY, TRAIN.augmentation, np.random.default_rng([3, 5, index])
        )
        for index in batch.indices.tolist()
    ]
    assert torch.equal(batch.x, to_input(torch.from_numpy(np.stack(pixels)), GRAY))
    assert batch.indices.tolist() == np.random.default_rng([3, 5]).permutation(20).tolist()


def by_index(epoch: Iterable[Batch]) -> torch.Tensor:
    batches = list(epoch)
    return torch.cat([each.x for each in batches])[
        torch.cat([each.indices for each in batches]).argsort()
    ]


def test_views_come_again_bit_for_bit_in_another_order():
    fresh = Batches(digits(32), TRAIN, LoaderOptions(batch=8, shuffle=True))
    batches = Batches(digits(32), TRAIN, LoaderOptions(batch=8, shuffle=True, distinct_views=2))
    views = [by_index(batches.epoch(number)) for number in range(5)]
    assert torch.equal(views[0], by_index(fresh.epoch(0)))
    assert torch.equal(views[1], by_index(fresh.epoch(1)))
    assert not torch.equal(views[0], views[1])
    assert [torch.equal(views[number], views[number % 2]) for number in range(5)] == [True] * 5
    for number in range(5):
        orders = [
            [each.indices.tolist() for each in both.epoch(number)] for both in (batches, fresh)
        ]
        assert orders[0] == orders[1]


@pytest.mark.parametrize("decoder", ["pillow", "opencv"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_sides_of_the_first_epochs_are_as_asked(decoder, workers):
    view = replace(TRAIN, decoder=decoder, sides=(4, 6))
    batches = Batches(digits(16), view, LoaderOptions(batch=8, shuffle=True, workers=workers))
    for number, side in ((0, 4), (1, 6), (2, 8), (7, 8), (0, 4)):
        plain = replace(TRAIN, decoder=decoder, pre=replace(GRAY, resolution=side))
        epoch = list(batches.epoch(number))
        assert [each.x.shape for each in epoch] == [(8, 1, side, side)] * 2
        assert same(
            epoch,
            list(Batches(digits(16), plain, LoaderOptions(batch=8, shuffle=True)).epoch(number)),
        )


UNEVEN = np.repeat(
    np.arange(5), (600, 60, 60, 30, 10)
).tolist()  # 0 fills one place of two, and cannot have more


def of_classes(labels: Sequence[int]) -> Images:
    images = open_data("digits").train
    return replace(
        images,
        names=tuple(images.names[i % 1000] for i in range(len(labels))),
        targets=tuple(labels),
    )


def ordered(batches: Batches, number: int, start: int = 0) -> list[list[int]]:
    batches._sampler.epoch, batches._sampler.start = number, start
    return [[index for _, index, _ in batch] for batch in batches._sampler]


@pytest.mark.parametrize(
    ("labels", "batch", "per_class"),
    [
        (UNEVEN, 8, 4),
        (UNEVEN, 20, 4),
        (UNEVEN, 6, 2),
        (digits(1037).targets, 32, 4),
        ((7, 7, 3), 6, 3),
    ],
    ids=["two of five", "all", "three of five", "digits", "fewer images"],
)
def test_every_batch_holds_as_many_images_of_each_of_its_classes(labels, batch, per_class):
    batches = Batches(
        of_classes(labels), TRAIN, LoaderOptions(batch=batch, shuffle=True, per_class=per_class)
    )
    for number in range(3):
        epoch = ordered(batches, number)
        assert len(epoch) == len(batches) == max(1, len(labels) // batch)
        for indices in epoch:
            counts = Counter(labels[index] for index in indices)
            assert list(counts.values()) == [per_class] * (batch // per_class)
            groups = [indices[first : first + per_class] for first in range(0, batch, per_class)]
            for group in groups:
                (label,) = {labels[index] for index in group}
                assert len(set(group)) == min(per_class, labels.count(label))
        shown = Counter(index for indices in epoch for index in indices)
        for label in set(labels):  # none comes twice before all came once
            times = [shown[index] for index in range(len(labels)) if labels[index] == label]
            assert max(times) - min(times) <= 1


def test_classes_come_in_proportion_to_their_images_as_far_as_a_batch_allows():
    batches = Batches(of_classes(UNEVEN), TRAIN, LoaderOptions(batch=8, shuffle=True, per_class=4))
    counts = [
        Counter(UNEVEN[batch[first]] for batch in ordered(batches, e) for first in (0, 4))
        for e in range(40)
    ]
    assert len(batches) == 95
    for label, share in enumerate((95, *(95 * images / 160 for images in (60, 60, 30, 10)))):
        assert all(abs(each[label] - share) < 1 for each in counts)
        assert np.mean([each[label] for each in counts]) == pytest.approx(share, abs=0.25)
    meetings = {frozenset(UNEVEN[i] for i in batch) for batch in ordered(batches, 0)}
    assert len(meetings) == 4


def test_batches_of_groups_are_a_function_of_seed_and_epoch_and_go_on_from_any_of_them():
    def batches(seed: int = 1, workers: int = 0) -> Batches:
        return Batches(
            digits(200),
            TRAIN,
            LoaderOptions(batch=16, seed=seed, shuffle=True, per_class=4, workers=workers),
        )

    whole = list(batches().epoch(2))
    assert same(whole, list(batches(workers=2).epoch(2)))
    assert same(whole[5:], list(batches().epoch(2, start=5)))
    orders = {str(ordered(batches(seed), number)) for seed, number in ((1, 2), (1, 3), (2, 2))}
    assert len(orders) == 3
    assert [batch.targets.tolist() for batch in whole] == [
        [digits(200).targets[index] for index in batch.indices] for batch in whole
    ]


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_a_batch_by_whole_groups(processes):
    def batches(rank: int, world_size: int) -> Batches:
        how = dict(shuffle=True, per_class=4, rank=rank, world_size=world_size)
        return Batches(digits(200), TRAIN, LoaderOptions(batch=32, **how))

    whole = ordered(batches(0, 1), 3)
    parts = [ordered(batches(rank, processes), 3) for rank in range(processes)]
    for number, batch in enumerate(whole):
        assert sorted(batch) == sorted(index for part in parts for index in part[number])
        for part in parts:
            assert set(Counter(digits(200).targets[index] for index in part[number]).values()) == {
                4
            }


def test_impossible_groups_views_and_sides_are_refused():
    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            Batches(digits(200), TRAIN, LoaderOptions(**{"batch": 16, "shuffle": True, **options}))

    refused(
        "^5 images per class in batches of 16 .* use one of 1, 2, 4, 8, 16$",
        per_class=5,
    )
    refused("^-4 images per class in", per_class=-4)
    refused(
        "^4 images per class in batches of 16 with shuffle False: shuffle",
        per_class=4,
        shuffle=False,
    )
    refused(
        "^10 classes .* batch of 32 with 2 images of each: use 4 of each, or a batch of 20$",
        batch=32,
        per_class=2,
    )
    refused(
        "^5 classes in a batch .* 2 processes: use a batch that is a multiple of 8$",
        batch=20,
        per_class=4,
        world_size=2,
    )
    refused("^distinct_views -1: use", distinct_views=-1)
    with pytest.raises(ValueError, match="^resolution 0: use 1 to 4096 pixels$"):
        TrainView(GRAY, sides=(4, 0))


def test_an_epoch_left_early_does_not_disturb_the_next():
    batches = Batches(digits(64), TRAIN, LoaderOptions(batch=4, shuffle=True, workers=2))
    whole = list(batches.epoch(1))
    next(batches.epoch(0))
    assert same(whole, list(batches.epoch(1)))


def test_images_and_views_pickle(spoiled):
    for thing in (spoiled, digits(3), TRAIN, TEST):
        assert pickle.loads(pickle.dumps(thing)) == thing


def test_impossible_batches_are_refused():
    with pytest.raises(ValueError, match="no images"):
        Batches(digits(0), TEST, LoaderOptions(batch=1))
    with pytest.raises(ValueError, match="batch 0: use a whole number, at least 1"):
        Batches(digits(3), TEST, LoaderOptions(batch=0))


@pytest.mark.skipif(sys.platform == "win32", reason="signals to a process group")
def test_ctrl_c_is_heard_once_and_ends_the_workers(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(
        "from fullstride.data.loader import *\n"
        "from fullstride.data.dataset import open_data\n"
        "pre = Preprocessing(resolution=8, mean=(0.5,), std=(0.5,))\n"
        "images, how = open_data('digits').train, dict(batch=4, shuffle=True, workers=2)\n"
        "batches = Batches(images, TrainView(pre), LoaderOptions(**how))\n"
        "for number in range(10**6):\n"
        "    for batch in batches.epoch(number):\n"
        "        print(number, flush=True)\n"
    )
    process = subprocess.Popen(
        # Ctrl-C can come after the standard library opens a socket and before its `with` holds it.
        [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert process.stdout
    assert process.stdout.readline() == "0\n"
    started = time.perf_counter()
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert time.perf_counter() - started < 10
    assert said.count("KeyboardInterrupt") == 1
    assert said.strip().endswith("KeyboardInterrupt")


def test_targets_of_any_nesting_are_moved_with_their_tensors():
    boxes, meta = torch.ones(2, 4), torch.device("meta")
    moved = to_device({"boxes": [boxes, boxes], "names": ("a", "b")}, meta)
    assert [each.device.type for each in moved["boxes"]] == ["meta", "meta"]
    assert moved["names"] == ("a", "b")
