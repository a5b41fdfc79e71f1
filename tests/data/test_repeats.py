"""Repeated augmentation: which images an epoch has, how they look, and after a stop."""

import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler

from fullstride.data.dataset import open_data
from fullstride.data.loader import Batches, EpochSampler, LoaderOptions, TestView, TrainView
from fullstride.data.transforms.crop import Augmentation
from fullstride.nets.preprocessing import Preprocessing

GRAY = Preprocessing(resolution=8, mean=(0.5,), std=(0.25,), crop=1.0)
TRAIN = TrainView(GRAY, Augmentation(scale=(0.3, 1.0)))


def some(count: int):
    return open_data("digits").train.subset(list(range(count)))


def sampler(**options) -> EpochSampler:
    return EpochSampler((0,) * 100, LoaderOptions(batch=24, seed=5, shuffle=True, **options))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_processes_have_the_images_that_timms_sampler_gives_them(world_size):
    order = np.random.default_rng([5, 0]).permutation(100)
    for rank in range(world_size):
        ours = list(sampler(rank=rank, world_size=world_size, repeats=3))
        theirs = RepeatAugSampler(
            range(100), world_size, rank, shuffle=False, num_repeats=3, selected_round=24
        )
        places = list(theirs)[: 96 // world_size]
        assert [index for batch in ours for _, index, _ in batch] == order[places].tolist()


def test_an_epoch_has_as_many_images_and_each_of_its_images_so_many_times():
    batches = list(sampler(repeats=4))
    assert [len(batch) for batch in batches] == [24] * 4
    keys = [(index, copy) for batch in batches for _, index, copy in batch]
    assert len(set(keys)) == len(keys) == 96
    images, counts = np.unique([index for index, _ in keys], return_counts=True)
    assert (len(images), set(counts)) == (24, {4})
    assert list(sampler(repeats=1)) == list(sampler())


def test_the_copies_of_an_image_differ_and_the_first_looks_as_without_repeats():
    alone = dict(batch=60, seed=2, shuffle=True)
    (once,) = Batches(some(60), TRAIN, LoaderOptions(**alone)).epoch(3)
    (batch,) = Batches(some(60), TRAIN, LoaderOptions(repeats=3, **alone)).epoch(3)
    assert torch.equal(batch.indices[::3], once.indices[:20])
    assert torch.equal(batch.x[::3], once.x[:20])
    views = {view.numpy().tobytes() for view in batch.x}
    assert len(views) == 60


def test_repeated_epochs_are_functions_of_seed_and_number_for_any_workers_and_start():
    def content(start: int = 0, workers: int = 0) -> list[tuple[bytes, list[int]]]:
        loader = Batches(
            some(50),
            TRAIN,
            LoaderOptions(batch=10, seed=3, shuffle=True, workers=workers, repeats=3),
        )
        return [(b.x.numpy().tobytes(), b.indices.tolist()) for b in loader.epoch(2, start)]

    whole = content()
    assert content(workers=2) == whole
    assert content(3) == whole[3:]


@pytest.mark.parametrize("settings", [dict(repeats=0), dict(shuffle=False), dict(per_class=2)])
def test_impossible_repeats_are_refused(settings):
    settings = dict(batch=2, shuffle=True, repeats=3) | settings
    with pytest.raises(ValueError, match="repeats"):
        Batches(some(8), TestView(GRAY), LoaderOptions(**settings))
