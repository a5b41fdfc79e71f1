"""Holds the named recipes, `RECIPES`, and finds recipes of saved runs, bundles and JSON files."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from fullstride.io.records import read_json
from fullstride.io.writing import looks_like_path
from fullstride.nets.efficiency import Efficiency, TrainingForm, TrainingStep
from fullstride.tables import is_repository
from fullstride.train.recipes import papers
from fullstride.train.recipes.papers import RESNET_RS_SIZES, resnet_rs, scaling
from fullstride.train.recipes.recipe import Recipe, saved_recipe

# Default recipes. All numbers are ours.
#
# They are functions of the number of training images. `benchmarks/defaults.py` compared `scratch`
# with a grid of batches, rates and lengths from 60 to 60,000 images, and `benchmarks/finetune.py`
# compared `finetune` with peers; docs/log.md has the reason for each number.


# The base of `DIGITS` and of fine-tuning for int8 files.
FINETUNE = Recipe(
    epochs=20,
    batch_size=64,
    lr=0.02,
    weight_decay=1e-4,
    warmup_epochs=1,
    ema_decay=0.998,
    scale=(0.25, 1.0),
)

# Fine-tuning, see `finetune` and docs/log.md: images per batch; images and steps below which the
# weights stay near the initial weights, and epochs below which half of their mean is the probe;
# images from which on batch statistics are used; steps above which the batch grows; and AdamW's
# rates at that batch, with frozen and with batch statistics.
FINETUNE_BATCH, FEW_IMAGES, FEW_STEPS, FEW_EPOCHS = 32, 200, 400, 20
FROZEN_IMAGES, MOST_STEPS = 4000, 1500
FROZEN_RATE, BATCH_RATE = 4e-4, 1e-3

# The fewest steps of a training. Fewer steps leave weights far from convergence at any rate: 60
# images in 20 epochs of one step stay near chance.
MIN_STEPS = 500
MIN_BATCH, MAX_BATCH = 2, 256  # batch norm needs two images
MAX_CLIPS = 64  # in a batch

# The images from which on `scratch` trains by Muon, whose steps take longer; and the constant of
# its rate, which falls with the root of the steps between these bounds.
MUON_IMAGES, MUON_RATE, LEAST_MUON_STEPS, MOST_MUON_STEPS = 4000, 0.6, 400, 40_000

# The smallest crop of `scratch` as a share of the picture, LARGE_CROP up to SHORT_EPOCHS and
# SMALL_CROP from LONG_EPOCHS; linear in the logarithm of the epochs in between.
LARGE_CROP, SMALL_CROP = 0.7, 0.25
SHORT_EPOCHS, LONG_EPOCHS = 8, 64


def finetune(images: int, epochs: float | None = None, *, probe: bool = True) -> Recipe:
    """The recipe for released weights and `images` training images, with `epochs` epochs.

    By default 40 epochs for 60 images, 27 for 1,000, 19 for 10,000. All begin with a linear probe
    unless `probe` is False, and then it is 120, 56 and 30 epochs.

    Training starts from the probe's classifier, at a low rate, and batch norms keep their
    statistics: statistics of small batches would move all features at once, and overfit in long
    trainings. With few images or few steps it ends with a mean of the probe and the trained
    weights, nearer to these the longer it was. With many images and steps, or with some and without
    a probe, it starts from a classifier of zeros, at a higher rate and with batch statistics.
    """
    # Without a probe's classifier to start from, a third of the epochs loses accuracy.
    most, power = (40, 0.15) if probe else (120, 0.27)
    length = epochs or most * (60 / max(images, 1)) ** power
    views = length * images
    few = images < FEW_IMAGES or views < FEW_STEPS * FINETUNE_BATCH
    batch = FINETUNE_BATCH // 2 if images < FEW_IMAGES else FINETUNE_BATCH
    while batch < MAX_BATCH and views > 2 * MOST_STEPS * batch:
        batch *= 2
    batch = at_most_half(batch, images)
    share = 0.0 if not (probe and few) else 0.5 if length < FEW_EPOCHS else 0.25
    is_frozen = few or (probe and images < FROZEN_IMAGES)
    lr = FROZEN_RATE if is_frozen else BATCH_RATE
    lr *= math.sqrt(max(1.0, batch / FINETUNE_BATCH))
    steps = max(1.0, length * max(1, images // batch))
    recipe = following(images, batch, steps, lr=lr, weight_decay=0.01)
    return replace(
        recipe,
        optimizer="adamw",
        frozen_statistics=is_frozen,
        linear_probe=probe,
        probe_share=share,
        precise_bn=False,
        scale=(0.5, 1.0),
        crop=1.0,
    )


def scratch(images: int, epochs: float | None = None) -> Recipe:
    """The recipe for random weights and `images` training images, with `epochs` epochs.

    By default 1,000 steps for 60 images, 4,100 for 1,000, 32,000 for 60,000. With fewer epochs the
    crops are larger, because each image is seen less often. From 4,000 images on the optimizer is
    Muon, which needs fewer epochs. With fewer images it is no better than SGD.
    """
    batch = batch_for(images)
    whole = max(MIN_STEPS, 1000 * (images / 60) ** 0.5)
    steps = epochs * max(1, images // batch) if epochs else whole
    if by_muon := images >= MUON_IMAGES:
        lr, decay = MUON_RATE / math.sqrt(min(max(steps, LEAST_MUON_STEPS), MOST_MUON_STEPS)), 0.05
    else:
        lr, decay = 0.2 * rate_factor(batch), 1e-3
    # so that a weight without gradients shrinks by a factor of 7 in a training of the whole length
    weight_decay = min(decay, 4 / (lr * whole))
    recipe = following(images, batch, steps, lr=lr, weight_decay=weight_decay)
    short, long = SHORT_EPOCHS, LONG_EPOCHS
    share = math.log(max(1.0, long / recipe.epochs)) / math.log(long / short)
    least = SMALL_CROP + (LARGE_CROP - SMALL_CROP) * min(1.0, share)
    optimizer = "muon" if by_muon else "sgd"
    return replace(recipe, optimizer=optimizer, scale=(float(f"{least:.2g}"), 1.0))


def dense(images: int) -> Recipe:
    """The recipe for boxes or pixel values, and `images` training images.

    It has as many steps as `scratch`, even with released weights, because the pyramid and the head
    are new. It has a tenth of the rate of `scratch` and clipped gradients: at the full rate, a
    detector of 1,000 images has a loss of 58 in its first epoch, and detects nothing.
    """
    batch = batch_for(images)
    steps = max(MIN_STEPS, 1000 * (images / 60) ** 0.5)
    recipe = following(images, batch, steps, lr=0.02 * rate_factor(batch), weight_decay=1e-4)
    return replace(recipe, clip_norm=10.0)


def video(images: int, has_weights: bool = False) -> Recipe:
    """The recipe for `images` videos: `finetune` or `scratch` in batches of at most 64.

    A clip has as many pixels as many images.
    """
    recipe = (finetune if has_weights else scratch)(images)
    batch = min(recipe.batch_size, MAX_CLIPS)
    average = recipe.ema_decay ** (batch / recipe.batch_size)  # over as many images
    return replace(recipe.at_batch(batch), ema_decay=average)


def batch_for(images: int) -> int:
    """A power of two by the images: 16 for 60, 32 for 1,000, 64 for 10,000, 128 for 60,000."""
    return at_most_half(2 ** round(4 + 0.3 * math.log2(max(images, 1) / 60)), images)


def at_most_half(batch: int, images: int) -> int:
    """Limit the batch to a power of two in half of the images, so that an epoch has two steps."""
    half = max(images, 2 * MIN_BATCH) // 2
    return max(MIN_BATCH, min(batch, 2 ** (half.bit_length() - 1), MAX_BATCH))


def rate_factor(batch: int) -> float:
    """The learning rate / the rate for a batch of 16: proportional below 16, and 2 for 256.

    Above 16 it grows more slowly, because the number of steps also grows with the images.
    """
    return batch / 16 if batch < 16 else (batch / 16) ** 0.25


def following(images: int, batch: int, steps: float, *, lr: float, weight_decay: float) -> Recipe:
    """A recipe of `steps` steps; warmup and weight average take a tenth of them each."""
    steps_per_epoch = max(1, images // batch)
    epochs = steps / steps_per_epoch
    epochs = math.ceil(epochs) if epochs > 10 else math.ceil(10 * epochs) / 10
    return Recipe(
        epochs=epochs,
        batch_size=batch,
        lr=float(f"{lr:.2g}"),
        weight_decay=float(f"{weight_decay:.2g}"),
        warmup_epochs=0.1 * epochs,
        ema_decay=min(0.9999, max(0.0, 1 - 10 / (epochs * steps_per_epoch))),
        bn_momentum=0.1,
        precise_bn=True,
        scale=(0.25, 1.0),
    )


# Training from scratch on the digits, which are 8 x 8 pixels, at 48 x 48. All numbers are ours.
# Claim: 98.5 % top-1 of the tiny networks on the 500 test digits, see docs/guides/training.md.
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


# The most classes of a linear probe. With more, it would be fitted to few images of each class.
MAX_PROBE_CLASSES = 1_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """The facts that a recipe may depend on. The defaults are for commands without data."""

    images: int = 1000  # for training
    epochs: float | None = None  # the user's length in epochs, given in any unit
    has_weights: bool = False  # whether training begins with weights, not random ones
    can_probe: bool = True  # whether each image has one of a few classes
    is_digits: bool = False  # whether the data are the package's digits
    width: float = 1.0  # multiplier of the network's widths
    resolution: int | None = None  # the user's, in pixels per side
    of_task: str = ""  # the name of a task's own recipe, for any data


NOMINAL = Case()

# Recipes with numbers that follow the number of images.
BY_IMAGES = {"finetune": finetune, "scratch": scratch, "dense": dense, "video": video}

# Recipes with numbers that follow the case.
BY_CASE: dict[str, Callable[[Case], Recipe]] = {
    "finetune": lambda case: finetune(case.images, case.epochs, probe=case.can_probe),
    "scratch": lambda case: scratch(case.images, case.epochs),
    "dense": lambda case: dense(case.images),
    "video": lambda case: video(case.images, case.has_weights),
    "scaling_350": lambda case: scaling(350, case.width, case.resolution or 224),
}

# All named recipes, for the nominal case if they follow the case.
RECIPES = {
    **{name: by_case(NOMINAL) for name, by_case in BY_CASE.items()},
    "digits": DIGITS,
    **{name.lower(): each for name, each in vars(papers).items() if isinstance(each, Recipe)},
    "resnet_rs": resnet_rs(50, 160),
    **{f"resnet_rs_{depth}_{side}": resnet_rs(depth, side) for depth, side in RESNET_RS_SIZES},
    "scaling_10": scaling(10),
    "scaling_100": scaling(100),
}


def default_recipe(case: Case) -> str:
    """The name of the default recipe."""
    if case.of_task:
        return case.of_task
    if case.is_digits:
        return "digits"
    return "finetune" if case.has_weights else "scratch"


def find_recipe(name: str, case: Case = NOMINAL) -> Recipe:
    """Find a recipe by name, or a saved recipe: a JSON file, or the folder of a run or bundle."""
    if name in BY_CASE:
        return BY_CASE[name](case)
    if name in RECIPES:
        return RECIPES[name]
    path = Path(name)
    if is_repository(name):
        from fullstride.nets.zoo import local_path  # imports PyTorch, which the help does not need

        path = local_path(name)
    if name and path.is_dir():
        files = [path / file for file in ("run.json", "bundle.json") if (path / file).exists()]
        if not files:
            raise ValueError(
                f"no recipe in the folder {name!r}: give a run, a bundle or a JSON file"
            )
        path = files[0]
    if looks_like_path(name) and not path.exists():
        raise ValueError(f"no such file or folder: {name}")
    if not name or not path.is_file():
        close = get_close_matches(name, RECIPES, n=3)
        hint = f"choose from {', '.join(RECIPES)}, or give a file"
        if close:
            hint = f"did you mean {' or '.join(close)}?"
        raise ValueError(f"no recipe named {name!r}: {hint}")
    return saved_recipe(read_json(path), name)


def training_step(
    name: str,
    *,
    resolution: int | None = None,
    precision: str | None = None,
    layout: Literal["nchw", "nhwc"] | None = None,
    efficiency: Efficiency | None = None,
    device: str = "cuda",
) -> TrainingStep:
    """How a recipe computes a step; arguments that are not None take precedence.

    Without a name: bf16, nchw, plain modules and no regularisation. Fields that the recipe leaves
    to the device have the values for a GPU with bf16, unless `device` is cpu. Raises ValueError for
    a recipe that chooses its efficiency when training starts.
    """
    nameless = replace(FINETUNE, precision="bf16", channels_last=False)
    recipe = find_recipe(name) if name else nameless
    if efficiency:
        recipe = replace(recipe, efficiency=efficiency)
    if recipe.efficiency == "auto":
        raise ValueError(f"the efficiency of recipe {name} is auto: set --efficiency")
    precisions = {"tf32": "fp32", "auto": "fp32" if device == "cpu" else "bf16"}
    form = TrainingForm(
        efficiency=recipe.efficiency,
        padded=recipe.pad_channels,
        drop_path=recipe.drop_path,
        drop_path_by=recipe.drop_path_by,
        dropout=recipe.dropout,
    )
    return TrainingStep(
        resolution=recipe.resolution if resolution is None else resolution,
        precision=precision or precisions.get(recipe.precision, recipe.precision),
        layout=layout or ("nchw" if recipe.channels_last is False else "nhwc"),
        form=form,
    )
