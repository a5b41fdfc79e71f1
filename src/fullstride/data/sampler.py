"""Which images make a batch? All of them by chance, or the same number of each of some classes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass
class Order:
    """The batches of an epoch, as (epoch, index) pairs, so that workers need not know the epoch."""

    labels: tuple[int, ...]
    batch: int
    seed: int
    shuffle: bool
    share: tuple[int, int] = (0, 1)
    per_class: int = 0
    epoch: int = 0
    start: int = 0

    def __len__(self) -> int:
        images = len(self.labels)
        return max(1, images // self.batch) if self.shuffle else -(-images // self.batch)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, order = self.epoch, np.arange(len(self.labels))
        rng = np.random.default_rng([self.seed, epoch])
        if self.per_class:
            order = _in_groups(
                self.labels, len(self), self.batch // self.per_class, self.per_class, rng
            )
        elif self.shuffle:
            order = rng.permutation(len(order))
        place, processes = self.share
        for start in range(self.start * self.batch, len(self) * self.batch, self.batch):
            # a group stays in one process, which compares only its own images
            groups = order[start : start + self.batch].reshape(-1, self.per_class or 1)
            yield [(epoch, int(index)) for index in groups[place::processes].ravel()]


def check_groups(
    labels: tuple[int, ...], batch: int, per_class: int, processes: int, shuffle: bool
) -> None:
    divisors = [number for number in range(1, batch + 1) if batch % number == 0]
    if not shuffle or per_class not in divisors:
        raise ValueError(
            f"{per_class} images per class in batches of {batch} with shuffle {shuffle}: shuffle, and use one of "
            f"{', '.join(map(str, divisors))}"
        )
    classes, wanted = len(set(labels)), batch // per_class
    if classes < wanted:
        fits = next(number for number in divisors if batch // number <= classes)
        raise ValueError(
            f"{classes} classes do not fill a batch of {batch} with {per_class} images of each: use {fits} of each, "
            f"or a batch of {classes * per_class}"
        )
    if wanted % processes:
        raise ValueError(
            f"{wanted} classes in a batch are not shared out evenly among {processes} processes: use a batch that is "
            f"a multiple of {processes * per_class}"
        )


def _in_groups(
    labels: tuple[int, ...], batches: int, per_batch: int, per_class: int, rng: np.random.Generator
) -> np.ndarray:
    """Indices of an epoch's images, batch after batch: `per_class` of each of `per_batch` different classes."""
    _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    left = _rounded(_shares(sizes, batches, per_batch), rng)
    shown = [
        _passes(np.flatnonzero(class_of == i), groups, per_class, rng)
        for i, groups in enumerate(left)
    ]
    order = []
    for to_come in range(batches, 0, -1):
        # by chance, but those with more left sooner, and now those that must be in every batch to come
        urgency = np.where(left == to_come, np.inf, left / rng.exponential(size=len(left)))
        for i in rng.permutation(np.argsort(-urgency)[:per_batch]):
            left[i] -= 1
            order.append(shown[i][left[i]])
    return np.concatenate(order)


def _shares(sizes: np.ndarray, batches: int, per_batch: int) -> np.ndarray:
    """In how many batches each class should be, in fractions: in proportion to its size, but not above all of them."""
    full = np.zeros(len(sizes), bool)
    while True:
        free = batches * (per_batch - full.sum())
        shares = np.where(full, batches, sizes * free / max(sizes[~full].sum(), 1))
        if (shares <= batches).all():
            return shares
        full |= shares > batches


def _rounded(shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Up or down, so that the sum stays; more often up where the fraction is large."""
    whole = np.floor(shares).astype(int)
    chance = (shares - whole) / rng.exponential(size=len(shares))
    whole[np.argsort(-chance)[: round(shares.sum()) - whole.sum()]] += 1
    return whole


def _passes(
    members: np.ndarray, groups: int, per_class: int, rng: np.random.Generator
) -> np.ndarray:
    """(groups, per_class) of a class's images, in a new order whenever all were shown."""
    shown = np.empty(0, int)
    while len(shown) < groups * per_class:
        begun = shown[
            len(shown) - len(shown) % per_class :
        ]  # a group that the last pass did not fill
        again = rng.permutation(members)
        shown = np.concatenate((shown, again[np.isin(again, begun).argsort(kind="stable")]))
    return shown[: groups * per_class].reshape(groups, per_class)
