"""How do we train where no recipe is chosen? All numbers here are ours.

They are functions of the number of training images. Those of `scratch` were compared with a grid of
batches, rates and lengths from 60 to 60,000 images by `benchmarks/defaults.py`, and those of
`finetune` with peers by `benchmarks/finetune.py`; docs/log.md has what decided each of them.
"""

import math
from dataclasses import replace

from fullstride.train.recipe import Recipe

# What `DIGITS` and the fine-tuning of int8 files begin with.
FINETUNE = Recipe(
    epochs=20,
    batch=64,
    lr=0.02,
    weight_decay=1e-4,
    warmup_epochs=1,
    ema_decay=0.998,
    scale=(0.25, 1.0),
)

# Fine-tuning, see `finetune` and docs/log.md: images of a batch; images and steps below which the
# features stay near those of the weights; steps above which the batch grows; and the rates at that
# batch, of AdamW.
FINETUNE_BATCH, FEW_IMAGES, FEW_STEPS, MOST_STEPS = 32, 200, 400, 1500
PROBE_RATE, TUNING_RATE = 4e-4, 1e-3

# The least steps of a training. Weights that are trained in fewer are far from their end, whatever
# the rate: 60 images in 20 epochs of one step stay near chance.
MIN_STEPS = 500
MIN_BATCH, MAX_BATCH = 2, 256  # batch norm needs two images
MAX_CLIPS = 64  # in a batch

# The least share of a picture that a crop of `scratch` has, in up to so many epochs and from so
# many on; by their logarithm between.
LARGE_CROP, SMALL_CROP = 0.7, 0.25
SHORT_EPOCHS, LONG_EPOCHS = 8, 64


def finetune(images: int, epochs: float | None = None, *, probe: bool = True) -> Recipe:
    """The recipe for released weights and `images` training images, in so many `epochs`.

    By default 120 of 60 images, 56 of 1,000, 30 of 10,000. All begin with a linear probe unless
    `probe` is False.

    Few images, or few steps, stay near the probe: its classifier is the start, at a low rate, and
    batch norms keep their statistics, as those of small batches would move all features at once.
    More are trained by the statistics of their batches from a classifier of zeros, at a higher
    rate, and end further from the probe.
    """
    length = epochs or 120 * (60 / max(images, 1)) ** 0.27
    views = length * images
    few = images < FEW_IMAGES or views < FEW_STEPS * FINETUNE_BATCH
    batch = FINETUNE_BATCH // 2 if images < FEW_IMAGES else FINETUNE_BATCH
    while batch < MAX_BATCH and views > 2 * MOST_STEPS * batch:
        batch *= 2
    half = max(images, 2 * MIN_BATCH) // 2
    batch = max(MIN_BATCH, min(batch, 2 ** (half.bit_length() - 1)))
    lr = PROBE_RATE if few else TUNING_RATE * math.sqrt(batch / FINETUNE_BATCH)
    steps = max(1.0, length * max(1, images // batch))
    recipe = following(images, batch, steps, lr=lr, weight_decay=0.01)
    return replace(
        recipe,
        optimizer="adamw",
        frozen_statistics=few,
        linear_probe=probe,
        precise_bn=False,
        scale=(0.5, 1.0),
        crop=1.0,
    )


def scratch(images: int, epochs: float | None = None) -> Recipe:
    """The recipe for random weights and `images` training images, in so many `epochs`.

    By default 1,000 steps for 60 images, 4,100 for 1,000, 32,000 for 60,000. The fewer epochs, the
    larger are the crops, as an image is seen less often.
    """
    batch = batch_for(images)
    steps = max(MIN_STEPS, 1000 * (images / 60) ** 0.5)
    lr = 0.2 * rate_factor(batch)
    # so that a weight that gets no gradient shrinks by a factor of 7 in a long training
    weight_decay = min(1e-3, 4 / (lr * steps))
    if epochs:
        steps = epochs * max(1, images // batch)
    recipe = following(images, batch, steps, lr=lr, weight_decay=weight_decay)
    short, long = SHORT_EPOCHS, LONG_EPOCHS
    share = math.log(max(1.0, long / recipe.epochs)) / math.log(long / short)
    least = SMALL_CROP + (LARGE_CROP - SMALL_CROP) * min(1.0, share)
    return replace(recipe, scale=(float(f"{least:.2g}"), 1.0))


def dense(images: int) -> Recipe:
    """The recipe for boxes, or a value for each pixel, and `images` training images.

    It has as many steps as `scratch`, of released weights too, as the pyramid and the head are new.
    A tenth of its rate, with a clipped gradient: at the whole one a detector of 1,000 images has a
    loss of 58 in its first epoch, and finds nothing.
    """
    batch = batch_for(images)
    steps = max(MIN_STEPS, 1000 * (images / 60) ** 0.5)
    recipe = following(images, batch, steps, lr=0.02 * rate_factor(batch), weight_decay=1e-4)
    return replace(recipe, clip_norm=10.0)


def video(images: int, has_weights: bool = False) -> Recipe:
    """The recipe for so many videos: that of `finetune` or `scratch`, in batches of at most 64.

    A clip has as many pixels as many images.
    """
    recipe = (finetune if has_weights else scratch)(images)
    batch = min(recipe.batch, MAX_CLIPS)
    average = recipe.ema_decay ** (batch / recipe.batch)  # over as many images
    return replace(recipe.at_batch(batch), ema_decay=average)


def batch_for(images: int, factor: int = 1) -> int:
    """A power of two: 16 for 60 images, 32 for 1,000, 64 for 10,000, 128 for 60,000, by `factor`.

    At most half of the images, so that an epoch has two steps.
    """
    batch = factor * 2 ** round(4 + 0.3 * math.log2(max(images, 1) / 60))
    half = max(images, 2 * MIN_BATCH) // 2
    return max(MIN_BATCH, min(batch, 2 ** (half.bit_length() - 1), MAX_BATCH))


def rate_factor(batch: int) -> float:
    """Of the learning rate, to that for a batch of 16: in proportion below, and 2 for 256.

    Less than in proportion above, as the number of steps, too, grows with the images.
    """
    return batch / 16 if batch < 16 else (batch / 16) ** 0.25


def following(images: int, batch: int, steps: float, *, lr: float, weight_decay: float) -> Recipe:
    """A recipe of that many steps, of which warmup and weight average take a tenth each."""
    steps_per_epoch = max(1, images // batch)
    epochs = steps / steps_per_epoch
    epochs = math.ceil(epochs) if epochs > 10 else math.ceil(10 * epochs) / 10
    return Recipe(
        epochs=epochs,
        batch=batch,
        lr=float(f"{lr:.2g}"),
        weight_decay=float(f"{weight_decay:.2g}"),
        warmup_epochs=0.1 * epochs,
        ema_decay=min(0.9999, max(0.0, 1 - 10 / (epochs * steps_per_epoch))),
        bn_momentum=0.1,
        precise_bn=True,
        scale=(0.25, 1.0),
    )


# Training from scratch on the digits, which are 8 x 8 pixels, at 48 x 48. All numbers are ours.
# Claim: 98.5 % top-1 of the tiny networks on the 500 test digits, see docs/training.md.
DIGITS = replace(
    FINETUNE,
    epochs=120,
    lr=0.3,
    weight_decay=1e-3,
    warmup_epochs=5,
    resolution=48,
    crop=1.0,
    scale=(0.6, 1.3),
    rotation_degrees=15.0,
    hflip_prob=0.0,
)
