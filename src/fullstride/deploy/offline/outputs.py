"""What are a model's outputs for many images? Batch by batch, decoded by the loader's workers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullstride.data.dataset import Images
from fullstride.data.loader import Batches, TestView
from fullstride.data.readers.decode import UnreadableImage
from fullstride.data.transforms.crop import to_input
from fullstride.deploy.exported import ExportedModel
from fullstride.deploy.predict import Tta, activate, most_in_batch, probabilities, read_view
from fullstride.nets.bundle import Bundle

PART_IMAGES = 8192  # rows that are held at once: 64 MiB of embeddings of 2,048 numbers

Model = Bundle | ExportedModel


@dataclass(frozen=True, kw_only=True)
class OfflineSettings:
    """How a job is computed. Only `part_images` and `tta` decide what is in the store."""

    batch: int = 32
    device: torch.device | str = "cpu"  # of a bundle
    workers: int = 0  # processes that decode images beside this one
    tta: Tta = "none"
    rank: int = 0  # of this process
    ranks: int = 1  # processes that share the job
    part_images: int = PART_IMAGES  # rows of a part

    def __post_init__(self) -> None:
        for name in ("batch", "part_images", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: use 1 or more")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank}: use 0 to {self.ranks - 1} for {self.ranks} ranks")
        if self.workers < 0:
            raise ValueError(f"workers {self.workers}: use 0 or more")


def outputs(
    model: Model,
    images: Images,
    how: OfflineSettings,
    skipped: dict[str, str],
    watch: Callable[[Any], Any],
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Indices of readable images in ascending order, and their activated outputs on the CPU.

    The reasons for the others go into `skipped`, before a larger index is yielded.
    """
    pre = model.preprocessing
    kind = "normalised" if isinstance(model, Bundle) else model.metadata.input_kind
    batch = min(how.batch, most_in_batch(pre))
    if kind == "pictures":
        yield from _outputs_of_pictures(model, images, batch, how, skipped)
        return
    if isinstance(model, Bundle):
        model.net.eval().to(how.device)
    batches = Batches(
        images,
        TestView(replace(pre, draft=True)),
        batch=batch,
        workers=how.workers,
        device=how.device if isinstance(model, Bundle) else "cpu",
        collate=list,
        to_x=to_input if kind == "normalised" else as_pixels,
    )
    batches.skipped = skipped
    try:
        for x, _, indices in watch(batches).epoch(0):
            rows = _activated(model, x)
            if how.tta == "flip":
                across = 3 if kind == "normalised" else 2
                rows = (rows + _activated(model, x.flip(across))) / 2
            yield indices.numpy(), _finite(rows)
    except ValueError:
        if len(skipped) < len(images):  # else none can be read, and each row says why
            raise
    finally:
        batches.close()


def as_pixels(pixels_nhwc: Tensor, pre: object) -> Tensor:
    return pixels_nhwc


def _outputs_of_pictures(
    model: Model, images: Images, batch: int, how: OfflineSettings, skipped: dict[str, str]
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """`_outputs` of a file that resizes images itself; they are decoded in this process."""
    numbers = iter(range(len(images)))
    while group := list(islice(numbers, batch)):
        views, readable = [], []
        for index in group:
            try:
                source = images.source(index)
                is_file = isinstance(source, Path | bytes)
                views.append(read_view(source, model) if is_file else source)
                readable.append(index)
            except UnreadableImage as error:
                skipped[images.names[index]] = error.reason
        if readable:
            rows = probabilities(model, views, how.device, batch, how.tta)
            yield np.array(readable), torch.from_numpy(rows)


def _activated(model: Model, x: Tensor) -> Tensor:
    if isinstance(model, Bundle):
        with torch.inference_mode():
            rows = model.net(x).float().cpu().numpy()
    else:
        rows = model.run(x.numpy())
        if model.metadata.input_kind != "normalised":
            return torch.from_numpy(rows)
    return torch.from_numpy(activate(model, rows))


def _finite(rows: Tensor) -> Tensor:
    if not rows.isfinite().all():
        raise FloatingPointError("the network's outputs for an image are not finite")
    return rows
