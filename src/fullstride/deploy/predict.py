"""What is in these pictures? A bundle's answers, with its own preprocessing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fullstride.data.images import UnreadableImage, decode
from fullstride.data.views.augment import test_view, to_input
from fullstride.nets.bundle import Bundle


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
    bundle: Bundle, paths: Sequence[Path], *, top: int = 5, batch: int = 32, device: torch.device | str = "cpu"
) -> Iterator[Prediction]:
    """One `Prediction` for each path, in order. A picture that cannot be read is named and the others go on."""
    for start in range(0, len(paths), batch):
        reasons: dict[Path, str] = {}
        readable: dict[Path, Image.Image] = {}
        for path in paths[start : start + batch]:
            try:
                readable[path] = decode(path, bundle.preprocessing.channels)
            except UnreadableImage as error:
                reasons[path] = error.reason
        rows = dict(zip(readable, probabilities(bundle, list(readable.values()), device), strict=True))
        for path in paths[start : start + batch]:
            if path in reasons:
                yield Prediction(str(path), unreadable=reasons[path])
            else:
                best = np.argsort(-rows[path], kind="stable")[:top]
                yield Prediction(str(path), tuple(Guess(bundle.classes[k], float(rows[path][k])) for k in best))


def probabilities(bundle: Bundle, pictures: Sequence[Image.Image], device: torch.device | str = "cpu") -> np.ndarray:
    """(N, K) float32, each row summing to 1, of pictures of any sizes."""
    if not pictures:
        return np.empty((0, len(bundle.classes)), np.float32)
    with torch.inference_mode():
        x = network_input(bundle, pictures).to(device)
        return bundle.net.eval().to(device)(x).softmax(1).float().cpu().numpy()


def network_input(bundle: Bundle, pictures: Sequence[Image.Image]) -> torch.Tensor:
    """(N, C, H, W) float32: what the network sees of `pictures`."""
    pixels = np.stack([test_view(picture, bundle.preprocessing) for picture in pictures])
    return to_input(torch.from_numpy(pixels), bundle.preprocessing)
