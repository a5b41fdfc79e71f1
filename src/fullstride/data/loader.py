"""Loads batches: workers decode images to uint8, and the device converts them to floats.

The order of an epoch and every random draw are functions of seed, epoch and sample, so that
neither the number of workers nor resuming changes a pixel.
"""

import os
import signal
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fullstride.data.dataset import Images, UnreadableImage
from fullstride.data.sampler import EpochSampler, LoaderOptions, check_groups
from fullstride.data.transforms.crop import (
    Augmentation,
    Decoder,
    Sides,
    Source,
    test_view,
    to_input,
    train_view,
)
from fullstride.io.writing import allow_open_files
from fullstride.nets.preprocessing import Preprocessing

FILES_PER_WORKER = 8  # pipes, and the tensors of batches in transit


class View(Protocol):
    """The transform of one image and its target; pickled to the workers of data loaders."""

    # whether the view takes the file of an image or video, a path or bytes, and no decoded image
    decodes_files: ClassVar[bool]

    @property
    def pre(self) -> Preprocessing: ...

    def __call__(
        self, image: Any, target: Any, rng: np.random.Generator, epoch: int = 0
    ) -> tuple[np.ndarray, Any]:
        """An image, PIL or a file, and its target -> uint8 (H, W, C) and the view's target.

        A video gives (T, H, W, C), or (V, T, H, W, C) for several views.
        """
        ...


def input_of(images: Images, index: int, view: View) -> Source:
    """The input of `view`: the file of an image, or the decoded image."""
    if view.decodes_files:
        return images.source(index)
    return images.over(view.pre.background).picture(index)


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

    decodes_files: ClassVar[bool] = True

    def __call__(
        self, image: Source, target: Any, rng: np.random.Generator, epoch: int = 0
    ) -> tuple[np.ndarray, Any]:
        side = self.sides[epoch] if epoch < len(self.sides) else self.pre.resolution
        pre = replace(self.pre, resolution=side)
        if self.decoder == "opencv":
            from fullstride.data.transforms.opencv import fast_train_view  # an optional extra

            return fast_train_view(image, pre, self.augmentation, rng), target
        return train_view(image, pre, self.augmentation, rng), target


@dataclass(frozen=True)
class TestView:
    """The deterministic crop for evaluation. Targets are returned as they are."""

    __test__ = False  # its name makes pytest take it for a test

    pre: Preprocessing
    decodes_files: ClassVar[bool] = True

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

    Args:
        images: The images.
        view: The transform of each.
        options: How batches are drawn.
        collate: Combines the targets of N samples into `Batch.targets`.
        to_x: Converts uint8 (N, H, W, C), or clips (N, T, H, W, C), on the device to `Batch.x`.
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
                collate_fn=_Collate(collate),
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
                f"none of the {len(self.images)} images can be read; the first, {name!r}: {reason}"
            )


def to_device(targets: Any, device: torch.device) -> Any:
    """Copies on `device` of the tensors in nested lists and dicts."""
    if isinstance(targets, Tensor):
        return targets.to(device, non_blocking=True)
    if isinstance(targets, dict):
        return {key: to_device(value, device) for key, value in targets.items()}
    if isinstance(targets, list):
        return [to_device(value, device) for value in targets]
    return targets


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
        image = input_of(self.images, index, self.view)
        return self.view(image, self.images.targets[index], rng, epoch)


@dataclass(frozen=True)
class _Collate:
    """Items -> pixels (N, ...), targets, indices, and the reasons of unreadable images."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, items: list[_Item]) -> tuple[Tensor, Any, Tensor, dict[str, str]]:
        readable = [item for item in items if item.pixels is not None]
        pixels = [item.pixels for item in readable if item.pixels is not None]
        return (
            torch.from_numpy(np.stack(pixels) if pixels else np.empty(0, np.uint8)),
            self.collate([item.target for item in readable]),
            torch.tensor([item.drawn for item in readable], dtype=torch.long),
            {name: reason for item in items for name, reason in item.skipped.items()},
        )


def exit_on_interrupt(worker: int) -> None:
    """Exit on Ctrl-C, which reaches workers too; else they print the traceback of a broken pipe."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
