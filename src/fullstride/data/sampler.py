"""Which images make a batch? Random ones, or the same number of images of each of some classes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class EpochSampler:
    """The batches of an epoch as (epoch, index, copy), so that workers need not know the epoch.

    `copy` counts, from 0, the earlier places of an image in the epoch that should look different.
    """

    targets: tuple[Any, ...]
    batch: int
    seed: int
    shuffle: bool
    rank: int = 0
    world_size: int = 1
    per_class: int = 0
    balance: float = 0.0
    repeats: int = 1
    epoch: int = 0
    start: int = 0

    def __len__(self) -> int:
        images = len(self.targets)
        return max(1, images // self.batch) if self.shuffle else -(-images // self.batch)

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        epoch, order = self.epoch, np.arange(len(self.targets))
        rng = np.random.default_rng([self.seed, epoch])
        if self.per_class:
            order = _by_class(
                self.targets, len(self), self.batch // self.per_class, self.per_class, rng
            )
        elif self.balance:
            images = min(len(order), len(self) * self.batch)
            order = _balanced(self.targets, images, self.balance, rng)
        elif self.shuffle:
            order = rng.permutation(len(order))
        if self.repeats > 1:
            # Adjacent, so that the processes get different copies (arXiv:1902.05509), as in timm.
            order = order.repeat(self.repeats)[: len(order)]
        copies = _earlier(order) if self.balance or self.repeats > 1 else np.zeros_like(order)
        for start in range(self.start * self.batch, len(self) * self.batch, self.batch):
            # a group stays in one process, whose loss compares only its own images
            last = min(start + self.batch, len(order))
            groups = np.arange(start, last).reshape(-1, self.per_class or 1)
            places = groups[self.rank :: self.world_size].ravel()
            yield [(epoch, int(order[place]), int(copies[place])) for place in places]


def check_groups(
    labels: Sequence[int], batch: int, per_class: int, world_size: int, shuffle: bool
) -> None:
    """Raises ValueError unless batches can have `per_class` images of each of their classes."""
    divisors = [number for number in range(1, batch + 1) if batch % number == 0]
    if not shuffle or per_class not in divisors:
        raise ValueError(
            f"{per_class} images per class in batches of {batch} with shuffle {shuffle}: shuffle, "
            f"and use one of {', '.join(map(str, divisors))}"
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
    """The indices of each class's images, and how many they are."""
    if labels and isinstance(labels[0], tuple):
        raise ValueError("images with several labels have no class that batches could go by")
    _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return np.split(np.argsort(class_of, kind="stable"), np.cumsum(sizes)[:-1]), sizes


def _earlier(order: np.ndarray) -> np.ndarray:
    """For each place, how many earlier ones hold the same index."""
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
    """Up or down at random with the same sum; up more often if the fraction is large."""
    whole = np.floor(counts).astype(int)
    weights = (counts - whole) / rng.exponential(size=len(counts))
    whole[np.argsort(-weights)[: round(counts.sum()) - whole.sum()]] += 1
    return whole


def _cycle(
    members: np.ndarray, groups: int, per_class: int, rng: np.random.Generator
) -> np.ndarray:
    """(groups, per_class) of a class's images, in a new order after each pass through all."""
    indices = np.empty(0, int)
    while len(indices) < groups * per_class:
        begun = indices[len(indices) - len(indices) % per_class :]  # a group not yet filled
        next_pass = rng.permutation(members)
        last = np.isin(next_pass, begun).argsort(kind="stable")
        indices = np.concatenate((indices, next_pass[last]))
    return indices[: groups * per_class].reshape(groups, per_class)
