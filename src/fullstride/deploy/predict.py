"""Which classes do these pictures show? Predictions of a bundle or of an exported file."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fullstride.data.dataset import UnreadableImage, decode
from fullstride.data.transforms.crop import in_mode, test_view, to_input
from fullstride.deploy.exported import ExportedModel, InputKind
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks import find_task


@dataclass(frozen=True)
class Prediction:
    """What `Task.decode` makes of one picture, best first; or why it could not be read."""

    path: str
    guesses: tuple[Any, ...] = ()  # `Guess` for classification
    unreadable: str = ""


def predict(
    model: Bundle | ExportedModel,
    paths: Sequence[Path],
    *,
    top: int = 5,
    batch: int = 32,
    device: torch.device | str = "cpu",
) -> Iterator[Prediction]:
    """One `Prediction` for each path, in order, with the `top` most probable classes.

    An unreadable picture yields a `Prediction` with the reason. `device` is for bundles: an
    exported file computes on the device that it was opened for.
    """
    for start in range(0, len(paths), batch):
        reasons: dict[Path, str] = {}
        readable: dict[Path, Image.Image] = {}
        for path in paths[start : start + batch]:
            try:
                readable[path] = decode(path, model.preprocessing.channels)
            except UnreadableImage as error:
                reasons[path] = error.reason
        rows = torch.from_numpy(probabilities(model, list(readable.values()), device))
        decoded = find_task(task_of(model)).decode(rows, model.classes, top)
        guesses = dict(zip(readable, decoded, strict=True))
        for path in paths[start : start + batch]:
            if path in reasons:
                yield Prediction(str(path), unreadable=reasons[path])
            else:
                yield Prediction(str(path), guesses[path])


def probabilities(
    model: Bundle | ExportedModel,
    pictures: Sequence[Image.Image],
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """The activated outputs for pictures of any sizes; for classification (N, K) float32.

    Raises FloatingPointError where an output is not finite.
    """
    if not pictures:
        return np.empty((0, len(model.classes)), np.float32)
    kind = "normalised" if isinstance(model, Bundle) else model.metadata.input_kind
    batches = inputs(kind, model.preprocessing, pictures)
    rows = logits(model, batches, device) if isinstance(model, Bundle) else outputs(model, batches)
    rows = activate(task_of(model), rows) if kind == "normalised" else rows
    if not np.isfinite(rows).all():
        raise FloatingPointError("the network's outputs for a picture are not finite")
    return rows


def logits(
    bundle: Bundle, batches: Iterable[np.ndarray], device: torch.device | str = "cpu"
) -> np.ndarray:
    """(N, K) float32 of a bundle's network, for `inputs` of the kind normalised."""
    net = bundle.net.eval().to(device)
    with torch.inference_mode():
        rows = [net(torch.from_numpy(x).to(device)) for x in batches]
    return torch.cat(rows).float().cpu().numpy()


def outputs(model: ExportedModel, batches: Iterable[np.ndarray]) -> np.ndarray:
    """(N, K) float32 of an exported file: logits if its inputs are normalised, or probabilities."""
    return np.concatenate([model.run(x) for x in batches])


def inputs(
    kind: InputKind, pre: Preprocessing, pictures: Sequence[Image.Image], batch: int = 32
) -> Iterator[np.ndarray]:
    """Pictures as inputs of a file (see `Metadata.input_kind`), in batches of up to `batch`.

    Inputs of the kind pictures keep their size and come one by one.
    """
    if kind == "pictures":
        for picture in pictures:
            pixels = np.asarray(in_mode(picture, pre.channels))
            yield pixels.reshape(1, *pixels.shape[:2], pre.channels)
        return
    for start in range(0, len(pictures), batch):
        pixels = np.stack([test_view(picture, pre) for picture in pictures[start : start + batch]])
        if kind == "pixels":
            yield pixels
        else:
            yield to_input(torch.from_numpy(pixels), pre).contiguous().numpy()


@dataclass(frozen=True)
class FullSizeInputs(Sequence[np.ndarray]):
    """`inputs` of the kind pictures, computed at each access: few photographs fit in memory."""

    pre: Preprocessing
    pictures: Sequence[Image.Image]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: Any) -> Any:
        return next(inputs("pictures", self.pre, [self.pictures[index]]))


def activate(task: str, rows: np.ndarray) -> np.ndarray:
    return find_task(task).activate(torch.from_numpy(rows)).numpy()


def task_of(model: Bundle | ExportedModel) -> str:
    return model.task if isinstance(model, Bundle) else model.metadata.task
