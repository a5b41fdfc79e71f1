"""Builds the batches of a recipe: augments, joins images without labels, and mixes."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fullstride.data.dataset import DataSet
from fullstride.data.loader import Batch, Batches, LoaderOptions
from fullstride.data.transforms.crop import Augmentation
from fullstride.io.console import count_of, print_note, verb_of
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.losses import smoothed
from fullstride.tasks.task import Task
from fullstride.train.compute import SINGLE_PROCESS, DistributedContext
from fullstride.train.distill import PseudoLabels, open_images_of, read_pseudo_labels, select, sent
from fullstride.train.recipes.recipe import Recipe

if TYPE_CHECKING:
    from torchvision.transforms import v2


# Fields that need one class index per image; by default they are off.
SINGLE_LABEL_FIELDS = {"mixup", "cutmix", "teacher", "triplet", "per_class"}
SINGLE_LABEL_FIELDS |= {"loss", "class_weights", "balanced_sampling", "unlabelled"}


@dataclass(frozen=True)
class BatchOptions:
    """How images are read, and where the network runs."""

    pre: Preprocessing
    device: torch.device | str = "cpu"
    workers: int = 0
    context: DistributedContext = SINGLE_PROCESS

    def loader(self, batch: int, **more: Any) -> LoaderOptions:
        """This process's loader options; `batch`: images over all processes."""
        rank, size = self.context.rank, self.context.world_size
        own = dict(workers=self.workers, device=self.device, rank=rank, world_size=size)
        return LoaderOptions(batch=batch, **{**own, **more})


def training_batches(
    data: DataSet,
    task: Task,
    how: BatchOptions,
    recipe: Recipe,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Batches:
    """Build the training images, augmented by the recipe; each process has a part of every batch.

    Raises ValueError if the recipe's batch cannot be divided, or `task` excludes a field of it.
    """
    check_task(task, recipe)
    check_batch(len(data.train), recipe, how.context)
    recipe = recipe_in_epochs(data, recipe)
    settings = {field.name: getattr(recipe, field.name) for field in fields(Augmentation)}
    if not data.mirror:
        settings["hflip_prob"] = 0.0
    sides = recipe.resolutions(how.pre.resolution)
    return Batches(
        data.train,
        task.train_view(how.pre, Augmentation(**settings), recipe.decoder, sides),
        how.loader(
            recipe.batch_size,
            seed=recipe.seed,
            shuffle=True,
            per_class=recipe.per_class,
            balance=recipe.balanced_sampling,
            repeats=recipe.repeated_augmentation,
            distinct_views=recipe.distinct_views,
        ),
        collate=collate or task.collate,
    )


def check_task(task: Task, recipe: Recipe) -> None:
    """Raise ValueError for a field of `recipe` that `task` does not support."""
    if recipe.unlabelled and task.takes_clips:
        raise ValueError(
            f"recipe.unlabelled {recipe.unlabelled} has images, and the task {task.name} clips: "
            "leave it out"
        )
    task.with_options(recipe)
    for field in fields(recipe):
        name, value = field.name, getattr(recipe, field.name)
        if value == field.default or name in task.recipe_fields:
            continue
        if name in SINGLE_LABEL_FIELDS and not task.single_label:
            raise ValueError(
                f"recipe.{name} {value} requires one class for each image, which "
                f"the task {task.name} does not have: leave it out"
            )


def check_batch(images: int, recipe: Recipe, context: DistributedContext) -> None:
    parts = context.world_size * max(1, recipe.grad_accum_steps)
    if recipe.batch_size % parts or (context.is_distributed and images < recipe.batch_size):
        raise ValueError(
            f"recipe.batch_size {recipe.batch_size} of {images} images is not shared out evenly "
            f"among {context.world_size} processes: set it to a multiple of {parts} that is not "
            "above the number of images"
        )
    per_step = recipe.batch_size // parts
    if recipe.triplet and (per_step % recipe.per_class or per_step < 2 * recipe.per_class):
        raise ValueError(
            f"recipe.triplet compares classes among the {per_step} images that are computed at "
            f"once, with {recipe.per_class} of each: set recipe.batch_size to a multiple of "
            f"{2 * recipe.per_class * parts}"
        )


def recipe_in_epochs(data: DataSet, recipe: Recipe) -> Recipe:
    """Convert the recipe's length to epochs of `data`; a set smaller than a batch is one step."""
    images = len(data.train)
    per_step = recipe.batch_size if recipe.per_class else min(recipe.batch_size, images)
    return recipe.in_epochs(max(1, images // recipe.batch_size), per_step)


def measurement_batches(
    data: DataSet, task: Task, how: BatchOptions, recipe: Recipe, batch: int
) -> Batches:
    """Build the training images in batches of at most `batch`, for measurements.

    The view of an image does not depend on the batch.
    """
    recipe = replace(
        recipe,
        batch_size=max(1, min(batch, recipe.batch_size, len(data.train))),
        grad_accum_steps=1,
        triplet=0.0,
        per_class=0,
        balanced_sampling=0.0,
        repeated_augmentation=1,
        grow_from=None,
    )
    return training_batches(data, task, how, recipe)


def repeat(batch: Batch, images: int) -> Batch:
    """Repeat the images of `batch` to a batch of `images` images."""
    indices = torch.arange(images) % len(batch.x)
    on_device = indices.to(batch.x.device)
    targets: Any = (
        batch.targets[on_device]
        if isinstance(batch.targets, torch.Tensor)
        else [batch.targets[index] for index in indices.tolist()]
    )
    x = batch.x[on_device]
    # channels last in memory, like the loader's batches
    x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    return Batch(x, targets, batch.indices[indices])


@dataclass(frozen=True)
class SoftTargets:
    """The targets of a joint batch, for B labelled and U unlabelled images.

    A target (K,) is a probability for each class times a weight: N / B for labelled images and
    `ratio` N / U for unlabelled images, N = B + U. The loss is linear in the target, so its mean
    over the N images is mean(labelled) + `ratio` mean(unlabelled), the loss of Noisy Student
    (arXiv:1911.04252), even if parts of a batch are computed one after the other. Targets include
    the label smoothing, because a teacher's targets are not smoothed. With `class_weights`, the
    weight of an image is then the mean over its smoothed target.
    """

    labels: PseudoLabels
    smoothing: float
    ratio: float

    def join(self, labelled: Batch, unlabelled: Batch) -> Batch:
        """Join both in one batch, every part of which has the same proportion of both.

        The targets of `unlabelled` are a list of rows of the labels.
        """
        device = labelled.x.device
        sizes = len(labelled.x), len(unlabelled.x)
        whole = sum(sizes)
        soft = self.labels.dense(unlabelled.targets, device)
        hard = smoothed(labelled.targets, soft, self.smoothing)
        weighted = [hard * (whole / sizes[0]), soft * (self.ratio * whole / sizes[1])]
        places = torch.cat([(torch.arange(size) + 0.5) / size for size in sizes])
        order = places.argsort(stable=True)
        there = sent(order, device)
        x = torch.cat([labelled.x, unlabelled.x])[there]
        indices = torch.cat([labelled.indices, unlabelled.indices])[order]
        return Batch(x, torch.cat(weighted)[there], indices)


class JointBatches:
    """A source of batches for `train_epochs`; an epoch is an epoch of the labelled images.

    The unlabelled images have their own epochs, which follow each other without a break. The batch
    of a step depends only on its number, so a resumed run has the same batches.
    """

    def __init__(self, labelled: Batches, unlabelled: Batches, targets: SoftTargets):
        self.labelled, self.unlabelled, self.targets = labelled, unlabelled, targets
        self._stream: Generator[Batch, None, None] | None = None
        self._position = -1  # step of the stream's next batch

    def __len__(self) -> int:
        return len(self.labelled)

    @property
    def skipped(self) -> dict[str, str]:
        """The unreadable images so far, with reasons."""
        return {**self.labelled.skipped, **self.unlabelled.skipped}

    def epoch(self, number: int, start: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch from batch `start`."""
        for step, batch in enumerate(
            self.labelled.epoch(number, start), number * len(self) + start
        ):
            yield self.targets.join(batch, self._unlabelled_at(step))

    def close(self) -> None:
        """End the workers."""
        if self._stream:
            self._stream.close()
        self.labelled.close()
        self.unlabelled.close()

    def _unlabelled_at(self, step: int) -> Batch:
        if self._stream is None or self._position != step:
            if self._stream:
                self._stream.close()
            self._stream = endless(self.unlabelled, *divmod(step, len(self.unlabelled)))
        self._position = step + 1
        return next(self._stream)


def endless(batches: Any, epoch: int, start: int = 0) -> Generator[Any, None, None]:
    """Yield the batches of an epoch from the one numbered `start`, and of all later epochs."""
    while True:
        yield from batches.epoch(epoch, start)
        epoch, start = epoch + 1, 0


TrainingBatches = Batches | JointBatches


def run_batches(
    data: DataSet, task: Task, how: BatchOptions, recipe: Recipe
) -> tuple[TrainingBatches, Recipe, str]:
    """Build `training_batches`, joined with images without labels if the recipe has `unlabelled`.

    Also returns the recipe for the steps, and a fingerprint of the pseudo-labels, "" without any.
    Raises ValueError if the pseudo-labels have other classes, or their images are gone.
    """
    labelled = training_batches(data, task, how, recipe)
    if not recipe.unlabelled:
        return labelled, recipe, ""
    store = Path(recipe.unlabelled)
    labels = read_pseudo_labels(store).for_classes(data.classes)
    chosen = select(labels, recipe.unlabelled_min_confidence, recipe.unlabelled_per_class)
    if not len(chosen.rows):
        raise ValueError(
            f"none of {count_of(len(labels), 'image')} in {store} has a confidence of "
            f"{recipe.unlabelled_min_confidence:g}: lower recipe.unlabelled_min_confidence"
        )
    images = open_images_of(labels, store).images.subset(labels.images_m[chosen.rows].tolist())
    images = replace(images, targets=tuple(chosen.rows.tolist()))
    own = batch_of_its_own(recipe, len(images), how.context)
    whole = recipe_in_epochs(data, recipe)
    steps = max(1, round(whole.epochs * len(labelled)))
    others = replace(own, steps=steps, images=None)
    unlabelled = training_batches(replace(data, train=images), task, how, others, collate=list)
    distinct = len(set(images.targets))
    lacking = sum(not count.used for count in chosen.by_class)
    print_note(
        f"{distinct:,} of {labels.key.images:,} images without labels {verb_of(distinct, 'are')} "
        f"used, {len(images):,} with repeats; {count_of(lacking, 'class', 'have')} none"
    )
    targets = SoftTargets(labels, recipe.label_smoothing, recipe.unlabelled_ratio)
    batches = JointBatches(labelled, unlabelled, targets)
    return batches, replace(recipe, label_smoothing=0.0), labels.fingerprint


def batch_of_its_own(recipe: Recipe, images: int, context: DistributedContext) -> Recipe:
    """The recipe for the batches of unlabelled images.

    Raises ValueError if their batch cannot be divided among processes and passes.
    """
    size = recipe.unlabelled_batch
    parts = context.world_size * max(1, recipe.grad_accum_steps)
    if size % parts or (parts > 1 and images < size):
        raise ValueError(
            f"recipe.unlabelled_ratio {recipe.unlabelled_ratio:g}: {size} of "
            f"{count_of(images, 'image')} in a batch {verb_of(size, 'are')} not shared out evenly "
            f"among {parts} parts: use another ratio"
        )
    off = dict(per_class=0, balanced_sampling=0.0, repeated_augmentation=1, unlabelled="")
    # another seed: images of equal indices would have the same views
    return replace(recipe, batch_size=size, seed=recipe.seed + 1, **off)


def mix(
    x: Tensor,
    labels: Tensor,
    classes: int,
    *,
    mixup: float,
    cutmix: float,
    rng: np.random.Generator,
) -> tuple[Tensor, Tensor]:
    """Mix every image and target with the previous image of the batch; targets become (N, K).

    `x` are images (N, C, H, W), or clips (N, C, T, H, W), with all frames mixed alike; `labels` are
    class indices (N,), or a target for each class (N, K). `mixup` (arXiv:1710.09412) and `cutmix`
    (arXiv:1905.04899) are alphas of Beta distributions, 0 for never. If both are set, each batch
    gets one of the two, with equal probability.
    """
    from torchvision.transforms import v2  # takes seconds to import, and scoring does not need it

    if mixup and (not cutmix or rng.random() < 0.5):
        return apply(v2.MixUp(num_classes=classes), x, labels, lam=float(rng.beta(mixup, mixup)))
    share, height, width = float(rng.beta(cutmix, cutmix)), *x.shape[-2:]
    box = box_of(share, rng.random(), rng.random(), height, width)
    x1, y1, x2, y2 = box
    visible = 1 - (x2 - x1) * (y2 - y1) / (width * height)
    return apply(v2.CutMix(num_classes=classes), x, labels, box=box, lam_adjusted=visible)


def apply(
    transform: "v2.Transform", x: Tensor, labels: Tensor, **params: Any
) -> tuple[Tensor, Tensor]:
    """Run a transform with `params` instead of random parameters from its `make_params`."""
    params |= {"labels": labels, "batch_size": len(x)}
    mixed = transform.transform(x.flatten(1, -3), params)  # the transforms do not support clips
    return mixed.view(x.shape), transform.transform(labels, params)


def box_of(
    share: float, middle_y: float, middle_x: float, height: int, width: int
) -> tuple[int, int, int, int]:
    """The box x1, y1, x2, y2 around a point with 1 - `share` of the area, clipped to the image.

    The point is given as fractions of height and width.
    """
    half = 0.5 * (1 - share) ** 0.5
    x, y = int(middle_x * width), int(middle_y * height)
    half_width, half_height = int(half * width), int(half * height)
    return (
        max(x - half_width, 0),
        max(y - half_height, 0),
        min(x + half_width, width),
        min(y + half_height, height),
    )
