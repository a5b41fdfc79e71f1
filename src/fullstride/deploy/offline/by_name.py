"""How do the words of a command become a store of predictions?"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullstride.data.unlabelled import Unlabelled, of_files, open_unlabelled
from fullstride.deploy.offline.engine import Summary, predict_all
from fullstride.deploy.offline.outputs import Model, OfflineSettings
from fullstride.deploy.open_model import find_images
from fullstride.tasks import task_of
from fullstride.tasks.classify import most_probable_classes


def open_images(words: Sequence[str]) -> Unlabelled:
    """The images of one place as of `open_unlabelled`, or those of several files and folders."""
    if len(words) == 1 and words[0] != "-":
        return open_unlabelled(words[0])
    return of_files(*find_images(words))


def this_share(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """The rank of this process and their number, by default those of torchrun."""
    if (rank is None) != (ranks is None):
        raise ValueError("--rank and --ranks belong together: give both or none")
    if rank is None or ranks is None:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return rank, ranks


def this_device(device: torch.device) -> torch.device:
    """The GPU of this process among those that torchrun started on a machine."""
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


def write_predictions(
    model: Model,
    data: Unlabelled,
    out: Path,
    top: int,
    settings: OfflineSettings,
    watch: Callable[[Any], Any] = lambda batches: batches,
) -> Summary:
    """Write the columns of the model's task, with the `top` most probable predictions.

    Raises ValueError for predictions with places, which need the size of each picture.
    """
    task = task_of(model)
    if task.has_places:
        raise ValueError(
            f"--out {out}: rows of the task {task.name} would have no places in the pictures: use "
            "--json"
        )
    columns = partial(task.columns, classes=model.classes, top=top)
    how: dict[str, Any] = dict(arguments={"top": str(top)}, settings=settings, watch=watch)
    return predict_all(model, data, out, columns, **how)


def write_pseudo_labels(
    model: Model,
    data: Unlabelled,
    out: Path,
    top: int,
    settings: OfflineSettings,
    watch: Callable[[Any], Any] = lambda batches: batches,
) -> Summary:
    """Write the indices of the `top` most probable classes and their probabilities in fp16.

    Raises ValueError for a model of another task than classification.
    """
    task = task_of(model)
    if not task.single_label:
        raise ValueError(f"a teacher for pseudo-labels has classes, not the task {task.name}")

    def columns(probabilities_nk: Tensor) -> dict[str, np.ndarray]:
        indices, values = most_probable_classes(probabilities_nk, top)
        return {
            "classes": indices.numpy().astype(np.int32),
            "probabilities": values.numpy().astype(np.float16),
        }

    how: dict[str, Any] = dict(arguments={"top": str(top)}, settings=settings, watch=watch)
    return predict_all(model, data, out, columns, kind="pseudo_labels", **how)
