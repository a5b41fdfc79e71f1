"""How do pictures reach the device? `Batches` decodes them in workers and sends bytes; they become floats on the device.

The order of an epoch and every random draw depend on seed, epoch and sample alone, so that neither the number of
workers nor a resumed run changes a single pixel.
"""

import os
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fullstride.data.dataset import Images, UnreadableImage
from fullstride.data.sampler import Order, check_groups
from fullstride.data.transforms.crop import Augmentation, test_view, to_input, train_view
from fullstride.nets.preprocessing import Preprocessing


class View(Protocol):
    """A picture's uint8 (H, W, C) pixels; must pickle, because loader workers get a copy."""

    @property
    def pre(self) -> Preprocessing: ...

    def __call__(
        self, picture: Image.Image, rng: np.random.Generator, epoch: int = 0
    ) -> np.ndarray: ...


@dataclass(frozen=True)
class TrainView:
    pre: Preprocessing
    augmentation: Augmentation = Augmentation()
    decoder: Literal["pillow", "opencv"] = (
        "pillow"  # OpenCV's pixels differ a little and take half of the time
    )
    sides: tuple[int, ...] = ()  # pixels a side in the first epochs; `pre`'s own in all later ones

    def __post_init__(self) -> None:
        if self.decoder not in ("pillow", "opencv"):
            raise ValueError(f"decoder {self.decoder!r}: use 'pillow' or 'opencv'")
        missing = [name for name in ("cv2", "simplejpeg") if find_spec(name) is None]
        if self.decoder == "opencv" and missing:
            raise ValueError(
                f"decoder 'opencv' needs {' and '.join(missing)}: pip install 'fullstride[fast]', or use 'pillow'"
            )
        for side in self.sides:
            replace(self.pre, resolution=side)  # it refuses what cannot be

    def __call__(
        self, picture: Image.Image | bytes, rng: np.random.Generator, epoch: int = 0
    ) -> np.ndarray:
        """Of a picture, or with OpenCV also of an image file's bytes."""
        pre = (
            replace(self.pre, resolution=self.sides[epoch]) if epoch < len(self.sides) else self.pre
        )
        if self.decoder == "opencv":
            from fullstride.data.transforms.opencv import (
                fast_train_view,  # an extra, which may be absent
            )

            return fast_train_view(picture, pre, self.augmentation, rng)
        assert isinstance(picture, Image.Image)
        return train_view(picture, pre, self.augmentation, rng)


@dataclass(frozen=True)
class TestView:
    __test__ = False  # its name makes pytest take it for a test

    pre: Preprocessing

    def __call__(
        self, picture: Image.Image, rng: np.random.Generator, epoch: int = 0
    ) -> np.ndarray:
        return test_view(picture, self.pre)


class Batch(NamedTuple):
    x: Tensor  # float32 (N, C, H, W), on the device
    targets: (
        Any  # on the device: a tensor of N rows, for classes int64 (N,), or a list of N entries
    )
    indices: Tensor  # int64 (N,), on the CPU: which images were asked for, also where another one stands in


class Batches:
    """The batches of `images`, epoch after epoch; one epoch at a time.

    With `shuffle`, for training: an incomplete last batch is left out, unless it is the only one, and an image that
    cannot be read is replaced by the next one that can. Without, for scoring: every image that can be read, once.
    `skipped` tells the names of unreadable images met so far, and why.

    With `per_class`, every batch has so many images of each of its classes, side by side and in one process. How often
    a class comes in an epoch goes by its number of images, but never twice in a batch: what a large class cannot have
    goes to the others. Chance rounds these numbers, and decides which classes meet. A class shows its images in a
    random order, and in another one when they are used up; one of fewer than `per_class` repeats some in a batch.

    An image's view is a function of seed, epoch (modulo `distinct_views`, where that is given) and index; one that comes twice
    in an epoch looks the same twice.
    """

    def __init__(
        self,
        images: Images,
        view: View,
        *,
        batch: int,
        seed: int = 0,
        shuffle: bool = False,
        workers: int = 0,  # processes that decode; 0: this one
        device: str | torch.device = "cpu",
        share: tuple[int, int] = (
            0,
            1,
        ),  # this process's place and how many there are: each gets a part of each batch
        per_class: int = 0,  # images of each class in a batch, for losses that compare images; 0: as they come
        distinct_views: int = 0,  # different views of an image, after which the first comes again; 0: a new one in each epoch
    ):
        if not len(images):
            raise ValueError("no images to load: give at least one")
        if batch < 1 or workers < 0:
            raise ValueError(
                f"batch {batch} and workers {workers}: use a batch of 1 or more and 0 or more workers"
            )
        if distinct_views < 0:
            raise ValueError(
                f"distinct_views {distinct_views}: use a number of views of each image, or 0 for a new one in each epoch"
            )
        if per_class:
            check_groups(images.targets, batch, per_class, share[1], shuffle)
        self.images, self.view, self.device = images, view, torch.device(device)
        self.skipped: dict[str, str] = {}
        self._order = Order(images.targets, batch, seed, shuffle, share, per_class)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more workers than cores is the caller's choice
            self._loader = DataLoader(
                _Samples(images, view, seed, replace=shuffle, distinct_views=distinct_views),
                batch_sampler=self._order,  # pyright: ignore[reportArgumentType]  # torch means any iterable
                collate_fn=_collate,
                num_workers=workers,
                persistent_workers=workers > 0,
                pin_memory=self.device.type == "cuda",
                worker_init_fn=_leave_on_interrupt,
                generator=torch.Generator(),  # torch would draw from the global one, and a resumed run would differ
            )

    def __len__(self) -> int:
        return len(self._order)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from the one numbered `start`."""
        self._order.epoch, self._order.start = number, start
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = iter(self._loader)
        read = 0
        for pixels_nhwc, targets, indices, skipped in loaded:
            self.skipped.update(skipped)
            read += len(indices)
            if len(indices):
                x = to_input(pixels_nhwc.to(self.device, non_blocking=True), self.view.pre)
                yield Batch(x, targets.to(self.device, non_blocking=True), indices)
            elif self._order.shuffle:
                break  # not even a replacement was found
        alone = (
            self._order.shuffle or self._order.share[1] == 1
        )  # else other processes may have read some
        if not read and self.skipped and alone:
            name, reason = next(iter(self.skipped.items()))
            raise ValueError(
                f"none of the {len(self.images)} images can be read; the first, {name!r}: {reason}"
            )


class _Sample(NamedTuple):
    pixels: np.ndarray | None  # None: unreadable
    target: Any
    wanted: int
    skipped: dict[str, str]


@dataclass
class _Samples(Dataset[_Sample]):
    images: Images
    view: View
    seed: int
    replace: bool  # an unreadable image by the next readable one
    distinct_views: int = 0
    unreadable: dict[int, str] = field(
        default_factory=dict
    )  # met in this process: each is tried once

    def __getitem__(self, key: tuple[int, int]) -> _Sample:
        _, wanted = key
        skipped: dict[str, str] = {}
        for step in range(len(self.images) if self.replace else 1):
            index = (wanted + step) % len(self.images)
            if index not in self.unreadable:
                try:
                    return _Sample(
                        self._pixels(index, *key), self.images.targets[index], wanted, skipped
                    )
                except UnreadableImage as error:
                    self.unreadable[index] = error.reason
            skipped[self.images.names[index]] = self.unreadable[index]
        return _Sample(None, None, wanted, skipped)

    def _pixels(self, index: int, epoch: int, wanted: int) -> np.ndarray:
        rng = np.random.default_rng(
            [self.seed, epoch % self.distinct_views if self.distinct_views else epoch, wanted]
        )
        file = self.images.file
        if file and isinstance(self.view, TrainView) and self.view.decoder == "opencv":
            return self.view(_bytes(file(self.images.names[index])), rng, epoch)
        return self.view(self.images.picture(index), rng, epoch)


def _bytes(source: Path | bytes) -> bytes:
    try:
        return source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise UnreadableImage(str(source), error.strerror or type(error).__name__) from error


def _collate(samples: list[_Sample]) -> tuple[Tensor, Tensor, Tensor, dict[str, str]]:
    """Pixels (N, H, W, C), targets and indices of those that could be read, and why others could not."""
    pixels = [sample.pixels for sample in samples if sample.pixels is not None]
    good = [sample for sample in samples if sample.pixels is not None]
    targets = torch.tensor([sample.target for sample in good], dtype=torch.long)
    indices = torch.tensor([sample.wanted for sample in good], dtype=torch.long)
    skipped = {name: reason for sample in samples for name, reason in sample.skipped.items()}
    return (
        torch.from_numpy(np.stack(pixels) if pixels else np.empty(0, np.uint8)),
        targets,
        indices,
        skipped,
    )


def _leave_on_interrupt(worker: int) -> None:
    """Ctrl-C reaches workers too. One that stayed would find its pipe broken, and say so with a traceback."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
