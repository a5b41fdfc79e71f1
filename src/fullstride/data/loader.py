"""Loads batches: workers decode images to uint8, and the device converts them to floats.

The order of an epoch and every random draw are functions of seed, epoch and sample, so that
neither the number of workers nor resuming changes a pixel.
"""

import os
import signal
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fullstride.data.dataset import Images, UnreadableImage
from fullstride.data.transforms.crop import (
    Augmentation,
    Decoder,
    Sides,
    Source,
    pre_at,
    test_view,
    to_input,
    train_view,
)
from fullstride.io.console import count_of, verb_of
from fullstride.io.records import Count, PositiveInt, Probability, check_bounds
from fullstride.io.writing import allow_open_files
from fullstride.nets.preprocessing import Preprocessing

# The images of each batch, drawn at random, or as many from each of several classes.


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
    through its images in random order, so that each is drawn almost equally often.

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
            f"{count_of(classes, 'class', 'do')} not fill a batch of {batch} with {per_class} "
            f"images of each: use {fits} of each, or a batch of {classes * per_class}"
        )
    if per_batch % world_size:
        raise ValueError(
            f"{count_of(per_batch, 'class')} in a batch {verb_of(per_batch, 'are')} not shared out "
            f"evenly among {world_size} processes: use a batch that is a multiple of "
            f"{world_size * per_class}"
        )


def _balanced(
    labels: Sequence[int], images: int, balance: float, rng: np.random.Generator
) -> np.ndarray:
    """Indices of `images` images, a class as often as its size to the power of 1 - `balance`."""
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
    images = [_cycle(*each, per_class, rng) for each in zip(members, groups_left, strict=True)]
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


# The loader.


FILES_PER_WORKER = 8  # pipes, and the tensors of batches in transit


class View(Protocol):
    """The transform of one image and its target; pickled to the workers of data loaders."""

    @property
    def pre(self) -> Preprocessing: ...

    def __call__(
        self, image: Any, target: Any, rng: np.random.Generator, epoch: int = 0
    ) -> tuple[np.ndarray, Any]:
        """`Images.source` and a target -> uint8 (H, W, C) and the view's target.

        A video gives (T, H, W, C), or (V, T, H, W, C) for several views.
        """
        ...


@dataclass(frozen=True)
class TrainView:
    """Random augmentation for training. Targets are returned as they are."""

    pre: Preprocessing
    augmentation: Augmentation = Augmentation()
    decoder: Decoder = "pillow"  # opencv is faster, its pixels differ a little
    sides: Sides = ()  # pixels a side in the first epochs; later `pre.resolution`

    def __post_init__(self) -> None:
        if self.decoder not in ("pillow", "opencv"):
            raise ValueError(f"decoder {self.decoder!r}: use 'pillow' or 'opencv'")
        missing = [name for name in ("cv2", "simplejpeg") if find_spec(name) is None]
        if self.decoder == "opencv" and missing:
            raise ValueError(
                f"decoder 'opencv' needs {' and '.join(missing)}: pip install 'fullstride[fast]', "
                "or use 'pillow'"
            )
        for side in self.sides:
            replace(self.pre, resolution=side)  # raises ValueError for an impossible one

    def __call__(
        self, image: Source, target: Any, rng: np.random.Generator, epoch: int = 0
    ) -> tuple[np.ndarray, Any]:
        pre = pre_at(self.pre, self.sides, epoch)
        if self.decoder == "opencv":
            from fullstride.data.transforms.opencv import fast_train_view  # an optional extra

            return fast_train_view(image, pre, self.augmentation, rng), target
        return train_view(image, pre, self.augmentation, rng), target


@dataclass(frozen=True)
class TestView:
    """The deterministic crop for evaluation. Targets are returned as they are."""

    __test__ = False  # its name makes pytest take it for a test

    pre: Preprocessing

    def __call__(
        self, image: Source, target: Any, rng: np.random.Generator, epoch: int = 0
    ) -> tuple[np.ndarray, Any]:
        return test_view(image, self.pre), target


class Batch(NamedTuple):
    x: Tensor  # float32 (N, C, H, W) unless the loader's `to_x` says otherwise, on the device
    targets: Any  # on the device: a tensor of N rows, for classes int64 (N,), or a list of N items
    indices: Tensor  # int64 (N,), on the CPU: the images drawn, even if another replaces one


def class_indices(targets: list[int]) -> Tensor:
    """Targets of N samples -> int64 (N,)."""
    return torch.tensor(targets, dtype=torch.long)


class Batches:
    """The batches of `images`, one epoch at a time.

    `skipped` maps the names of the unreadable images so far to the reasons.

    The view of an image is a function of seed, epoch (modulo `distinct_views`, if not 0) and index;
    an image that occurs twice in an epoch looks the same twice, but not with `balance` or
    `repeats`.

    `collate` combines the targets of N samples into `Batch.targets`. `to_x` converts uint8
    (N, H, W, C), or clips (N, T, H, W, C), on the device to `Batch.x`.
    """

    def __init__(
        self,
        images: Images,
        view: View,
        options: LoaderOptions,
        *,
        collate: Callable[[list[Any]], Any] = class_indices,
        to_x: Callable[[Tensor, Preprocessing], Tensor] = to_input,
    ):
        if not len(images):
            raise ValueError("no images to load: give at least one")
        if options.per_class:
            check_groups(images.targets, options)
        self.images, self.view, self.device = images, view, torch.device(options.device)
        self.options, self._to_x = options, to_x
        self.skipped: dict[str, str] = {}
        self._sampler, workers = EpochSampler(images.targets, options), options.workers
        if workers:
            allow_open_files(16 + FILES_PER_WORKER * workers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more workers than cores is the caller's choice
            self._loader = DataLoader(
                _Views(images, view, options),
                batch_sampler=self._sampler,  # pyright: ignore[reportArgumentType]  # any iterable
                collate_fn=partial(_collated, collate=collate),
                num_workers=workers,
                persistent_workers=workers > 0,
                pin_memory=self.device.type == "cuda",
                worker_init_fn=exit_on_interrupt,
                # torch would draw from the global generator, and a resumed run would differ
                generator=torch.Generator(),
            )

    def __len__(self) -> int:
        return len(self._sampler)

    def close(self) -> None:
        """End the workers, which the first epoch starts; a later epoch starts new ones."""
        workers, self._loader._iterator = self._loader._iterator, None
        if isinstance(workers, _MultiProcessingDataLoaderIter):
            workers._shutdown_workers()

    def epoch(self, number: int, start: int = 0) -> Generator[Batch, None, None]:
        """The batches of an epoch, from the one numbered `start`.

        Raises ValueError if no image can be read.
        """
        self._sampler.epoch, self._sampler.start = number, start
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batches = iter(self._loader)
        read = 0
        for pixels_nhwc, targets, indices, skipped in batches:
            self.skipped.update(skipped)
            read += len(indices)
            if len(indices):
                x = self._to_x(pixels_nhwc.to(self.device, non_blocking=True), self.view.pre)
                yield Batch(x, to_device(targets, self.device), indices)
            elif self.options.shuffle:
                break  # not even a replacement can be read
        # in evaluation by several processes, other processes may have read some
        is_whole = self.options.shuffle or self.options.world_size == 1
        if not read and self.skipped and is_whole:
            name, reason = next(iter(self.skipped.items()))
            raise ValueError(
                f"none of the {count_of(len(self.images), 'image')} can be read; the first, "
                f"{name!r}: {reason}"
            )


def to_device(targets: Any, device: torch.device) -> Any:
    """Copies on `device` of the tensors in nested lists and dicts."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), targets)


class _Item(NamedTuple):
    pixels: np.ndarray | None  # None: unreadable
    target: Any
    drawn: int  # index of the image that was drawn
    skipped: dict[str, str]


@dataclass
class _Views(Dataset[_Item]):
    images: Images
    view: View
    options: LoaderOptions
    unreadable: dict[int, str] = field(default_factory=dict)  # in this process; not tried again

    def __getitem__(self, key: tuple[int, int, int]) -> _Item:
        _, drawn, _ = key
        skipped: dict[str, str] = {}
        for step in range(len(self.images) if self.options.shuffle else 1):
            index = (drawn + step) % len(self.images)
            if index not in self.unreadable:
                try:
                    return _Item(*self._view(index, *key), drawn, skipped)
                except UnreadableImage as error:
                    self.unreadable[index] = error.reason
            skipped[self.images.names[index]] = self.unreadable[index]
        return _Item(None, None, drawn, skipped)

    def _view(self, index: int, epoch: int, drawn: int, copy: int) -> tuple[np.ndarray, Any]:
        distinct = self.options.distinct_views
        repeat = epoch % distinct if distinct else epoch
        rng = np.random.default_rng([self.options.seed, repeat, drawn, *([copy] if copy else [])])
        return self.view(self.images.source(index), self.images.targets[index], rng, epoch)


def _collated(
    items: list[_Item], collate: Callable[[list[Any]], Any]
) -> tuple[Tensor, Any, Tensor, dict[str, str]]:
    """Items -> pixels (N, ...), targets, indices, and the reasons of unreadable images."""
    readable = [item for item in items if item.pixels is not None]
    pixels = [item.pixels for item in readable if item.pixels is not None]
    return (
        torch.from_numpy(np.stack(pixels) if pixels else np.empty(0, np.uint8)),
        collate([item.target for item in readable]),
        torch.tensor([item.drawn for item in readable], dtype=torch.long),
        {name: reason for item in items for name, reason in item.skipped.items()},
    )


def exit_on_interrupt(worker: int) -> None:
    """Exit on Ctrl-C, which reaches workers too; else they print the traceback of a broken pipe."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
