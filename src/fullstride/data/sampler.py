"""Draws the images of each batch: at random, or as many from each of several classes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fullstride.io.records import Count, PositiveInt, Probability, check_bounds


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How a loader draws its batches.

    With `shuffle`, for training: an incomplete last batch is dropped, unless it is the only one,
    and an unreadable image is replaced by the next readable one. Without, for evaluation: every
    readable image once.

    With `per_class`, every batch has that many images of each of its classes, adjacent and in one
    process. The number of batches with a class is proportional to its number of images, but a
    class is at most once in a batch: the excess goes to the other classes. The numbers are rounded
    at random, and classes meet at random. A class cycles through its images in random order; a
    class with fewer than `per_class` repeats some in a batch.

    With `balance`, the length of an epoch stays, and the share of a class is proportional to its
    size to the power of 1 - `balance`: with 1 each class is drawn equally often. A class cycles
    through its images in random order.

    With `repeats`, the length of an epoch stays, but each image drawn occurs `repeats` times in a
    row, with different views (arXiv:1902.05509).
    """

    batch: PositiveInt
    seed: int = 0
    shuffle: bool = False
    workers: Count = 0  # processes that decode; 0: this one
    device: str | torch.device = "cpu"
    rank: int = 0  # of this process: each of `world_size` gets a part of every batch
    world_size: int = 1
    per_class: int = 0  # images of each class in a batch; 0: as drawn
    balance: Probability = 0.0  # from 0, classes as they occur, to 1, classes equally often
    repeats: PositiveInt = 1  # views of an image in an epoch
    distinct_views: Count = 0  # views of an image before the first repeats; 0: one per epoch

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, off in (("balance", 0), ("repeats", 1)):
            value = getattr(self, name)
            if value != off and (self.per_class or not self.shuffle):
                raise ValueError(
                    f"{name} {value:g} with {self.per_class} images per class and shuffle "
                    f"{self.shuffle}: use it with shuffle, and no images per class"
                )


@dataclass
class EpochSampler:
    """The batches of an epoch as (epoch, index, copy), so that workers need not know the epoch.

    `copy` counts the earlier occurrences of an image in the epoch, where views should differ.
    """

    targets: tuple[Any, ...]
    options: LoaderOptions
    epoch: int = 0
    start: int = 0

    def __len__(self) -> int:
        images, batch = len(self.targets), self.options.batch
        return max(1, images // batch) if self.options.shuffle else -(-images // batch)

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        epoch, order, opts = self.epoch, np.arange(len(self.targets)), self.options
        rng = np.random.default_rng([opts.seed, epoch])
        if opts.per_class:
            per_batch = opts.batch // opts.per_class
            order = _by_class(self.targets, len(self), per_batch, opts.per_class, rng)
        elif opts.balance:
            images = min(len(order), len(self) * opts.batch)
            order = _balanced(self.targets, images, opts.balance, rng)
        elif opts.shuffle:
            order = rng.permutation(len(order))
        if opts.repeats > 1:
            # Adjacent, so that the processes get different copies (arXiv:1902.05509), as in timm.
            order = order.repeat(opts.repeats)[: len(order)]
        copies = _earlier(order) if opts.balance or opts.repeats > 1 else np.zeros_like(order)
        for start in range(self.start * opts.batch, len(self) * opts.batch, opts.batch):
            # a group stays in one process, whose loss compares only its own images
            last = min(start + opts.batch, len(order))
            groups = np.arange(start, last).reshape(-1, opts.per_class or 1)
            places = groups[opts.rank :: opts.world_size].ravel()
            yield [(epoch, int(order[place]), int(copies[place])) for place in places]


def check_groups(labels: Sequence[int], options: LoaderOptions) -> None:
    """Raise ValueError unless batches can have `per_class` images of each of their classes."""
    batch, per_class, world_size = options.batch, options.per_class, options.world_size
    divisors = [number for number in range(1, batch + 1) if batch % number == 0]
    if not options.shuffle or per_class not in divisors:
        raise ValueError(
            f"{per_class} images per class in batches of {batch} with shuffle {options.shuffle}: "
            f"shuffle, and use one of {', '.join(map(str, divisors))}"
        )
    classes, per_batch = len(set(labels)), batch // per_class
    if classes < per_batch:
        fits = next(number for number in divisors if batch // number <= classes)
        raise ValueError(
            f"{classes} classes do not fill a batch of {batch} with {per_class} images of each: "
            f"use {fits} of each, or a batch of {classes * per_class}"
        )
    if per_batch % world_size:
        raise ValueError(
            f"{per_batch} classes in a batch are not shared out evenly among {world_size} "
            f"processes: use a batch that is a multiple of {world_size * per_class}"
        )


def _balanced(
    labels: Sequence[int], images: int, balance: float, rng: np.random.Generator
) -> np.ndarray:
    """Indices of `images` images, a class as often as its size to the power of 1 - `balance`.

    A class cycles through its images in random order, so that each is drawn almost equally often.
    """
    members, sizes = _members(labels)
    shares = sizes ** (1 - balance)
    counts = _round(images * shares / shares.sum(), rng)
    drawn = [_cycle(*of_class, 1, rng).ravel() for of_class in zip(members, counts, strict=True)]
    return rng.permutation(np.concatenate(drawn))


def _members(labels: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
    """The indices of each class's images, and the size of each class."""
    if labels and isinstance(labels[0], tuple):
        raise ValueError("images with several labels have no single class to draw batches by")
    _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return np.split(np.argsort(class_of, kind="stable"), np.cumsum(sizes)[:-1]), sizes


def _earlier(order: np.ndarray) -> np.ndarray:
    """For each position, the number of earlier positions with the same index."""
    by_index = np.argsort(order, kind="stable")
    _, first, counts = np.unique(order[by_index], return_index=True, return_counts=True)
    earlier = np.empty_like(order)
    earlier[by_index] = np.arange(len(order)) - np.repeat(first, counts)
    return earlier


def _by_class(
    labels: Sequence[int], batches: int, per_batch: int, per_class: int, rng: np.random.Generator
) -> np.ndarray:
    """Indices of an epoch's images: in each batch `per_class` of each of `per_batch` classes."""
    members, sizes = _members(labels)
    groups_left = _round(_batches_per_class(sizes, batches, per_batch), rng)
    images = [
        _cycle(*of_class, per_class, rng) for of_class in zip(members, groups_left, strict=True)
    ]
    order = []
    for batches_left in range(batches, 0, -1):
        # random, but likelier with more groups left, and certain if needed in every batch left
        weights = groups_left / rng.exponential(size=len(groups_left))
        weights = np.where(groups_left == batches_left, np.inf, weights)
        for i in rng.permutation(np.argsort(-weights)[:per_batch]):
            groups_left[i] -= 1
            order.append(images[i][groups_left[i]])
    return np.concatenate(order)


def _batches_per_class(sizes: np.ndarray, batches: int, per_batch: int) -> np.ndarray:
    """The number of batches with each class, as fractions: proportional to its size."""
    full = np.zeros(len(sizes), bool)
    while True:
        free = batches * (per_batch - full.sum())
        counts = np.where(full, batches, sizes * free / max(sizes[~full].sum(), 1))
        if (counts <= batches).all():
            return counts
        full |= counts > batches


def _round(counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Round at random, keeping the sum; a larger fraction is rounded up more often."""
    whole = np.floor(counts).astype(int)
    weights = (counts - whole) / rng.exponential(size=len(counts))
    whole[np.argsort(-weights)[: round(counts.sum()) - whole.sum()]] += 1
    return whole


def _cycle(
    members: np.ndarray, groups: int, per_class: int, rng: np.random.Generator
) -> np.ndarray:
    """Indices (groups, per_class) of a class's images, in a new order after each pass."""
    indices = np.empty(0, int)
    while len(indices) < groups * per_class:
        begun = indices[len(indices) - len(indices) % per_class :]  # a group not yet filled
        next_pass = rng.permutation(members)
        last = np.isin(next_pass, begun).argsort(kind="stable")
        indices = np.concatenate((indices, next_pass[last]))
    return indices[: groups * per_class].reshape(groups, per_class)
