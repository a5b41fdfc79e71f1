"""How are images with and without labels trained on together? Every batch has some of both."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fullstride.console import print_note
from fullstride.data.dataset import DataSet
from fullstride.data.loader import Batch, Batches
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.losses import smoothed
from fullstride.tasks.task import Task
from fullstride.train.batches import recipe_in_epochs, training_batches
from fullstride.train.distributed import SINGLE_PROCESS, DistributedContext
from fullstride.train.pseudo_labels import (
    PseudoLabels,
    open_images_of,
    read_pseudo_labels,
    select,
    sent,
)
from fullstride.train.recipe import Recipe


@dataclass(frozen=True)
class SoftTargets:
    """The targets of a joint batch, for B labelled and U unlabelled images.

    A target (K,) is a probability for each class times a weight, N / B for labelled images and
    `ratio` N / U for the others, N = B + U. As the loss is linear in the target, its mean over
    the N images is mean(labelled) + `ratio` mean(unlabelled), the loss of Noisy Student
    (arXiv:1911.04252), also where parts of a batch are computed one after the other. The smoothing
    of labels is in the targets, as those of a teacher are not smoothed.
    """

    labels: PseudoLabels
    smoothing: float
    ratio: float

    def join(self, labelled: Batch, unlabelled: Batch) -> Batch:
        """Both in one batch, every part of which has them in the same proportion.

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
    """A source of batches for `train_epochs`, whose epochs are those of the labelled images.

    The unlabelled images have epochs of their own, one after the other without a break: the batch
    of a step is a function of its number, so that a resumed run has the same.
    """

    def __init__(self, labelled: Batches, unlabelled: Batches, targets: SoftTargets):
        self.labelled, self.unlabelled, self.targets = labelled, unlabelled, targets
        self._stream: Generator[Batch, None, None] | None = None
        self._position = -1  # of the next batch of the stream

    def __len__(self) -> int:
        return len(self.labelled)

    @property
    def skipped(self) -> dict[str, str]:
        """The unreadable images so far, each with the reason."""
        return {**self.labelled.skipped, **self.unlabelled.skipped}

    def epoch(self, number: int, start: int = 0) -> Generator[Batch, None, None]:
        """The batches of an epoch, from the one numbered `start`."""
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
            self._stream = self._endless(step)
        self._position = step + 1
        return next(self._stream)

    def _endless(self, step: int) -> Generator[Batch, None, None]:
        epoch, start = divmod(step, len(self.unlabelled))
        while True:
            yield from self.unlabelled.epoch(epoch, start)
            epoch, start = epoch + 1, 0


TrainingBatches = Batches | JointBatches


def run_batches(
    data: DataSet,
    task: Task,
    pre: Preprocessing,
    recipe: Recipe,
    device: torch.device | str = "cpu",
    workers: int = 0,
    context: DistributedContext = SINGLE_PROCESS,
) -> tuple[TrainingBatches, Recipe, str]:
    """`training_batches` and, with the recipe's `unlabelled`, the images without labels.

    Also the recipe for the steps, and a fingerprint of the pseudo-labels, "" without any. Raises
    ValueError where the pseudo-labels are of other classes, or their images are gone.
    """
    labelled = training_batches(data, task, pre, recipe, device, workers, context)
    if not recipe.unlabelled:
        return labelled, recipe, ""
    store = Path(recipe.unlabelled)
    labels = read_pseudo_labels(store).for_classes(data.classes)
    chosen = select(labels, recipe.unlabelled_min_confidence, recipe.unlabelled_per_class)
    if not len(chosen.rows):
        raise ValueError(
            f"none of the {len(labels):,} images in {store} has a confidence of "
            f"{recipe.unlabelled_min_confidence:g}: lower recipe.unlabelled_min_confidence"
        )
    images = open_images_of(labels, store).images.subset(labels.images_m[chosen.rows].tolist())
    images = replace(images, targets=tuple(chosen.rows.tolist()))
    own = batch_of_its_own(recipe, len(images), context)
    whole = recipe_in_epochs(data, recipe)
    steps = max(1, round(whole.epochs * len(labelled)))
    others = replace(own, steps=steps, images=None)
    unlabelled = training_batches(
        replace(data, train=images), task, pre, others, device, workers, context, collate=list
    )
    distinct = len(set(images.targets))
    lacking = sum(not count.used for count in chosen.by_class)
    print_note(
        f"{distinct:,} of {labels.key.images:,} images without labels are used, {len(images):,} "
        f"with repeats; {lacking} classes have none"
    )
    targets = SoftTargets(labels, recipe.label_smoothing, recipe.unlabelled_ratio)
    batches = JointBatches(labelled, unlabelled, targets)
    return batches, replace(recipe, label_smoothing=0.0), labels.fingerprint


def batch_of_its_own(recipe: Recipe, images: int, context: DistributedContext) -> Recipe:
    """The recipe for the batches of unlabelled images.

    Raises ValueError where a batch of them cannot be divided among processes and passes.
    """
    size = recipe.unlabelled_batch
    parts = context.world_size * max(1, recipe.grad_accum_steps)
    if size % parts or (parts > 1 and images < size):
        raise ValueError(
            f"recipe.unlabelled_ratio {recipe.unlabelled_ratio:g}: {size} of {images:,} images in "
            f"a batch are not shared out evenly among {parts} parts: use another ratio"
        )
    off = dict(per_class=0, balanced_sampling=0.0, repeated_augmentation=1, unlabelled="")
    # another seed: images of equal indices would have the same views
    return replace(recipe, batch=size, seed=recipe.seed + 1, **off)
