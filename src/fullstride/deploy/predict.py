"""What is in these pictures? The answers of a bundle or of an exported file, with its own preprocessing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fullstride.data.dataset import UnreadableImage, decode
from fullstride.data.transforms.crop import in_mode, test_view, to_input
from fullstride.deploy.exported import Input, Shipped
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing


@dataclass(frozen=True)
class Guess:
    label: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one picture, best first; or why it could not be read."""

    path: str
    guesses: tuple[Guess, ...] = ()
    unreadable: str = ""


def predict(
    model: Bundle | Shipped,
    paths: Sequence[Path],
    *,
    top: int = 5,
    batch: int = 32,
    device: torch.device | str = "cpu",
) -> Iterator[Prediction]:
    """One `Prediction` for each path, in order. A picture that cannot be read is named and the others go on.

    A file computes where it was opened to; `device` is for bundles.
    """
    for start in range(0, len(paths), batch):
        reasons: dict[Path, str] = {}
        readable: dict[Path, Image.Image] = {}
        for path in paths[start : start + batch]:
            try:
                readable[path] = decode(path, model.preprocessing.channels)
            except UnreadableImage as error:
                reasons[path] = error.reason
        rows = dict(
            zip(readable, probabilities(model, list(readable.values()), device), strict=True)
        )
        for path in paths[start : start + batch]:
            if path in reasons:
                yield Prediction(str(path), unreadable=reasons[path])
            else:
                best = np.argsort(-rows[path], kind="stable")[:top]
                yield Prediction(
                    str(path), tuple(Guess(model.classes[k], float(rows[path][k])) for k in best)
                )


def probabilities(
    model: Bundle | Shipped, pictures: Sequence[Image.Image], device: torch.device | str = "cpu"
) -> np.ndarray:
    """(N, K) float32, each row summing to 1, of pictures of any sizes."""
    if not pictures:
        return np.empty((0, len(model.classes)), np.float32)
    if isinstance(model, Shipped):
        found = answers(model, inputs(model.about.input, model.preprocessing, pictures))
        return softmax(found) if model.about.input == "normalised" else found
    return softmax(logits(model, inputs("normalised", model.preprocessing, pictures), device))


def logits(
    bundle: Bundle, batches: Iterable[np.ndarray], device: torch.device | str = "cpu"
) -> np.ndarray:
    """(N, K) float32 of a bundle's network, of normalised `inputs`."""
    net = bundle.net.eval().to(device)
    with torch.inference_mode():
        rows = [net(torch.from_numpy(x).to(device)) for x in batches]
    return torch.cat(rows).float().cpu().numpy()


def answers(shipped: Shipped, batches: Iterable[np.ndarray]) -> np.ndarray:
    """(N, K) float32 of a file, of `inputs` as it takes them: logits or probabilities, see `About.input`."""
    return np.concatenate([shipped.run(x) for x in batches])


def inputs(
    takes: Input, pre: Preprocessing, pictures: Sequence[Image.Image], batch: int = 32
) -> Iterator[np.ndarray]:
    """Pictures as a file takes them (see `About.input`), up to `batch` at a time; of any size one by one."""
    if takes == "pictures":
        for picture in pictures:
            pixels = np.asarray(in_mode(picture, pre.channels))
            yield pixels.reshape(1, *pixels.shape[:2], pre.channels)
        return
    for start in range(0, len(pictures), batch):
        pixels = np.stack([test_view(picture, pre) for picture in pictures[start : start + batch]])
        yield (
            pixels
            if takes == "pixels"
            else to_input(torch.from_numpy(pixels), pre).contiguous().numpy()
        )


@dataclass(frozen=True)
class WholePictures(Sequence[np.ndarray]):
    """`inputs` of whole pictures, again and again, and none of them kept: of photographs few fit in memory."""

    pre: Preprocessing
    pictures: Sequence[Image.Image]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, place: Any) -> Any:
        return next(inputs("pictures", self.pre, [self.pictures[place]]))


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows - rows.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)
