"""The recipes that follow the number of images: their shape, and what they gain."""

from dataclasses import replace

import pytest
import torch

from fullstride.data.dataset import open_data
from fullstride.nets import zoo
from fullstride.tasks.classify import Classify
from fullstride.train.batches import BatchOptions, training_batches
from fullstride.train.loop import train_epochs
from fullstride.train.recipes.named import FINETUNE, MIN_STEPS, finetune, scratch
from fullstride.train.scoring import score_images

COUNTS = sorted({round(10 ** (exponent / 8)) for exponent in range(57)})  # 1 to 10 million
BY_IMAGES = pytest.mark.parametrize("by_images", [finetune, scratch])


def steps(recipe, images):
    return round(recipe.epochs * max(1, images // recipe.batch_size))


@BY_IMAGES
def test_with_more_images_the_batch_and_the_steps_grow_and_the_epochs_fall(by_images):
    recipes = [by_images(images) for images in COUNTS]
    batches = [recipe.batch_size for recipe in recipes]
    assert batches == sorted(batches)
    last = {finetune: 256, scratch: 128}[by_images]
    assert [by_images(images).batch_size for images in (60, 60_000)] == [16, last]
    for images, recipe in zip(COUNTS, recipes, strict=True):
        least = MIN_STEPS if by_images is scratch else 120 if images >= 60 else 60
        assert steps(recipe, images) >= least
        assert images < 4 or images // recipe.batch_size >= 2  # no step takes all images
    tens = [by_images(10**power).epochs for power in range(2, 8)]
    assert tens == sorted(tens, reverse=True)
    ten_steps = [steps(by_images(10**power), 10**power) for power in range(2, 8)]
    assert ten_steps == sorted(ten_steps)


@BY_IMAGES
@pytest.mark.parametrize("images", COUNTS[::4])
def test_rate_warmup_and_average_are_within_bounds_for_every_number_of_images(by_images, images):
    recipe = by_images(images)
    per_image = recipe.lr / recipe.batch_size
    assert 1e-5 < per_image < 0.02
    assert recipe.lr <= (0.1 if by_images is finetune else 0.5)
    assert recipe.warmup_epochs == pytest.approx(recipe.epochs / 10)
    # what the average spans, in steps, is a share of training
    assert 1 / (1 - recipe.ema_decay) <= steps(recipe, images) / 10 + 1
    assert recipe.bn_momentum


def test_from_four_thousand_images_on_training_from_scratch_is_by_muon():
    names = [scratch(images).optimizer for images in (60, 3_999, 4_000, 60_000)]
    assert names == ["sgd", "sgd", "muon", "muon"]
    recipe = scratch(60_000)
    decayed = recipe.lr * recipe.weight_decay * steps(recipe, 60_000)
    assert decayed == pytest.approx(4, rel=0.02)  # half of it, by the cosine: exp(-2) is left


def test_the_crops_of_training_from_scratch_are_larger_in_fewer_epochs():
    least = {epochs: scratch(60_000, epochs).scale[0] for epochs in (0.5, 8, 12.5, 32, 64, 300)}
    assert list(least.values()) == sorted(least.values(), reverse=True)
    assert least[0.5] == least[8] > least[32] > least[64] == least[300] == scratch(1000).scale[0]


def trained(recipe, data):
    torch.manual_seed(0)
    net = zoo.create("resnet_rs_tiny", classes=10, in_channels=1, resolution=32)
    pre = replace(zoo.family_preprocessing(net.spec), crop=1.0)
    *_, last = train_epochs(
        net, Classify(), training_batches(data, Classify(), BatchOptions(pre), recipe), recipe
    )
    return score_images(last.average, Classify(), data.test, BatchOptions(pre, "cpu"))[0]["top1"]


@pytest.mark.slow
def test_sixty_digits_are_learned_by_default_and_were_not_by_the_old_default():
    data = open_data("digits")
    few = replace(data, train=data.train.subset(range(60)), test=data.test.subset(range(250)))
    assert trained(scratch(60), few) > trained(FINETUNE, few) + 40
