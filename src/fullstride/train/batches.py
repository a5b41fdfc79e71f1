"""What is a training step fed? The batches that a recipe makes of a data set."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from fullstride.data.dataset import DataSet
from fullstride.data.loader import Batch, Batches
from fullstride.data.transforms.crop import Augmentation
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.task import Task
from fullstride.train.distributed import SINGLE_PROCESS, DistributedContext
from fullstride.train.recipe import Recipe

# Fields that need the index of one class for each image; by default they are off.
SINGLE_LABEL_FIELDS = {"mixup", "cutmix", "teacher", "triplet", "per_class"}
SINGLE_LABEL_FIELDS |= {"loss", "class_weights", "balanced_sampling", "unlabelled"}
# Fields that only tasks with them in `recipe_fields` use, and what they are for.
TASK_FIELDS = {
    "focal_gamma_negative": "several labels of an image",
    "focal_shift": "several labels of an image",
    "focal_weight_gradient": "several labels of an image",
    "embedding_size": "embeddings",
    "normalise_embedding": "embeddings",
    "frames": "clips",
    "frame_stride": "clips",
    "short_side": "clips",
    "jitter": "boxes and masks",
    "box_augmentation": "boxes",
    "head_width": "boxes or pixels",
    "max_depth": "depths",
    "head_convs": "boxes",
    "detector": "boxes",
}


def training_batches(
    data: DataSet,
    task: Task,
    pre: Preprocessing,
    recipe: Recipe,
    device: torch.device | str = "cpu",
    workers: int = 0,
    context: DistributedContext = SINGLE_PROCESS,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Batches:
    """The training images as the recipe augments them, in each process its part of every batch.

    `collate` makes the targets of a batch, by default that of `task`.

    Raises ValueError if the recipe's batch cannot be divided, or `task` excludes what it asks for.
    """
    check_task(task, recipe)
    check_batch(len(data.train), recipe, context)
    recipe = recipe_in_epochs(data, recipe)
    augmentation = Augmentation(
        **{field.name: getattr(recipe, field.name) for field in fields(Augmentation)}
    )
    if not data.mirror:
        augmentation = replace(augmentation, hflip_prob=0.0)
    sides = recipe.resolutions(pre.resolution)
    return Batches(
        data.train,
        task.train_view(pre, augmentation, recipe.decoder, sides),
        batch=recipe.batch,
        seed=recipe.seed,
        shuffle=True,
        per_class=recipe.per_class,
        balance=recipe.balanced_sampling,
        repeats=recipe.repeated_augmentation,
        distinct_views=recipe.distinct_views,
        workers=workers,
        device=device,
        rank=context.rank,
        world_size=context.world_size,
        collate=collate or task.collate,
    )


def check_task(task: Task, recipe: Recipe) -> None:
    """Raises ValueError if `recipe` asks for what `task` has no use for."""
    if recipe.unlabelled and task.takes_clips:
        raise ValueError(
            f"recipe.unlabelled {recipe.unlabelled} has images, and the task {task.name} clips: "
            "leave it out"
        )
    for field in fields(recipe):
        name, value = field.name, getattr(recipe, field.name)
        if value == field.default or name in task.recipe_fields:
            continue
        if name in TASK_FIELDS:
            raise ValueError(
                f"recipe.{name} {value} is for {TASK_FIELDS[name]}, which the task {task.name} "
                "does not have: leave it out"
            )
        if name in SINGLE_LABEL_FIELDS and not task.single_label:
            raise ValueError(
                f"recipe.{name} {value} requires one class for each image, which "
                f"the task {task.name} does not have: leave it out"
            )


def check_batch(images: int, recipe: Recipe, context: DistributedContext) -> None:
    parts = context.world_size * max(1, recipe.grad_accum_steps)
    if recipe.batch % parts or (context.is_distributed and images < recipe.batch):
        raise ValueError(
            f"recipe.batch {recipe.batch} of {images} images is not shared out evenly among "
            f"{context.world_size} processes: set it to a multiple of {parts} that is not above "
            "the number of images"
        )
    per_step = recipe.batch // parts
    if recipe.triplet and (per_step % recipe.per_class or per_step < 2 * recipe.per_class):
        raise ValueError(
            f"recipe.triplet compares classes among the {per_step} images that are computed at "
            f"once, with {recipe.per_class} of each: set recipe.batch to a multiple of "
            f"{2 * recipe.per_class * parts}"
        )


def recipe_in_epochs(data: DataSet, recipe: Recipe) -> Recipe:
    """The recipe with its length in epochs of `data`; a set smaller than a batch is one step."""
    images = len(data.train)
    per_step = recipe.batch if recipe.per_class else min(recipe.batch, images)
    return recipe.in_epochs(max(1, images // recipe.batch), per_step)


def measurement_batches(
    data: DataSet,
    task: Task,
    pre: Preprocessing,
    recipe: Recipe,
    device: torch.device | str,
    batch: int,
    workers: int = 0,
) -> Batches:
    """The training images in batches of at most `batch`, for measurements.

    The view of an image does not depend on the batch.
    """
    recipe = replace(
        recipe,
        batch=max(1, min(batch, recipe.batch, len(data.train))),
        grad_accum_steps=1,
        triplet=0.0,
        per_class=0,
        balanced_sampling=0.0,
        repeated_augmentation=1,
        grow_from=None,
    )
    return training_batches(data, task, pre, recipe, device, workers)


def repeat(batch: Batch, images: int) -> Batch:
    """A batch of `images` images that repeats those of `batch`."""
    indices = torch.arange(images) % len(batch.x)
    on_device = indices.to(batch.x.device)
    targets: Any = (
        batch.targets[on_device]
        if isinstance(batch.targets, torch.Tensor)
        else [batch.targets[index] for index in indices.tolist()]
    )
    x = batch.x[on_device]
    # channels last in memory, as from the loader
    x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    return Batch(x, targets, batch.indices[indices])
