"""Balanced sampling: how often a class is drawn, from which images, and after a stop."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from fullstride.data.dataset import Images, open_data
from fullstride.data.loader import Batches, LoaderOptions, TestView, TrainView
from fullstride.data.transforms.crop import Augmentation
from fullstride.nets.preprocessing import Preprocessing
from fullstride.train.recipes.named import DIGITS

GRAY = Preprocessing(resolution=8, mean=(0.5,), std=(0.25,), crop=1.0)
TRAIN = TrainView(GRAY, Augmentation(scale=(0.3, 1.0)))


def images_of(*counts: int) -> Images:
    """Digits with as many images of each class."""
    train = open_data("digits").train
    labels = np.array(train.targets)
    chosen = [np.flatnonzero(labels == label)[:count] for label, count in enumerate(counts)]
    return train.subset(np.concatenate(chosen).tolist())


def drawn(batches: Batches, number: int, start: int = 0) -> list[list[int]]:
    return [batch.indices.tolist() for batch in batches.epoch(number, start)]


@pytest.mark.parametrize("balance", [0.25, 0.5, 1.0])
def test_a_class_is_drawn_in_proportion_to_a_power_of_its_size(balance):
    counts = (90, 30, 4)
    batches = Batches(
        images_of(*counts),
        TestView(GRAY),
        LoaderOptions(batch=31, seed=1, shuffle=True, balance=balance),
    )
    labels = np.repeat(np.arange(3), counts)
    shares = np.array(counts, float) ** (1 - balance)
    for number in range(3):
        epoch = np.concatenate(drawn(batches, number))
        assert len(epoch) == 124  # as many as there are images
        assert np.abs(np.bincount(labels[epoch]) - 124 * shares / shares.sum()).max() < 1


def test_every_image_of_a_class_is_drawn_almost_equally_often():
    batches = Batches(
        images_of(90, 30, 4), TestView(GRAY), LoaderOptions(batch=31, shuffle=True, balance=1.0)
    )
    times = Counter(np.concatenate(drawn(batches, 0)).tolist())
    for first, last in ((0, 90), (90, 120), (120, 124)):
        of_class = [times[index] for index in range(first, last)]
        assert max(of_class) - min(of_class) <= 1


def test_the_copies_of_an_image_in_an_epoch_have_different_views():
    batches = Batches(images_of(20, 2), TRAIN, LoaderOptions(batch=22, shuffle=True, balance=1.0))
    (batch,) = batches.epoch(0)
    rare = batch.x[(batch.indices == 20).nonzero()[:, 0]]
    assert len(rare) in (5, 6)
    assert len({view.numpy().tobytes() for view in rare}) == len(rare)


def test_balanced_epochs_are_functions_of_seed_and_number_for_any_workers_and_start():
    def batches(seed: int = 3, workers: int = 0) -> Batches:
        return Batches(
            images_of(60, 6),
            TRAIN,
            LoaderOptions(batch=11, seed=seed, shuffle=True, workers=workers, balance=0.8),
        )

    def content(loader: Batches, start: int = 0) -> list[tuple[bytes, list[int]]]:
        return [(b.x.numpy().tobytes(), b.indices.tolist()) for b in loader.epoch(2, start)]

    whole = content(batches())
    assert content(batches(workers=2)) == whole
    assert content(batches(), 4) == whole[4:]
    assert drawn(batches(), 2) != drawn(batches(), 3)
    assert drawn(batches(), 2) != drawn(batches(seed=4), 2)


def test_processes_have_the_parts_of_a_balanced_batch():
    settings = dict(batch=12, shuffle=True, balance=1.0)
    images = images_of(60, 12)
    whole = list(Batches(images, TRAIN, LoaderOptions(**settings)).epoch(1))
    parts = [
        list(Batches(images, TRAIN, LoaderOptions(rank=rank, world_size=3, **settings)).epoch(1))
        for rank in range(3)
    ]
    for number, batch in enumerate(whole):
        for rank in range(3):
            assert torch.equal(parts[rank][number].x, batch.x[rank::3])


def test_a_set_below_a_batch_is_one_step_of_as_many_images():
    batches = Batches(
        images_of(9, 1), TestView(GRAY), LoaderOptions(batch=64, shuffle=True, balance=1.0)
    )
    (indices,) = drawn(batches, 0)
    assert (len(indices), indices.count(9)) == (10, 5)


@pytest.mark.parametrize("settings", [dict(balance=1.5), dict(shuffle=False), dict(per_class=2)])
def test_impossible_balances_are_refused(settings):
    settings = dict(batch=2, shuffle=True, balance=1.0) | settings
    with pytest.raises(ValueError, match="balance"):
        Batches(images_of(4, 4), TestView(GRAY), LoaderOptions(**settings))


def test_the_share_of_a_recipe_is_bounded():
    with pytest.raises(ValueError, match="balanced_sampling"):
        replace(DIGITS, balanced_sampling=1.1)
